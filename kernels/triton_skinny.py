"""The CUDA kernel for products of a few rows: y[M, N] = x[M, K] @ W[N, K]^T, with what `skinny.define` may do before
and after.

Such a product takes as long as reading its weight, so the weight is what the kernel is built around. It is the left
operand: a program takes BN of its lines, in steps of BK columns that a pipeline of STAGES copies brings to shared
memory; x^T, padded to BM columns, is the right operand. Runs of RUN columns go round SLICES groups of warps, each with
a sum of its own, so that a program may have few lines and still keep all warps busy; the slices are added two by two
when the last step is done. The columns may also be parted among SPLITS programs, which leave partial sums in scratch;
the last one to arrive adds them in their order.

A row's bits follow from K, SLICES and SPLITS alone, not from M, the other rows or any other size. Three exceptions:
SPLITS are counted in steps of BK; sums of two parts, as a norm has them, take turns in steps of BK; and with one slice,
programs of 64 lines run on Hopper's wide products, which add in an order of their own. Sums are float32, epilogues too,
and the result is rounded once. All addresses are int64.

A root-mean-square norm of x needs no kernel of its own, since every program reads all of x that its sums need: it adds
the squares on the way, and scales its sums when they are done. Partial sums of squares travel with those of products.
Of many rows that is too much to do in every program: then the sums of squares come from `triton_norms`.

With PDL the kernel may start before the one ahead of it has finished: it asks for the first columns of its weight in
the L2 cache, then waits. Those columns may even be written meanwhile, since the L2 cache is where writes arrive.

Mirrors `skinny.linear`, `skinny.gated`, `skinny.add` and `skinny.rotary`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

RUN = tl.constexpr(64)  # columns; in half precision one line of the cache

PREFETCH = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }")
PREFETCH_BYTES = tl.constexpr(64)  # that one request is sure to bring


@triton.jit
def multiply(a, b, acc, UPCAST: tl.constexpr):
    """acc + a @ b in float32. UPCAST: Triton's interpreter cannot multiply bfloat16."""
    if UPCAST:
        return acc + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@triton.jit
def fold(x):
    """[A, B, 2 C] -> [A, B, C], neighbours added."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
    return even + odd


@triton.jit
def add_slices(acc, SLICES: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr):
    """[SLICES, ROWS, BM] -> [ROWS, BM], in one order whatever the layout of the registers."""
    if SLICES == 1:
        y = acc
    else:
        x = tl.permute(acc, (1, 2, 0))  # [ROWS, BM, SLICES]
        if SLICES == 8:
            x = fold(x)
        if SLICES >= 4:
            x = fold(x)
        even, odd = tl.split(x)
        y = even + odd
    return y


@triton.jit
def add_squares(x, sums, SLICES: tl.constexpr, UPCAST: tl.constexpr):
    """sums [.., 16, BM] + the sum of the squares of x [.., COLUMNS, BM], the same in all 16 lines. A square is taken
    as a sum of two numbers (of bfloat16 exactly), and a line of ones multiplies them: on tensor cores they are added in
    an order that BM has no part in.
    """
    if SLICES == 1:
        ones = tl.full([16, x.shape[0]], 1.0, tl.float32)
    else:
        ones = tl.full([SLICES, 16, x.shape[1]], 1.0, tl.float32)
    ones = ones.to(tl.bfloat16)
    wide = x.to(tl.float32)
    square = wide * wide
    first = square.to(tl.bfloat16)
    rest = (square - first.to(tl.float32)).to(tl.bfloat16)
    return multiply(ones, first, multiply(ones, rest, sums, UPCAST), UPCAST)


@triton.jit
def multiply_scaled(a, x, gain, acc, UPCAST: tl.constexpr):
    """acc + a @ (x * gain): products of two bfloat16 are exact as a sum of two."""
    wide = x.to(tl.float32) * gain
    first = wide.to(x.dtype)
    acc = multiply(a, (wide - first.to(tl.float32)).to(x.dtype), acc, UPCAST)
    return multiply(a, first, acc, UPCAST)


@triton.jit
def weight_line(tile, r, N, BN: tl.constexpr, GATED: tl.constexpr, HALF: tl.constexpr):
    """int64 lines of the weight, and which column or pair of columns of the result each belongs to; gated tiles hold
    gate, then up, and tiles of rotated heads the first elements of pairs, then the second.
    """
    n = tile * BN + (r % BN)
    if GATED:
        return n + (r // BN).to(tl.int64) * N, n
    if HALF > 0:
        return n + n // HALF * HALF + (r // BN) * HALF, n
    return n, n


@triton.jit
def weight_at(tile, r, N, w_n, w_up, BN: tl.constexpr, GATED: tl.constexpr, HALF: tl.constexpr):
    """Where those lines begin, in elements, and the same columns. Lines of up begin w_up behind those of gate, in the
    same weight or in another.
    """
    if GATED:
        n = tile * BN + (r % BN)
        return n * w_n + (r // BN).to(tl.int64) * w_up, n
    line, n = weight_line(tile, r, N, BN, GATED, HALF)
    return line * w_n, n


@triton.jit
def ask_for_weight(w, tile, k0, N, end, w_n, w_up, BN: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
                   HALF: tl.constexpr, AHEAD: tl.constexpr):  # fmt: skip
    """Ask for columns k0 .. k0 + AHEAD of the program's lines in the L2 cache, as far as they go."""
    PER: tl.constexpr = PREFETCH_BYTES * 8 // w.dtype.element_ty.primitive_bitwidth
    line, n = weight_at(tile, tl.arange(0, ROWS), N, w_n, w_up, BN, GATED, HALF)
    k = k0 + tl.arange(0, AHEAD // PER) * PER
    wanted = (n < N)[:, None] & (k < end)[None, :]
    at = w + tl.where(wanted, line[:, None] + k[None, :], 0)
    tl.inline_asm_elementwise(
        PREFETCH, "=r,l,r", [at.to(tl.int64, bitcast=True), wanted.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def halves(y, BN: tl.constexpr, BM: tl.constexpr):
    """[2 BN, BM] -> the first and the second BN lines, [BN, BM] each."""
    return tl.split(tl.permute(tl.reshape(y, [2, BN, BM]), (1, 2, 0)))


@triton.jit
def result_places(tile, N, M, BN: tl.constexpr, BM: tl.constexpr):
    """Columns [BN] and rows [1, BM] of a tile of the result, and which places [BN, BM] the result has."""
    n = tile * BN + tl.arange(0, BN)
    m = tl.arange(0, BM)
    return n, m.to(tl.int64)[None, :], (n < N)[:, None] & (m < M)[None, :]


@triton.jit
def load_rest(tile, N, M, bias, residual, cos, sin, r_m, c_m, s_m, TURNED,
              HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, HALF: tl.constexpr,
              ROWS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """What `finish` needs besides the sums, asked for before those are made: (bias, residual, angles)."""
    n, at_m, ok = result_places(tile, N, M, BN, BM)
    offsets, added, angles = (), (), ()
    if HAS_BIAS:
        line, column = weight_line(tile, tl.arange(0, ROWS), N, BN, GATED, HALF)
        offsets = (tl.load(bias + line, mask=column < N, other=0.0),)
    if ADDS:
        added = (tl.load(residual + at_m * r_m + n[:, None], mask=ok, other=0.0),)
    if HALF > 0:
        j = (n % HALF)[:, None]
        turn = ok & (first_of_pair(n, HALF) < TURNED)[:, None]
        cos_at, sin_at = cos + at_m * c_m + j, sin + at_m * s_m + j
        angles = (
            tl.load(cos_at, mask=turn, other=1.0),
            tl.load(cos_at + HALF, mask=turn, other=1.0),
            tl.load(sin_at, mask=turn, other=0.0),
            tl.load(sin_at + HALF, mask=turn, other=0.0),
        )
    return offsets, added, angles


@triton.jit
def first_of_pair(n, HALF: tl.constexpr):
    """The columns of the first elements of the pairs n, those of all heads counted; the second are HALF behind."""
    return n + n // HALF * HALF


@triton.jit
def store_rotated(
    y, first, at_m, ok, angles, out, o_m, BN: tl.constexpr, BM: tl.constexpr, HALF: tl.constexpr
):
    """Rotate pairs by their angles (cosines of both elements, sines of both), and store them.

    Which of the two products a sum rounds is written out: left to the compiler it depends on the tile's layout.
    """
    a, b = halves(y, BN, BM)
    cos_a, cos_b, sin_a, sin_b = angles
    at = out + at_m * o_m + first[:, None]
    turned_a = tl.fma(a, cos_a.to(tl.float32), -(b * sin_a.to(tl.float32)))
    turned_b = tl.fma(b, cos_b.to(tl.float32), a * sin_b.to(tl.float32))
    tl.store(at, turned_a.to(out.dtype.element_ty), mask=ok)
    tl.store(at + HALF, turned_b.to(out.dtype.element_ty), mask=ok)


@triton.jit
def finish(y, rest, tile, N, M, out, o_m, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr,
           HALF: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr):  # fmt: skip
    """Epilogue and store of the sums y [ROWS, BM]. rest: what `load_rest` has loaded."""
    n, at_m, ok = result_places(tile, N, M, BN, BM)
    offsets, added, angles = rest
    if HAS_BIAS:
        y += offsets[0].to(tl.float32)[:, None]
    if HALF > 0:
        store_rotated(y, first_of_pair(n, HALF), at_m, ok, angles, out, o_m, BN, BM, HALF)
    else:
        if GATED:
            gate, up = halves(y, BN, BM)
            y = gate / (1.0 + tl.exp(-gate)) * up
        if ADDS:
            y += added[0].to(tl.float32)
        tl.store(out + at_m * o_m + n[:, None], y.to(out.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["M"])
def skinny_kernel(
    x, w, bias, residual, cos, sin, gain, sums, out, part, arrived, M, N, K, x_m, w_n, w_up, r_m, c_m, s_m, o_m, TURNED,
    share, eps, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, GATED: tl.constexpr, HALF: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, GIVEN: tl.constexpr, GAIN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr, SPLITS: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of BN lines, SPLITS). EVEN: N and K are multiples of BN and BK. N is the width of the result; with
    HALF, half the size of a head of which the first TURNED columns are made, it is the number of pairs of columns.
    NORM: rows are scaled by rsqrt(share * sum of squares + eps), the sums are those of sums [M] if they are GIVEN; with
    GAIN their elements by gain [K] too.
    """
    tile, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ROWS: tl.constexpr = 2 * BN if GATED or HALF > 0 else BN
    COLUMNS: tl.constexpr = BK // SLICES
    SQUARES: tl.constexpr = NORM and not GIVEN
    steps = tl.cdiv(tl.cdiv(K, BK), SPLITS)
    start = split * steps * BK
    end = tl.minimum(start + steps * BK, K)
    if PDL:
        if AHEAD > 0:
            ask_for_weight(w, tile, start, N, end, w_n, w_up, BN, ROWS, GATED, HALF, AHEAD)
        # In this order: once a kernel behind this one starts, all kernels ahead of this one are complete. Inductor's
        # kernels read what those have written without a wait of their own.
        gdc_wait()
        gdc_launch_dependents()
    line, column = weight_at(tile, tl.arange(0, ROWS), N, w_n, w_up, BN, GATED, HALF)
    m = tl.arange(0, BM)
    c = tl.arange(0, COLUMNS)
    rest = load_rest(tile, N, M, bias, residual, cos, sin, r_m, c_m, s_m, TURNED,
                     HAS_BIAS, ADDS, GATED, HALF, ROWS, BN, BM)  # fmt: skip
    if GIVEN:
        square = tl.load(sums + m, mask=m < M, other=0.0)
    if SLICES == 1:
        k_w, k_x = c[None, :], c[:, None]
        w_at = w + line[:, None] + k_w  # [ROWS, BK]
        x_at = x + m.to(tl.int64)[None, :] * x_m + k_x  # [BK, BM]
        acc = tl.zeros([ROWS, BM], tl.float32)
        line_ok, row_ok = (column < N)[:, None], (m < M)[None, :]
        squares = tl.zeros([16, BM], tl.float32)
    else:
        k = tl.arange(0, SLICES)[:, None] * RUN + (c // RUN * (SLICES * RUN) + c % RUN)[None, :]
        k_w, k_x = k[:, None, :], k[:, :, None]
        w_at = w + line[None, :, None] + k_w  # [SLICES, ROWS, COLUMNS]
        x_at = x + m.to(tl.int64)[None, None, :] * x_m + k_x  # [SLICES, COLUMNS, BM]
        acc = tl.zeros([SLICES, ROWS, BM], tl.float32)
        line_ok, row_ok = (column < N)[None, :, None], (m < M)[None, None, :]
        squares = tl.zeros([SLICES, 16, BM], tl.float32)
    for k0 in tl.range(start, end, BK, num_stages=STAGES):
        if EVEN:
            a = tl.load(w_at + k0, eviction_policy="evict_first")
            b = tl.load(x_at + k0, mask=row_ok, other=0.0)
        else:
            a = tl.load(w_at + k0, mask=line_ok & (k0 + k_w < end), other=0.0, eviction_policy="evict_first")
            b = tl.load(x_at + k0, mask=row_ok & (k0 + k_x < end), other=0.0)
        if SQUARES:
            squares = add_squares(b, squares, SLICES, UPCAST)
        if GAIN:
            g = tl.load(gain + k0 + k_x, mask=k0 + k_x < end, other=0.0).to(tl.float32)
            acc = multiply_scaled(a, b, g, acc, UPCAST)
        else:
            acc = multiply(a, b, acc, UPCAST)
    y = add_slices(acc, SLICES, ROWS, BM)
    if SQUARES:
        square = tl.max(add_slices(squares, SLICES, 16, BM), 0)  # [BM]
    if SPLITS == 1:
        if NORM:
            y *= tl.rsqrt(square * share + eps)[None, :]
        finish(y, rest, tile, N, M, out, o_m, HAS_BIAS, ADDS, GATED, HALF, BN, BM)
    else:
        at = tl.arange(0, ROWS)[:, None] * BM + m[None, :]
        PART: tl.constexpr = (ROWS + 1) * BM if SQUARES else ROWS * BM
        mine = part + tile * (SPLITS * PART)
        tl.store(mine + split * PART + at, y)
        if SQUARES:
            tl.store(mine + split * PART + ROWS * BM + m, square)
        tl.debug_barrier()
        ticket = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu")
        if ticket == SPLITS - 1:
            tl.store(arrived + tile, 0)
            tl.debug_barrier()
            y = tl.load(mine + at, cache_modifier=".cg")
            for other in tl.static_range(1, SPLITS):
                y += tl.load(mine + other * PART + at, cache_modifier=".cg")
            if SQUARES:
                square = tl.load(mine + ROWS * BM + m, cache_modifier=".cg")
                for other in tl.static_range(1, SPLITS):
                    square += tl.load(mine + other * PART + ROWS * BM + m, cache_modifier=".cg")
            if NORM:
                y *= tl.rsqrt(square * share + eps)[None, :]
            finish(y, rest, tile, N, M, out, o_m, HAS_BIAS, ADDS, GATED, HALF, BN, BM)
