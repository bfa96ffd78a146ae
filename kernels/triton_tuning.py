"""Tile sizes of the Triton kernels, by head size and dtype alone.

They must not depend on the number of rows or on lengths: a row's order of additions, and so its bits, follows from its
own length and from these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from triton import cdiv

from .arguments import Attention


@dataclass(frozen=True)
class Tiles:
    """Sizes of one call. `warps` is Triton's num_warps.

    All keys (dense, capture): a step of the inner loop takes `block` keys; a unit has at least `min_unit` keys, and a
    row at most `max_units` units. A program takes `span` of them; `stages` is the depth of its load pipeline. None
    leaves either to the number of programs.

    Retained keys (consume): the same with `kept_block`, `kept_stages`, `min_kept` and `max_kept`. Where a row can have
    no more than `few_kept`, a step takes so many, of which one program needs few enough registers and shared memory
    for a fourth on a multiprocessor; in half precision one step of fewer keys has the same bits.

    Capture: attention also sums the keys above up to `guesses` guessed cuts, as many as the tile has room for. In
    rows of up to `short` keys one program per (row, head) selects, whose threads hold about `thread_scores` scores
    each while they search for the cut, of the shortest rows in a tensor of `small_scores`. In longer ones it looks
    at a `sample`, and each unit has a program of `narrow_warps` warps that reads its `narrow_piece` scores at a
    time; the last one keeps `listed` scores of each unit's list in registers and reads what is beyond in steps of
    `listed_step`. Then each unit's retained keys are listed in pieces of up to `piece` keys. In all rows a thread
    lists `thread_keys` of a piece, and values are summed in steps of `gather_block`, as many of which are on their
    way at a time as make `gather_bytes` per thread.

    `block`, `min_unit` and `max_units`, the same three of retained keys, `guesses`, `short` and `gather_block` change
    bits, and so does `few_kept` in float32, where `tiles_for` leaves it without effect; nothing else does.
    """

    block: int = 64
    stages: int | None = None
    span: int | None = None
    min_unit: int = 256
    max_units: int = 16
    warps: int = 4
    kept_block: int = 128
    kept_stages: int = 2
    min_kept: int = 256
    max_kept: int = 16
    few_kept: int = 64
    guesses: int = 3
    short: int = 8192
    small_scores: int = 2048
    thread_scores: int = 32
    sample: int = 1024
    narrow_warps: int = 4
    narrow_piece: int = 2048
    listed: int = 256
    listed_step: int = 64
    piece: int = 1024
    thread_keys: int = 8
    gather_block: int = 8
    gather_bytes: int = 64

    def __post_init__(self) -> None:
        free = ("stages", "kept_stages", "guesses", "span")
        for name, value in vars(self).items():
            if name not in free and (value < 1 or value & (value - 1)):
                raise ValueError(f"{name}={value} must be a power of two")
        for name in ("small_scores", "sample"):
            if getattr(self, name) > self.short:
                raise ValueError(f"{name}={getattr(self, name)} must not exceed short={self.short}")
        if max(self.narrow_piece, self.piece) > 1 << 14:
            raise ValueError(
                f"narrow_piece={self.narrow_piece} and piece={self.piece} must be at most {1 << 14}: two counts of a "
                "piece share an integer"
            )
        if not 0 <= self.guesses <= 7:
            raise ValueError(
                f"guesses={self.guesses} must lie in 0 .. 7: half a tile of 16 rows, less the query"
            )
        if self.block > 128 or self.small_scores < 4 * self.block:
            raise ValueError(
                f"block={self.block} must be at most 128 and a quarter of small_scores={self.small_scores}: retained "
                "keys are counted by blocks, four blocks at a time"
            )
        if self.min_unit < max(4, self.block):
            raise ValueError(f"min_unit={self.min_unit} must hold a step of block={self.block} keys, and 4")

    def units(self, keys: int) -> tuple[int, int]:
        """(keys of the largest unit, most units) of rows with up to `keys` keys: a shorter row may have more units than
        the longest, smaller ones.
        """
        largest = max(self.min_unit, self.block * cdiv(cdiv(keys, self.max_units), self.block))
        return largest, min(self.max_units, cdiv(keys, self.min_unit))

    def one_size(self, capacity: int, block: int) -> bool:
        """Whether units of retained keys have `min_kept` keys in every row that retains up to `capacity`."""
        return block * cdiv(cdiv(capacity, self.max_kept), block) <= self.min_kept

    def consuming(self, capacity: int) -> tuple[int, int, int]:
        """(keys of a step, stages, programs that are to share a multiprocessor, 0 for as many as fit) where rows retain
        up to `capacity` keys.
        """
        if capacity <= self.few_kept < self.kept_block:
            return self.few_kept, 1, 4
        return self.kept_block, self.kept_stages, 0


def tiles_for(attention: Attention) -> Tiles:
    """The tiles of one call."""
    bytes_per_key = attention.head_dim * attention.q.element_size()
    if bytes_per_key > 512:
        return Tiles(block=16, kept_block=16)
    if bytes_per_key > 256:
        return Tiles(block=32, kept_block=64, max_units=32)  # wide heads are few
    return Tiles() if attention.q.element_size() == 2 else Tiles(few_kept=Tiles.kept_block)
