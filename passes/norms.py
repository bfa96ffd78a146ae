"""Let products of a few rows normalise what they read, where that leaves out a kernel.

    %w : to(%x, float32)
    %m : mean(pow(%w, 2), [-1], True)
    %r : rsqrt(add(%m, 1e-06))
    %n : mul(%gain, to(mul(%w, %r), bfloat16))     ->     %y : skinny_linear(%x, %w1, norm=%gain, eps=1e-06)
    %y : skinny_linear(%n, %w1)

Which norms (`Norms`):

    alone   those that would be a kernel of their own: what is normalised comes from one of our ops or from outside of
            the piece, and is read beside by our ops alone. Without the norm there is no kernel.
    all     also those that a compiler fuses with what makes their rows, such as the sum with a residual. That kernel
            stays, without its last sum and its last write, and every program of the products has those to do.
    none    none; to measure what the others are worth.

What is normalised must be read by products alone, each of which does so for itself. Only norms over the last dimension
count, in the forms that models write: the mean or the sum of the squares in float32, a weight before or after the
result is rounded, or one `rms_norm`. In float16 a norm with a weight stays: a product multiplies a row by the weight
before it scales it, which may overflow, and a kernel ahead of it would be no kernel less. Nothing is moved past a node
that writes in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ..kernels.skinny import HALF
from .columns import operands_maybe
from .graph import PRODUCTS, erase
from .nodes import PLAIN, argument, fake, fake_maybe, number_maybe, operation, same_sizes, scalar_operand
from .values import is_pure, quiet

Norms = Literal["alone", "all", "none"]
DEFAULT: Norms = "alone"

_VIEWS = ("reshape", "unsqueeze", "squeeze")


@dataclass(frozen=True)
class Norm:
    """rows: the node that is normalised. weight: a node [K], or None. inside: the nodes that only the norm needs."""

    rows: fx.Node
    weight: fx.Node | None
    eps: float
    mean: bool
    inside: frozenset[fx.Node]


def fuse_norms(graph: fx.Graph, norms: Norms = DEFAULT) -> int:
    """Lets products take norms along; returns how many norms."""
    found = 0
    for node in list(graph.nodes) if norms != "none" else ():
        norm = norm_maybe(node)
        if norm is None or not _only_products_read(node, norm):
            continue
        if norm.weight is not None and fake(node).dtype == torch.float16:
            continue
        if norms == "alone" and not _is_kernel(norm):
            continue
        for product in list(node.users):
            _take_along(product, norm)
        erase(graph, node)
        found += 1
    return found


def norm_maybe(node: fx.Node) -> Norm | None:
    """The norm that ends with a node, in half precision as what it normalises; None for anything else."""
    value = fake_maybe(node)
    if value is None or value.dtype not in HALF:
        return None
    norm = _whole_maybe(node) if operation(node) == "rms_norm" else _written_out_maybe(node)
    if norm is None or not _is_weight(norm.weight, value) or not all(is_pure(one) for one in norm.inside):
        return None
    outside = any(set(one.users) - norm.inside for one in norm.inside if one is not node)
    return None if outside or not _alike(fake_maybe(norm.rows), value) else norm


def _alike(rows: torch.Tensor | None, value: torch.Tensor) -> bool:
    if rows is None or type(rows) not in PLAIN:
        return False
    return (rows.dtype, rows.device) == (value.dtype, value.device) and same_sizes(rows.shape, value.shape)


def _whole_maybe(node: fx.Node) -> Norm | None:
    """rms_norm(x, [K], weight, eps); without an eps it depends on the version of torch."""
    rows, shape, weight, eps = (
        argument(node, at, name) for at, name in enumerate(("input", "normalized_shape", "weight", "eps"))
    )
    number = number_maybe(eps)
    if not isinstance(rows, fx.Node) or len(shape) != 1 or number is None:
        return None
    return Norm(rows, weight, number, True, frozenset({node}))


def _written_out_maybe(node: fx.Node) -> Norm | None:
    """A cast of a scaled row, or of its product with a weight, or the product of that cast with a weight."""
    dtype = fake(node).dtype
    rounded, weight = node, None
    pairs = [(one, other) for one, other in _factors(node) if _cast_maybe(one, dtype) is not None]
    if len(pairs) == 1:
        rounded, weight = pairs[0]
    scaled = _cast_maybe(rounded, dtype)
    if scaled is None or fake(scaled).dtype != torch.float32:
        return None
    inside = {node, rounded, scaled}
    core = _scaled_maybe(scaled, dtype)
    if core is None and weight is None:
        for one, other in _factors(scaled):
            core = _scaled_maybe(one, dtype)
            if core is not None:
                weight = _cast_maybe(other, dtype) or other
                inside |= {one, other} - {weight}
                break
    if core is None:
        return None
    return Norm(core.rows, weight, core.eps, core.mean, core.inside | inside)


def _scaled_maybe(node: fx.Node, dtype: torch.dtype) -> Norm | None:
    """mul(%w, rsqrt(add(mean(square(%w)), eps))), where %w are rows of `dtype` in float32."""
    for wide, root in _factors(node):
        rows = _cast_maybe(wide, dtype)
        raised = root.args[0] if operation(root) == "rsqrt" else None
        if rows is None or not isinstance(raised, fx.Node) or operation(raised) != "add":
            continue
        share, eps = (operands_maybe(raised) and scalar_operand(raised)) or (None, 0.0)
        square = _summed_maybe(share) if share is not None else None
        if share is not None and square is not None and _is_square(square, wide):
            inside = frozenset({node, wide, root, raised, share, square})
            return Norm(rows, None, eps, operation(share) == "mean", inside)
    return None


def _factors(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The factors of a product of two tensors, in both orders."""
    one, other = (operands_maybe(node) if operation(node) == "mul" else None) or (None, None)
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        yield one, other
        yield other, one


def _cast_maybe(node: fx.Node, dtype: torch.dtype) -> fx.Node | None:
    """What a cast from `dtype` to float32 or back casts."""
    source = node.args[0] if operation(node) == "cast" else None
    made, given = fake_maybe(node), fake_maybe(source)
    if made is None or given is None:
        return None
    return source if {made.dtype, given.dtype} == {dtype, torch.float32} else None  # type: ignore[return-value]


def _summed_maybe(node: fx.Node) -> fx.Node | None:
    """What a node is the mean or the sum of, over the last dimension, which it keeps."""
    plain = operation(node) in ("mean", "sum") and set(node.kwargs) <= {"dim", "keepdim"}
    dims, source = argument(node, 1, "dim"), node.args[0] if plain and node.args else None
    value = fake_maybe(source)
    if value is None or argument(node, 2, "keepdim") is not True:
        return None
    last = list(dims) if isinstance(dims, list | tuple) else [dims]
    return source if last in ([-1], [value.dim() - 1]) else None  # type: ignore[return-value]


def _is_square(node: fx.Node, of: fx.Node) -> bool:
    if operation(node) == "mul":
        return operands_maybe(node) == (of, of)
    wanted = {"pow": (of, 2), "square": (of,)}.get(operation(node))
    return wanted is not None and node.args == wanted and not node.kwargs


def _is_weight(node: Any, value: torch.Tensor) -> bool:
    """Whether a node holds a plain weight for rows such as `value`, which nothing computes; None is none at all."""
    if node is None:
        return True
    held = fake_maybe(node)
    if held is None or type(held) not in PLAIN or node.op not in ("placeholder", "get_attr"):
        return False
    return held.dtype == value.dtype and same_sizes(held.shape, value.shape[-1:])


def _only_products_read(node: fx.Node, norm: Norm) -> bool:
    """Whether all that read a node are products, of their rows and nothing else, without a norm yet; and nothing is
    written between the norm's first node and them.
    """
    first = min(norm.inside)
    return bool(node.users) and all(
        user.target in PRODUCTS.values()
        and user.args[0] is node
        and node not in (*user.args[1:], *user.kwargs.values())
        and "eps" not in user.kwargs
        and quiet(first, user)
        for user in node.users
    )


def _is_kernel(norm: Norm) -> bool:
    """Whether a compiler would make the norm a kernel of its own, with nothing to fuse it with."""
    made = norm.rows
    while operation(made) in _VIEWS:
        made = made.args[0]  # type: ignore[assignment]
    return (made.op == "placeholder" or _is_ours(made)) and _only_ours_read(made, norm.inside)


def _only_ours_read(node: fx.Node, but: frozenset[fx.Node]) -> bool:
    """Whether a node is read, itself or through views, by our ops, the end of the graph and `but` alone."""
    return all(
        _only_ours_read(user, but)
        if operation(user) in _VIEWS
        else user in but or user.op == "output" or _is_size(user) or _is_ours(user)
        for user in node.users
    )


def _is_size(node: fx.Node) -> bool:
    """Whether a node is a number computed from shapes, or several; a compiler needs no kernel for it."""
    return operation(node).partition(".")[0] in ("size", "sym_size", "numel")


def _is_ours(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "sparse_compile"


def _take_along(product: fx.Node, norm: Norm) -> None:
    product.args = (norm.rows, *product.args[1:])
    weight = {} if norm.weight is None else {"norm": norm.weight}
    mean = {} if norm.mean else {"mean": False}
    product.kwargs = {**product.kwargs, **weight, "eps": norm.eps, **mean}
