"""The last part of a capture's selection: the retained set, its mass, and C_ref, from the cut.

Positions are listed in ascending order; ties go to the lowest ones. Then the values of the retained keys are summed:
attention has left, for each of its units of keys, the sums over the keys above a guessed cut (see `triton_guesses`), so
only the keys between guess and cut are listed, with their weights, and read. Where the guesses miss by as many keys as
are retained, or there are none, the retained ones are.

A row of up to NB keys is one program's, which also finds the cut (`select_kernel`). Of a longer row each unit has a
program (`retain_kernel`), which begins where those of earlier units end in the row's list; the last program of a
(row, head) to arrive adds the units up.

Mirrors `reference.capture`. The order of a sum follows from places in the list, so no bit depends on how many warps
share the work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_cut import cut_row, retained_count, with_kept
from .triton_guesses import choose_guess, sum_guesses
from .triton_narrow import PLACE, bracket_row
from .triton_parts import (
    HIGHEST,
    LOG2E,
    LOWEST,
    key_place,
    load_keys,
    page_of,
    place_of,
    scatter,
    sortable,
    start_early,
    tree_sum,
    unit_size,
    unsigned,
    unsortable,
)

FIX = tl.constexpr(1 << 16)
"""Two counts share an integer: of retained keys below this bit, of keys to fix above."""


@triton.jit
def list_unit(
    s, scores_row, table_row, kept_line, fix_line, weight_line, start, end, length, cut, ties, guess, unit, maximum,
    limit, SLOTS: tl.constexpr, PAGE: tl.constexpr, PIECE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Write the retained positions among the keys start .. end - 1, and of those that the guess is wrong about the
    places of their values and their weights, negative where the key is above the guess; at most `limit` of each.
    Returns how many the latter are. s [PIECE] are the first scores. guess: of the keys, or [SLOTS] of each `unit`.
    """
    n = start + tl.arange(0, PIECE)
    above = tl.full((), 0, tl.int32)
    fixes = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    for n0 in range(start, end, PIECE):
        key = tl.where(n < end, sortable(s), LOWEST)
        s = tl.load(scores_row + n + PIECE, mask=n * 0 < end - n0 - PIECE, other=0.0)
        rank = with_kept(key, n, length, end, FIRST, LAST)
        retained = rank >= cut
        if ties > equal:
            same = rank == cut - 1
            retained = retained | (same & (equal + tl.cumsum(same.to(tl.int32), 0) <= ties))
            equal += tl.sum(same.to(tl.int32), 0)
        mine = tl.gather(guess, tl.minimum(n // unit, SLOTS - 1), 0) if SLOTS > 0 else guess
        guessed = key >= mine
        wrong = retained != guessed
        page = page_of(table_row, tl.minimum(n, end - 1), PAGE)  # asked for before the scan
        marks = retained.to(tl.int32) + wrong.to(tl.int32) * FIX
        both = tl.cumsum(marks, 0)  # two counts in one scan
        place = above + (both & (FIX - 1)) - 1
        scatter(kept_line + place, n, retained & (place < limit), ASSEMBLY)
        place = fixes + (both >> 16) - 1
        wrong = wrong & (place < limit)
        w = tl.exp2((unsortable(key) - maximum) * LOG2E)
        scatter(weight_line + place, tl.where(guessed, -w, w), wrong, ASSEMBLY)
        scatter(fix_line + place, place_of(page, n, PAGE), wrong, ASSEMBLY)
        total = tl.sum(marks, 0)
        above += total & (FIX - 1)
        fixes += total >> 16
        n += PIECE
    return fixes


@triton.jit
def sum_listed(
    fix_line, weight_line, entries, v_pool, base, d, d_ok, pool_page, pool_token,
    PAGE: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """(sum of weighted values [BD], sum of weights) of listed keys, AHEAD blocks of BN on their way at a time."""
    offset = tl.arange(0, BN)
    acc = tl.zeros([BN, BD], tl.float32)
    weights = tl.zeros([BN], tl.float32)
    for first in range(0, entries, BN * AHEAD):
        places, ws, vs = (), (), ()
        for i in tl.static_range(AHEAD):
            e = first + i * BN + offset
            places += (tl.load(fix_line + e, mask=e < entries, other=0),)
            ws += (tl.load(weight_line + e, mask=e < entries, other=0.0),)
        tl.debug_barrier()  # or values are asked for before the entries of the next block are
        for i in tl.static_range(AHEAD):
            ok = first + i * BN + offset < entries
            at = key_place(base, unsigned(places[i]) // PAGE, places[i], PAGE, pool_page, pool_token)
            vs += (load_keys(v_pool, at, ok, d, d_ok),)
        for i in tl.static_range(AHEAD):
            acc = tl.fma(vs[i].to(tl.float32), ws[i][:, None], acc)
            weights += ws[i]
    return tree_sum(acc, BN, BD), tl.sum(tree_sum(weights[:, None], BN, 1), 0)


@triton.jit
def add_units(part_acc, part_l, line, units, d, SLOTS: tl.constexpr, BD: tl.constexpr):
    """(weighted values [BD], weights) of a (row, head) from those of its units."""
    WIDE: tl.constexpr = min(4, SLOTS)
    u = tl.arange(0, WIDE)
    acc = tl.zeros([WIDE, BD], tl.float32)
    weights = tl.zeros([WIDE], tl.float32)
    for u0 in tl.static_range(0, SLOTS, WIDE):
        live = u0 + u < units
        lines = (line + u0 + u)[:, None] * BD + d[None, :]
        acc += tl.load(part_acc + lines, mask=live[:, None], other=0.0, cache_modifier=".cg")
        weights += tl.load(part_l + line + u0 + u, mask=live, other=0.0, cache_modifier=".cg")
    return tree_sum(acc, WIDE, BD), tl.sum(tree_sum(weights[:, None], WIDE, 1), 0)


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
    scores, stats, cuts, starts, v_pool, table, row_seq, row_length, row_loop, row_mode, row_slot,
    index, count, mass, c_ref, guess_acc, guess_stats, fixes, weights,
    scores_s, pool_plane, pool_page, pool_head, pool_token, table_s, plane, plane_stride, site, sites,
    capacity, numerator, denominator, quantile,
    MIXED: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    GUESSES: tl.constexpr, SLOTS: tl.constexpr, MIN_UNIT: tl.constexpr, MAX_UNITS: tl.constexpr, BLOCK: tl.constexpr,
    SMALL: tl.constexpr, NB: tl.constexpr, SAMPLE: tl.constexpr, PIECE: tl.constexpr, BN: tl.constexpr,
    AHEAD: tl.constexpr, BD: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, ASSEMBLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows) -> index, count, mass and c_ref of the store, for rows of up to NB keys; those of up to SMALL
    take a smaller tensor of scores. Longer rows get a bracket for `narrow_kernel`, from SAMPLE scores; 0: there are no
    longer rows. PIECE, BN, AHEAD as in `retain_kernel`.

    fixes [T * H, capacity] and weights [T * H, capacity] are scratch.
    """
    start_early(PDL)
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(row_length + row)
    slot = tl.load(row_slot + row).to(tl.int64)
    seq = tl.load(row_seq + row).to(tl.int64)
    loop = tl.load(row_loop + row)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    at = row * HEADS + head
    maximum, every = tl.load(stats + at * 2), tl.load(stats + at * 2 + 1)
    own, top = scores + at * scores_s, sortable(maximum)
    keep = retained_count(length, numerator, denominator, FIRST, LAST)
    if SAMPLE > 0:
        if wanted & (length > NB):
            bracket_row(own, cuts + at * 2, starts + at * 2, top, length, keep, quantile, SAMPLE, FIRST, LAST)
    if wanted & (length > 0) & (length <= NB):
        cut, ties = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        if length <= SMALL:
            cut, ties = cut_row(own, top, length, keep, quantile, SMALL, FIRST, LAST)
        elif NB > SMALL:
            cut, ties = cut_row(own, top, length, keep, quantile, NB, FIRST, LAST)
        unit = unit_size(length, MIN_UNIT, MAX_UNITS, BLOCK)
        u = tl.arange(0, SLOTS)
        guess, which = tl.full([SLOTS], HIGHEST, tl.int32), u
        if GUESSES > 0:
            guess, which = choose_guess(
                guess_stats, (at * SLOTS + u) * GUESSES, u * unit < length, cut, GUESSES
            )
        s = tl.load(own + tl.arange(0, PIECE))
        entry = (slot * sites + site) * HEADS + head
        limit = tl.minimum(keep, capacity)
        fix_line, weight_line = fixes + at * capacity, weights + at * capacity
        entries = limit
        again = True
        while again:
            entries = list_unit(
                s, own, table + seq * table_s, index + entry * capacity, fix_line, weight_line, 0, length, length, cut,
                ties, guess, unit, maximum, limit, SLOTS, PAGE, PIECE, FIRST, LAST, ASSEMBLY,
            )  # fmt: skip
            tl.debug_barrier()
            again = (entries >= limit) & (tl.min(guess, 0) < HIGHEST)
            guess = tl.where(again, HIGHEST, guess)
        d = tl.arange(0, BD)
        base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + (head // G) * pool_head
        if GUESSES > 0:  # on its way before the values are
            more, heavier = sum_guesses(
                guess_acc,
                guess_stats,
                (at * SLOTS + u) * GUESSES + which,
                guess < HIGHEST,
                maximum,
                d,
                SLOTS,
                BD,
            )
        sums, weight = sum_listed(
            fix_line, weight_line, tl.minimum(entries, limit), v_pool, base, d, d < D, pool_page, pool_token,
            PAGE, BN, AHEAD, BD,
        )  # fmt: skip
        if GUESSES > 0:
            sums += more
            weight += heavier
        if head == 0:
            tl.store(count + slot * sites + site, keep)
        tl.store(c_ref + entry * D + d, sums / weight, mask=d < D)
        tl.store(mass + entry, weight / every)


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
def retain_kernel(
    scores, stats, cuts, places, v_pool, table, row_seq, row_length, row_loop, row_mode, row_slot,
    index, count, mass, c_ref, guess_acc, guess_stats, fixes, weights, part_acc, part_l, arrived,
    scores_s, pool_plane, pool_page, pool_head, pool_token, table_s, plane, plane_stride, site, sites,
    capacity, numerator, denominator,
    MIXED: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    GUESSES: tl.constexpr, SHORT: tl.constexpr, SLOTS: tl.constexpr, MIN_UNIT: tl.constexpr, MAX_UNITS: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, BD: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, units, rows) -> index, count, mass and c_ref of the store, for rows of more than SHORT keys. A unit
    is listed in pieces of PIECE keys, and values are read AHEAD blocks of BN at a time.

    fixes [T * H, capacity], weights [T * H, capacity], part_acc [T * H, SLOTS, BD] and part_l [T * H, SLOTS] are
    scratch; arrived int32 [T * H] is zero before and after every launch.
    """
    start_early(PDL)
    head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    # What depends on the length alone is asked for at once.
    length = tl.load(row_length + row)
    slot = tl.load(row_slot + row).to(tl.int64)
    seq = tl.load(row_seq + row).to(tl.int64)
    loop = tl.load(row_loop + row)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    at = row * HEADS + head
    mine = at * SLOTS + part
    cut = tl.load(cuts + at * 2)
    maximum, every = tl.load(stats + at * 2), tl.load(stats + at * 2 + 1)
    place = places + mine * PLACE
    begin, kept = tl.load(place), tl.load(place + 1)
    ties_left = tl.load(place + 2)
    guess = tl.full((), HIGHEST, tl.int32)
    which = tl.full((), 0, tl.int32)
    if GUESSES > 0:
        guess, which = choose_guess(guess_stats, mine * GUESSES, length >= 0, cut, GUESSES)
    unit = unit_size(length, MIN_UNIT, MAX_UNITS, BLOCK)
    start = part * unit
    if wanted & (length > SHORT) & (start < length):
        own = scores + at * scores_s
        s = tl.load(own + start + tl.arange(0, PIECE))
        entry = (slot * sites + site) * HEADS + head
        keep = retained_count(length, numerator, denominator, FIRST, LAST)
        end = tl.minimum(start + unit, length)
        limit = tl.minimum(kept, tl.minimum(keep, capacity) - begin)
        kept_line, fix_line = index + entry * capacity + begin, fixes + at * capacity + begin
        weight_line = weights + at * capacity + begin
        entries = limit
        again = True
        while again:
            entries = list_unit(
                s, own, table + seq * table_s, kept_line, fix_line, weight_line, start, end, length, cut, ties_left,
                guess, unit, maximum, limit, 0, PAGE, PIECE, FIRST, LAST, ASSEMBLY,
            )  # fmt: skip
            tl.debug_barrier()
            # A guess that is wrong about no fewer keys than are retained: those themselves are listed and read.
            again = (entries >= limit) & (guess < HIGHEST)
            guess = tl.where(again, HIGHEST, guess)
        d = tl.arange(0, BD)
        base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + (head // G) * pool_head
        one = tl.arange(0, 1)
        if GUESSES > 0:  # on its way before the values are
            more, heavier = sum_guesses(
                guess_acc, guess_stats, mine * GUESSES + which + one, guess + one < HIGHEST, maximum, d, 1, BD
            )
        sums, weight = sum_listed(
            fix_line, weight_line, tl.minimum(entries, limit), v_pool, base, d, d < D, pool_page, pool_token,
            PAGE, BN, AHEAD, BD,
        )  # fmt: skip
        if GUESSES > 0:
            sums += more
            weight += heavier
        if (head == 0) & (part == 0):
            tl.store(count + slot * sites + site, keep)
        units = tl.cdiv(length, unit)
        done = units == 1
        if units > 1:
            tl.store(part_acc + mine * BD + d, sums)
            tl.store(part_l + mine, weight)
            tl.debug_barrier()
            done = tl.atomic_add(arrived + at, 1, sem="acq_rel", scope="gpu") == units - 1
            if done:
                tl.store(arrived + at, 0)
                tl.debug_barrier()
                sums, weight = add_units(part_acc, part_l, at * SLOTS, units, d, SLOTS, BD)
        if done:
            tl.store(c_ref + entry * D + d, sums / weight, mask=d < D)
            tl.store(mass + entry, weight / every)
