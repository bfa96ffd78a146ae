"""Tell a product of a few rows whose weight is read next, where kernels of a compiler lie in between.

    %y : skinny_add(%x, %w1, %h)                           %y : skinny_add(%x, %w1, %h, following=[%w2])
    %r : rsqrt(add(mean(pow(%y, 2), -1), 1e-06))    ->     ...
    %z : skinny_linear(mul(%y, %r), %w2)                   %z : skinny_linear(mul(%y, %r), %w2)

While such kernels run, memory is idle, and the second product cannot start before they have ended; so the first asks
for its weight. Not where nothing is computed in between, for then the second starts early and asks for itself; nor
where one of our other ops is, such as attention, which reads more than the cache holds.
"""

from __future__ import annotations

from itertools import pairwise

from torch import fx

from .graph import PRODUCTS, is_ours
from .nodes import LAYOUTS, operation

_SIZES = {"size", "sym_size", "numel"}


def name_following(graph: fx.Graph) -> int:
    """Hands products the weight of the one behind them; returns to how many."""
    nodes = {node: at for at, node in enumerate(graph.nodes)}
    products = [node for node in nodes if node.target in PRODUCTS.values()]
    order, found = list(nodes), 0
    for one, other in pairwise(products):
        weights = [other.args[1], *filter(None, [other.kwargs.get("up")])]
        between = order[nodes[one] + 1 : nodes[other]]
        if any(is_ours(node) for node in between) or not any(_has_kernel(node) for node in between):
            continue
        if all(nodes[weight] < nodes[one] for weight in weights):
            one.kwargs = {**one.kwargs, "following": weights}
            found += 1
    return found


def _has_kernel(node: fx.Node) -> bool:
    """Whether a node computes something, by itself or fused with others."""
    name = operation(node).partition(".")[0]
    return node.op.startswith("call_") and name not in LAYOUTS | _SIZES
