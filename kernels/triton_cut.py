"""The first half of a capture's selection: the score that exactly `keep` scores of a row reach, and where they lie.

One program searches for one (row, head), with all scores in registers where they fit, by narrowing a bracket of
integers whose order is that of the floats (see `triton_parts.sortable`). It leaves the cut, and for each block of keys
how many it retains; `triton_select` takes the row from there, one program per unit of keys.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import HIGHEST, LOG2E, LOWEST, sortable, unsortable

SAMPLE = tl.constexpr(512)


@triton.jit
def retained_count(length, numerator, denominator, FIRST: tl.constexpr, LAST: tl.constexpr):
    """How many keys a row keeps, as `retention.Retention.count`: int32."""
    keep = ((length.to(tl.int64) * numerator + (denominator - 1)) // denominator).to(tl.int32)
    if FIRST + LAST > 0:
        keep = tl.maximum(keep, tl.minimum(length, FIRST + LAST))
    return keep


@triton.jit
def with_kept(key, n, length, end, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Keys of the scores n, where those that are kept whatever their scores have the highest integer, up to `end`."""
    if FIRST + LAST > 0:
        always = ((n < FIRST) | (n >= length - LAST)) & (n < end)
        key = tl.where(always, HIGHEST, key)
    return key


@triton.jit
def load_sortable(scores_row, n, length):
    """Keys of the scores n [NB]; the lowest integer, which no score has, beyond the row's length.

    Whatever lies there is read: masked loads would wait for each other. Scores have memory to spare behind them.
    """
    return tl.where(n < length, sortable(tl.load(scores_row + n)), LOWEST)


@triton.jit
def count_from(
    scores_row, length, key, candidate, IN_REGISTERS: tl.constexpr, NB: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """How many of a row's scores are at or above `candidate`."""
    found = tl.sum((key >= candidate).to(tl.int32), 0)
    if not IN_REGISTERS:
        for n0 in range(NB, length, NB):
            n = n0 + tl.arange(0, NB)
            other = with_kept(load_sortable(scores_row, n, length), n, length, length, FIRST, LAST)
            found += tl.sum((other >= candidate).to(tl.int32), 0)
    return found


@triton.jit
def describe(scores_row, length):
    """(mean, standard deviation) of some of a row's scores, evenly spread: enough for a first guess."""
    step = tl.cdiv(length, SAMPLE)
    n = tl.arange(0, SAMPLE) * step
    inside = n < length
    s = tl.load(scores_row + n, mask=inside, other=0.0)
    share = 1.0 / tl.cdiv(length, step)
    mean = tl.sum(s, 0) * share
    off = tl.where(inside, s - mean, 0.0)
    return mean, tl.maximum(tl.sqrt(tl.sum(off * off, 0) * share), 1e-6)


@triton.jit
def find_cut(
    scores_row, length, keep, key, top, quantile, IN_REGISTERS: tl.constexpr, NB: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """(cut, ties): the keys to retain are those at or above `cut`, and the first `ties` equal to `cut - 1`.

    A bracket [low, high) with count(low) >= keep > count(high) shrinks. The first guess takes the scores as normally
    distributed; until both ends are scores' own, the next ones follow that distribution's density, in steps that grow.
    Then they interpolate between the logarithms of the two counts, where the end that stays twice in a row loses half
    its weight (the Illinois rule). Every eighth turn halves the integers in between, so that it always ends. It stops
    early where exactly `keep` scores reach. Keys that are kept whatever their scores are above `top`: if they are all,
    the cut is there.
    """
    mean, deviation = describe(scores_row, length)
    low = tl.full((), LOWEST + 1, tl.int32)
    high = top + 1
    reached = length
    beyond = tl.full((), 0, tl.int32)  # how many reach `high`
    target = tl.log2(keep.to(tl.float32))
    over = tl.log2(length.to(tl.float32)) - target  # of the low end, in units of log2(count)
    under = -1.0 - target  # of the high end, which nothing reaches: log2 of one half
    if FIRST + LAST > 0:
        beyond = tl.minimum(length, FIRST + LAST)
        under = tl.log2(beyond.to(tl.float32)) - target
        all_kept = beyond == keep
        low = tl.where(all_kept, high, low)
        reached = tl.where(all_kept, keep, reached)
    step = deviation / (length * tl.exp2(-0.5 * LOG2E * quantile * quantile) * 0.3989423)  # score per key
    guess = mean + quantile * deviation
    side = tl.full((), 0, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while (reached != keep) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        if (turn % 8 != 7) & (guess > float("-inf")) & (guess < float("inf")):
            middle = tl.minimum(tl.maximum(sortable(guess), low + 1), high - 1)
        found = count_from(scores_row, length, key, middle, IN_REGISTERS, NB, FIRST, LAST)
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
        if (reached == length) | (high > top):
            guess = unsortable(middle) + (found - keep + 0.5) * step
            step *= 2.0
        else:
            left = unsortable(low)
            guess = left + over / (over - under) * (unsortable(high - 1) - left)
        turn += 1
    exact = reached == keep
    return tl.where(exact, low, low + 1), tl.where(exact, 0, keep - beyond)


@triton.jit
def store_counts(counts, marks, n0, length, NB: tl.constexpr, BLOCK: tl.constexpr):
    """How many of marks [NB], of the keys n0 .. n0 + NB - 1, each block of keys holds. Four blocks, a quarter of NB
    apart, are counted in the bytes of one integer.
    """
    COLUMNS: tl.constexpr = NB // BLOCK // 4
    byte = tl.arange(0, 4)
    four = tl.sum(tl.reshape(marks.to(tl.int32), [4, COLUMNS, BLOCK]) << (8 * byte)[:, None, None], 0)
    four = tl.sum(four, 1)  # [COLUMNS]
    j = n0 // BLOCK + byte[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(counts + j, (four[None, :] >> (8 * byte)[:, None]) & 0xFF, mask=j * BLOCK < length)


@triton.jit
def count_blocks(blocks, blocks_s, key, n0, length, cut, ties, NB: tl.constexpr, BLOCK: tl.constexpr):
    """Of each block of key [NB], the keys n0 .. n0 + NB - 1: how many are above the cut, and how many may be ties."""
    store_counts(blocks, key >= cut, n0, length, NB, BLOCK)
    if ties > 0:
        store_counts(blocks + blocks_s, key == cut - 1, n0, length, NB, BLOCK)


@triton.jit
def cut_row(
    scores_row, cuts, blocks, blocks_s, top, length, keep, quantile,
    IN_REGISTERS: tl.constexpr, NB: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """The cut of one row and the counts of its blocks, NB scores at a time."""
    n = tl.arange(0, NB)
    key = with_kept(load_sortable(scores_row, n, length), n, length, length, FIRST, LAST)
    cut, ties = find_cut(scores_row, length, keep, key, top, quantile, IN_REGISTERS, NB, FIRST, LAST)
    tl.store(cuts, cut)
    tl.store(cuts + 1, ties)
    count_blocks(blocks, blocks_s, key, 0, length, cut, ties, NB, BLOCK)
    if not IN_REGISTERS:
        for n0 in range(NB, length, NB):
            key = load_sortable(scores_row, n0 + n, length)
            key = with_kept(key, n0 + n, length, length, FIRST, LAST)
            count_blocks(blocks, blocks_s, key, n0, length, cut, ties, NB, BLOCK)


@triton.jit(do_not_specialize=["blocks_s", "numerator", "denominator"])
def cut_kernel(
    scores, stats, row_length, row_mode, cuts, blocks, scores_s, blocks_s, numerator, denominator, quantile,
    MIXED: tl.constexpr, HEADS: tl.constexpr, SMALL: tl.constexpr, NB: tl.constexpr, PASSES: tl.constexpr,
    BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Grid (heads, rows). scores [T * H, scores_s] -> cuts [T * H, 2] (cut and ties), blocks [T * H, 2, blocks_s].

    Up to NB scores stay in registers, of shorter rows in smaller tensors; longer rows (PASSES) are read once per turn
    of the search.
    """
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    length = tl.load(row_length + row)
    wanted = (tl.load(row_mode + row) == 2) if MIXED else (length >= 0)
    if wanted & (length > 0):
        at = row * HEADS + head
        keep = retained_count(length, numerator, denominator, FIRST, LAST)
        top = sortable(tl.load(stats + at * 2))
        own, cut, block = scores + at * scores_s, cuts + at * 2, blocks + at * 2 * blocks_s
        if length <= SMALL:
            cut_row(own, cut, block, blocks_s, top, length, keep, quantile, True, SMALL, BLOCK, FIRST, LAST)
        elif (NB > SMALL) & (length <= min(NB, 4 * SMALL)):
            cut_row(
                own,
                cut,
                block,
                blocks_s,
                top,
                length,
                keep,
                quantile,
                True,
                min(NB, 4 * SMALL),
                BLOCK,
                FIRST,
                LAST,
            )
        elif NB > 4 * SMALL or PASSES:
            if PASSES and length > NB:
                cut_row(
                    own,
                    cut,
                    block,
                    blocks_s,
                    top,
                    length,
                    keep,
                    quantile,
                    False,
                    min(NB, 8192),
                    BLOCK,
                    FIRST,
                    LAST,
                )
            else:
                cut_row(own, cut, block, blocks_s, top, length, keep, quantile, True, NB, BLOCK, FIRST, LAST)
