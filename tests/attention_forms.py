"""One looped attention over given caches, in the many ways that models write it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

F = nn.functional
Form = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
SCALE = 0.3


class Attend(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return self.form(q, k, v, mask)


class Looped(nn.Module):
    """q [B, H, 1, D]; ks, vs [B, Hkv, S, D] per loop: `q = q + attend(q, k, v, mask)` in every loop."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.attend = Attend(form)

    def forward(self, q: Tensor, ks: list[Tensor], vs: list[Tensor], mask: Any) -> Tensor:
        for k, v in zip(ks, vs, strict=True):
            q = q + self.attend(q, k, v, mask)
        return q


def repeat_kv(x: Tensor, times: int) -> Tensor:
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, times, s, d).reshape(b, h * times, s, d)


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)


def sdpa_repeated(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    times = q.shape[1] // k.shape[1]
    return F.scaled_dot_product_attention(
        q, repeat_kv(k, times), repeat_kv(v, times), attn_mask=mask, scale=SCALE
    )


def sdpa_additive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    low = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, low, 0.0, False, scale=SCALE, enable_gqa=True)


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, repeat_kv(k, q.shape[1] // k.shape[1]).transpose(2, 3))


def _weigh(scores: Tensor, q: Tensor, v: Tensor) -> Tensor:
    weights = F.softmax(scores, dim=-1, dtype=torch.float64).to(q.dtype)
    weights = F.dropout(weights, p=0.0, training=False)
    return torch.matmul(weights, repeat_kv(v, q.shape[1] // v.shape[1]))


def eager_added(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    low = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
    return _weigh(_scores(q, k) * SCALE + low, q, v)


def eager_filled(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], dim=1).mT
    scores = (scores / (1 / SCALE)).masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)


def eager_chosen(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    keys = repeat_kv(k, q.shape[1] // k.shape[1]).permute(0, 1, 3, 2)
    scores = torch.where(mask, (q * SCALE) @ keys, -math.inf)
    return _weigh(scores, q, v)


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    return flex_attention(q, k, v, block_mask=mask, scale=SCALE, enable_gqa=True)


FORMS: dict[str, Form] = {
    form.__name__: form
    for form in (sdpa, sdpa_repeated, sdpa_additive, eager_added, eager_filled, eager_chosen)
}


def example(
    loops: int = 4,
    rows: int = 3,
    keys: int = 24,
    heads: tuple[int, int] = (4, 2),
    dim: int = 16,
    seed: int = 0,
) -> tuple[Tensor, list[Tensor], list[Tensor], Tensor]:
    """q, ks, vs in float64, and a bool mask [B, 1, 1, S]: left padding, a gap, and an empty end."""
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads[0], 1, dim, generator=make, dtype=torch.float64)
    caches = [
        [torch.randn(rows, heads[1], keys, dim, generator=make, dtype=torch.float64) for _ in range(loops)]
        for _ in range(2)
    ]
    mask = torch.zeros(rows, 1, 1, keys, dtype=torch.bool)
    for row in range(rows):
        mask[row, ..., 2 * row : keys - 4] = True
        mask[row, ..., 9] = False
    return q, caches[0], caches[1], mask
