"""Streams of their own, on which what captures select is worked out beside the layers that follow.

What a capture selects is not read before the same site consumes, a loop later, while the selection itself is a few
small kernels, one behind the other, that leave most of the GPU idle. Inside `beside` selections are launched on `LANES`
streams in turn, so that as many of them may run at a time. A consume waits for what its own site selected, if nobody
has, and the block's end for everything. Bits do not change. A CUDA graph that captures the whole block has the
selections as branches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

LANES = 2
"""How many selections may run at a time."""

HELD_BYTES = 1 << 28
"""Scratch that work which may still run beside can hold. More of it, and what comes next waits for the oldest."""


@dataclass(frozen=True)
class _Work:
    """Work on one of the lanes: what it fills, when it is done, whose memory it uses, and how much that is."""

    lane: int  # from 1 on
    fills: Hashable
    done: torch.cuda.Event
    holding: object
    size: int


@dataclass
class _Side:
    """The lanes of one device, and the work on them that nothing has waited for, the oldest first."""

    streams: list[torch.cuda.Stream]
    blocks: int = 0  # how many `beside` blocks are open
    newest: int = 0  # the lane of the newest work
    works: deque[_Work] = field(default_factory=deque)


_sides: dict[torch.device, _Side] = {}


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Selections of captures on this device may run beside what follows them, until the block ends."""
    if device.type != "cuda":
        yield
        return
    device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    if device not in _sides:
        _sides[device] = _Side([torch.cuda.Stream(device) for _ in range(LANES)])
    side = _sides[device]
    side.blocks += 1
    try:
        yield
    finally:
        side.blocks -= 1
        _wait(side, device, len(side.works))


def run_beside(
    device: torch.device, work: Callable[[int], None], fills: Hashable, holding: object, size: int
) -> None:
    """Launch `work` on tensors of `device`, inside a `beside` block on one of the lanes; it is told on which, from 1
    on, and outside of a block 0, for the current stream.

    fills: what readers name in `wait_for`. holding owns the `size` bytes of scratch that the work uses.
    """
    side = _sides.get(device)
    if side is None or not side.blocks:
        work(0)
        return
    side.newest = lane = side.newest % len(side.streams) + 1
    stream = side.streams[lane - 1]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        work(lane)
        side.works.append(_Work(lane, fills, stream.record_event(), holding, size))


def make_room(device: torch.device, size: int) -> bool:
    """Let the current stream wait for the oldest work, until what runs beside leaves room for `size` more bytes.
    Returns whether it waits.
    """
    side = _sides.get(device)
    if side is None or not side.works:
        return False
    held, count = sum(work.size for work in side.works) + size, 0
    while held > HELD_BYTES and count < len(side.works):
        held -= side.works[count].size
        count += 1
    return _wait(side, device, count)


def wait_for(device: torch.device, fills: Hashable) -> bool:
    """Let the current stream wait for the work that fills this, and for all before it. Returns whether it waits.

    It waits for all but the newest work of each lane in any case: those have ended long since where works are as far
    apart as the layers of a model, and a kernel behind a wait cannot start early. So of many readers few wait.
    """
    side = _sides.get(device)
    if side is None:
        return False
    found = [at for at, work in enumerate(side.works) if work.fills == fills]
    return _wait(side, device, max(found[-1] + 1, len(side.works) - len(side.streams)) if found else 0)


def _wait(side: _Side, device: torch.device, count: int) -> bool:
    """Wait for the oldest `count` works; the memory held for them is free to be used again."""
    newest = dict[int, torch.cuda.Event]()
    for _ in range(count):
        work = side.works.popleft()
        newest[work.lane] = work.done
    for done in newest.values():
        torch.cuda.current_stream(device).wait_event(done)
    return bool(newest)
