"""A second stream, on which a capture's selection runs beside the layers that follow.

What a capture selects is not read before the same site consumes, a loop later, while the selection itself is a few
small kernels that leave most of the GPU idle. Inside `beside` they are launched on a stream of their own, one after the
other; the block's end waits for them, and so does every op that reads or writes what they work on. Bits do not change.
A CUDA graph that captures the whole block has them as a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass
class _Side:
    """The stream of one device, and the work on it that nothing has waited for."""

    stream: torch.cuda.Stream
    blocks: int = 0  # how many `beside` blocks are open
    done: torch.cuda.Event | None = None
    held: list[object] = field(default_factory=list)  # whose memory that work uses


_sides: dict[torch.device, _Side] = {}


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Selections of captures on this device may run beside what follows them, until the block ends."""
    if device.type != "cuda":
        yield
        return
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    if device not in _sides:
        _sides[device] = _Side(torch.cuda.Stream(device))
    side = _sides[device]
    side.blocks += 1
    try:
        yield
    finally:
        side.blocks -= 1
        join(device)


def run_beside(device: torch.device, work: Callable[[], None], holding: object) -> None:
    """Launch `work` on tensors of `device`, on the second stream inside a `beside` block; `holding` owns memory that it
    uses.
    """
    side = _sides.get(device)
    if side is None or not side.blocks:
        work()
        return
    side.held.append(holding)
    side.stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side.stream):
        work()
        side.done = side.stream.record_event()


def join(device: torch.device) -> None:
    """Let the current stream wait for what runs beside it; the memory held for that is free to be used again."""
    side = _sides.get(device)
    if side is not None and side.done is not None:
        torch.cuda.current_stream(device).wait_event(side.done)
        side.done = None
        side.held.clear()
