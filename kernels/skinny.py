"""Products of a few rows with a large weight: definitions, schemas and fakes of the ops. Importing it registers them.

    skinny_linear  x @ weight^T + bias
    skinny_gated   silu(x @ gate^T) * (x @ up^T), weight = [gate; up], or gate alone where up is given (without a bias)
    skinny_add     residual + x @ weight^T + bias
    skinny_rotary  x @ weight^T + bias, of which the first `rotated` columns are heads that are rotated by halves:
                   [a, b] -> [a, b] * cos + [-b, a] * sin; cos and sin are [..., D] for heads of D

x is [..., K], weight [N, K] (gated: [2 N, K]), residual and the fresh contiguous result [..., N], all of one dtype; a
bias has one value per line of the weight. Inputs may have any strides. With `eps` the rows of x are normalised first,
x * rsqrt(mean(x^2) + eps) * norm, where `norm` [K] may be left out; with `mean=False` the sum of the squares takes the
place of their mean.

`define` is the definition: norm, sums, bias, activation and residual in float32 (float64 stays float64), rounded once
at the end. On the CPU the ops are the definition. On CUDA, up to `MAX_ROWS` rows in half precision run the Triton
kernel, with the tiles of `skinny_choice`; more rows, other dtypes, and shapes at which the library was measured to be
faster run as eager code does, which rounds after every operation. A norm is done in the kernel of the product itself,
or, of many rows, in one ahead of it (`skinny_choice.ALONG_ROWS`), which rounds the rows where the norm has a weight. In
these kernels a row's bits depend on that row and the weight alone, not on the other rows or on how many there are.

With `fixed` they do so whatever runs: on CUDA always the kernel, with tiles by the weight's shape that nothing was
measured for, over `MAX_ROWS` rows at a time; on the CPU the definition of each row on its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .arguments import compute_dtype
from .skinny_parts import Norm, Rotary, check, check_norm, check_rotary, check_up

MAX_ROWS = 64
HALF = (torch.bfloat16, torch.float16)

_NORM = "Tensor? norm=None, float? eps=None, bool mean=True, bool fixed=False) -> Tensor"
SCHEMAS = {
    "skinny_linear": f"(Tensor x, Tensor weight, Tensor? bias=None, *, {_NORM}",
    "skinny_gated": f"(Tensor x, Tensor weight, Tensor? bias=None, *, Tensor? up=None, {_NORM}",
    "skinny_add": f"(Tensor x, Tensor weight, Tensor residual, Tensor? bias=None, *, {_NORM}",
    "skinny_rotary": "(Tensor x, Tensor weight, Tensor cos, Tensor sin, Tensor? bias=None, *, int rotated, "
    f"{_NORM}",
}
"""Op name -> schema without the name."""


def define(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    rotary: Rotary | None = None,
    norm: Norm | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """The definition of all ops."""
    wide = compute_dtype(x.dtype)
    bias, residual, up = (None if other is None else other.to(wide) for other in (bias, residual, up))
    rotary = None if rotary is None else rotary.to(wide)
    norm = None if norm is None else norm.to(wide)
    return eager(x.to(wide), weight.to(wide), bias, residual, gated, rotary, norm, up).to(x.dtype)


def eager(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    rotary: Rotary | None = None,
    norm: Norm | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """The same, rounded to the operands' dtype after every operation."""
    x = x if norm is None else norm(x)
    product = F.linear(x, weight, bias)
    if gated:
        gate, factor = product.chunk(2, -1) if up is None else (product, F.linear(x, up))
        product = F.silu(gate) * factor
    if rotary is not None:
        product = rotary(product)
    return product if residual is None else residual + product


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float | None = None,
    mean: bool = True,
    fixed: bool = False,
) -> Tensor:
    return _run(x, weight, bias, norm=_norm_maybe(norm, eps, mean), fixed=fixed)


def gated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    up: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float | None = None,
    mean: bool = True,
    fixed: bool = False,
) -> Tensor:
    if up is not None:
        check_up(weight, bias, up)
    return _run(x, weight, bias, gated=True, norm=_norm_maybe(norm, eps, mean), up=up, fixed=fixed)


def add(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float | None = None,
    mean: bool = True,
    fixed: bool = False,
) -> Tensor:
    return _run(x, weight, bias, residual, norm=_norm_maybe(norm, eps, mean), fixed=fixed)


def rotary(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    bias: Tensor | None = None,
    *,
    rotated: int,
    norm: Tensor | None = None,
    eps: float | None = None,
    mean: bool = True,
    fixed: bool = False,
) -> Tensor:
    check_rotary(x, weight, cos, sin, rotated)
    turned = Rotary(cos, sin, rotated)
    return _run(x, weight, bias, rotary=turned, norm=_norm_maybe(norm, eps, mean), fixed=fixed)


def _norm_maybe(weight: Tensor | None, eps: float | None, mean: bool) -> Norm | None:
    if eps is not None:
        return Norm(eps, weight, mean)
    if weight is not None or not mean:
        raise ValueError(
            "eps=None: norm and mean=False say how rows are normalised, which needs an eps; pass eps"
        )
    return None


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
    residual: Tensor | None = None,
    *,
    fixed: bool,
    gated: bool = False,
    rotary: Rotary | None = None,
    norm: Norm | None = None,
    up: Tensor | None = None,
) -> Tensor:
    check(x, weight, bias, residual, gated and up is None)
    if norm is not None:
        check_norm(x, norm)
    if fixed:
        return _fixed(x, weight, bias, residual, gated, rotary, norm, up)
    if x.device.type != "cuda":
        return define(x, weight, bias, residual, gated, rotary, norm, up)
    rows = x.shape[:-1].numel()
    if 0 < rows <= MAX_ROWS and not obstacle(x.dtype, weight):
        choice = importlib.import_module(".skinny_choice", __package__)
        # Tiles of rotated heads hold pairs of lines, as gated ones do. The library rotates in kernels of its own.
        tiles = choice.tiles_maybe(rows, weight, gated or rotary is not None, norm, up)
        if tiles is None and rotary is not None:
            tiles = choice.own_tiles(rows, weight, True, norm)
        if tiles is not None:
            backend = importlib.import_module(".skinny_backend", __package__)
            flat = None if residual is None else residual.reshape(rows, -1)
            made = backend.launch(x.reshape(rows, -1), weight, bias, flat, gated, tiles, rotary, norm, up)
            return made.view(*x.shape[:-1], made.shape[1])
    x = x if norm is None else norm.apart(x)
    return eager(x, weight, bias, residual, gated, rotary, up=up).contiguous()


def _fixed(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    gated: bool,
    rotary: Rotary | None,
    norm: Norm | None,
    up: Tensor | None,
) -> Tensor:
    """Bits per row that do not depend on the number of rows. Raises ValueError where no kernel has them."""
    on_cuda = x.device.type == "cuda"
    reason = obstacle(x.dtype, weight)
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
            tiles = choice.fixed_tiles(some.shape[0], weight, gated or rotary is not None, norm, up)
            made.append(backend.launch(some, weight, bias, more, gated, tiles, turn, norm, up))
        else:  # a copy: how a product is added may follow from where its operand begins
            made.append(define(some.clone(), weight, bias, more, gated, turn, norm, up))
    width = weight.shape[0] // (2 if gated and up is None else 1)
    whole = torch.cat(made) if len(made) > 1 else made[0] if made else x.new_empty(0, width)
    return whole.view(*x.shape[:-1], width)


def _fake(x: Tensor, weight: Tensor, *_: object, **__: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _fake_gated(x: Tensor, weight: Tensor, *_: object, up: Tensor | None = None, **__: object) -> Tensor:
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
