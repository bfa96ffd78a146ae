"""Asking for memory in the L2 cache before it is read, which may be before the kernel ahead has finished: the L2 cache
is where writes arrive, so what is asked for too early is not stale when it is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import page_of

PREFETCH = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }")
ASKED_BYTES = tl.constexpr(64)  # one request is sure to bring
_THREADS = tl.constexpr(128)


@triton.jit
def ask(at, wanted, ASSEMBLY: tl.constexpr):
    """Ask for what the pointers `at` point to where `wanted`. Without ASSEMBLY, in Triton's interpreter, it is read."""
    if ASSEMBLY:
        tl.inline_asm_elementwise(
            PREFETCH, "=r,l,r", [at.to(tl.int64, bitcast=True), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip
    else:
        tl.load(at, mask=wanted)


@triton.jit
def ask_for_keys(
    k_pool, v_pool, base, table_row, n, ok, pool_page, pool_token, PAGE: tl.constexpr, D: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Ask for the keys n [X] of one head and their values, where `ok`."""
    PER: tl.constexpr = ASKED_BYTES * 8 // k_pool.dtype.element_ty.primitive_bitwidth
    part = tl.arange(0, triton.next_power_of_2((D + PER - 1) // PER)) * PER
    at = base + page_of(table_row, n, ok, PAGE).to(tl.int64) * pool_page + (n % PAGE) * pool_token
    at = at[:, None] + part[None, :]
    wanted = ok[:, None] & (part < D)[None, :]
    ask(k_pool + at, wanted, ASSEMBLY)
    ask(v_pool + at, wanted, ASSEMBLY)


@triton.jit
def ask_for_line(x, line, wanted, D: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Ask for line `line` of x [.., D] where `wanted`."""
    PER: tl.constexpr = ASKED_BYTES * 8 // x.dtype.element_ty.primitive_bitwidth
    part = tl.arange(0, _THREADS) * PER
    ask(x + line * D + part, wanted & (part < D), ASSEMBLY)
