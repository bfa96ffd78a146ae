"""What capture adds to the dense kernel: the retained set, its mass, and C_ref.

`threshold_kernel` finds, for one (row, head), the cut that `keep` scores reach, by narrowing a bracket of sortable
integers (their order is that of the floats), and counts per slice of keys how many retained keys come before it.
`retain_kernel` then works on all slices at once: each program writes the retained positions of its slices, in
ascending order, gathers their values, and reduces weights exp(s - max) and weighted values; the last one of a
(row, head) to arrive adds the parts up in order of the slices. Ties go to the lowest positions.

Mirrors `reference.capture`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import LOG2E, load_keys, page_of, product, unit_size

LOWEST = tl.constexpr(-2147483648)
HIGHEST = tl.constexpr(2147483647)


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
def load_sortable(scores_row, n, length):
    """Keys of the scores n [NB]; the lowest integer, which no score has, beyond the row's length.

    Loads go by fours: lines of scores are padded to a multiple of 16.
    """
    s = tl.load(scores_row + n, mask=n // 4 * 4 < length, other=0.0)
    return tl.where(n < length, sortable(s), LOWEST)


@triton.jit
def count_from(scores_row, length, key, candidate, IN_REGISTERS: tl.constexpr, NB: tl.constexpr):
    """How many of a row's scores are at or above `candidate`."""
    found = tl.sum((key >= candidate).to(tl.int32), 0)
    if not IN_REGISTERS:
        for n0 in range(NB, length, NB):
            other = load_sortable(scores_row, n0 + tl.arange(0, NB), length)
            found += tl.sum((other >= candidate).to(tl.int32), 0)
    return found


@triton.jit
def moments(key, n, length):
    """(lowest key, sum, sum of squares) of the scores n [NB] of a row."""
    inside = n < length
    s = tl.where(inside, unsortable(key), 0.0)
    return tl.min(tl.where(inside, key, HIGHEST), 0), tl.sum(s, 0), tl.sum(s * s, 0)


@triton.jit
def describe(scores_row, length, key, IN_REGISTERS: tl.constexpr, NB: tl.constexpr):
    """(lowest key, mean, standard deviation) of a row's scores."""
    n = tl.arange(0, NB)
    low, total, squares = moments(key, n, length)
    if not IN_REGISTERS:
        for n0 in range(NB, length, NB):
            other = load_sortable(scores_row, n0 + n, length)
            low_0, total_0, squares_0 = moments(other, n0 + n, length)
            low, total, squares = tl.minimum(low, low_0), total + total_0, squares + squares_0
    mean = total / length
    return low, mean, tl.sqrt(tl.maximum(squares / length - mean * mean, 1e-12))


@triton.jit
def find_cut(
    scores_row, length, keep, key, top, quantile, IN_REGISTERS: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """(cut, ties): the keys to retain are those at or above `cut`, and the first `ties` equal to `cut - 1`.

    A bracket [low, high) with count(low) >= keep > count(high) shrinks. The first guess takes the scores as normally
    distributed, the second follows that distribution's density; later ones interpolate between the logarithms of the
    two counts; the end that stays twice in a row loses half its weight (the Illinois rule), and every eighth turn
    halves the integers in between, so that it always ends. It stops early where exactly `keep` scores reach.
    """
    low, mean, deviation = describe(scores_row, length, key, IN_REGISTERS, NB)
    high = top + 1
    reached = length
    beyond = tl.full((), 0, tl.int32)  # how many reach `high`
    target = tl.log2(keep.to(tl.float32))
    over = tl.log2(length.to(tl.float32)) - target  # of the low end, in units of log2(count)
    under = -1.0 - target  # of the high end, which nothing reaches: log2 of one half
    density = length * tl.exp2(-0.5 * LOG2E * quantile * quantile) * 0.3989423 / deviation
    guess = mean + quantile * deviation
    side = tl.full((), 0, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while (reached != keep) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        if turn % 8 != 7:
            middle = tl.minimum(tl.maximum(sortable(guess), low + 1), high - 1)
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
            beyond = found
            under = value
            over = tl.where(side == -1, over * 0.5, over)
            side = tl.full((), -1, tl.int32)
        if turn == 0:
            guess = unsortable(middle) + (found - keep + 0.5) / density
        else:
            left = unsortable(low)
            guess = left + over / (over - under) * (unsortable(high - 1) - left)
        turn += 1
    exact = reached == keep
    return tl.where(exact, low, low + 1), tl.where(exact, 0, keep - beyond)


@triton.jit
def write_places(
    places, line, key, slice0, slices, cut, ties, above, equal, keep, NB: tl.constexpr, SLICE: tl.constexpr
):
    """Places [2, line] of the slices in key [NB]: where each begins in the retained list, and the ties left for it.

    `above` and `equal` count what earlier slices hold; returned with this block's added.
    """
    COUNT: tl.constexpr = NB // SLICE
    # Both counts of a slice fit one integer: a reduction less.
    marks = (key >= cut).to(tl.int32) + ((key == cut - 1).to(tl.int32) << 16)
    both = tl.sum(tl.reshape(marks, [COUNT, SLICE]), 1)  # [COUNT]
    own_above, own_equal = both & 0xFFFF, both >> 16
    before_above = above + tl.cumsum(own_above, 0) - own_above
    before_equal = equal + tl.cumsum(own_equal, 0) - own_equal
    j = slice0 + tl.arange(0, COUNT)
    begin = tl.minimum(before_above + tl.minimum(before_equal, ties), keep)
    tl.store(places + j, begin, mask=j < slices)
    tl.store(places + line + j, tl.maximum(ties - before_equal, 0), mask=j < slices)
    return above + tl.sum(own_above, 0), equal + tl.sum(own_equal, 0)


@triton.jit
def threshold_row(
    scores_row, places, line, cuts, top, length, keep, quantile,
    IN_REGISTERS: tl.constexpr, NB: tl.constexpr, SLICE: tl.constexpr,
):  # fmt: skip
    """The cut and the places of one row, in blocks of NB scores."""
    n = tl.arange(0, NB)
    key = load_sortable(scores_row, n, length)
    cut, ties = find_cut(scores_row, length, keep, key, top, quantile, IN_REGISTERS, NB)
    slices = tl.cdiv(length, SLICE)
    above, equal = write_places(places, line, key, 0, slices, cut, ties, 0, 0, keep, NB, SLICE)
    if not IN_REGISTERS:
        for n0 in range(NB, length, NB):
            key = load_sortable(scores_row, n0 + n, length)
            above, equal = write_places(
                places, line, key, n0 // SLICE, slices, cut, ties, above, equal, keep, NB, SLICE
            )
    tl.store(places + slices, keep)
    tl.store(cuts, cut)


@triton.jit(do_not_specialize=["line", "numerator", "denominator"])
def threshold_kernel(
    scores, stats, row_length, row_mode, cuts, places, scores_s, line, numerator, denominator, quantile,
    MIXED: tl.constexpr, HEADS: tl.constexpr, SMALL: tl.constexpr, NB: tl.constexpr, PASSES: tl.constexpr,
    SLICE: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). scores [T * H, scores_s] -> cuts [T * H], places [T * H, 2, line].

    Rows up to SMALL and up to NB scores stay in registers; longer ones (PASSES) are read once per turn of the search.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(row_length + row)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    if wanted & (length > 0):
        at = row * HEADS + head
        keep = ((length.to(tl.int64) * numerator + (denominator - 1)) // denominator).to(tl.int32)
        top = sortable(tl.load(stats + at * 2))
        own, place, cut = scores + at * scores_s, places + at * 2 * line, cuts + at
        if length <= SMALL:
            threshold_row(own, place, line, cut, top, length, keep, quantile, True, SMALL, SLICE)
        elif NB > SMALL:
            if PASSES and length > NB:
                threshold_row(own, place, line, cut, top, length, keep, quantile, False, NB, SLICE)
            else:
                threshold_row(own, place, line, cut, top, length, keep, quantile, True, NB, SLICE)


@triton.jit
def write_kept(scores_row, kept_line, places, line, cut, j, length, room, SLICE: tl.constexpr):
    """Write the retained positions of slice j to their places in the retained list."""
    n = j * SLICE + tl.arange(0, SLICE)
    begin, ties = tl.load(places + j), tl.load(places + line + j)
    key = load_sortable(scores_row, n, length)
    chosen = key >= cut
    if ties > 0:
        same = key == cut - 1
        chosen = chosen | (same & (tl.cumsum(same.to(tl.int32), 0) <= ties))
    place = begin + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(kept_line + place, n, mask=chosen & (place < room))


@triton.jit
def reduce_kept(
    scores_row, maximum, kept_line, v_pool, base, table_row, start, end, d, d_ok, pool_page, pool_token,
    PAGE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(sum of weighted values [BD], sum of weights) of entries start .. end - 1 of a retained list.

    A float32 weight is split into two of the values' dtype, so that C_ref loses nothing to their rounding; the padded
    rows of the matrix product make this free.
    """
    offset = tl.arange(0, BN)
    l = tl.zeros([BN], tl.float32)
    mi = tl.arange(0, 16)
    acc = tl.zeros([16, BD], tl.float32)
    for e0 in tl.range(start, end, BN, num_stages=STAGES):
        ok = e0 + offset < end
        n = tl.load(kept_line + e0 + offset, mask=ok, other=0)
        page = page_of(table_row, n, ok, PAGE)
        v = load_keys(v_pool, base, page, n, ok, d, d_ok, PAGE, pool_page, pool_token)  # [BN, BD]
        s = tl.load(scores_row + n, mask=ok, other=float("-inf"))
        w = tl.exp2((s - maximum) * LOG2E)
        high = w.to(v.dtype)
        low = (w - high.to(tl.float32)).to(v.dtype)
        both = tl.where(mi[:, None] == 0, high[None, :], tl.where(mi[:, None] == 1, low[None, :], 0.0))
        acc += product(both.to(v.dtype), v, PRECISION)
        l += w
    return tl.sum(acc, 0), tl.sum(l, 0)


@triton.jit(
    do_not_specialize=[
        "line",
        "table_s",
        "plane",
        "plane_stride",
        "site",
        "sites",
        "capacity",
        "numerator",
        "denominator",
    ]
)
def retain_kernel(
    scores, stats, cuts, places, v_pool, table, row_seq, row_length, row_loop, row_mode, row_slot,
    index, count, mass, c_ref, part_acc, part_l, arrived,
    scores_s, line, pool_plane, pool_page, pool_head, pool_token, table_s, plane, plane_stride, site, sites, capacity,
    numerator, denominator,
    MIXED: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, SLICE: tl.constexpr,
    MAX_PARTS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (heads, parts, rows) -> index, count, mass and c_ref of the store. A part is one slice, in long rows 2^i."""
    head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(row_length + row)
    slot = tl.load(row_slot + row).to(tl.int64)
    seq = tl.load(row_seq + row).to(tl.int64)
    loop = tl.load(row_loop + row)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    slices = tl.cdiv(length, SLICE)
    each = unit_size(slices, 1, MAX_PARTS, 1)
    parts = tl.cdiv(slices, each)
    if wanted & (part < parts):
        keep = ((length.to(tl.int64) * numerator + (denominator - 1)) // denominator).to(tl.int32)
        at = row * HEADS + head
        entry = (slot * sites + site) * HEADS + head
        d = tl.arange(0, BD)
        d_ok = d < D
        scores_row, place, kept_line = (
            scores + at * scores_s,
            places + at * 2 * line,
            index + entry * capacity,
        )
        cut, maximum = tl.load(cuts + at), tl.load(stats + at * 2)
        first = part * each
        last = tl.minimum(first + each, slices)
        room = tl.minimum(keep, capacity)
        start, end = tl.load(place + first), tl.minimum(tl.load(place + last), room)
        for j in range(first, last):
            write_kept(scores_row, kept_line, place, line, cut, j, length, room, SLICE)
        tl.debug_barrier()
        base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + (head // G) * pool_head
        sums, weight = reduce_kept(
            scores_row, maximum, kept_line, v_pool, base, table + seq * table_s, start, end, d, d_ok, pool_page,
            pool_token, PAGE, BN, BD, STAGES, PRECISION,
        )  # fmt: skip
        if (head == 0) & (part == 0):
            tl.store(count + slot * sites + site, keep)
        done = parts == 1
        if parts > 1:
            mine = at * SLOTS + part
            tl.store(part_acc + mine * BD + d, sums)
            tl.store(part_l + mine, weight)
            tl.debug_barrier()
            ticket = tl.atomic_add(arrived + at, 1, sem="acq_rel", scope="gpu")
            done = ticket == parts - 1
            if done:
                tl.store(arrived + at, 0)
                tl.debug_barrier()
                u = tl.arange(0, MAX_PARTS)
                live = u < parts
                lines = (at * SLOTS + u)[:, None] * BD + d[None, :]
                sums = tl.sum(
                    tl.load(part_acc + lines, mask=live[:, None], other=0.0, cache_modifier=".cg"), 0
                )
                weight = tl.sum(
                    tl.load(part_l + at * SLOTS + u, mask=live, other=0.0, cache_modifier=".cg"), 0
                )
        if done:
            tl.store(c_ref + entry * D + d, sums / weight, mask=d_ok)
            tl.store(mass + entry, weight / tl.load(stats + at * 2 + 1))
