"""Launches of the Triton kernel for products of a few rows.

Nothing here reads the device, so launches can be captured in a CUDA graph. On the CPU the kernel runs in Triton's
interpreter, where TRITON_INTERPRET=1 was set before this module was imported.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv

from .arrivals import arrivals
from .skinny import Norm, Rotary
from .skinny_tuning import Tiles, padded_rows
from .triton_norms import COLUMNS, SLICES, norm_kernel
from .triton_skinny import skinny_kernel


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    tiles: Tiles,
    rotary: Rotary | None = None,
    norm: Norm | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """x [M, K], weight [N, K] or [2 N, K] with the last stride 1 -> [M, N], as `skinny.define` says. up [N, K] with the
    strides of the weight: the other half of a gated one.
    """
    x = x if x.stride(1) == 1 else x.contiguous()
    sums = None
    if norm is not None and tiles.apart and x.shape[0] > 0:
        made = _norm(x, norm, tiles.pdl)
        x, sums, norm = (x, made, norm) if norm.weight is None else (made, None, None)
    rows, depth = x.shape
    width = weight.shape[0] // 2 if gated and up is None else weight.shape[0]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows == 0 or width == 0:
        return out
    if residual is not None and residual.stride(1) != 1:
        residual = residual.contiguous()
    pairs = gated or rotary is not None
    columns = width if rotary is None else width // 2
    cos, sin = (out, out) if rotary is None else (_rows(one, rows) for one in rotary[:2])
    on_cuda, blocks, padded = (
        x.device.type == "cuda",
        cdiv(columns, tiles.lines),
        padded_rows(rows, tiles.slices),
    )
    part, arrived = out, out
    if tiles.splits > 1:
        lines = tiles.lines * (2 if pairs else 1)
        lines += norm is not None and sums is None  # the sums of squares
        part = torch.empty(blocks * tiles.splits * lines * padded, dtype=torch.float32, device=x.device)
        arrived = arrivals(x.device, blocks)
    gain = None if norm is None or norm.weight is None else norm.weight.contiguous()
    pdl = tiles.pdl and on_cuda
    skinny_kernel[(blocks, tiles.splits)](
        x, weight, bias if bias is not None else out, residual if residual is not None else out,
        cos, sin, out if gain is None else gain, out if sums is None else sums, out, part, arrived,
        rows, columns, depth, x.stride(0), weight.stride(0), _to_up(weight, up, width),
        0 if residual is None else residual.stride(0),
        cos.stride(0), sin.stride(0), out.stride(0), 0 if rotary is None else rotary.width,
        _share(norm, depth), 0.0 if norm is None else norm.eps,
        HAS_BIAS=bias is not None, ADDS=residual is not None, GATED=gated,
        HALF=0 if rotary is None else rotary.cos.shape[-1] // 2,
        EVEN=columns % tiles.lines == 0 and depth % tiles.columns == 0,
        NORM=norm is not None, GIVEN=sums is not None, GAIN=gain is not None,
        BM=padded, BN=tiles.lines, BK=tiles.columns, SLICES=tiles.slices, SPLITS=tiles.splits,
        STAGES=tiles.stages, AHEAD=tiles.ahead, PDL=pdl, UPCAST=not on_cuda,
        num_warps=tiles.warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def _norm(x: Tensor, norm: Norm, pdl: bool) -> Tensor:
    """The sums of the squares of x [M, K], float32 [M]; of a norm with a weight the normalised rows [M, K]."""
    on_cuda, gain = x.device.type == "cuda", norm.weight
    made = torch.empty_like(x) if gain is not None else x.new_empty(x.shape[0], dtype=torch.float32)
    pdl = pdl and on_cuda
    norm_kernel[(x.shape[0],)](
        x, made if gain is None else gain.contiguous(), made, x.shape[1], x.stride(0), made.stride(0),
        _share(norm, x.shape[1]), norm.eps, GAIN=gain is not None, BK=COLUMNS, SLICES=SLICES, STAGES=4, PDL=pdl,
        UPCAST=not on_cuda, num_warps=4, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return made


def _share(norm: Norm | None, depth: int) -> float:
    """What the sum of the squares of a row counts in its norm."""
    return 1.0 / max(1, depth) if norm is not None and norm.mean else 1.0


def _rows(x: Tensor, rows: int) -> Tensor:
    """[rows, D] with the last stride 1."""
    flat = x.reshape(rows, x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def _to_up(weight: Tensor, up: Tensor | None, width: int) -> int:
    """Elements from the first line of gate to that of up, which may lie anywhere."""
    if up is None:
        return width * weight.stride(0)
    return (up.data_ptr() - weight.data_ptr()) // weight.element_size()
