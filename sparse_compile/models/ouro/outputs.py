"""Outputs of Ouro, and what its gates mean."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast


@dataclass
class OuroModelOutput(BaseModelOutputWithPast):
    """``gate_logits`` [B, T, L]: the gate of every loop, before the sigmoid, when asked for."""

    gate_logits: Tensor | None = None


@dataclass
class OuroCausalLMOutput(CausalLMOutputWithPast):
    """``gate_logits`` [B, T, L]: the gate of every loop, before the sigmoid, when asked for."""

    gate_logits: Tensor | None = None


def exit_distribution(gate_logits: Tensor) -> Tensor:
    """Probability of leaving at each loop, from the gates [..., L] -> [..., L], summing to 1.

    hazard_t = sigmoid(gate_t);  p_t = hazard_t * prod over s < t of (1 - hazard_s). The last loop takes all
    that is left, since there is no further loop to run. Computed in float32, or float64 for float64 gates.
    """
    hazard = torch.sigmoid(gate_logits.to(torch.promote_types(gate_logits.dtype, torch.float32)))
    stay = torch.cumprod(1 - hazard[..., :-1], dim=-1)  # after loop t
    reached = torch.cat((torch.ones_like(hazard[..., :1]), stay), dim=-1)
    leave = torch.cat((hazard[..., :-1], torch.ones_like(hazard[..., :1])), dim=-1)
    return reached * leave


def exit_loop(gate_logits: Tensor, threshold: float) -> Tensor:
    """The first loop where the summed probability of leaving reaches the threshold: [..., L] -> int64 [...].

    A threshold of 1.0 is the last loop even where a gate saturates: it never leaves early.

    Raises:
        ValueError: for a threshold outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold must be above 0 and at most 1, got {threshold}")
    summed = torch.cumsum(exit_distribution(gate_logits), dim=-1)
    reached = summed >= threshold if threshold < 1 else torch.zeros_like(summed, dtype=torch.bool)
    reached[..., -1] = True
    return reached.long().argmax(dim=-1)
