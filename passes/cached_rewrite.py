"""Attention calls into ops, in place.

    o = sdpa(q, k, v, attn_mask=m)
    ...
    p = sdpa(q', k', v', attn_mask=m)

becomes, with a capture in the first call,

    table, length, row, slot = visible_keys(m[:, 0, 0].expand(B, S))
    o, *held = cached_capture(q[:, :, 0], k, v, table, length, row, None, slot, ...)
    ...
    p = cached_consume(q'[:, :, 0], k', v', table, length, row, None, slot, *held, ...)

Calls under one mask share one table. Sliding-window calls keep what they are. What capture hands to consume are values
of the graph: nothing is stored, and no pass of a compiler can part the two.
"""

from __future__ import annotations

import operator
from collections import Counter
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from ..kernels import ops as _registered  # noqa: F401  registers torch.ops.sparse_compile
from .base import Compilation, Options, Pass
from .errors import PassError
from .masks import build_bias, build_visible, seen_key
from .nodes import fake
from .program import Site
from .rewrite import always_kept
from .values import Values, is_pure

if TYPE_CHECKING:
    from .calls import AttentionCall

_ops = torch.ops.sparse_compile
OPS = {
    "dense": _ops.cached_dense.default,
    "capture": _ops.cached_capture.default,
    "consume": _ops.cached_consume.default,
}
HELD = 5
"""How many values a capture hands to its consumes."""


class RewriteCalls(Pass):
    """Replaces every call whose site has no window."""

    name = "rewrite_calls"

    def run(self, compilation: Compilation) -> dict[str, int]:
        calls: tuple[AttentionCall, ...] = compilation.calls  # type: ignore[attr-defined]
        rewriter = _Rewriter(compilation.graph.graph, compilation.options)
        for site, call in zip(compilation.sites, calls, strict=True):
            if not site.window:
                rewriter.replace(site, call)
        return dict(rewriter.counts)

    def ensure(self, compilation: Compilation) -> None:
        left = set(compilation.graph.graph.nodes)
        for site, marker in zip(compilation.sites, compilation.markers, strict=True):
            if (marker in left) != bool(site.window):
                raise PassError(
                    f"{site.name} was to be {'kept' if site.window else 'rewritten'}, and was not"
                )


def _fake_result(node: fx.Node, like: torch.Tensor) -> Any:
    """What a new node gives for the fake values of its inputs; compilers' caches want it on every node."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta.get("example_value"))
    with getattr(like, "fake_mode", nullcontext()):
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]


class _Rewriter:
    def __init__(self, graph: fx.Graph, options: Options) -> None:
        self.graph, self.options = graph, options
        self.values = Values(graph)  # of the graph as it was; new nodes write nothing
        self.counts: Counter[str] = Counter(dense=0, capture=0, consume=0)
        self.tables: dict[Any, tuple[fx.Node, ...]] = {}
        self.held: dict[str, tuple[fx.Node, ...]] = {}
        self.captured_by: dict[str, tuple[fx.Node, ...]] = {}

    def replace(self, site: Site, call: AttentionCall) -> None:
        before = set(self.graph.nodes)
        with self.graph.inserting_before(call.node):
            rows, keys = self._sizes(call)
            table, length, row, slot = plan = self._plan(site, call, rows, keys)
            bias = build_bias(self.graph, call.mask, table, rows, keys)
            query = self.graph.call_function(operator.getitem, (call.query, (slice(None), slice(None), 0)))
            arguments: list[Any] = [query, call.key, call.value, table, length, row, bias]
            out = self._op(site, arguments, self._sink(call, rows), slot)
            out = self.graph.call_method("unsqueeze", (out, 2))
        for node in self.graph.nodes:
            if node not in before:
                node.meta = {**call.node.meta, "pass": "rewrite_calls", "site": site.name}
                node.meta["example_value"] = _fake_result(node, fake(call.query))
        call.node.replace_all_uses_with(out)
        if site.kind == "capture":
            self.captured_by[site.layer] = plan
        self._erase(call)
        self.counts[site.kind] += 1

    def _sink(self, call: AttentionCall, rows: Any) -> fx.Node | None:
        """[B, H], or None."""
        if call.sink is None:
            return None
        flat = self.graph.call_function(operator.getitem, (call.sink, (slice(None), slice(None), 0, 0)))
        return self.graph.call_method("expand", (flat, rows, fake(call.query).shape[1]))

    def _op(self, site: Site, arguments: list[Any], sink: fx.Node | None, slot: fx.Node) -> fx.Node:
        keywords: dict[str, Any] = {"scale": site.scale, "softcap": site.softcap}
        keywords["implementation"] = self.options.implementation
        if site.kind == "dense":
            return self.graph.call_function(OPS["dense"], (*arguments, sink), keywords)
        if site.kind == "consume":
            return self.graph.call_function(
                OPS["consume"], (*arguments, slot, *self.held[site.layer]), keywords
            )
        share = site.retention
        keywords |= {"retention_num": share.numerator, "retention_den": share.denominator}
        keywords |= always_kept(share)
        made = self.graph.call_function(OPS["capture"], (*arguments, sink, slot), keywords)
        out, *held = (self._item(made, place) for place in range(1 + HELD))
        self.held[site.layer] = tuple(held)
        return out

    def _item(self, node: fx.Node, place: int) -> fx.Node:
        return self.graph.call_function(operator.getitem, (node, place))

    def _sizes(self, call: AttentionCall) -> tuple[Any, Any]:
        """Batch and cache length: numbers where the graph fixes them, nodes where it does not."""
        query, key = fake(call.query), fake(call.key)
        rows = query.shape[0] if isinstance(query.shape[0], int) else self._size(call.query, 0)
        keys = key.shape[2] if isinstance(key.shape[2], int) else self._size(call.key, 2)
        return rows, keys

    def _size(self, node: fx.Node, dim: int) -> fx.Node:
        return self.graph.call_method("size", (node, dim))

    def _plan(self, site: Site, call: AttentionCall, rows: Any, keys: Any) -> tuple[fx.Node, ...]:
        """Table, lengths, rows and slots: those of the capture for a consume, which reads keys by its numbers."""
        if site.kind == "consume":
            return self.captured_by[site.layer]
        key = (
            seen_key(call.mask, self.values, call.node),
            str(fake(call.query).shape[0]),
            str(fake(call.key).shape[2]),
        )
        if key not in self.tables:
            visible = build_visible(self.graph, call.mask, rows, keys, fake(call.query).device)
            made = self.graph.call_function(_ops.visible_keys.default, (visible,))
            self.tables[key] = tuple(self._item(made, place) for place in range(4))
        return self.tables[key]

    def _erase(self, call: AttentionCall) -> None:
        """What only the old call needed, copies of repeated heads and masks of its own too; never what writes."""
        waiting = [node for node in call.covered if not node.users]
        while waiting:
            node = waiting.pop(0)
            inputs = node.all_input_nodes
            self.graph.erase_node(node)
            for source in inputs:
                if not source.users and source not in waiting and (source in call.covered or is_pure(source)):
                    waiting.append(source)
