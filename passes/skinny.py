"""Let the linear layers of a graph run as products of a few rows.

    %m : linear(%x, %w)                                    %g : skinny_gated(%x, %w)         [T, 1, 16]
    %a : slice(%m, -1, 0, 16)
    %b : slice(%m, -1, 16, 32)               ->            %r : skinny_add(%g, %w2, %h)      [T, 1, 8]
    %s : silu(%a);  %g : mul(%s, %b)
    %d : linear(%g, %w2);  %r : add(%h, %d)                %y : skinny_linear(%r, %w3)       [T, 1, 24]
    %y : linear(%r, %w3)

Gate and up may also be two linear layers: silu(linear(%x, %gate)) * linear(%x, %up) is skinny_gated(%x, %gate, up=%up).
The heads that a product makes are rotated by `skinny_rotary` where `passes/rotary.py` finds that the model does so, and
rows are normalised by the products that read them where `passes/norms.py` finds that this leaves out a kernel.
For graphs that run with `kernels.skinny.MAX_ROWS` rows or fewer; with more, the library's products are the better ones
and a compiler fuses what surrounds them. Results are rounded once where the operations on the left round one by one.
What cannot be replaced is left as it is, and `why_not` says why. With `fixed` the ops are asked for bits per row that
do not depend on the number of rows.

Serves pieces, which are exported graphs, and the graphs of torch.compile (`passes/cached.py`). Nothing is moved
past a node that writes in place.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..kernels import skinny
from .columns import only_reader_maybe, operands_maybe, other_operand_maybe, readers
from .graph import PRODUCTS, erase, is_row_tensor
from .nodes import PLAIN, argument, fake, fake_maybe, operation, same_sizes
from .norms import DEFAULT, Norms, fuse_norms
from .pieces import Cutter, OpCall
from .program import Program
from .rotary import Rotation, rotation_maybe
from .values import quiet

aten = torch.ops.aten
NAME = "skinny"


@dataclass(frozen=True)
class Replaced:
    """How often each op was put in, in the place of how many linear layers, how many norms they took along, and the
    linear layers left alone, with the reason.
    """

    counts: dict[str, int]
    layers: int
    norms: int
    left: tuple[tuple[fx.Node, str], ...]


@dataclass(frozen=True)
class Rewritten:
    """The new module, how often each op was put in, in the place of how many linear layers, how many norms they took
    along, and the linear layers left alone: name of the weight's node, and why.
    """

    module: fx.GraphModule
    counts: dict[str, int]
    layers: int
    norms: int
    left_alone: tuple[tuple[str, str], ...]


def use_skinny(module: fx.GraphModule, fixed: bool = False, norms: Norms = DEFAULT) -> Rewritten:
    """A copy of `module` with ops for few rows. Nodes carry their values' shapes in `meta`."""
    graph = copy.deepcopy(module.graph)
    computed = [weight for node in graph.nodes if (weight := _computed_weight_maybe(node)) is not None]
    left_alone = [(str(weight), "its weight is computed by the forward") for weight in computed]
    made = replace_linears(graph, why_not, fixed, norms)
    left_alone += [(str(operands(node)[1]), reason) for node, reason in made.left]
    graph.eliminate_dead_code()
    graph.lint()
    return Rewritten(fx.GraphModule(module, graph), made.counts, made.layers, made.norms, tuple(left_alone))


def replace_linears(
    graph: fx.Graph, why_not: Callable[[fx.Node], str], fixed: bool = False, norms: Norms = DEFAULT
) -> Replaced:
    """Puts ops in the place of linear layers that `why_not` has no reason against, and norms into these ops."""
    counts: Counter[str] = Counter()
    left, paired = [], set[fx.Node]()
    for node in list(graph.nodes):
        if operation(node) != "linear" or node in paired:
            continue
        reason = why_not(node)
        if reason:
            left.append((node, reason))
            continue
        pair = _pair_maybe(node)
        if pair is not None and not any(why_not(one) for one in pair[:2]):
            counts[_replace_pair(graph, *pair, fixed)] += 1
            paired |= {one for one in pair[:2] if one is not node}
        else:
            counts[_replace(graph, node, fixed)] += 1
    return Replaced(dict(counts), counts.total() + len(paired), fuse_norms(graph, norms), tuple(left))


def survey(program: Program) -> tuple[int, tuple[tuple[str, str], ...]]:
    """(how many linear layers of the dense program can run with the ops, those that cannot and why)."""
    cutter = Cutter()
    rewritten: dict[str, Rewritten] = {}
    stages = {id(stage.module): stage for stage in program.variants["dense"].stages}
    replaced, left_alone = 0, list[tuple[str, str]]()
    for stage in stages.values():
        for call in cutter.cut(stage).calls:
            if isinstance(call, OpCall):
                continue
            if call.code.key not in rewritten:
                rewritten[call.code.key] = use_skinny(call.code.module)
            replaced += rewritten[call.code.key].layers
            left_alone += rewritten[call.code.key].left_alone
    return replaced, tuple(left_alone)


def why_not(node: fx.Node) -> str:
    """Why a linear layer stays as it is; empty where it can be replaced."""
    x, weight, bias = operands(node)
    if weight.op not in ("placeholder", "get_attr"):
        return "its weight is computed by the forward"
    values = [None if one is None else fake_maybe(one) for one in (x, weight, bias)]
    for what, value in zip(("input", "weight", "bias"), values, strict=True):
        if value is not None and type(value) not in PLAIN:
            return f"its {what} is a {type(value).__name__}, not a plain tensor"
    if values[0] is None or values[1] is None:
        return "the graph does not say what its operands are"
    if values[1].dim() != 2:
        return f"its weight has {values[1].dim()} dimensions, not 2"
    if values[0].dtype not in skinny.HALF:
        return f"there is no kernel for {values[0].dtype}"
    if any(value is not None and value.dtype != values[0].dtype for value in (*values, fake_maybe(node))):
        return "its operands differ in dtype"
    if values[1].stride(1) != 1:
        return "the columns of its weight are not contiguous"
    return ""


def _computed_weight_maybe(node: fx.Node) -> fx.Node | None:
    """The weight of a product that is no linear layer, as of a quantised one: the first tensor it is computed from."""
    if node.op != "call_function" or node.target not in (aten.mm.default, aten.matmul.default):
        return None
    weight, rows = node.args[1], node.args[0]
    assert isinstance(weight, fx.Node)
    assert isinstance(rows, fx.Node)
    while weight.all_input_nodes and not is_row_tensor(weight):
        weight = weight.all_input_nodes[0]
    return None if is_row_tensor(weight) or not is_row_tensor(rows) else weight


def operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    """Input, weight and bias of a linear layer."""
    x, weight, bias = (argument(node, at, name) for at, name in enumerate(("input", "weight", "bias")))
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    assert bias is None or isinstance(bias, fx.Node)
    return x, weight, bias


def _replace(graph: fx.Graph, node: fx.Node, fixed: bool) -> str:
    """Puts the op in that covers most of what follows the linear layer; returns its name."""
    x, weight, bias = operands(node)
    turned, product, added = _rotation_maybe(node), _gated_maybe(node), _added_maybe(node)
    settings: dict[str, Any] = {"fixed": True} if fixed else {}
    if turned is not None:
        op, last, arguments = PRODUCTS["rotary"], node, (x, weight, turned.cos, turned.sin, bias)
        settings["rotated"] = turned.width
        turned.take_out()
        for _, rotated in turned.heads:
            erase(graph, rotated)
    elif product is not None:
        op, last, arguments = PRODUCTS["gated"], product, (x, weight, bias)  # type: ignore[assignment]
    elif added is not None:
        last, residual = added
        op, arguments = PRODUCTS["add"], (x, weight, residual, bias)  # type: ignore[assignment]
    else:
        op, last, arguments = PRODUCTS["linear"], node, (x, weight, bias)  # type: ignore[assignment]
    return _put(graph, op, last, arguments if bias is not None else arguments[:-1], settings)


def _replace_pair(graph: fx.Graph, gate: fx.Node, up: fx.Node, last: fx.Node, fixed: bool) -> str:
    """One op for silu(linear(x, gate)) * linear(x, up)."""
    x, weight, _ = operands(gate)
    settings: dict[str, Any] = {"up": operands(up)[1]} | ({"fixed": True} if fixed else {})
    return _put(graph, PRODUCTS["gated"], last, (x, weight), settings)


def _put(graph: fx.Graph, op: Any, last: fx.Node, args: tuple[Any, ...], settings: dict[str, Any]) -> str:
    """An op in the place of `last` and all that was computed for it alone; returns the op's name."""
    with graph.inserting_before(last):
        made = graph.call_function(op, args, settings)
    made.meta = {**last.meta, "pass": NAME}
    last.replace_all_uses_with(made)
    erase(graph, last)
    return str(op._schema.name).partition("::")[2]


def _rotation_maybe(node: fx.Node) -> Rotation | None:
    found = rotation_maybe(node)
    unmoved = found is not None and all(quiet(node, rotated) for _, rotated in found.heads)
    return found if unmoved else None


def _gated_maybe(node: fx.Node) -> fx.Node | None:
    """The product silu(first half) * second half, where nothing else reads any of it."""
    found, width = list(readers(node)), fake(node).shape[-1]
    gate, up = (0, width // 2), (width // 2, width)
    halves = dict(found)
    if len(found) != 2 or set(halves) != {gate, up} or width % 2:
        return None
    activated = only_reader_maybe(halves[gate], "silu")
    product = only_reader_maybe(halves[up], "mul")
    if activated is None or product is None or only_reader_maybe(activated, "mul") is not product:
        return None
    return product if operands_maybe(product) is not None and quiet(node, product) else None


def _pair_maybe(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """(gate, up, product) of silu(gate) * up, two linear layers on one input; `node` is the first of them."""
    activated = only_reader_maybe(node, "silu")
    product = only_reader_maybe(activated or node, "mul")
    other = other_operand_maybe(product, activated or node) if product is not None else None
    if product is None or other is None or not quiet(node, product):
        return None
    gate, up = node, other
    if activated is None:
        source = other.args[0] if operation(other) == "silu" else None
        if not isinstance(source, fx.Node):
            return None
        gate, up, activated = source, node, other
    users = [list(one.users) for one in (gate, activated, up)]
    alone = users == [[activated], [product], [product]]
    return (gate, up, product) if alone and _alike(gate, up) else None


def _alike(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are linear layers on the same input, without a bias and with weights of one layout."""
    if not operation(one) == operation(other) == "linear" or one is other:
        return False
    (x, weight, bias), (same_x, other_weight, other_bias) = operands(one), operands(other)
    mine, theirs = fake_maybe(weight), fake_maybe(other_weight)
    if x is not same_x or bias is not None or other_bias is not None or mine is None or theirs is None:
        return False
    sizes, others = (*mine.shape, *mine.stride()), (*theirs.shape, *theirs.stride())
    return mine.dtype == theirs.dtype and same_sizes(sizes, others)


def _added_maybe(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(sum, residual) where the one reader of `node` adds a tensor of its shape and dtype to it."""
    total = only_reader_maybe(node, "add")
    residual = other_operand_maybe(total, node) if total is not None else None
    if total is None or residual is None or not quiet(node, total):
        return None
    value, mine = fake_maybe(residual), fake(node)
    same = value is not None and value.dtype == mine.dtype and same_sizes(value.shape, mine.shape)
    return (total, residual) if same else None
