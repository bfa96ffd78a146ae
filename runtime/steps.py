"""One step, from picked rows to a batch of tokens that the host has not read yet."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sparse_compile.runtime.fences import CudaFence, Fence, ImmediateFence
from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.plan import PlanBuilder, RowPlan, Segment
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.sampler import Drawn, choose, largest
from sparse_compile.runtime.scheduler import Scheduler, Work

if TYPE_CHECKING:
    from sparse_compile.runtime.engine import Executor


_LOG = logging.getLogger(__name__)


class TokenReader:
    """Tokens and log-probabilities on their way to the host. On CUDA they go into page-locked memory, and only `read`
    waits: for the event behind the copy, not for what was submitted after it.
    """

    def __init__(self, drawn: Drawn) -> None:
        self.drawn = drawn
        values = torch.stack((drawn.tokens.double(), drawn.logprobs.double()))  # exact below 2**53
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


@dataclass
class Entry:
    """What a step has for one request: a token to read, or the error that ends it."""

    request: Request
    segment: Segment | None = None  # the row that the token is from
    reader: TokenReader | None = None
    row: int = 0  # of the reader
    error: Exception | None = None


@dataclass(frozen=True)
class Batch:
    """The results of a step that are not read yet."""

    entries: deque[Entry]


class StepRunner:
    """Runs rows, samples, and notes how far each request has come.

    What fails, fails alone. A run that raises is repeated one request at a time: that writes the same keys, values and
    captures again. A row that has loops behind it starts again from its first one, since the failed run may have
    changed what it carries. What raises again is the error of that request; the others have lost nothing but time.
    """

    def __init__(
        self,
        executor: Executor,
        pool: KVPool,
        store: ReferenceStore | None,
        scheduler: Scheduler,
    ) -> None:
        self.executor, self.pool, self.store, self.scheduler = executor, pool, store, scheduler
        self.options = scheduler.options
        self.plans = PlanBuilder(scheduler.holdings.seats)
        self.failed_runs = 0

    def run(self, works: Sequence[Work], batch: Batch) -> None:
        """Prompts or decode rows. What is no Exception passes through: then the rows of `works` are not done, and
        start again in the next step. Requests that a callback of an earlier run has ended are left out.
        """
        works = [work for work in works if work.request.state is RequestState.RUNNING]
        if not works:
            return
        segments = [self.scheduler.segment(work) for work in works]
        try:
            try:
                self._attempt(works, segments, batch)
            except Exception as error:
                self.failed_runs += 1
                _LOG.warning("a run of %d requests failed, each runs again alone: %r", len(works), error)
                self._isolate(works, segments, batch)
        except BaseException:
            for work in works:
                work.request.loop = 0
            raise

    def _isolate(self, works: Sequence[Work], segments: Sequence[Segment], batch: Batch) -> None:
        for work, segment in zip(works, segments, strict=True):
            request = work.request
            if request.state is not RequestState.RUNNING or request.ending:
                continue
            failure = self._alone(work, segment, batch)
            if failure is not None and not request.ending:
                request.ending = True
                batch.entries.append(Entry(request, error=failure))

    def _alone(self, work: Work, segment: Segment, batch: Batch) -> Exception | None:
        """Runs the rows of one request again, from the first loop on; what they raise."""
        step = self.options.loops_per_step or 1
        try:
            for loop in range(0, segment.loop, step):
                self._submit([replace(segment, loop=loop, wants_logits=False)])
            self._attempt([work], [segment], batch)
        except Exception as error:
            return error
        return None

    def _attempt(self, works: Sequence[Work], segments: Sequence[Segment], batch: Batch) -> None:
        plan, logits = self._submit(segments)
        sampling = [
            work.request for work, segment in zip(works, segments, strict=True) if segment.wants_logits
        ]
        reader = self._sample(plan, logits, sampling, batch) if sampling else None
        row = 0
        for work, segment in zip(works, segments, strict=True):
            if segment.wants_logits and reader is not None:
                self._note(work.request, segment, reader, row, batch)
                row += 1
            elif work.request.state is RequestState.RUNNING:
                self._advance(work.request, segment)

    # ------------------------------------------------------------------ inside

    def _submit(self, segments: Sequence[Segment]) -> tuple[RowPlan, torch.Tensor]:
        decode = segments[0].decode
        plan = self.plans.build(segments, loops=self.options.loops_per_step if decode else None)
        if self.options.debug:
            plan.validate(self.pool.spec.page_size, self.pool.pages, self.store.slots if self.store else 1)
        if self.store is not None:
            self.store.check(plan.leases)
        logits = self.executor.decode(plan) if decode else self.executor.prefill(plan)
        if logits.dim() != 2 or logits.shape[0] != plan.logit_rows.shape[0]:
            raise RuntimeError(
                f"the executor gave logits {tuple(logits.shape)} for {plan.logit_rows.shape[0]} rows"
            )
        if self.store is not None:
            self.store.captured(lease for s in segments if s.wants_logits and s.sparse and (lease := s.lease))
        return plan, logits

    def _sample(
        self, plan: RowPlan, logits: torch.Tensor, requests: list[Request], batch: Batch
    ) -> TokenReader:
        """The tokens go to the seats at once, for the next step's rows. The logits may be gone after the next run."""
        drawn = largest(logits)
        try:
            choose(drawn, logits, requests)
            seats = plan.row_seq.index_select(0, plan.logit_rows)
            self.scheduler.holdings.seats.last_token.index_copy_(0, seats.long(), drawn.tokens)
            return TokenReader(drawn)
        except BaseException as cause:
            _cannot_choose_twice(requests, cause, batch)
            raise

    def _note(self, request: Request, segment: Segment, reader: TokenReader, row: int, batch: Batch) -> None:
        """Files the token of a request, unless a callback has ended it meanwhile."""
        if request.state is not RequestState.RUNNING:
            return
        error = reader.drawn.errors.get(row)
        batch.entries.append(Entry(request, segment, reader, row, error))
        request.computed, request.loop = segment.end, 0
        self.scheduler.holdings.file(request)
        request.ending = error is not None
        request.sampled(reader.drawn.tokens[row : row + 1])

    def _advance(self, request: Request, segment: Segment) -> None:
        """Rows without a token: a chunk inside a prompt, or a row that has loops to go."""
        if segment.decode:
            request.loop = segment.loop + (self.options.loops_per_step or 0)
            return
        request.computed = segment.end
        self.scheduler.holdings.file(request)
        self.scheduler.counter.charge(request.metrics, segment)


def _cannot_choose_twice(requests: list[Request], cause: BaseException, batch: Batch) -> None:
    """Choosing was interrupted: it changes the state of a processor or a generator, so those requests end."""
    error = cause
    if not isinstance(error, Exception):
        error = RuntimeError(f"interrupted by {type(cause).__name__} while the tokens of a step were chosen")
    for request in requests:
        if request.params.own_choice and request.state is RequestState.RUNNING:
            request.ending = True
            batch.entries.append(Entry(request, error=error))
