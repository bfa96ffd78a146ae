"""The second half of a capture's selection: the retained set, its mass, and C_ref, from the cut of `triton_cut`.

One program takes one unit of keys of one (row, head), the same unit that attention took. It writes the positions it
retains, in ascending order, where those of earlier units end; ties go to the lowest positions. Then it sums their
values: attention has left the sums over the unit's keys above a guessed cut (see `triton_guesses`), so only the keys
between guess and cut are listed and read. Where the guess misses by as many keys as the unit retains, or there is none,
the retained ones are read themselves. The last program of a (row, head) to arrive adds the units up in order.

Mirrors `reference.capture`. Sums go by halves, so no bit depends on how many warps share the work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_cut import load_sortable
from .triton_guesses import choose_guess, load_guess
from .triton_narrow import PLACE
from .triton_parts import HIGHEST, LOG2E, load_keys, page_of, sortable, tree_sum, unit_size

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
    scores_row, kept_line, fix_line, start, end, cut, ties, guess, limit, HAS_GUESS: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Write the retained positions among the keys start .. end - 1, and those that the guess is wrong about, at most
    `limit` of each. Returns how many the latter are.
    """
    n = start + tl.arange(0, PIECE)
    above = tl.full((), 0, tl.int32)
    fixes = tl.full((), 0, tl.int32)
    equal = tl.full((), 0, tl.int32)
    for _ in range(start, end, PIECE):
        key = load_sortable(scores_row, n, end)
        retained = key >= cut
        if ties > equal:
            same = key == cut - 1
            retained = retained | (same & (equal + tl.cumsum(same.to(tl.int32), 0) <= ties))
            equal += tl.sum(same.to(tl.int32), 0)
        marks = retained.to(tl.int32)
        wrong = retained
        if HAS_GUESS:
            wrong = retained != (key >= guess)
            marks += wrong.to(tl.int32) * FIX
        both = tl.cumsum(marks, 0)  # two counts in one scan
        place = above + (both & (FIX - 1)) - 1
        tl.store(kept_line + place, n, mask=retained & (place < limit))
        if HAS_GUESS:
            place = fixes + (both >> 16) - 1
            tl.store(fix_line + place, n, mask=wrong & (place < limit))
        total = tl.sum(marks, 0)
        above += total & (FIX - 1)
        fixes += total >> 16
        n += PIECE
    return fixes


@triton.jit
def sum_listed(
    scores_row, maximum, list_line, entries, guess, v_pool, base, table_row, d, d_ok, pool_page, pool_token,
    PAGE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """(sum of weighted values [BD], sum of weights) of listed keys; those above `guess` count negative."""
    offset = tl.arange(0, BN)
    acc = tl.zeros([BN, BD], tl.float32)
    weights = tl.zeros([BN], tl.float32)
    n = tl.load(list_line + offset, mask=offset < entries, other=0)
    page = page_of(table_row, n, offset < entries, PAGE)
    for e0 in tl.range(0, entries, BN):
        ok, ahead = e0 + offset < entries, e0 + BN + offset < entries
        n_next = tl.load(list_line + e0 + BN + offset, mask=ahead, other=0)
        v = load_keys(v_pool, base, page, n, ok, d, d_ok, PAGE, pool_page, pool_token)  # [BN, BD]
        s = tl.load(scores_row + n, mask=ok, other=float("-inf"))
        page = page_of(table_row, n_next, ahead, PAGE)
        w = tl.exp2((s - maximum) * LOG2E)
        w = tl.where(sortable(s) >= guess, -w, w)
        acc = tl.fma(v.to(tl.float32), w[:, None], acc)
        weights += w
        n = n_next
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
    index, count, mass, c_ref, guess_acc, guess_stats, fixes, part_acc, part_l, arrived,
    scores_s, blocks_s, pool_plane, pool_page, pool_head, pool_token, table_s, plane, plane_stride, site, sites,
    capacity, numerator, denominator,
    MIXED: tl.constexpr, HEADS: tl.constexpr, G: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    GUESSES: tl.constexpr, SHORT: tl.constexpr, SLOTS: tl.constexpr, MIN_UNIT: tl.constexpr, MAX_UNITS: tl.constexpr,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Grid (heads, units, rows) -> index, count, mass and c_ref of the store. A unit is listed in pieces of PIECE keys,
    and values are read BN at a time.

    fixes [T * H, capacity], part_acc [T * H, SLOTS, BD] and part_l [T * H, SLOTS] are scratch; arrived int32 [T * H] is
    zero before and after every launch.
    """
    head, part, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(row_length + row)
    slot = tl.load(row_slot + row).to(tl.int64)
    seq = tl.load(row_seq + row).to(tl.int64)
    loop = tl.load(row_loop + row)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    unit = unit_size(length, MIN_UNIT, MAX_UNITS, BLOCK)
    start = part * unit
    if wanted & (start < length):
        at = row * HEADS + head
        entry = (slot * sites + site) * HEADS + head
        keep = ((length.to(tl.int64) * numerator + (denominator - 1)) // denominator).to(tl.int32)
        end, own = tl.minimum(start + unit, length), scores + at * scores_s
        cut, maximum = tl.load(cuts + at * 2), tl.load(stats + at * 2)
        ties, own_blocks = tl.load(cuts + at * 2 + 1), blocks + at * 2 * blocks_s
        if length > SHORT:
            place = places + (at * SLOTS + part) * PLACE
            begin, kept, ties = tl.load(place), tl.load(place + 1), tl.load(place + 2)
        else:
            begin, kept, ties = place_unit(own_blocks, blocks_s, start, end, ties, BLOCK, max(16, PIECE // 4))
        limit = tl.minimum(kept, tl.minimum(keep, capacity) - begin)
        listed, fix_line = index + entry * capacity + begin, fixes + at * capacity + begin
        d = tl.arange(0, BD)
        guess = tl.full((), HIGHEST, tl.int32)
        which = tl.full((), 0, tl.int32)
        if GUESSES > 0:
            guess, which = choose_guess(guess_stats, (at * SLOTS + part) * GUESSES, cut, GUESSES)
        entries = list_unit(own, listed, fix_line, start, end, cut, ties, guess, limit, GUESSES > 0, PIECE)
        guessed = (entries < limit) & (guess < HIGHEST) & (GUESSES > 0)
        if guessed:
            listed = fix_line
        tl.debug_barrier()
        base = (plane + plane_stride * loop).to(tl.int64) * pool_plane + (head // G) * pool_head
        sums, weight = sum_listed(
            own, maximum, listed, tl.where(guessed, entries, limit), tl.where(guessed, guess, HIGHEST), v_pool, base,
            table + seq * table_s, d, d < D, pool_page, pool_token, PAGE, BN, BD,
        )  # fmt: skip
        if GUESSES > 0:
            if guessed:
                more, heavier = load_guess(
                    guess_acc, guess_stats, (at * SLOTS + part) * GUESSES + which, maximum, d, BD
                )
                sums, weight = sums + more, weight + heavier
        if (head == 0) & (part == 0):
            tl.store(count + slot * sites + site, keep)
        units = tl.cdiv(length, unit)
        done = units == 1
        if units > 1:
            mine = at * SLOTS + part
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
            tl.store(mass + entry, weight / tl.load(stats + at * 2 + 1))
