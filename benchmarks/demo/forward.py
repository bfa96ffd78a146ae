"""Forward and loss of Ouro over flat tokens, on the model's own parameters.

Everything but attention works on ``[N, E]`` tokens, whatever sequences they belong to, and takes its weights as
arguments: two small functions are compiled once, for all layers, loops and sequence lengths. The arithmetic is that of
`sparse_compile.models.ouro` in ``dtype``, with parameters kept in float32.

Shapes: N = B * T tokens, E hidden size, H heads, D head size, L loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sparse_compile.models import OuroForCausalLM

ATTENTION_WEIGHTS = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUTPUT_WEIGHTS = (
    *("self_attn.o_proj", "input_layernorm_2", "post_attention_layernorm"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm_2"),
)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return weight.to(x.dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, H, D] by cos, sin [N, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]


def before_attention(
    h: Tensor, weights: tuple[Tensor, ...], cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """h [N, E] -> rotated queries and keys, and values, [N, heads, D]."""
    scale, *parts = weights
    sizes = [part.shape[0] for part in parts]
    joined = functional.linear(norm(h, scale, eps), torch.cat(parts).to(h.dtype))
    q, k, v = (part.unflatten(-1, (-1, cos.shape[-1])) for part in joined.split(sizes, -1))
    return rotate(q, cos, sin), rotate(k, cos, sin), v.contiguous()


def after_attention(h: Tensor, attended: Tensor, weights: tuple[Tensor, ...], eps: float) -> Tensor:
    """h [N, E], attended [N, H * D] -> the layer's output [N, E]."""
    o, after, before_mlp, gate, up, down, after_mlp = weights
    h = h + norm(functional.linear(attended, o.to(h.dtype)), after, eps)
    joined = functional.linear(norm(h, before_mlp, eps), torch.cat((gate, up)).to(h.dtype))
    left, right = joined.chunk(2, -1)
    return h + norm(functional.linear(functional.silu(left) * right, down.to(h.dtype)), after_mlp, eps)


def end_of_loop(
    h: Tensor, scale: Tensor, head: Tensor, targets: Tensor, weights: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """(the next loop's input [N, E], sum of the weighted cross entropies of this loop's logits)."""
    h = norm(h, scale, eps)
    logits = functional.linear(h, head.to(h.dtype)).float()
    return h, (functional.cross_entropy(logits, targets, reduction="none") * weights).sum()


@dataclass
class Forward:
    """The model as functions over its own parameters.

    dtype: of activations and, when they are used, weights; parameters stay float32.
    """

    model: OuroForCausalLM
    dtype: torch.dtype
    before: Callable[..., Any] = before_attention
    after: Callable[..., Any] = after_attention
    end: Callable[..., Any] = end_of_loop
    tables: dict[tuple[int, int], tuple[Tensor, Tensor]] = field(default_factory=dict)

    def compile(self) -> None:
        """Compile the three functions when they are first called."""
        self.before = torch.compile(before_attention, fullgraph=True, dynamic=False)
        self.after = torch.compile(after_attention, fullgraph=True, dynamic=False)
        self.end = torch.compile(end_of_loop, fullgraph=True, dynamic=False)

    @property
    def is_eager(self) -> bool:
        return self.before is before_attention

    def eager(self) -> None:
        self.before, self.after, self.end = before_attention, after_attention, end_of_loop

    def losses(self, ids: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        """ids, targets int64 [B, T], weights float32 [B, T] -> weighted sums of cross entropies of each loop, [L]."""
        model = self.model
        h, losses = self._embed(ids), []
        for _ in range(model.config.total_ut_steps):
            h = self._layers(h, *ids.shape)
            h, loss = self.end(
                h,
                model.model.norm.weight,
                model.lm_head.weight,
                targets.flatten(),
                weights.flatten(),
                model.config.rms_norm_eps,
            )
            losses.append(loss)
        return torch.stack(losses)

    @torch.no_grad()
    def logits(self, ids: Tensor) -> list[Tensor]:
        """The logits of every loop, [B, T, V] float32 each; not compiled."""
        plain = Forward(self.model, self.dtype, tables=self.tables)
        h, found = plain._embed(ids), []
        for _ in range(self.model.config.total_ut_steps):
            h = norm(
                plain._layers(h, *ids.shape), self.model.model.norm.weight, self.model.config.rms_norm_eps
            )
            found.append(
                functional.linear(h, self.model.lm_head.weight.to(h.dtype)).float().unflatten(0, ids.shape)
            )
        return found

    def _embed(self, ids: Tensor) -> Tensor:
        return functional.embedding(ids.flatten(), self.model.model.embed_tokens.weight).to(self.dtype)

    def _layers(self, h: Tensor, batch: int, length: int) -> Tensor:
        cos, sin = self._rotary(batch, length)
        eps = self.model.config.rms_norm_eps
        for layer in self.model.model.layers:
            q, k, v = self.before(h, _weights(layer, ATTENTION_WEIGHTS), cos, sin, eps)
            q, k, v = (x.unflatten(0, (batch, length)).transpose(1, 2) for x in (q, k, v))
            grouped = q.shape[1] != k.shape[1]
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            h = self.after(
                h, attended.transpose(1, 2).reshape(len(h), -1), _weights(layer, OUTPUT_WEIGHTS), eps
            )
        return h

    def _rotary(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin for the tokens of a batch, [N, D]."""
        if (batch, length) not in self.tables:
            positions = torch.arange(length, device=self.model.device)[None]
            like = torch.empty(0, dtype=self.dtype, device=self.model.device)
            cos, sin = self.model.model.rotary_emb(like, positions)
            self.tables[batch, length] = (cos[0].repeat(batch, 1), sin[0].repeat(batch, 1))
        return self.tables[batch, length]


def _weights(layer: torch.nn.Module, names: tuple[str, ...]) -> tuple[Tensor, ...]:
    return tuple(layer.get_submodule(name).weight for name in names)
