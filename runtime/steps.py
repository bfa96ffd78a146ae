"""One step, from picked rows to a batch of tokens that the host has not read yet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from sparse_compile.runtime.blocks import check_logits
from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.pipelines import Pipelines
from sparse_compile.runtime.plan import PlanBuilder, RowPlan, Segment
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.results import Batch, Entry, TokenReader
from sparse_compile.runtime.sampler import choose, largest
from sparse_compile.runtime.scheduler import Scheduler, Work
from sparse_compile.runtime.speculation import Rounds

if TYPE_CHECKING:
    from sparse_compile.runtime.engine import Executor


_LOG = logging.getLogger(__name__)


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
        self.rounds: Rounds | Pipelines | None = None
        if self.options.drafting is not None:
            kind = Pipelines if self.options.drafting.pipeline else Rounds
            self.rounds = kind(executor, store, scheduler, self._check)
        self.failed_runs = 0

    def run(self, works: Sequence[Work], batch: Batch) -> None:
        """Prompts or decode rows. What is no Exception passes through: then the rows of `works` are not done, and
        start again in the next step. Requests that a callback of an earlier run has ended are left out.
        """
        works = [work for work in works if work.request.state is RequestState.RUNNING]
        if not works:
            return
        if self.rounds is not None and works[0].request.decoding:
            rounds = self.rounds
            self._guarded(
                works,
                batch,
                partial(rounds.run, works, batch),
                lambda work: rounds.run([work], batch),
            )
            return
        segments = self._segments(works, batch)
        works = [work for work in works if work.request.id in segments]
        if not works:
            return
        try:
            self._guarded(
                works,
                batch,
                partial(self._attempt, works, list(segments.values()), batch),
                lambda work: self._again(work, segments[work.request.id], batch),
            )
        except BaseException:
            for work in works:
                work.request.loop = 0
            raise

    def _segments(self, works: Sequence[Work], batch: Batch) -> dict[str, Segment]:
        """The rows of each request, by its id; one whose rows cannot begin ends with the error."""
        segments = {}
        for work in works:
            try:
                segments[work.request.id] = self.scheduler.segment(work)
            except Exception as error:
                work.request.ending = True
                batch.entries.append(Entry(work.request, error=error))
        return segments

    def _guarded(
        self, works: Sequence[Work], batch: Batch, together: Callable[[], None], alone: Callable[[Work], None]
    ) -> None:
        """Runs all of `works` together and, if that fails, each alone; what then fails ends its request."""
        try:
            together()
        except Exception as error:
            self.failed_runs += 1
            _LOG.warning("a run of %d requests failed, each runs again alone: %r", len(works), error)
            for work in works:
                self._isolate(work, alone, batch)

    @staticmethod
    def _isolate(work: Work, alone: Callable[[Work], None], batch: Batch) -> None:
        request = work.request
        if request.state is not RequestState.RUNNING or request.ending:
            return
        try:
            alone(work)
        except Exception as failure:
            if not request.ending:
                request.ending = True
                batch.entries.append(Entry(request, error=failure))

    def _again(self, work: Work, segment: Segment, batch: Batch) -> None:
        """The rows of one request once more, from the first loop on."""
        step = self.options.loops_per_step or 1
        for loop in range(0, segment.loop, step):
            self._submit([replace(segment, loop=loop, wants_logits=False)])
        self._attempt([work], [segment], batch)

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
        self._check(plan)
        logits = self.executor.decode(plan) if decode else self.executor.prefill(plan)
        check_logits(logits, plan)
        if self.store is not None:
            self.store.captured(lease for s in segments if s.wants_logits and s.sparse and (lease := s.lease))
        return plan, logits

    def _check(self, plan: RowPlan) -> None:
        """What a plan must satisfy before it runs."""
        if self.options.debug:
            plan.validate(self.pool.spec.page_size, self.pool.pages, self.store.slots if self.store else 1)
        if self.store is not None:
            self.store.check(plan.leases)

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
