"""The attention kernel for CUDA: dense, capture, consume and mixed rows over the paged pool.

One program attends one unit of keys, or several in a row, for one tile: the query heads of one key/value head and
of `R` rows of one sequence (dense, capture), or one query head of one row (consume). A unit is a run of consecutive
visible keys, or of retained keys, whose size follows from the row's own length alone; so is every order of addition,
and a row's bits do not depend on its neighbours or on the size of the batch. Programs leave partial results in
scratch; the last one of a tile to arrive merges them in a fixed order, applies a consume's correction, and writes the
output. Queries are padded to the tensor cores' 16 rows. Scores and sums are float32. All addresses are int64.

With a gate, what is written is multiplied with sigmoid(gate) before it is rounded; O_ref is not.

Mirrors `reference.dense`, `reference.capture` (without the selection, see `triton_select`) and `reference.consume`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_guesses import HALF
from .triton_loops import attend_kept, attend_span, first_entries, store_own, store_part
from .triton_parts import LOG2E, finite_or_zero, key_place, merge_units, page_of, start_early, unit_size

MODE_DENSE = 0
MODE_CAPTURE = 1
MODE_CONSUME = 2
MODE_MIXED = 3
_DENSE, _CAPTURE = tl.constexpr(MODE_DENSE), tl.constexpr(MODE_CAPTURE)
_CONSUME, _MIXED = tl.constexpr(MODE_CONSUME), tl.constexpr(MODE_MIXED)


@triton.jit
def write_kernel(
    k_new, v_new, k_pool, v_pool, table, row_seq, row_position, row_loop,
    k_t, k_h, v_t, v_h, pool_plane, pool_page, pool_head, pool_token, table_s, plane, plane_stride,
    PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Store one row's key and value of one head. Grid (rows, kv_heads). Mirrors `paging.write_rows`."""
    start_early(PDL)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq = tl.load(row_seq + row).to(tl.int64)
    position = tl.load(row_position + row)
    base = (plane + plane_stride * tl.load(row_loop + row)).to(tl.int64) * pool_plane + head * pool_head
    d = tl.arange(0, BD)
    key, value = load_own(k_new, v_new, row, head, True, k_t, k_h, v_t, v_h, d, d < D)
    page = page_of(table + seq * table_s, position, PAGE)
    at = key_place(base, page, position, PAGE, pool_page, pool_token)
    store_own((k_pool + at, v_pool + at, key, value, True), d, d < D)


@triton.jit
def load_own(k_new, v_new, row, head, wanted, k_t, k_h, v_t, v_h, d, d_ok):
    """The row's own key and value of one head, if `wanted`: [BD] each."""
    key = tl.load(k_new + row * k_t + head * k_h + d, mask=d_ok & wanted)
    return key, tl.load(v_new + row * v_t + head * v_h + d, mask=d_ok & wanted)


@triton.jit
def load_reference(mass, o_ref, c_ref, line, wanted, d, d_ok, D: tl.constexpr):
    """(mass, O_ref [BD], C_ref [BD]) of one line of the store, where `wanted`."""
    at, ok = line * D + d, d_ok & wanted
    weight = tl.load(mass + line, mask=wanted, other=0.0)
    return weight, tl.load(o_ref + at, mask=ok, other=0.0), tl.load(c_ref + at, mask=ok, other=0.0)


@triton.jit
def sink_weight(sink, at, m, ok):
    """exp(sink - m) of the lines `at`: what one more key of value zero adds to the softmax sum; 0 where not `ok`."""
    s = tl.load(sink + at, mask=ok, other=float("-inf")).to(tl.float32)
    return tl.exp2((s - finite_or_zero(m)) * LOG2E)


@triton.jit
def emit(
    result, m, l, rows, heads, ok, d, d_ok, out, gate, gate_t, gate_h, gate_d, HAS_GATE: tl.constexpr,
    row_slot, o_ref, stats, site, sites, reference, kept, captured,
    REFERS: tl.constexpr, CAPTURES: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write finished lines: result [X, BD], softmax maximum m and sum l [X] of (rows, heads) [X] where `ok`.

    `kept` applies the correction of a consume, by the `reference` of the one line there is; `captured` stores O_ref and
    what the selection needs. The gate, applied last, is for `out` alone.
    """
    at = rows * HEADS + heads
    both = ok[:, None] & d_ok[None, :]
    if REFERS:
        if kept:
            weight, before, centre = reference
            result = before.to(tl.float32)[None, :] + weight * (result - centre[None, :])
    if CAPTURES:
        if captured:
            slot = tl.load(row_slot + rows, mask=ok, other=0).to(tl.int64)
            line = (slot * sites + site) * HEADS + heads
            tl.store(o_ref + line[:, None] * D + d[None, :], result, mask=both)
            tl.store(stats + at * 2, m, mask=ok)
            tl.store(stats + at * 2 + 1, l, mask=ok)
    if HAS_GATE:
        where_gate = (rows * gate_t + heads * gate_h)[:, None] + d[None, :] * gate_d
        factor = tl.load(gate + where_gate, mask=both, other=0.0).to(tl.float32)
        # A row that sees nothing stays zero, whatever its gate.
        result *= tl.sigmoid(tl.where(l[:, None] > 0, factor, 0.0))
    tl.store(out + at[:, None] * D + d[None, :], result, mask=both)


@triton.jit(do_not_specialize=["table_s", "plane", "plane_stride", "window", "site", "sites", "capacity"])
def attention_kernel(
    q, k_new, v_new, k_pool, v_pool, table, row_seq, row_position, row_length, row_loop, row_mode, row_slot,
    gate, gate_t, gate_h, gate_d,
    out, index, count, mass, o_ref, c_ref, scores, stats, part_acc, part_m, part_l, arrived, guess_acc, guess_stats,
    bias, sink, bias_t, bias_h, sink_t, sink_h, q_t, q_h, k_t, k_h, v_t, v_h,
    pool_plane, pool_page, pool_head, pool_token, table_s, scores_s,
    plane, plane_stride, scale, cap, quantile, window, site, sites, capacity,
    MODE: tl.constexpr, CAPTURES: tl.constexpr, FUSE_WRITE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINK: tl.constexpr, HAS_GATE: tl.constexpr,
    HEADS: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, KEPT_STAGES: tl.constexpr, PRECISION: tl.constexpr, SPAN: tl.constexpr,
    MIN_UNIT: tl.constexpr, MAX_UNITS: tl.constexpr, MIN_KEPT: tl.constexpr, MAX_KEPT: tl.constexpr,
    FIXED_KEPT: tl.constexpr, SLOTS: tl.constexpr, GUESSES: tl.constexpr, COPIES: tl.constexpr, ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of heads, spans of units, tiles of rows). Heads come first, so that programs which run at the
    same time read the same pages. A mixed launch has a program per query head: a dense row uses the first few.

    q [T, H, D]; pools [planes, pages, Hkv, PAGE, D]; out [T, H, D]; scores [T * H, scores_s] float32 (CAPTURES);
    stats [T * H, 2] the softmax maximum and sum (CAPTURES); part_* [T * H, SLOTS(, BD)] float32;
    guess_* as in `triton_guesses`; arrived int32 [T * H], zero before and after every launch.
    """
    start_early(PDL)
    column, span, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row0 = (tile * R).to(tl.int64)
    # Everything that addresses depend on is asked for at once, and what the pool will get from this row.
    seq = tl.load(row_seq + row0).to(tl.int64)
    loop = tl.load(row_loop + row0)
    position = tl.load(row_position + row0)
    slot = tl.load(row_slot + row0).to(tl.int64) if MODE != _DENSE else row0
    if MODE == _MIXED:
        mode = tl.load(row_mode + row0)
        kept = mode == 3
        captured = mode == 2
        width = tl.where(kept, 1, G)
    else:  # known when the kernel is built: only one of the two loops is in it
        kept: tl.constexpr = MODE == _CONSUME
        captured: tl.constexpr = MODE == _CAPTURE
        width: tl.constexpr = 1 if MODE == _CONSUME else G
    # The tile: query m is head head0 + m % width of row row0 + m // width. With GUESSES there is one row, and copies of
    # its queries (see `triton_guesses`), of which the first one of each head is its own.
    head0 = column * width
    kv0 = head0 // G
    mi = tl.arange(0, BM)
    d = tl.arange(0, BD)
    d_ok = d < D
    if FUSE_WRITE:
        own_k, own_v = load_own(k_new, v_new, row0, kv0, head0 < HEADS, k_t, k_h, v_t, v_h, d, d_ok)
    if GUESSES > 0:
        rows = row0 + mi * 0
        heads = head0 + mi % HALF // COPIES
        live = (mi % HALF // COPIES < width) & (heads < HEADS)
        own = live & (mi < HALF) & (mi % COPIES == 0)
    else:
        rows = row0 + mi // width if R > 1 else row0 + mi * 0
        heads = head0 + mi % width if R > 1 else head0 + mi
        live = (mi < R * width) & (heads < HEADS)
        own = live
    at_0, at_m = row0 * HEADS + head0, rows * HEADS + heads  # [BM]
    if R > 1:
        length_m = tl.load(row_length + rows, mask=live, other=0)
        length = tl.max(length_m, 0)
    else:
        length = tl.load(row_length + row0)
        if MODE == _MIXED:
            length = tl.where((mode == 0) | (head0 >= HEADS), 0, length)
        length_m = tl.where(live, length, 0)
    q_tile = tl.load(  # [BM, BD]
        q + rows[:, None] * q_t + heads[:, None] * q_h + d[None, :],
        mask=live[:, None] & d_ok[None, :],
        other=0.0,
    )
    first_m = length_m * 0
    first = 0
    if HAS_WINDOW:
        position_m = tl.load(row_position + rows, mask=live, other=0)
        first_m = tl.maximum(position_m - window + 1, 0)
        first = tl.min(tl.where(live & (length_m > 0), first_m, length), 0)
    table_row = table + seq * table_s
    base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + kv0 * pool_head
    own_at = base
    if FUSE_WRITE:
        page = page_of(table_row, tl.where(length > 0, position, 0), PAGE)
        own_at = key_place(base, page, position, PAGE, pool_page, pool_token)
    REFERS: tl.constexpr = MODE == _CONSUME or MODE == _MIXED
    reference = ()
    kept_line = index
    if REFERS:
        line = (slot * sites + site) * HEADS + head0
        kept_line = index + line * capacity
        reference = load_reference(mass, o_ref, c_ref, line, kept, d, d_ok, D)
        stored = tl.load(count + slot * sites + site, mask=kept, other=0)
    if kept:
        total = tl.where(length > 0, stored, 0)
        keys = MIN_KEPT if FIXED_KEPT else unit_size(total, MIN_KEPT, MAX_KEPT, BK)
    else:
        total = length - first
        keys = unit_size(total, MIN_UNIT, MAX_UNITS, BN)
    start = span * SPAN * keys
    end = tl.minimum(start + SPAN * keys, total)
    entries = ()
    if REFERS:  # how many there are need not be known
        entries = first_entries(kept_line, start, capacity, kept, BK)
    # The row's own key is its last visible one: the last program alone reads it, and stores it first.
    own_key = ()
    if FUSE_WRITE:
        own_key = (k_pool + own_at, v_pool + own_at, own_k, own_v, (length > 0) & (end == total))
    if total == 0:
        # Nothing to attend to: zeros. A consume of an empty slot has no answer, and must not look like one.
        if span == 0:
            if FUSE_WRITE:
                store_own(own_key, d, d_ok)
            empty = tl.zeros([BM, BD], tl.float32) + tl.where((length > 0) & kept, float("nan"), 0.0)
            tl.store(out + at_m[:, None] * D + d[None, :], empty, mask=own[:, None] & d_ok[None, :])
    elif start < total:
        bias_m = rows * bias_t + heads * bias_h
        line_m = tl.where(own, ((at_m - at_0) * scores_s).to(tl.int32), -1)
        unit = span * SPAN
        if kept:
            m, l, acc = attend_kept(
                q_tile, k_pool, v_pool, base, table_row, kept_line, entries, start, end, own_key, d, d_ok, pool_page,
                pool_token, scale, cap, live, bias, bias_m, FUSE_WRITE, HAS_CAP, HAS_BIAS, PAGE, BM, BK, BD,
                KEPT_STAGES, PRECISION,
            )  # fmt: skip
        else:
            unit, m, l, acc = attend_span(
                q_tile, k_pool, v_pool, base, table_row, start + first, end + first, keys, own_key, unit, first_m,
                length_m, at_m, own, d, d_ok, pool_page, pool_token, scale, cap, quantile, scores + at_0 * scores_s,
                line_m, part_acc, part_m, part_l, guess_acc, guess_stats, row0, head0, width, captured, bias, bias_m,
                FUSE_WRITE, GUESSES, COPIES, HAS_CAP, HAS_WINDOW, HAS_BIAS, CAPTURES, ASSEMBLY, HEADS, PAGE, BM, BN,
                BD, STAGES, PRECISION, SLOTS, SPAN,
            )  # fmt: skip
        units = tl.cdiv(total, keys)
        PAIRS: tl.constexpr = SPAN > 1
        if units <= (2 if PAIRS else 1):
            if HAS_SINK and MODE != _CONSUME:
                l += sink_weight(sink, rows * sink_t + heads * sink_h, m, live)
            result = tl.where(l[:, None] > 0, acc / l[:, None], 0.0)
            emit(result, m, l, rows, heads, own, d, d_ok, out, gate, gate_t, gate_h, gate_d, HAS_GATE, row_slot, o_ref,
                 stats, site, sites, reference, kept, captured, REFERS, CAPTURES, HEADS, D)  # fmt: skip
        else:
            place = unit // 2 if PAIRS else unit
            store_part(part_acc, part_m, part_l, at_m, own, place, m, l, acc, d, BD, SLOTS)
            tl.debug_barrier()
            ticket = tl.atomic_add(arrived + at_0, 1, sem="acq_rel", scope="gpu")
            if ticket == (units - 1) // SPAN:
                tl.store(arrived + at_0, 0)
                tl.debug_barrier()
                one = tl.arange(0, 1)
                for i in range(R * width):
                    row = row0 + i // width
                    head = head0 + i % width
                    acc_1, m_1, l_1 = merge_units(
                        part_acc, part_m, part_l, row * HEADS + head, units, d, PAIRS, SLOTS, BD
                    )
                    if HAS_SINK and MODE != _CONSUME:
                        l_1 += sink_weight(sink, row * sink_t + head * sink_h, m_1, True)
                    result = tl.where(l_1 > 0, acc_1 / l_1, 0.0)[None, :]  # [1, BD]
                    emit(result, one + m_1, one + l_1, row + one, head + one, one == 0, d, d_ok, out,
                         gate, gate_t, gate_h, gate_d, HAS_GATE, row_slot, o_ref, stats, site, sites, reference,
                         kept, captured, REFERS, CAPTURES, HEADS, D)  # fmt: skip
