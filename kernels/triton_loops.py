"""The loops over keys of the attention kernel: scores, soft-max, weighted values of one unit of keys.

Scores and sums are float32. A page table entry is loaded one step ahead of the keys that it leads to.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_guesses import HALF, guess_cuts, store_guesses
from .triton_parts import (
    LOG2E,
    finite_or_zero,
    key_place,
    load_keys,
    merge_pair,
    page_of,
    place_of,
    product,
    score,
    soft_cap,
    unsigned,
)

STORE_PAIR = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $4, 0; @p st.global.v2.f32 [$1], {$2, $3}; mov.u32 $0, 0; }"
)


@triton.jit
def add_bias(s, bias, line, n, ok):
    """s [BM, BN] plus the bias of the keys n [BN] for the queries whose lines start at `line` [BM]."""
    return s + tl.load(bias + line[:, None] + n[None, :], mask=ok, other=0.0).to(tl.float32)


@triton.jit
def online_softmax(s, m, l, acc, v, cut, GUESSES: tl.constexpr, BM: tl.constexpr, PRECISION: tl.constexpr):
    """One step over s [BM, BN] (masked entries -inf) and v [BN, BD]: updated (m [BM], l [BM], acc [BM, BD]).

    With GUESSES scores below cut [BM] count for the maximum only, and the upper half of the rows sums what rounding
    takes from the weights of the lower half.
    """
    m_new = tl.maximum(m, tl.max(s, 1))
    m_safe = finite_or_zero(m_new)
    alpha = tl.exp2((m - m_safe) * LOG2E)
    p = tl.exp2((s - m_safe[:, None]) * LOG2E)  # [BM, BN]
    weights = p
    if GUESSES > 0:
        p = tl.where(s < cut[:, None], 0.0, p)
        upper = tl.arange(0, BM) >= HALF
        weights = tl.where(upper[:, None], p - p.to(v.dtype).to(tl.float32), p)
    return m_new, l * alpha + tl.sum(p, 1), acc * alpha[:, None] + product(weights.to(v.dtype), v, PRECISION)


@triton.jit
def store_scores(scores, line, n, s, wanted, ASSEMBLY: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """Keep s [BM, BN] where `wanted`, at line [BM] + n [BN], both int32.

    Triton would move the whole padded tile to where a store of rows likes it. ASSEMBLY stores straight from where the
    product left it, two neighbouring columns at a time: columns come in pairs, and lines have an even size.
    """
    if ASSEMBLY:
        even, odd = tl.split(tl.reshape(s, [BM, BN // 2, 2]))
        first, _ = tl.split(tl.reshape(n, [BN // 2, 2]))
        mask, _ = tl.split(tl.reshape(wanted.to(tl.int32), [BM, BN // 2, 2]))
        at = scores + line[:, None] + first[None, :]
        tl.inline_asm_elementwise(
            STORE_PAIR, "=r,l,f,f,r", [at.to(tl.int64, bitcast=True), even, odd, mask], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        tl.store(scores + line[:, None] + n[None, :], s, mask=wanted)


@triton.jit
def store_own(own_key, d, d_ok):
    """Store a row's own key and value. own_key: two pointers into the pools, what goes there [BD], and whether."""
    k_to, v_to, key, value, wanted = own_key
    tl.store(k_to + d, key, mask=d_ok & wanted)
    tl.store(v_to + d, value, mask=d_ok & wanted)


@triton.jit
def first_entries(kept_line, start, capacity, wanted, BK: tl.constexpr):
    """The entries of a retained list from `start` on, as far as there are any, for two steps of BK: [BK] each."""
    e = start + tl.arange(0, BK)
    n = tl.load(kept_line + e, mask=wanted & (e < capacity), other=0)
    return n, tl.load(kept_line + e + BK, mask=wanted & (e + BK < capacity), other=0)


@triton.jit
def attend_kept(
    q_tile, k_pool, v_pool, base, table_row, kept_line, entries, start, end, own_key, d, d_ok, pool_page, pool_token,
    scale, cap, live, bias, bias_m, WRITES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_BIAS: tl.constexpr,
    PAGE: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention over entries start .. end - 1 of a retained list: (m [BM], l [BM], acc [BM, BD]). entries: what
    `first_entries` has loaded. STAGES 1: no row has more than BK.

    With WRITES the row's own key is stored before any is read, but after everything else has been asked for.
    """
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    e = tl.arange(0, BK)
    n, n_next = entries
    n, n_next = tl.where(start + e < end, n, 0), tl.where(start + BK + e < end, n_next, 0)
    place = place_of(page_of(table_row, n, PAGE), n, PAGE)
    if WRITES:
        store_own(own_key, d, d_ok)
        tl.debug_barrier()
    for e0 in tl.range(start, end, BK, num_stages=max(2, STAGES)):
        ok = e0 + e < end
        if STAGES > 1:
            # Entries are loaded two steps ahead, their pages one: the loads of keys wait for neither.
            place_next = place_of(page_of(table_row, n_next, PAGE), n_next, PAGE)
            n_next = tl.load(kept_line + tl.minimum(e0 + 2 * BK + e, end - 1))
        at = key_place(base, unsigned(place) // PAGE, place, PAGE, pool_page, pool_token)
        k = load_keys(k_pool, at, ok, d, d_ok)  # [BK, BD]
        v = load_keys(v_pool, at, ok, d, d_ok)
        s = product(q_tile, tl.trans(k), PRECISION) * scale  # [BM, BK]
        if HAS_CAP:
            s = soft_cap(s, cap)
        if HAS_BIAS:
            n = tl.load(kept_line + tl.minimum(e0 + e, end - 1))
            s = add_bias(s, bias, bias_m, n, live[:, None] & ok[None, :])
        m, l, acc = online_softmax(tl.where(ok[None, :], s, float("-inf")), m, l, acc, v, m, 0, BM, PRECISION)
        if STAGES > 1:
            place = place_next
    return m, l, acc


@triton.jit
def store_part(
    part_acc, part_m, part_l, at_m, own, slot, m, l, acc, d, BD: tl.constexpr, SLOTS: tl.constexpr
):
    """Leave a partial result (m [BM], l [BM], acc [BM, BD]) for the merge."""
    part = at_m * SLOTS + slot
    tl.store(part_m + part, m, mask=own)
    tl.store(part_l + part, l, mask=own)
    tl.store(part_acc + part[:, None] * BD + d[None, :], acc, mask=own[:, None])


@triton.jit
def attend_span(
    q_tile, k_pool, v_pool, base, table_row, start, end, keys, own_key, unit, first_m, length_m, at_m, own, d, d_ok,
    pool_page, pool_token, scale, cap, quantile, scores, line_m, part_acc, part_m, part_l, guess_acc, guess_stats, row,
    head0, width, captured, bias, bias_m,
    WRITES: tl.constexpr, GUESSES: tl.constexpr, COPIES: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr, CAPTURES: tl.constexpr, ASSEMBLY: tl.constexpr, HEADS: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
    SLOTS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Attention over keys start .. end - 1, units of `keys` keys from number `unit` on, in one pipeline of loads.

    Units are merged two by two; each pair but the last is left for the merge as it ends. Returns the number of the last
    unit and the last pair, or unit where SPAN is 1: (unit, m [BM], l [BM], acc [BM, BD]). Where `captured`, scores of
    the rows with line_m [BM] >= 0 are kept, and each unit's sums over the keys above guessed cuts. WRITES: as in
    `attend_kept`.
    """
    m = tl.full([BM], float("-inf"), tl.float32)
    l = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BD], tl.float32)
    cut = tl.full([BM], float("-inf"), tl.float32)
    deviation = cut
    m_a, l_a, acc_a = m, l, acc  # the first of two units
    offset = tl.arange(0, BN)
    unit_start = start
    # Pages of the next step are loaded one step ahead: the loads of keys never wait for them.
    page = page_of(table_row, tl.minimum(start + offset, end - 1), PAGE)
    if WRITES:
        store_own(own_key, d, d_ok)
        tl.debug_barrier()
    for n0 in tl.range(start, end, BN, num_stages=STAGES):
        n = n0 + offset
        ok = n < end
        page_next = page_of(table_row, tl.minimum(n + BN, end - 1), PAGE)
        at = key_place(base, page, n, PAGE, pool_page, pool_token)
        k = load_keys(k_pool, at, ok, d, d_ok)  # [BN, BD]
        v = load_keys(v_pool, at, ok, d, d_ok)
        s, seen = score(q_tile, k, n, end, first_m, length_m, scale, cap, HAS_CAP, HAS_WINDOW, PRECISION)
        if HAS_BIAS:
            s = add_bias(s, bias, bias_m, n, seen)
        if CAPTURES:
            if captured:
                store_scores(scores, line_m, n, s, seen & (line_m >= 0)[:, None], ASSEMBLY, BM, BN)
        if GUESSES > 0:
            if captured:
                if n0 == unit_start:
                    cut, deviation = guess_cuts(s, seen, quantile, GUESSES, COPIES, BM)
        m, l, acc = online_softmax(
            tl.where(seen, s, float("-inf")), m, l, acc, v, cut, GUESSES, BM, PRECISION
        )
        page = page_next
        if SPAN > 1:
            if (n0 + BN == unit_start + keys) & (n0 + BN < end):
                if GUESSES > 0:
                    if captured:
                        store_guesses(guess_acc, guess_stats, cut, deviation, m, l, acc, row, head0, unit, width, d,
                                      HEADS, GUESSES, COPIES, BM, BD, SLOTS)  # fmt: skip
                if unit % 2 == 0:
                    m_a, l_a, acc_a = m, l, acc
                else:
                    m, l, acc = merge_pair(m_a, l_a, acc_a, m, l, acc)
                    store_part(part_acc, part_m, part_l, at_m, own, unit // 2, m, l, acc, d, BD, SLOTS)
                m = tl.full([BM], float("-inf"), tl.float32)
                l = tl.zeros([BM], tl.float32)
                acc = tl.zeros([BM, BD], tl.float32)
                unit += 1
                unit_start = n0 + BN
    if GUESSES > 0:
        if captured:
            store_guesses(guess_acc, guess_stats, cut, deviation, m, l, acc, row, head0, unit, width, d,
                          HEADS, GUESSES, COPIES, BM, BD, SLOTS)  # fmt: skip
    if SPAN > 1:
        if unit % 2 == 1:
            m, l, acc = merge_pair(m_a, l_a, acc_a, m, l, acc)
    return unit, m, l, acc
