"""Let the linear layers of a piece run as products of a few rows.

    %m : linear(%x, %w)                                    %g : skinny_gated(%x, %w)         [T, 1, 16]
    %a : slice(%m, -1, 0, 16)
    %b : slice(%m, -1, 16, 32)               ->            %r : skinny_add(%g, %w2, %h)      [T, 1, 8]
    %s : silu(%a);  %g : mul(%s, %b)
    %d : linear(%g, %w2);  %r : add(%h, %d)                %y : skinny_linear(%r, %w3)       [T, 1, 24]
    %y : linear(%r, %w3)

The heads that a product makes are rotated by `skinny_rotary` where `passes/rotary.py` finds that the model does so, and
rows are normalised by the products that read them where `passes/norms.py` finds that this leaves out a kernel.
For graphs that run with `kernels.skinny.MAX_ROWS` rows or fewer; with more, the library's products are the better ones
and a compiler fuses what surrounds them. Results are rounded once where the operations on the left round one by one.
What cannot be replaced is left as it is, and `Rewritten.left_alone` says why. With `fixed` the ops are asked for bits
per row that do not depend on the number of rows.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

from ..kernels import skinny
from .graph import is_call, is_row_tensor
from .norms import DEFAULT, Norms, fuse_norms
from .pieces import Cutter, OpCall
from .program import Program
from .rotary import rotation_maybe

aten, ours = torch.ops.aten, torch.ops.sparse_compile
NAME = "skinny"
_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)


@dataclass(frozen=True)
class Rewritten:
    """The new module, how often each op was put in, the linears left alone (name of the weight's node, and why), and
    how many norms the products took along.
    """

    module: fx.GraphModule
    counts: dict[str, int]
    left_alone: tuple[tuple[str, str], ...]
    norms: int = 0


def use_skinny(module: fx.GraphModule, fixed: bool = False, norms: Norms = DEFAULT) -> Rewritten:
    """A copy of `module` with ops for few rows. Nodes carry their values' shapes in `meta["val"]`."""
    graph = copy.deepcopy(module.graph)
    counts: Counter[str] = Counter()
    left_alone = []
    for node in list(graph.nodes):
        if (weight := _computed_weight_maybe(node)) is not None:
            left_alone.append((str(weight), "its weight is computed by the forward"))
        if not is_call(node, aten.linear.default):
            continue
        reason = why_not(node)
        if reason:
            left_alone.append((str(node.args[1]), reason))
        else:
            counts[_replace(graph, node, fixed)] += 1
    graph.eliminate_dead_code()
    taken = fuse_norms(graph, norms)
    graph.eliminate_dead_code()
    graph.lint()
    return Rewritten(fx.GraphModule(module, graph), dict(counts), tuple(left_alone), taken)


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
            replaced += sum(rewritten[call.code.key].counts.values())
            left_alone += rewritten[call.code.key].left_alone
    return replaced, tuple(left_alone)


def why_not(node: fx.Node) -> str:
    """Why a linear layer stays as it is; empty where it can be replaced."""
    x, weight, bias = _operands(node)
    if weight.op not in ("placeholder", "get_attr"):
        return "its weight is computed by the forward"
    values = [None if one is None else one.meta.get("val") for one in (x, weight, bias)]
    for what, value in zip(("input", "weight", "bias"), values, strict=True):
        if value is not None and type(value) not in _PLAIN:
            return f"its {what} is a {type(value).__name__}, not a plain tensor"
    if values[0] is None or values[1] is None:
        return "the graph does not say what its operands are"
    if values[1].dim() != 2:
        return f"its weight has {values[1].dim()} dimensions, not 2"
    if values[0].dtype not in skinny.HALF:
        return f"there is no kernel for {values[0].dtype}"
    if any(value is not None and value.dtype != values[0].dtype for value in values):
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


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    x, weight = node.args[0], node.args[1]
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    assert isinstance(x, fx.Node)
    assert isinstance(weight, fx.Node)
    assert bias is None or isinstance(bias, fx.Node)
    return x, weight, bias


def _replace(graph: fx.Graph, node: fx.Node, fixed: bool) -> str:
    """Puts the op in that covers most of what follows the linear layer; returns its name."""
    x, weight, bias = _operands(node)
    turned, product, added = rotation_maybe(node), _gated_maybe(node), _added_maybe(node)
    settings: dict[str, Any] = {"fixed": True} if fixed else {}
    if turned is not None:
        op, last, arguments = ours.skinny_rotary.default, node, (x, weight, turned.cos, turned.sin, bias)
        settings["rotated"] = turned.width
        turned.take_out()
    elif product is not None:
        op, last, arguments = ours.skinny_gated.default, product, (x, weight, bias)  # type: ignore[assignment]
    elif added is not None:
        last, residual = added
        op, arguments = ours.skinny_add.default, (x, weight, residual, bias)  # type: ignore[assignment]
    else:
        op, last, arguments = ours.skinny_linear.default, node, (x, weight, bias)  # type: ignore[assignment]
    with graph.inserting_before(last):
        given = arguments if bias is not None else arguments[:-1]
        made = graph.call_function(op, given, settings)
    made.meta = {**last.meta, "pass": NAME}
    last.replace_all_uses_with(made)
    graph.erase_node(last)
    return str(op._schema.name).partition("::")[2]


def _only_user_maybe(node: fx.Node, target: object) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and is_call(users[0], target) else None


def _gated_maybe(node: fx.Node) -> fx.Node | None:
    """The product silu(first half) * second half, where nothing else reads any of it."""
    halves = dict(_halves(node))
    if set(halves) != {0, 1} or node.meta["val"].shape[-1] % 2:
        return None
    activated = _only_user_maybe(halves[0], aten.silu.default)
    product = _only_user_maybe(halves[1], aten.mul.Tensor)
    if activated is None or product is None or _only_user_maybe(activated, aten.mul.Tensor) is not product:
        return None
    return product


def _halves(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """Which half (0, 1) of the last dimension each reader of `node` takes; -1 for one that reads anything else."""
    value = node.meta["val"]
    last, half = value.dim() - 1, value.shape[-1] // 2
    parts = _only_user_maybe(node, aten.chunk.default) or _only_user_maybe(node, aten.split.Tensor)
    if parts is not None:
        size = 2 if is_call(parts, aten.chunk.default) else half
        dim = parts.args[2] if len(parts.args) > 2 else parts.kwargs.get("dim", 0)
        along_last = parts.args[1] == size and dim in (-1, last)
        for user in parts.users:
            taken = user.args[1] if along_last and user.target is getitem else -1
            yield (taken if isinstance(taken, int) else -1), user
        return
    for user in node.users:
        found = -1
        if is_call(user, aten.slice.Tensor) and len(user.args) == 4 and user.args[1] in (-1, last):
            start, stop = user.args[2:]
            if (start or 0, stop) == (0, half):
                found = 0
            elif start == half and isinstance(stop, int) and stop >= 2 * half:
                found = 1
        yield found, user


def _added_maybe(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(sum, residual) where the one reader of `node` adds a tensor of its shape and dtype to it."""
    total = _only_user_maybe(node, aten.add.Tensor)
    if total is None or total.kwargs.get("alpha", 1) != 1:
        return None
    residual = total.args[1] if total.args[0] is node else total.args[0]
    if not isinstance(residual, fx.Node) or residual is node:
        return None
    value, mine = residual.meta.get("val"), node.meta["val"]
    same = isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (mine.shape, mine.dtype)
    return (total, residual) if same else None
