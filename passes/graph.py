"""Helpers over FX graphs: reading nodes, and cutting a graph into pieces that run on their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.fx import config as fx_config
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module

from ..kernels import ops as _ops  # noqa: F401  registers torch.ops.sparse_compile
from ..kernels import skinny as _skinny  # noqa: F401  registers the products
from .values import is_pure

ours = torch.ops.sparse_compile
SITE = ours.site.default
PRODUCTS = {
    "linear": ours.skinny_linear.default,
    "gated": ours.skinny_gated.default,
    "add": ours.skinny_add.default,
    "rotary": ours.skinny_rotary.default,
}
"""The products of a few rows."""


@contextmanager
def lean_tracing() -> Iterator[None]:
    """Within the block torch leaves out what a trace does for readers that are not here: no node is given the source
    lines it comes from (torch 2.11 does not know the setting and records them all the same), and graphs that come and
    go write no Python code.
    """
    before = getattr(fx_config, "do_not_emit_stack_traces", False)
    try:
        fx_config.do_not_emit_stack_traces = True
        with _use_lazy_graph_module(True):
            yield
    finally:
        fx_config.do_not_emit_stack_traces = before


def lazy_module(root: nn.Module | dict[str, Any], graph: fx.Graph, name: str) -> fx.GraphModule:
    """A module of `graph` with the weights of `root`; its Python code is made when it is first called or read, which
    most of the graphs that passes make and cut up never are.
    """
    return _LazyGraphModule(root, graph, class_name=name)


def is_call(node: fx.Node, target: Any) -> bool:
    return node.op == "call_function" and node.target is target


def is_row_tensor(node: fx.Node) -> bool:
    """Whether the node's first dimension is the symbolic number of rows."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 0 and isinstance(value.shape[0], torch.SymInt)


def is_shape(node: fx.Node) -> bool:
    """Whether the node is a number computed from shapes; such nodes are recomputed in each piece."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def module_path_maybe(node: fx.Node) -> tuple[str, int] | None:
    """The innermost module that made this node and which call of it (export writes the n-th call as `path@n`)."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    key, (path, _) = list(stack.items())[-1]
    call = str(key).rpartition("@")
    return path.partition("@")[0], int(call[2]) if call[1] and call[2].isdigit() else 0


def module_path(node: fx.Node) -> tuple[str, int]:
    found = module_path_maybe(node)
    assert found is not None, f"node {node.name} carries no module path"
    return found


def free_inputs(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    """Values that `nodes` read and do not make themselves, in order of first use; weights and shapes excluded."""
    inside = set(nodes)
    found: dict[fx.Node, None] = {}
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in inside and source.op != "get_attr" and not is_shape(source):
                found.setdefault(source)
    return list(found)


def erase(graph: fx.Graph, last: fx.Node) -> None:
    """A node, and what was computed for it alone. Not left to a search for dead code: other graphs have writes."""
    waiting = [last]
    while waiting:
        node = waiting.pop()
        inputs = node.all_input_nodes
        graph.erase_node(node)
        waiting += [one for one in inputs if not one.users and is_pure(one) and one not in waiting]


class Piece:
    """Builds one stand-alone graph out of a slice of another.

    Weights are re-read by name, shape numbers are recomputed from the first row tensor among the inputs, everything
    else that comes from outside must be among `inputs`.
    """

    def __init__(self, root: fx.GraphModule, inputs: Iterable[fx.Node], name: str) -> None:
        self.root, self.name = root, name
        self.graph = fx.Graph()
        self.map: dict[fx.Node, fx.Node] = {}
        self.rows: fx.Node | None = None
        for source in inputs:
            made = self.placeholder(source.name)
            made.meta = dict(source.meta)
            self.map[source] = made
            if self.rows is None and is_row_tensor(source):
                self.rows = made
        self._rows_number: fx.Node | None = None

    def placeholder(self, name: str) -> fx.Node:
        """A new input, behind those that are there and before everything else."""
        last = next((node for node in reversed(self.graph.nodes) if node.op == "placeholder"), None)
        point = self.graph.inserting_after(last) if last is not None else self.graph.inserting_before()
        with point:
            return self.graph.placeholder(name)

    def resolve(self, node: fx.Node) -> fx.Node:
        """The piece's node for a node of the original graph."""
        if node in self.map:
            return self.map[node]
        if node.op == "get_attr":
            self.map[node] = self.graph.node_copy(node, self.resolve)
        elif is_call(node, torch.ops.aten.sym_size.int) and node.args[1] == 0 and self.rows is not None:
            if self._rows_number is None:
                self._rows_number = self.graph.call_function(torch.ops.aten.sym_size.int, (self.rows, 0))
                self._rows_number.meta = dict(node.meta)
            self.map[node] = self._rows_number
        elif is_shape(node):
            self.map[node] = self.graph.node_copy(node, self.resolve)
        else:
            raise AssertionError(f"{self.name}: {node.name} comes from outside and is no input")
        return self.map[node]

    def copy(self, node: fx.Node) -> fx.Node:
        made = self.graph.node_copy(node, self.resolve)
        self.map[node] = made
        return made

    def finish(self, outputs: Sequence[fx.Node]) -> fx.GraphModule:
        self.graph.output(tuple(self.resolve(node) for node in outputs))
        self.graph.eliminate_dead_code()
        module = lazy_module(self.root, self.graph, self.name)
        module.graph.lint()
        return module
