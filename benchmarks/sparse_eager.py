"""The sparse arithmetic in plain torch under an uncompiled forward: what the compiled step is checked against."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparse_compile.kernels.retention import Retention
from sparse_compile.passes.attention import attention_override


class LoopAttention:
    """One decode step: loop 0 dense, loop 1 chooses the keys, later loops read those alone. All in float32.

    retention None keeps every loop dense. Every row must see equally many keys. noise: relative, on each output.
    """

    def __init__(self, retention: Retention | None, noise: float = 0.0) -> None:
        self.retention, self.noise = retention, noise
        self.calls: Counter[int] = Counter()
        self.kept: dict[int, tuple[Tensor, ...]] = {}

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        loop, self.calls[id(module)] = self.calls[id(module)], self.calls[id(module)] + 1
        v = value.float()
        scores = (query.float() @ key.float().transpose(2, 3)) * scaling  # [B, H, 1, S]
        scores.masked_fill_(~mask, float("-inf"))
        if self.retention is None or loop == 0:
            out = scores.softmax(-1) @ v
        elif loop == 1:
            out = self._capture(id(module), scores, v, query.dtype, self.retention.count(int(mask[0].sum())))
        else:
            index, mass, o_ref, c_ref = self.kept[id(module)]
            share = torch.zeros_like(scores).scatter_(-1, index, scores.gather(-1, index).softmax(-1))
            out = o_ref + mass * (share @ v - c_ref)
        if self.noise:
            out = out * (1 + self.noise * torch.randn_like(out))
        return out.to(query.dtype).transpose(1, 2), None

    def _capture(self, at: int, scores: Tensor, v: Tensor, dtype: torch.dtype, count: int) -> Tensor:
        p = scores.softmax(-1)
        out = p @ v
        index = scores.topk(count, dim=-1).indices
        share = torch.zeros_like(p).scatter_(-1, index, p.gather(-1, index))
        mass = share.sum(-1, keepdim=True)
        self.kept[at] = (index, mass, out.to(dtype).float(), share @ v / mass)
        return out


def logits_of(
    model: Any,
    step: Callable[..., Any],
    arguments: dict[str, Any],
    retention: Retention | None,
    noise: float = 0.0,
) -> Tensor:
    """The logits of one uncompiled step with this arithmetic; `step` is the model's own forward."""
    with attention_override(model, LoopAttention(retention, noise)):
        return step(**arguments).logits
