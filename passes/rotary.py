"""Find the rotary embedding behind a product that makes queries and keys.

    %p : linear(%x, [Wq; Wk; Wv])                            %p : skinny_rotary(%x, [Wq; Wk; Wv], %cos, %sin)
    %s : slice(%p, -1, 0, 32)                                %s : slice(%p, -1, 0, 32)
    %h : transpose(reshape(%s, [T, 1, 4, 8]), 1, 2)   ->     %h : transpose(reshape(%s, [T, 1, 4, 8]), 1, 2)
    %c : mul(%h, unsqueeze(%cos, 1))
    %a, %b : chunk(%h, 2, -1), or slices                     what read %r reads %h
    %t : mul(cat([neg(%b), %a], -1), unsqueeze(%sin, 1))
    %r : add(%c, %t)

Slices that are rotated must come first, and all with the same angles and heads; a product that is rotated whole needs
none. Of what is rotated nothing else may be read. The sums are the same, rounded once where the operations on the left
round one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from .columns import Bounds, only_reader_maybe, operands_maybe, other_operand_maybe, readers
from .nodes import argument, fake, operation, same_sizes
from .values import is_pure


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
    value, parts = fake(node), _parts(node)
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
    size = fake(cos).shape[-1]
    rows = value.shape[-1] % size == 0 and same_sizes(fake(cos).shape[:-1], value.shape[:-1])
    same = all(fake(one).dtype == value.dtype for one in (cos, sin))
    same = same and same_sizes(fake(cos).shape, fake(sin).shape)
    known = _precede((cos, sin), node)
    if not (rows and same and known) or any(start < reached for start, _ in rest):
        return None
    return Rotation(cos, sin, reached, tuple(heads))


def _parts(node: fx.Node) -> list[tuple[Bounds, fx.Node]]:
    """Columns and what takes them, in their order; -1 as the first of a reader that may take any."""
    width, found = fake(node).shape[-1], list(readers(node))
    if [bounds for bounds, _ in found] == [None]:
        return [((0, width), node)]
    return sorted((((-1, width) if at is None else at, part) for at, part in found), key=lambda one: one[0])


def _precede(nodes: tuple[fx.Node, ...], end: fx.Node) -> bool:
    """Whether nodes are computed before another."""
    waiting = set(nodes)
    for node in end.graph.nodes:
        waiting.discard(node)
        if node is end:
            break
    return not waiting


def _rotated_maybe(part: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node] | None:
    """(heads, rotated heads, cos, sin) of columns of a product."""
    shaped = only_reader_maybe(part, "reshape")
    plain = only_reader_maybe(shaped, "transpose") if shaped is not None else None
    if shaped is None or plain is None or plain.args[1:] != (1, 2):
        return None
    value, source = fake(shaped), fake(part)
    if value.dim() != 4 or source.dim() != 3 or not same_sizes(value.shape[:2], source.shape[:2]):
        return None
    if not same_sizes((value.shape[1], value.shape[2] * value.shape[3]), (1, source.shape[-1])):
        return None
    products = [user for user in plain.users if operation(user) == "mul" and is_pure(user)]
    turned = _turned_maybe(plain, products[0]) if len(products) == 1 else None
    beside = only_reader_maybe(products[0], "add") if turned is not None else None
    if turned is None or beside is None or only_reader_maybe(turned[1], "add") is not beside:
        return None
    cos, sin = _angles_maybe(products[0], plain), _angles_maybe(turned[1], turned[0])
    return None if operands_maybe(beside) is None or cos is None or sin is None else (plain, beside, cos, sin)


def _turned_maybe(plain: fx.Node, product: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """cat([neg(second half), first half], -1) and its product, of heads that only `product` reads beside."""
    found = [(bounds, reader) for bounds, reader in readers(plain) if reader is not product]
    size = fake(plain).shape[-1]
    halves = dict(found)
    if set(halves) != {(0, size // 2), (size // 2, size)} or len(found) != 2:
        return None
    first, second = halves[0, size // 2], halves[size // 2, size]
    negative, joined = only_reader_maybe(second, "neg"), only_reader_maybe(first, "cat")
    if negative is None or joined is None or only_reader_maybe(negative, "cat") is not joined:
        return None
    parts, along = argument(joined, 0, "tensors"), argument(joined, 1, "dim", 0)
    if list(parts) != [negative, first] or along not in (-1, 3):
        return None
    result = only_reader_maybe(joined, "mul")
    return None if result is None else (joined, result)


def _angles_maybe(product: fx.Node, heads: fx.Node) -> fx.Node | None:
    """[T, 1, D], where a product takes it with a dimension for the heads put in."""
    wide = other_operand_maybe(product, heads)
    if wide is None or operation(wide) != "unsqueeze" or argument(wide, 1, "dim") != 1:
        return None
    angles = wide.args[0]
    if not isinstance(angles, fx.Node) or fake(angles).dim() != 3:
        return None
    return angles if fake(angles).shape[-1] == fake(heads).shape[-1] else None
