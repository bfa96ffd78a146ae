"""A request: what the user asked for, how far it has come, and what it cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal

import torch

from sparse_compile.runtime.leases import Lease
from sparse_compile.runtime.seats import to_device

if TYPE_CHECKING:
    from sparse_compile.runtime.pipelines import Course
    from sparse_compile.runtime.suspension import Saved

FinishReason = Literal["eos", "length", "stop", "abort", "error"]
Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
StopRule = Callable[[torch.Tensor, torch.Tensor | None], object]

NO_TOKEN = -1  # the token of an output that carries none: an abort or an error


@dataclass
class SamplingParams:
    """How the tokens of one request are chosen and when it ends.

    With speculation, processors are asked at drafted positions too, twice for some, and once more when a round fails:
    they must depend on nothing but what they are given. With asynchronous steps the processor is asked before the host
    knows the last tokens (they are in `ids`, on the device), and once more than needed for a request that ends early;
    what it then chooses is dropped. With speculation a processor needs to be told how many tokens there are: while such
    a request runs, steps are synchronous.
    """

    max_new_tokens: int  # at least 1
    eos_token_ids: tuple[int, ...] = ()  # an emitted one ends the request: "eos"
    do_sample: bool = False  # draw from the softmax of the processed scores, else take the largest
    # (ids int64 [1, length], scores [1, vocab]) -> scores; transformers' LogitsProcessorList fits.
    processor: Processor | None = None
    # Asked after each token with (ids int64 [1, length], its own included; processed scores); true: "stop".
    stop: StopRule | None = None
    # Owns the randomness of do_sample; without one the engine seeds one from torch's global generator. Requests that
    # share one draw from it in turn, so each then depends on who runs beside it.
    generator: torch.Generator | None = None
    prefix_length: int = 0  # prefix-LM: so many prompt tokens see each other, and are prefilled in one chunk
    want_logits: bool = False  # outputs carry copies of the raw logits and of the processed scores

    @property
    def own_choice(self) -> bool:
        """Its tokens are more than the largest of the raw scores: choosing one changes state of the request."""
        return self.do_sample or self.processor is not None

    @property
    def keeps_scores(self) -> bool:
        return self.want_logits or self.stop is not None

    @property
    def needs_ids(self) -> bool:
        return self.processor is not None or self.stop is not None


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
    rounds: int = 0  # of speculation: blocks that were verified
    waiting_rounds: int = (
        0  # of those, with asynchronous steps: rounds that were read before the next step all the same
    )
    drafted_tokens: int = 0  # that a draft head proposed
    accepted_tokens: int = 0  # drafted tokens that verification confirmed
    round_tokens: int = 0  # tokens that came out of rounds
    cached_tokens: int = 0  # of the prompt, found in cached pages
    preemptions: int = 0  # how often the engine suspended it, for memory or for a higher priority

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per round of speculation; None without one."""
        return self.round_tokens / self.rounds if self.rounds else None


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
    SUSPENDED = "suspended"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """The engine's own record of a request.

    `tokens` are those that the host knows; `length` counts those that are sampled but not read yet as well. The keys
    and values of the first `computed` are in the pool, or on their way there; the row of the next one has `loop`
    bodies behind it. Tokens of rounds of speculation count when they are read: `length` and `computed` are then behind,
    by `coming` at least and by `ahead` at most.
    """

    id: str
    params: SamplingParams
    tokens: list[int]
    metrics: RequestMetrics
    added_at: float
    priority: int = 0  # higher ones go first
    arrival: int = 0  # a serial number
    state: RequestState = RequestState.WAITING
    held: bool = False  # the caller has suspended it: it goes on when the caller says so
    ending: bool = False  # its error is on the way out: no more rows
    computed: int = 0
    loop: int = 0
    rounds: int = 0  # of speculation that were submitted; steps of a pipeline
    unread: int = 0  # of those, how many have not been read:
    coming: int = 0  # their tokens at least
    ahead: int = 0  # and at most
    # Tokens per round of late, without and with the last round that was read.
    paces: tuple[float | None, float | None] = (None, None)
    course: Course | None = None  # its rows in a pipeline
    pages: list[int] = field(default_factory=list)
    seat: int = 0  # its line of the block table while it runs
    chain: int | None = None  # of its pages in the page cache; None: they are not filed
    filed: int = 0  # pages of the prompt that are in that chain
    leases: list[Lease] = field(default_factory=list)  # one for each row that may be under way at once
    saved: Saved | None = None  # while it is suspended
    length: int = field(init=False)
    _ids: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.length = len(self.tokens)

    @property
    def order(self) -> tuple[int, int]:
        """Smaller goes first. A total order: arrivals are all different."""
        return -self.priority, self.arrival

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
    def has_rows(self) -> bool:
        """There is a token to compute: it is known how many there will be before any of them is read."""
        return not self.ending and (not self.decoding or self.length + self.coming < self.max_length)

    @property
    def pace(self) -> float | None:
        """Tokens per round, without the last round: it may be unread, and blocks must not depend on that."""
        return self.paces[1 if self.unread else 0]

    @property
    def finished(self) -> bool:
        return self.state is RequestState.FINISHED

    def append(self, token: int, now: float) -> None:
        """Takes a token that was read, and the time (seconds) it was known at."""
        self.tokens.append(token)
        metrics = self.metrics
        metrics.new_tokens += 1
        if metrics.time_to_first_token_s is None:
            metrics.time_to_first_token_s = now - self.added_at
        else:
            first = self.added_at + metrics.time_to_first_token_s
            metrics.time_per_token_s = (now - first) / (metrics.new_tokens - 1)

    def submitted(self, least: int, most: int) -> None:
        """A round of speculation that gives so many tokens at least and at most."""
        self.rounds += 1
        self.unread, self.coming, self.ahead = self.unread + 1, self.coming + least, self.ahead + most

    def settled(self, least: int, most: int) -> None:
        """It is read."""
        self.unread, self.coming, self.ahead = self.unread - 1, self.coming - least, self.ahead - most

    # ------------------------------------------------------------------ ids on the device

    def ids(self, device: torch.device, length: int) -> torch.Tensor:
        """int64 [1, length]: a view of a buffer on the device, for processors and stop rules."""
        if self._ids is None:
            self._ids = torch.empty((1, self.max_length), dtype=torch.int64, device=device)
            known = torch.tensor(self.tokens, dtype=torch.int64, device="cpu")
            self._ids[0, : len(self.tokens)] = to_device(known, device)
        return self._ids[:, :length]

    def sampled(self, tokens: torch.Tensor) -> None:
        """Tokens have been chosen on the device: int64 [n]."""
        self.note(tokens, self.length)
        self.length += tokens.shape[0]

    def note(self, tokens: torch.Tensor, at: int) -> None:
        """Puts tokens, int64 [n], behind the first `at` ids, for processors and stop rules."""
        if self.params.needs_ids:
            self.ids(tokens.device, at + tokens.shape[0])[0, at:].copy_(tokens)
