"""The CUDA kernel for greedy tokens.

A program reads BLOCK logits of one row and leaves their maximum, its place, and the sum of exp(x - maximum). The last
program of a row merges what all of them left, in their order: a row's bits depend on that row and its length alone.
Sums are float32. All addresses are int64.

Mirrors `greedy.define`.
"""

from __future__ import annotations

import triton
import triton.language as tl

NOWHERE = tl.constexpr(2**31 - 1)


@triton.jit
def first_largest(x, at):
    """(maximum, place) of float32 x [B] at the places `at`: the first NaN, else the first of the largest."""
    nan = tl.min(tl.where(x != x, at, NOWHERE), 0)
    top = tl.max(tl.where(x != x, float("-inf"), x), 0)
    first = tl.min(tl.where(x == top, at, NOWHERE), 0)
    return tl.where(nan < NOWHERE, float("nan"), top), tl.where(nan < NOWHERE, nan, first)


@triton.jit
def greedy_kernel(logits, tokens, logprobs, tops, places, sums, arrived, V, l_n, l_v,
                  BLOCK: tl.constexpr, PARTS: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Grid (PARTS, rows). tops, places, sums: scratch [rows, PARTS]. PADDED: PARTS or the next power of two."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * l_n + at.to(tl.int64) * l_v, mask=at < V, other=float("-inf")).to(
        tl.float32
    )  # [BLOCK]
    top, place = first_largest(x, at)
    total = tl.where(top == float("-inf"), 0.0, tl.sum(tl.exp(x - top), 0))
    mine = row * PARTS + part
    tl.store(tops + mine, top)
    tl.store(places + mine, place)
    tl.store(sums + mine, total)
    tl.debug_barrier()
    ticket = tl.atomic_add(arrived + row, 1, sem="acq_rel", scope="gpu")
    if ticket == PARTS - 1:
        tl.store(arrived + row, 0)
        tl.debug_barrier()
        p = tl.arange(0, PADDED)
        there = row * PARTS + p
        t = tl.load(tops + there, mask=p < PARTS, other=float("-inf"), cache_modifier=".cg")  # [PADDED]
        w = tl.load(places + there, mask=p < PARTS, other=NOWHERE, cache_modifier=".cg")
        s = tl.load(sums + there, mask=p < PARTS, other=0.0, cache_modifier=".cg")
        top, place = first_largest(t, w)
        total = tl.sum(tl.where(p < PARTS, s * tl.exp(t - top), 0.0), 0)
        tl.store(tokens + row, place.to(tl.int64))
        tl.store(logprobs + row, -tl.log(total))
