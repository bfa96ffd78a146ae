"""Let attention calls multiply their result with its gate.

    %g : linear(%x, Wg)                     [T, 1, 32]
    %o : site(%q, %k, %v)                   [T, 4, 8]          %g : linear(%x, Wg)
    %u : reshape(%o, [T, 1, 32])                        ->     %r : reshape(%g, [T, 4, 8])
    %s : sigmoid(%g)                                           %o : site(%q, %k, %v, %r)
    %y : mul(%s, %u)                                           %u : reshape(%o, [T, 1, 32])

what read %y reads %u

Between two of our ops a compiler has nothing to fuse this product with: it would be a kernel of its own. Both orders of
the factors count, and views around each of them that keep the order of the elements. The gate is handed on as the view
that it is, such as columns of one product that makes queries, keys, values and the gate; it must be computed before the
attention call, and nothing else may read what that call returns. Either all calls of a layer take their gate along or
none does, so that the bodies of a loop stay equal. Nothing is moved past a node that writes. In half precision a model
rounds the gate's sigmoid and what attention returns, where an op rounds their product alone.

What ends in a product with a sigmoid and stays as it is, is listed with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from .base import Compilation, Pass
from .columns import other_operand_maybe
from .errors import PassError
from .graph import erase
from .nodes import argument, aten, fake, fake_maybe, operation, same_sizes
from .program import GateLeftAlone
from .values import quiet

_VIEWS = ("reshape", "unsqueeze", "squeeze", "transpose")


@dataclass(frozen=True)
class Gated:
    """product: sigmoid(gate) * attended, where `attended` is what a marker returns, perhaps as a view; sigmoid: its
    factor, perhaps a view of a sigmoid; gate: what that is the sigmoid of, before any views; alone: nothing but the
    product reads what the marker returns; in_order: the product has its elements in the order of the marker's.
    """

    product: fx.Node
    attended: fx.Node
    sigmoid: fx.Node
    gate: fx.Node
    alone: bool
    in_order: bool


def gated_maybe(marker: fx.Node) -> Gated | None:
    """The product of what a marker returns with a sigmoid, if there is one."""
    waiting = [(marker, True, True)]
    while waiting:
        node, alone, in_order = waiting.pop()
        alone &= len(node.users) == 1
        for user in node.users:
            factor = other_operand_maybe(user, node) if operation(user) == "mul" else None
            source = _without_views(factor) if factor is not None else None
            if factor is not None and source is not None and operation(source) == "sigmoid":
                gate = source.args[0]
                assert isinstance(gate, fx.Node)
                return Gated(user, node, factor, _without_views(gate), alone, in_order)
            if operation(user) in _VIEWS:
                waiting.append((user, alone, in_order and _keeps_order(user)))
    return None


def _keeps_order(node: fx.Node) -> bool:
    """Whether a node is a view of its first argument with the same elements in the same order."""
    if operation(node) != "transpose":
        return operation(node) in _VIEWS
    sizes = fake(node).shape
    first, last = sorted(int(argument(node, at, f"dim{at - 1}")) % len(sizes) for at in (1, 2))
    return sum(size != 1 for size in sizes[first : last + 1]) <= 1


def _without_views(node: fx.Node) -> fx.Node:
    while _keeps_order(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def why_not(marker: fx.Node, gated: Gated) -> str:
    """Why a marker does not take its gate along; empty where it can."""
    value, gate = fake(marker), fake_maybe(gated.gate)
    if not gated.alone:
        return "what attention returns is read by something else too"
    if gate is None or gate.dtype != value.dtype or fake(gated.product).dtype != value.dtype:
        return f"the gate or its product is not in {value.dtype}, as what attention returns is"
    if not gated.in_order:
        return "the product has its elements in another order than attention"
    if not same_sizes(fake(gated.sigmoid).shape, fake(gated.attended).shape):
        return "the gate is one number for several elements"
    if not gated.gate < marker:  # what comes before does not depend on it
        return "the gate is computed behind the attention call"
    if not quiet(marker, gated.product):
        return "something is written between the attention call and its product with the gate"
    try:
        gate.view(value.shape)
    except (RuntimeError, ValueError):
        return "the gate would have to be copied"
    return ""


class FuseGates(Pass):
    """Fills `compilation.gates_left_alone` and `Site.gated`; off unless `options.fuse_gates`."""

    name = "gates"

    def run(self, compilation: Compilation) -> dict[str, int]:
        taken: set[str] = set()
        if compilation.options.fuse_gates:
            taken = self._take(compilation)
        compilation.sites = tuple(replace(site, gated=site.layer in taken) for site in compilation.sites)
        return {
            "taken": sum(site.gated for site in compilation.sites),
            "left_alone": len(compilation.gates_left_alone),
        }

    def _take(self, compilation: Compilation) -> set[str]:
        """The layers whose calls took their gates along."""
        layers: dict[str, list[tuple[fx.Node, Gated | None]]] = {}
        for site, marker in zip(compilation.sites, compilation.markers, strict=True):
            layers.setdefault(site.layer, []).append((marker, gated_maybe(marker)))
        taken = set()
        for layer, calls in layers.items():
            found = [(marker, gated) for marker, gated in calls if gated is not None]
            if not found:
                continue
            reason = next(filter(None, (why_not(*one) for one in found)), "")
            if len(found) < len(calls):
                reason = "not all of its calls have a gate"
            if reason:
                compilation.gates_left_alone.append(GateLeftAlone(layer, reason))
                continue
            for marker, _ in found:
                gated = gated_maybe(marker)  # anew: its gate may be a product that was taken out just now
                assert gated is not None
                take_along(compilation.graph.graph, marker, gated)
            taken.add(layer)
        compilation.graph.recompile()
        return taken

    def ensure(self, compilation: Compilation) -> None:
        """Markers have a gate where their sites say so, as large as what they return."""
        for site, marker in zip(compilation.sites, compilation.markers, strict=True):
            gates = [fake(gate) for gate in marker.args[3:]]  # type: ignore[arg-type]
            sound = all(same_sizes(gate.shape, fake(marker).shape) for gate in gates)
            if len(gates) != site.gated or not sound:
                raise PassError(f"{site.name} should have {'one gate' if site.gated else 'no gate'}")


def take_along(graph: fx.Graph, marker: fx.Node, gated: Gated) -> None:
    """Gives the marker its gate, and takes the product out."""
    rows, heads, head_dim = fake(marker).shape
    with graph.inserting_before(marker):
        gate = graph.call_function(aten.reshape.default, (gated.gate, [-1, heads, head_dim]))
    gate.meta = {**marker.meta, "pass": FuseGates.name}
    gate.meta["val"] = fake(gated.gate).view(rows, heads, head_dim)
    marker.args = (*marker.args, gate)
    gated.product.replace_all_uses_with(gated.attended)
    erase(graph, gated.product)
