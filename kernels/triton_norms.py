"""The CUDA kernel for the norm of a few rows ahead of their product, where every program of the product would have too
much of it to do.

Without a weight it leaves the sums of the squares, with which the product scales its own sums when they are done: added
in the order of a product with tiles of `SLICES` slices and `COLUMNS` columns, so that both ways have the same bits.
With a weight it leaves the normalised rows, rounded once. A row's bits follow from the row alone.

Mirrors `skinny_parts.Norm`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_parts import start_early
from .triton_skinny import RUN, add_slices, add_squares

SLICES = 4
COLUMNS = 256
_PIECE = tl.constexpr(1024)  # columns that are scaled at a time
_WIDE = tl.constexpr(8)  # columns of the tensor cores' right operand, of which the first is the row


@triton.jit
def norm_kernel(
    x, gain, out, K, x_m, o_m, share, eps, GAIN: tl.constexpr, BK: tl.constexpr, SLICES: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (rows). x [M, K] -> the sums of the squares, out [M] float32; with GAIN out [M, K], rows scaled by
    rsqrt(share * sum + eps) and multiplied by gain [K].
    """
    start_early(PDL)
    row = tl.program_id(0).to(tl.int64)
    m, c = tl.arange(0, _WIDE), tl.arange(0, BK // SLICES)
    k = tl.arange(0, SLICES)[:, None] * RUN + (c // RUN * (SLICES * RUN) + c % RUN)[None, :]
    k = k[:, :, None] + (m * 0)[None, None, :]  # [SLICES, BK // SLICES, _WIDE]
    first = (m == 0)[None, None, :]
    squares = tl.zeros([SLICES, 16, _WIDE], tl.float32)
    for k0 in tl.range(0, K, BK, num_stages=STAGES):
        some = tl.load(x + row * x_m + k0 + k, mask=first & (k0 + k < K), other=0.0)
        squares = add_squares(some, squares, SLICES, UPCAST)
    square = tl.max(add_slices(squares, SLICES, 16, _WIDE), 0)
    total = tl.sum(tl.where(m == 0, square, 0.0), 0)
    if GAIN:
        scale = tl.rsqrt(total * share + eps)
        for k0 in range(0, K, _PIECE):
            at = k0 + tl.arange(0, _PIECE)
            made = tl.load(x + row * x_m + at, mask=at < K, other=0.0).to(tl.float32) * scale
            factor = tl.load(gain + at, mask=at < K, other=0.0).to(tl.float32)
            tl.store(out + row * o_m + at, (made * factor).to(out.dtype.element_ty), mask=at < K)
    else:
        tl.store(out + row, total)
