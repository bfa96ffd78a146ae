"""The second half of a capture's selection: the retained set, its mass, and C_ref, from the cut of `triton_cut`.

One program takes one unit of keys of one (row, head), the same unit that attention took. It writes the positions it
retains, in ascending order, where those of earlier units end; ties go to the lowest positions. Then it sums their
values: attention has left the sums over the unit's keys above a guessed cut (see `triton_guesses`), so only the keys
between guess and cut are listed, with their weights, and read. Where the guess misses by as many keys as the unit
retains, or there is none, the retained ones are. The last program of a (row, head) to arrive adds the units up.

Mirrors `reference.capture`. The order of a sum follows from places in the list, so no bit depends on how many warps
share the work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_cut import retained_count, with_kept
from .triton_guesses import choose_guess, load_guess
from .triton_narrow import PLACE
from .triton_parts import (
    HIGHEST,
    LOG2E,
    LOWEST,
    load_keys,
    page_of,
    scatter,
    sortable,
    start_early,
    tree_sum,
    unit_size,
    unsortable,
)

FIX = tl.constexpr(1 << 16)
"""Two counts share an integer: of retained keys below this bit, of keys to fix above."""


@triton.jit
def sum_blocks(counts, first, last, STEP: tl.constexpr):
    """The sum of the counts of blocks first .. last - 1 of a row."""
    j = first + tl.arange(0, STEP)
    total = tl.zeros([STEP], tl.int32)
    for _ in range(first, last, STEP):
        total += tl.load(counts + j, mask=j < last, other=0)
        j += STEP
    return tl.sum(total, 0)


@triton.jit
def place_unit(blocks, blocks_s, start, end, ties, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """(begin, kept, ties left): where a unit's retained keys begin in the row's list, how many they are, and how many
    keys equal to `cut - 1` are retained from here on.
    """
    first, last = start // BLOCK, tl.cdiv(end, BLOCK)
    begin, kept = sum_blocks(blocks, 0, first, STEP), sum_blocks(blocks, first, last, STEP)
    if ties > 0:
        equal = sum_blocks(blocks + blocks_s, 0, first, STEP)
        begin += tl.minimum(equal, ties)
        ties = tl.maximum(ties - equal, 0)
        kept += tl.minimum(sum_blocks(blocks + blocks_s, first, last, STEP), ties)
    return begin, kept, ties


@triton.jit
def list_unit(
    s, scores_row, table_row, kept_line, fix_line, weight_line, start, end, length, cut, ties, guess, maximum, limit,
    PAGE: tl.constexpr, PIECE: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Write the retained positions among the keys start .. end - 1, and of those that the guess is wrong about the
    places of their values and their weights, negative where the key is above the guess; at most `limit` of each.
    Returns how many the latter are. s [PIECE] are the first scores.
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
        guessed = key >= guess
        wrong = retained != guessed
        page = page_of(table_row, n, wrong, PAGE)  # asked for before the scan
        marks = retained.to(tl.int32) + wrong.to(tl.int32) * FIX
        both = tl.cumsum(marks, 0)  # two counts in one scan
        place = above + (both & (FIX - 1)) - 1
        scatter(kept_line + place, n, retained & (place < limit), ASSEMBLY)
        place = fixes + (both >> 16) - 1
        wrong = wrong & (place < limit)
        w = tl.exp2((unsortable(key) - maximum) * LOG2E)
        scatter(weight_line + place, tl.where(guessed, -w, w), wrong, ASSEMBLY)
        scatter(fix_line + place, page * PAGE + n % PAGE, wrong, ASSEMBLY)
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
            page = places[i] // PAGE
            vs += (load_keys(v_pool, base, page, places[i], ok, d, d_ok, PAGE, pool_page, pool_token),)
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
        "blocks_s",
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
    scores, stats, cuts, blocks, places, v_pool, table, row_seq, row_length, row_loop, row_mode, row_slot,
    index, count, mass, c_ref, guess_acc, guess_stats, fixes, weights, part_acc, part_l, arrived,
    scores_s, blocks_s, pool_plane, pool_page, pool_head, pool_token, table_s, plane, plane_stride, site, sites,
    capacity, numerator, denominator,
    MIXED: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    GUESSES: tl.constexpr, SHORT: tl.constexpr, SLOTS: tl.constexpr, MIN_UNIT: tl.constexpr, MAX_UNITS: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, BN: tl.constexpr, AHEAD: tl.constexpr, BD: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, ASSEMBLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Grid (heads, units, rows) -> index, count, mass and c_ref of the store. A unit is listed in pieces of PIECE keys,
    and values are read AHEAD blocks of BN at a time.

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
    cut, ties = tl.load(cuts + at * 2), tl.load(cuts + at * 2 + 1)
    maximum, every = tl.load(stats + at * 2), tl.load(stats + at * 2 + 1)
    place = places + mine * PLACE
    begin, kept = tl.load(place), tl.load(place + 1)
    ties_left = tl.load(place + 2)
    guess = tl.full((), HIGHEST, tl.int32)
    which = tl.full((), 0, tl.int32)
    if GUESSES > 0:
        guess, which = choose_guess(guess_stats, mine * GUESSES, cut, GUESSES)
    unit = unit_size(length, MIN_UNIT, MAX_UNITS, BLOCK)
    start = part * unit
    if wanted & (start < length):
        own = scores + at * scores_s
        s = tl.load(own + start + tl.arange(0, PIECE))
        entry = (slot * sites + site) * HEADS + head
        keep = retained_count(length, numerator, denominator, FIRST, LAST)
        end = tl.minimum(start + unit, length)
        if length <= SHORT:
            block = blocks + at * 2 * blocks_s
            begin, kept, ties_left = place_unit(block, blocks_s, start, end, ties, BLOCK, max(16, PIECE // 4))
        limit = tl.minimum(kept, tl.minimum(keep, capacity) - begin)
        kept_line, fix_line = index + entry * capacity + begin, fixes + at * capacity + begin
        weight_line = weights + at * capacity + begin
        entries = limit
        again = True
        while again:
            entries = list_unit(
                s, own, table + seq * table_s, kept_line, fix_line, weight_line, start, end, length, cut, ties_left,
                guess, maximum, limit, PAGE, PIECE, FIRST, LAST, ASSEMBLY,
            )  # fmt: skip
            tl.debug_barrier()
            # A guess that is wrong about no fewer keys than are retained: those themselves are listed and read.
            again = (entries >= limit) & (guess < HIGHEST)
            guess = tl.where(again, HIGHEST, guess)
        d = tl.arange(0, BD)
        base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + (head // G) * pool_head
        if GUESSES > 0:  # of no meaning where no guess helps, but on its way before the values are
            more, heavier = load_guess(guess_acc, guess_stats, mine * GUESSES + which, maximum, d, BD)
        sums, weight = sum_listed(
            fix_line, weight_line, tl.minimum(entries, limit), v_pool, base, d, d < D, pool_page, pool_token,
            PAGE, BN, AHEAD, BD,
        )  # fmt: skip
        if GUESSES > 0:
            helps = guess < HIGHEST
            sums, weight = tl.where(helps, sums + more, sums), tl.where(helps, weight + heavier, weight)
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
