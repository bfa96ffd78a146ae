"""Which tiles a product of a few rows runs with, or whether the library is faster: measured once per GPU and shape.

The first call of a shape outside of graph capture measures (`skinny_bench`): candidates against
`torch.nn.functional.linear`. What was found is kept in a file (`skinny_file`). With SPARSE_COMPILE_TUNE=0, while a
graph is captured, and where there is no memory to measure, the tiles are those of `skinny_tuning.default_tiles`.

With SPARSE_COMPILE_TUNE=inductor it is measured as well what Inductor itself would choose for a product with its norm
and activation (max-autotune: the library's products and templates of its own), which takes seconds per shape. That code
is for one number of rows, so an op that serves many cannot run it. Where it is the fastest a warning says so, the file
keeps all times, and the op runs the faster of our kernel and the library.

A norm of the rows is done in the product itself or in a kernel ahead of it, whichever was measured to be faster; where
nothing is measured in products of up to `ALONG_ROWS` rows.

Numbers of rows are measured apart, each when it is first met. So a row's bits may differ between numbers of rows;
`fixed_tiles` are for those who cannot have that.
"""

from __future__ import annotations

import functools
import math
import os
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from triton import cdiv

from .arrivals import arrivals
from .skinny import Norm, starts_early
from .skinny_bench import Bench
from .skinny_file import Choice, cache_file, recall, remember
from .skinny_tuning import Gpu, Product, Tiles, default_tiles, padded_rows
from .triton_norms import COLUMNS, SLICES

# Values of SPARSE_COMPILE_TUNE: nothing is measured; our kernel and the library; Inductor's choice beside them.
TUNING = ("0", "1", "inductor")
BUCKETS = (8, 16, 32, 64)  # a number of rows belongs to the first that holds it
ALONG_ROWS = 8  # of products that do a norm themselves where nothing is measured: with more it takes too long
MEASURED_ROWS = 16  # of products of which it is measured whether they should do a norm themselves
AHEAD = 256  # columns that products of up to `AHEAD_ROWS` ask for while they wait
AHEAD_ROWS = 16  # with more, asking takes longer than it saves
_TOLD = 0.95  # of the time of what runs; where Inductor chooses the library's product too, chance decides


@dataclass(frozen=True)
class Shape:
    """What a choice is made for: a weight [lines, depth]. gated: tiles hold pairs of its lines, as for [gate; up] and
    for rotated heads. norm: whether rows are normalised first, and multiplied by a weight; mean as in `Norm`.
    """

    lines: int
    depth: int
    gated: bool
    dtype: torch.dtype
    device: torch.device
    norm: Literal["", "norm", "weighted norm"] = ""
    mean: bool = True

    def product(self, rows: int) -> Product:
        width = self.lines // (2 if self.gated else 1)
        return Product(rows, width, self.depth, self.gated, self.dtype.itemsize, self.norm == "weighted norm")

    @property
    def key(self) -> str:
        gpu = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        kind = "gated" if self.gated else "linear"
        kind = f"{self.norm}{'' if self.mean else ' by sum'}, {kind}" if self.norm else kind
        return f"{gpu} | triton {triton.__version__} | {kind} {self.lines}x{self.depth} {self.dtype}"


_choices: dict[tuple[Shape, int], Tiles | None] = {}


def tiles_maybe(
    rows: int, weight: Tensor, gated: bool, norm: Norm | None = None, up: Tensor | None = None
) -> Tiles | None:
    """The tiles for a call, or None where the library serves it better, with a kernel for the norm ahead of it. up: the
    other half of a gated weight.
    """
    return choose(shape_of(weight, gated, norm, up), _bucket(rows))


def own_tiles(rows: int, weight: Tensor, gated: bool, norm: Norm | None = None) -> Tiles:
    """Tiles for a call that the library would serve with more kernels than one: the last candidate that fits."""
    shape, bucket = shape_of(weight, gated, norm), _bucket(rows)
    return [tiles for tiles in candidates(shape, bucket) if _fits(tiles, shape, bucket)][-1]


def _buckets(rows: int | None) -> tuple[int, ...]:
    """All that so many rows may need; None stands for any number, and beyond the last there is nothing to choose."""
    if rows is None:
        return BUCKETS
    return (_bucket(rows),) if rows <= BUCKETS[-1] else ()


def prepare(shape: Shape, rows: int | None) -> None:
    """Make now what calls of a shape with so many rows need once (None: with any number of rows): the choice of tiles,
    which is measured where it is not known, and the counters of tiles with splits. Such calls can then be captured, and
    keep nothing that was made meanwhile.
    """
    with torch.cuda.device(shape.device) if shape.device.type == "cuda" else nullcontext():
        for bucket in _buckets(rows):
            choose(shape, bucket)
            split = [tiles for tiles in candidates(shape, bucket) if tiles.splits > 1]
            for tiles in split if shape.device.type == "cuda" else ():
                arrivals(shape.device, cdiv(shape.product(bucket).width, tiles.lines))


def _fits(tiles: Tiles, shape: Shape, rows: int) -> bool:
    """Whether one program's loads have room; those of the default always do."""
    padded = padded_rows(rows, tiles.slices)
    lines = (tiles.lines * (2 if shape.gated else 1) + padded) * max(1, tiles.stages - 1)
    if shape.norm == "weighted norm" and not tiles.apart:  # its products with the rows are kept beside them
        lines += 2 * padded
    held = lines * tiles.columns * shape.dtype.itemsize
    return tiles == default_choice(shape, rows) or held <= gpu_of(shape.device).shared_bytes - 1024


def fixed_tiles(
    rows: int, weight: Tensor, gated: bool, norm: Norm | None = None, up: Tensor | None = None
) -> Tiles:
    """Tiles that were not measured: on every GPU, in every process and for every number of rows a sum is added in the
    same order. That of the squares of a norm follows the columns too; a kernel of its own adds them as products of
    `triton_norms.COLUMNS` do. A norm with a weight always has such a kernel: it rounds, and products would not.
    """
    shape, bucket = shape_of(weight, gated, norm, up), _bucket(rows)
    if norm is not None and norm.weight is not None:
        return _in_order(_apart(shape, bucket))
    tiles = default_choice(shape, bucket)
    if norm is not None and not tiles.apart and tiles.columns > COLUMNS:
        parts = tiles.columns // COLUMNS
        tiles = replace(tiles, columns=COLUMNS, stages=min(7, parts * (tiles.stages - 1) + 1))
    assert norm is None or tiles.apart or tiles.columns == COLUMNS, (
        "the order of the squares would depend on the rows"
    )
    return _in_order(tiles)


def _in_order(tiles: Tiles) -> Tiles:
    assert (tiles.slices, tiles.splits) == (SLICES, 1), (
        "the order of a sum would depend on the number of rows"
    )
    return tiles


def shape_of(weight: Tensor, gated: bool, norm: Norm | None = None, up: Tensor | None = None) -> Shape:
    """That of a product. Tensors may be fake."""
    lines, depth = weight.shape[0] * (1 if up is None else 2), weight.shape[1]
    kind: Any = "" if norm is None else "norm" if norm.weight is None else "weighted norm"
    return Shape(lines, depth, gated, weight.dtype, weight.device, kind, norm is None or norm.mean)


def _bucket(rows: int) -> int:
    return next(bucket for bucket in BUCKETS if rows <= bucket)


def choose(shape: Shape, bucket: int) -> Tiles | None:
    """The choice for a shape and one of BUCKETS: known, read from the file, measured, or the default."""
    if (shape, bucket) in _choices:
        return _choices[shape, bucket]
    if not _may_measure(shape):
        return default_choice(shape, bucket)
    key, with_inductor = f"{shape.key} | {bucket} rows", tuning() == "inductor"
    known = recall(key)
    if known is None or (with_inductor and "inductor" not in known.us):
        try:
            known = measure(shape, bucket, with_inductor)
        except torch.OutOfMemoryError:  # there is no room to measure; what the file holds is still true
            pass
        else:
            remember(key, known)
            _tell(key, known)
    made = _choices[shape, bucket] = default_choice(shape, bucket) if known is None else known.tiles
    return made


def _tell(key: str, choice: Choice) -> None:
    """Warns where Inductor's choice is faster than what runs."""
    known = {name: us for name, us in choice.us.items() if us is not None}
    runs = "ours" if choice.tiles else "cublas"
    if known.get("inductor", math.inf) > _TOLD * known[runs]:
        return
    times = ", ".join(f"{name} {us:.2f}" for name, us in known.items())
    warnings.warn(
        f"{key}: Inductor's own choice is the fastest (us: {times}), but an op cannot run it; it runs {runs}. "
        f"{cache_file()} keeps the times. The torch.compile backend leaves all products to Inductor with "
        "skinny_products=False, and with inductor={'max_autotune': True} Inductor chooses so",
        stacklevel=2,
    )


@functools.lru_cache(256)
def default_choice(shape: Shape, bucket: int) -> Tiles:
    """Tiles by shape alone."""
    if shape.norm and (bucket > ALONG_ROWS or _overflows(shape)):
        return _apart(shape, bucket)
    return _along(shape, bucket)


def _along(shape: Shape, bucket: int) -> Tiles:
    """Tiles of a product that does a norm itself, or of one without."""
    tiles = default_tiles(shape.product(bucket), gpu_of(shape.device))
    early = starts_early(shape.device)
    return replace(tiles, pdl=early, ahead=AHEAD if early and bucket <= AHEAD_ROWS else 0)


def _apart(shape: Shape, bucket: int) -> Tiles:
    """The default tiles of a product without a norm, behind a kernel for the norm."""
    return replace(default_choice(replace(shape, norm=""), bucket), apart=True)


def _overflows(shape: Shape) -> bool:
    """Whether the product of a row and the weight of a norm may, since it is made before the row is scaled."""
    return shape.norm == "weighted norm" and shape.dtype == torch.float16


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    if device.type != "cuda":
        return Gpu()
    properties = torch.cuda.get_device_properties(device)
    return Gpu(properties.multi_processor_count, properties.shared_memory_per_multiprocessor)


def candidates(shape: Shape, bucket: int) -> list[Tiles]:
    """What is tried: the default, and for many rows whole columns in one program, parted where programs are few. Of
    products with a norm all behind a kernel for the norm, and for few rows the default without one.
    """
    if shape.norm:
        apart = [replace(tiles, apart=True) for tiles in candidates(replace(shape, norm=""), bucket)]
        along = bucket <= MEASURED_ROWS and not _overflows(shape)
        return [_along(shape, bucket), *apart] if along else apart
    first = default_choice(shape, bucket)
    if bucket <= 16:
        return [first]
    wide = Tiles(lines=32 if shape.gated else 64, columns=128, slices=1, stages=5, pdl=first.pdl)
    blocks = cdiv(shape.product(bucket).width, wide.lines)
    splits = max(1, min(8, round(gpu_of(shape.device).multiprocessors / blocks)))
    return [first, replace(wide, splits=splits)]


def measure(shape: Shape, bucket: int, with_inductor: bool = False) -> Choice:
    """Times of what may serve a product. tiles: the fastest candidate; None where the library is faster than all.
    Raises torch.OutOfMemoryError.
    """
    bench = Bench(shape)
    times = {tiles: bench.ours(bucket, tiles) for tiles in candidates(shape, bucket)}
    ours = {tiles: us for tiles, us in times.items() if us is not None}
    best = min(ours, key=ours.__getitem__) if ours else None
    us: dict[str, float | None] = {
        "ours": None if best is None else ours[best],
        "cublas": bench.library(bucket),
    }
    tiles = best if Choice(best, us).winner == "ours" else None
    return Choice(tiles, us | (bench.inductor(bucket) if with_inductor else {}))


def tuning() -> str:
    """What is to be measured, one of TUNING. Raises ValueError for another value of SPARSE_COMPILE_TUNE."""
    value = os.environ.get("SPARSE_COMPILE_TUNE") or "1"
    if value not in TUNING:
        raise ValueError(
            f"SPARSE_COMPILE_TUNE={value!r} must be one of {', '.join(TUNING)}: 0 measures no kernel, 1 ours against "
            "the library, inductor both against Inductor's own choice as well; set one of them or unset it"
        )
    return value


def _may_measure(shape: Shape) -> bool:
    return tuning() != "0" and shape.device.type == "cuda" and not torch.cuda.is_current_stream_capturing()
