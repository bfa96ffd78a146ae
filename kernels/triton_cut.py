"""How a capture's selection finds its cut: the score that exactly `keep` scores of a row reach.

Scores are compared as integers whose order is that of the floats (see `triton_parts.sortable`), and the cut is found by
narrowing a bracket of them. Of rows whose scores fit into the registers of one program, `cut_row` finds it; those of
longer ones `triton_narrow`.
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
def whole_bracket(length, top, keep, FIRST: tl.constexpr, LAST: tl.constexpr):
    """(low, reached, high, beyond): what `search` starts from in a row of which nothing is known.

    Keys that are kept whatever their scores are above `top`: if they are all that is kept, the cut is there.
    """
    low, high = tl.full((), LOWEST + 1, tl.int32), top + 1
    reached, beyond = length, tl.full((), 0, tl.int32)
    if FIRST + LAST > 0:
        beyond = tl.minimum(length, FIRST + LAST)
        low, reached = tl.where(beyond == keep, high, low), tl.where(beyond == keep, keep, reached)
    return low, reached, high, beyond


@triton.jit
def load_sortable(scores_row, n, length):
    """Keys of the scores n [NB]; the lowest integer, which no score has, beyond the row's length.

    Whatever lies there is read: masked loads would wait for each other. Scores have memory to spare behind them.
    """
    return tl.where(n < length, sortable(tl.load(scores_row + n)), LOWEST)


@triton.jit
def read_lists(lists, unit, length, first, WIDE: tl.constexpr, SLOTS: tl.constexpr):
    """Scores first .. first + WIDE - 1 of each list: [SLOTS, WIDE]. List u begins at u * unit; lists behind the row's
    length are empty, and what is read for them lies right behind the row.
    """
    at = tl.minimum(tl.arange(0, SLOTS) * unit + first, length // 4 * 4)
    return tl.load(lists + (tl.multiple_of(at, 4)[:, None] + tl.arange(0, WIDE)[None, :]))


@triton.jit
def listed_keys(s, skip, have, first, WIDE: tl.constexpr):
    """Keys of the scores s [SLOTS, WIDE] that were read from `first` on, of which each list has `have` [SLOTS] behind
    the first `skip` [SLOTS]; the lowest integer for all others.
    """
    n = (first + tl.arange(0, WIDE))[None, :] - skip[:, None]
    inside = n.to(tl.uint32, bitcast=True) < have.to(tl.uint32, bitcast=True)[:, None]  # not below 0 either
    return tl.where(inside, sortable(s), LOWEST)


@triton.jit
def count_from(
    key, candidate, lists, unit, length, skip, have, longest,
    WIDE: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """How many scores are at or above `candidate`: among `key`, and with WIDE among what lists have beyond WIDE, of
    each STEP at a time.
    """
    found = tl.sum((key >= candidate).to(tl.int32))
    if WIDE > 0:
        if longest > WIDE:
            more = tl.zeros([SLOTS, STEP], tl.int32)
            for first in range(WIDE, longest, STEP):
                s = read_lists(lists, unit, length, first, STEP, SLOTS)
                more += (listed_keys(s, skip, have, first, STEP) >= candidate).to(tl.int32)
            found += tl.sum(more)
    return found


@triton.jit
def describe(s, inside, share):
    """(mean, standard deviation) of the scores s [N] that are `inside`, each a `share` of them."""
    mean = tl.sum(tl.where(inside, s, 0.0), 0) * share
    off = tl.where(inside, s - mean, 0.0)
    return mean, tl.maximum(tl.sqrt(tl.sum(off * off, 0) * share), 1e-6)


@triton.jit
def score_step(deviation, quantile, total):
    """How far apart neighbours are among `total` normally distributed scores, next to their quantile."""
    return deviation / (total * tl.exp2(-0.5 * LOG2E * quantile * quantile) * 0.3989423)


@triton.jit
def logarithm(count):
    """log2 of a count, 0.5 where it is 0, in units of 2 ** -23 and with an offset: the bits of a float are nearly its
    logarithm. Guesses need no more, and every turn of a search waits for one.
    """
    return tl.maximum(count.to(tl.float32), 0.5).to(tl.int32, bitcast=True)


@triton.jit
def between(low, over, high, under):
    """The score between two where the logarithm of the count, off by `over` and `under` at them, would be right."""
    left = unsortable(low)
    return left + over / (over - under) * (unsortable(high - 1) - left)


@triton.jit
def search(
    key, lists, unit, skip, have, longest, base, low, reached, high, beyond, length, top, keep, slack, guess, step,
    WIDE: tl.constexpr, STEP: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Narrow [low, high), which `reached` >= keep and `beyond` < keep scores reach: (low, reached, beyond).

    The `length` scores are those of `count_from`, `base` more that are above `high`, and those below `low`. It ends
    where at most keep + slack scores reach `low`, and at the latest where high is low + 1. Until both ends are scores'
    own, guesses follow the density of scores that are `step` apart, in steps that grow; `guess` is the first. Then they
    interpolate between the logarithms of the two counts, where the end that stays twice in a row loses half its weight
    (the Illinois rule). Every eighth turn halves the integers in between, so that it always ends.
    """
    target = logarithm(keep)
    # How far the counts of both ends are from `keep`.
    over = tl.maximum(logarithm(reached) - target, 1).to(tl.float32)
    under = (logarithm(beyond) - target).to(tl.float32)
    if (reached < length) & (high <= top):
        guess = between(low, over, high, under)
    side = tl.full((), 0, tl.int32)
    turn = tl.full((), 0, tl.int32)
    while (reached > keep + slack) & (low + 1 < high):
        middle = (low & high) + ((low ^ high) >> 1)
        if (turn % 8 != 7) & (guess > float("-inf")) & (guess < float("inf")):
            middle = tl.minimum(tl.maximum(sortable(guess), low + 1), high - 1)
        found = base + count_from(key, middle, lists, unit, length, skip, have, longest, WIDE, STEP, SLOTS)
        value = (logarithm(found) - target).to(tl.float32)
        if found >= keep:
            low = middle
            reached = found
            over = tl.maximum(value, 1.0)
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
            guess = between(low, over, high, under)
        turn += 1
    return low, reached, beyond


@triton.jit
def cut_of(low, reached, beyond, keep):
    """(cut, ties): the keys to retain are those at or above `cut`, and the first `ties` equal to `cut - 1`.

    They follow from a search without slack: either exactly `keep` scores reach `low`, or all of low's own are ties.
    """
    exact = reached == keep
    return tl.where(exact, low, low + 1), tl.where(exact, 0, keep - beyond)


@triton.jit
def cut_row(
    scores_row, top, length, keep, quantile, NB: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr
):
    """(cut, ties) of one row of up to NB scores, all of them in registers."""
    n = tl.arange(0, NB)
    key = with_kept(load_sortable(scores_row, n, length), n, length, length, FIRST, LAST)
    every = tl.cdiv(length, SAMPLE)
    n = tl.arange(0, SAMPLE) * every
    some = tl.load(scores_row + n, mask=n < length, other=0.0)
    mean, deviation = describe(some, n < length, 1.0 / tl.cdiv(length, every))
    low, reached, high, beyond = whole_bracket(length, top, keep, FIRST, LAST)
    low, reached, beyond = search(
        key, scores_row, 0, 0, 0, 0, 0, low, reached, high, beyond, length, top, keep, 0,
        mean + quantile * deviation, score_step(deviation, quantile, length), 0, 1, 1,
    )  # fmt: skip
    return cut_of(low, reached, beyond, keep)
