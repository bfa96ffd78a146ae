"""Attention written out: `softmax(q @ k.transpose(2, 3) * scale + mask) @ v`."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from .calls import Found, Unmatched, read_call
from .masks import Term, hides
from .nodes import argument, fake, fake_maybe, is_plain_sum, operation, scalar_operand, sources, untransposed
from .values import Values


def read_softmax(node: fx.Node, values: Values) -> Found | None:
    """The call around a softmax, or None for a softmax over other things than keys of a cache."""
    if operation(node) != "softmax":
        return _softmax_written_out(node)
    after = _product_maybe(node)
    if after is None:
        reason = "its weights are not multiplied with values in a way that is known"
        return Unmatched(node, reason) if _weighs_a_cache(node) else None
    if isinstance(after, Unmatched):
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
        values,
        product,
        "eager",
        before.query,
        before.key,
        argument(product, 1, "other"),
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
        product = [
            user for user in users if operation(user) == "matmul" and argument(user, 0, "input") is node
        ]
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


def _softmax_written_out(node: fx.Node) -> Unmatched | None:
    if operation(node) != "exp" or not _weighs_a_cache(node):
        return None
    return Unmatched(node, "its softmax is written out with exp, which is not understood")


_PRODUCTS = ("matmul", "baddbmm", "einsum")


def _weighs_a_cache(node: fx.Node) -> bool:
    """Whether a softmax or the like works on products of one query per row with a cache."""
    value = fake_maybe(node)
    if value is None or not any(isinstance(size, int) and size == 1 for size in value.shape[1:-1]):
        return False
    waiting, seen = list(node.all_input_nodes), set(node.all_input_nodes)
    while waiting:
        one = waiting.pop()
        if operation(one) in _PRODUCTS:
            if _has_cache(one):
                return True
            continue
        following = [] if operation(one) in ("linear", "sdpa") else one.all_input_nodes
        waiting += [source for source in following if source not in seen]
        seen.update(following)
    return False


def _has_cache(product: fx.Node) -> bool:
    """Whether an operand is a cache, an input of three or more dimensions, and none is a weight."""
    operands = [list(sources(one)) for one in product.all_input_nodes]
    inputs = [source for operand in operands for source in operand if source.op == "placeholder"]
    if any(isinstance(fake_maybe(one), nn.Parameter) for operand in operands for one in operand):
        return False
    return any(value is not None and value.dim() >= 3 for value in map(fake_maybe, inputs))


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
                return f"its scores go through {name or node.target}, which is not understood"
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
        hidden = argument(node, 1, "mask")
        if name == "masked_fill" and isinstance(hidden, fx.Node) and self._hides(argument(node, 2, "value")):
            self.masks.append(Term("hidden", hidden))
            return first
        if name == "where" and len(node.args) == 3 and self._hides(node.args[2]):
            self.masks.append(Term("visible", first))
            return second
        bare = self.scale == 1.0 and not self.softcap  # or the mask would be scaled as well
        if (
            name == "add"
            and bare
            and is_plain_sum(node)
            and isinstance(first, fx.Node)
            and isinstance(second, fx.Node)
        ):
            scores, mask = (first, second) if _leads_to_product(first) else (second, first)
            if fake_maybe(mask) is not None and fake(mask).dtype == torch.bool:
                return None  # it adds one to the score of a key, and hides none
            self.masks.append(mask)
            return scores if _leads_to_product(scores) else None
        return None

    def _hides(self, value: Any) -> bool:
        """Whether a key filled with `value` stays hidden through what is done to the scores after that."""
        return not self.softcap and hides(value, self.scale)

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
