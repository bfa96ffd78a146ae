"""How every benchmark times: CUDA graphs of calls over rotating buffers, median of replays, conditions first; and whole
steps of a decoder, one behind the other.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch

WARM_SECONDS = 0.06
"""How long a graph is replayed before it is timed: after other work a GPU is up to a tenth slower for a while."""


def need_gpu(remedy: str = "--tiny shows on a CPU what it does") -> None:
    """Raises SystemExit where there is no CUDA device, before anything is loaded or written."""
    if not torch.cuda.is_available():
        raise SystemExit(f"this is measured on a CUDA GPU, and PyTorch finds none here; {remedy}")


def need_plots(parser: ArgumentParser) -> None:
    """A usage error where matplotlib is missing, before anything is measured."""
    if find_spec("matplotlib") is None:
        parser.error("a plot needs matplotlib, which is not installed; pip install 'sparse-compile[bench]'")


def conditions() -> dict[str, Any]:
    """What the figures depend on: GPU, versions, commit and command."""
    commit = os.environ.get("SPARSE_COMPILE_COMMIT", "")  # for a copy of the tree that has no .git
    if not commit:
        found = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        commit = found.stdout.strip() or "unknown"
    return {
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU)",
        "torch": torch.__version__,
        "triton": version("triton"),
        "transformers": version("transformers"),
        "commit": commit,
        "command": " ".join(
            [
                "python",
                "-m",
                "benchmarks." + sys.argv[0].rsplit("/", 1)[-1].removesuffix(".py"),
                *sys.argv[1:],
            ]
        ),
    }


def graph_time(
    calls: list[Callable[[], Any]],
    replays: int = 7,
    least_ms: float = 2.0,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> float:
    """Microseconds per call: all calls in one CUDA graph, repeated to at least `least_ms`, median of replays.

    The calls should work on different memory, more of it together than the L2 cache holds. Each repetition of all calls
    is made inside `around()`.
    """
    side = torch.cuda.Stream(priority=-1)  # as the runtime records its graphs
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
        torch.cuda.synchronize()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        end.record()
        torch.cuda.synchronize()
        rounds = max(1, min(50, int(least_ms / max(1e-3, start.elapsed_time(end)))))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for _ in range(rounds):
                with around():
                    for call in calls:
                        call()
    torch.cuda.current_stream().wait_stream(side)
    until = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < until:
        graph.replay()
        torch.cuda.synchronize()
    times = []
    for _ in range(replays):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    del graph
    return statistics.median(times) * 1000 / (rounds * len(calls))


@dataclass(frozen=True)
class StepTime:
    """Milliseconds per step: on the device's own clock from the first to the last step, and on the wall's."""

    device_ms: float
    wall_ms: float


def step_time(step: Callable[[], Any], warm: int, steps: int) -> StepTime:
    """Time `steps` steps in a row after `warm` others. Nothing waits between them that the steps do not wait for."""
    for _ in range(warm):
        step()
    synchronize()
    on_cuda = torch.cuda.is_available()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_cuda else []
    start = time.perf_counter()
    if events:
        events[0].record()
    for _ in range(steps):
        step()
    if events:
        events[1].record()
    synchronize()
    wall = (time.perf_counter() - start) * 1000 / steps
    return StepTime(events[0].elapsed_time(events[1]) / steps if events else wall, wall)


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
