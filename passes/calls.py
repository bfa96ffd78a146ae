"""The attention calls of a graph from Dynamo, in whatever form the model wrote them.

    o = scaled_dot_product_attention(q, k, v, attn_mask=m, scale=s)     "sdpa"
    o = softmax(q @ k.transpose(2, 3) * s + m) @ v                      "eager"
    o = flex_attention(q, k, v, score_mod, block_mask, s, ...)          "flex"

Finding changes nothing. Which calls are rewritten is for `cached` to say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from .masks import Mask, is_zeros, read_mask
from .nodes import argument, cache_inputs, fake, fake_maybe, made_here, number_maybe, operation, unrepeated
from .values import Values


@dataclass(frozen=True)
class AttentionCall:
    """One attention call that was understood.

    Attributes:
        node: its result, [B, H, Q, D].
        form: how it was written.
        query, key, value: [B, H, Q, D] and [B, Hkv, S, D], before KV heads were repeated.
        mask: which keys a query sees.
        scale, softcap: of the scores; softcap 0.0 means none.
        covered: the nodes that a rewrite makes superfluous, latest first.
        sink: [B, H, 1, 1], a score that takes part in the softmax and has no value; or None.
    """

    node: fx.Node
    form: str
    query: fx.Node
    key: fx.Node
    value: fx.Node
    mask: Mask
    scale: float
    softcap: float
    covered: tuple[fx.Node, ...]
    sink: fx.Node | None = None

    @property
    def single(self) -> bool:
        """Whether it has one query, whatever the batch: a decode step."""
        return _is_one(fake(self.query).shape[2])

    @property
    def fresh(self) -> bool:
        """Whether its keys are those of this graph's own tokens alone: there is no past to choose from."""
        return _is_one(fake(self.key).shape[2]) or (made_here(self.key) and not cache_inputs(self.key))


def _is_one(size: Any) -> bool:
    """Without a guard on a symbolic size, which is never one: torch.compile specialises on 1."""
    return isinstance(size, int) and size == 1


@dataclass(frozen=True)
class Unmatched:
    """A node that looks like attention and was not understood, with the reason in one clause."""

    node: fx.Node
    reason: str


Found = AttentionCall | Unmatched
Reader = Callable[[fx.Node, Values], Found | None]


def find_calls(graph: fx.Graph) -> Iterator[Found]:
    """Every attention call and every node that looks like one, in graph order."""
    from .calls_eager import read_softmax
    from .calls_flex import read_flex

    readers: tuple[Reader, ...] = (read_sdpa, read_flex, read_softmax, read_stranger)
    values = Values(graph)
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        found = next((result for reader in readers if (result := reader(node, values)) is not None), None)
        if found is not None:
            yield found


def read_sdpa(node: fx.Node, values: Values) -> Found | None:
    if operation(node) != "sdpa":
        return None
    query, key, value = (argument(node, place, name) for place, name in enumerate(("query", "key", "value")))
    dropout, causal = argument(node, 4, "dropout_p", 0.0), argument(node, 5, "is_causal", False)
    scale = argument(node, 6, "scale")
    if number_maybe(dropout) != 0:
        return Unmatched(node, f"dropout_p={dropout} makes it random")
    if scale is not None and (scale := number_maybe(scale)) is None:
        return Unmatched(node, "its scale is computed in the graph")
    masks = (argument(node, 3, "attn_mask"),)
    return read_call(values, node, "sdpa", query, key, value, masks, bool(causal), scale, 0.0, (node,))


def read_call(
    values: Values,
    node: fx.Node,
    form: str,
    query: fx.Node,
    key: fx.Node,
    value: fx.Node,
    masks: tuple[Any, ...],
    causal: bool,
    scale: float | None,
    softcap: float,
    covered: tuple[fx.Node, ...],
    sink: fx.Node | None = None,
) -> Found:
    """What all forms have in common: shapes, grouped heads, the mask.

    A causal call of one query that sees more than one key would see the first alone (torch aligns to the upper left).
    """
    if any(fake_maybe(x) is None or fake(x).dim() != 4 for x in (query, key, value)):
        return Unmatched(node, "its query, key and value are not [batch, heads, tokens, dim]")
    key, value = unrepeated(key), unrepeated(value)
    q, k, v = fake(query), fake(key), fake(value)
    if k.shape != v.shape or q.shape[3] != k.shape[3]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        return Unmatched(node, f"queries, keys and values do not fit together in size: {shapes}")
    if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1]:
        return Unmatched(
            node, f"{q.shape[1]} query heads on {k.shape[1]} KV heads in batches of {k.shape[0]}"
        )
    if not q.dtype == k.dtype == v.dtype:
        return Unmatched(node, f"queries are {q.dtype}, keys {k.dtype}, values {v.dtype}")
    if fake(node).dtype != q.dtype:
        return Unmatched(
            node, f"autocast computes it in {fake(node).dtype}; give the model that dtype instead"
        )
    read = read_mask(values, node, *masks)
    if isinstance(read, str):
        return Unmatched(node, read)
    if causal and _is_one(q.shape[2]) and not _is_one(k.shape[2]):
        return Unmatched(
            node, "is_causal with one query sees the first key alone; pass a mask or is_causal=False"
        )
    size = float(scale) if scale is not None else float(q.shape[3]) ** -0.5
    call = AttentionCall(node, form, query, key, value, read, size, softcap, covered, sink)
    changed = _changed_maybe(call, values)
    if changed is not None:
        return Unmatched(node, f"{changed.name}, which it reads, is written to before it is done")
    return call


def _changed_maybe(call: AttentionCall, values: Values) -> fx.Node | None:
    """What a rewrite must not look through: the new ops read everything at the place of the call, where the old ones
    read it earlier, and values in between may have been written to.
    """
    read = {call.query, call.key, call.value, call.sink, *call.mask.nodes}
    since: dict[fx.Node, fx.Node] = {}  # the first node that reads each
    waiting, seen = [call.node], {call.node}
    while waiting:
        node = waiting.pop()
        if node is not call.node and not values.kept(node, node, call.node):
            return node
        for source in node.all_input_nodes:
            if source in read:
                earlier = since.get(source, node)
                since[source] = min(earlier, node, key=values.place.__getitem__)
            elif source not in seen and fake_maybe(source) is not None and not is_zeros(source):
                seen.add(source)
                waiting.append(source)
    return next((one for one, first in since.items() if not values.kept(one, first, call.node)), None)


def read_stranger(node: fx.Node, values: Values) -> Found | None:
    """A function that calls itself attention and is none of the known forms."""
    name = str(node.target).lower()
    if "attention" in name or "attn" in name:
        return Unmatched(node, f"{node.target} is no form of attention that is known")
    return None
