"""Which columns of a value, its last dimension, are taken by each of those who read it."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from .nodes import argument, fake, operation
from .values import is_pure

Bounds = tuple[int, int]


def readers(node: fx.Node) -> Iterator[tuple[Bounds | None, fx.Node]]:
    """(first column and the one behind the last, reader); None for a reader that may take any.

    In the place of a `chunk` or `split` stand the parts that are taken of it.
    """
    width = fake(node).shape[-1]
    for user in node.users:
        if operation(user) in ("chunk", "split"):
            size = _part_size_maybe(user, width)
            yield from ((_part_maybe(part, size, width), part) for part in user.users)
        else:
            yield _slice_maybe(user, node, width), user


def only_reader_maybe(node: fx.Node, name: str) -> fx.Node | None:
    """The one reader of a value, if it is this operation and changes nothing in place."""
    users = list(node.users)
    return users[0] if len(users) == 1 and operation(users[0]) == name and is_pure(users[0]) else None


def operands_maybe(node: fx.Node) -> tuple[Any, Any] | None:
    """The operands of a sum or product that is nothing more: no factor, no given memory for the result."""
    plain = len(node.args) == 2 and all(name == "alpha" and value == 1 for name, value in node.kwargs.items())
    return (node.args[0], node.args[1]) if plain else None


def other_operand_maybe(node: fx.Node, one: fx.Node) -> fx.Node | None:
    """What a sum or product has beside one operand; None if that is a number, or the same once more."""
    given = operands_maybe(node)
    if given is None or one not in given:
        return None
    other = given[1] if given[0] is one else given[0]
    return other if isinstance(other, fx.Node) and other is not one else None


def _part_size_maybe(node: fx.Node, width: Any) -> int | None:
    """Columns in each part of a chunk or split; the last may have fewer. None where it cuts something else."""
    number, dim = node.args[1] if len(node.args) > 1 else None, argument(node, 2, "dim", 0)
    if dim not in (-1, fake(node.args[0]).dim() - 1) or not isinstance(width, int):  # type: ignore[arg-type]
        return None
    if not isinstance(number, int) or number < 1:
        return None
    return -(-width // number) if operation(node) == "chunk" else number


def _part_maybe(part: fx.Node, size: int | None, width: Any) -> Bounds | None:
    number = part.args[1] if part.target is operator.getitem else None
    if size is None or not isinstance(number, int) or number < 0:
        return None
    return number * size, min((number + 1) * size, width)


def _slice_maybe(user: fx.Node, node: fx.Node, width: Any) -> Bounds | None:
    name, dims = operation(user), fake(node).dim()
    cut: Any = None
    if name == "slice" and argument(user, 1, "dim", 0) in (-1, dims - 1):
        cut = slice(*(argument(user, at, key) for at, key in ((2, "start"), (3, "end"), (4, "step"))))
    elif name == "getitem" and isinstance(user.args[1], tuple):
        *others, last = user.args[1]
        ellipsis = others == [Ellipsis]
        if ellipsis or (len(others) == dims - 1 and all(one == slice(None) for one in others)):
            cut = last
    numbers = (cut.start, cut.stop) if isinstance(cut, slice) and cut.step in (None, 1) else ("",)
    if not isinstance(width, int) or not all(one is None or isinstance(one, int) for one in numbers):
        return None
    start, stop, _ = slice(*numbers).indices(width)
    return start, max(start, stop)
