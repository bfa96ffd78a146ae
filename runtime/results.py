"""Tokens between the device and the host: what a step has submitted and nobody has read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparse_compile.runtime.fences import CudaFence, Fence, ImmediateFence
from sparse_compile.runtime.plan import Segment
from sparse_compile.runtime.request import Request
from sparse_compile.runtime.sampler import Drawn


class TokenReader:
    """Tokens, log-probabilities and flags on their way to the host. On CUDA they go into page-locked
    memory, and only `read` waits: for the event behind the copy, not for what was submitted after it.
    """

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn
        lines = [drawn.tokens, drawn.logprobs, *([] if drawn.flags is None else [drawn.flags])]
        values = drawn.tokens.new_empty((len(lines), *drawn.tokens.shape), dtype=torch.float64)
        for value, line in zip(values, lines, strict=True):  # one copy each: tokens are exact below 2**53
            value.copy_(line)
        self._fence: Fence = ImmediateFence()
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, device="cpu", pin_memory=True)
            values = host.copy_(values, non_blocking=True)
            self._fence = CudaFence(torch.cuda.current_stream(drawn.tokens.device))
        self._values = values

    def read(self, row: int) -> tuple[int, float]:
        """(token, logprob) of a row."""
        self._fence.wait()
        return int(self._values[0, row]), float(self._values[1, row])

    def number(self, row: int) -> int:
        """`Drawn.flags` of a row; there must be some."""
        self._fence.wait()
        return int(self._values[2, row])


@dataclass
class Entry:
    """What a step has for one request: a token to read, or the error that ends it."""

    request: Request
    segment: Segment | None = None  # the row that the token is from, if it has not been charged
    reader: TokenReader | None = None
    row: int = 0  # of the reader
    error: Exception | None = None
    in_round: bool = False  # a token of a round of speculation
    # In place of all these: a round whose tokens are not counted yet. Called when it is read; gives an entry for each.
    settle: Callable[[], list[Entry]] | None = None


@dataclass
class Batch:
    """The results of a step that are not read yet. at_once: they are read before the next step is submitted."""

    entries: deque[Entry]
    at_once: bool = False
