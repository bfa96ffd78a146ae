"""Which attention calls of a graph are the loops of one layer.

    q = linear(x, w); o = sdpa(q, k0, v0)        attn, loop 0
    x = x + linear(o, u)
    q_1 = linear(x, w); o_1 = sdpa(q_1, k1, v1)  attn, loop 1: its query is made with w too, of what loop 0 left

A module alone does not tell: one that only attends may serve all layers, and one forward may have all layers written
out. Two calls are loops of one layer if the same module makes them, their queries come from a common weight, and the
later query depends on the earlier result. Where no weight is found, they must be different calls of the module.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .calls import AttentionCall
from .nodes import argument, fake_maybe, is_layout, operation, sources
from .values import Values, written

_LOOKUPS = {"embedding", "getitem", "index_select", "gather"}


@dataclass
class _Layer:
    """Its number, and what is known of its latest call: the place among all calls, the module with the number of the
    module's call, the weights of the query.
    """

    number: int
    last: int
    module: str
    weights: frozenset[Hashable]

    def goes_on(self, module: str, weights: frozenset[Hashable], depends: int) -> bool:
        """Whether a call of these, whose query depends on the calls that are bits of `depends`, is its next loop."""
        if _base(module) != _base(self.module) or not depends >> self.last & 1:
            return False
        if weights or self.weights:
            return bool(weights & self.weights)
        return module != self.module


def layers_of(calls: Sequence[AttentionCall], values: Values) -> list[int]:
    """The number of each call's layer, counted in the order of first calls."""
    layers: list[_Layer] = []
    found = []
    for at, (call, depends) in enumerate(zip(calls, _dependencies(calls), strict=True)):
        module, weights = _module(call.node), frozenset(_weights(call.query, values))
        layer = next((one for one in layers if one.goes_on(module, weights, depends)), None)
        if layer is None:
            layer = _Layer(len(layers), at, module, weights)
            layers.append(layer)
        layer.last, layer.module, layer.weights = at, module, weights
        found.append(layer.number)
    return found


def _base(module: str) -> str:
    return module.split("@")[0]


def _module(node: fx.Node) -> str:
    """The innermost module that made a node, with the number of its call behind "@"; "" for none."""
    stack = list(node.meta.get("nn_module_stack") or {})
    return str(stack[-1]) if stack else ""


def _dependencies(calls: Sequence[AttentionCall]) -> list[int]:
    """For each call the earlier ones that its query depends on, as bits."""
    place = {call.node: at for at, call in enumerate(calls)}
    known: dict[fx.Node, int] = {}
    for node in calls[0].node.graph.nodes if calls else ():
        bits = 0
        for source in node.all_input_nodes:
            bits |= known[source]
        for target in written(node):  # what is written to depends on what is written from now on
            for changed in (target, *sources(target)):
                known[changed] |= bits
        known[node] = bits | (1 << place[node] if node in place else 0)
    return [known[call.query] for call in calls]


def _weights(query: fx.Node, values: Values) -> Iterator[Hashable]:
    """Keys of the matrices that a query was multiplied with last, on every way that leads to it."""
    waiting, seen = [query], {query}
    while waiting:
        node = waiting.pop()
        found = [values.key(one, node) for one in node.all_input_nodes if _is_weight(one, node)]
        yield from found
        for source in () if found else node.all_input_nodes:
            if source not in seen:
                seen.add(source)
                waiting.append(source)


def _is_weight(value: fx.Node, user: fx.Node) -> bool:
    """Whether `user` multiplies with `value`, a matrix that is not computed here."""
    name, tensor = operation(user), fake_maybe(value)
    if tensor is None or tensor.dim() < 2 or name in _LOOKUPS or is_layout(user):
        return False
    origins = list(sources(value))
    if any(origin.op not in ("placeholder", "get_attr") for origin in origins):
        return False
    if name == "linear":
        return value is argument(user, 1, "weight")
    if all(isinstance(fake_maybe(origin), torch.nn.Parameter) for origin in origins):
        return True
    others: list[Any] = [one for one in user.all_input_nodes if one is not value]
    computed = any(origin.op not in ("placeholder", "get_attr") for one in others for origin in sources(one))
    # An operator of its own has quantised weights, which are buffers.
    product = name in ("matmul", "addmm", "mm") or isinstance(user.target, torch._ops.OpOverload)
    return product and tensor.dim() == 2 and computed
