"""Turn linear layers that read the same input into one product with one weight.

%q : linear(%x, Wq)  [T, 1, 32]             %m : linear(%x, [Wq; Wk; Wv])     [T, 1, 64]
%k : linear(%x, Wk)  [T, 1, 16]      ->     %q : slice(%m, -1, 0, 32)
%v : linear(%x, Wv)  [T, 1, 16]             %k : slice(%m, -1, 32, 48)
                                            %v : slice(%m, -1, 48, 64)

At few rows a product takes as long as reading its weight, and small products do not reach the memory's bandwidth: one
large product does what three small ones did, in one launch. The results are the same sums of products; a library may
add in another order for another size. (On the CPU the bits were equal at every size that was tried.)

The weights are joined once and stay the model's own: the memory of each parameter is moved into its rows of the joined
weight, so that nothing is held twice, names, shapes and values stay as they were, and values written into the
parameters later are followed. (Memory whose storage other tensors of the model need is not given back. It is reported,
and layers for which it would come to more than `_MOST_TWICE` of the weights are left alone.) Joined are layers called
side by side in one call of one module, and only if every call of them does the same: every loop then reads the same
joined weight, and the bodies of a loop stay equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx, nn

from .base import Compilation, Pass
from .errors import PassError
from .graph import is_call, is_shape, module_path_maybe
from .program import LeftAlone, MergedLinears
from .trace import strip_wrapper
from .weights import get_tensor, held_twice, is_plain, join, memory, span

aten = torch.ops.aten
# The plain forward must not change by a bit, and matrix products may choose their code by the alignment of a weight: a
# moved weight starts where an allocator could have put it. Biases are added; vector loads ask for less.
_ALIGNMENT, _BIAS_ALIGNMENT = 64, 16  # bytes
_MOST_TWICE = 0.05


@dataclass(frozen=True)
class _Group:
    """Linear calls on one input within one module call, in order; `tensors` names weights, and biases behind them."""

    nodes: tuple[fx.Node, ...]
    weights: tuple[str, ...]
    biases: tuple[str | None, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tensors."""
        return (*self.weights, *(name for name in self.biases if name is not None))


def _attribute_maybe(node: object) -> str | None:
    """The name of the tensor that a node reads from the model, or None for a computed value."""
    return str(node.target) if isinstance(node, fx.Node) and node.op == "get_attr" else None


def _bias(node: fx.Node) -> object:
    return node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")


def _scope(node: fx.Node, weight: str) -> str:
    """The call of the module that holds the linear layer, as export names it."""
    stack = list((node.meta.get("nn_module_stack") or {}).items())
    if stack and strip_wrapper(stack[-1][1][0].partition("@")[0]) == weight.rpartition(".")[0]:
        stack.pop()  # the linear layer itself
    return str(stack[-1][0]) if stack else ""


def _computed(graph: fx.Graph) -> list[LeftAlone]:
    """Layers whose weight or bias is computed by the forward, where another layer reads the same input."""
    calls = [node for node in graph.nodes if is_call(node, aten.linear.default)]
    inputs = Counter(node.args[0] for node in calls)
    names = {
        _layer(node) or node.name: None
        for node in calls
        if inputs[node.args[0]] > 1
        and any(
            isinstance(one, fx.Node) and _attribute_maybe(one) is None for one in (node.args[1], _bias(node))
        )
    }
    return [LeftAlone((name,), "its weight or bias is computed by the forward") for name in names]


def _opened(compilation: Compilation) -> list[LeftAlone]:
    """Layers whose weight is a tensor subclass, traced as what it computes, where others read the same input."""
    graph, layers = compilation.graph.graph, dict[str, tuple[str, str]]()
    whole = {str(node.target) for node in graph.nodes if node.op == "get_attr"}
    for name, tensor in compilation.tensors.items():
        if not is_plain(tensor) and tensor.dim() == 2 and name not in whole:
            layers[name.rpartition(".")[0]] = name, type(tensor).__name__
    readers: dict[fx.Node, dict[str, None]] = {}
    for node in graph.nodes:
        path = _layer(node)
        if path in layers or is_call(node, aten.linear.default):
            for source in node.all_input_nodes:
                if source.op != "get_attr" and not is_shape(source) and _layer(source) != path:
                    readers.setdefault(source, {}).setdefault(path)
    found = dict.fromkeys(path for paths in readers.values() if len(paths) > 1 for path in paths)
    return [
        LeftAlone((name,), f"{name} is a {kind}, not a plain parameter")
        for name, kind in (layers[path] for path in found if path in layers)
    ]


def _layer(node: fx.Node) -> str:
    """The path of the module that computes a node."""
    return strip_wrapper((module_path_maybe(node) or ("", 0))[0])


def _groups(graph: fx.Graph) -> list[_Group]:
    """Calls that share an input, two at least; a computed weight or bias belongs to no group."""
    found: dict[tuple[object, str], list[fx.Node]] = {}
    for node in graph.nodes:
        if not is_call(node, aten.linear.default):
            continue
        weight = _attribute_maybe(node.args[1])
        if weight is not None and (_bias(node) is None or _attribute_maybe(_bias(node)) is not None):
            found.setdefault((node.args[0], _scope(node, weight)), []).append(node)
    return [
        _Group(
            tuple(nodes),
            tuple(str(_attribute_maybe(node.args[1])) for node in nodes),
            tuple(_attribute_maybe(_bias(node)) for node in nodes),
        )
        for nodes in found.values()
        if len(nodes) > 1
    ]


class _Judge:
    """Knows every tensor of the model and says why a group cannot be merged."""

    def __init__(self, compilation: Compilation) -> None:
        self.root = compilation.graph
        self.users: dict[str, set[fx.Node]] = {}
        for node in compilation.graph.graph.nodes:
            if node.op == "get_attr":
                self.users.setdefault(str(node.target), set()).update(node.users)
        known = {name: get_tensor(self.root, name) for name in self.users} | compilation.tensors
        self.spans = {name: span(tensor) for name, tensor in known.items() if is_plain(tensor)}
        self.known = known
        self.may_hold_twice = int(_MOST_TWICE * memory(known.values()))
        self.reads_strides = any(
            is_call(node, aten.as_strided.default) for node in compilation.graph.graph.nodes
        )

    def why_not(self, calls: Sequence[_Group]) -> str:
        """Why these calls of one set of layers stay as they are; empty when they can be merged."""
        group = calls[0]
        biases = [name for name in group.biases if name is not None]
        if len(set(group.weights)) < len(group.weights):
            return "one of them is called more than once on the same input"
        if len(biases) not in (0, len(group.nodes)):
            return "some have a bias and some have none"
        if self.reads_strides:
            return "the model reads the strides of its tensors (as_strided)"
        own = {node for call in calls for node in call.nodes}
        reasons = (self._tensor_reason(name, own, set(group.names)) for name in group.names)
        reason = next(filter(None, reasons), "") or self._joint_reason(group.weights, biases)
        return reason or self._memory_reason(group)

    def held_twice(self, group: _Group) -> int:
        """Bytes that joining the tensors of a group could not give back."""
        joined = [get_tensor(self.root, name) for name in group.names]
        own = {id(tensor) for tensor in joined}
        others = [tensor for tensor in self.known.values() if id(tensor) not in own]
        weights, biases = joined[: len(group.weights)], joined[len(group.weights) :]
        return sum(held_twice(some, others) for some in (weights, biases) if some)

    def _memory_reason(self, group: _Group) -> str:
        twice = self.held_twice(group)
        if twice > self.may_hold_twice:
            return (
                f"they lie in one storage with other tensors, which keeps it: {twice:,} bytes would be held twice, and "
                f"{self.may_hold_twice:,} are left of what may be ({_MOST_TWICE:.0%} of the weights)"
            )
        self.may_hold_twice -= twice
        return ""

    def _tensor_reason(self, name: str, own: set[fx.Node], group: set[str]) -> str:
        tensor = get_tensor(self.root, name)
        if any(part == "base_layer" or part.startswith("lora_") for part in name.split(".")):
            return f"{name} belongs to an adapter, which may be merged or removed later"
        if type(tensor) is not nn.Parameter:
            return f"{name} is a {type(tensor).__name__}, not a plain parameter"
        if not tensor.is_contiguous():
            return f"{name} is not contiguous"
        if tensor.is_inference():
            return f"{name} was made in inference mode and cannot be moved"
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            return f"{name} has gradient hooks"
        if not self.users[name] <= own:
            return f"{name} is read elsewhere too"
        start, end = self.spans[name]
        for other, (low, high) in self.spans.items():
            if low < end and start < high and self.known[other] is not tensor:
                return f"{name} shares its memory with {other}"
            if self.known[other] is tensor and other in self.users and other not in group:
                return f"{name} is the same parameter as {other}"
        return ""

    def _joint_reason(self, weights: Sequence[str], biases: Sequence[str]) -> str:
        for names, alignment in ((weights, _ALIGNMENT), (biases, _BIAS_ALIGNMENT)):
            tensors = [get_tensor(self.root, name) for name in names]
            for what in ("dtype", "device"):
                if len({getattr(tensor, what) for tensor in tensors}) > 1:
                    return f"they differ in {what}"
            if any(tensor.nbytes % alignment for tensor in tensors[:-1]):
                return f"their sizes are no multiples of {alignment} bytes"
        return ""


def _joined_name(names: Sequence[str]) -> str:
    """model.attn.q_proj.weight, model.attn.k_proj.weight -> model.attn.merged_q_proj_k_proj.weight"""
    paths = [name.split(".") for name in names]
    shared = 0
    while shared < min(map(len, paths)) - 1 and len({path[shared] for path in paths}) == 1:
        shared += 1
    leaves = "_".join("_".join(path[shared:-1]) or path[-1] for path in paths)
    return ".".join([*paths[0][:shared], f"merged_{leaves}", paths[0][-1]])


def _register(root: nn.Module, path: str, tensor: torch.Tensor) -> None:
    *modules, name = path.split(".")
    for part in modules:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    if hasattr(root, name):
        raise PassError(f"the model already has a tensor named {path}")
    root.register_buffer(name, tensor)


def _joined_node(root: fx.GraphModule, names: Sequence[str]) -> fx.Node:
    """A new `get_attr` of the joined tensor, before everything that is computed."""
    tensors = [get_tensor(root, name) for name in names]
    sources = [node for node in root.graph.nodes if node.op == "get_attr" and node.target in names]
    path = _joined_name(names)
    _register(root, path, join(tensors))
    with root.graph.inserting_before(sources[0]):
        node = root.graph.create_node("get_attr", path)
    value = sources[0].meta["val"]
    node.meta["val"] = value.new_empty((sum(tensor.shape[0] for tensor in tensors), *value.shape[1:]))
    return node


def _merge_call(graph: fx.Graph, group: _Group, weight: fx.Node, bias: fx.Node | None) -> None:
    """Replace one group of calls by one product and its slices."""
    first = group.nodes[0]
    source = first.args[0]
    assert isinstance(source, fx.Node)
    arguments = (source, weight) if bias is None else (source, weight, bias)
    rows = [node.meta["val"].shape[-1] for node in group.nodes]
    value = first.meta["val"]
    with graph.inserting_before(first):
        merged = graph.call_function(aten.linear.default, arguments)
        merged.meta = {**first.meta, "pass": MergeLinears.name}
        merged.meta["val"] = value.new_empty((*value.shape[:-1], sum(rows)))
        at = 0
        for node, size in zip(group.nodes, rows, strict=True):
            part = graph.call_function(aten.slice.Tensor, (merged, -1, at, at + size))
            part.meta = {**node.meta, "pass": MergeLinears.name}
            part.meta["val"] = merged.meta["val"][..., at : at + size]
            node.replace_all_uses_with(part)
            at += size
    for node in group.nodes:
        graph.erase_node(node)


def _forget_strides(graph: fx.Graph) -> None:
    """`view` asks for strides that a slice need not have; `reshape` is the same wherever `view` is allowed."""
    for node in graph.nodes:
        if is_call(node, aten.view.default):
            node.target = aten.reshape.default


class MergeLinears(Pass):
    """Fills `compilation.merged` and `compilation.left_alone`; off unless `options.merge_linears`."""

    name = "merge_linears"

    def run(self, compilation: Compilation) -> dict[str, int]:
        if compilation.options.merge_linears:
            judge = _Judge(compilation)
            for calls in list(self._decide(compilation, judge)):
                self._merge(compilation, judge, calls)
            if compilation.merged:
                _forget_strides(compilation.graph.graph)
                compilation.graph.graph.eliminate_dead_code()
                compilation.graph.recompile()
        return {
            "layers": sum(len(merged.parts) for merged in compilation.merged),
            "into": len(compilation.merged),
            "left_alone": sum(len(left.weights) for left in compilation.left_alone),
        }

    def _decide(self, compilation: Compilation, judge: _Judge) -> Iterator[list[_Group]]:
        """The calls of every set of layers that can be merged; the others are noted with the reason."""
        compilation.left_alone += [*_computed(compilation.graph.graph), *_opened(compilation)]
        sets: dict[tuple[object, ...], list[_Group]] = {}
        for group in _groups(compilation.graph.graph):
            sets.setdefault((group.weights, group.biases), []).append(group)
        for calls in sets.values():
            reason = judge.why_not(calls)
            if reason:
                compilation.left_alone.append(LeftAlone(tuple(dict.fromkeys(calls[0].weights)), reason))
            else:
                yield calls

    def _merge(self, compilation: Compilation, judge: _Judge, calls: list[_Group]) -> None:
        group, root = calls[0], compilation.graph
        twice = judge.held_twice(group)
        biases = [name for name in group.biases if name is not None]
        try:
            weight = _joined_node(root, group.weights)
            bias = _joined_node(root, biases) if biases else None
        except torch.OutOfMemoryError:
            compilation.left_alone.append(LeftAlone(group.weights, "there was no memory to join them"))
            return
        for call in calls:
            _merge_call(root.graph, call, weight, bias)
        compilation.merged.append(MergedLinears(group.weights, str(weight.target), len(calls), twice))

    def ensure(self, compilation: Compilation) -> None:
        """Every parameter is still a slice of the weight that is read in its place."""
        for merged in compilation.merged:
            joined, at = get_tensor(compilation.graph, merged.weight), 0
            for name in merged.parts:
                part = get_tensor(compilation.graph, name)
                if part.data_ptr() != joined[at].data_ptr():
                    raise PassError(f"{name} is no slice of {merged.weight}")
                at += part.shape[0]
