"""KV slots of a looped model in a transformers cache."""

from __future__ import annotations

import copy

from transformers.cache_utils import Cache


def ensure_slots(cache: Cache, slots: int) -> None:
    """Grows an empty cache to one slot per (loop, layer), in place.

    transformers sizes a cache by ``config.num_hidden_layers``, the layers that own weights. All slots of Ouro
    have one shape, so the missing ones are copies of the first. This works for every cache class that keeps a
    list of layers (dynamic, static, quantized, offloaded), without a second meaning for
    ``num_hidden_layers``. A cache that adds its layers as they are used needs nothing.

    Raises:
        ValueError: when the cache already holds tokens and has too few slots: another model or another
            ``total_ut_steps`` filled it.
    """
    if len(cache.layers) >= slots or cache.layer_class_to_replicate is not None:
        return
    if len(cache.layers) == 0 or int(cache.get_seq_length()) > 0:
        raise ValueError(
            f"the cache has {len(cache.layers)} slots and {int(cache.get_seq_length())} tokens, but this "
            f"model needs {slots} slots (total_ut_steps x num_hidden_layers). Pass a fresh cache made from "
            "this model's config."
        )
    first = cache.layers[0]
    cache.layers.extend(copy.deepcopy(first) for _ in range(slots - len(cache.layers)))
