"""Leases: who may use a slot of the reference store, for which token, and who still reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from sparse_compile.runtime.fences import Fence


class OutOfSlots(RuntimeError):  # noqa: N818 (an event of scheduling, not a mistake)
    """No slot of the store is empty."""


class StalePlan(RuntimeError):  # noqa: N818
    """A lease is not the current one of its slot, or the slot is not in the state that the use needs."""


class SlotState(Enum):
    EMPTY = "empty"
    SOURCE_READY = "source-ready"  # leased: a capture may write it, nothing may read it yet
    REUSABLE = "reusable"  # captured: consumes may read it
    RETIRED = "retired"  # given up, its last readers may still be at work


@dataclass(frozen=True)
class Lease:
    """The right to use `slot` for the token at position `row` of `request`, until the next incarnation."""

    slot: int
    request: str
    row: int
    incarnation: int


@dataclass
class Slot:
    """The host's knowledge of one slot."""

    state: SlotState = SlotState.EMPTY
    lease: Lease | None = None
    incarnation: int = 0
    doubtful: bool = False  # an invalidation that only the device knows may have hit it
    open_readers: int = 0
    fences: list[Fence] = field(default_factory=list)


class Ticket:
    """One reader of a slot besides the store's own stream, such as a copy to the CPU. The slot waits for
    `close`.
    """

    def __init__(self, slot: Slot) -> None:
        self._slot: Slot | None = slot
        slot.open_readers += 1

    def close(self, fence: Fence) -> None:
        """The reader has submitted all it wants to read; `fence` passes when that work is complete."""
        if self._slot is None:
            raise RuntimeError("this ticket is closed already")
        self._slot.open_readers -= 1
        self._slot.fences.append(fence)
        self._slot = None
