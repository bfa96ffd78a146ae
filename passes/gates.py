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
none does, so that the bodies of a loop stay equal. The gate is read where the attention call stands, so nothing may
write from the first of its readings, or the call, up to the product. In half precision a model rounds the gate's
sigmoid and what attention returns, where an op rounds their product alone.

A product of two tensors, attention and a sigmoid, that stays as it is, is listed with the reason: also where views of
any order, parts, expansions, casts and products with numbers lie between. Such a product in other words (`addcmul`,
`glu`), or with something else computed in between, is not seen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from .base import Compilation, Pass
from .columns import other_operand_maybe
from .errors import PassError
from .graph import erase
from .nodes import argument, aten, fake, fake_maybe, operation, same_sizes, scalar_operand
from .program import GateLeftAlone
from .values import quiet

ORDER = "the elements are in another order where attention and its gate are multiplied"
PART = "only a part of attention or of the sigmoid is multiplied"
DTYPE = "attention, its gate and their product are not all in one dtype"
BROADCAST = "the gate is not one number for each element"
NUMBER = "attention or its gate is multiplied with a number, too"

_PASSING = {
    **dict.fromkeys(("reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "contiguous", "clone"), ""),
    **dict.fromkeys(("transpose", "permute", "t"), ORDER),
    **dict.fromkeys(("slice", "select", "split", "split_with_sizes", "chunk", "getitem"), PART),
    **dict.fromkeys(("expand", "expand_as"), BROADCAST),
    "cast": DTYPE,
}
"""Operations that pass their first argument on, and why the result cannot stand for it."""


@dataclass(frozen=True)
class Gated:
    """product: sigmoid(gate) * attended, where `attended` is what a marker returns, perhaps as a view; sigmoid: its
    factor, perhaps a view of a sigmoid; gate: what that is the sigmoid of, as the last view that the marker may read;
    reader: the first node that reads it; alone: nothing but the product reads what the marker returns; obstacle: why
    what lies between these is more than views in the same order, empty where it is not.
    """

    product: fx.Node
    attended: fx.Node
    sigmoid: fx.Node
    gate: fx.Node
    reader: fx.Node
    alone: bool
    obstacle: str


def gated_maybe(marker: fx.Node) -> Gated | None:
    """The product of what a marker returns with a sigmoid, if there is one."""
    waiting = [(marker, True, "")]
    while waiting:
        node, alone, obstacle = waiting.pop()
        users = _readers(node)
        alone &= len(users) == 1
        for user in users:
            factor = other_operand_maybe(user, node) if operation(user) == "mul" else None
            found = _sigmoid_maybe(factor) if factor is not None else None
            if factor is not None and found is not None:
                gate, reader = _gate(found[0], marker)
                return Gated(user, node, factor, gate, reader, alone, obstacle or found[1])
            passed = _passed_on_maybe(user)
            if passed is not None and passed[0] is node:
                waiting.append((user, alone, obstacle or passed[1]))
    return None


def _name(node: fx.Node) -> str:
    """The operation, whatever its overload."""
    return operation(node).split(".")[0]


def _readers(node: fx.Node) -> list[fx.Node]:
    """The users of a value, without those that read its shape or dtype alone."""
    like = ("cast", "expand_as")
    return [
        user
        for user in node.users
        if _name(user) != "sym_size" and not (_name(user) in like and user.args[0] is not node)
    ]


def _passed_on_maybe(node: fx.Node) -> tuple[fx.Node, str] | None:
    """What a node passes on, and why the node cannot stand for it; None for a node that computes something else."""
    name = _name(node)
    if name == "mul":
        scaled = scalar_operand(node)
        return None if scaled is None else (scaled[0], NUMBER)
    source = node.args[0] if name in _PASSING else None
    if not isinstance(source, fx.Node):
        return None
    if name in ("slice", "select", "expand"):
        same = same_sizes([fake(node).numel()], [fake(source).numel()])
    else:
        same = name in ("transpose", "permute") and _keeps_order(node, source)
    return source, "" if same else _PASSING[name]


def _keeps_order(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node that exchanges dimensions leaves the elements in their order."""
    sizes = fake(source).shape
    dims = list(range(len(sizes)))
    if _name(node) == "permute":
        dims = [int(dim) % len(sizes) for dim in argument(node, 1, "dims")]
    else:
        one, other = (int(argument(node, at, f"dim{at - 1}")) % len(sizes) for at in (1, 2))
        dims[one], dims[other] = other, one
    wide = [dim for dim in dims if sizes[dim] != 1]
    return wide == sorted(wide)


def _sigmoid_maybe(factor: fx.Node) -> tuple[fx.Node, str] | None:
    """The sigmoid that a factor is, and why the factor cannot stand for it."""
    node, obstacle = factor, ""
    while (passed := _passed_on_maybe(node)) is not None:
        node, obstacle = passed[0], obstacle or passed[1]
    return (node, obstacle) if operation(node) == "sigmoid" else None


def _gate(sigmoid: fx.Node, marker: fx.Node) -> tuple[fx.Node, fx.Node]:
    """What a sigmoid is taken of, before views that are made behind the marker, and the first node that reads it."""
    reader, gate = sigmoid, sigmoid.args[0]
    assert isinstance(gate, fx.Node)
    while not gate < marker and (passed := _passed_on_maybe(gate)) is not None and not passed[1]:
        reader, gate = gate, passed[0]
    return gate, reader


def why_not(marker: fx.Node, gated: Gated) -> str:
    """Why a marker does not take its gate along; empty where it can."""
    value, gate = fake(marker), fake_maybe(gated.gate)
    if gated.obstacle:
        return gated.obstacle
    if not gated.alone:
        return "what attention returns is read by something else too"
    if gate is None or gate.dtype != value.dtype or fake(gated.product).dtype != value.dtype:
        return DTYPE
    if not same_sizes(fake(gated.sigmoid).shape, fake(gated.attended).shape):
        return BROADCAST
    if not gated.gate < marker:  # what comes before does not depend on it
        return _why_behind(gated.gate)
    if not quiet(marker, gated.product):
        return "something is written between the attention call and its product with the gate"
    if gated.reader < marker and not quiet(gated.reader, marker):
        return "something is written between the gate's sigmoid and the attention call"
    try:
        gate.view(value.shape)
    except (RuntimeError, ValueError):
        return "the gate would have to be copied"
    return ""


def _why_behind(gate: fx.Node) -> str:
    passed = _passed_on_maybe(gate)
    if passed is not None and passed[1] != PART:
        return passed[1]
    return f"the gate is computed behind the attention call, by {_name(gate)}"


class FuseGates(Pass):
    """Fills `compilation.gates_left_alone` and `Site.gated`; without `options.fuse_gates` all are left alone."""

    name = "gates"

    def run(self, compilation: Compilation) -> dict[str, int]:
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
            if not compilation.options.fuse_gates:
                reason = "fusing is off (fuse_gates=False)"
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
