"""Looped models of other shapes than those of this package and of transformers, small and random.

RemoteOuro   as Ouro's published remote code: attention gets `current_ut`, and a cache class of its own finds the slot
Huginn       prelude, core x r with the input injected into a random initial state, coda
FixedHuginn  the same from a state of zeros
"""

from __future__ import annotations

from typing import Any

import torch
from looped_models import LoopedConfig, LoopedModel, RotaryInsideAttention
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutputWithPast


class UniversalCache:
    """One growing pair of tensors per (loop, layer), as the remote code keeps them."""

    def __init__(self) -> None:
        self.key_cache: list[Tensor | None] = []
        self.value_cache: list[Tensor | None] = []

    def get_seq_length(self) -> int:
        return self.key_cache[0].shape[2] if self.key_cache and self.key_cache[0] is not None else 0

    def update(self, k: Tensor, v: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        while len(self.key_cache) <= slot:
            self.key_cache.append(None)
            self.value_cache.append(None)
        old_k, old_v = self.key_cache[slot], self.value_cache[slot]
        if old_k is not None and old_v is not None:
            k, v = torch.cat([old_k, k], dim=2), torch.cat([old_v, v], dim=2)
        self.key_cache[slot], self.value_cache[slot] = k, v
        return k, v


class RemoteAttention(RotaryInsideAttention):
    def forward(self, x: Tensor, current_ut: int = 0, **arguments: Any) -> Tensor:
        arguments["slot"] = current_ut * self.config.num_hidden_layers + self.layer_idx
        return super().forward(x, **arguments)


class RemoteOuro(LoopedModel):
    attention = RemoteAttention

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        cache = past_key_values
        if use_cache and not isinstance(cache, UniversalCache):
            cache = UniversalCache()
        if position_ids is None:
            position_ids = self.positions(input_ids, cache.get_seq_length() if cache is not None else 0)[None]
        x = self.embed(input_ids)
        for loop in range(self.config.loops):
            for layer in self.layers:
                x = x + layer(
                    self.norm(x), current_ut=loop, mask=None, position_ids=position_ids, cache=cache
                )
            x = self.norm(x)
        return CausalLMOutputWithPast(logits=self.head(x), past_key_values=cache)


class Huginn(LoopedModel):
    """`loops` core passes of `num_hidden_layers` - 2 layers between one prelude and one coda layer."""

    attention = RotaryInsideAttention

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.adapter = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.post_init()

    @staticmethod
    def initial(injected: Tensor) -> Tensor:
        return torch.randn_like(injected)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        cache = self.cache(cache, use_cache)
        if position_ids is None:
            position_ids = self.positions(input_ids, cache.get_seq_length() if cache is not None else 0)[None]
        x = self.embed(input_ids)
        mask = self.mask(x, attention_mask, cache, position_ids)
        arguments = {"mask": mask, "position_ids": position_ids, "cache": cache}
        prelude, *core, coda = self.layers
        injected = x + prelude(self.norm(x), slot=0, **arguments)
        state = self.initial(injected)
        for loop in range(self.config.loops):
            state = self.adapter(torch.cat([state, injected], dim=-1))
            for number, layer in enumerate(core):
                state = state + layer(self.norm(state), slot=1 + loop * len(core) + number, **arguments)
        state = state + coda(self.norm(state), slot=1 + self.config.loops * len(core), **arguments)
        return CausalLMOutputWithPast(logits=self.head(self.norm(state)), cache=cache)


class FixedHuginn(Huginn):
    """The state begins as it is given, so that a token has the same state each time."""

    @staticmethod
    def initial(injected: Tensor) -> Tensor:
        return torch.zeros_like(injected)
