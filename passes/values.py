"""Whether two nodes of a graph with writes in it hold the same values.

Models make the same mask anew in every layer (`mask[:, :, :, :n]`), so nodes are compared by how they are computed. An
input that is written to has another version before and after each write; a view has the version of what it views.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import defaultdict
from typing import Any

from torch import fx

from .nodes import is_layout, operation, sources

_DEPTH = 64
_WRITES = {
    operator.setitem,
    operator.iadd,
    operator.imul,
    operator.isub,
    operator.itruediv,
    operator.iand,
    operator.ior,
}
_RANDOM = ("rand", "dropout", "bernoulli", "multinomial", "normal", "uniform", "exponential", "empty")


class Values:
    """Keys of one graph's values: equal keys mean equal values. Other than that, keys mean nothing."""

    def __init__(self, graph: fx.Graph) -> None:
        self.place = {node: place for place, node in enumerate(graph.nodes)}
        self.writes: dict[fx.Node, list[int]] = defaultdict(list)
        for node in graph.nodes:
            if writes(node) and node.args and isinstance(node.args[0], fx.Node):
                for source in sources(node.args[0]):
                    self.writes[source].append(self.place[node])

    def key(self, value: Any, at: fx.Node, depth: int = 0) -> Any:
        """The key of `value` as the node `at` sees it."""
        if isinstance(value, tuple | list):
            return tuple(self.key(one, at, depth) for one in value)
        if isinstance(value, slice):
            return "slice", self.key((value.start, value.stop, value.step), at, depth)
        if not isinstance(value, fx.Node):
            return type(value).__name__, repr(value)
        version = bisect_left(self.writes[value], self.place[at]) if value in self.writes else 0
        name = operation(value)
        if depth > _DEPTH or not is_pure(value):
            return value.name, version
        seen_from = at if is_layout(value) else value
        inputs = tuple(self.key(one, seen_from, depth + 1) for one in value.args)
        named = tuple((key, self.key(one, seen_from, depth + 1)) for key, one in sorted(value.kwargs.items()))
        return name, str(value.target), inputs, named, version


def writes(node: fx.Node) -> bool:
    """Whether a node changes its first argument in place."""
    if node.op == "call_method":
        name = str(node.target)
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return node.op == "call_function" and (node.target in _WRITES or str(node.target).endswith("_"))


def is_pure(node: fx.Node) -> bool:
    """Whether a node only computes: it writes nothing and draws nothing."""
    schema = getattr(node.target, "_schema", None)
    if not operation(node) or writes(node) or (schema is not None and schema.is_mutable):
        return False
    return not any(word in operation(node) for word in _RANDOM)
