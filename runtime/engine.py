"""The engine: requests in, tokens out.

One step admits waiting requests, runs chunks of prompts and a row of each request that decodes, and has a token chosen
for each request whose known tokens are all computed. With `drafting` a request that decodes has a block of rows instead
(`runtime/speculation.py`), out of which come one token or more. With `async_steps` the tokens of a step are read after
the next one has been submitted: the device never waits for the host. What only shows when tokens are read (an end
token, a stop rule, scores that are no numbers) then ends a request one step late, and what was computed for it beyond
its end is dropped. The tokens are the same in each of these ways.

What fails, fails alone: an exception of the executor, a sampler, a processor or a stop rule ends the request that
causes it. The outputs say so, and what the request held is free again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol, overload

import torch

from sparse_compile.runtime.admission import Admission, check_order, to_list, with_generator
from sparse_compile.runtime.blocks import BlockPlan
from sparse_compile.runtime.flights import FlightPlan
from sparse_compile.runtime.holdings import Holdings
from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.metrics import EngineMetrics, Ledger
from sparse_compile.runtime.options import Drafting, EngineOptions
from sparse_compile.runtime.plan import PlanBuilder, ProgramKind, RowPlan
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import (
    NO_TOKEN,
    FinishReason,
    Request,
    RequestMetrics,
    RequestState,
    SamplingParams,
    StepOutput,
)
from sparse_compile.runtime.results import Batch, Entry
from sparse_compile.runtime.sampler import Drawn, finish_reason, not_a_number
from sparse_compile.runtime.scheduler import Scheduler
from sparse_compile.runtime.seats import SeatTable
from sparse_compile.runtime.steps import StepRunner
from sparse_compile.runtime.suspension import Suspension
from sparse_compile.runtime.turns import Turns

__all__ = ["Engine", "EngineMetrics", "EngineOptions", "Executor"]


class Executor(Protocol):
    """Runs a compiled program on the rows of a plan.

    Both runs return the logits of `plan.logit_rows`, [n, vocab], in the model's dtype. Their memory is good until the
    next run is submitted.
    """

    @property
    def loops(self) -> int:
        """Bodies that a row goes through; 1 for a program that is not rolled."""
        ...

    def prefill(self, plan: RowPlan) -> torch.Tensor:
        """Chunks of prompts: consecutive rows of each sequence, all dense, the whole model."""
        ...

    def decode(self, plan: RowPlan) -> torch.Tensor:
        """One row per sequence; `plan.loops` bodies from each row's own depth on, or the whole model."""
        ...

    def draft(self, plan: RowPlan) -> torch.Tensor:
        """One row per sequence from the start; what the model's own head makes of it after `plan.loops` bodies."""
        ...

    def verify(self, plan: RowPlan) -> torch.Tensor:
        """Any number of rows per sequence, that `draft` has left, through the last `plan.loops` bodies."""
        ...

    def round(self, plan: BlockPlan) -> Drawn:
        """A whole round of blocks in which every choice is the largest score: `runtime.blocks.run_round`."""
        ...

    def step(self, plan: FlightPlan) -> Drawn:
        """A step of pipelines in which every choice is the largest score: `runtime.flights.run_step`."""
        ...

    def advance(self, plan: RowPlan) -> torch.Tensor:
        """Rows of pipelines, `plan.loops` bodies on; logits of rows that finish, drafts of rows that have begun."""
        ...

    def warm_up(
        self,
        rows: Sequence[int],
        seats: SeatTable,
        kinds: Sequence[ProgramKind],
        loops: int | None = None,
        drafting: Drafting | None = None,
    ) -> list[Callable[[], object]]:
        """What to call once, so that no later step of these numbers of rows compiles anything. loops: of one step."""
        ...

    def save(self, seat: int) -> tuple[torch.Tensor, ...]:
        """Copies of what the row of `seat` carries between two runs of `plan.loops` bodies, on the device."""
        ...

    def load(self, seat: int, carried: tuple[torch.Tensor, ...]) -> None:
        """Gives `seat` what `save` returned, perhaps of another seat."""
        ...


class Engine:
    """Serves requests with one program on one KV pool and, for sparse decoding, one reference store.

    It belongs to one thread at a time: a call while another thread is in the middle of one is a RuntimeError. Only
    `metrics` may be called from any thread at any time. A logits processor or a stop rule may abort requests and add
    others; it may not step, suspend or resume.

    weights: asked with every request that comes. It raises when the model is no longer the one that was compiled, and
    gives another value than last time when the weights have changed; then cached pages are forgotten.
    """

    weights: Callable[[], Hashable] | None = None

    def __init__(
        self, executor: Executor, pool: KVPool, store: ReferenceStore | None, options: EngineOptions
    ) -> None:
        if options.retention is not None:
            if store is None:
                raise ValueError(
                    f"retention={options.retention} needs a reference store; pass one, or retention=None"
                )
            store.spec.check_capacity(options.max_context, options.retention)
        options.check_loops(executor.loops)
        self.executor, self.pool, self.store, self.options = executor, pool, store, options
        self._owed: list[StepOutput] = []  # to be returned by `step`
        longest = min(pool.pages, pool.spec.pages_for(options.max_context))
        seats = SeatTable(options.max_seqs, longest, pool.device, options.block_rows)
        holdings = Holdings(pool, store, seats, options.prefix_caching, options.block_rows)
        self.scheduler = Scheduler(
            holdings,
            Suspension(executor, holdings),
            options,
            executor.loops,
            self._settle,
            lambda request, error: self._owed.append(self._finish(request, "error", error=error)),
        )
        self._runner = StepRunner(executor, pool, store, self.scheduler)
        self._admission = Admission(pool, store, options)
        self._ledger = Ledger()
        self._inflight: deque[Batch] = deque()  # submitted, not read: the oldest first
        self._named = self._arrivals = 0
        self._turns = Turns()
        self._weights: Hashable = None  # what `weights` gave last time

    @property
    def plans(self) -> PlanBuilder:
        return self._runner.plans

    # ------------------------------------------------------------------ requests

    def add_request(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queues a request and returns its id, made up where none is given.

        prompt_ids: 1-D. priority: requests of higher priority go first, and push lower ones out if need be; among
        equals the first come is the first served.

        ValueError: a prompt that is empty or holds what is no token of the model, an id that is still running or has
        outputs to be returned, or a request that can never be served; the message names the argument, its value, the
        limit and the remedy.
        """
        prompt = to_list(prompt_ids)
        with self._turns.taken("add_request"):
            self._look_at_weights()
            return self._add(prompt, params, request_id, priority)

    def _add(self, prompt: list[int], params: SamplingParams, request_id: str | None, priority: int) -> str:
        request_id = self._free_id() if request_id is None else request_id
        check_order(request_id, priority)
        if request_id in self.scheduler.requests:
            raise ValueError(f"request_id={request_id!r} is still running; abort it or choose another id")
        if any(output.request_id == request_id for output in self._owed):
            raise ValueError(
                f"request_id={request_id!r} has outputs that step() has not returned yet; take them first, abort it, "
                "or choose another id"
            )
        self._admission.check(prompt, params)
        if params.do_sample and params.generator is None:
            params = with_generator(params, self.pool.device)
        self._ledger.forget(request_id)
        self._arrivals += 1
        metrics = RequestMetrics(prompt_tokens=len(prompt))
        self.scheduler.add(
            Request(request_id, params, prompt, metrics, time.perf_counter(), priority, self._arrivals)
        )
        return request_id

    def abort(self, request_id: str) -> StepOutput | None:
        """Ends a request at once, in any state. Returns its last output, None when it has finished already.

        Raises KeyError for an id that was never seen.
        """
        with self._turns.taken("abort"):
            self._owed = [output for output in self._owed if output.request_id != request_id]
            request = self._find(request_id)
            return None if request is None else self._finish(request, "abort")

    def forget_prefixes(self) -> None:
        """Forgets cached pages of prompts, of unfinished requests too: later prompts are computed anew.

        To be called after weights were written through `parameter.data` or by a fused optimizer, which leaves no trace;
        other changes of their values are noticed with the next request.
        """
        with self._turns.taken("forget_prefixes"):
            self.scheduler.holdings.forget_prefixes(self.scheduler.requests.values())

    def _look_at_weights(self) -> None:
        if self.weights is None:
            return
        found = self.weights()
        if found != self._weights:
            self.forget_prefixes()
            self._weights = found

    def suspend(self, request_id: str, offload: bool = False) -> bool:
        """Stops a request until `resume`. It gives up its seat; with `offload` its pages and slot as well.

        Reads what is on its way first. False when the request has finished, perhaps by that. Raises KeyError for an
        id that was never seen.
        """
        with self._turns.alone("suspend"):
            self._settle()
        request = self._find(request_id)
        if request is None:
            return False
        self.scheduler.hold(request)
        return not offload or self.offload(request_id)

    def offload(self, request_id: str) -> bool:
        """Moves a suspended request to host memory, which frees its pages and its slot. False when it has finished.

        Raises ValueError for a request that is not suspended, KeyError for an id that was never seen.
        """
        with self._turns.alone("offload"):
            request = self._find(request_id)
            if request is not None:
                if request.state is RequestState.RUNNING:
                    raise ValueError(f"request_id={request_id!r} is running; suspend it first")
                self.scheduler.offload(request)
        return request is not None

    def resume(self, request_id: str) -> bool:
        """Lets a suspended request go on, in its turn. False when it has finished; no change when it is not suspended.

        Raises KeyError for an id that was never seen.
        """
        with self._turns.alone("resume"):
            request = self._find(request_id)
            if request is not None and request.held:
                self.scheduler.let_go(request)
        return request is not None

    def has_unfinished(self) -> bool:
        """Whether steps have anything to do or to tell. Requests that the caller has suspended do not count."""
        unread = any(not entry.request.finished for batch in self._inflight for entry in batch.entries)
        return bool(unread or self.scheduler.queue or self.scheduler.running or self._owed)

    @overload
    def metrics(self, request_id: str) -> RequestMetrics: ...

    @overload
    def metrics(self) -> EngineMetrics: ...

    def metrics(self, request_id: str | None = None) -> RequestMetrics | EngineMetrics:
        """Of one request, so far or at its end, or of the engine. Raises KeyError for an id that was never seen, or
        too long ago.
        """
        with self._ledger.lock:
            if request_id is None:
                return self._ledger.look(self.scheduler, self._runner.failed_runs)
            request = self.scheduler.requests.get(request_id)
            return self._ledger.of(request_id) if request is None else request.metrics

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the pools are whole and hold exactly what unfinished requests hold."""
        self.scheduler.check_integrity()

    # ------------------------------------------------------------------ a step

    def step(self) -> list[StepOutput]:
        """Runs one step. Returns new tokens and ends of requests: those of this step, or with `async_steps` those of
        the last one; prompts first, each in the order of priority and arrival. What an interrupt or `suspend` has left
        to tell comes first, by itself.

        A Ctrl-C comes through when the step is done, a second one at once; what it kept from being returned, the next
        step returns. What else is no Exception and is raised by the executor or a callback passes through. A request
        whose callback it interrupted ends with an error, in what the next step returns; the others go on as if nothing
        had been.

        RuntimeError: called in the middle of a step: from a processor or a stop rule, or from another thread.
        """
        with self._turns.alone("step"):
            if not self._owed:
                self._advance()
        outputs, self._owed = self._owed, []
        return outputs

    def _advance(self) -> None:
        self._read(self._may_wait)  # what an interrupt has left
        prompts, rows = self.scheduler.pick()
        if not prompts and not rows:
            self._settle()
            return
        self._ledger.steps += 1
        batch = Batch(deque())
        self._inflight.append(batch)
        for some in [[work] for work in prompts] if self.options.deterministic else [prompts]:
            self._runner.run(some, batch)
        self._runner.run(rows, batch)
        self._read(self._may_wait)

    @property
    def _may_wait(self) -> int:
        """How many steps may be unread while the next one is submitted."""
        return 1 if self.options.async_steps and not any(batch.at_once for batch in self._inflight) else 0

    def _read(self, left: int) -> None:
        """Reads the oldest steps, until `left` of them are left."""
        while len(self._inflight) > left:
            self._read_oldest()

    def _settle(self) -> bool:
        """Reads all that is on its way; whether there was any."""
        waiting = bool(self._inflight)
        self._read(0)
        return waiting

    def _read_oldest(self) -> None:
        entries = self._inflight[0].entries
        while entries:
            entry = entries.popleft()
            if entry.request.finished:
                continue  # computed beyond its end, or aborted
            if entry.settle is not None:
                entries.extendleft(reversed(entry.settle()))
                continue
            try:
                output = self._take(entry)
            except BaseException as cause:
                if not entry.request.finished:
                    error = RuntimeError(f"interrupted by {type(cause).__name__} while its token was read")
                    self._owed.append(self._finish(entry.request, "error", error=error))
                raise
            if output is not None:
                self._owed.append(output)
        self._inflight.popleft()

    def _take(self, entry: Entry) -> StepOutput | None:
        """The output for one entry; None when a stop rule has aborted the request meanwhile."""
        request = entry.request
        if entry.segment is not None:  # it ran, whatever came of it
            self.scheduler.counter.charge(request.metrics, entry.segment)
        if entry.error is not None or entry.reader is None:
            return self._finish(request, "error", error=entry.error)
        token, logprob = entry.reader.read(entry.row)
        if math.isnan(logprob):
            return self._finish(request, "error", error=not_a_number())
        request.append(token, time.perf_counter())
        request.metrics.round_tokens += entry.in_round
        logits, scores = entry.reader.drawn.kept.pop(entry.row, (None, None))
        output = StepOutput(request.id, token, logprob, False, None)
        if request.params.want_logits:
            output.logits, output.scores = logits, scores
        reason, error = self._ask_finish(request, scores)
        if request.finished:
            return None
        return output if reason is None else self._finish(request, reason, output, error)

    @staticmethod
    def _ask_finish(
        request: Request, scores: torch.Tensor | None
    ) -> tuple[FinishReason | None, Exception | None]:
        try:
            return finish_reason(request, scores), None
        except Exception as error:
            return "error", error

    def _finish(
        self,
        request: Request,
        reason: FinishReason,
        output: StepOutput | None = None,
        error: Exception | None = None,
    ) -> StepOutput:
        """Frees what the request held and completes its last output, one without a token if there is none."""
        with self._ledger.lock:
            self.scheduler.remove(request)
            self._ledger.file(request.id, request.metrics)
        output = output or StepOutput(request.id, NO_TOKEN, math.nan, True, reason)
        output.finished, output.finish_reason = True, reason
        output.error, output.metrics = error, request.metrics
        return output

    # ------------------------------------------------------------------ ids

    def _find(self, request_id: str) -> Request | None:
        """The unfinished request, None for a finished one; KeyError for one that was never seen."""
        request = self.scheduler.requests.get(request_id)
        if request is None:
            self._ledger.of(request_id)
        return request

    def _free_id(self) -> str:
        while True:
            self._named += 1
            name = f"request-{self._named}"
            if name not in self.scheduler.requests and all(one.request_id != name for one in self._owed):
                return name
