"""What a product of a few rows may do beside: the norm of its rows, the rotation of its heads; and what must fit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .arguments import compute_dtype


class Norm(NamedTuple):
    """The root-mean-square norm of rows before their product: x * rsqrt(mean(x^2) + eps) * weight.

    weight: [K] in the dtype of x, or None. mean: False takes the sum of the squares in the place of their mean.
    """

    eps: float
    weight: Tensor | None = None
    mean: bool = True

    def to(self, dtype: torch.dtype) -> Norm:
        return self._replace(weight=None if self.weight is None else self.weight.to(dtype))

    def __call__(self, x: Tensor) -> Tensor:
        """As models write it: in float32, rounded, and rounded again when it is multiplied by the weight."""
        wide = x.to(compute_dtype(x.dtype))
        square = wide.pow(2)
        share = square.mean(-1, keepdim=True) if self.mean else square.sum(-1, keepdim=True)
        made = (wide * torch.rsqrt(share + self.eps)).to(x.dtype)
        return made if self.weight is None else self.weight * made

    def apart(self, x: Tensor) -> Tensor:
        """In a kernel of its own, where torch has one."""
        return F.rms_norm(x, x.shape[-1:], self.weight, self.eps) if self.mean else self(x)


class Rotary(NamedTuple):
    """How the first `width` columns of a product are rotated, head by head. cos, sin: [..., D], as the rows of x."""

    cos: Tensor
    sin: Tensor
    width: int

    def to(self, dtype: torch.dtype) -> Rotary:
        return Rotary(self.cos.to(dtype), self.sin.to(dtype), self.width)

    def rows(self, count: int, start: int, stop: int) -> Rotary:
        """That of rows start .. stop of `count`."""
        cos, sin = (x.reshape(count, x.shape[-1])[start:stop] for x in (self.cos, self.sin))
        return Rotary(cos, sin, self.width)

    def __call__(self, product: Tensor) -> Tensor:
        heads = product[..., : self.width].unflatten(-1, (-1, self.cos.shape[-1]))
        a, b = heads.chunk(2, -1)
        turned = heads * self.cos[..., None, :] + torch.cat((-b, a), -1) * self.sin[..., None, :]
        return torch.cat((turned.flatten(-2), product[..., self.width :]), -1)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, gated: bool) -> None:
    """Raises ValueError where the operands do not fit each other."""
    if weight.dim() != 2 or x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x {tuple(x.shape)} and weight {tuple(weight.shape)} do not fit: x is [..., K], the weight [N, K]"
        )
    if gated and weight.shape[0] % 2:
        raise ValueError(f"weight has {weight.shape[0]} lines; gate and up need an even number: [gate; up]")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} must have one value for each of {weight.shape[0]} lines")
    if residual is not None and residual.shape != (*x.shape[:-1], weight.shape[0]):
        raise ValueError(
            f"residual {tuple(residual.shape)} must have the shape of the result, "
            f"{(*x.shape[:-1], weight.shape[0])}"
        )
    for name, other in (("weight", weight), ("bias", bias), ("residual", residual)):
        if other is not None and (other.dtype, other.device) != (x.dtype, x.device):
            raise ValueError(
                f"{name} is {other.dtype} on {other.device}, x {x.dtype} on {x.device}; they must agree"
            )


def check_up(weight: Tensor, bias: Tensor | None, up: Tensor) -> None:
    """Raises ValueError where two weights are no gate and up of one product."""
    if bias is not None:
        raise ValueError("a bias needs gate and up in one weight: pass weight=[gate; up] and no up")
    for what in ("shape", "dtype", "device"):
        if getattr(up, what) != getattr(weight, what):
            raise ValueError(
                f"up has {what} {getattr(up, what)}, gate {getattr(weight, what)}; they must agree"
            )
    if up.stride() != weight.stride():
        raise ValueError(f"up has strides {up.stride()}, gate {weight.stride()}; they must agree")


def check_rotary(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> None:
    """Raises ValueError where heads and angles do not fit the product."""
    size = cos.shape[-1]
    if cos.shape != sin.shape or cos.shape[:-1] != x.shape[:-1] or size % 2:
        raise ValueError(
            f"cos {tuple(cos.shape)} and sin {tuple(sin.shape)} must be {(*x.shape[:-1], 'D')} with an even D"
        )
    if not 0 <= rotated <= weight.shape[0] or rotated % size or weight.shape[0] % size:
        raise ValueError(
            f"rotated={rotated} of {weight.shape[0]} columns: both must be heads of {size}, rotated ones first"
        )
    for name, other in (("cos", cos), ("sin", sin)):
        if (other.dtype, other.device) != (x.dtype, x.device):
            raise ValueError(
                f"{name} is {other.dtype} on {other.device}, x {x.dtype} on {x.device}; they must agree"
            )


def check_norm(x: Tensor, norm: Norm) -> None:
    """Raises ValueError where a norm does not fit the rows."""
    weight = norm.weight
    if weight is None:
        return
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"norm {tuple(weight.shape)} must have one value for each of {x.shape[-1]} columns of x"
        )
    if (weight.dtype, weight.device) != (x.dtype, x.device):
        raise ValueError(
            f"norm is {weight.dtype} on {weight.device}, x {x.dtype} on {x.device}; they must agree"
        )
