"""The launch of the Triton kernel for greedy tokens.

Nothing here reads the device, so a launch can be captured in a CUDA graph. On the CPU the kernel runs in Triton's
interpreter, where TRITON_INTERPRET=1 was set before this module was imported.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from .arrivals import arrivals
from .triton_greedy import greedy_kernel

BLOCK = 2048  # logits of a program


def launch(logits: Tensor) -> tuple[Tensor, Tensor]:
    """logits [n, vocab] of any strides -> what `greedy.define` says."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows == 0:
        return tokens, logprobs
    parts = cdiv(vocabulary, BLOCK)
    tops, sums = torch.empty(2, rows, parts, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    greedy_kernel[(parts, rows)](
        logits, tokens, logprobs, tops, places, sums, arrivals(logits.device, rows), vocabulary, *logits.stride(),
        BLOCK=BLOCK, PARTS=parts, PADDED=next_power_of_2(parts), num_warps=4,
    )  # fmt: skip
    return tokens, logprobs
