"""What `generate` returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from transformers.utils import ModelOutput

from sparse_compile.errors import ArgumentError
from sparse_compile.inputs import Prompts

if TYPE_CHECKING:
    from sparse_compile.runtime.request import RequestMetrics, StepOutput


@dataclass
class GenerateOutput(ModelOutput):
    """Result of `generate(..., return_dict_in_generate=True)`; rows are in input order.

    sequences: int64 [B, N + new] on the input's device, rows that ended early filled with the pad token.
    logprobs: per row a list with one float per emitted token: its log-probability under the processed scores.
    scores, logits: with output_scores / output_logits, one [B, vocab] tensor per step: the processed scores
        and the raw logits. Rows that had already ended hold NaN.
    finish_reasons: per row "eos", "length" or "stop".
    metrics: per row the RequestMetrics of the engine.
    """

    sequences: torch.LongTensor | None = None
    logprobs: list[list[float]] | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None
    finish_reasons: list[str] | None = None
    metrics: list[RequestMetrics] | None = None


@dataclass
class RowResult:
    """What one row has emitted so far."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    scores: list[torch.Tensor | None] = field(default_factory=list)
    logits: list[torch.Tensor | None] = field(default_factory=list)
    finish_reason: str = ""
    metrics: RequestMetrics | None = None

    def add(self, output: StepOutput, keep_scores: bool, keep_logits: bool) -> None:
        self.tokens.append(output.token)
        self.logprobs.append(output.logprob)
        if keep_scores:
            self.scores.append(output.scores)
        if keep_logits:
            self.logits.append(output.logits)
        if output.finished:
            self.finish_reason, self.metrics = output.finish_reason or "", output.metrics


def join_sequences(prompts: Prompts, rows: list[RowResult], pad_token_id: int | None) -> torch.LongTensor:
    """Prompts as given, then each row's new tokens, padded on the right: int64 [B, N + most new tokens]."""
    longest = max(len(row.tokens) for row in rows)
    ragged = any(len(row.tokens) < longest for row in rows)
    if ragged and pad_token_id is None:
        raise ArgumentError(
            "pad_token_id", None, "rows ended at different lengths and need padding", "pass pad_token_id=0"
        )
    filled = [row.tokens + [pad_token_id or 0] * (longest - len(row.tokens)) for row in rows]
    new = torch.tensor(filled, dtype=torch.int64, device=prompts.input_ids.device)
    return torch.cat([prompts.input_ids, new], dim=1)  # type: ignore[return-value]


def stack_steps(rows: list[list[torch.Tensor | None]]) -> tuple[torch.Tensor, ...]:
    """One [B, vocab] tensor per step from per-row lists of [vocab]; NaN where a row had ended."""
    steps = max(len(row) for row in rows)
    example = next(one for row in rows for one in row if one is not None)
    blank = torch.full_like(example, math.nan)
    padded = [
        [one if one is not None else blank for one in row] + [blank] * (steps - len(row)) for row in rows
    ]
    return tuple(torch.stack([row[step] for row in padded]) for step in range(steps))
