"""FlexAttention calls, whose mask is a function of indices, by blocks.

    out, lse, max = flex_attention(q, k, v, score_mod, (.., kv_num_blocks, kv_indices, .., mask_mod), scale, ..)

A key is seen if its block is listed as full, or listed as partial and `mask_mod(b, h, q, kv)` is true. The function is
copied into the graph with vectors of indices in the place of single ones, which is the same for what works element by
element; any other operation in it is a reason to leave the call alone.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from .calls import Found, Unmatched, read_call
from .nodes import fake_maybe, number_maybe, operation
from .values import Values

_ELEMENTWISE = {
    "add", "sub", "mul", "neg", "abs", "le", "lt", "ge", "gt", "eq", "ne", "and_", "or_", "xor", "invert", "__and__",
    "__or__", "logical_and", "logical_or", "logical_not", "bitwise_and", "bitwise_or", "bitwise_not", "floordiv", "mod",
    "where", "cast", "remainder", "floor_divide", "isub", "minimum", "maximum", "clamp",
}  # fmt: skip
_BLOCKS = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
_KV_BLOCK = -2
"""Place of the block size of keys in the block mask; its mask function comes last."""


@dataclass(frozen=True)
class FlexTerm:
    """A mask of FlexAttention.

    code, buffers: the mask function and what it reads beside the indices; function: its graph.
    blocks: number and indices of partial blocks, then of full ones; each [B or 1, 1, 1(, n)] or None.
    """

    code: str
    buffers: tuple[Any, ...]
    blocks: tuple[Any, ...]
    block_size: int
    function: fx.Graph = field(repr=False)
    kind: str = "visible"

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        return tuple(one for one in (*self.buffers, *self.blocks) if isinstance(one, fx.Node))

    def build(self, graph: fx.Graph, rows: Any, keys: Any, device: torch.device) -> fx.Node:
        """bool [rows, keys] at the graph's insertion point."""
        by_index = self._by_index(graph, rows, keys, device)
        partial = self._listed(graph, self.blocks[:2], keys)
        seen = graph.call_function(torch.logical_and, (by_index, partial))
        if self.blocks[2] is not None:
            seen = graph.call_function(torch.logical_or, (seen, self._listed(graph, self.blocks[2:], keys)))
        return graph.call_method("expand", (seen, rows, keys))

    def key(self, values: Values, at: fx.Node) -> Any:
        """The text of the function, and the values that it and the block lists read."""
        return self.code, values.key(self.buffers, at), values.key(self.blocks, at), self.block_size

    def _by_index(self, graph: fx.Graph, rows: Any, keys: Any, device: torch.device) -> fx.Node:
        def arange(count: Any, place: int) -> fx.Node:
            made = graph.call_function(torch.arange, (count,), {"device": device})
            return graph.call_method("unsqueeze", (made, place))

        zero = graph.call_function(torch.zeros, ((1, 1),), {"dtype": torch.int64, "device": device})
        values = [arange(rows, 1), zero, zero, arange(keys, 0), *self.buffers]
        known: dict[fx.Node, Any] = {}
        given = iter(values)
        for node in self.function.nodes:
            if node.op == "placeholder":
                known[node] = next(given)
            elif node.op == "output":
                return known[node.args[0]]
            else:
                known[node] = graph.node_copy(node, lambda source: known[source])
        raise AssertionError("a mask function without an output")

    def _listed(self, graph: fx.Graph, blocks: tuple[Any, ...], keys: Any) -> fx.Node:
        """bool [B or 1, keys]: whether a key's block is among those of a block list."""
        return graph.call_function(keys_in_blocks, (*blocks, keys, self.block_size))


def keys_in_blocks(number: torch.Tensor, indices: torch.Tensor, keys: int, size: int) -> torch.Tensor:
    """number [B, 1, 1], indices [B, 1, 1, n] -> bool [B, keys]; a block has `size` keys."""
    listed = indices[:, 0, 0]  # [B, n]
    live = torch.arange(listed.shape[1], device=listed.device) < number[:, 0]  # [B, n]
    block = torch.arange(keys, device=listed.device) // size
    return ((listed[:, :, None] == block) & live[:, :, None]).any(1)


def read_flex(node: fx.Node, values: Values) -> Found | None:
    """A call of the higher-order operator; its first result is the attention's."""
    if operation(node) != "flex_attention":
        return None
    query, key, value, score_mod, block_mask, scale = node.args[:6]
    results = [user for user in node.users if user.target is operator.getitem]
    outputs = [user for user in results if user.args[1] == 0]
    if len(outputs) != 1 or any(user.users for user in results if user.args[1] != 0):
        return Unmatched(node, "more than its first result is used")
    root = node.graph.owning_module
    changed = _function(root, score_mod)
    if changed is None or changed.output_node().args[0] is not next(iter(changed.nodes)):
        return Unmatched(node, "its score_mod changes the scores")
    term = _mask_term(root, block_mask, node.args[8] if len(node.args) > 8 else ())
    if isinstance(term, str):
        return Unmatched(node, term)
    if (scale := number_maybe(scale)) is None:
        return Unmatched(node, "its scale is computed in the graph")
    covered = (*results, node)
    return read_call(values, outputs[0], "flex", query, key, value, (term,), False, scale, 0.0, covered)  # type: ignore[arg-type]


def _function(root: Any, node: Any) -> fx.Graph | None:
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    found = getattr(root, str(node.target), None)
    return found.graph if isinstance(found, fx.GraphModule) else None


def _mask_term(root: Any, block_mask: Any, buffers: Any) -> FlexTerm | str:
    function = _function(root, block_mask[-1])
    if function is None:
        return "its mask function is not in the graph"
    for node in function.nodes:
        if node.op in ("call_function", "call_method") and not _element_by_element(node):
            return f"its mask function uses {node.target}, which may not work element by element"
    blocks = tuple(block_mask[2:6])
    for name, one in zip(_BLOCKS, blocks, strict=True):
        value = fake_maybe(one)
        if value is None and (one is not None or not name.startswith("full")):
            return f"{name} of its block mask is no tensor of the graph"
        if value is not None and value.shape[1] != 1:
            return "its mask hides other keys from each head"
    code = "\n".join(f"{node.op} {node.target} {node.args} {node.kwargs}" for node in function.nodes)
    return FlexTerm(code, tuple(buffers), blocks, int(block_mask[_KV_BLOCK]), function)


def _element_by_element(node: fx.Node) -> bool:
    name = operation(node)
    if name in ("new_ones", "new_zeros", "new_full"):
        return node.args[1] in ((), [])
    if name == "getitem":  # a look-up by index tensors; a slice would cut the vector of indices
        at = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        return isinstance(node.args[0], fx.Node) and all(isinstance(one, fx.Node | int) for one in at)
    return name in _ELEMENTWISE
