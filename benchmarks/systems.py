"""The decoders that are compared. Each has its KV caches filled with random numbers up to the context, takes steps of
one token per sequence, and gives its memory back when it is closed.

The cost of a step does not depend on the numbers in a cache, so that no prompt has to be computed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Protocol

import torch
from transformers import DynamicCache, StaticCache

from benchmarks.timing import synchronize
from sparse_compile.compile import EngineFactory, compile_model
from sparse_compile.compiled import CompiledModel
from sparse_compile.config import SparseConfig
from sparse_compile.passes.graph import is_call
from sparse_compile.passes.program import Variant
from sparse_compile.runtime.compiler import PieceCompiler
from sparse_compile.runtime.request import SamplingParams

ALWAYS_DENSE = 2**31 - 1  # dense_below for which no row is long enough to be sparse


@dataclass(frozen=True)
class Point:
    """`batch` sequences that each have `context` tokens behind them."""

    batch: int
    context: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.context}"


@dataclass
class Setup:
    """What all systems of a model share. room: tokens that a sequence can get beyond its context."""

    name: str
    model: Any
    config: SparseConfig
    room: int
    compile_backend: str = "inductor"

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    @cached_property
    def compiled(self) -> CompiledModel:
        return compile_model(self.model, self.config)

    @cached_property
    def _compiler(self) -> PieceCompiler:
        return self.factory(sparse=True, shared=False).compiler

    def factory(self, sparse: bool, shared: bool = True, **options: Any) -> EngineFactory:
        """Makes engines; one program and one compiler serve the dense and the sparse system."""
        options = {**({} if sparse else {"dense_below": ALWAYS_DENSE}), **options}
        made = EngineFactory(self.model, replace(self.config, **options), self.compiled.program)
        if shared:
            made.compiler = self._compiler
        return made

    def kv_bytes(self, point: Point, sparse: bool) -> int:
        """Bytes of keys and values that one step reads (an upper bound for sparse rows)."""
        reads = self.compiled.report((point.context,)).reads[0]
        return point.batch * (reads.sparse_bytes if sparse else reads.dense_bytes)

    def weight_bytes(self, point: Point) -> int:
        """Bytes of weights that one step reads."""
        return read_weights(self.compiled.program.variants["dense"], point.batch)


def read_weights(variant: Variant, rows: int) -> int:
    """Bytes of weights that a step of `rows` rows reads: each tensor once for every operation on it, in each stage that
    runs, so that layers in a loop count once per loop and the others once. Of embeddings, a line per row.
    """
    read = 0
    for stage in variant.stages:
        for node in stage.module.graph.nodes:
            tensor = attrgetter(node.target)(stage.module) if node.op == "get_attr" else None
            if not isinstance(tensor, torch.Tensor):
                continue
            for user in node.users:
                looked_up = is_call(user, torch.ops.aten.embedding.default)
                read += rows * tensor[0].nbytes if looked_up else tensor.nbytes
    return read


class System(Protocol):
    """A decoder at one point. `step` advances every sequence by one token."""

    def step(self) -> None: ...

    def close(self) -> None: ...


class Ours:
    """Our engine. All that this benchmark knows of the engine is here.

    The pool is filled with random keys and values, and `prefill` is replaced by one that computes nothing, so that the
    engine takes its requests through the prompt in its own way and decodes over what is in the pool.
    """

    def __init__(self, setup: Setup, point: Point, sparse: bool = True, **options: Any) -> None:
        self.point = point
        chunk = point.batch * point.context
        factory = setup.factory(sparse, prefill_chunk=chunk, **options)
        self.engine = factory(point.batch, point.context + setup.room)
        for pool in (self.engine.pool.k_pool, self.engine.pool.v_pool):
            for plane in pool:
                plane.normal_()
        self._skip_prompts(setup)
        for row in range(point.batch):
            prompt = torch.randint(3, setup.vocabulary, (point.context,)).tolist()
            self.engine.add_request(prompt, SamplingParams(max_new_tokens=setup.room), f"row-{row}")
        while any(self.engine.metrics(f"row-{row}").new_tokens == 0 for row in range(point.batch)):
            self.engine.step()

    def _skip_prompts(self, setup: Setup) -> None:
        def prefill(plan: Any) -> torch.Tensor:
            shape = (plan.logit_rows.shape[0], setup.vocabulary)
            return torch.randn(shape, dtype=setup.model.dtype, device=setup.device)

        self.engine.executor.prefill = prefill  # type: ignore[method-assign]

    def step(self) -> None:
        for output in self.engine.step():
            if output.error is not None:
                raise output.error

    def graph_ms(self) -> float | None:
        """Time of one replay of the graph that the last steps ran, or None without graphs."""
        buckets = getattr(self.engine.executor, "buckets", {})
        if not buckets:
            return None
        from benchmarks.timing import step_time

        synchronize()
        last = list(buckets.values())[-1]
        return step_time(last.graph.replay, 3, 30).device_ms

    def close(self) -> None:
        for row in range(self.point.batch):
            self.engine.abort(f"row-{row}")
        self.engine.check_integrity()
        del self.engine
        free_memory()


class _Transformers:
    """The model's own forward over a cache of transformers."""

    def __init__(self, setup: Setup, point: Point) -> None:
        self.model, self.point = setup.model, point
        self.config = setup.model.config
        self.heads, self.head_dim = _kv_shape(self.config)
        self.slots = getattr(self.config, "num_slots", self.config.num_hidden_layers)
        self.tokens = torch.randint(3, setup.vocabulary, (point.batch, 1), device=setup.device)
        self.positions = torch.full((point.batch, 1), point.context, device=setup.device)
        self.cache: Any = None

    def shape(self, length: int) -> tuple[int, ...]:
        return (self.point.batch, self.heads, length, self.head_dim)

    def call(self, forward: Callable[..., Any]) -> None:
        with torch.no_grad():
            out = forward(
                input_ids=self.tokens, position_ids=self.positions, cache=self.cache, use_cache=True
            )
            self.tokens.copy_(out.logits[:, -1:].argmax(-1))
        self.positions += 1

    def close(self) -> None:
        self.cache = None
        free_memory()


class TransformersEager(_Transformers):
    """A dynamic cache, as `generate` uses it by default, and scaled_dot_product_attention."""

    def __init__(self, setup: Setup, point: Point) -> None:
        super().__init__(setup, point)
        self.cache = DynamicCache()
        for slot in range(self.slots):
            k, v = (
                torch.randn(self.shape(point.context), dtype=self.model.dtype, device=setup.device)
                for _ in "kv"
            )
            self.cache.update(k, v, slot)

    def step(self) -> None:
        self.call(self.model)


class TransformersStatic(_Transformers):
    """A static cache under torch.compile with mode "reduce-overhead": CUDA graphs, compiled for this one shape."""

    def __init__(self, setup: Setup, point: Point) -> None:
        super().__init__(setup, point)
        from sparse_compile.models.ouro.cache import ensure_slots

        self.cache = StaticCache(config=self.config, max_cache_len=point.context + setup.room)
        ensure_slots(self.cache, self.slots)
        empty = torch.empty(self.shape(1), dtype=self.model.dtype, device=setup.device)
        for layer in self.cache.layers:
            layer.lazy_initialization(empty, empty)
            layer.keys.normal_()
            layer.values.normal_()
            layer.cumulative_length.fill_(point.context)
        torch._dynamo.reset()
        compiling = {"backend": setup.compile_backend, "dynamic": False}
        if setup.compile_backend == "inductor":
            compiling["mode"] = "reduce-overhead"
        self.forward = torch.compile(self.model.forward, **compiling)

    def step(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        self.call(self.forward)

    def close(self) -> None:
        self.forward = None
        torch._dynamo.reset()
        super().close()


def _continuous(setup: Setup, point: Point) -> System:
    from benchmarks.continuous import TransformersContinuous

    return TransformersContinuous(setup, point)


SYSTEMS: dict[str, Callable[[Setup, Point], System]] = {
    "sparse": lambda setup, point: Ours(setup, point, sparse=True),
    "dense": lambda setup, point: Ours(setup, point, sparse=False),
    "transformers-eager": TransformersEager,
    "transformers-static": TransformersStatic,
    "transformers-cb": _continuous,
}


def _kv_shape(config: Any) -> tuple[int, int]:
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return kv_heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def free_memory() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
