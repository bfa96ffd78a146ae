"""The cut of long rows, from the few scores that may decide it.

From an evenly spread sample of the row follows a bracket [low, high) of scores that nearly always holds the cut
(`bracket_row`). Then a program per unit of keys counts the scores of its unit from `high` on, and lists those inside
the bracket. The last program of a (row, head) to arrive searches for the cut among what was listed. It leaves the cut,
and for each unit where its retained keys begin in the row's list, how many they are, and how many ties it may take:
`triton_select` goes on from there.

The counts tell whether the bracket holds the cut. Where it does not, the same search runs over all scores of the row:
lists have room for whole units, and lie as the units' scores do, so scores are but longer lists. The sample decides
about time, never about the answer. Rows of up to SHORT keys are `triton_select`'s alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_cut import (
    cut_of,
    describe,
    listed_keys,
    read_lists,
    retained_count,
    score_step,
    search,
    whole_bracket,
    with_kept,
)
from .triton_parts import LOWEST, scatter, sortable, start_early, unit_size

SURE = tl.constexpr(4.0)
"""Standard deviations of a sampled count between the bracket's ends and the cut."""
ABOVE = tl.constexpr(1 << 16)
"""Two counts share an integer: of listed scores below this bit, of those above the bracket from it on."""
PLACE = tl.constexpr(3)
"""Integers kept for each unit: before the last program arrives, how many scores are above the bracket and how many
inside; then where its retained keys begin, how many they are, and how many ties it may take."""
PLACE_FIELDS = PLACE.value


@triton.jit
def load_sample(scores_row, length, SAMPLE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """(scores [SAMPLE], how many they stand for): evenly spread over a row, but for keys that are kept whatever their
    scores. Where the others are fewer than SAMPLE, some are taken more than once.
    """
    if FIRST + LAST > 0:
        scores_row += tl.minimum(length - 1, FIRST)
        length = tl.maximum(length - (FIRST + LAST), 1)
    i = tl.arange(0, SAMPLE)
    return tl.load(scores_row + i * (length // SAMPLE) + i * (length % SAMPLE) // SAMPLE), length


@triton.jit
def find_bracket(some, length, keep, top, quantile, SAMPLE: tl.constexpr):
    """(low, high, guess, step): from the sample, the cut nearly always lies in low .. high - 1, as integers; guess and
    step are what `search` starts from in the whole row.

    About share * SAMPLE of the sample should reach the cut, give or take some standard deviations; the bracket lies
    between scores that a few more and a few less reach. How many exactly may vary by `slack`, which saves turns.
    """
    key = sortable(some)
    mean, deviation = describe(some, key == key, 1.0 / SAMPLE)
    share = keep.to(tl.float32) / length.to(tl.float32)
    expected = share * SAMPLE
    off = SURE * tl.sqrt(expected * (1.0 - share)) + 2.0
    slack = (off * 0.25).to(tl.int32)
    step = score_step(deviation, quantile, SAMPLE)
    guess = mean + quantile * deviation
    most = tl.minimum((expected + off).to(tl.int32) + 1, SAMPLE)
    least = (expected - off).to(tl.int32)
    nothing = tl.full((), 0, tl.int32)
    low, reached, _ = search(
        key, key, 0, 0, 0, 0, 0, tl.full((), LOWEST + 1, tl.int32), nothing + SAMPLE, top + 1, nothing, SAMPLE, top,
        most, slack, guess + (expected - most) * step, step, 0, 1, 1,
    )  # fmt: skip
    high = top + 1
    if least > 0:
        aim = tl.maximum(least - slack, 1)
        above, found, _ = search(
            key, key, 0, 0, 0, 0, 0, low, reached, high, nothing, SAMPLE, top, aim, least - aim,
            guess + (expected - aim) * step, step, 0, 1, 1,
        )  # fmt: skip
        high = tl.where(found <= least, above, above + 1)
    return low, high, guess, step * (SAMPLE / length.to(tl.float32))


@triton.jit
def bracket_row(
    scores_row, cuts, starts, top, length, keep, quantile,
    SAMPLE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Leave (low, high) in `cuts` and (guess, step) in `starts`, for the programs of the row's units."""
    some, standing = load_sample(scores_row, length, SAMPLE, FIRST, LAST)
    chosen = keep - tl.minimum(length, FIRST + LAST)
    low, high, guess, step = find_bracket(some, standing, chosen, top, quantile, SAMPLE)
    tl.store(cuts, low)
    tl.store(cuts + 1, high)
    tl.store(starts, guess)
    tl.store(starts + 1, step)


@triton.jit
def load_piece(scores_row, left, PIECE: tl.constexpr, COLUMNS: tl.constexpr):
    """The PIECE scores from here on, as rows [COLUMNS]; zeros if none is `left`."""
    offset = tl.arange(0, COLUMNS)
    rows = ()
    for i in tl.static_range(PIECE // COLUMNS):
        rows += (tl.load(scores_row + i * COLUMNS + offset, mask=offset * 0 < left, other=0.0),)
    return rows


@triton.jit
def list_bracket(
    scores_row, list_row, rows, start, end, length, low, high,
    PIECE: tl.constexpr, COLUMNS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Write a unit's scores inside [low, high) where its list begins, at `start`: (how many are above, how many
    inside). rows: the unit's first scores, of `load_piece`. Keys that are kept whatever their scores count as above.

    A list has no order. So it has a piece's scores column by column, and one scan over the columns tells their places.
    """
    offset = tl.arange(0, COLUMNS)
    above = tl.full((), 0, tl.int32)
    listed = tl.full((), 0, tl.int32)
    for n0 in range(start, end, PIECE):
        marks = tl.zeros([COLUMNS], tl.int32)
        wanted = ()
        for i in tl.static_range(PIECE // COLUMNS):
            first = n0 + i * COLUMNS
            key = tl.where(offset < end - first, sortable(rows[i]), LOWEST)
            key = with_kept(key, first + offset, length, end, FIRST, LAST)
            inside = (key >= low) & (key < high)
            marks += inside.to(tl.int32) + tl.where(key >= high, ABOVE, 0)
            wanted += (inside,)
        place = start + listed - 1 + ((tl.cumsum(marks, 0) - marks) & (ABOVE - 1))
        for i in tl.static_range(PIECE // COLUMNS):
            place += wanted[i].to(tl.int32)
            scatter(list_row + place, rows[i], wanted[i], ASSEMBLY)
        rows = load_piece(scores_row + n0 + PIECE, end - n0 - PIECE, PIECE, COLUMNS)
        both = tl.sum(marks, 0)
        listed += both & (ABOVE - 1)
        above += both >> 16
    return above, listed


@triton.jit
def count_units(key, cut, higher, equal):
    """higher and equal [SLOTS], plus how many of key [SLOTS, N] reach the cut, and how many are just below."""
    both = tl.sum((key >= cut).to(tl.int32) + tl.where(key == cut - 1, ABOVE, 0), 1)
    return higher + (both & (ABOVE - 1)), equal + (both >> 16)


@triton.jit
def whole_units(length, unit, SLOTS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """(above, skip, have) [SLOTS] of units whose lists are all their scores: keys that are kept whatever their scores
    are above the bracket, and not in the lists, of which they are the first `skip` and the last.
    """
    start = tl.arange(0, SLOTS) * unit
    have = tl.minimum(tl.maximum(length - start, 0), unit)
    skip = tl.zeros([SLOTS], tl.int32)
    above = skip
    if FIRST + LAST > 0:
        skip = tl.minimum(tl.maximum(FIRST - start, 0), have)
        above = have
        have = tl.maximum(tl.minimum(tl.maximum(length - LAST - start, 0), unit) - skip, 0)
        above -= have
    return above, skip, have


@triton.jit
def place_units(
    scores_row, list_row, cuts, places, low, high, guess, step, top, length, keep, unit,
    WIDE: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The cut of one row from what its units counted and listed, and what each of them retains."""
    u = tl.arange(0, SLOTS)
    live = u * unit < length
    mine = places + u * PLACE
    s = read_lists(list_row, unit, length, 0, WIDE, SLOTS)
    above = tl.load(mine, mask=live, other=0, cache_modifier=".cg")
    have = tl.load(mine + 1, mask=live, other=0, cache_modifier=".cg")
    skip = tl.zeros([SLOTS], tl.int32)
    lists, beyond = list_row, tl.sum(above, 0)
    reached = beyond + tl.sum(have, 0)
    if (keep <= beyond) | (keep > reached):  # the sample was unlike the row
        lists = scores_row
        low, reached, high, beyond = whole_bracket(length, top, keep, FIRST, LAST)
        above, skip, have = whole_units(length, unit, SLOTS, FIRST, LAST)
        s = read_lists(lists, unit, length, 0, WIDE, SLOTS)
    longest = tl.max(skip + have, 0)
    key = listed_keys(s, skip, have, 0, WIDE)
    low, reached, beyond = search(
        key, lists, unit, skip, have, longest, beyond, low, reached, high, beyond, length, top, keep, 0, guess, step,
        WIDE, STEP, SLOTS,
    )  # fmt: skip
    cut, ties = cut_of(low, reached, beyond, keep)
    above, equal = count_units(key, cut, above, u * 0)
    for first in range(WIDE, longest, STEP):
        more = read_lists(lists, unit, length, first, STEP, SLOTS)
        above, equal = count_units(listed_keys(more, skip, have, first, STEP), cut, above, equal)
    ties_left = tl.maximum(ties - (tl.cumsum(equal, 0) - equal), 0)
    kept = above + tl.minimum(equal, ties_left)
    tl.store(cuts, cut)
    tl.store(cuts + 1, ties)
    tl.store(mine, tl.cumsum(kept, 0) - kept, mask=live)
    tl.store(mine + 1, kept, mask=live)
    tl.store(mine + 2, ties_left, mask=live)


@triton.jit(do_not_specialize=["numerator", "denominator"])
def narrow_kernel(
    scores, lists, stats, row_length, row_mode, cuts, starts, places, arrived, scores_s, numerator, denominator,
    MIXED: tl.constexpr, HEADS: tl.constexpr, SHORT: tl.constexpr, PIECE: tl.constexpr, COLUMNS: tl.constexpr,
    WIDE: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr, MIN_UNIT: tl.constexpr, MAX_UNITS: tl.constexpr,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, units, rows). scores [T * H, scores_s], cuts [T * H, 2] (low and high) and starts [T * H, 2], of
    which the search makes its first guess -> cuts (cut and ties), places [T * H, SLOTS, PLACE] of the rows of more than
    SHORT keys.

    A unit is read PIECE scores at a time, in rows of COLUMNS. Of each list WIDE scores stay in registers, the rest is
    read STEP at a time. lists [T * H, scores_s] is scratch; arrived int32 [T * H] is zero before and after every
    launch.
    """
    head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(row_length + row)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    unit = tl.multiple_of(unit_size(length, MIN_UNIT, MAX_UNITS, BLOCK), BLOCK)
    start = part * unit
    wanted = wanted & (length > SHORT) & (start < length)
    at = row * HEADS + head
    own, listed, place = scores + at * scores_s, lists + at * scores_s, places + at * SLOTS * PLACE
    # The kernel ahead starts once attention is complete: what that left is asked for before the wait.
    rows = load_piece(own + start, wanted.to(tl.int32), PIECE, COLUMNS)
    top = sortable(tl.load(stats + at * 2))
    start_early(PDL)
    if wanted:
        low, high = tl.load(cuts + at * 2), tl.load(cuts + at * 2 + 1)
        guess, step = tl.load(starts + at * 2), tl.load(starts + at * 2 + 1)
        end = tl.minimum(start + unit, length)
        above, inside = list_bracket(
            own, listed, rows, start, end, length, low, high, PIECE, COLUMNS, FIRST, LAST, ASSEMBLY
        )
        tl.store(place + part * PLACE, above)
        tl.store(place + part * PLACE + 1, inside)
        tl.debug_barrier()
        keys = end - start  # programs add up their keys: how many programs there are would take a division
        if tl.atomic_add(arrived + at, keys, sem="acq_rel", scope="gpu") == length - keys:
            tl.store(arrived + at, 0)
            tl.debug_barrier()
            keep = retained_count(length, numerator, denominator, FIRST, LAST)
            place_units(
                own, listed, cuts + at * 2, place, low, high, guess, step, top, length, keep, unit, WIDE, STEP, SLOTS,
                FIRST, LAST,
            )  # fmt: skip
