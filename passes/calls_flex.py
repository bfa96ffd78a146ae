"""FlexAttention calls, whose mask is a function of indices."""

from __future__ import annotations

from torch import fx

from .calls import Found, Unmatched


def read_flex(node: fx.Node) -> Found | None:
    if "flex_attention" not in str(node.target):
        return None
    return Unmatched(node, "flex attention is not read yet")
