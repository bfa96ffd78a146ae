"""Seats: the lines of one block table on the device, which rows of every step point into.

A running request holds one seat. Its line of the table changes only when its pages do, so that a step copies no table,
and a CUDA graph that was captured over the table stays valid. Line 0 is the dummy: page 0 throughout.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

REACHED = 3  # entries of `SeatTable.reached` before the tokens


class OutOfSeats(RuntimeError):  # noqa: N818 (an event of scheduling, not a mistake)
    """All seats are taken."""


class SeatTable:
    """`block_table` int32 [1 + seats, pages of the longest sequence] and `last_token` int64 [1 + seats].

    lines: rows of one seat that may be under way at once, each with a line of its own for what it carries.

    last_token holds the newest sampled token of each seat, so that the next step can be submitted before the host has
    read it. `reached` int64 [2, REACHED + lines, 1 + seats] is what a round of speculation leaves for the next one of
    its seat, for rounds in turn: the position of the row that comes next, for pipelines how many rows are under way and
    how many steps the first of them has behind it, then their tokens. Work is stream-ordered: a line that is rewritten
    is seen by later steps only.
    """

    def __init__(self, seats: int, max_pages: int, device: torch.device | str, lines: int = 1) -> None:
        if seats < 1 or max_pages < 1:
            raise ValueError(f"seats={seats} and max_pages={max_pages} must be at least 1")
        self.seats, self.max_pages = seats, max_pages
        self.carry_lines = lines * (1 + seats)  # lines 0, 1 + seats, ... belong to the dummy
        self.block_table = torch.zeros(1 + seats, max_pages, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(1 + seats, dtype=torch.int64, device=device)
        self.reached = torch.zeros(2, REACHED + lines, 1 + seats, dtype=torch.int64, device=device)
        self.device = self.block_table.device
        self._free = list(range(seats, 0, -1))

    @property
    def free_seats(self) -> int:
        return len(self._free)

    def carry_line(self, seat: torch.Tensor, line: torch.Tensor) -> torch.Tensor:
        """Where the `line`-th of the rows of `seat` keeps what it carries; that of the first is `seat`."""
        return seat + line * (1 + self.seats)

    def take(self, pages: Sequence[int]) -> int:
        """A free seat whose line holds `pages`. Raises OutOfSeats when there is none."""
        if not self._free:
            raise OutOfSeats(f"all {self.seats} seats are taken; wait for a request to finish")
        self.write(self._free[-1], pages)  # may fail: then nothing is taken
        return self._free.pop()

    def write(self, seat: int, pages: Sequence[int]) -> None:
        """Replaces the line of `seat`: its pages, then page 0."""
        if len(pages) > self.max_pages:
            raise ValueError(f"{len(pages)} pages exceed the table's {self.max_pages}; raise max_context")
        line = torch.zeros(self.max_pages, dtype=torch.int32, device="cpu")
        line[: len(pages)] = torch.tensor(pages, dtype=torch.int32, device="cpu")
        self.block_table[seat].copy_(to_device(line, self.device), non_blocking=True)

    def release(self, seat: int) -> None:
        """Gives a seat back. ValueError for one that is not taken."""
        if not 1 <= seat <= self.seats or seat in self._free:
            raise ValueError(f"seat {seat} is not taken")
        self._free.append(seat)

    def check_integrity(self, taken: Sequence[int]) -> None:
        """Raises RuntimeError unless the free seats and `taken` are all seats, each once."""
        if sorted([*self._free, *taken]) != list(range(1, self.seats + 1)):
            raise RuntimeError(
                f"seat table broken: {len(self._free)} free + {len(taken)} taken are not the {self.seats} seats, "
                "each once"
            )


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on `device`, without waiting: it goes through page-locked memory on CUDA."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
