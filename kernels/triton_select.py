"""What capture adds to the dense kernel: the retained set, its mass, and C_ref.

One program selects for one (row, head), with all scores in registers where they fit. It finds the cut that `keep`
scores reach, by narrowing a bracket of sortable integers (their order is that of the floats); writes the retained
positions in ascending order, ties going to the lowest; and sums the retained values. Of those, attention has left sums
over the keys above a guessed cut (see `triton_guesses`): the keys between guess and cut are listed as well, and only
their values are read. Where guesses miss by more keys than are retained, the retained ones are read themselves.

Mirrors `reference.capture`. No bit depends on how many warps share the work, which follows from the block table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_guesses import choose_guesses, sum_guesses
from .triton_parts import (
    HIGHEST,
    LOG2E,
    LOWEST,
    load_keys,
    page_of,
    product,
    sortable,
    unit_layout,
    unsortable,
)


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
def mark(
    key, n, length, cut, ties, equal, best, unit_bits, GUESSES: tl.constexpr
):  # fmt: skip
    """(retained, fix) of the keys n [NB]: which are retained, and which of them the guesses are wrong about.

    `equal` keys before these are equal to `cut - 1`.
    """
    retained = key >= cut
    if ties > equal:
        same = key == cut - 1
        retained = retained | (same & (equal + tl.cumsum(same.to(tl.int32), 0) <= ties))
    fix = retained
    if GUESSES > 0:
        guess = tl.load(best + (n >> unit_bits), mask=n < length, other=HIGHEST)
        fix = retained != (key >= guess)
    return retained, fix


@triton.jit
def count_fixes(
    scores_row, length, key, cut, ties, best, unit_bits,
    GUESSES: tl.constexpr, IN_REGISTERS: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """About how many keys of a row its guesses are wrong; `mark` of all blocks."""
    n = tl.arange(0, NB)
    _, fix = mark(key, n, length, cut, ties, 0, best, unit_bits, GUESSES)
    fixes = tl.sum(fix.to(tl.int32), 0)
    if not IN_REGISTERS:
        equal = tl.sum((key == cut - 1).to(tl.int32), 0)
        for n0 in range(NB, length, NB):
            other = load_sortable(scores_row, n0 + n, length)
            _, fix = mark(other, n0 + n, length, cut, ties, equal, best, unit_bits, GUESSES)
            fixes += tl.sum(fix.to(tl.int32), 0)
            equal += tl.sum((other == cut - 1).to(tl.int32), 0)
    return fixes


@triton.jit
def write_marked(kept_line, fix_line, n, retained, fix, above, before, room, guessed):
    """Write retained positions behind `above` others, and those to fix behind `before` others."""
    both = tl.cumsum(retained.to(tl.int32) + (fix.to(tl.int32) << 16), 0)  # two counts in one scan
    place = above + (both & 0xFFFF) - 1
    tl.store(kept_line + place, n, mask=retained & (place < room))
    if guessed:
        place = before + ((both >> 16) & 0xFFFF) - 1
        tl.store(fix_line + place, n, mask=fix & (place < room))


@triton.jit
def select_row(
    scores_row, kept_line, fix_line, guess_stats, best, at, top, length, keep, room, quantile, units, unit_bits,
    GUESSES: tl.constexpr, SLOTS: tl.constexpr, IN_REGISTERS: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """List the retained keys of one row, and those to fix. (cut, number of fixes: -1 where guesses do not help)."""
    n = tl.arange(0, NB)
    key = load_sortable(scores_row, n, length)
    cut, ties = find_cut(scores_row, length, keep, key, top, quantile, IN_REGISTERS, NB)
    fixes = tl.full((), -1, tl.int32)
    if GUESSES > 0:
        choose_guesses(guess_stats, best, at, units, cut, GUESSES, SLOTS)
        tl.debug_barrier()
        fixes = count_fixes(scores_row, length, key, cut, ties, best, unit_bits, GUESSES, IN_REGISTERS, NB)
        fixes = tl.where(fixes < room, fixes, -1)
    retained, fix = mark(key, n, length, cut, ties, 0, best, unit_bits, GUESSES)
    write_marked(kept_line, fix_line, n, retained, fix, 0, 0, room, fixes >= 0)
    if not IN_REGISTERS:
        above, before = tl.sum(retained.to(tl.int32), 0), tl.sum(fix.to(tl.int32), 0)
        equal = tl.sum((key == cut - 1).to(tl.int32), 0)
        for n0 in range(NB, length, NB):
            key = load_sortable(scores_row, n0 + n, length)
            retained, fix = mark(key, n0 + n, length, cut, ties, equal, best, unit_bits, GUESSES)
            write_marked(kept_line, fix_line, n0 + n, retained, fix, above, before, room, fixes >= 0)
            above += tl.sum(retained.to(tl.int32), 0)
            before += tl.sum(fix.to(tl.int32), 0)
            equal += tl.sum((key == cut - 1).to(tl.int32), 0)
    return cut, fixes


@triton.jit
def sum_listed(
    scores_row, maximum, list_line, entries, best, unit_bits, guessed, v_pool, base, table_row, d, d_ok, pool_page,
    pool_token, PAGE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(sum of weighted values [BD], sum of weights) of listed keys; what a guess holds too much counts negative.

    A float32 weight is split into two of the values' dtype, so that C_ref loses nothing to their rounding; the padded
    rows of the matrix product make this free. A product with ones sums the weights.
    """
    offset, mi = tl.arange(0, BN), tl.arange(0, 16)
    acc = tl.zeros([16, BD], tl.float32)
    total = tl.zeros([16, 16], tl.float32)
    n = tl.load(list_line + offset, mask=offset < entries, other=0)
    page = page_of(table_row, n, offset < entries, PAGE)
    for e0 in tl.range(0, entries, BN, num_stages=STAGES):
        ok, ahead = e0 + offset < entries, e0 + BN + offset < entries
        n_next = tl.load(list_line + e0 + BN + offset, mask=ahead, other=0)
        page_next = page_of(table_row, n_next, ahead, PAGE)
        v = load_keys(v_pool, base, page, n, ok, d, d_ok, PAGE, pool_page, pool_token)  # [BN, BD]
        s = tl.load(scores_row + n, mask=ok, other=float("-inf"))
        w = tl.exp2((s - maximum) * LOG2E)
        if guessed:
            guess = tl.load(best + (n >> unit_bits), mask=ok, other=HIGHEST)
            w = tl.where(sortable(s) >= guess, -w, w)
        high = w.to(v.dtype)
        low = (w - high.to(tl.float32)).to(v.dtype)
        both = tl.where(mi[:, None] == 0, high[None, :], tl.where(mi[:, None] == 1, low[None, :], 0.0)).to(
            v.dtype
        )
        acc += product(both, v, PRECISION)
        total += product(both, tl.full([BN, 16], 1.0, tl.float32).to(v.dtype), PRECISION)
        n, page = n_next, page_next
    first = tl.arange(0, 16) == 0
    return tl.sum(acc, 0), tl.sum(tl.where(first, tl.sum(total, 0), 0.0), 0)


@triton.jit(
    do_not_specialize=[
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
def select_kernel(
    scores, stats, v_pool, table, row_seq, row_length, row_loop, row_mode, row_slot, index, count, mass, c_ref,
    guess_acc, guess_stats, guess_best, fixes_list,
    scores_s, pool_plane, pool_page, pool_head, pool_token, table_s, plane, plane_stride, site, sites, capacity,
    numerator, denominator, quantile,
    MIXED: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    GUESSES: tl.constexpr, SLOTS: tl.constexpr, MIN_UNIT: tl.constexpr, MAX_UNITS: tl.constexpr,
    SMALL: tl.constexpr, NB: tl.constexpr, PASSES: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). scores [T * H, scores_s] -> index, count, mass and c_ref of the store.

    Rows up to SMALL and up to NB scores stay in registers; longer ones (PASSES) are read once per turn of the search.
    fixes_list [T * H, capacity] and guess_best [T * H, SLOTS] are scratch.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(row_length + row)
    slot = tl.load(row_slot + row).to(tl.int64)
    seq = tl.load(row_seq + row).to(tl.int64)
    loop = tl.load(row_loop + row)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    if wanted & (length > 0):
        at = row * HEADS + head
        entry = (slot * sites + site) * HEADS + head
        keep = ((length.to(tl.int64) * numerator + (denominator - 1)) // denominator).to(tl.int32)
        room = tl.minimum(keep, capacity)
        maximum = tl.load(stats + at * 2)
        unit_bits, units = unit_layout(length, MIN_UNIT, MAX_UNITS)
        top, own, best = sortable(maximum), scores + at * scores_s, guess_best + at * SLOTS
        kept_line, fix_line = index + entry * capacity, fixes_list + at * capacity
        cut = tl.full((), 0, tl.int32)
        fixes = tl.full((), -1, tl.int32)
        if length <= SMALL:
            cut, fixes = select_row(own, kept_line, fix_line, guess_stats, best, at, top, length, keep, room, quantile,
                                    units, unit_bits, GUESSES, SLOTS, True, SMALL)  # fmt: skip
        elif NB > SMALL:
            if PASSES and length > NB:
                cut, fixes = select_row(own, kept_line, fix_line, guess_stats, best, at, top, length, keep, room,
                                        quantile, units, unit_bits, GUESSES, SLOTS, False, NB)  # fmt: skip
            else:
                cut, fixes = select_row(own, kept_line, fix_line, guess_stats, best, at, top, length, keep, room,
                                        quantile, units, unit_bits, GUESSES, SLOTS, True, NB)  # fmt: skip
        tl.debug_barrier()
        d = tl.arange(0, BD)
        base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + (head // G) * pool_head
        guessed = fixes >= 0
        listed = kept_line
        if guessed:
            listed = fix_line
        sums, weight = sum_listed(
            own, maximum, listed, tl.where(guessed, fixes, room), best, unit_bits, guessed, v_pool, base,
            table + seq * table_s, d, d < D, pool_page, pool_token, PAGE, BN, BD, STAGES, PRECISION,
        )  # fmt: skip
        if GUESSES > 0:
            if guessed:
                key, which = choose_guesses(guess_stats, best, at, units, cut, GUESSES, SLOTS)
                more, heavier = sum_guesses(
                    guess_acc, guess_stats, at, key, which, maximum, d, GUESSES, SLOTS, BD
                )
                sums += more
                weight += heavier
        if head == 0:
            tl.store(count + slot * sites + site, keep)
        tl.store(c_ref + entry * D + d, sums / weight, mask=d < D)
        tl.store(mass + entry, weight / tl.load(stats + at * 2 + 1))
