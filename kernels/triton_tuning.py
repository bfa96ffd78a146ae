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

    Retained keys (consume): the same with `kept_block`, `kept_stages`, `min_kept` and `max_kept`.

    Capture: attention also sums the keys above up to `guesses` guessed cuts, as many as the tile has room for. The
    search for the cut gives each (row, head) one program, whose threads hold about `thread_scores` scores each, up to
    `register_scores` in all, short rows in a tensor of `small_scores`. Units are then listed in pieces of up to `piece`
    keys, `thread_keys` per thread, and values are summed in steps of `gather_block`.

    `stages`, `span`, `thread_scores`, `register_scores`, `small_scores`, `piece` and `thread_keys` change no bits;
    everything else does.
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
    guesses: int = 3
    register_scores: int = 32768
    small_scores: int = 2048
    thread_scores: int = 32
    piece: int = 2048
    thread_keys: int = 16
    gather_block: int = 8

    def __post_init__(self) -> None:
        free = ("stages", "kept_stages", "guesses", "span")
        for name, value in vars(self).items():
            if name not in free and (value < 1 or value & (value - 1)):
                raise ValueError(f"{name}={value} must be a power of two")
        if self.small_scores > self.register_scores:
            raise ValueError(f"small_scores={self.small_scores} must not exceed {self.register_scores=}")
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


def tiles_for(attention: Attention) -> Tiles:
    """The tiles of one call."""
    bytes_per_key = attention.head_dim * attention.q.element_size()
    if bytes_per_key > 512:
        return Tiles(block=16, kept_block=16)
    if bytes_per_key > 256:
        return Tiles(block=32, kept_block=64)
    return Tiles()
