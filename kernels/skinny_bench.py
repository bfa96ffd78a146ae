"""Times of a product of a few rows on a GPU: our kernel, the library, and what Inductor makes of the same lines.

Each in CUDA graphs over rotating copies of a weight, more than the L2 cache holds. Inductor is loaded when it is asked
for. It times the library's products and templates of its own (`max-autotune`), and fuses the norm and the activation
where it can: seconds for each product.
"""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton import cdiv

from .skinny import MAX_ROWS, Norm, eager
from .skinny_backend import launch
from .skinny_tuning import Tiles

if TYPE_CHECKING:
    from .skinny_choice import Shape

ROTATE_BYTES = 160 << 20  # weights that one measurement goes round; more than the L2 cache of any GPU so far


class Bench:
    """Weights beyond the L2 cache, and times of one product after another over them, in microseconds."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        copies = max(2, cdiv(ROTATE_BYTES, shape.product(1).weight_bytes))
        options: dict[str, Any] = {"dtype": shape.dtype, "device": shape.device}
        generator = torch.Generator(shape.device).manual_seed(0)  # the user's own is left where it is

        def values(lines: int) -> Tensor:
            return torch.empty(lines, shape.depth, **options).normal_(generator=generator)

        self.weights = [values(shape.lines) for _ in range(copies)]
        self.x = values(MAX_ROWS)
        gain = values(1)[0] if shape.norm == "weighted norm" else None
        self.norm = Norm(1e-6, gain, shape.mean) if shape.norm else None

    def ours(self, rows: int, tiles: Tiles) -> float | None:
        """None for tiles that the GPU has no room for."""
        x, gated = self.x[:rows], self.shape.gated
        try:
            run = functools.partial(launch, x, norm=self.norm)
            return time_calls([functools.partial(run, w, None, None, gated, tiles) for w in self.weights])
        except triton.runtime.errors.OutOfResources:
            return None

    def library(self, rows: int) -> float:
        return self._time(plain, rows)

    def inductor(self, rows: int) -> dict[str, float | None]:
        """{"inductor": time}, with None where Inductor fails, which a warning tells. Without memory for it {}, since
        another time there may be some.
        """
        try:
            # It times with random values.
            with torch.random.fork_rng([self.x.device] if self.x.is_cuda else []):
                run = tuned(plain, self.x[:rows], self.weights[0], self.shape.gated, self.norm)
                return {"inductor": self._time(run, rows)}
        except Exception as error:  # whatever a compiler may raise: the product runs without it
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:200]
            warnings.warn(
                f"SPARSE_COMPILE_TUNE=inductor: for {self.shape.key} at {rows} rows Inductor cannot be measured "
                f"({reason}); what runs is chosen without it",
                stacklevel=2,
            )
            return {} if isinstance(error, torch.OutOfMemoryError) else {"inductor": None}

    def _time(self, run: Callable[..., Tensor], rows: int) -> float:
        x, gated = self.x[:rows], self.shape.gated
        return time_calls([functools.partial(run, x, w, gated, self.norm) for w in self.weights])


def plain(x: Tensor, weight: Tensor, gated: bool, norm: Norm | None = None) -> Tensor:
    """The product as the library has it. x [M, K], weight [N, K] or, gated, [2 N, K] -> [M, N]."""
    return eager(x if norm is None else norm.apart(x), weight, gated=gated)


def tuned(function: Callable[..., Tensor], *given: Any) -> Callable[..., Tensor]:
    """`function` compiled by Inductor for arguments like `given`, each kernel by what was fastest. Raises what
    compilers raise, and RuntimeError where torch.compile is switched off and would run the function as it is.
    """
    from torch._dynamo.utils import counters

    assert isinstance(function, FunctionType)
    # Code of its own: Dynamo counts recompilations per code object, and each shape is one.
    code = function.__code__.replace(co_name=f"{function.__name__}_{time.monotonic_ns()}")
    own = FunctionType(code, function.__globals__, None, function.__defaults__, function.__closure__)
    options = torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    options["max_autotune_gemm_backends"] = "ATEN,TRITON"  # others need compilers of their own
    run = torch.compile(own, fullgraph=True, dynamic=False, options=options)
    before = counters["stats"]["unique_graphs"]
    run(*given)
    if counters["stats"]["unique_graphs"] == before:
        raise RuntimeError("torch.compile compiles nothing here; is it switched off (TORCH_COMPILE_DISABLE)?")
    return run


def time_calls(calls: list[Callable[[], Tensor]], replays: int = 5) -> float:
    """Microseconds per call, median of replays of a CUDA graph of all calls, at least 32."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph, rounds = torch.cuda.CUDAGraph(), cdiv(32, len(calls))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(rounds):
                for call in calls:
                    call()
        graph.replay()
        times = [_replay(graph) for _ in range(replays)]
    torch.cuda.current_stream().wait_stream(stream)
    return statistics.median(times) * 1000 / (rounds * len(calls))


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
