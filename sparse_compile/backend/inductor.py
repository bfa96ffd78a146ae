"""Handing a graph to Inductor, with the identity of our passes in its cache keys."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from sparse_compile.backend.options import BackendOptions
from sparse_compile.passes.cached_rewrite import OPS
from sparse_compile.passes.errors import PassError
from sparse_compile.passes.graph import PRODUCTS
from sparse_compile.passes.inductor import early_start, one_pass_reductions
from sparse_compile.passes.nodes import fake, fake_maybe

_COPIES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


def source_files() -> tuple[str, ...]:
    """Every file on which what we make of a graph depends: passes, ops and kernels, this front end."""
    from sparse_compile import kernels, passes

    rooms = [Path(module.__file__).parent for module in (kernels, passes) if module.__file__]
    rooms.append(Path(__file__).parent)
    return tuple(sorted(str(path) for room in rooms for path in room.glob("*.py")))


@functools.cache
def _sources_hash() -> bytes:
    return get_hash_for_files(source_files())


class CachesStay(CustomGraphPass):
    """Runs on Inductor's graph after its own passes: none of our ops may be given a copy of a cache.

    Its `uuid` covers our sources and options, so that Inductor's caches neither serve a graph made by other code or
    for other options, nor miss an equal one. It runs what the user had in this place first.
    """

    def __init__(self, options: BackendOptions, before: Any = None) -> None:
        self.options, self.before = options, before

    def __call__(self, graph: fx.Graph) -> None:
        if self.before is not None:
            self.before(graph)
        for node in graph.nodes:
            if node.target not in OPS.values():
                continue
            copied = [arg for arg in node.args[1:3] if isinstance(arg, fx.Node) and arg.target in _COPIES]
            if copied:
                raise PassError(f"{node.name} is given {copied[0].name}, a copy of a cache")

    def uuid(self) -> Any:
        theirs = self.before.uuid() if self.before is not None else None
        if self.before is not None and theirs is None:
            return None  # as Inductor has it: what cannot be identified is not cached
        return _sources_hash(), repr(self.options), theirs


def compile_with_inductor(
    graph: fx.GraphModule, inputs: list[Any], options: BackendOptions, few_rows: bool = False
) -> Callable[..., Any]:
    """Inductor on a graph from Dynamo, with the mode and options that the user chose.

    few_rows: whether it has products of a few rows. Its kernels are then made as the runtime has them made.
    """
    from torch._inductor.compile_fx import compile_fx

    patches = options.config_patches()
    if few_rows:
        patches = early_start(_device(graph), graph.graph) | patches
    mine = CachesStay(options, patches.get("post_grad_custom_post_pass"))
    patches["post_grad_custom_post_pass"] = mine
    _prepare_kernels(graph)
    with one_pass_reductions() if few_rows else nullcontext():
        compiled: Any = compile_fx(graph, inputs, config_patches=patches)
    return with_own_outputs(compiled) if patches.get("triton.cudagraphs") else compiled


def with_own_outputs(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Results of a CUDA graph live in its memory until it is replayed; the caller gets copies that stay valid.

    In a decode step they are the logits, and whatever else is small. What the step writes in place (caches) is no
    result.
    """

    def memory(value: Any) -> int | None:
        return (
            value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) and value.is_cuda else None
        )

    def run(*inputs: Any) -> Any:
        given = {memory(value) for value in inputs}
        results = compiled(*inputs)

        def own(value: Any) -> Any:
            return value if memory(value) in given | {None} else value.clone()

        if isinstance(results, tuple | list):
            return type(results)(own(value) for value in results)
        return own(results)

    return run


def _device(graph: fx.GraphModule) -> torch.device:
    """The first CUDA device that a graph computes on; the CPU if there is none."""
    values = (fake_maybe(node) for node in graph.graph.nodes)
    found = (value.device for value in values if value is not None and value.device.type == "cuda")
    return next(found, torch.device("cpu"))


def _prepare_kernels(graph: fx.GraphModule) -> None:
    """What the Triton kernels need once and for all is made now: memory that they keep between calls could not stay in
    a CUDA graph's pool, and while one is recorded nothing can be measured.
    """
    for node in graph.graph.nodes:
        value = fake_maybe(node.args[0]) if node.op == "call_function" and node.args else None
        if value is None or value.device.type != "cuda":
            continue
        if node.target in OPS.values():
            _prepare_attention(node, value)
        elif node.target in PRODUCTS.values():
            _prepare_product(node, value)


def _prepare_attention(node: fx.Node, query: torch.Tensor) -> None:
    from sparse_compile.kernels.arrivals import reserve
    from sparse_compile.kernels.dispatch import resolve

    if resolve(str(node.kwargs["implementation"]), "cuda", query.dtype, int(query.shape[2])) == "triton":
        # A symbolic batch is not asked for its size, which would fix it; the least reserve serves it.
        lines = [size for size in query.shape[:2] if isinstance(size, int)]
        reserve(query.device, math.prod(lines) if len(lines) == 2 else 1)


def _prepare_product(node: fx.Node, x: torch.Tensor) -> None:
    """Of a symbolic number of rows every number that the kernel serves is met sooner or later."""
    from sparse_compile.kernels.skinny_choice import prepare, shape_of
    from sparse_compile.kernels.skinny_parts import Norm

    weight, pairs = fake(node.args[1]), node.target in (PRODUCTS["gated"], PRODUCTS["rotary"])  # type: ignore[arg-type]
    up, gain = (fake_maybe(node.kwargs.get(name)) for name in ("up", "norm"))
    eps, mean = (node.kwargs.get(name, default) for name, default in (("eps", None), ("mean", True)))
    norm = None if eps is None else Norm(float(eps), gain, bool(mean))  # type: ignore[arg-type]
    rows = [size for size in x.shape[:-1] if isinstance(size, int)]
    known = len(rows) == x.dim() - 1
    prepare(shape_of(weight, pairs, norm, up), math.prod(rows) if known else None)
