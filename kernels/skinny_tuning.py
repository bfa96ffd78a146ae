"""Tile sizes of the products of a few rows, from the shape of the weight and the number of rows.

`slices` and `splits` decide in which order a sum is added, so they may depend on the weight's shape and dtype alone; so
may `columns` where there are splits, and `lines` where there is one slice. All other sizes may follow the number of
rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from triton import cdiv

_SYSTEM_BYTES = 2 << 10  # of shared memory that every program loses to the system
_MAX_PER_SM = 3  # programs that share a multiprocessor in one wave
_STEP_BYTES = 32 << 10  # of weight and rows in one step of the pipeline
_RUN = 64  # columns, `triton_skinny.RUN`


@dataclass(frozen=True)
class Gpu:
    """Multiprocessors, and the shared memory of each; the defaults are those of an H100 or H200."""

    multiprocessors: int = 132
    shared_bytes: int = 228 << 10


@dataclass(frozen=True)
class Product:
    """One product: result [rows, width] from a weight [width, depth], or [2 * width, depth] where it is gated.

    gain: whether the rows are multiplied by the weight of a norm, which is read beside them.
    """

    rows: int
    width: int
    depth: int
    gated: bool = False
    itemsize: int = 2
    gain: bool = False

    @property
    def weight_bytes(self) -> int:
        return self.width * (2 if self.gated else 1) * self.depth * self.itemsize


@dataclass(frozen=True)
class Tiles:
    """lines of the result and columns of the weight per step; stages of the pipeline; Triton's num_warps.

    ahead: columns that a program asks for in the L2 cache before it waits for the kernel ahead of it (`pdl`: it is
    started before that one has finished). apart: a norm of the rows is done by a kernel ahead of the product.
    """

    lines: int = 16
    columns: int = 512
    slices: int = 4
    splits: int = 1
    stages: int = 4
    warps: int = 4
    pdl: bool = False
    ahead: int = 0
    apart: bool = False

    def __post_init__(self) -> None:
        for name in ("lines", "columns", "slices", "warps"):
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name}={value} must be a power of two")
        if not 1 <= self.slices <= min(8, self.warps):
            raise ValueError(
                f"slices={self.slices} must be between 1 and 8 and at most warps={self.warps}: a slice is the work of "
                "at least one warp"
            )
        if self.slices > 1 and self.columns < self.slices * _RUN:
            raise ValueError(
                f"columns={self.columns} must hold {_RUN} columns for each of slices={self.slices}"
            )
        if self.splits < 1 or self.stages < 1:
            raise ValueError(f"splits={self.splits} and stages={self.stages} must be at least 1")
        if self.ahead and (self.ahead < 128 or self.ahead & (self.ahead - 1)):
            raise ValueError(f"ahead={self.ahead} must be 0, or a power of two from 128 on")


def padded_rows(rows: int, slices: int) -> int:
    """Columns of the tensor cores' right operand. One slice runs on Hopper's wide products, which have one code from 16
    on and another below: the same is used for all.
    """
    least = 16 if slices == 1 else 8
    return max(least, 1 << (rows - 1).bit_length())


def default_tiles(product: Product, gpu: Gpu = Gpu()) -> Tiles:
    """Tiles for one wave of programs, one to three on each multiprocessor, that fill its shared memory with loads.

    Lines: 16, more while four programs per multiprocessor would remain, or while rows, which every program reads whole,
    would outweigh its part of the weight and half the multiprocessors would still have work; two steps must fit.
    """
    rows, parts = padded_rows(product.rows, 4), 2 if product.gated else 1
    lines = 16
    while lines * parts < 64:
        remain = cdiv(product.width, 2 * lines)
        outweighed = lines * parts < rows and remain > 0.45 * gpu.multiprocessors
        fits = (2 * lines * parts + rows) * product.itemsize * 2 * 256 < gpu.shared_bytes
        if not fits or not (outweighed or remain >= 4 * gpu.multiprocessors):
            break
        lines *= 2
    step = (lines * parts + rows + product.gain) * product.itemsize  # bytes per column
    fits = step * 512 <= _STEP_BYTES and not product.gain  # products with a gain are made in registers
    columns = 512 if fits and product.depth % 512 == 0 else 256
    tiles = Tiles(lines=lines, columns=columns, warps=8 if lines * parts * rows >= 2048 else 4)
    return replace(tiles, stages=1 + _buffers(product, tiles, step * columns, gpu))


def _buffers(product: Product, tiles: Tiles, step_bytes: int, gpu: Gpu) -> int:
    """Steps in flight: as many as fit beside the other programs, no more than the product has.

    Where programs would have room for one step only, fewer of them share a multiprocessor.
    """
    most = _MAX_PER_SM if tiles.warps == 4 else 1  # large tiles take most of the registers
    per_sm = min(most, cdiv(cdiv(product.width, tiles.lines), gpu.multiprocessors))
    fit = 0
    while fit < 2 and per_sm > 0:
        fit = (gpu.shared_bytes // per_sm - _SYSTEM_BYTES) // step_bytes
        per_sm -= 1
    return max(1, min(6, fit, cdiv(product.depth, tiles.columns)))
