"""What capture adds to the dense kernel: the retained set, its mass, and C_ref.

One program selects for one (row, head), with all scores in registers where they fit. It finds the cut that `keep`
scores reach (see `triton_cut`); writes the retained positions in ascending order, ties going to the lowest; and sums
the retained values. Of those, attention has left sums over the keys above a guessed cut (see `triton_guesses`): the
keys between guess and cut are listed as well, and only their values are read. Where guesses miss by more keys than are
retained, the retained ones are read themselves.

Mirrors `reference.capture`. No bit depends on how many warps share the work, which follows from the block table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_cut import find_cut, load_sortable
from .triton_guesses import choose_guesses, sum_guesses
from .triton_parts import HIGHEST, LOG2E, load_keys, page_of, product, sortable, unit_size

FIX = tl.constexpr(1 << 16)
"""Two counts share an integer: of retained keys below this bit, of keys to fix above."""


@triton.jit
def retained_of(marks):
    """Retained keys in a sum of marks."""
    return marks & (FIX - 1)


@triton.jit
def fixes_of(marks):
    """Keys to fix in a sum of marks."""
    return (marks >> 16) & 0xFFFF


@triton.jit
def counts_before(x, N: tl.constexpr):
    """[N]: sums of the entries of x [N] before each, by comparing all with all in two levels."""
    B: tl.constexpr = 1 << ((N.bit_length() - 1) // 2)
    A: tl.constexpr = N // B
    a, b = tl.arange(0, A), tl.arange(0, B)
    grid = tl.reshape(x, [A, B])
    inner = tl.sum(tl.where(b[None, None, :] < b[None, :, None], grid[:, None, :], 0), 2)  # [A, B]
    outer = tl.sum(tl.where(a[None, :] < a[:, None], tl.sum(grid, 1)[None, :], 0), 1)  # [A]
    return tl.reshape(inner + outer[:, None], [N])


@triton.jit
def running_counts(x, NB: tl.constexpr):
    """The cumulative sum of x [NB]. A long one as scans of 128 entries, each within a warp, and one over their totals:
    across 16 warps Triton's scan takes several times the instructions.
    """
    if NB <= 8192:
        return tl.cumsum(x, 0)
    else:
        lines = tl.reshape(x, [NB // 128, 128])
        before = counts_before(tl.sum(lines, 1), NB // 128)
        return tl.reshape(tl.cumsum(lines, 1) + before[:, None], [NB])


@triton.jit
def mark(key, n0, length, cut, ties, equal, best, unit, GUESSES: tl.constexpr, NB: tl.constexpr):
    """[NB] for the keys n0 .. n0 + NB - 1: 1 if it is retained, plus FIX if the guesses are wrong about that.

    `equal` keys before these are equal to `cut - 1`.
    """
    retained = key >= cut
    if ties > equal:
        same = key == cut - 1
        retained = retained | (same & (equal + running_counts(same.to(tl.int32), NB) <= ties))
    marks = retained.to(tl.int32)
    if GUESSES > 0:
        four = n0 + tl.arange(0, NB // 4) * 4  # units have whole fours of keys
        guess = tl.load(best + (four // unit), mask=four < length, other=HIGHEST)
        counted = key >= tl.reshape(tl.broadcast_to(guess[:, None], [NB // 4, 4]), [NB])
        marks += (retained != counted).to(tl.int32) * FIX
    return marks


@triton.jit
def count_fixes(
    scores_row, length, fixes, equal, cut, ties, best, unit, GUESSES: tl.constexpr, NB: tl.constexpr
):  # fmt: skip
    """How many keys of a row its guesses are wrong about: `fixes` of the first NB, and those of the others."""
    for n0 in range(NB, length, NB):
        key = load_sortable(scores_row, n0 + tl.arange(0, NB), length)
        marks = mark(key, n0, length, cut, ties, equal, best, unit, GUESSES, NB)
        fixes += fixes_of(tl.sum(marks, 0))
        equal += tl.sum((key == cut - 1).to(tl.int32), 0)
    return fixes


@triton.jit
def write_marked(kept_line, fix_line, n, marks, above, before, room, helps, NB: tl.constexpr):
    """Write retained positions behind `above` others, and those to fix behind `before` others."""
    both = running_counts(marks, NB)  # two counts in one scan
    place = above + retained_of(both) - 1
    tl.store(kept_line + place, n, mask=(retained_of(marks) > 0) & (place < room))
    if helps:
        place = before + fixes_of(both) - 1
        tl.store(fix_line + place, n, mask=(fixes_of(marks) > 0) & (place < room))


@triton.jit
def select_row(
    scores_row, kept_line, fix_line, guess_stats, best, at, top, length, keep, room, quantile, units, unit,
    GUESSES: tl.constexpr, SLOTS: tl.constexpr, IN_REGISTERS: tl.constexpr, NB: tl.constexpr,
):  # fmt: skip
    """List the retained keys of one row, and those to fix. (cut, number of fixes: -1 where guesses do not help)."""
    n = tl.arange(0, NB)
    key = load_sortable(scores_row, n, length)
    cut, ties = find_cut(scores_row, length, keep, key, top, quantile, IN_REGISTERS, NB)
    if GUESSES > 0:
        choose_guesses(guess_stats, best, at, units, cut, GUESSES, SLOTS)
        tl.debug_barrier()
    marks = mark(key, 0, length, cut, ties, 0, best, unit, GUESSES, NB)
    both = tl.sum(marks, 0)
    fixes = fixes_of(both)
    equal = tl.full((), 0, tl.int32)
    if not IN_REGISTERS:
        equal = tl.sum((key == cut - 1).to(tl.int32), 0)
        fixes = count_fixes(scores_row, length, fixes, equal, cut, ties, best, unit, GUESSES, NB)
    helps = (fixes < room) & (GUESSES > 0)
    write_marked(kept_line, fix_line, n, marks, 0, 0, room, helps, NB)
    if not IN_REGISTERS:
        above, before = retained_of(both), fixes_of(both)
        for n0 in range(NB, length, NB):
            key = load_sortable(scores_row, n0 + n, length)
            marks = mark(key, n0, length, cut, ties, equal, best, unit, GUESSES, NB)
            write_marked(kept_line, fix_line, n0 + n, marks, above, before, room, helps, NB)
            both = tl.sum(marks, 0)
            above += retained_of(both)
            before += fixes_of(both)
            equal += tl.sum((key == cut - 1).to(tl.int32), 0)
    fixes = tl.where(helps, fixes, -1)
    return cut, fixes


@triton.jit
def sum_listed(
    scores_row, maximum, list_line, entries, best, unit, guessed, v_pool, base, table_row, d, d_ok, pool_page,
    pool_token, PAGE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, PRECISION: tl.constexpr,
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
    for e0 in tl.range(0, entries, BN, num_stages=2):
        ok, ahead = e0 + offset < entries, e0 + BN + offset < entries
        n_next = tl.load(list_line + e0 + BN + offset, mask=ahead, other=0)
        page_next = page_of(table_row, n_next, ahead, PAGE)
        v = load_keys(v_pool, base, page, n, ok, d, d_ok, PAGE, pool_page, pool_token)  # [BN, BD]
        s = tl.load(scores_row + n, mask=ok, other=float("-inf"))
        w = tl.exp2((s - maximum) * LOG2E)
        guess = tl.load(best + (n // unit), mask=ok & guessed, other=HIGHEST)
        w = tl.where(sortable(s) >= guess, -w, w)
        high = w.to(v.dtype)
        low = (w - high.to(tl.float32)).to(v.dtype)
        both = tl.where(mi[:, None] == 0, high[None, :], tl.where(mi[:, None] == 1, low[None, :], 0.0))
        both = both.to(v.dtype)
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
    UNIT_STEP: tl.constexpr,
    SMALL: tl.constexpr, NB: tl.constexpr, PASSES: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). scores [T * H, scores_s] -> index, count, mass and c_ref of the store.

    Rows up to SMALL and up to NB scores stay in registers; longer ones (PASSES) are read block by block in every turn
    of the search.
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
        unit = unit_size(length, MIN_UNIT, MAX_UNITS, UNIT_STEP)
        units = tl.cdiv(length, unit)
        top, own, best = sortable(maximum), scores + at * scores_s, guess_best + at * SLOTS
        kept_line, fix_line = index + entry * capacity, fixes_list + at * capacity
        cut = tl.full((), 0, tl.int32)
        fixes = tl.full((), -1, tl.int32)
        if length <= SMALL:
            cut, fixes = select_row(own, kept_line, fix_line, guess_stats, best, at, top, length, keep, room, quantile,
                                    units, unit, GUESSES, SLOTS, True, SMALL)  # fmt: skip
        elif NB > SMALL:
            if PASSES and length > NB:
                cut, fixes = select_row(own, kept_line, fix_line, guess_stats, best, at, top, length, keep, room,
                                        quantile, units, unit, GUESSES, SLOTS, False, min(NB, 8192))  # fmt: skip
            else:
                cut, fixes = select_row(own, kept_line, fix_line, guess_stats, best, at, top, length, keep, room,
                                        quantile, units, unit, GUESSES, SLOTS, True, NB)  # fmt: skip
        tl.debug_barrier()
        d = tl.arange(0, BD)
        base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + (head // G) * pool_head
        guessed = fixes >= 0
        listed = kept_line
        if guessed:
            listed = fix_line
        sums, weight = sum_listed(
            own, maximum, listed, tl.where(guessed, fixes, room), best, unit, guessed, v_pool, base,
            table + seq * table_s, d, d < D, pool_page, pool_token, PAGE, BN, BD, PRECISION,
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
