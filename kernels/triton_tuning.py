"""Tile sizes of the Triton kernels, by head size and dtype alone.

They must not depend on the number of rows or on lengths: a row's order of additions, and so its bits, follows from its
own length and from these numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from .arguments import Attention


@dataclass(frozen=True)
class Tiles:
    """What the kernels are built with.

    block, unit_blocks: keys per step of the inner loop, and steps per unit of dense keys. kept_block: retained keys per
    step, which is a unit. warps: Triton's num_warps. These decide the order of additions.
    stages, kept_stages: depth of the load pipeline. registers: limit per thread in half precision, 0 for none. programs, kept_programs: how many programs a launch aims at; rows
    are dealt out in more parts where there are few of them. These change no bits.
    """

    block: int = 64
    unit_blocks: int = 2
    kept_block: int = 128
    warps: int = 4
    stages: int = 2
    kept_stages: int = 2
    registers: int = 128
    programs: int = 2112
    kept_programs: int = 1056

    def __post_init__(self) -> None:
        for name in ("block", "unit_blocks", "kept_block", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")

    @property
    def unit(self) -> int:
        """Keys of a dense unit."""
        return self.block * self.unit_blocks


def tiles_for(attention: Attention) -> Tiles:
    """The tiles of one call."""
    bytes_per_key = attention.head_dim * attention.q.element_size()
    if bytes_per_key > 512:
        return Tiles(block=16, unit_blocks=8, kept_block=16)
    if bytes_per_key > 256:
        return Tiles(block=32, unit_blocks=4, kept_block=64)
    return Tiles()
