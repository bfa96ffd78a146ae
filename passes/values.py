"""Whether two nodes of a graph with writes in it hold the same values.

Models make the same mask anew in every layer (`mask[:, :, :, :n]`), so nodes are compared by how they are computed. An
input that is written to has another version before and after each write; a view has the version of what it views.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import Any

from torch import fx

from .nodes import is_layout, operation, sources, writes

_DEPTH = 64
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "empty")


class Values:
    """Keys of one graph's values: equal keys mean equal values. Other than that, keys mean nothing."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.writes: dict[fx.Node, list[int]] = defaultdict(list)
        for node in graph.nodes:
            for target in written(node):
                for source in sources(target):
                    self.writes[source].append(self.place[node])

        self.numbers: dict[Any, int] = {}
        self.known: dict[tuple[fx.Node, fx.Node], int] = {}

    def key(self, value: Any, at: fx.Node, depth: int = 0) -> Any:
        """The key of `value` as the node `at` sees it."""
        if isinstance(value, tuple | list):
            return tuple(self.key(one, at, depth) for one in value)
        if isinstance(value, slice):
            return "slice", self.key((value.start, value.stop, value.step), at, depth)
        if not isinstance(value, fx.Node):
            return type(value).__name__, repr(value)
        if (value, at) not in self.known:
            # One number per distinct computation: keys of shared parts do not multiply.
            self.known[value, at] = self.numbers.setdefault(
                self._computed(value, at, depth), len(self.numbers)
            )
        return self.known[value, at]

    def kept(self, value: fx.Node, since: fx.Node, at: fx.Node) -> bool:
        """Whether nothing is written to the memory of `value` between two nodes."""
        first, last = self.place[since], self.place[at]
        return not any(first < place < last for one in sources(value) for place in self.writes.get(one, ()))

    def _computed(self, value: fx.Node, at: fx.Node, depth: int) -> Any:
        version = bisect_left(self.writes[value], self.place[at]) if value in self.writes else 0
        if depth > _DEPTH or not is_pure(value):
            return value.name, version
        seen_from = at if is_layout(value) else value
        inputs = self.key(value.args, seen_from, depth + 1)
        named = tuple(
            (name, self.key(one, seen_from, depth + 1)) for name, one in sorted(value.kwargs.items())
        )
        return operation(value), str(value.target), inputs, named, version


def written(node: fx.Node) -> list[fx.Node]:
    """What a node may write to: its first argument, or any input of an operator whose schema mutates."""
    if _mutates(node):
        return node.all_input_nodes
    first = node.args[0] if node.args and writes(node) else None
    return [first] if isinstance(first, fx.Node) else []


def _mutates(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def is_pure(node: fx.Node) -> bool:
    """Whether a node only computes: it writes nothing and draws nothing."""
    if not operation(node) or writes(node) or _mutates(node):
        return False
    return not any(word in operation(node) for word in _RANDOM)


def quiet(first: fx.Node, last: fx.Node) -> bool:
    """Whether no node between two writes to memory: what the first one reads is the same for the last one."""
    node = first.next
    while node is not last:
        if not is_pure(node):
            return False
        node = node.next
    return True
