"""Let products of a few rows normalise what they read, where that leaves out a kernel.

    %w : to(%x, float32)
    %m : mean(pow(%w, 2), [-1], True)
    %r : rsqrt(add(%m, 1e-06))
    %n : mul(%gain, to(mul(%w, %r), bfloat16))     ->     %y : skinny_linear(%x, %w1, None, %gain, eps=1e-06)
    %y : skinny_linear(%n, %w1)

Which norms (`Norms`):

    alone   those that would be a kernel of their own: what is normalised comes from one of our ops or from outside of
            the piece, and is read beside by our ops alone. Without the norm there is no kernel.
    all     also those that a compiler fuses with what makes their rows, such as the sum with a residual. That kernel
            stays, without its last sum and its last write, and every program of the products has those to do.
    none    none; to measure what the others are worth.

What is normalised must be read by products alone, each of which does so for itself. Only norms over the last dimension
count, in the forms that models write: the mean or the sum of the squares in float32, a weight before or after the
result is rounded, or one `rms_norm`. In float16 a norm with a weight stays (`kernels.skinny_parts.Norm.obstacle`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import fx

from ..kernels.skinny import HALF
from .graph import is_call, is_shape

aten, ours = torch.ops.aten, torch.ops.sparse_compile

Norms = Literal["alone", "all", "none"]
DEFAULT: Norms = "alone"

OPERANDS = {
    ours.skinny_linear.default: 2,
    ours.skinny_gated.default: 2,
    ours.skinny_add.default: 3,
    ours.skinny_rotary.default: 4,
}
"""Products, and how many operands they have ahead of bias and norm."""
_CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.type_as.default, aten._to_copy.default)
_VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim)


@dataclass(frozen=True)
class Norm:
    """rows: the node that is normalised. weight: a node [K], or None. inside: the nodes that only the norm needs."""

    rows: fx.Node
    weight: fx.Node | None
    eps: float
    mean: bool
    inside: frozenset[fx.Node]


def fuse_norms(graph: fx.Graph, norms: Norms = DEFAULT) -> int:
    """Lets products take norms along; returns how many norms. What nothing reads any more stays in the graph."""
    found = 0
    for node in list(graph.nodes) if norms != "none" else ():
        norm = norm_maybe(node)
        if norm is None or not _only_products_read(node):
            continue
        if norm.weight is not None and node.meta["val"].dtype == torch.float16:
            continue
        if norms == "alone" and not _is_kernel(norm):
            continue
        for product in list(node.users):
            _take_along(product, norm)
        found += 1
    return found


def norm_maybe(node: fx.Node) -> Norm | None:
    """The norm that ends with a node, in half precision as what it normalises; None for anything else."""
    value = node.meta.get("val")
    if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.dtype not in HALF:
        return None
    norm = _whole_maybe(node) if is_call(node, aten.rms_norm.default) else _written_out_maybe(node)
    if norm is None or not _is_weight(norm.weight, value):
        return None
    rows = norm.rows.meta["val"]
    outside = any(set(one.users) - norm.inside for one in norm.inside if one is not node)
    return None if outside or (rows.shape, rows.dtype) != (value.shape, value.dtype) else norm


def _whole_maybe(node: fx.Node) -> Norm | None:
    """rms_norm(x, [K], weight, eps); without an eps it depends on the version of torch."""
    rows, shape, weight, eps = (*node.args, None, None)[:4]
    if not isinstance(rows, fx.Node) or len(shape) != 1 or not isinstance(eps, float):  # type: ignore[arg-type]
        return None
    return Norm(rows, weight, eps, True, frozenset({node}))  # type: ignore[arg-type]


def _written_out_maybe(node: fx.Node) -> Norm | None:
    """A cast of a scaled row, or of its product with a weight, or the product of that cast with a weight."""
    weight: fx.Node | None = None
    inside = {node}
    rounded = node
    if is_call(node, aten.mul.Tensor):
        pairs = [(one, other) for one, other in _factors(node) if _cast_maybe(one, node) is not None]
        if len(pairs) != 1:
            return None
        rounded, weight = pairs[0]
        inside.add(rounded)
    scaled = _cast_maybe(rounded, node)
    if scaled is None or scaled.meta["val"].dtype != torch.float32:
        return None
    inside.add(scaled)
    core = _scaled_maybe(scaled)
    if core is None and weight is None:
        for one, other in _factors(scaled):
            core = _scaled_maybe(one)
            if core is not None:
                inside.add(one)
                weight = _cast_maybe(other, node) or other
                inside |= {other} - {weight}
                break
    if core is None:
        return None
    return Norm(core.rows, weight, core.eps, core.mean, core.inside | inside)


def _scaled_maybe(node: fx.Node) -> Norm | None:
    """mul(%w, rsqrt(add(mean(square(%w)), eps))), where %w are rows in float32."""
    for wide, root in _factors(node):
        if not is_call(root, aten.rsqrt.default) or not isinstance(root.args[0], fx.Node):
            continue
        raised = root.args[0]
        if (
            not is_call(raised, aten.add.Tensor)
            or raised.kwargs
            or not isinstance(raised.args[1], float | int)
        ):
            continue
        share, eps = raised.args
        rows = wide.args[0] if wide.op == "call_function" and wide.target in _CASTS else None
        if not isinstance(share, fx.Node) or not isinstance(rows, fx.Node) or not _along_rows(share):
            continue
        square = share.args[0]
        if isinstance(square, fx.Node) and _is_square(square, wide):
            mean = is_call(share, aten.mean.dim)
            return Norm(rows, None, float(eps), mean, frozenset({node, wide, root, raised, share, square}))  # type: ignore[arg-type]
    return None


def _factors(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The factors of a product of two tensors, in both orders."""
    if is_call(node, aten.mul.Tensor):
        one, other = node.args
        if isinstance(one, fx.Node) and isinstance(other, fx.Node):
            yield one, other
            yield other, one


def _cast_maybe(node: fx.Node, like: fx.Node) -> fx.Node | None:
    """What a cast to or from the dtype of `like` casts."""
    if node.op != "call_function" or node.target not in _CASTS:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return None
    dtypes = {one.meta["val"].dtype for one in (node, source)}
    return source if dtypes == {like.meta["val"].dtype, torch.float32} else None


def _along_rows(node: fx.Node) -> bool:
    """Whether a node is the mean or the sum over the last dimension, which it keeps."""
    if node.op != "call_function" or node.target not in (aten.mean.dim, aten.sum.dim_IntList) or node.kwargs:
        return False
    source, dims, keeps = (*node.args, False)[:3] if len(node.args) > 1 else (node, (), False)
    assert isinstance(source, fx.Node)
    return list(dims) in ([-1], [source.meta["val"].dim() - 1]) and keeps is True  # type: ignore[arg-type]


def _is_square(node: fx.Node, of: fx.Node) -> bool:
    if is_call(node, aten.pow.Tensor_Scalar):
        return node.args == (of, 2)
    return (is_call(node, aten.mul.Tensor) and node.args == (of, of)) or (
        is_call(node, aten.square.default) and node.args[0] is of
    )


def _is_weight(node: Any, value: torch.Tensor) -> bool:
    """Whether a node holds a plain weight for rows such as `value`, which nothing computes; None is none at all."""
    if node is None:
        return True
    held = node.meta.get("val")
    plain = node.op in ("placeholder", "get_attr") and isinstance(held, torch.Tensor)
    return plain and (tuple(held.shape), held.dtype) == ((value.shape[-1],), value.dtype)


def _only_products_read(node: fx.Node) -> bool:
    """Whether all that read a node are products, of their rows and nothing else, without a norm yet."""
    return bool(node.users) and all(
        user.target in OPERANDS
        and user.args[0] is node
        and node not in user.args[1:]
        and "eps" not in user.kwargs
        for user in node.users
    )


def _is_kernel(norm: Norm) -> bool:
    """Whether a compiler would make the norm a kernel of its own, with nothing to fuse it with."""
    made = norm.rows
    while made.op == "call_function" and made.target in _VIEWS:
        made = made.args[0]  # type: ignore[assignment]
    return (made.op == "placeholder" or _is_ours(made)) and _only_ours_read(made, norm.inside)


def _only_ours_read(node: fx.Node, but: frozenset[fx.Node]) -> bool:
    """Whether a node is read, itself or through views, by our ops, the end of the piece and `but` alone."""
    return all(
        _only_ours_read(user, but)
        if user.op == "call_function" and user.target in _VIEWS
        else user in but or user.op == "output" or is_shape(user) or _is_ours(user)
        for user in node.users
    )


def _is_ours(node: fx.Node) -> bool:
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "sparse_compile"


def _take_along(product: fx.Node, norm: Norm) -> None:
    given = list(product.args)
    given[0] = norm.rows
    if norm.weight is not None:
        given += [None] * (OPERANDS[product.target] + 1 - len(given))  # type: ignore[index]
        given.append(norm.weight)
    product.args = tuple(given)
    product.kwargs = {**product.kwargs, "eps": norm.eps, **({} if norm.mean else {"mean": False})}
