"""What the attention and the selection kernels share: addresses, products, scores, merges."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-2147483648)
HIGHEST = tl.constexpr(2147483647)
STORE_ONE = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b32 [$1], $2; mov.u32 $0, 0; }")


@triton.jit
def start_early(PDL: tl.constexpr):
    """With PDL the kernel may have started before the one ahead of it has finished: waits for that one, then lets the
    one behind it do the same. In this order: whatever is further ahead is complete when a kernel starts.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def unit_size(length, MIN_UNIT: tl.constexpr, MAX_UNITS: tl.constexpr, STEP: tl.constexpr):
    """Keys per unit: MIN_UNIT, or as many STEPs as MAX_UNITS need to cover `length`."""
    return tl.maximum(MIN_UNIT, tl.cdiv(tl.cdiv(length, MAX_UNITS), STEP) * STEP)


@triton.jit
def unsigned(n):
    """Positions as what they are: dividing numbers that might be negative takes four times the instructions."""
    return n.to(tl.uint32, bitcast=True)


@triton.jit
def page_of(table_row, n, PAGE: tl.constexpr):
    """int32 [BN]: pages of the keys n [BN], all of which the table has: loads with a mask would wait for each other."""
    return tl.load(table_row + unsigned(n) // PAGE)


@triton.jit
def place_of(page, n, PAGE: tl.constexpr):
    """int32 [BN]: the keys n [BN] counted by pages as they lie in a pool, which tells page and place in it."""
    return page * PAGE + (unsigned(n) % PAGE).to(tl.int32)


@triton.jit
def key_place(base, page, n, PAGE: tl.constexpr, pool_page, pool_token):
    """int64 [BN]: where in a pool the keys n [BN] of one head begin. base: the head's place in page 0."""
    return base + page.to(tl.int64) * pool_page + (unsigned(n) % PAGE).to(tl.int32) * pool_token


@triton.jit
def load_keys(pool, at, ok, d, d_ok):
    """What begins at the places `at` [BN] of a pool: [BN, BD], zeros where not `ok`."""
    mask = ok[:, None] & d_ok[None, :]
    return tl.load(pool + at[:, None] + d[None, :], mask=mask, other=0.0)


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """a @ b in float32. PRECISION "upcast" widens first: Triton's interpreter cannot multiply bfloat16."""
    if PRECISION == "upcast":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def soft_cap(s, cap):
    """cap * tanh(s / cap), by the exponential that every backend has."""
    return cap * (1.0 - 2.0 / (tl.exp2(s * (2.0 * LOG2E / cap)) + 1.0))


@triton.jit
def score(
    q_tile, k, n, end, first_m, length_m, scale, cap,
    HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(s [BM, BN], seen [BM, BN]): scores of the keys n [BN], and which of them each query sees."""
    s = product(q_tile, tl.trans(k), PRECISION) * scale
    if HAS_CAP:
        s = soft_cap(s, cap)
    seen = (n < end)[None, :] & (n[None, :] < length_m[:, None])
    if HAS_WINDOW:
        seen = seen & (n[None, :] >= first_m[:, None])
    return s, seen


@triton.jit
def finite_or_zero(m):
    """A maximum to subtract from scores: 0 where there was none."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def pair_weights(m_a, m_b):
    """(m, a, b): the maximum of two partial results and what each counts under it."""
    m = tl.maximum(m_a, m_b)
    safe = finite_or_zero(m)
    return m, tl.exp2((m_a - safe) * LOG2E), tl.exp2((m_b - safe) * LOG2E)


@triton.jit
def weighted(x_a, a, x_b, b):
    """x_a * a + x_b * b with one rounding order: the compiler cannot contract it in another way elsewhere."""
    return tl.fma(x_a, a, x_b * b)


@triton.jit
def merge_pair(m_a, l_a, acc_a, m_b, l_b, acc_b):
    """Two partial results (m [X], l [X], acc [X, BD]) as one: the same bits in registers as in `merge_units`."""
    m, a, b = pair_weights(m_a, m_b)
    return m, weighted(l_a, a, l_b, b), weighted(acc_a, a[:, None], acc_b, b[:, None])


@triton.jit
def load_unit(part_acc, part_m, part_l, slot, live, d, BD: tl.constexpr):
    """The partial result (m, l, acc [BD]) at the int64 place `slot`; nothing where not `live`."""
    m = tl.load(part_m + slot, mask=live, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(part_l + slot, mask=live, other=0.0, cache_modifier=".cg")
    return m, l, tl.load(part_acc + slot * BD + d, mask=(d >= 0) & live, other=0.0, cache_modifier=".cg")


@triton.jit
def merge_units(
    part_acc, part_m, part_l, at, units, d, PAIRS: tl.constexpr, SLOTS: tl.constexpr, BD: tl.constexpr
):
    """One (row, head) from its partial results: (sum [BD], m, l).

    Units are merged two by two, then the pairs in order, one after the other: slots beyond the units change no bit.
    With PAIRS the programs have merged the pairs themselves and left one result for each; both ways make the same bits.
    """
    loaded, pairs = (), ()
    for i in tl.static_range(SLOTS // 2 if PAIRS else SLOTS):  # all of them on their way at once
        live = 2 * i < units if PAIRS else i < units
        loaded += (load_unit(part_acc, part_m, part_l, at * SLOTS + i, live, d, BD),)
    top = tl.full((), float("-inf"), tl.float32)
    for i in tl.static_range(SLOTS // 2):
        if PAIRS:
            m, l, acc = loaded[i]
        else:
            m_a, l_a, acc_a = loaded[2 * i]
            m_b, l_b, acc_b = loaded[2 * i + 1]
            m, a, b = pair_weights(m_a, m_b)
            l, acc = weighted(l_a, a, l_b, b), weighted(acc_a, a, acc_b, b)
        pairs += ((m, l, acc),)
        top = tl.maximum(top, m)
    total = tl.zeros((), tl.float32)
    result = tl.zeros([BD], tl.float32)
    for i in tl.static_range(SLOTS // 2):
        m, l, acc = pairs[i]
        w = tl.exp2((m - finite_or_zero(top)) * LOG2E)
        total = tl.fma(l, w, total)
        result = tl.fma(acc, w, result)
    return result, top, total


@triton.jit
def sortable(s):
    """float32 -> int32 whose signed order is the order of the floats; -0.0 and 0.0 become one."""
    bits = (s + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def unsortable(key):
    """The inverse of `sortable`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def scatter(to, x, wanted, ASSEMBLY: tl.constexpr):
    """Store x, of 32 bits each, at the pointers `to` where `wanted`.

    Triton would move all three through shared memory to where a store of neighbours likes them; here there are none.
    ASSEMBLY stores from where they are.
    """
    if ASSEMBLY:
        at, bits = to.to(tl.int64, bitcast=True), x.to(tl.int32, bitcast=True)
        tl.inline_asm_elementwise(
            STORE_ONE, "=r,l,r,r", [at, bits, wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        tl.store(to, x, mask=wanted)


@triton.jit
def tree_sum(x, N: tl.constexpr, W: tl.constexpr):
    """x [N, W] summed over N, neighbours first: an order that does not depend on how threads share x."""
    x = tl.trans(x)
    for i in tl.static_range(N.bit_length() - 1):
        even, odd = tl.split(tl.reshape(x, [W, N >> (i + 1), 2]))
        x = even + odd
    return tl.reshape(x, [W])
