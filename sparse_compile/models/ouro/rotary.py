"""Rotary position embeddings whose frequencies stay in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, dynamic_rope_update

from .configuration_ouro import OuroConfig


class OuroRotaryEmbedding(nn.Module):
    """cos and sin of position * inv_freq, inv_freq_i = theta ** (-2i / D).

    The frequencies are float32 buffers outside the state dict. ``model.to(bfloat16)`` would round them (at
    position 10,000 the angle would be off by radians), so :meth:`_apply` keeps them. transformers fills
    the same two buffers again after a load through the meta device.
    """

    inv_freq: Tensor
    original_inv_freq: Tensor

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config = config
        self.rope_type: str = config.rope["rope_type"]
        self.max_seq_len_cached = config.max_position_embeddings
        self.original_max_seq_len = config.max_position_embeddings
        inv_freq, self.attention_scaling = self.frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        self.register_buffer("original_inv_freq", inv_freq.clone(), persistent=False)

    def frequencies(self, device: torch.device | None = None) -> tuple[Tensor, float]:
        """Freshly computed (float32 [D / 2], factor on cos and sin)."""
        if self.rope_type == "default":
            return self.compute_default_rope_parameters(self.config, device)
        return ROPE_INIT_FUNCTIONS[self.rope_type](self.config, device)

    @staticmethod
    def compute_default_rope_parameters(
        config: OuroConfig, device: torch.device | None = None, **kwargs: Any
    ) -> tuple[Tensor, float]:
        """The plain formula, under the name transformers looks for when it initialises buffers."""
        size = config.attention_shape[2]
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
        return 1.0 / (config.rope["rope_theta"] ** exponents), 1.0

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OuroRotaryEmbedding:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is None or new is None:
                continue
            if old.is_meta and not new.is_meta:  # to_empty(): there is no value to keep
                self._buffers[name] = self.frequencies(new.device)[0]
            elif new.dtype != torch.float32:
                self._buffers[name] = old.to(new.device)
        return self

    @torch.no_grad()
    @dynamic_rope_update  # replaces inv_freq for the rope types that depend on the length
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """position_ids int64 [B, T] -> cos, sin [B, T, D] in x's dtype. Angles are computed in float32."""
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles = torch.cat((angles, angles), dim=-1)  # [B, T, D]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return cos.to(x.dtype), sin.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """(first half, second half) -> (-second half, first half) along the last dimension."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates query [B, H, T, D] and key [B, Hkv, T, D] by cos, sin [B, T, D]."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return query * cos + rotate_half(query) * sin, key * cos + rotate_half(key) * sin
