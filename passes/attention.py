"""Put our own attention function under a Hugging Face model, for the length of a `with` block.

transformers looks the attention function up by name at every call (`AttentionInterface`), and the mask function by
the same name (`AttentionMaskInterface`). We register a function under a private name, point every config of the model
at it, and take both back on leaving. The model itself is not touched.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_serial = itertools.count()


def _configs(model: nn.Module) -> list[Any]:
    """Every distinct config object that a module of the model reads its attention implementation from."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


@contextmanager
def attention_override(
    model: nn.Module, attention: Callable[..., Any], mask: Callable[..., Any] | None = None
) -> Iterator[None]:
    """Within the block, every attention call of `model` runs `attention` (and `mask` builds its masks).

    `attention(module, query, key, value, attention_mask, **kwargs)` follows transformers' convention: query
    `[batch, heads, queries, dim]`, result `([batch, queries, heads, dim], weights or None)`. Without `mask`,
    transformers builds no mask at all and passes None.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    name = f"sparse_compile_{next(_serial)}"
    AttentionInterface.register(name, attention)
    if mask is not None:
        AttentionMaskInterface.register(name, mask)
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    try:
        for config, _ in before:
            config._attn_implementation_internal = name
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        AttentionInterface._global_mapping.pop(name, None)
        AttentionMaskInterface._global_mapping.pop(name, None)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within the block the model is in eval mode and no gradient is recorded; every module's flag is restored."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
