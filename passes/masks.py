"""What an attention mask says, read from the graph that makes it.

A mask is a sum of terms. A term that decides which keys are seen is True where they are (`visible`), True where they
are not (`hidden`), or added to the scores (`additive`), where a very low value hides the key (`HIDDEN`). An
additive term that differs per head is a bias: it hides nothing, so another term must say what is seen.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import fx

from .nodes import argument, fake, fake_maybe, is_number, is_plain_sum, operation
from .values import Values

_ZEROS = ("zeros", "zeros_like", "new_zeros")
HIDDEN = -9000.0
"""What is added to the score of a hidden key is at or below this. Models write the lowest value of some dtype, or -1e4
(-9984 in bfloat16); against any other key the probability of such a key is zero in every dtype.
"""


@dataclass(frozen=True)
class Term:
    """kind: "visible", "hidden", "additive" or "bias"; node: a tensor that broadcasts to [B, H, 1, S]."""

    kind: str
    node: fx.Node

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return (self.node,)


class BuiltTerm(Protocol):
    """A term of kind "visible" that makes its own nodes."""

    kind: str

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What it reads."""

    def build(self, graph: fx.Graph, rows: Any, keys: Any, device: torch.device) -> fx.Node:
        """bool [rows, keys] at the graph's insertion point."""

    def key(self, values: Values, at: fx.Node) -> Any:
        """Equal for two terms that show the same keys."""


@dataclass(frozen=True)
class Mask:
    """All terms; none means that every key is seen."""

    terms: tuple[Term | BuiltTerm, ...] = ()

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """What all terms read."""
        return tuple(node for term in self.terms for node in term.nodes)

    @property
    def seen(self) -> tuple[Term | BuiltTerm, ...]:
        """The terms that decide which keys are seen."""
        return tuple(term for term in self.terms if term.kind != "bias")

    @property
    def added(self) -> tuple[fx.Node, ...]:
        """The terms that are added to the scores."""
        return tuple(
            term.node for term in self.terms if isinstance(term, Term) and term.kind in ("additive", "bias")
        )


def seen_key(mask: Mask, values: Values, at: fx.Node) -> Any:
    """Equal for two calls that see the same keys."""
    keys = [
        (term.kind, values.key(term.node, at) if isinstance(term, Term) else term.key(values, at))
        for term in mask.seen
    ]
    return tuple(sorted(keys, key=repr))


def read_mask(values: Values, at: fx.Node, *masks: Any) -> Mask | str:
    """The terms of a call's masks, or the reason why they cannot be read. None stands for no mask. at: the call."""
    terms: list[Any] = []
    for mask in masks:
        if mask is None:
            continue
        if isinstance(mask, Term) or hasattr(mask, "build"):
            terms.append(mask)
        elif fake_maybe(mask) is None:
            return "its mask is no tensor of the graph"
        else:
            terms += _Terms(values, at).of(mask)
    for term in terms:
        if isinstance(term, Term) and term.kind != "bias" and _per_head(term.node):
            return "its mask hides other keys from each head"
    if terms and all(term.kind == "bias" for term in terms):
        return "its mask differs per head, and nothing says which keys are seen"
    return Mask(tuple(dict.fromkeys(terms)))


def hides(value: Any, factor: float = 1.0) -> bool:
    """Whether a fill value that is multiplied with `factor` afterwards hides a key."""
    filled = _constant(value) if isinstance(value, fx.Node) else value
    return is_number(filled) and bool(filled * factor <= HIDDEN)


def _constant(node: fx.Node) -> Any:
    """The number in `torch.tensor(-inf)` and `torch.full([], ...)` as models write them; None for other nodes."""
    if operation(node) not in ("tensor", "full", "scalar_tensor"):
        return None
    return next((arg for arg in reversed(node.args) if is_number(arg)), node.kwargs.get("fill_value"))


def _per_head(node: fx.Node) -> bool:
    value = fake(node)
    return value.dim() >= 3 and value.shape[-3] != 1


def is_zeros(node: fx.Node) -> bool:
    return operation(node) in _ZEROS


class _Terms:
    """Takes masks apart as far as the graph shows how they were put together, and as far as nothing is written to them
    or their parts before the call, `at`, reads them.
    """

    def __init__(self, values: Values, at: fx.Node) -> None:
        self.values, self.at = values, at

    def of(self, node: fx.Node) -> Iterator[Term]:
        if fake(node).dtype == torch.bool:
            yield Term("visible", node)
        elif self._kept(node):
            yield from self._apart(node)
        else:
            yield _whole(node)

    def _kept(self, node: fx.Node) -> bool:
        parts = [node, *(one for one in node.all_input_nodes if fake_maybe(one) is not None)]
        return all(self.values.kept(one, node, self.at) for one in parts)

    def _apart(self, node: fx.Node) -> Iterator[Term]:
        name, first, second = operation(node), argument(node, 0, "input"), argument(node, 1, "other")
        hidden = argument(node, 1, "mask")
        if name in ("contiguous", "clone") and isinstance(first, fx.Node):
            yield from self.of(first)
        elif name == "where" and len(node.args) == 3 and isinstance(first, fx.Node) and hides(node.args[2]):
            yield Term("visible", first)
            yield from self._rest(second)
        elif name == "masked_fill" and isinstance(hidden, fx.Node) and hides(argument(node, 2, "value")):
            yield Term("hidden", hidden)
            yield from self._rest(first)
        elif name == "add" and is_plain_sum(node) and all(fake_maybe(x) is not None for x in (first, second)):
            yield from self.of(first)
            yield from self.of(second)
        else:
            yield _whole(node)

    def _rest(self, value: Any) -> Iterator[Term]:
        """What stands where a key is seen: nothing if it is zero."""
        if not isinstance(value, fx.Node) or fake_maybe(value) is None:
            return
        if not (is_zeros(value) and self.values.kept(value, value, self.at)):
            yield from self.of(value)


def _whole(node: fx.Node) -> Term:
    return Term("bias" if _per_head(node) else "additive", node)


def build_visible(graph: fx.Graph, mask: Mask, rows: Any, keys: Any, device: torch.device) -> fx.Node:
    """New nodes at the graph's insertion point: bool [rows, keys], True where a key is seen."""
    seen = [
        _as_visible(graph, term) if isinstance(term, Term) else term.build(graph, rows, keys, device)
        for term in mask.seen
    ]
    if not seen:
        return graph.call_function(torch.ones, ((rows, keys),), {"dtype": torch.bool, "device": device})
    found = seen[0]
    for other in seen[1:]:
        found = graph.call_function(torch.logical_and, (found, other))
    return graph.call_method("expand", (found, rows, keys))


def _as_visible(graph: fx.Graph, term: Term) -> fx.Node:
    value = fake(term.node)
    flat = _flatten(graph, term.node, value.dim(), heads=False)
    if term.kind == "visible":
        return flat
    if term.kind == "hidden":
        return graph.call_function(torch.logical_not, (flat,))
    return graph.call_function(torch.gt, (flat, HIDDEN))


def build_bias(graph: fx.Graph, mask: Mask, table: fx.Node, rows: Any, keys: Any) -> fx.Node | None:
    """New nodes: what is added to the score of each visible key, [rows, heads or 1, keys] in the table's order."""
    if not mask.added:
        return None
    flat = [_flatten(graph, node, fake(node).dim(), heads=True) for node in mask.added]
    heads = max(int(fake(node).shape[-3]) if fake(node).dim() >= 3 else 1 for node in mask.added)
    total = flat[0]
    for other in flat[1:]:
        total = graph.call_function(torch.add, (total, other))
    total = graph.call_method("expand", (total, rows, heads, keys))
    at = graph.call_method("long", (table,))
    at = graph.call_method("expand", (graph.call_method("unsqueeze", (at, 1)), rows, heads, keys))
    return graph.call_function(torch.gather, (total, 2, at))


def _flatten(graph: fx.Graph, node: fx.Node, dims: int, *, heads: bool) -> fx.Node:
    """[.., heads, 1, S] without the query's dimension, and without the heads unless asked for: three or two dims."""
    whole = slice(None)
    if heads:
        at: Any = {4: (whole, whole, 0), 3: (None, whole, 0), 2: (None, whole), 1: (None, None)}[dims]
    else:
        at = {4: (whole, 0, 0), 3: (whole, 0), 2: (whole,), 1: (None,)}[dims]
    return graph.call_function(operator.getitem, (node, at))
