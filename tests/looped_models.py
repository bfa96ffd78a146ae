"""Small looped models in transformers style whose attention modules take their arguments as different generations of
transformers did. All variants have the same parameters, so one state dict fits them all.

    RotaryInside     attention takes `position_ids` and computes cos and sin itself
    CachePositions   attention takes `position_embeddings`, the cache and `cache_position`
    OldNames         like RotaryInside, with the cache under its old name, of a class of its own
    OwnSoftmax       OldNames with the softmax written out: nothing goes through the attention interface
    OldCalls         OwnSoftmax that also calls what the installed transformers no longer has
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sparse_compile.models.ouro.cache import ensure_slots


class LoopedConfig(PreTrainedConfig):
    model_type = "looped-test"

    def __init__(
        self,
        vocab_size: int = 64,
        hidden_size: int = 32,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 4,
        loops: int = 4,
        max_position_embeddings: int = 256,
        **kwargs: Any,
    ) -> None:
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        self.num_hidden_layers, self.num_attention_heads = num_hidden_layers, num_attention_heads
        self.loops, self.max_position_embeddings = loops, max_position_embeddings
        super().__init__(**{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, **kwargs})


def angles(position_ids: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin `[B, 1, T, head_dim]` of plain rotary embeddings with theta 10,000."""
    frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2, device=position_ids.device) / head_dim)
    angle = position_ids[:, None, :, None].float() * frequencies
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin.to(x.dtype)


class Attention(nn.Module):
    """Projections, and the call of the attention interface as remote code of the last years writes it."""

    def __init__(self, config: LoopedConfig, layer_idx: int) -> None:
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim = config.hidden_size // config.num_attention_heads
        self.is_causal = True
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.out = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """q, k, v `[B, heads, T, head_dim]`, slices of one projection."""
        return tuple(
            part.transpose(1, 2) for part in self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).unbind(2)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        name = self.config._attn_implementation
        function = ALL_ATTENTION_FUNCTIONS["sdpa" if name == "eager" else name]
        out, _ = function(self, q, k, v, mask, scaling=self.head_dim**-0.5, dropout=0.0)
        return self.out(out.flatten(2))


class RotaryInsideAttention(Attention):
    def forward(self, x: Tensor, slot: int, mask: Tensor | None, position_ids: Tensor, cache: Any) -> Tensor:
        q, k, v = self.project(x)
        cos, sin = angles(position_ids, self.head_dim)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, slot)
        return self.attend(q, k, v, mask)


class CachePositionsAttention(Attention):
    def forward(
        self,
        x: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Tensor | None = None,
        cache: Any = None,
        cache_position: Tensor | None = None,
        slot: int = 0,
    ) -> Tensor:
        q, k, v = self.project(x)
        cos, sin = position_embeddings
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, slot, {"sin": sin, "cos": cos, "cache_position": cache_position})
        return self.attend(q, k, v, attention_mask)


class OwnAttention(Attention):
    """Written out, with a mask made on the spot."""

    def forward(self, x: Tensor, slot: int, mask: Tensor | None, position_ids: Tensor, cache: Any) -> Tensor:
        q, k, v = self.project(x)
        cos, sin = angles(position_ids, self.head_dim)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, slot)
        scores = q @ k.transpose(2, 3) * self.head_dim**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1 + k.shape[2] - q.shape[2])
        weights = scores.masked_fill(hidden, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class LoopedModel(PreTrainedModel, GenerationMixin):
    """h = embed(ids); `loops` times: h = h + attention(norm(h)) per layer; logits = head(norm(h))."""

    config_class = LoopedConfig
    attention: ClassVar[type[Attention]]
    _supports_sdpa = True

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(self.attention(config, n) for n in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.4)

    def positions(self, ids: Tensor, past: int) -> Tensor:
        return torch.arange(past, past + ids.shape[1], device=ids.device)

    def cache(self, cache: Any, use_cache: bool | None) -> Any:
        """The cache to use, with one slot per (loop, layer); None without one."""
        cache = DynamicCache() if use_cache and cache is None else cache
        if cache is not None:
            ensure_slots(cache, self.config.loops * self.config.num_hidden_layers)
        return cache

    def mask(self, x: Tensor, attention_mask: Any, cache: Any, position_ids: Tensor) -> Tensor | None:
        return create_causal_mask(
            config=self.config,
            inputs_embeds=x,
            attention_mask=attention_mask,
            cache=cache,
            position_ids=position_ids,
        )

    def loop(self, x: Tensor, **arguments: Any) -> Tensor:
        layers = len(self.layers)
        for loop in range(self.config.loops):
            for number, layer in enumerate(self.layers):
                x = x + layer(self.norm(x), slot=loop * layers + number, **arguments)
        return self.head(self.norm(x))


class RotaryInside(LoopedModel):
    attention = RotaryInsideAttention

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
        logits = self.loop(x, mask=mask, position_ids=position_ids, cache=cache)
        return CausalLMOutputWithPast(logits=logits, cache=cache)


class Mixer(nn.Module):
    """Chooses between the earlier states of one token: an attention call over depth, in which no tokens meet."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__()
        self.config, self.is_causal = config, False
        self.query = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        """`[B, T, states, hidden]` -> `[B, T, hidden]`; tokens stand where heads do."""
        query = self.query.weight.expand(*states.shape[:2], 1, -1)
        name = self.config._attn_implementation
        function = ALL_ATTENTION_FUNCTIONS["sdpa" if name == "eager" else name]
        out, _ = function(self, query, states, states, None, scaling=states.shape[-1] ** -0.5, dropout=0.0)
        return out.squeeze(1)


class MixedResiduals(RotaryInside):
    """Each loop begins with a mix of the states that the loops before it ended with."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.mixer = Mixer(config)

    def loop(self, x: Tensor, **arguments: Any) -> Tensor:
        states, layers = [x], len(self.layers)
        for loop in range(self.config.loops):
            x = self.mixer(torch.stack(states, dim=2))
            for number, layer in enumerate(self.layers):
                x = x + layer(self.norm(x), slot=loop * layers + number, **arguments)
            states.append(x)
        return self.head(self.norm(x))


class CachePositions(LoopedModel):
    attention = CachePositionsAttention

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = None,
        cache_position: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        cache = self.cache(cache, use_cache)
        if cache_position is None:
            cache_position = self.positions(input_ids, cache.get_seq_length() if cache is not None else 0)
        if position_ids is None:
            position_ids = cache_position[None]
        x = self.embed(input_ids)
        logits = self.loop(
            x,
            attention_mask=self.mask(x, attention_mask, cache, position_ids),
            position_embeddings=angles(position_ids, self.layers[0].head_dim),
            cache=cache,
            cache_position=cache_position,
        )
        return CausalLMOutputWithPast(logits=logits, cache=cache)


class PairCache:
    """A cache of its own making: one pair of tensors per slot."""

    def __init__(self) -> None:
        self.pairs: dict[int, tuple[Tensor, Tensor]] = {}

    def get_seq_length(self) -> int:
        return self.pairs[0][0].shape[2] if self.pairs else 0

    def update(self, k: Tensor, v: Tensor, slot: int) -> tuple[Tensor, Tensor]:
        old = self.pairs.get(slot)
        self.pairs[slot] = (k, v) if old is None else (torch.cat((old[0], k), 2), torch.cat((old[1], v), 2))
        return self.pairs[slot]


class OldNames(LoopedModel):
    """`past_key_values` in and out; `**kwargs` swallows what newer callers pass."""

    attention = RotaryInsideAttention

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        cache = PairCache() if use_cache and past_key_values is None else past_key_values
        if position_ids is None:
            position_ids = self.positions(input_ids, cache.get_seq_length() if cache is not None else 0)[None]
        x = self.embed(input_ids)
        logits = self.loop(x, mask=None, position_ids=position_ids, cache=cache)
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)


class OwnSoftmax(OldNames):
    attention = OwnAttention


class OldCalls(OwnSoftmax):
    def positions(self, ids: Tensor, past: int) -> Tensor:
        return super().positions(ids, past) + DynamicCache().get_usable_length(ids.shape[1])
