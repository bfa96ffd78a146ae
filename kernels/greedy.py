"""Greedy tokens: the largest logit of each row, and its log-probability, in one pass over logits in any dtype.

No copy of the logits in float32 is made: on CUDA one kernel reads them once; elsewhere a few columns at a time are
widened. `define` is the definition.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from .arguments import compute_dtype

COLUMNS = 4096  # widened at a time where there is no kernel
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def define(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of `greedy`: over a copy in float32, or in float64 for float64 logits."""
    scores = logits.to(compute_dtype(logits.dtype))
    best, tokens = scores.max(dim=-1)
    return tokens, best - scores.logsumexp(dim=-1)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, vocab] -> tokens int64 [n], log-probabilities [n] in float32 (float64 for float64 logits).

    Among equals the lowest id wins, and NaN is larger than any number. The log-probability is NaN where a logit is NaN
    or +inf, or all are -inf.
    """
    if logits.is_cuda and logits.dtype in _KERNEL_DTYPES and importlib.util.find_spec("triton") is not None:
        backend = importlib.import_module(".greedy_backend", __package__)
        made: tuple[Tensor, Tensor] = backend.launch(logits)
        return made
    best, tokens = logits.max(dim=-1)  # widening keeps the order
    wide = compute_dtype(logits.dtype)
    best = best.to(wide)
    total = torch.zeros_like(best)
    for some in logits.split(COLUMNS, dim=-1):
        total += (some.to(wide) - best[:, None]).exp_().sum(dim=-1)
    return tokens, -total.log()
