"""Sums over the keys above a guessed cut, which attention makes beside its own at no cost.

The tensor cores multiply 16 rows, and one query head needs few of them. So while capturing, rows of a tile are copies
of a query that skip the scores below a guess at the cut of the retention. Guesses are made by each unit of keys from
its first block alone: its mean score and a few steps of its standard deviation around the quantile that the retention
has in a normal distribution. Once the exact cut is known, C_ref needs but the values of the keys between guess and cut.

Of a tile's 16 rows the lower 8 hold the copies, 8 / G for each of the G heads, the first of them unmasked; row i + 8
sums what rounding to the values' dtype takes from the weights of row i. A bad guess costs time, never exactness.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import HIGHEST, LOG2E, sortable, tree_sum, unsortable

HALF = tl.constexpr(8)
FIELDS = tl.constexpr(4)
"""Floats kept for each guess: the guess, the deviation it came from, softmax maximum and sum of its keys."""
GUESS_FIELDS = FIELDS.value
STEP = tl.constexpr(0.22)
"""Standard deviations between guesses: 64 scores find the cut to about 0.17."""
REACH = tl.constexpr(0.3)
"""How far below the cut, in standard deviations, a guess may lie: beyond, starting from nothing takes fewer keys."""


@triton.jit
def guess_cuts(s, seen, quantile, GUESSES: tl.constexpr, COPIES: tl.constexpr, BM: tl.constexpr):
    """(cut [BM], deviation [BM]) for each row of a tile from a unit's first scores s [BM, BN], of which it sees `seen`:
    -inf for rows that skip nothing.
    """
    share = 1.0 / tl.maximum(tl.sum(seen.to(tl.float32), 1), 1.0)  # [BM]
    mean = tl.sum(tl.where(seen, s, 0.0), 1) * share
    off = tl.where(seen, s - mean[:, None], 0.0)
    deviation = tl.sqrt(tl.sum(off * off, 1) * share)
    copy = tl.arange(0, BM) % HALF % COPIES
    guess = mean + (quantile + (copy - 0.5 * (GUESSES + 1)) * STEP) * deviation
    guess = tl.where(
        tl.abs(guess) < 1e30, guess, float("inf")
    )  # scores that are not finite: no key is above it
    return tl.where((copy > 0) & (copy <= GUESSES), guess, float("-inf")), deviation


@triton.jit
def store_guesses(
    guess_acc, guess_stats, cut, deviation, m, l, acc, row, head0, unit, width, d,
    HEADS: tl.constexpr, GUESSES: tl.constexpr, COPIES: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Keep one unit's sums over the keys above each guess: guess_acc [T * H, SLOTS, GUESSES, BD], guess_stats
    [T * H, SLOTS, GUESSES, FIELDS].
    """
    i = tl.arange(0, BM)
    lines = ((row * HEADS + head0 + i % HALF // COPIES) * SLOTS + unit) * GUESSES + i % COPIES - 1
    wanted = (i < HALF) & (i // COPIES < width) & (i % COPIES > 0) & (i % COPIES <= GUESSES)
    to = guess_stats + lines * FIELDS
    tl.store(to, cut, mask=wanted)
    tl.store(to + 1, deviation, mask=wanted)
    tl.store(to + 2, m, mask=wanted)
    tl.store(to + 3, l, mask=wanted)
    both = tl.sum(tl.reshape(acc, [2, HALF, BD]), 0)  # [HALF, BD]
    j = tl.arange(0, HALF)
    lines = ((row * HEADS + head0 + j // COPIES) * SLOTS + unit) * GUESSES + j % COPIES - 1
    wanted = (j // COPIES < width) & (j % COPIES > 0) & (j % COPIES <= GUESSES)
    tl.store(guess_acc + lines[:, None] * BD + d[None, :], both, mask=wanted[:, None])


@triton.jit
def choose_guess(guess_stats, line, live, cut, GUESSES: tl.constexpr):
    """(key, which) of each unit's guess next to the cut, of the GUESSES from its `line` on; HIGHEST, which no score
    reaches, for units where none of them helps or that are not `live`.
    """
    target = unsortable(cut)
    distance = tl.where(live, float("inf"), float("inf"))
    chosen = distance
    which = tl.where(live, 0, 0)
    for i in tl.static_range(GUESSES):
        guess = tl.load(guess_stats + (line + i) * FIELDS, mask=live, other=float("inf"))
        away = tl.maximum(guess - target, target - guess)
        nearer = away < distance
        distance = tl.where(nearer, away, distance)
        chosen = tl.where(nearer, guess, chosen)
        which = tl.where(nearer, i, which)
    deviation = tl.load(guess_stats + line * FIELDS + 1, mask=live, other=0.0)
    helps = (chosen < float("inf")) & (target - chosen <= deviation * REACH)
    return tl.where(helps, sortable(chosen), HIGHEST), which


@triton.jit
def sum_guesses(guess_acc, guess_stats, line, helps, maximum, d, N: tl.constexpr, BD: tl.constexpr):
    """(weighted values [BD], weights) of the keys above the guesses of N units, weights relative to exp(maximum).
    line, helps: [N], the chosen guess of each unit, and whether it counts.
    """
    top = tl.load(guess_stats + line * FIELDS + 2, mask=helps, other=float("-inf"))
    w = tl.exp2((top - maximum) * LOG2E)
    acc = tl.load(guess_acc + line[:, None] * BD + d[None, :], mask=helps[:, None], other=0.0)
    weights = tl.load(guess_stats + line * FIELDS + 3, mask=helps, other=0.0)
    # Inside fma they stay products: contracted with the sums that follow, bits would depend on the compiler.
    weights = tl.fma(weights, w, 0.0)
    acc = tree_sum(tl.fma(acc, tl.broadcast_to(w[:, None], [N, BD]), 0.0), N, BD)
    return acc, tl.sum(tree_sum(weights[:, None], N, 1), 0)
