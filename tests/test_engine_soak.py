"""Anything at any time: adding, aborting, suspending, resuming, offloading, id reuse, faults in every phase, in pools
that are too small. Each request that finishes equals its solo run, nothing gets lost, and everybody gets to the end.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from cases_common import prompts
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from runtime_fakes import PLACES, greedy, make_engine, no_room, oracle_logits, run_all
from test_engine_models import compiled
from test_engine_models import make_engine as make_model_engine

from sparse_compile.runtime.engine import Engine
from sparse_compile.runtime.options import Drafting
from sparse_compile.runtime.plan import RowPlan
from sparse_compile.runtime.request import Request, SamplingParams, StepOutput
from sparse_compile.runtime.sampler import draw

NAMES = "abcdefgh"
KINDS = ("greedy", "eos", "sampled", "processor", "stop", "bad processor", "bad stop")


BLOCKS = (Drafting(1, 3), Drafting(2, 2), Drafting(3, 5), Drafting(1, 4, True))
PIPELINES = (Drafting(1, 3, pipeline=True), Drafting(2, 2, pipeline=True))


class BadCallbackError(Exception):
    """What the callbacks of bad requests raise."""


@dataclass(frozen=True)
class Ask:
    """A request of the soak, and how it is answered when it is alone."""

    prompt: tuple[int, ...]
    new: int
    kind: str
    seed: int = 0
    prefix: int = 0
    eos: tuple[int, ...] = ()

    @property
    def patience(self) -> int:
        """Length at which bad callbacks raise."""
        return len(self.prompt) + self.seed % 4

    def params(self) -> SamplingParams:
        extra: dict[str, Any] = {"prefix_length": self.prefix}
        if self.kind == "eos":
            extra["eos_token_ids"] = self.eos or (self.seed % 24, (self.seed + 7) % 24)
        if self.kind == "sampled":
            extra |= {"do_sample": True, "generator": torch.Generator().manual_seed(self.seed)}
        if "processor" in self.kind:
            extra["processor"] = self.processor
        if "stop" in self.kind:
            extra["stop"] = self.stop
        return greedy(self.new, **extra)

    def processor(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The next token is as odd as the last one is even."""
        if self.kind.startswith("bad") and ids.shape[1] >= self.patience:
            raise BadCallbackError
        banned = torch.arange(scores.shape[-1]) % 2 == ids[:, -1:] % 2
        return scores.masked_fill(banned, -torch.inf)

    def stop(self, ids: torch.Tensor, scores: torch.Tensor | None) -> bool:
        if self.kind.startswith("bad") and ids.shape[1] > self.patience:
            raise BadCallbackError
        return int(ids[0, -1]) % 5 == self.seed % 5

    def alone(self, logits_of: Callable[[list[int]], torch.Tensor]) -> tuple[list[int], str]:
        """(tokens, reason), by the book: no engine."""
        tokens, params = list(self.prompt), self.params()
        while True:
            scores = logits_of(tokens)[None]
            try:
                if params.processor is not None:
                    scores = params.processor(torch.tensor([tokens]), scores)
                chosen = draw(scores.softmax(-1), params.generator) if params.do_sample else scores.argmax(-1)
                tokens.append(int(chosen))
                done = params.stop is not None and params.stop(torch.tensor([tokens]), scores)
            except BadCallbackError:
                return tokens[len(self.prompt) :], "error"
            new = tokens[len(self.prompt) :]
            if new[-1] in params.eos_token_ids:
                return new, "eos"
            if done or len(new) == self.new:
                return new, "stop" if done else "length"


class Watch:
    """Files outputs, and compares each answer with the solo run when it ends."""

    def __init__(self) -> None:
        self.wanted: dict[str, tuple[list[int], str]] = {}
        self.got: dict[str, list[int]] = {}
        self.cursed: set[str] = set()
        self.tight = False  # memory has run out once

    def expect(self, name: str, answer: tuple[list[int], str]) -> None:
        self.wanted[name], self.got[name] = answer, []

    def forget(self, name: str) -> None:
        del self.wanted[name]
        self.cursed.discard(name)

    def see(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            name = output.request_id
            tokens, reason = self.wanted[name]
            if output.token >= 0:
                self.got[name].append(output.token)
            if not output.finished:
                assert self.got[name] == tokens[: len(self.got[name])]
                continue
            mishap = "curse" if name in self.cursed else "no room" if self.tight else None
            if output.finish_reason == "error" and mishap is not None and str(output.error) == mishap:
                tokens, reason = tokens[: len(self.got[name])], "error"
            assert (self.got[name], output.finish_reason) == (tokens, reason), output.error
            self.forget(name)


class Soak(RuleBasedStateMachine):
    """With the fake executor, which notices lost carried rows, pages and slots."""

    @initialize(
        async_steps=st.booleans(),
        loops=st.sampled_from((None, 1, 1, 2, 3)),
        sparse=st.sampled_from((True, True, False)),
        pages=st.integers(8, 16),
        slots=st.integers(2, 5),
        seats=st.integers(1, 4),
        chunk=st.integers(3, 8),
        caching=st.booleans(),
        drafting=st.sampled_from((None, *BLOCKS, *BLOCKS, *PIPELINES)),
    )
    def begin(
        self,
        async_steps: bool,
        loops: int | None,
        sparse: bool,
        pages: int,
        slots: int,
        seats: int,
        chunk: int,
        caching: bool,
        drafting: Drafting | None,
    ) -> None:
        self.sparse, self.drafting = sparse, drafting
        if drafting is not None:
            loops, slots = None, 1 + (slots - 1) * drafting.rows
        self.engine, self.executor = make_engine(
            pages=pages,
            slots=slots,
            sparse=sparse,
            max_context=28,
            max_seqs=seats,
            prefill_chunk=chunk,
            max_prefill_tokens=8,
            async_steps=async_steps,
            loops_per_step=loops,
            prefix_caching=caching,
            drafting=drafting,
        )
        self.watch = Watch()
        self.held: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, 2), min_size=1, max_size=12),
        new=st.integers(1, 12),
        kind=st.sampled_from(KINDS),
        seed=st.integers(0, 40),
        prefix=st.integers(0, 6),
        priority=st.integers(0, 2),
        name=st.sampled_from(NAMES),
    )
    def add(
        self, prompt: list[int], new: int, kind: str, seed: int, prefix: int, priority: int, name: str
    ) -> None:
        prefix = min(prefix, len(prompt)) if seed % 3 == 0 else 0
        ask = Ask(tuple(prompt), new, kind, seed, prefix)
        if name in self.watch.wanted:
            with pytest.raises(ValueError, match="still running"):
                self._add(ask, name, priority)
            return
        self._add(ask, name, priority)
        self.watch.expect(name, self._answer(ask))
        self.held.discard(name)

    def _answer(self, ask: Ask) -> tuple[list[int], str]:
        """Drafts change the tokens of requests that draw: what such a request gives alone is the answer."""
        if ask.kind != "sampled" or self.drafting is None:
            return ask.alone(
                lambda tokens: oracle_logits(tokens, len(ask.prompt), self.sparse, prefix=ask.prefix)
            )
        engine, _ = make_engine(sparse=self.sparse, max_context=28, drafting=self.drafting)
        name = engine.add_request(list(ask.prompt), ask.params())
        outputs = run_all(engine)[name]
        return [output.token for output in outputs], str(outputs[-1].finish_reason)

    def _add(self, ask: Ask, name: str, priority: int) -> None:
        if name in self.watch.wanted and name not in self.engine.scheduler.requests:
            raise ValueError("still running")  # its last output has not been taken yet
        self.engine.add_request(list(ask.prompt), ask.params(), name, priority)

    @precondition(lambda self: self.watch.wanted)
    @rule(name=st.sampled_from(NAMES))
    def abort(self, name: str) -> None:
        if name in self.watch.wanted:
            self.engine.abort(name)
            self.watch.forget(name)

    @precondition(lambda self: self.watch.wanted)
    @rule(name=st.sampled_from(NAMES), offload=st.booleans())
    def suspend(self, name: str, offload: bool) -> None:
        if name in self.watch.wanted and self.engine.suspend(name, offload=offload):
            self.held.add(name)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def offload(self, data: st.DataObject) -> None:
        self.engine.offload(data.draw(st.sampled_from(sorted(self.held))))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.held)))
        self.held.discard(name)
        self.engine.resume(name)

    @rule(count=st.integers(1, 5))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()
            self.engine.check_integrity()

    def step(self) -> None:
        self.watch.see(self.engine.step())

    @rule(when=st.sampled_from(("before", "after")), interrupt=st.booleans())
    def step_with_a_fault_that_does_not_come_back(self, when: str, interrupt: bool) -> None:
        self.executor.fault = (when, KeyboardInterrupt() if interrupt else RuntimeError("once"))
        try:
            self.step()
        except KeyboardInterrupt:
            assert interrupt
        self.executor.fault = None

    @precondition(lambda self: self.engine.scheduler.running)
    @rule(when=st.sampled_from(("before", "after")), data=st.data())
    def step_with_a_cursed_request(self, when: str, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.scheduler.running)))
        self.watch.cursed.add(name)
        self.executor.curse = (self.engine.scheduler.running[name], when, torch.OutOfMemoryError("curse"))
        self.step()
        self.executor.curse = None

    @rule(where=st.sampled_from(PLACES))
    def step_without_room(self, where: str) -> None:
        """Memory runs out once, while requests are admitted, grow, begin rows or are moved."""
        if not self.sparse and where in ("acquire", "renew", "renew_all"):
            return
        self.watch.tight = True
        with no_room(self.engine, where):
            self.step()

    @invariant()
    def law(self) -> None:
        assert not self.executor.broken
        self.engine.check_integrity()
        look = self.engine.metrics()
        live = look.requests_waiting + look.requests_running + look.requests_suspended
        assert live == len(self.engine.scheduler.requests)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for name in sorted(self.held):
            if name in self.watch.wanted:
                self.engine.resume(name)
        drain(self.engine, self.watch)
        assert not self.executor.broken


def drain(engine: Engine, watch: Watch) -> None:
    """Everybody gets to the end, and then everything is free."""
    for _ in range(3000):
        if not engine.has_unfinished():
            break
        watch.see(engine.step())
        engine.check_integrity()
    assert not watch.wanted
    assert not engine.scheduler.requests
    assert engine.scheduler.holdings.free_pages == engine.pool.usable_pages
    assert engine.scheduler.holdings.seats.free_seats == engine.options.max_seqs
    if engine.store is not None:
        engine.store.collect()
        assert engine.store.free_slots == engine.store.usable_slots


TestSoak = Soak.TestCase
TestSoak.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


# ---------------------------------------------------------------------- a model


REQUESTS = 250


class Faults:
    """Makes the runs of an executor fail: the next one, or all with rows of some requests; before or after the work."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.once: str | None = None
        self.cursed: dict[Request, str] = {}
        executor = engine.executor
        executor.prefill = self._failing(executor.prefill)  # type: ignore[method-assign]
        executor.decode = self._failing(executor.decode)  # type: ignore[method-assign]
        executor.draft = self._failing(executor.draft)  # type: ignore[method-assign]
        executor.verify = self._failing(executor.verify)  # type: ignore[method-assign]
        executor.advance = self._failing(executor.advance)  # type: ignore[method-assign]

    def _failing(self, run: Callable[[RowPlan], torch.Tensor]) -> Callable[[RowPlan], torch.Tensor]:
        def failing(plan: RowPlan) -> torch.Tensor:
            seats = set(plan.row_seq[plan.row_length > 0].tolist())
            when = [after for request, after in self.cursed.items() if request.seat in seats]
            error: Exception = torch.OutOfMemoryError("curse")
            if self.once is not None:
                when, error = [self.once], RuntimeError("once")
            self.once = None
            if "before" in when:
                raise error
            logits = run(plan)
            if when:
                raise error
            return logits

        return failing


@functools.cache
def asks(model: Any) -> list[Ask]:
    """Every kind of request, with ends that really come."""
    made = []
    for n, prompt in enumerate(prompts(*[1 + n % 12 for n in range(28)])):
        ask = Ask(tuple(prompt), 1 + n % 7, KINDS[n % len(KINDS)], seed=n)
        if ask.kind == "eos":
            tokens, _ = solo(model, Ask(ask.prompt, ask.new, "greedy"))
            ask = replace(ask, eos=(tokens[len(tokens) // 2],))
        made.append(ask)
    return made


@functools.cache
def solo(model: Any, ask: Ask, drafting: Drafting | None = None) -> tuple[list[int], str]:
    engine, outputs = make_model_engine(model, rows=1, drafting=drafting), []
    engine.add_request(list(ask.prompt), ask.params())
    while engine.has_unfinished():
        outputs += engine.step()
    return [output.token for output in outputs if output.token >= 0], str(outputs[-1].finish_reason)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_steps": True, "prefix_caching": True},
        {"async_steps": True, "loops_per_step": 1},
        {"loops_per_step": 2},
        {"drafting": Drafting(2, 3)},
        {"drafting": Drafting(2, 3), "async_steps": True},
        {"drafting": Drafting(1, 4, pipeline=True)},
        {"drafting": Drafting(1, 4, pipeline=True), "async_steps": True},
    ],
    ids=str,
)
def test_two_thousand_requests(options: dict[str, Any]) -> None:
    """Eight times 250, of a real model, in a pool for one and a half of them."""
    model, chance, watch = compiled("ouro", 0.3), random.Random(0), Watch()
    wanted = {ask: solo(model, ask) for ask in asks(model)}
    if "drafting" in options:  # drafts change the tokens of requests that draw
        wanted |= {ask: solo(model, ask, options["drafting"]) for ask in wanted if ask.kind == "sampled"}
    engine = make_model_engine(model, rows=4, pool_tokens=36, **options)
    faults, held, added = Faults(engine), set(), 0
    fault = 0.15 if "drafting" in options else 0.08  # rounds are fewer than steps
    while added < REQUESTS or watch.wanted:
        name = str(chance.randrange(12))
        live = name in watch.wanted and name in engine.scheduler.requests
        if name not in watch.wanted and added < REQUESTS:
            ask = chance.choice(list(wanted))
            engine.add_request(list(ask.prompt), ask.params(), name, priority=chance.randrange(3))
            watch.expect(name, wanted[ask])
            added += 1
        elif live and chance.random() < 0.02:
            engine.abort(name)
            watch.forget(name)
            held.discard(name)
        elif live and name not in held and chance.random() < 0.2:
            if engine.suspend(name, offload=chance.random() < 0.5):
                held.add(name)
        elif name in held and chance.random() < 0.7:
            if chance.random() < 0.3:
                engine.offload(name)
            engine.resume(name)
            held.discard(name)
        elif live and chance.random() < 0.02:
            faults.cursed = {engine.scheduler.requests[name]: chance.choice(("before", "after"))}
            watch.cursed.add(name)
        faults.once = chance.choice(("before", "after")) if chance.random() < fault else None
        watch.see(engine.step())
        engine.check_integrity()
    drain(engine, watch)
    look = engine.metrics()
    assert look.requests_finished == REQUESTS
    assert min(look.preemptions, look.resumed, look.failed_runs) > 20
