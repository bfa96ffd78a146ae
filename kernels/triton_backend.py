"""The Triton implementation behind the ops: launches, scratch, and the choice of tile sizes.

Every function writes the rows' keys and values itself (`WRITES_KEYS`), then launches: dense and consume are one kernel,
capture three (attend, select, reference), mixed one, or three at sites where a row may capture. Nothing here reads the
device, so all of it can be captured in a CUDA graph; lengths, counts and modes may change between replays, and the grid
covers whatever the block table could hold.

On the CPU the kernels run in Triton's interpreter, where TRITON_INTERPRET=1 was set before this module was imported.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from .arguments import Attention, Store
from .arrivals import arrivals
from .retention import Retention
from .triton_attention import (
    MODE_CAPTURE,
    MODE_CONSUME,
    MODE_DENSE,
    MODE_MIXED,
    attention_kernel,
    write_kernel,
)
from .triton_select import retain_kernel, threshold_kernel
from .triton_tuning import Tiles, tiles_for

WRITES_KEYS = True


def dense(attention: Attention, out: Tensor) -> None:
    """Fill out [T, H, D]; inactive rows get zeros."""
    _attend(attention, out, MODE_DENSE)


def capture(attention: Attention, store: Store, retention: Retention, out: Tensor) -> None:
    """`dense`, and each active row's reference written to its slot."""
    scratch = _attend(attention, out, MODE_CAPTURE, store)
    _keep(attention, store, retention, scratch)


def consume(attention: Attention, store: Store, out: Tensor) -> None:
    """Fill out with O_ref + m * (T - C_ref). A row whose slot is empty gets NaN: it has no answer."""
    _attend(attention, out, MODE_CONSUME, store)


def mixed(
    attention: Attention,
    row_mode: Tensor,
    store: Store,
    retention: Retention,
    out: Tensor,
    captures: bool = True,
) -> None:
    """Each row by its mode. `captures=False` promises that no row has mode capture, and skips what that would need."""
    scratch = _attend(attention, out, MODE_MIXED, store, row_mode, captures)
    if captures:
        _keep(attention, store, retention, scratch, row_mode)


class Scratch:
    """Memory that the kernels of one op call hand to each other."""

    def __init__(self, attention: Attention, tiles: Tiles, keeps_scores: bool) -> None:
        lines, device = attention.rows * attention.heads, attention.q.device
        self.tiles = tiles
        self.units = max(2, tiles.max_units, tiles.max_kept, tiles.max_parts)
        self.width = next_power_of_2(max(16, attention.head_dim))
        self.keys = attention.max_pages * attention.page_size

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.part_acc = empty(lines, self.units, self.width)
        self.part_m, self.part_l = empty(lines, self.units), empty(lines, self.units)
        self.arrived = arrivals(device, lines)  # one per row and head
        if not keeps_scores:
            lines = 0
        self.scores = empty(lines, 16 * cdiv(self.keys, 16))
        self.stats = empty(lines, 2)
        self.cuts = empty(lines, dtype=torch.int32)
        self.places = empty(lines, 2, cdiv(self.keys, tiles.slice) + 1, dtype=torch.int32)


def _precision(q: Tensor) -> str:
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return "upcast"
    return "ieee" if q.dtype == torch.float32 else "tf32"


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _units(tiles: Tiles, a: Attention, mode: int, lines: int, store: Store | None) -> tuple[int, bool, int]:
    """(programs per line, pair, stages) of a launch with `lines` tiles; how many programs follows from what the block
    table and the store could hold. Pairing and the depth of the pipeline change no bits, only how the programs fill the
    GPU: with two stages four of them share a multiprocessor, else three.
    """
    keys = a.max_pages * a.page_size
    units = min(tiles.max_units, cdiv(keys, tiles.min_unit))
    kept = 0
    if store is not None and mode in (MODE_CONSUME, MODE_MIXED):
        kept = min(tiles.max_kept, cdiv(min(store.capacity, keys), tiles.min_kept))
    if mode == MODE_CONSUME:
        return kept, False, tiles.stages or 3
    slots = _multiprocessors(a.q.device)
    pair = tiles.pair if tiles.pair is not None else lines * units > 4 * slots
    if mode == MODE_MIXED:  # its consume rows have no pairs
        pair = False
    if pair:
        units = cdiv(units, 2)
    stages = tiles.stages or (2 if lines * units > 3 * slots else 3)
    return max(units, kept), pair, stages


def _pack(tiles: Tiles, a: Attention, group: int) -> int:
    """Key/value heads per tile: so many that their queries fit the tensor cores' 16 rows; a divisor of all of them."""
    pack = tiles.pack
    while pack > 1 and (a.kv_heads % pack or pack * a.group * group > 16):
        pack //= 2
    return pack


def _attend(
    attention: Attention,
    out: Tensor,
    mode: int,
    store: Store | None = None,
    row_mode: Tensor | None = None,
    captures: bool = False,
) -> Scratch:
    a = attention if attention.q.stride(-1) == 1 else replace(attention, q=attention.q.contiguous())
    per_head = mode in (MODE_CONSUME, MODE_MIXED)
    group = _query_rows(a, per_head)
    tiles = tiles_for(a)
    captures = captures or mode == MODE_CAPTURE
    scratch = Scratch(a, tiles, keeps_scores=captures)
    fuse = a.query_rows == 1
    if a.k is None or a.v is None:
        raise ValueError("the Triton implementation writes the rows' keys and values itself: give it k and v")
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (a.k, a.v))
    if not fuse:
        _write(a, k, v)
    pack = 1 if mode == MODE_CONSUME else _pack(tiles, a, group)
    heads = a.heads if per_head else a.kv_heads // pack
    units, pair, stages = _units(tiles, a, mode, heads * (a.rows // group), store)
    s = store if store is not None else _no_store(a)
    attention_kernel[(heads, units, a.rows // group)](
        a.q, k, v, a.k_pool, a.v_pool, a.block_table, a.row_seq, a.row_position, a.row_length, a.row_loop,
        row_mode if row_mode is not None else a.row_length, s.row_slot,
        out, s.index, s.count, s.mass, s.o_ref, s.c_ref, scratch.scores, scratch.stats,
        scratch.part_acc, scratch.part_m, scratch.part_l, scratch.arrived,
        a.q.stride(0), a.q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *a.k_pool.stride()[:4], a.block_table.stride(0), scratch.scores.stride(0),
        a.plane, a.plane_stride, a.scale, a.softcap, a.window, s.site, s.count.shape[1], s.capacity,
        MODE=mode, CAPTURES=captures, FUSE_WRITE=fuse, HAS_CAP=a.softcap > 0, HAS_WINDOW=a.window > 0,
        HEADS=a.heads, G=a.group, R=group, D=a.head_dim, PAGE=a.page_size,
        BM=next_power_of_2(max(16, group * a.group * pack)), BN=tiles.block, BK=tiles.kept_block,
        BD=scratch.width, STAGES=stages, KEPT_STAGES=tiles.kept_stages, PRECISION=_precision(a.q),
        PACK=pack, PAIR=pair, MIN_UNIT=tiles.min_unit, MAX_UNITS=tiles.max_units, MIN_KEPT=tiles.min_kept,
        MAX_KEPT=tiles.max_kept, SLOTS=scratch.units, HOW=_how(tiles, a), PDL=captures and _chained(tiles, a),
        num_warps=tiles.warps, **_registers(tiles, a, captures, stages),
    )  # fmt: skip
    return scratch


def _query_rows(a: Attention, per_head: bool) -> int:
    """Rows of one sequence that share a tile."""
    group = max(1, a.query_rows)
    if per_head and group > 1:
        raise ValueError(
            f"query_rows={group}: consume and mixed rows are attended one by one; use query_rows=1"
        )
    if a.rows % group:
        raise ValueError(f"query_rows={group} does not divide the {a.rows} rows")
    return group


def _registers(tiles: Tiles, a: Attention, captures: bool, stages: int) -> dict[str, int]:
    """Storing scores would take the kernel just over the registers with which four programs share a multiprocessor."""
    if a.q.device.type != "cuda" or not captures or tiles.warps != 4 or stages > 2:
        return {}
    return {"maxnreg": 128}


def _how(tiles: Tiles, a: Attention) -> str:
    """How the attention kernel stores scores: Triton's interpreter runs no assembly."""
    return tiles.how if a.q.device.type == "cuda" else "tile"


def _chained(tiles: Tiles, a: Attention) -> bool:
    """Whether the kernels of a capture overlap their launches."""
    return tiles.pdl and a.q.device.type == "cuda"


def _write(a: Attention, k: Tensor, v: Tensor) -> None:
    write_kernel[(a.rows, a.kv_heads)](
        k, v, a.k_pool, a.v_pool, a.block_table, a.row_seq, a.row_position, a.row_loop,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *a.k_pool.stride()[:4], a.block_table.stride(0),
        a.plane, a.plane_stride, PAGE=a.page_size, D=a.head_dim, BD=next_power_of_2(a.head_dim), num_warps=1,
    )  # fmt: skip


def _no_store(a: Attention) -> Store:
    """Stands in for the store of a dense call; nothing reads it."""
    nothing = a.row_length
    return Store(nothing, nothing[None, None, None], nothing[None], nothing, nothing, nothing, site=0)


def _keep(
    a: Attention, store: Store, retention: Retention, scratch: Scratch, row_mode: Tensor | None = None
) -> None:
    """The retained sets, masses and C_ref of the rows that captured."""
    _find_cuts(a, retention, scratch, row_mode)
    _retain(a, store, retention, scratch, row_mode)


def _find_cuts(a: Attention, retention: Retention, scratch: Scratch, row_mode: Tensor | None = None) -> None:
    """Which scores are retained, and where each slice of keys begins in the retained list."""
    tiles = scratch.tiles
    widest = next_power_of_2(max(tiles.slice, scratch.keys))
    block = min(tiles.register_scores, widest)
    small = min(tiles.small_scores, block)
    chained = _chained(tiles, a)
    threshold_kernel[(a.heads, a.rows)](
        scratch.scores, scratch.stats, a.row_length, row_mode if row_mode is not None else a.row_length,
        scratch.cuts, scratch.places, scratch.scores.stride(0), scratch.places.shape[2],
        retention.numerator, retention.denominator, _quantile(retention),
        MIXED=row_mode is not None, HEADS=a.heads, SMALL=small, NB=block, PASSES=widest > block,
        SLICE=tiles.slice, PDL=chained,
        num_warps=max(4, min(tiles.threshold_warps, block // 512)), **_chain(chained),
    )  # fmt: skip


def _chain(chained: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if chained else {}


@functools.cache
def _quantile(retention: Retention) -> float:
    """The point of the standard normal distribution that the retained share lies above."""
    share = retention.numerator / retention.denominator
    return NormalDist().inv_cdf(min(1 - 1e-7, max(1e-7, 1 - share)))


def _retain(
    a: Attention, store: Store, retention: Retention, scratch: Scratch, row_mode: Tensor | None = None
) -> None:
    """Fill index, count, mass and C_ref of the store."""
    tiles = scratch.tiles
    parts = min(tiles.max_parts, cdiv(scratch.keys, tiles.slice))
    chained = _chained(tiles, a)
    retain_kernel[(a.heads, parts, a.rows)](
        scratch.scores, scratch.stats, scratch.cuts, scratch.places, a.v_pool, a.block_table, a.row_seq, a.row_length,
        a.row_loop, row_mode if row_mode is not None else a.row_length, store.row_slot,
        store.index, store.count, store.mass, store.c_ref, scratch.part_acc, scratch.part_l, scratch.arrived,
        scratch.scores.stride(0), scratch.places.shape[2], *a.v_pool.stride()[:4], a.block_table.stride(0),
        a.plane, a.plane_stride, store.site, store.count.shape[1], store.capacity,
        retention.numerator, retention.denominator,
        MIXED=row_mode is not None, HEADS=a.heads, G=a.group, D=a.head_dim, PAGE=a.page_size,
        BN=tiles.gather_block, BD=scratch.width, STAGES=tiles.gather_stages, PRECISION=_precision(a.q),
        SLICE=tiles.slice, MAX_PARTS=tiles.max_parts, SLOTS=scratch.units,
        BY_DOT=tiles.by_dot, PDL=chained, num_warps=tiles.retain_warps, **_chain(chained),
    )  # fmt: skip
