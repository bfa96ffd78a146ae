"""A request: what the user asked for, how far it has come, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch

from sparse_compile.runtime.leases import Lease

FinishReason = Literal["eos", "length", "stop", "abort", "error"]
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
StopRule = Callable[[torch.Tensor, torch.Tensor | None], object]

NO_TOKEN = -1  # the token of an output that carries none: an abort or an error


@dataclass
class SamplingParams:
    """How the tokens of one request are chosen and when it ends."""

    max_new_tokens: int  # at least 1
    eos_token_ids: tuple[int, ...] = ()  # an emitted one ends the request: "eos"
    do_sample: bool = False  # draw from the softmax of the processed scores, else take the largest
    # (ids int64 [1, length], scores [1, vocab]) -> scores; transformers' LogitsProcessorList fits.
    processor: Processor | None = None
    # Asked after each token with (ids int64 [1, length], its own included; processed scores); true: "stop".
    stop: StopRule | None = None
    # Owns the randomness of do_sample; without one the engine seeds one from torch's global generator.
    generator: torch.Generator | None = None
    prefix_length: int = 0  # prefix-LM: so many prompt tokens see each other, and are prefilled in one chunk
    want_logits: bool = False  # outputs carry copies of the raw logits and of the processed scores


@dataclass
class RequestMetrics:
    """What one request cost.

    A key read is one key attended by one query head: a row at a site reads (visible or retained keys) x
    (query heads) of them, summed over sites and rows. keys_dense is the same with every site dense.
    """

    prompt_tokens: int
    new_tokens: int = 0
    time_to_first_token_s: float | None = None  # seconds since the request was added
    time_per_token_s: float | None = None  # mean seconds per token after the first
    loops_run: int = 0  # loops summed over all rows, those of the prompt included
    keys_read: int = 0
    keys_dense: int = 0
    decode_keys_read: int = 0  # the rows of generated tokens alone
    decode_keys_dense: int = 0


@dataclass
class StepOutput:
    """One token of one request, or its end without one (an abort, most errors: token -1, logprob nan)."""

    request_id: str
    token: int
    logprob: float  # log-softmax of the processed scores at the token
    finished: bool
    finish_reason: FinishReason | None
    logits: torch.Tensor | None = None  # raw [vocab], an owned copy, with want_logits
    scores: torch.Tensor | None = None  # processed [vocab], an owned copy, with want_logits
    error: Exception | None = None  # with finish_reason "error"
    metrics: RequestMetrics | None = None  # with the last output


class RequestState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """The engine's own record of a request. `computed` tokens have their keys and values in the pool."""

    id: str
    params: SamplingParams
    tokens: list[int]
    metrics: RequestMetrics
    added_at: float
    state: RequestState = RequestState.WAITING
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    seat: int = 0  # its line of the block table while it runs
    lease: Lease | None = None
    _ids: torch.Tensor | None = None
    _ids_filled: int = 0

    @property
    def prompt_length(self) -> int:
        return self.metrics.prompt_tokens

    @property
    def max_length(self) -> int:
        """Tokens of the finished request at most."""
        return self.prompt_length + self.params.max_new_tokens

    @property
    def new_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def decoding(self) -> bool:
        """Only the newest token is left to compute, and it is not the prompt's."""
        return self.computed >= self.prompt_length

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def append(self, token: int, now: float) -> None:
        """Takes a new token and the time (seconds) it was known at."""
        self.tokens.append(token)
        metrics = self.metrics
        metrics.new_tokens += 1
        if metrics.time_to_first_token_s is None:
            metrics.time_to_first_token_s = now - self.added_at
        else:
            first = self.added_at + metrics.time_to_first_token_s
            metrics.time_per_token_s = (now - first) / (metrics.new_tokens - 1)

    def ids(self, device: torch.device) -> torch.Tensor:
        """int64 [1, length]: a view of a buffer that grows with the tokens, for processors and stop rules."""
        if self._ids is None:
            self._ids = torch.empty((1, self.max_length), dtype=torch.int64, device=device)
        length = len(self.tokens)
        if self._ids_filled < length:
            fresh = torch.tensor(self.tokens[self._ids_filled :], dtype=torch.int64, device="cpu")
            self._ids[0, self._ids_filled : length] = fresh.to(device)
            self._ids_filled = length
        return self._ids[:, :length]
