"""Products of a few rows with a large weight: definitions, schemas and fakes of the ops. Importing it registers them.

    skinny_linear  x @ weight^T + bias
    skinny_gated   silu(x @ gate^T) * (x @ up^T), weight = [gate; up], or gate alone where up is given (without a bias)
    skinny_add     residual + x @ weight^T + bias
    skinny_rotary  x @ weight^T + bias, of which the first `rotated` columns are heads that are rotated by halves:
                   [a, b] -> [a, b] * cos + [-b, a] * sin; cos and sin are [..., D] for heads of D

x is [..., K], weight [N, K] (gated: [2 N, K]), residual and the fresh contiguous result [..., N], all of one dtype; a
bias has one value per line of the weight. Inputs may have any strides.

`define` is the definition: sums, bias, activation and residual in float32 (float64 stays float64), rounded once at the
end. On the CPU the ops are the definition. On CUDA, up to `MAX_ROWS` rows in half precision run the Triton kernel, with
the tiles of `skinny_choice`; more rows, other dtypes, and shapes at which the library was measured to be faster run as
eager code does, which rounds after every operation. In the kernel a row's bits depend on that row and the weight alone,
not on the other rows or on how many there are.

With `fixed` they do so whatever runs: on CUDA always the kernel, with tiles by the weight's shape that nothing was
measured for, over `MAX_ROWS` rows at a time; on the CPU the definition of each row on its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .arguments import compute_dtype

MAX_ROWS = 64
HALF = (torch.bfloat16, torch.float16)

SCHEMAS = {
    "skinny_linear": "(Tensor x, Tensor weight, Tensor? bias=None, *, bool fixed=False) -> Tensor",
    "skinny_gated": "(Tensor x, Tensor weight, Tensor? bias=None, *, Tensor? up=None, bool fixed=False) -> Tensor",
    "skinny_add": "(Tensor x, Tensor weight, Tensor residual, Tensor? bias=None, *, bool fixed=False) -> Tensor",
    "skinny_rotary": "(Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor? bias=None, *, int rotated, "
    "bool fixed=False) -> Tensor",
}
"""Op name -> schema without the name."""


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


def define(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    rotary: Rotary | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """The definition of all ops."""
    wide = compute_dtype(x.dtype)
    bias, residual, up = (None if other is None else other.to(wide) for other in (bias, residual, up))
    turned = None if rotary is None else rotary.to(wide)
    return eager(x.to(wide), weight.to(wide), bias, residual, gated, turned, up).to(x.dtype)


def eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    rotary: Rotary | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """The same, rounded to the operands' dtype after every operation."""
    product = F.linear(x, weight, bias)
    if gated:
        gate, factor = product.chunk(2, -1) if up is None else (product, F.linear(x, up))
        product = F.silu(gate) * factor
    if rotary is not None:
        product = rotary(product)
    return product if residual is None else residual + product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, fixed: bool = False) -> Tensor:
    return _run(x, weight, bias, None, False, fixed)


def gated(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, up: Tensor | None = None, fixed: bool = False
) -> Tensor:
    if up is not None:
        check_up(weight, bias, up)
    return _run(x, weight, bias, None, True, fixed, up=up)


def add(
    x: Tensor, weight: Tensor, residual: Tensor, bias: Tensor | None = None, *, fixed: bool = False
) -> Tensor:
    return _run(x, weight, bias, residual, False, fixed)


def rotary(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    bias: Tensor | None = None,
    *,
    rotated: int,
    fixed: bool = False,
) -> Tensor:
    check_rotary(x, weight, cos, sin, rotated)
    return _run(x, weight, bias, None, False, fixed, Rotary(cos, sin, rotated))


def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it has finished: always a gain where the GPU can do it."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def obstacle(dtype: torch.dtype, weight: Tensor) -> str:
    """Why the Triton kernel cannot run such a call; "" where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if dtype not in HALF:
        return f"there is no kernel for {dtype}"
    if weight.stride(-1) != 1:
        return "the columns of the weight are not contiguous"
    return ""


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    fixed: bool,
    rotary: Rotary | None = None,
    up: Tensor | None = None,
) -> Tensor:
    check(x, weight, bias, residual, gated and up is None)
    if fixed:
        return _fixed(x, weight, bias, residual, gated, rotary, up)
    if x.device.type != "cuda":
        return define(x, weight, bias, residual, gated, rotary, up)
    rows = x.shape[:-1].numel()
    if 0 < rows <= MAX_ROWS and not obstacle(x.dtype, weight):
        choice = importlib.import_module(".skinny_choice", __package__)
        # Tiles of rotated heads hold pairs of lines, as gated ones do. The library rotates in kernels of their own.
        tiles = choice.tiles_maybe(rows, weight, gated or rotary is not None, up)
        if tiles is None and rotary is not None:
            tiles = choice.own_tiles(rows, weight, True)
        if tiles is not None:
            backend = importlib.import_module(".skinny_backend", __package__)
            flat = None if residual is None else residual.reshape(rows, -1)
            made = backend.launch(x.reshape(rows, -1), weight, bias, flat, gated, tiles, rotary, up)
            return made.view(*x.shape[:-1], made.shape[1])
    return eager(x, weight, bias, residual, gated, rotary, up).contiguous()


def _fixed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    rotary: Rotary | None,
    up: Tensor | None,
) -> Tensor:
    """Bits per row that do not depend on the number of rows. Raises ValueError where no kernel has them."""
    on_cuda, reason = x.device.type == "cuda", obstacle(x.dtype, weight)
    if on_cuda and reason:
        raise ValueError(f"fixed=True: {reason}; pass half precision and a weight with contiguous columns")
    rows, step = x.shape[:-1].numel(), MAX_ROWS if on_cuda else 1
    flat = x.reshape(rows, x.shape[-1])
    added = None if residual is None else residual.reshape(rows, -1)
    made = []
    for start in range(0, rows, step):
        some, more = flat[start : start + step], None if added is None else added[start : start + step]
        turn = None if rotary is None else rotary.rows(rows, start, start + step)
        if on_cuda:
            backend = importlib.import_module(".skinny_backend", __package__)
            choice = importlib.import_module(".skinny_choice", __package__)
            tiles = choice.fixed_tiles(some.shape[0], weight, gated or rotary is not None, up)
            made.append(backend.launch(some, weight, bias, more, gated, tiles, turn, up))
        else:  # a copy: how a product is added may follow from where its operand begins
            made.append(define(some.clone(), weight, bias, more, gated, turn, up))
    width = weight.shape[0] // (2 if gated and up is None else 1)
    whole = torch.cat(made) if len(made) > 1 else made[0] if made else x.new_empty(0, width)
    return whole.view(*x.shape[:-1], width)


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


def _fake(x: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_gated(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, up: Tensor | None = None, fixed: bool = False
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0] // (2 if up is None else 1)))


def _register() -> torch.library.Library:
    library = torch.library.Library("sparse_compile", "FRAGMENT")
    ops: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
        "skinny_linear": (linear, _fake),
        "skinny_gated": (gated, _fake_gated),
        "skinny_add": (add, _fake),
        "skinny_rotary": (rotary, _fake),
    }
    for name, (real, fake) in ops.items():
        library.define(name + SCHEMAS[name], tags=(torch.Tag.pt2_compliant_tag,))
        for backend in ("CPU", "CUDA"):
            library.impl(name, real, backend)
        torch.library.register_fake(f"sparse_compile::{name}", fake, lib=library)
    return library


_LIBRARY = _register()  # the registration lives as long as this object
