"""What capture adds to the dense kernel: the retained set, its mass, and C_ref.

`select_kernel` finds, for one (row, head), the count-th highest score by narrowing a bracket of
sortable integers (their order is that of the floats), then writes the retained positions in ascending order together
with their weights exp(s - max). Ties go to the lowest positions. `reference_kernel` gathers the retained values and
reduces weights and weighted values to mass and C_ref, with units and merging as in `triton_attention`.

Mirrors `reference.capture`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_attention import LOG2E, load_keys, page_of, product, unit_size


@triton.jit
def sortable(s):
    """float32 -> int32 whose signed order is the order of the floats; -0.0 and 0.0 become one."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unsortable(key):
    """The inverse of `sortable`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def count_from(scores_row, length, key, candidate, IN_REGISTERS: tl.constexpr, NB: tl.constexpr):
    """How many of a row's scores are at or above `candidate`."""
    if IN_REGISTERS:
        found = tl.sum((key >= candidate).to(tl.int32), 0)
    else:
        found = tl.full((), 0, tl.int32)
        for n0 in range(0, length, NB):
            n = n0 + tl.arange(0, NB)
            other = sortable(tl.load(scores_row + n, mask=n < length, other=float("-inf")))
            found += tl.sum(((other >= candidate) & (n < length)).to(tl.int32), 0)
    return found


@triton.jit
def bounds(scores_row, length, key, IN_REGISTERS: tl.constexpr, NB: tl.constexpr):
    """The lowest and highest key of a row."""
    n = tl.arange(0, NB)
    low = tl.min(tl.where(n < length, key, 2147483647), 0)
    high = tl.max(key, 0)
    if not IN_REGISTERS:
        for n0 in range(NB, length, NB):
            other = sortable(tl.load(scores_row + n0 + n, mask=n0 + n < length, other=float("-inf")))
            low = tl.minimum(low, tl.min(tl.where(n0 + n < length, other, 2147483647), 0))
            high = tl.maximum(high, tl.max(tl.where(n0 + n < length, other, -2147483648), 0))
    return low, high


@triton.jit
def find_threshold(scores_row, length, keep, key, IN_REGISTERS: tl.constexpr, NB: tl.constexpr):
    """(threshold, reached): the highest threshold that at least `keep` scores reach, and how many do.

    A bracket [low, high) with count(low) >= keep > count(high) shrinks by interpolation between the logarithms of the
    two counts; the end that stays twice in a row loses half its weight (the Illinois rule), and every eighth turn
    halves the integers in between, so that it always ends. It stops early where exactly `keep` scores reach.
    """
    low, top = bounds(scores_row, length, key, IN_REGISTERS, NB)
    high = top + 1
    reached = length
    target = tl.log2(keep.to(tl.float32))
    over = tl.log2(length.to(tl.float32)) - target  # of the low end, in units of log2(count)
    under = -1.0 - target  # of the high end, which nothing reaches: log2 of one half
    side = tl.full((), 0, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while (reached != keep) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        if turn % 8 != 7:
            left = unsortable(low)
            guess = sortable(left + over / (over - under) * (unsortable(high - 1) - left))
            middle = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        found = count_from(scores_row, length, key, middle, IN_REGISTERS, NB)
        value = tl.log2(tl.maximum(found.to(tl.float32), 0.5)) - target
        if found >= keep:
            low = middle
            reached = found
            over = tl.maximum(value, 1e-3)
            under = tl.where(side == 1, under * 0.5, under)
            side = tl.full((), 1, tl.int32)
        else:
            high = middle
            under = value
            over = tl.where(side == -1, over * 0.5, over)
            side = tl.full((), -1, tl.int32)
        turn += 1
    return low, reached


@triton.jit
def select_kernel(
    scores, stats, weights, row_length, row_mode, row_slot, index, count,
    scores_s, site, sites, capacity, numerator, denominator,
    MIXED: tl.constexpr, HEADS: tl.constexpr, NB: tl.constexpr, NC: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). scores [T * H, scores_s] -> index, count of the store and weights [T * H, capacity]."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(row_length + row)
    slot = tl.load(row_slot + row).to(tl.int64)
    at = row * HEADS + head
    maximum = tl.load(stats + at * 2)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    if wanted & (length > 0):
        scores_row = scores + at * scores_s
        keep = ((length.to(tl.int64) * numerator + (denominator - 1)) // denominator).to(tl.int32)
        n = tl.arange(0, NB)
        key = sortable(tl.load(scores_row + n, mask=n < length, other=float("-inf")))
        key = tl.where(n < length, key, -2147483648)
        threshold, reached = find_threshold(scores_row, length, keep, key, IN_REGISTERS, NB)
        # Of the scores equal to the threshold, the last reached - keep by position are too many.
        surplus = reached - keep
        equal = tl.full((), 0, tl.int32)
        if surplus > 0:
            equal = keep - count_from(scores_row, length, key, threshold + 1, IN_REGISTERS, NB)
        kept_line = index + ((slot * sites + site) * HEADS + head) * capacity
        written = tl.full((), 0, tl.int32)
        for n0 in range(0, length, NC):
            nc = n0 + tl.arange(0, NC)
            inside = nc < length
            if IN_REGISTERS and NC == NB:
                own = key
                s = unsortable(key)
            else:
                s = tl.load(scores_row + nc, mask=inside, other=float("-inf"))
                own = sortable(s)
            chosen = (own >= threshold) & inside
            if surplus > 0:
                same = (own == threshold) & inside
                rank = tl.cumsum(same.to(tl.int32), 0)
                chosen = chosen & ((own > threshold) | (rank <= equal))
                equal -= tl.sum(same.to(tl.int32), 0)
            place = written + tl.cumsum(chosen.to(tl.int32), 0) - 1
            chosen = chosen & (place < capacity)
            tl.store(kept_line + place, nc, mask=chosen)
            tl.store(weights + at * capacity + place, tl.exp2((s - maximum) * LOG2E), mask=chosen)
            written += tl.sum(chosen.to(tl.int32), 0)
        if head == 0:
            tl.store(count + slot * sites + site, keep)


@triton.jit
def reference_kernel(
    weights, stats, v_pool, table, row_seq, row_length, row_loop, row_mode, row_slot, index, count, mass, c_ref,
    part_acc, part_l, arrived,
    pool_plane, pool_page, pool_head, pool_token, table_s, plane, plane_stride, site, sites, capacity,
    MIXED: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    MIN_KEPT: tl.constexpr, MAX_KEPT: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (heads, units, rows). weights [T * H, capacity], retained values -> mass and c_ref of the store.

    A float32 weight is split into two of the values' dtype, so that C_ref loses nothing to their rounding; the padded
    rows of the matrix product make this free.
    """
    head, unit, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(row_length + row)
    slot = tl.load(row_slot + row).to(tl.int64)
    seq = tl.load(row_seq + row).to(tl.int64)
    loop = tl.load(row_loop + row)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    total = tl.where(wanted & (length > 0), tl.load(count + slot * sites + site), 0)
    keys = unit_size(total, MIN_KEPT, MAX_KEPT)
    units = tl.cdiv(total, keys)
    if unit < units:
        at = row * HEADS + head
        entry = (slot * sites + site) * HEADS + head
        d = tl.arange(0, BD)
        d_ok = d < D
        mi = tl.arange(0, 16)
        table_row = table + seq * table_s
        base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + (head // G) * pool_head
        acc = tl.zeros([16, BD], tl.float32)
        l = tl.zeros([BN], tl.float32)
        start = unit * keys
        end = tl.minimum(start + keys, total)
        kept_line = index + entry * capacity
        offset = tl.arange(0, BN)
        for e0 in tl.range(start, end, BN, num_stages=STAGES):
            ok = e0 + offset < end
            n = tl.load(kept_line + e0 + offset, mask=ok, other=0)
            w = tl.load(weights + at * capacity + e0 + offset, mask=ok, other=0.0)  # [BN]
            page = page_of(table_row, n, ok, PAGE)
            v = load_keys(v_pool, base, page, n, ok, d, d_ok, PAGE, pool_page, pool_token)  # [BN, BD]
            high = w.to(v.dtype)
            low = (w - high.to(tl.float32)).to(v.dtype)
            both = tl.where(mi[:, None] == 0, high[None, :], tl.where(mi[:, None] == 1, low[None, :], 0.0))
            acc += product(both.to(v.dtype), v, PRECISION)
            l += w
        part = at * SLOTS + unit
        tl.store(part_acc + part * BD + d, tl.sum(acc, 0))
        tl.store(part_l + part, tl.sum(l, 0))
        tl.debug_barrier()
        ticket = tl.atomic_add(arrived + at, 1, sem="acq_rel", scope="gpu")
        if ticket == units - 1:
            tl.store(arrived + at, 0)
            tl.debug_barrier()
            u = tl.arange(0, SLOTS)
            live = u < units
            lines = (at * SLOTS + u)[:, None] * BD + d[None, :]
            sums = tl.sum(tl.load(part_acc + lines, mask=live[:, None], other=0.0, cache_modifier=".cg"), 0)
            weight = tl.sum(tl.load(part_l + at * SLOTS + u, mask=live, other=0.0, cache_modifier=".cg"), 0)
            tl.store(c_ref + entry * D + d, sums / weight, mask=d_ok)
            tl.store(mass + entry, weight / tl.load(stats + at * 2 + 1))
