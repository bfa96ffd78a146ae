"""The engine: requests in, tokens out.

One step admits waiting requests, computes the next rows of the running ones in one plan, and samples a token
for each request whose known tokens are all computed. It is synchronous: the tokens of a step are known when
`step` returns.

What fails, fails alone: an exception of the executor ends the requests of that step, one of a sampler, a
processor or a stop rule ends its own request. Either way the outputs say so, and what the requests held is
free again.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from sparse_compile.runtime.accounting import KeyCounter
from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.plan import PlanBuilder, ProgramKind, RowPlan
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import (
    NO_TOKEN,
    FinishReason,
    Request,
    RequestMetrics,
    SamplingParams,
    StepOutput,
)
from sparse_compile.runtime.sampler import Sample, finish_reason, sample
from sparse_compile.runtime.scheduler import EngineOptions, Scheduler, Work

__all__ = ["Engine", "EngineOptions", "Executor"]

FINISHED_KEPT = 4096  # finished requests whose metrics can still be asked for


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

    def warm_up(
        self, rows: Sequence[int], block_table: torch.Tensor, kinds: Sequence[ProgramKind]
    ) -> list[Callable[[], object]]:
        """What to call once, so that no later step of these numbers of rows compiles anything."""
        ...

    def save(self, seat: int) -> tuple[torch.Tensor, ...]:
        """Copies of what the row of `seat` carries between two runs of `plan.loops` bodies, on the device."""
        ...

    def load(self, seat: int, carried: tuple[torch.Tensor, ...]) -> None:
        """Gives `seat` what `save` returned, perhaps of another seat."""
        ...


class Engine:
    """Serves requests with one program on one KV pool and, for sparse decoding, one reference store."""

    def __init__(
        self, executor: Executor, pool: KVPool, store: ReferenceStore | None, options: EngineOptions
    ) -> None:
        if options.retention is not None:
            if store is None:
                raise ValueError(
                    f"retention={options.retention} needs a reference store; pass one, or retention=None"
                )
            store.spec.check_capacity(options.max_context, options.retention)
        self.executor = executor
        self.pool = pool
        self.store = store
        self.options = options
        self.scheduler = Scheduler(pool, store, options)
        self.plans = PlanBuilder(self.scheduler.seats)
        self.counter = KeyCounter(options.sites, options.retention)
        self._finished: OrderedDict[str, RequestMetrics] = OrderedDict()
        self._named = 0
        self._stepping = False
        self._owed: list[StepOutput] = []  # of a step that was interrupted, for the next one to return

    def add_request(
        self,
        prompt_ids: Sequence[int] | torch.Tensor,
        params: SamplingParams,
        request_id: str | None = None,
    ) -> str:
        """Queues a request and returns its id, made up where none is given. prompt_ids: 1-D.

        ValueError: an empty prompt, an id that is still running, or a request that can never be served; the
        message names the argument, its value, the limit and the remedy.
        """
        prompt = _to_list(prompt_ids)
        request_id = self._free_id() if request_id is None else request_id
        self._refuse_impossible(prompt, params, request_id)
        if params.do_sample and params.generator is None:
            params = _with_generator(params, self.pool.device)
        self._finished.pop(request_id, None)
        metrics = RequestMetrics(prompt_tokens=len(prompt))
        self.scheduler.add(Request(request_id, params, prompt, metrics, added_at=time.perf_counter()))
        return request_id

    def step(self) -> list[StepOutput]:
        """Runs one step. Returns the new tokens and the ends of requests, in the order of admission.

        What is no Exception, such as a KeyboardInterrupt, passes through. Requests whose token it swallowed end
        with an error, in what the next step returns; the others go on as if nothing had been.

        RuntimeError: called from a processor or a stop rule, that is in the middle of a step.
        """
        if self._stepping:
            raise RuntimeError(
                "a step of this engine is running: a logits processor or a stopping criterion must not generate "
                "with the model that calls it; compile another one for that"
            )
        if self._owed:
            outputs, self._owed = self._owed, []
            return outputs
        self._stepping = True
        try:
            return self._step()
        finally:
            self._stepping = False

    def _step(self) -> list[StepOutput]:
        works = sorted(self.scheduler.pick(), key=lambda work: work.request.decoding)
        if not works:
            return []
        requests = [work.request for work in works if work.completes]
        before = [request.computed for request in requests]
        outputs: list[StepOutput] = []
        try:
            try:
                logits = self._run(works)
                samples = sample(logits, requests)
            except Exception as error:
                return [self._finish(work.request, "error", error=error) for work in works]
            for row in zip(requests, samples, logits, strict=True):
                output = self._take(*row)
                if output is not None:
                    outputs.append(output)
            return outputs
        except BaseException as cause:
            self._owed += outputs + self._interrupted(requests, before, outputs, cause)
            raise

    def _interrupted(
        self,
        requests: list[Request],
        before: list[int],
        outputs: list[StepOutput],
        cause: BaseException,
    ) -> list[StepOutput]:
        """The ends of those requests whose rows were computed, but whose token never came out."""
        told = {output.request_id for output in outputs}
        return [
            self._finish(
                request,
                "error",
                error=RuntimeError(f"interrupted by {type(cause).__name__} in a shared step"),
            )
            for request, computed in zip(requests, before, strict=True)
            if request.computed != computed and request.id not in told
        ]

    def abort(self, request_id: str) -> StepOutput | None:
        """Ends a request at once, in any state. Returns its last output, None when it has finished already.

        Raises KeyError for an id that was never seen.
        """
        self._owed = [output for output in self._owed if output.request_id != request_id]
        request = self.scheduler.find(request_id)
        if request is not None:
            return self._finish(request, "abort")
        self.metrics(request_id)
        return None

    def has_unfinished(self) -> bool:
        return bool(self.scheduler.waiting or self.scheduler.running or self._owed)

    def metrics(self, request_id: str) -> RequestMetrics:
        """Metrics so far, or at the end for one of the last finished requests. Raises KeyError for others."""
        request = self.scheduler.find(request_id)
        if request is not None:
            return request.metrics
        if request_id not in self._finished:
            raise KeyError(f"no request {request_id!r}, nor among the last {FINISHED_KEPT} finished ones")
        return self._finished[request_id]

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the pools are whole and hold exactly what running requests hold."""
        self.scheduler.check_integrity()

    # ------------------------------------------------------------------ a step

    def _run(self, works: list[Work]) -> torch.Tensor:
        """Logits of the works that complete, prompts first; `works` holds prompts before decode rows."""
        parts = []
        prompts = [work for work in works if not work.request.decoding]
        for mine, decode in ((prompts, False), (works[len(prompts) :], True)):
            if not mine:
                continue
            segments = [self.scheduler.segment(work) for work in mine]
            parts.append(self._submit(self.plans.build(segments), decode).clone())
            for work, segment in zip(mine, segments, strict=True):
                work.request.computed += work.rows
                self.counter.charge(work.request.metrics, segment)
        return torch.cat(parts)

    def _submit(self, plan: RowPlan, decode: bool) -> torch.Tensor:
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
            self.store.captured(plan.leases)
        return logits

    def _take(self, request: Request, result: Sample | Exception, logits: torch.Tensor) -> StepOutput | None:
        """The output for one sampled token; None when a callback has aborted the request meanwhile."""
        if request.finished:
            return None
        if isinstance(result, Exception):
            return self._finish(request, "error", error=result)
        request.append(result.token, time.perf_counter())
        output = StepOutput(request.id, result.token, result.logprob, False, None)
        if request.params.want_logits:
            output.logits = logits.clone()
            output.scores = None if result.scores is None else result.scores.clone()
        reason, error = self._ask_finish(request, result)
        if request.finished:
            return None
        return output if reason is None else self._finish(request, reason, output, error)

    @staticmethod
    def _ask_finish(request: Request, result: Sample) -> tuple[FinishReason | None, Exception | None]:
        try:
            return finish_reason(request, None if result.scores is None else result.scores[None]), None
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
        self.scheduler.remove(request)
        self._remember(request)
        output = output or StepOutput(request.id, NO_TOKEN, math.nan, True, reason)
        output.finished, output.finish_reason = True, reason
        output.error, output.metrics = error, request.metrics
        return output

    def _remember(self, request: Request) -> None:
        self._finished[request.id] = request.metrics
        if len(self._finished) > FINISHED_KEPT:
            self._finished.popitem(last=False)

    # ------------------------------------------------------------------ admission

    def _free_id(self) -> str:
        while True:
            self._named += 1
            name = f"request-{self._named}"
            if self.scheduler.find(name) is None:
                return name

    def _refuse_impossible(self, prompt: list[int], params: SamplingParams, request_id: str) -> None:
        options, new = self.options, params.max_new_tokens
        total = len(prompt) + new
        if self.scheduler.find(request_id) is not None:
            raise ValueError(f"request_id={request_id!r} is still running; abort it or choose another id")
        if not prompt:
            raise ValueError("prompt_ids is empty; a request needs at least one token")
        if min(prompt) < 0:
            raise ValueError(f"prompt_ids holds {min(prompt)}; token ids are 0 or more, remove the padding")
        if new < 1:
            raise ValueError(f"max_new_tokens={new} must be at least 1")
        if params.generator is not None and params.generator.device.type != self.pool.device.type:
            raise ValueError(
                f"generator lives on {params.generator.device}, the model on {self.pool.device}; "
                "make the generator on the model's device"
            )
        if total > options.max_context:
            raise ValueError(
                f"{len(prompt)} prompt tokens + max_new_tokens={new} = {total} exceed "
                f"max_context={options.max_context}; shorten them or compile with a larger max_context"
            )
        self._refuse_prefix(len(prompt), params.prefix_length)
        self._refuse_memory(total)

    def _refuse_prefix(self, prompt: int, prefix: int) -> None:
        if not 0 <= prefix <= prompt:
            raise ValueError(f"prefix_length={prefix} must lie between 0 and the prompt's {prompt} tokens")
        if prefix > self.options.max_rows:
            raise ValueError(
                f"prefix_length={prefix} tokens must be prefilled in one step, which has at most "
                f"max_rows={self.options.max_rows} rows; raise prefill_chunk or shorten the prefix"
            )

    def _refuse_memory(self, total: int) -> None:
        needed, usable = self.pool.spec.pages_for(total), self.pool.usable_pages
        if needed > usable:
            raise ValueError(
                f"{total} tokens need {needed} pages of {self.pool.spec.page_size}, the pool has {usable} "
                "in all; shorten the prompt or max_new_tokens, or raise max_batch or max_context"
            )
        if self.store is not None and self.options.retention is not None:
            self.store.spec.check_capacity(total, self.options.retention)


def _to_list(ids: Sequence[int] | torch.Tensor) -> list[int]:
    if isinstance(ids, torch.Tensor):
        if ids.dim() != 1:
            raise ValueError(f"prompt_ids has shape {tuple(ids.shape)}; one request takes a 1-D prompt")
        ids = ids.tolist()
    return [int(token) for token in ids]


def _with_generator(params: SamplingParams, device: torch.device) -> SamplingParams:
    """The same with a generator of its own, seeded from torch's global one, so that neighbours cannot disturb
    it.
    """
    seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    return replace(params, generator=torch.Generator(device).manual_seed(seed))
