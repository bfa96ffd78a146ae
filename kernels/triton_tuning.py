"""Tile sizes of the Triton kernels, by head size and dtype alone.

They must not depend on the number of rows or on lengths: a row's order of additions, and so its bits, follows from its
own length and from these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import Attention


@dataclass(frozen=True)
class Tiles:
    """block, stages: keys per step of the inner loop and depth of its load pipeline, for all keys; kept_block and
    kept_stages for retained ones. A dense unit has at least `min_unit` keys and a row at most `max_units` units;
    `min_kept` and `max_kept` say the same of retained keys. warps: Triton's num_warps.

    The numbers of stages change no bits; everything else does.
    """

    block: int = 64
    stages: int | None = None
    pair: bool | None = None
    pack: int = 1
    how: str = "pairs"
    evict: str = ""
    pdl: bool = False
    slice: int = 1024
    max_parts: int = 32
    register_scores: int = 32768
    small_scores: int = 2048
    threshold_warps: int = 16
    gather_block: int = 128
    gather_stages: int = 2
    by_dot: bool = True
    retain_warps: int = 4
    kept_block: int = 128
    kept_stages: int = 2
    min_unit: int = 256
    max_units: int = 16
    min_kept: int = 256
    max_kept: int = 16
    warps: int = 4

    def __post_init__(self) -> None:
        for name in ("block", "kept_block", "warps", "min_unit", "max_units", "min_kept", "max_kept"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")


def tiles_for(attention: Attention) -> Tiles:
    """The tiles of one call."""
    bytes_per_key = attention.head_dim * attention.q.element_size()
    if bytes_per_key > 512:
        return Tiles(block=16, kept_block=16)
    if bytes_per_key > 256:
        return Tiles(block=32, kept_block=64)
    return Tiles()
