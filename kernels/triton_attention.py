"""The attention kernel for CUDA: dense, capture, consume and mixed rows over the paged pool.

One program attends one unit of keys for one tile: the query heads of one key/value head and of `R` rows of one
sequence (dense, capture), or one query head of one row (consume). A unit is a run of consecutive visible keys, or of
retained keys, whose size follows from the row's own length alone; so is every order of addition, and a row's bits do
not depend on its neighbours or on the size of the batch. Programs leave partial results in scratch; the last one of a
tile to arrive merges them in order of the units, applies a consume's correction, and writes the output. Queries are
padded to the tensor cores' 16 rows. Scores and sums are float32. All addresses are int64.

Mirrors `reference.dense`, `reference.capture` (without the selection, see `triton_select`) and `reference.consume`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
MODE_DENSE = tl.constexpr(0)
MODE_CAPTURE = tl.constexpr(1)
MODE_CONSUME = tl.constexpr(2)
MODE_MIXED = tl.constexpr(3)


@triton.jit
def unit_size(length, MIN_UNIT: tl.constexpr, MAX_UNITS: tl.constexpr):
    """Keys per unit: the smallest MIN_UNIT * 2^i of which MAX_UNITS cover `length`."""
    unit = tl.full((), MIN_UNIT, tl.int32)
    while unit * MAX_UNITS < length:
        unit = unit * 2
    return unit


@triton.jit
def soft_cap(s, cap):
    """cap * tanh(s / cap), by the exponential that every backend has."""
    return cap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / cap)) + 1.0))


@triton.jit
def add_bias(s, bias, at, n, ok):
    """s [BM, BN] plus the bias of the keys n [BN] for the lines that start at `at` [BM]."""
    return s + tl.load(bias + at[:, None] + n[None, :], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def sink_weight(sink, at, m, ok):
    """exp(sink - m) of the lines `at`: what one more key of value zero adds to the softmax sum; 0 where not `ok`."""
    s = tl.load(sink + at, mask=ok, other=float("-inf")).to(tl.float32)
    return tl.exp2((s - tl.where(m == float("-inf"), 0.0, m)) * LOG2E)


@triton.jit
def page_of(table_row, n, ok, PAGE: tl.constexpr):
    """int32 [BN]: pages of the keys n [BN]; page 0 for entries that are not `ok`."""
    return tl.load(table_row + n // PAGE, mask=ok, other=0)


@triton.jit
def load_keys(pool, base, page, n, ok, d, d_ok, PAGE: tl.constexpr, pool_page, pool_token):
    """Rows n of one plane and head of a pool: [BN, BD], zeros where not `ok`."""
    at = base + page.to(tl.int64) * pool_page + (n % PAGE) * pool_token  # int64 [BN]
    return tl.load(pool + at[:, None] + d[None, :], mask=ok[:, None] & d_ok[None, :], other=0.0)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. PRECISION "upcast" widens first: Triton's interpreter cannot multiply bfloat16."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def online_softmax(s, m, l, acc, v, PRECISION: tl.constexpr):
    """One step over s [BM, BN] (masked entries -inf) and v [BN, BD]: updated (m, l, acc)."""
    m_new = tl.maximum(m, tl.max(s, 1))  # [BM]
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2((m - m_safe) * LOG2E)
    p = tl.exp2((s - m_safe[:, None]) * LOG2E)  # [BM, BN]
    acc = acc * alpha[:, None] + product(p.to(v.dtype), v, PRECISION)
    return m_new, l * alpha + tl.sum(p, 1), acc


@triton.jit
def merge_units(part_acc, part_m, part_l, at, units, d, MAX_UNITS: tl.constexpr, BD: tl.constexpr):
    """Partial results of one (row, head), merged in order of the units: (sum [BD], m, l)."""
    u = tl.arange(0, MAX_UNITS)
    live = u < units
    m_u = tl.load(part_m + at * MAX_UNITS + u, mask=live, other=float("-inf"), cache_modifier=".cg")
    l_u = tl.load(part_l + at * MAX_UNITS + u, mask=live, other=0.0, cache_modifier=".cg")
    m = tl.max(m_u, 0)
    m_safe = tl.where(m == float("-inf"), 0.0, m)
    w = tl.where(live, tl.exp2((m_u - m_safe) * LOG2E), 0.0)
    acc_u = tl.load(  # [MAX_UNITS, BD]
        part_acc + (at * MAX_UNITS + u)[:, None] * BD + d[None, :],
        mask=live[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    return tl.sum(acc_u * w[:, None], 0), m, tl.sum(l_u * w, 0)


@triton.jit
def write_kernel(
    k_new, v_new, k_pool, v_pool, table, row_seq, row_position, row_loop,
    k_t, k_h, v_t, v_h, pool_plane, pool_page, pool_head, pool_token, table_s, plane, plane_stride,
    PAGE: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Store one row's key and value of one head. Grid (rows, kv_heads). Mirrors `paging.write_rows`."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BD)
    position = tl.load(row_position + row)
    seq = tl.load(row_seq + row).to(tl.int64)
    page = tl.load(table + seq * table_s + position // PAGE).to(tl.int64)
    at = (plane + plane_stride * tl.load(row_loop + row)).to(tl.int64) * pool_plane
    at += page * pool_page + head * pool_head + (position % PAGE) * pool_token
    tl.store(k_pool + at + d, tl.load(k_new + row * k_t + head * k_h + d, mask=d < D), mask=d < D)
    tl.store(v_pool + at + d, tl.load(v_new + row * v_t + head * v_h + d, mask=d < D), mask=d < D)


@triton.jit
def store_scores(scores, at_m, scores_s, n, s, ok, seen, live, BM: tl.constexpr, M_LIVE: tl.constexpr):
    """Keep s [BM, BN] for the selection. A single row is picked out first: a store of the padded tile moves it all."""
    if M_LIVE == 1:
        first = tl.arange(0, BM) == 0
        row = tl.sum(tl.where(first[:, None], s, 0.0), 0)  # [BN]
        at = tl.max(tl.where(first, at_m, 0), 0)
        tl.store(scores + at * scores_s + n, row, mask=ok)
    else:
        tl.store(scores + at_m[:, None] * scores_s + n[None, :], s, mask=live[:, None] & seen)


@triton.jit
def emit(
    result, m, l, rows, heads, ok, d, d_ok, out, row_slot, mass, o_ref, c_ref, stats, site, sites,
    KEPT: tl.constexpr, CAPTURES: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Write finished lines: result [X, BD], softmax maximum m and sum l [X] of (rows, heads) [X] where `ok`.

    KEPT applies the correction of a consume, CAPTURES stores O_ref and what the selection needs.
    """
    at = rows * HEADS + heads
    both = ok[:, None] & d_ok[None, :]
    where_out = out + at[:, None] * D + d[None, :]
    if KEPT or CAPTURES:
        slot = tl.load(row_slot + rows, mask=ok, other=0).to(tl.int64)
        line = (slot * sites + site) * HEADS + heads
        where_ref = line[:, None] * D + d[None, :]
    if KEPT:
        weight = tl.load(mass + line, mask=ok, other=0.0)
        before = tl.load(o_ref + where_ref, mask=both, other=0.0).to(tl.float32)
        centre = tl.load(c_ref + where_ref, mask=both, other=0.0)
        result = before + weight[:, None] * (result - centre)
    tl.store(where_out, result, mask=both)
    if CAPTURES:
        tl.store(o_ref + where_ref, result, mask=both)
        tl.store(stats + at * 2, m, mask=ok)
        tl.store(stats + at * 2 + 1, l, mask=ok)


@triton.jit
def attention_kernel(
    q, k_new, v_new, k_pool, v_pool, table, row_seq, row_position, row_length, row_loop, row_mode, row_slot,
    out, index, count, mass, o_ref, c_ref, scores, stats, part_acc, part_m, part_l, arrived, bias, sink,
    bias_t, bias_h, sink_t, sink_h, q_t, q_h, k_t, k_h, v_t, v_h, pool_plane, pool_page, pool_head, pool_token,
    table_s, scores_s, plane, plane_stride, scale, cap, window, site, sites, capacity,
    MODE: tl.constexpr, CAPTURES: tl.constexpr, FUSE_WRITE: tl.constexpr, HAS_CAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SINK: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr,
    R: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BD: tl.constexpr, STAGES: tl.constexpr, KEPT_STAGES: tl.constexpr, PRECISION: tl.constexpr, MIN_UNIT: tl.constexpr,
    MAX_UNITS: tl.constexpr, MIN_KEPT: tl.constexpr,
    MAX_KEPT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (heads, units, tiles): KV heads for dense and capture, query heads for consume and mixed. Heads come
    first, so that programs which run at the same time read the same pages.

    q [T, H, D]; pools [planes, pages, Hkv, PAGE, D]; out [T, H, D]; scores [T * H, scores_s] float32 (CAPTURES);
    stats [T * H, 2] the softmax maximum and sum (CAPTURES); part_* [T * H, SLOTS(, BD)] float32;
    arrived int32 [T * H], zero before and after every launch.
    """
    unit, tile = tl.program_id(1), tl.program_id(2)
    row0 = (tile * R).to(tl.int64)
    PER_HEAD: tl.constexpr = MODE == MODE_CONSUME or MODE == MODE_MIXED
    M_LIVE: tl.constexpr = 1 if PER_HEAD else R * G
    # Everything that addresses depend on is asked for at once.
    seq = tl.load(row_seq + row0).to(tl.int64)
    loop = tl.load(row_loop + row0)
    position = tl.load(row_position + row0)
    slot = tl.load(row_slot + row0).to(tl.int64) if MODE != MODE_DENSE else row0
    if MODE == MODE_MIXED:
        mode = tl.load(row_mode + row0)
        kept = mode == 3
        captured = mode == 2
    else:  # known when the kernel is built: only one of the two loops is in it
        kept: tl.constexpr = MODE == MODE_CONSUME
        captured: tl.constexpr = MODE == MODE_CAPTURE
    if PER_HEAD:
        head0 = tl.program_id(0)
        kv = head0 // G
    else:
        kv = tl.program_id(0)
        head0 = kv * G
    # The tile: query m is head head0 + m % G of row row0 + m // G.
    mi = tl.arange(0, BM)
    d = tl.arange(0, BD)
    d_ok = d < D
    live = mi < M_LIVE
    rows = row0 + mi // G if M_LIVE > 1 else row0 + mi * 0
    heads = head0 + mi % G if M_LIVE > 1 else head0 + mi * 0
    at_m = rows * HEADS + heads  # [BM]
    length_m = tl.load(row_length + rows, mask=live, other=0)
    q_tile = tl.load(  # [BM, BD]
        q + rows[:, None] * q_t + heads[:, None] * q_h + d[None, :],
        mask=live[:, None] & d_ok[None, :],
        other=0.0,
    )
    entry = (slot * sites + site) * HEADS + head0  # line of the store
    if MODE == MODE_MIXED:
        length_m = tl.where(mode == 0, 0, length_m)
    length = tl.max(length_m, 0)
    first = 0
    if HAS_WINDOW:
        position_m = tl.load(row_position + rows, mask=live, other=0)
        first_m = tl.maximum(position_m - window + 1, 0)
        first = tl.min(tl.where(live & (length_m > 0), first_m, length), 0)
    if kept:
        stored = tl.load(count + slot * sites + site)
        total = tl.where(length > 0, stored, 0)
        keys = unit_size(total, MIN_KEPT, MAX_KEPT)
    else:
        total = length - first
        keys = unit_size(total, MIN_UNIT, MAX_UNITS)
    units = tl.cdiv(total, keys)
    table_row = table + seq * table_s
    base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + kv * pool_head

    # The row's own key is its last visible one: the last unit alone reads it, and stores it first.
    if FUSE_WRITE and (unit == tl.maximum(units - 1, 0)) & (length > 0):
        at = (
            base
            + tl.load(table_row + position // PAGE).to(tl.int64) * pool_page
            + (position % PAGE) * pool_token
        )
        tl.store(k_pool + at + d, tl.load(k_new + row0 * k_t + kv * k_h + d, mask=d_ok), mask=d_ok)
        tl.store(v_pool + at + d, tl.load(v_new + row0 * v_t + kv * v_h + d, mask=d_ok), mask=d_ok)
        tl.debug_barrier()
    if units == 0:
        # Nothing to attend to: zeros. A consume of an empty slot has no answer, and must not look like one.
        if unit == 0:
            empty = tl.zeros([BM, BD], tl.float32) + tl.where((length > 0) & kept, float("nan"), 0.0)
            tl.store(out + at_m[:, None] * D + d[None, :], empty, mask=live[:, None] & d_ok[None, :])
    elif unit < units:
        m = tl.full([BM], float("-inf"), tl.float32)
        l = tl.zeros([BM], tl.float32)
        acc = tl.zeros([BM, BD], tl.float32)
        start = unit * keys
        end = tl.minimum(start + keys, total)
        if kept:
            kept_line = index + entry * capacity
            e = tl.arange(0, BK)
            for e0 in tl.range(start, end, BK, num_stages=KEPT_STAGES):
                ok = e0 + e < end
                n = tl.load(kept_line + e0 + e, mask=ok, other=0)
                page = page_of(table_row, n, ok, PAGE)
                k = load_keys(k_pool, base, page, n, ok, d, d_ok, PAGE, pool_page, pool_token)  # [BN, BD]
                v = load_keys(v_pool, base, page, n, ok, d, d_ok, PAGE, pool_page, pool_token)
                s = product(q_tile, tl.trans(k), PRECISION) * scale  # [BM, BN]
                if HAS_CAP:
                    s = soft_cap(s, cap)
                if HAS_BIAS:
                    s = add_bias(s, bias, rows * bias_t + heads * bias_h, n, live[:, None] & ok[None, :])
                m, l, acc = online_softmax(tl.where(ok[None, :], s, float("-inf")), m, l, acc, v, PRECISION)
        else:
            offset = tl.arange(0, BN)
            # Pages of the next step are loaded one step ahead: the loads of keys never wait for them.
            start += first
            end += first
            page = page_of(table_row, start + offset, start + offset < end, PAGE)
            for n0 in tl.range(start, end, BN, num_stages=STAGES):
                n = n0 + offset
                ok = n < end
                page_next = page_of(table_row, n + BN, n + BN < end, PAGE)
                k = load_keys(k_pool, base, page, n, ok, d, d_ok, PAGE, pool_page, pool_token)  # [BN, BD]
                v = load_keys(v_pool, base, page, n, ok, d, d_ok, PAGE, pool_page, pool_token)
                s = product(q_tile, tl.trans(k), PRECISION) * scale  # [BM, BN]
                if HAS_CAP:
                    s = soft_cap(s, cap)
                if HAS_BIAS:
                    s = add_bias(s, bias, rows * bias_t + heads * bias_h, n, live[:, None] & ok[None, :])
                seen = ok[None, :] & (n[None, :] < length_m[:, None])
                if HAS_WINDOW:
                    seen = seen & (n[None, :] >= first_m[:, None])
                if CAPTURES:
                    if captured:
                        store_scores(scores, at_m, scores_s, n, s, ok, seen, live, BM, M_LIVE)
                m, l, acc = online_softmax(tl.where(seen, s, float("-inf")), m, l, acc, v, PRECISION)
                page = page_next
        if units == 1:
            if HAS_SINK and not PER_HEAD:
                l += sink_weight(sink, rows * sink_t + heads * sink_h, m, live)
            result = tl.where(l[:, None] > 0, acc / l[:, None], 0.0)
            if kept:
                emit(result, m, l, rows, heads, live, d, d_ok, out, row_slot, mass, o_ref, c_ref, stats, site, sites,
                     True, False, HEADS, D)  # fmt: skip
            elif captured:
                emit(result, m, l, rows, heads, live, d, d_ok, out, row_slot, mass, o_ref, c_ref, stats, site, sites,
                     False, CAPTURES, HEADS, D)  # fmt: skip
            else:
                emit(result, m, l, rows, heads, live, d, d_ok, out, row_slot, mass, o_ref, c_ref, stats, site, sites,
                     False, False, HEADS, D)  # fmt: skip
        else:
            part = at_m * SLOTS + unit
            tl.store(part_m + part, m, mask=live)
            tl.store(part_l + part, l, mask=live)
            tl.store(part_acc + part[:, None] * BD + d[None, :], acc, mask=live[:, None])
            tl.debug_barrier()
            ticket = tl.atomic_add(arrived + row0 * HEADS + head0, 1, sem="acq_rel", scope="gpu")
            if ticket == units - 1:
                tl.store(arrived + row0 * HEADS + head0, 0)
                tl.debug_barrier()
                one = tl.arange(0, 1)
                for i in range(M_LIVE):
                    row = row0 + i // G if M_LIVE > 1 else row0
                    head = head0 + i % G if M_LIVE > 1 else head0
                    total_acc, total_m, total_l = merge_units(
                        part_acc, part_m, part_l, row * HEADS + head, units, d, SLOTS, BD
                    )
                    if HAS_SINK and not PER_HEAD:
                        total_l += sink_weight(sink, row * sink_t + head * sink_h, total_m, True)
                    result = tl.where(total_l > 0, total_acc / total_l, 0.0)[None, :]  # [1, BD]
                    if kept:
                        emit(result, one + total_m, one + total_l, row + one, head + one, one == 0, d, d_ok, out,
                             row_slot, mass, o_ref, c_ref, stats, site, sites, True, False, HEADS, D)  # fmt: skip
                    elif captured:
                        emit(result, one + total_m, one + total_l, row + one, head + one, one == 0, d, d_ok, out,
                             row_slot, mass, o_ref, c_ref, stats, site, sites, False, CAPTURES, HEADS, D)  # fmt: skip
                    else:
                        emit(result, one + total_m, one + total_l, row + one, head + one, one == 0, d, d_ok, out,
                             row_slot, mass, o_ref, c_ref, stats, site, sites, False, False, HEADS, D)  # fmt: skip
