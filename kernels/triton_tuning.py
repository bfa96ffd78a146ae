"""Tile sizes of the Triton kernels, by head size and dtype alone.

They must not depend on the number of rows or on lengths: a row's order of additions, and so its bits, follows from its
own length and from these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import Attention


@dataclass(frozen=True)
class Tiles:
    """Sizes of one call. `warps` is Triton's num_warps.

    All keys (dense, capture): a step of the inner loop takes `block` keys; a unit has at least `min_unit` keys, and a
    row at most `max_units` units. A program takes one unit, or two with `pair`; `stages` is the depth of its load
    pipeline. None leaves either to the number of programs.

    Retained keys (consume): the same with `kept_block`, `kept_stages`, `min_kept` and `max_kept`.

    Selection: `slice` keys are compacted at once, by at most `max_parts` programs per row and head; one program of
    `threshold_warps` warps keeps up to `register_scores` scores, short rows in a tensor of `small_scores`.
    `gather_block`, `gather_stages`: steps of the sum of retained values.

    `stages`, `pair` and the selection's sizes other than `slice`, `max_parts` and `gather_block` change no bits;
    everything else does.
    """

    block: int = 64
    stages: int | None = None
    pair: bool | None = None
    min_unit: int = 256
    max_units: int = 16
    warps: int = 4
    kept_block: int = 128
    kept_stages: int = 2
    min_kept: int = 256
    max_kept: int = 16
    slice: int = 1024
    max_parts: int = 32
    register_scores: int = 32768
    small_scores: int = 2048
    threshold_warps: int = 8
    gather_block: int = 128
    gather_stages: int = 2

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if type(value) is int and "stages" not in name and (value < 1 or value & (value - 1)):
                raise ValueError(f"{name}={value} must be a power of two")
        if not self.slice <= self.small_scores <= self.register_scores:
            raise ValueError(
                f"slice={self.slice} <= small_scores={self.small_scores} <= register_scores="
                f"{self.register_scores} must hold: a slice is counted within one tensor of scores"
            )
        if self.min_unit < self.block:
            raise ValueError(f"min_unit={self.min_unit} must hold a step of block={self.block} keys")


def tiles_for(attention: Attention) -> Tiles:
    """The tiles of one call."""
    bytes_per_key = attention.head_dim * attention.q.element_size()
    if bytes_per_key > 512:
        return Tiles(block=16, kept_block=16, gather_block=16)
    if bytes_per_key > 256:
        return Tiles(block=32, kept_block=64, gather_block=64)
    return Tiles()
