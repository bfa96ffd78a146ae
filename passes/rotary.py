"""Find the rotary embedding behind a product that makes queries and keys.

    %p : linear(%x, [Wq; Wk; Wv])                            %p : skinny_rotary(%x, [Wq; Wk; Wv], %cos, %sin)
    %s : slice(%p, -1, 0, 32)                                %s : slice(%p, -1, 0, 32)
    %h : transpose(reshape(%s, [T, 1, 4, 8]), 1, 2)   ->     %h : transpose(reshape(%s, [T, 1, 4, 8]), 1, 2)
    %c : mul(%h, unsqueeze(%cos, 1))
    %a, %b : chunk(%h, 2, -1), or slices                     what read %r reads %h
    %t : mul(cat([neg(%b), %a], -1), unsqueeze(%sin, 1))
    %r : add(%c, %t)

Slices that are rotated must come first, and all with the same angles and heads; of what is rotated nothing else may be
read. The sums are the same, rounded once where the operations on the left round one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem

import torch
from torch import fx

from .graph import is_call

aten = torch.ops.aten


@dataclass(frozen=True)
class Rotation:
    """cos, sin: nodes [T, 1, D]. width: so many of the first columns are rotated. heads: pairs of a node with heads
    [T, H, 1, D] as the product makes them, and the node with the rotated ones.
    """

    cos: fx.Node
    sin: fx.Node
    width: int
    heads: tuple[tuple[fx.Node, fx.Node], ...]

    def take_out(self) -> None:
        """Lets what reads rotated heads read the product's own."""
        for plain, rotated in self.heads:
            rotated.replace_all_uses_with(plain)


def rotation_maybe(node: fx.Node) -> Rotation | None:
    """How the heads that a linear layer makes are rotated; None where none are, or not in this form."""
    value = node.meta["val"]
    parts = sorted(((_bounds(user, value.shape[-1]), user) for user in node.users), key=lambda part: part[0])
    cos, sin, heads, reached = None, None, list[tuple[fx.Node, fx.Node]](), 0
    for (start, stop), part in parts:
        found = _rotated_maybe(part) if start == reached < stop else None
        if found is None or (cos is not None and (found[2], found[3]) != (cos, sin)):
            break
        plain, rotated, cos, sin = found
        heads.append((plain, rotated))
        reached = stop
    if cos is None or sin is None:
        return None
    rest = [bounds for bounds, _ in parts[len(heads) :]]
    size = cos.meta["val"].shape[-1]
    fits = cos.meta["val"].shape[:-1] == value.shape[:-1] and value.shape[-1] % size == 0
    same = all(one.meta["val"].dtype == value.dtype for one in (cos, sin))
    known = _precede((cos, sin), node)
    if not (fits and same and known) or any(start < reached for start, _ in rest):
        return None
    return Rotation(cos, sin, reached, tuple(heads))


def _precede(nodes: tuple[fx.Node, ...], end: fx.Node) -> bool:
    """Whether nodes are computed before another."""
    waiting = set(nodes)
    for node in end.graph.nodes:
        waiting.discard(node)
        if node is end:
            break
    return not waiting


def _bounds(user: fx.Node, width: int) -> tuple[int, int]:
    """Which columns a slice of the last dimension takes; (-1, width) for anything else, which may take all."""
    if not is_call(user, aten.slice.Tensor) or len(user.args) != 4:
        return -1, width
    source, dim, start, stop = user.args
    assert isinstance(source, fx.Node)
    if dim not in (-1, source.meta["val"].dim() - 1) or not isinstance(stop, int):
        return -1, width
    return (start if isinstance(start, int) else 0), min(stop, width)


def _only(node: fx.Node, target: object) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], target) else None


def _rotated_maybe(part: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """(heads, rotated heads, cos, sin) behind a slice of a product."""
    shaped = _only(part, aten.reshape.default) or _only(part, aten.view.default)
    plain = _only(shaped, aten.transpose.int) if shaped is not None else None
    if shaped is None or plain is None or plain.args[1:] != (1, 2):
        return None
    shape, source = shaped.meta["val"].shape, part.meta["val"].shape
    if len(shape) != 4 or shape[:2] != source[:2] or shape[1] != 1 or shape[2] * shape[3] != source[-1]:
        return None
    products = [user for user in plain.users if is_call(user, aten.mul.Tensor)]
    turned = _turned_maybe(plain, products[0]) if len(products) == 1 else None
    beside = _only(products[0], aten.add.Tensor) if turned is not None else None
    if turned is None or beside is None or _only(turned, aten.add.Tensor) is not beside:
        return None
    if beside.kwargs or len(beside.args) != 2:
        return None
    cos = _angles_maybe(products[0], plain)
    sin = _angles_maybe(turned, next(n for n in turned.all_input_nodes if is_call(n, aten.cat.default)))
    return None if cos is None or sin is None else (plain, beside, cos, sin)


def _turned_maybe(plain: fx.Node, product: fx.Node) -> fx.Node | None:
    """mul(cat([neg(second half), first half], -1), ...), of heads that only `product` reads beside."""
    found = list(_halves(plain, product))
    halves = dict(found)
    if set(halves) != {0, 1} or len(found) != 2:
        return None
    negative, joined = _only(halves[1], aten.neg.default), _only(halves[0], aten.cat.default)
    if negative is None or joined is None or _only(negative, aten.cat.default) is not joined:
        return None
    along = joined.args[1] if len(joined.args) > 1 else 0
    if list(joined.args[0]) != [negative, halves[0]] or along not in (-1, 3):  # type: ignore[arg-type]
        return None
    return _only(joined, aten.mul.Tensor)


def _halves(plain: fx.Node, product: fx.Node) -> Iterator[tuple[object, fx.Node]]:
    """Which half (0, 1) of the heads each reader but `product` takes; -1 for one that takes anything else."""
    half = plain.meta["val"].shape[-1] // 2
    for user in plain.users:
        if user is product:
            continue
        if is_call(user, aten.chunk.default) and user.args[1:] in ((2, -1), (2, 3)):
            yield from ((part.args[1] if part.target is getitem else -1, part) for part in user.users)
            continue
        whole = is_call(user, aten.slice.Tensor) and len(user.args) == 4 and user.args[1] in (-1, 3)
        start, stop = user.args[2:] if whole else (None, None)
        stops = isinstance(stop, int)
        yield (
            (
                0
                if (start or 0, stop) == (0, half)
                else 1
                if start == half and stops and stop >= 2 * half
                else -1
            ),
            user,
        )


def _angles_maybe(product: fx.Node, heads: fx.Node) -> fx.Node | None:
    """[T, 1, D], where a product takes it with a dimension for the heads put in."""
    wide = product.args[1] if product.args[0] is heads else product.args[0]
    if not isinstance(wide, fx.Node) or not is_call(wide, aten.unsqueeze.default) or wide.args[1] != 1:
        return None
    angles = wide.args[0]
    size = heads.meta["val"].shape[-1]
    if not isinstance(angles, fx.Node) or angles.meta["val"].dim() != 3:
        return None
    return angles if angles.meta["val"].shape[-1] == size else None
