"""transformers' continuous batching (5.24 and later) over a looped model, driven step by step.

transformers sizes its paged cache by the layers that own weights and asks models to hand their keyword arguments to the
cache. Ouro has a slot per loop and layer and does not know that cache, so the two are brought together here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import RequestState, RequestStatus
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.systems import Point, Setup, free_memory
from sparse_compile.models.ouro import layers
from sparse_compile.models.ouro.rotary import apply_rotary

PAGE = 256
LEAST_VERSION = Version("5.24")  # from here on its attention functions leave the cache to the model
IS_SUPPORTED = Version(transformers.__version__) >= LEAST_VERSION


def _paged_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor | None = None,
    cache: Any = None,
    slot_offset: int = 0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """OuroAttention.forward that hands its keyword arguments to the cache."""
    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    query, key, value = (
        projection(hidden_states).view(shape).transpose(1, 2)
        for projection in (self.q_proj, self.k_proj, self.v_proj)
    )
    query, key = apply_rotary(query, key, *position_embeddings)
    key, value = cache.update(key, value, slot_offset + self.layer_idx, kwargs=kwargs)
    attend = ALL_ATTENTION_FUNCTIONS.get_interface(
        self.config._attn_implementation, layers.eager_attention_forward
    )
    output, _ = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **kwargs)
    return self.o_proj(output.reshape(*hidden_states.shape[:-1], -1)), None


@contextmanager
def looped_paged_cache(model: Any) -> Iterator[None]:
    """Within the block transformers' paged cache holds a slot per loop and layer of `model`, and Ouro uses it."""
    if not IS_SUPPORTED:
        raise RuntimeError(f"needs transformers {LEAST_VERSION}, found {transformers.__version__}")
    forward, slots = layers.OuroAttention.forward, model.config.num_slots
    init = PagedAttentionCache.__init__

    def sized(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        layer_count, config.num_hidden_layers = config.num_hidden_layers, slots
        types, config.layer_types = getattr(config, "layer_types", None), None
        try:
            init(self, config, *args, **kwargs)
        finally:
            config.num_hidden_layers, config.layer_types = layer_count, types
        self.layers = range(slots)  # what Ouro counts

    layers.OuroAttention.forward = _paged_forward  # type: ignore[method-assign,assignment]
    PagedAttentionCache.__init__ = sized  # type: ignore[method-assign]
    try:
        yield
    finally:
        layers.OuroAttention.forward = forward  # type: ignore[method-assign]
        PagedAttentionCache.__init__ = init  # type: ignore[method-assign]


def batching_config(tokens: int, batch: int) -> ContinuousBatchingConfig:
    """A cache for `batch` sequences of `tokens` tokens, with room to spare for its safety margin."""
    blocks = -(-tokens // PAGE) * batch
    return ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=blocks + max(4, blocks // 4),
        max_batch_tokens=max(batch, 512),
        max_requests_per_batch=batch,
        allow_block_sharing=False,
        auto_switch_to_flash=find_spec("flash_attn")
        is not None,  # else transformers would look for it on a network
    )


class TransformersContinuous:
    """One batch of requests that are made to have their prompts behind them, over a cache of random numbers."""

    def __init__(self, setup: Setup, point: Point) -> None:
        self.model = setup.model
        self.scope = looped_paged_cache(self.model)
        self.scope.__enter__()
        self.implementation = self.model.config._attn_implementation
        total = point.context + setup.room
        self.manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(
                max_new_tokens=setup.room, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=batching_config(total, point.batch),
        )
        with torch.no_grad():
            self.processor = self.manager._create_batch_processor()
        self.manager.batch_processor = self.processor
        for part in self.processor.cache.cache_tensor.view(self.model.dtype).split(2**28):
            part.normal_()
        for row in range(point.batch):
            self._start(f"row-{row}", point, setup)
        self._behind = self.processor.use_async_batching

    def _start(self, name: str, point: Point, setup: Setup) -> None:
        """A request that has `context` tokens in the cache and its first new token to process."""
        prompt = torch.randint(3, setup.vocabulary, (point.context,)).tolist()
        state = RequestState(name, prompt, max_new_tokens=setup.room)
        if not self.processor.cache.can_store_request_tokens(state, point.context):
            raise RuntimeError(f"the paged cache has no room for {name} of {point}")
        state.status = RequestStatus.DECODING
        state.position_offset = point.context
        state.remaining_prefill_tokens, state.tokens_to_process = [], prompt[-1:]
        state.generated_tokens = prompt[-1:]
        self.processor.scheduler.active_requests[name] = state

    @torch.no_grad()
    def step(self) -> None:
        if not self.processor.prepare_next_batch():
            raise RuntimeError("no request of the batch is left")
        self.processor._generation_step(self.model)
        if self._behind:  # the first step of asynchronous batching has nothing to read yet
            self._behind = False
        else:
            self.processor.update_batch()

    def close(self) -> None:
        self.model.set_attn_implementation(self.implementation)
        self.scope.__exit__(None, None, None)
        self.processor.cache.cache_tensor = None
        self.processor = self.manager = None
        free_memory()
