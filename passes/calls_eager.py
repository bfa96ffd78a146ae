"""Attention written out: `softmax(q @ k.transpose(2, 3) * scale + mask) @ v`."""

from __future__ import annotations

from typing import Any

from torch import fx

from .calls import Found, Unmatched, read_call
from .masks import Term, hides
from .nodes import argument, fake_maybe, operation, scalar_operand, untransposed


def read_softmax(node: fx.Node) -> Found | None:
    """The call around a softmax, or None for a softmax whose result is not multiplied with values."""
    if operation(node) != "softmax":
        return None
    after = _product_maybe(node)
    if isinstance(after, Unmatched) or after is None:
        return after
    product, behind = after
    cut = any(operation(one) == "getitem" for one in behind)
    scores = argument(node, 0, "input")
    value = fake_maybe(scores)
    if value is None or value.dim() != 4 or argument(node, 1, "dim") not in (-1, 3):
        return Unmatched(node, "a softmax that is not over the last of four dimensions")
    before = _Scores()
    reason = before.read(scores)
    if not reason and cut != (before.sink is not None):
        reason = "some of its weights are cut off"
    if reason:
        return Unmatched(node, reason)
    assert before.query is not None
    assert before.key is not None
    covered = (product, *behind, node, *before.covered)
    return read_call(
        product,
        "eager",
        before.query,
        before.key,
        product.args[1],  # type: ignore[arg-type]
        tuple(before.masks),
        False,
        before.scale,
        before.softcap,
        covered,
        before.sink,
    )


def _product_maybe(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | Unmatched | None:
    """The product of the weights with the values, and the casts and dropouts in between, latest first."""
    behind: list[fx.Node] = []
    while True:
        users = list(node.users)
        product = [user for user in users if operation(user) == "matmul" and user.args[0] is node]
        if product and len(users) == 1:
            return product[0], behind
        if product:
            return Unmatched(node, "its attention weights are used elsewhere too")
        if len(users) != 1 or not (operation(users[0]) in ("cast", "dropout") or _drops_last(users[0])):
            return None
        node = users[0]
        if operation(node) == "dropout" and not _dropout_is_off(node):
            return Unmatched(node, "dropout makes it random")
        behind.insert(0, node)


def _drops_last(node: fx.Node) -> bool:
    """`x[..., :-1]`, which cuts the weight of a sink off."""
    return operation(node) == "getitem" and node.args[1] == (Ellipsis, slice(None, -1, None))


def _dropout_is_off(node: fx.Node) -> bool:
    return not argument(node, 1, "p", 0.5) or argument(node, 2, "training", True) is False


class _Scores:
    """Walks from a softmax back to the product of queries and keys, through scale, soft cap and masks."""

    def __init__(self) -> None:
        self.scale, self.softcap = 1.0, 0.0
        self.masks: list[Any] = []
        self.covered: list[fx.Node] = []
        self.query: fx.Node | None = None
        self.key: fx.Node | None = None
        self.sink: fx.Node | None = None

    def read(self, node: Any) -> str:
        """Fills the fields; returns the reason if the scores are not understood, else ""."""
        while isinstance(node, fx.Node):
            if len(node.users) != 1:
                return "its scores are used elsewhere too"
            self.covered.append(node)
            name = operation(node)
            if name == "matmul":
                return self._product(node)
            following = self._step(node, name)
            if following is None:
                return f"its scores go through {node.target}, which is not understood"
            node = following
        return "its scores are no tensor of the graph"

    def _product(self, node: fx.Node) -> str:
        query, turned = argument(node, 0, "input"), argument(node, 1, "other")
        key = untransposed(turned) if isinstance(turned, fx.Node) else None
        if not isinstance(query, fx.Node) or key is None:
            return "its scores are no product of queries and transposed keys"
        self.query, self.key = query, key
        self.covered.append(turned)
        return ""

    def _step(self, node: fx.Node, name: str) -> fx.Node | None:
        first, second = argument(node, 0, "input"), argument(node, 1, "other")
        if name == "cast":
            return first
        if name == "cat" and self.sink is None and not self.masks and self.scale == 1.0 and not self.softcap:
            return self._with_sink(node)
        if name in ("mul", "div"):
            return self._scaled(node, name)
        if name == "masked_fill" and isinstance(second, fx.Node) and hides(argument(node, 2, "value")):
            self.masks.append(Term("hidden", second))
            return first
        if name == "where" and len(node.args) == 3 and hides(node.args[2]):
            self.masks.append(Term("visible", first))
            return second
        bare = self.scale == 1.0 and not self.softcap  # or the mask would be scaled as well
        if name == "add" and bare and isinstance(first, fx.Node) and isinstance(second, fx.Node):
            scores, mask = (first, second) if _leads_to_product(first) else (second, first)
            self.masks.append(mask)
            return scores if _leads_to_product(scores) else None
        return None

    def _with_sink(self, node: fx.Node) -> fx.Node | None:
        """`cat([scores, sink], -1)` with one score per head behind the others."""
        parts = argument(node, 0, "tensors")
        if argument(node, 1, "dim") not in (-1, 3) or not isinstance(parts, tuple | list) or len(parts) != 2:
            return None
        scores, sink = parts
        value, whole = fake_maybe(sink), fake_maybe(scores)
        if value is None or whole is None or tuple(value.shape[1:]) != (whole.shape[1], 1, 1):
            return None
        self.sink = sink
        return scores

    def _scaled(self, node: fx.Node, name: str) -> fx.Node | None:
        """A factor; or `tanh(x / cap) * cap`, which is the soft cap."""
        found = scalar_operand(node)
        if found is None:
            return None
        source, factor = found
        if name == "mul" and operation(source) == "tanh":
            inner = argument(source, 0, "input")
            before = scalar_operand(inner) if operation(inner) == "div" else None
            if self.softcap or self.scale != 1.0 or before is None or before[1] != factor:
                return None
            self.softcap = factor
            self.covered += [source, inner]
            return before[0]
        self.scale *= factor if name == "mul" else 1.0 / factor
        return source


def _leads_to_product(node: fx.Node) -> bool:
    while isinstance(node, fx.Node):
        name = operation(node)
        if name == "matmul":
            return untransposed(node.args[1]) is not None if isinstance(node.args[1], fx.Node) else False
        if name == "add":
            return any(isinstance(arg, fx.Node) and _leads_to_product(arg) for arg in node.args[:2])
        if name not in ("mul", "div", "cast", "tanh", "masked_fill"):
            return False
        node = node.args[0]  # type: ignore[assignment]
    return False
