"""Where the time of a step goes: kernels by class, from torch.profiler."""

from __future__ import annotations

import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.timing import synchronize
from sparse_compile import kernels

# The first pattern that is found in a kernel's name decides. Our own kernels are known by name, and Inductor's kernels,
# which bear the names of what was fused, by their beginning.
CLASSES = {
    "attention": r"attention|fmha|flash|mha_|sdpa|paged",
    "products": r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|matmul|skinny",
    "copies": r"memcpy|memset|copy|catarray",
    "sampling": r"argmax|greedy|softmax|logsumexp|multinomial|sort",
    "pointwise and norms": r"elementwise|reduce|vectorized|index|gather|scatter|cumsum",
}
OTHER = "other"
NAME = 60
"""Characters of a kernel's name in a list."""


SELECTIONS = ("triton_select", "triton_narrow")
"""Modules of kernels that may run on a second stream, beside the layers that follow their capture."""


def our_kernels() -> frozenset[str]:
    """Names of the attention kernels of this project, as they are launched. The others are known by theirs."""
    names = [found.name for found in pkgutil.iter_modules(kernels.__path__)]
    others = ("triton_skinny", "triton_greedy")
    return kernels_of(name for name in names if name.startswith("triton_") and name not in others)


def kernels_of(modules: Iterable[str]) -> frozenset[str]:
    """Names of the kernels in some modules of `kernels/`."""
    return frozenset(
        name
        for module in modules
        for name, value in vars(import_module(f"{kernels.__name__}.{module}")).items()
        if type(value).__name__ in ("JITFunction", "InterpretedFunction", "Autotuner")
    )


def classify(name: str, ours: Iterable[str] = ()) -> str:
    """The class of a kernel by its name."""
    if name in set(ours):
        return "attention"
    if name.startswith("triton_"):
        return "products" if name.startswith(("triton_tem", "triton_mm")) else "pointwise and norms"
    for kind, pattern in CLASSES.items():
        if re.search(pattern, name, re.IGNORECASE):
            return kind
    return OTHER


@dataclass(frozen=True)
class Event:
    """One kernel, or one operator where there is no CUDA; microseconds. A kernel begins where the one ahead of it on
    its stream has ended (see `in_turn`). spent: an operator's, without those in it.
    """

    name: str
    begin: float
    end: float
    spent: float


def profiled(step: Callable[[], Any], steps: int) -> list[Event]:
    """What ran in `steps` steps after one more."""
    on_cuda = torch.cuda.is_available()
    step()
    synchronize()
    with profile(activities=[ProfilerActivity.CUDA if on_cuda else ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            step()
        synchronize()
    events = []
    for event in found.events() or ():
        if on_cuda and event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        begin, end = event.time_range.start, event.time_range.end
        events.append(Event(event.name, begin, end, end - begin if on_cuda else event.self_cpu_time_total))
    return in_turn(events, kernels_of(SELECTIONS)) if on_cuda else events


def in_turn(events: Iterable[Event], beside: Collection[str]) -> list[Event]:
    """Kernels without the time in which they wait for the one ahead of them: some are launched before it has ended, and
    do next to nothing until then. Those named `beside` run on a stream of their own.
    """
    turned, ended = [], {True: float("-inf"), False: float("-inf")}
    for event in sorted(events, key=lambda event: event.end):
        apart = event.name in beside
        begin = min(max(event.begin, ended[apart]), event.end)
        ended[apart] = event.end
        turned.append(replace(event, begin=begin, spent=event.end - begin))
    return turned


def kernel_lines(events: Sequence[Event], steps: int, most: int) -> list[str]:
    """The names that take the most time of a step, shortened, with their number and microseconds per step; and the time
    of all, that in which any ran, and that from the first to the last, per step.
    """
    spent: Counter[str] = Counter()
    for event in events:
        spent[event.name] += event.spent
    times = Counter(event.name for event in events)
    lines = [
        f"{name if len(name) <= NAME else name[: NAME - 3] + '...':{NAME}s} "
        f"{times[name] / steps:8.1f} x {total / steps:10.1f} us"
        for name, total in spent.most_common(most)
    ]
    ranges = [(event.begin, event.end) for event in events]
    whole = max(end for _, end in ranges) - min(begin for begin, _ in ranges) if ranges else 0.0
    return [
        *lines,
        f"per step: {len(events) / steps:.1f} kernels, {spent.total() / steps:.1f} us of kernels, "
        f"{covered(ranges) / steps:.1f} us with any running, {whole / steps:.1f} us in all",
    ]


def kernel_classes(step: Callable[[], Any], steps: int = 5) -> tuple[dict[str, float], float]:
    """Milliseconds per step by class, the largest first, and of any kernel outside attention.

    Of kernels on CUDA, from where the one ahead of them has ended (`in_turn`); of operators where there is none.
    Selections of captures, which run beside what follows, count in full in attention. The time outside attention counts
    every moment once.
    """
    times: dict[str, float] = {}
    others: list[tuple[float, float]] = []
    ours, on_cuda = our_kernels(), torch.cuda.is_available()
    for event in profiled(step, steps):
        kind = classify(event.name, ours)
        times[kind] = times.get(kind, 0.0) + event.spent / 1000 / steps
        if kind != "attention":
            others.append((event.begin, event.end))
    outside = covered(others) / 1000 / steps if on_cuda else sum(times.values()) - times.get("attention", 0.0)
    return dict(sorted(times.items(), key=lambda item: -item[1])), outside


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals (begin, end)."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(intervals):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def table(title: str, times: dict[str, float], traffic: dict[str, int], bandwidth: float) -> str:
    """Lines for people. traffic: bytes that a class must move; bandwidth: bytes per second of the floor."""
    total = sum(times.values())
    lines = [f"{title}: {total:.3f} ms of kernels per step"]
    for kind, spent in times.items():
        line = f"  {kind:20s} {spent:8.3f} ms {100 * spent / total:5.1f} %"
        if kind in traffic:
            floor = traffic[kind] / bandwidth * 1000
            line += (
                f"  {traffic[kind] / 1e9:7.2f} GB  floor {floor:7.3f} ms  {100 * floor / spent:5.1f} % of it"
            )
        lines.append(line)
    return "\n".join(lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Stacked bars of the rows that have a breakdown, one for each system, side by side at each point of a model."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.get("breakdown")]
    places = list(dict.fromkeys(_place(row) for row in rows))
    rows.sort(key=lambda row: places.index(_place(row)))
    kinds = dict.fromkeys(kind for row in rows for kind in row["breakdown"])
    several = len({row.get("model") for row in rows}) > 1
    names = []
    for row in rows:
        lines = [f"{row['batch']}x{row['context']}", *row["system"].split("-")]
        names.append("\n".join([row["model"], *lines] if several else lines))
    figure, axes = pyplot.subplots(figsize=(3.5 + 1.1 * len(rows), 4.5))
    bottom = [0.0] * len(rows)
    for kind in kinds:
        heights = [row["breakdown"].get(kind, 0.0) for row in rows]
        axes.bar(names, heights, bottom=bottom, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.plot(names, [row["floor_ms"] for row in rows], "k_", markersize=30, label="floor")
    axes.set_ylabel("ms per step")
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _place(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("model"), row["batch"], row["context"]
