"""An independent run of a model with sparse attention by loop depth: transformers' modules and cache, plain formulas.

Nothing of the passes, kernels or runtime is used. The model's attention function is replaced by one that follows the
written arithmetic for queries of length 1 (decode) and is plain causal attention for prompts, and the model's own cache
keeps the keys. Slow and simple.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from sparse_compile.passes.attention import attention_override, evaluation_mode


class SparseOracle:
    """Greedy decoding of one prompt at a time. `calls` records (layer, loop, kind) of the last decode step, `logits`
    the `[vocab]` that each new token of the last call was chosen from.
    """

    def __init__(
        self,
        model: nn.Module,
        retention: float | list[float],
        capture_loop: int = 1,
        recapture_every: int | None = None,
        keep_first: int = 0,
        keep_last: int = 0,
    ):
        self.model = model
        self.shares = [
            Fraction(str(one)) for one in (retention if isinstance(retention, list) else [retention])
        ]
        self.keep_first, self.keep_last = keep_first, keep_last
        self.capture_loop, self.recapture_every = capture_loop, recapture_every
        self.names = {id(module): name for name, module in model.named_modules()}
        self.loops: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.kept: dict[str, tuple[Any, ...]] = {}
        self.calls: list[tuple[str, int, str]] = []
        self.logits: list[torch.Tensor] = []

    def generate(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Greedy tokens after `prompt`."""
        tokens, cache = list(prompt), None
        chunk = torch.tensor([prompt])
        self.logits = []
        with evaluation_mode(self.model), attention_override(self.model, self._attention):
            for _ in range(new_tokens):
                self.seen, self.kept, self.calls = {}, {}, []
                positions = torch.arange(len(tokens) - chunk.shape[1], len(tokens))[None]
                arguments = {"cache": cache} if cache is not None else {}
                out = self.model(input_ids=chunk, position_ids=positions, use_cache=True, **arguments)
                self.loops = self.loops or dict(self.seen)
                cache = out.cache
                self.logits.append(out.logits[0, -1])
                tokens.append(int(self.logits[-1].argmax()))
                chunk = torch.tensor([tokens[-1:]])
        return tokens[len(prompt) :]

    def _is_capture(self, loop: int) -> bool:
        past = loop - self.capture_loop
        return past == 0 or (
            self.recapture_every is not None and past > 0 and past % self.recapture_every == 0
        )

    def _share(self, name: str) -> Fraction:
        """What a layer keeps: one number for all, or one for each in the order of first calls."""
        return self.shares[list(self.loops).index(name) if len(self.shares) > 1 else 0]

    def _kind(self, name: str, loop: int, window: int) -> str:
        loops = self.loops.get(name, 1)
        if loops == 1 or window or loop < self.capture_loop or self._share(name) == 1:
            return "dense"
        if not self._is_capture(loop):
            return "consume"
        return "capture" if loop + 1 < loops and not self._is_capture(loop + 1) else "dense"

    def _attention(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        name = self.names[id(module)]
        loop = self.seen.get(name, 0)
        self.seen[name] = loop + 1
        window = int(sliding_window or 0)
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1)[0], value.repeat_interleave(group, 1)[0]  # [H, N, D]
        queries, keys = query.shape[2], key.shape[1]
        scale = scaling if scaling is not None else query.shape[-1] ** -0.5
        scores = (query[0] @ key.transpose(1, 2)) * scale  # [H, Q, N]
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)[None]
        visible = (distance >= 0) & ((distance < window) if window else True)
        scores = scores.masked_fill(~visible, float("-inf"))
        p = scores.softmax(-1)
        out = p @ value  # [H, Q, D]
        if queries == 1:
            kind = self._kind(name, loop, window)
            self.calls.append((name, loop, kind))
            if kind == "capture":
                self._capture(name, scores[:, 0], p[:, 0], value, out[:, 0])
            elif kind == "consume":
                out = self._consume(name, scores[:, 0], value)[:, None]
        return out.transpose(0, 1)[None].contiguous(), None

    def _capture(
        self, name: str, scores: torch.Tensor, p: torch.Tensor, value: torch.Tensor, out: torch.Tensor
    ) -> None:
        visible = scores.shape[-1]
        always = {*range(min(visible, self.keep_first)), *range(max(0, visible - self.keep_last), visible)}
        count = min(visible, max(1, len(always), math.ceil(visible * self._share(name))))
        kept, mass, reference = [], [], []
        for head in range(scores.shape[0]):
            ranked = sorted(range(visible), key=lambda j: (j not in always, -float(scores[head, j]), j))
            chosen = torch.tensor(sorted(ranked[:count]))
            kept.append(chosen)
            mass.append(p[head, chosen].sum())
            reference.append((p[head, chosen] @ value[head, chosen]) / mass[-1])
        self.kept[name] = (kept, torch.stack(mass), torch.stack(reference), out)

    def _consume(self, name: str, scores: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        kept, mass, reference, output = self.kept[name]
        inner = torch.stack(
            [scores[h, chosen].softmax(-1) @ value[h, chosen] for h, chosen in enumerate(kept)]
        )
        return output + mass[:, None] * (inner - reference)
