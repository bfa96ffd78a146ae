"""The memory that the Triton kernels of one op call hand to each other."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from .arguments import Attention
from .arrivals import arrivals
from .triton_guesses import GUESS_FIELDS
from .triton_narrow import PLACE_FIELDS
from .triton_tuning import Tiles


class Scratch:
    """What the kernels say of their arguments says what each of these is for. Nothing is initialised."""

    def __init__(self, attention: Attention, tiles: Tiles, capacity: int, units: int) -> None:
        """`capacity` of the store where rows may capture, else 0. units: the most that a row may have."""
        lines, device = attention.rows * attention.heads, attention.q.device
        self.tiles = tiles
        self.units = max(2, next_power_of_2(units))
        self.width = next_power_of_2(max(16, attention.head_dim))
        self.keys = attention.max_pages * attention.page_size
        self.copies = _copies(attention) if capacity else 1
        self.guesses = min(tiles.guesses, self.copies - 1)

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.part_acc = empty(lines, self.units, self.width)
        self.part_m, self.part_l = empty(lines, self.units), empty(lines, self.units)
        self.arrived = arrivals(device, lines)  # one per row and head
        if not capacity:
            lines = 0
        self.long = self.keys > tiles.short  # some rows may be
        room = max(tiles.short, tiles.piece, tiles.narrow_piece, tiles.listed)
        self.scores = _with_room(lines, 16 * cdiv(self.keys, 16), room, device)
        self.lists = _with_room(lines if self.long else 0, 16 * cdiv(self.keys, 16), room, device)
        self.places = empty(lines, self.units, PLACE_FIELDS, dtype=torch.int32)
        self.stats = empty(lines, 2)
        self.guess_acc = empty(lines, self.units, self.guesses, self.width)
        self.guess_stats = empty(lines, self.units, self.guesses, GUESS_FIELDS)
        self.cuts, self.starts = empty(lines, 2, dtype=torch.int32), empty(lines, 2)
        self.fixes, self.weights = empty(lines, capacity, dtype=torch.int32), empty(lines, capacity)

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in vars(self).values() if isinstance(x, Tensor))


def _with_room(lines: int, width: int, room: int, device: torch.device) -> Tensor:
    """float32 [lines, width], behind which `room` more can be read."""
    size = lines * width
    return torch.empty(size + room if lines else 0, device=device)[:size].view(lines, width)


def _copies(a: Attention) -> int:
    """How often each query fits into half a tile of 16 rows: once where rows share a tile, or where a bias makes
    scores that need not be distributed as guesses assume.
    """
    return 1 if a.query_rows > 1 or a.bias is not None else max(1, 8 // a.group)
