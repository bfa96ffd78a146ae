"""The Triton implementation behind the ops: launches, scratch, and the choice of tile sizes.

Every function writes the rows' keys and values itself (`WRITES_KEYS`) where the call has any, then launches: dense and
consume are one kernel, capture two (attend, select; where rows may be long two more, which find their cuts and list
what they retain), mixed one, or as many as capture at sites where a row may capture.
Nothing here reads the device, so all of it can be captured in a CUDA graph; lengths, counts and modes may change
between replays, and the grid covers whatever the block table could hold.

On the CPU the kernels run in Triton's interpreter, where TRITON_INTERPRET=1 was set before this module was imported.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from .arguments import Attention, Store
from .arrivals import arrivals
from .beside import LANES, make_room, run_beside, wait_for
from .retention import Retention
from .skinny import starts_early
from .triton_attention import (
    MODE_CAPTURE,
    MODE_CONSUME,
    MODE_DENSE,
    MODE_MIXED,
    attention_kernel,
    write_kernel,
)
from .triton_narrow import narrow_kernel
from .triton_scratch import Scratch
from .triton_select import retain_kernel, select_kernel
from .triton_tuning import Tiles, tiles_for

WRITES_KEYS = True

SPAN_KEYS = 2048
"""The most keys that several units of one program have together: more would let the longest of ragged rows wait."""


_TILE = 32 * 128  # numbers of the queries that share a tile, at most


def dense(attention: Attention, out: Tensor) -> None:
    """Fill out [T, H, D]; inactive rows get zeros."""
    _attend(attention, out, MODE_DENSE)


def capture(attention: Attention, store: Store, retention: Retention, out: Tensor) -> None:
    """`dense`, and each active row's reference written to its slot."""
    waited = _settle(attention, store)
    scratch = _attend(attention, out, MODE_CAPTURE, store, retention, waited=waited)
    _select(attention, store, retention, scratch)


def consume(attention: Attention, store: Store, out: Tensor) -> None:
    """Fill out with O_ref + m * (T - C_ref). A row whose slot is empty gets NaN: it has no answer."""
    waited = _settle(attention, store)
    _attend(attention, out, MODE_CONSUME, store, waited=waited)


def mixed(
    attention: Attention,
    row_mode: Tensor,
    store: Store,
    retention: Retention,
    out: Tensor,
    captures: bool = True,
) -> None:
    """Each row by its mode. `captures=False` promises that no row has mode capture, and skips what that would need."""
    waited = _settle(attention, store)
    scratch = _attend(attention, out, MODE_MIXED, store, retention if captures else None, row_mode, waited)
    if captures:
        _select(attention, store, retention, scratch, row_mode)


def _precision(q: Tensor) -> str:
    if q.dtype == torch.bfloat16 and q.device.type == "cpu":
        return "upcast"
    return "ieee" if q.dtype == torch.float32 else "tf32"


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory of a multiprocessor."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor)


def _two_fit(tiles: Tiles, a: Attention) -> bool:
    """Whether two programs with a pipeline of four stages share a multiprocessor: three steps of keys and values each,
    and a few kilobytes beside them.
    """
    step = 2 * tiles.block * next_power_of_2(max(16, a.head_dim)) * a.q.element_size()
    return 2 * (3 * step + 8192) <= _shared_bytes(a.q.device)


def _grid(tiles: Tiles, a: Attention, mode: int, lines: int, store: Store | None) -> tuple[int, int, int]:
    """(programs per line, units of each, stages) of a launch with `lines` tiles; how many programs follows from what
    the block table and the store could hold.

    None of it changes bits, only how the programs fill the GPU. Three programs share a multiprocessor, four with a
    shallow pipeline: that pays where all programs then run at once, each with the fewest units that allow it. With a
    deep one no more than two do: where that is what there is, no multiprocessor gets three while another has one.
    """
    units, kept = _most_units(tiles, a, mode, store)
    if mode == MODE_CONSUME:
        return kept, 1, tiles.stages or 3
    unit, _ = tiles.units(a.max_pages * a.page_size)
    processors = _multiprocessors(a.q.device)
    at_once = 4 * processors
    spans = [1]  # a capture has no registers for more, and the consume rows of a mixed launch have none
    if mode == MODE_DENSE:
        spans += [2, 4, 8]
    fitting = [n for n in spans if lines * cdiv(units, n) <= at_once and n * unit <= SPAN_KEYS]
    span = min(fitting, default=1)
    if tiles.span and mode != MODE_MIXED:
        span = tiles.span
    programs = cdiv(units, span)
    crowded = 3 * at_once < 4 * lines * programs <= 4 * at_once
    pairs = mode != MODE_MIXED and processors < lines * programs <= 2 * processors and _two_fit(tiles, a)
    stages = tiles.stages or (2 if span > 1 or crowded else 4 if pairs else 3)
    return max(programs, kept), span, stages


def _most_units(tiles: Tiles, a: Attention, mode: int, store: Store | None) -> tuple[int, int]:
    """The most units of visible and of retained keys that a row may have; 0 of those that no row of this mode reads."""
    keys = a.max_pages * a.page_size
    kept = 0
    if store is not None and mode in (MODE_CONSUME, MODE_MIXED):
        kept = min(tiles.max_kept, cdiv(min(store.capacity, keys), tiles.min_kept))
    return 0 if mode == MODE_CONSUME else tiles.units(keys)[1], kept


def _attend(
    attention: Attention,
    out: Tensor,
    mode: int,
    store: Store | None = None,
    retention: Retention | None = None,
    row_mode: Tensor | None = None,
    waited: bool = False,
) -> Scratch:
    """Launch the attention kernel; rows may capture where `retention` is given. waited: the stream has just been made
    to wait for another one.
    """
    a = attention if attention.q.stride(-1) == 1 else replace(attention, q=attention.q.contiguous())
    per_head = mode in (MODE_CONSUME, MODE_MIXED)
    group = _query_rows(a, per_head)
    tiles = tiles_for(a)
    if retention is not None:  # the scratch of captures lives until their selections are done
        keys = a.max_pages * a.page_size
        waited |= make_room(a.q.device, (8 if keys > tiles.short else 4) * a.rows * a.heads * keys)
    if mode == MODE_MIXED and a.sink is not None:
        raise ValueError("mixed rows take no sink")
    captures = retention is not None
    capacity = store.capacity if store is not None and captures else 0
    scratch = Scratch(a, tiles, capacity, max(_most_units(tiles, a, mode, store)))
    writes = a.k is not None and a.v is not None
    fuse = writes and a.query_rows == 1
    k, v = a.q, a.q  # stand for what is not read
    if a.k is not None and a.v is not None:
        k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (a.k, a.v))
    if writes and not fuse:
        _write(a, k, v, waited)
    heads = a.heads if per_head else a.kv_heads
    programs, span, stages = _grid(tiles, a, mode, heads * (a.rows // group), store)
    s = store if store is not None else _no_store(a)
    kept_block, kept_stages, at_once = tiles.kept_block, tiles.kept_stages, 4 if stages == 2 else 3
    if mode == MODE_CONSUME:
        kept_block, kept_stages, at_once = tiles.consuming(s.capacity)
    elif mode == MODE_MIXED:
        at_once = 0
    bias = a.q if a.bias is None else a.bias if a.bias.stride(-1) == 1 else a.bias.contiguous()
    sink = a.q[:, :, 0] if a.sink is None else a.sink
    gate = a.q if a.gate is None else a.gate
    attention_kernel[(heads, programs, a.rows // group)](
        a.q, k, v, a.k_pool, a.v_pool, a.block_table, a.row_seq, a.row_position, a.row_length, a.row_loop,
        row_mode if row_mode is not None else a.row_length, s.row_slot,
        gate, *gate.stride(),
        out, s.index, s.count, s.mass, s.o_ref, s.c_ref, scratch.scores, scratch.stats,
        scratch.part_acc, scratch.part_m, scratch.part_l, scratch.arrived,
        scratch.guess_acc, scratch.guess_stats,
        bias, sink, bias.stride(0), bias.stride(1) if bias.shape[1] > 1 else 0, sink.stride(0), sink.stride(1),
        a.q.stride(0), a.q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *a.k_pool.stride()[:4], a.block_table.stride(0), scratch.scores.stride(0),
        a.plane, a.plane_stride, a.scale, a.softcap, _quantile(retention), a.window,
        s.site, s.count.shape[1], s.capacity,
        MODE=mode, CAPTURES=captures, FUSE_WRITE=fuse, HAS_CAP=a.softcap > 0, HAS_WINDOW=a.window > 0,
        HAS_BIAS=a.bias is not None, HAS_SINK=a.sink is not None, HAS_GATE=a.gate is not None,
        HEADS=a.heads, G=a.group, R=group, D=a.head_dim, PAGE=a.page_size,
        BM=next_power_of_2(max(16, group * a.group)), BN=tiles.block, BK=kept_block,
        BD=scratch.width, STAGES=stages, KEPT_STAGES=kept_stages, PRECISION=_precision(a.q),
        SPAN=span, MIN_UNIT=tiles.min_unit, MAX_UNITS=tiles.max_units, MIN_KEPT=tiles.min_kept,
        MAX_KEPT=tiles.max_kept, FIXED_KEPT=per_head and tiles.one_size(s.capacity, kept_block), SLOTS=scratch.units,
        GUESSES=scratch.guesses, COPIES=scratch.copies,
        ASSEMBLY=a.q.device.type == "cuda", PDL=(pdl := starts_early(a.q.device)),
        num_warps=tiles.warps, **_early(pdl and not waited),
        **(_registers(a, at_once, tiles.warps) if at_once else {}),
    )  # fmt: skip
    return scratch


def _query_rows(a: Attention, per_head: bool) -> int:
    """Rows of one sequence that share a tile; 1 where so many would not fit into registers."""
    group = max(1, a.query_rows)
    if per_head and group > 1:
        raise ValueError(
            f"query_rows={group}: consume and mixed rows are attended one by one; use query_rows=1"
        )
    if a.rows % group:
        raise ValueError(f"query_rows={group} does not divide the {a.rows} rows")
    return group if group * a.group * next_power_of_2(a.head_dim) <= _TILE else 1


def _early(pdl: bool) -> dict[str, bool]:
    """Lets a kernel start before the one ahead of it, on the same stream, has finished."""
    return {"launch_pdl": True} if pdl else {}


def _registers(a: Attention, programs: int, warps: int) -> dict[str, int]:
    """As many per thread as let `programs` share a multiprocessor: the compiler would take a few more."""
    return {"maxnreg": 65536 // (programs * warps * 32) // 8 * 8} if a.q.device.type == "cuda" else {}


def _write(a: Attention, k: Tensor, v: Tensor, waited: bool) -> None:
    """waited: as in `_attend`."""
    pdl = starts_early(a.q.device)
    write_kernel[(a.rows, a.kv_heads)](
        k, v, a.k_pool, a.v_pool, a.block_table, a.row_seq, a.row_position, a.row_loop,
        k.stride(0), k.stride(1), v.stride(0), v.stride(1), *a.k_pool.stride()[:4], a.block_table.stride(0),
        a.plane, a.plane_stride, PAGE=a.page_size, D=a.head_dim, BD=next_power_of_2(a.head_dim), PDL=pdl,
        num_warps=1, **_early(pdl and not waited),
    )  # fmt: skip


def _no_store(a: Attention) -> Store:
    """Stands in for the store of a dense call; nothing reads it."""
    nothing = a.row_length
    return Store(nothing, nothing[None, None, None], nothing[None], nothing, nothing, nothing, site=0)


@functools.cache
def _quantile(retention: Retention | None) -> float:
    """The point of the standard normal distribution that the retained share lies above."""
    if retention is None:
        return 0.0
    share = retention.numerator / retention.denominator
    return NormalDist().inv_cdf(min(1 - 1e-7, max(1e-7, 1 - share)))


def _always(retention: Retention, scratch: Scratch) -> dict[str, int]:
    """How many of the first and last keys are kept whatever their scores: at most as many as a row may have."""
    return {"FIRST": min(retention.first, scratch.keys), "LAST": min(retention.last, scratch.keys)}


def _select(
    a: Attention, store: Store, retention: Retention, scratch: Scratch, row_mode: Tensor | None = None
) -> None:
    """Fill index, count, mass and C_ref of the store for the rows that captured, beside what follows where it may."""

    def work(lane: int) -> None:
        # Beside other kernels none starts early: it would take their room on the multiprocessors while it waits.
        early = starts_early(a.q.device) and not lane
        _short(a, store, retention, scratch, row_mode)
        if scratch.long:
            _cut(a, retention, scratch, arrived[lane], row_mode, early)
            _retain(a, store, retention, scratch, arrived[lane], row_mode, early)

    # Of every lane, so that a graph that is captured after one call finds them all.
    arrived = [arrivals(a.q.device, a.rows * a.heads, lane) for lane in range(LANES + 1)]
    run_beside(a.q.device, work, _filled(store), (scratch, a, row_mode), scratch.bytes)


def _filled(store: Store) -> tuple[int, int]:
    """What a selection of this site fills."""
    return store.index.data_ptr(), store.site


def _settle(a: Attention, store: Store) -> bool:
    """Wait for what was selected at this site and may still run beside; whether there was any."""
    return wait_for(a.q.device, _filled(store))


def _short(
    a: Attention, store: Store, retention: Retention, scratch: Scratch, row_mode: Tensor | None
) -> None:
    """The whole selection of rows that one program holds in registers, and where to search in longer ones. Launched
    behind the whole of attention: `narrow_kernel` reads what that left before it waits.
    """
    tiles = scratch.tiles
    most = min(tiles.short, next_power_of_2(max(4 * tiles.block, scratch.keys)))
    warps = max(4, min(16, most // (32 * tiles.thread_scores)))
    select_kernel[(a.heads, a.rows)](
        scratch.scores, scratch.stats, scratch.cuts, scratch.starts, *_selected(a, store, row_mode),
        scratch.guess_acc, scratch.guess_stats, scratch.fixes, scratch.weights,
        scratch.scores.stride(0), *_places(a, store), retention.numerator, retention.denominator, _quantile(retention),
        MIXED=row_mode is not None, SMALL=min(tiles.small_scores, most), NB=most,
        SAMPLE=tiles.sample if scratch.long else 0, PIECE=min(most, 32 * warps * tiles.thread_keys),
        PDL=starts_early(a.q.device), **_sums(a, retention, scratch, warps),
        num_warps=warps, **_registers(a, 16 // warps, warps),
    )  # fmt: skip


def _cut(
    a: Attention,
    retention: Retention,
    scratch: Scratch,
    arrived: Tensor,
    row_mode: Tensor | None = None,
    early: bool = False,
) -> None:
    """Of long rows, which score each (row, head) retains from, and what each unit retains. arrived: `arrivals` of the
    lane. early: the kernel may start before the one ahead of it has finished.
    """
    tiles, pdl = scratch.tiles, starts_early(a.q.device)
    unit, units = tiles.units(scratch.keys)
    warps = tiles.narrow_warps
    piece = min(tiles.narrow_piece, next_power_of_2(unit))
    narrow_kernel[(a.heads, units, a.rows)](
        scratch.scores, scratch.lists, scratch.stats, a.row_length, row_mode if row_mode is not None else a.row_length,
        scratch.cuts, scratch.starts, scratch.places, arrived, scratch.scores.stride(0),
        retention.numerator, retention.denominator, MIXED=row_mode is not None, HEADS=a.heads, SHORT=tiles.short,
        PIECE=piece, COLUMNS=min(4 * 32 * warps, piece), WIDE=tiles.listed, STEP=tiles.listed_step,
        SLOTS=scratch.units, MIN_UNIT=tiles.min_unit, MAX_UNITS=tiles.max_units, BLOCK=tiles.block,
        **_always(retention, scratch), ASSEMBLY=a.q.device.type == "cuda", PDL=pdl,
        num_warps=warps, **_early(early), **_registers(a, 32 // warps, warps),
    )  # fmt: skip


def _retain(
    a: Attention,
    store: Store,
    retention: Retention,
    scratch: Scratch,
    arrived: Tensor,
    row_mode: Tensor | None,
    early: bool,
) -> None:
    """Of long rows, the retained sets, their masses and C_ref, once the cuts are known. The rest as in `_cut`.

    Few programs are quick with all scores of a unit in two pieces; many wait less for each other if each is smaller.
    """
    tiles, pdl = scratch.tiles, starts_early(a.q.device)
    unit, units = tiles.units(scratch.keys)
    many = a.heads * units * a.rows > 16 * _multiprocessors(a.q.device)
    piece = min(tiles.piece // 2 if many else tiles.piece, next_power_of_2(unit))
    warps = min(8, max(1, piece // (32 * tiles.thread_keys), tiles.gather_block * scratch.width // 2048))
    retain_kernel[(a.heads, units, a.rows)](
        scratch.scores, scratch.stats, scratch.cuts, scratch.places, *_selected(a, store, row_mode),
        scratch.guess_acc, scratch.guess_stats, scratch.fixes, scratch.weights, scratch.part_acc, scratch.part_l,
        arrived, scratch.scores.stride(0), *_places(a, store), retention.numerator, retention.denominator,
        MIXED=row_mode is not None, SHORT=tiles.short, PIECE=piece, PDL=pdl, **_sums(a, retention, scratch, warps),
        num_warps=warps, **_early(early), **_registers(a, 24 // warps, warps),
    )  # fmt: skip


def _selected(a: Attention, store: Store, row_mode: Tensor | None) -> tuple[Tensor, ...]:
    """What a selection reads of the rows, and what it writes."""
    modes = row_mode if row_mode is not None else a.row_length
    rows = (a.v_pool, a.block_table, a.row_seq, a.row_length, a.row_loop, modes, store.row_slot)
    return (*rows, store.index, store.count, store.mass, store.c_ref)


def _places(a: Attention, store: Store) -> tuple[int, ...]:
    """Where values and references lie."""
    pool = (*a.v_pool.stride()[:4], a.block_table.stride(0), a.plane, a.plane_stride)
    return (*pool, store.site, store.count.shape[1], store.capacity)


def _sums(a: Attention, retention: Retention, scratch: Scratch, warps: int) -> dict[str, Any]:
    """How the keys of a row lie in units, and how their values are summed."""
    tiles = scratch.tiles
    ahead = tiles.gather_bytes * 32 * warps // (tiles.gather_block * scratch.width * a.v_pool.element_size())
    shape = {"HEADS": a.heads, "G": a.group, "D": a.head_dim, "PAGE": a.page_size, "BD": scratch.width}
    units = {
        "SLOTS": scratch.units,
        "MIN_UNIT": tiles.min_unit,
        "MAX_UNITS": tiles.max_units,
        "BLOCK": tiles.block,
    }
    reads = {"GUESSES": scratch.guesses, "BN": tiles.gather_block, "AHEAD": max(1, min(8, ahead))}
    return shape | units | reads | _always(retention, scratch) | {"ASSEMBLY": a.q.device.type == "cuda"}
