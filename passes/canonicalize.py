"""Drop what says nothing at inference time, so that equal loop bodies are equal node by node.

%a : aten._assert_tensor_metadata(%x)          (gone)
%y : aten.to.dtype(%x, float32)  x is float32   -> %x
%z : aten.slice.Tensor(%y, 0, 0, max)           -> %x
%w : aten.dropout(%z, 0.1, False)               -> %x
"""

from __future__ import annotations

import sys

import torch
from torch import fx

from .base import Compilation, Pass
from .graph import is_call

aten = torch.ops.aten
_ASSERTS = {
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range_for_size.default,
    aten.sym_constrain_range.default,
}
_IDENTITIES = {aten.alias.default, aten.detach.default, aten.detach_.default, aten.lift_fresh_copy.default}


def _same_value(node: fx.Node) -> fx.Node | None:
    """The node that this one merely repeats, if any."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    source, rest = node.args[0], node.args[1:]
    if node.target in _IDENTITIES:
        return source
    if node.target is aten.dropout.default:
        return None if rest[1] else source
    if node.target is aten.slice.Tensor:
        start, end = (rest[1] if len(rest) > 1 else None), (rest[2] if len(rest) > 2 else None)
        step = rest[3] if len(rest) > 3 else 1
        return source if start in (None, 0) and end in (None, sys.maxsize) and step == 1 else None
    if node.target in (aten.to.dtype, aten._to_copy.default, aten.type_as.default, aten.contiguous.default):
        return source if _same_layout(node, source) else None
    return None


def _same_layout(node: fx.Node, source: fx.Node) -> bool:
    a, b = node.meta.get("val"), source.meta.get("val")
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return False
    return (
        a.dtype == b.dtype
        and a.device == b.device
        and (a.stride() == b.stride() or node.target is not aten.contiguous.default)
    )


class Canonicalize(Pass):
    name = "canonicalize"

    def run(self, compilation: Compilation) -> dict[str, int]:
        graph = compilation.graph.graph
        counters = {"asserts": 0, "identities": 0, "shapes": 0, "nodes": 0}
        shapes: dict[tuple[fx.Node, int], fx.Node] = {}
        for node in list(graph.nodes):
            if node.op == "call_function" and node.target in _ASSERTS:
                graph.erase_node(node)
                counters["asserts"] += 1
                continue
            replacement, counter = _same_value(node), "identities"
            if is_call(node, aten.sym_size.int):
                known = shapes.setdefault((node.args[0], node.args[1]), node)
                replacement, counter = (known if known is not node else None), "shapes"
            if replacement is not None:
                node.replace_all_uses_with(replacement)
                graph.erase_node(node)
                counters[counter] += 1
        graph.eliminate_dead_code()
        compilation.graph.recompile()
        counters["nodes"] = len(graph.nodes)
        return counters
