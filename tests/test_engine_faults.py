"""Refusals, aborts, tight memory and faults: the pools stay whole, and others go on."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from runtime_fakes import (
    PROMPTS,
    RETENTION,
    generate,
    greedy,
    make_engine,
    oracle,
    run_all,
    tokens_of,
)

from sparse_compile.runtime.engine import EngineOptions
from sparse_compile.runtime.request import NO_TOKEN, SamplingParams

# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], greedy(1), "prompt_ids is empty"),
        ([-100, 1], greedy(1), "prompt_ids holds -100"),
        (torch.ones(1, 3), greedy(1), r"shape \(1, 3\)"),
        ([1], greedy(0), "max_new_tokens=0 must be at least 1"),
        ([1] * 60, greedy(5), r"60 prompt tokens \+ max_new_tokens=5 = 65 exceed max_context=64; shorten"),
        ([1] * 3, greedy(1, prefix_length=4), "prefix_length=4 must lie between 0 and the prompt's 3"),
        ([1] * 20, greedy(1, prefix_length=17), "prefix_length=17 .* max_rows=16 rows; raise"),
    ],
)
def test_impossible_requests_are_refused(prompt: list[int], params: SamplingParams, message: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params)
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_a_request_larger_than_the_pool_is_refused() -> None:
    engine, _ = make_engine(pages=5)
    with pytest.raises(ValueError, match=r"17 tokens need 5 pages of 4, the pool has 4 in all; shorten"):
        engine.add_request([1] * 10, greedy(7))
    engine.add_request([1] * 10, greedy(6))
    run_all(engine)


def test_running_ids_are_refused_and_finished_ones_reused() -> None:
    engine, _ = make_engine()
    for prompt in PROMPTS[:2]:
        engine.add_request(prompt, greedy(3), "same")
        with pytest.raises(ValueError, match="'same' is still running"):
            engine.add_request([1], greedy(1), "same")
        engine.step()
        with pytest.raises(ValueError, match="'same' is still running"):
            engine.add_request([1], greedy(1), "same")
        run_all(engine)
    assert engine.metrics("same").prompt_tokens == 7


def test_made_up_ids_avoid_those_in_use() -> None:
    engine, _ = make_engine()
    engine.add_request([1], greedy(1), "request-1")
    assert engine.add_request([1], greedy(1)) == "request-2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 1}, "max_context=1 must be at least 2"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"dense_below": -1}, "dense_below=-1"),
        ({"retention": (3, 2)}, r"retention=\(3, 2\)"),
    ],
)
def test_options_are_validated(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineOptions(**({"max_context": 8} | options))  # type: ignore[arg-type]


def test_the_store_must_be_there_and_large_enough() -> None:
    with pytest.raises(ValueError, match="needs a reference store"):
        make_engine(sparse=False, retention=RETENTION)
    with pytest.raises(ValueError, match="raise max_context or lower key_retention"):
        make_engine(capacity=19)


# ---------------------------------------------------------------------- abort, memory, faults


def test_two_requests_that_each_need_most_of_the_pool() -> None:
    engine, _ = make_engine(pages=9)
    ids = [engine.add_request(PROMPTS[3], greedy(10)) for _ in range(2)]
    outputs = run_all(engine)
    assert [tokens_of(outputs[name]) for name in ids] == [oracle(PROMPTS[3], 10, True)] * 2


def test_one_slot_serves_one_request_after_the_other() -> None:
    engine, executor = make_engine(slots=2)
    assert generate(engine, PROMPTS) == [oracle(prompt, 6, True) for prompt in PROMPTS]
    assert all(plan.block_table.shape[0] == 2 for plan in executor.plans)


def test_a_small_request_does_not_overtake() -> None:
    engine, _ = make_engine(pages=9)
    big = [engine.add_request([1] * 20, greedy(3)) for _ in range(2)]
    small = engine.add_request([1], greedy(1))
    while engine.metrics(big[0]).new_tokens < 3:
        assert list(engine.scheduler.running) == big[:1] or not engine.scheduler.running
        engine.step()
    assert set(run_all(engine)) == {big[1], small}


@pytest.mark.parametrize("steps", range(6))
def test_abort_in_every_state(steps: int) -> None:
    engine, _ = make_engine(prefill_chunk=3)
    doomed = engine.add_request(PROMPTS[1], greedy(4), "doomed")
    other = engine.add_request(PROMPTS[0], greedy(6))
    outputs = [output for _ in range(steps) for output in engine.step()]
    output = engine.abort(doomed)
    assert output is not None
    assert (output.finish_reason, output.finished, output.token) == ("abort", True, NO_TOKEN)
    assert math.isnan(output.logprob)
    engine.check_integrity()
    assert engine.abort(doomed) is None
    engine.add_request(PROMPTS[2], greedy(5), "doomed")
    for name, more in run_all(engine).items():
        if name == "doomed":
            assert tokens_of(more) == oracle(PROMPTS[2], 5, True)
        else:
            outputs += more
    assert tokens_of([output for output in outputs if output.request_id == other]) == oracle(
        PROMPTS[0], 6, True
    )


def test_abort_of_the_unknown_and_of_the_finished() -> None:
    engine, _ = make_engine()
    with pytest.raises(KeyError):
        engine.abort("nobody")
    name = engine.add_request([1], greedy(1))
    run_all(engine)
    assert engine.abort(name) is None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("steps", range(5))
def test_an_executor_fault_ends_the_requests_of_that_step(when: str, steps: int) -> None:
    engine, executor = make_engine(prefill_chunk=3, slots=3)
    running = [engine.add_request(prompt, greedy(8)) for prompt in PROMPTS[:2]]
    waiting = engine.add_request(PROMPTS[2], greedy(3))
    for _ in range(steps):
        engine.step()
    executor.fault = (when, RuntimeError("device lost"))
    outputs = engine.step()
    assert [output.request_id for output in outputs] == running
    assert all(output.finish_reason == "error" and str(output.error) == "device lost" for output in outputs)
    engine.check_integrity()
    assert engine.pool.held_pages == 0
    assert tokens_of(run_all(engine)[waiting]) == oracle(PROMPTS[2], 3, True)


def test_requests_outside_the_failed_step_go_on() -> None:
    engine, executor = make_engine(max_rows=3, prefill_chunk=3)
    first = engine.add_request(PROMPTS[0], greedy(2))
    second = engine.add_request(PROMPTS[2], greedy(2))
    executor.fault = ("before", RuntimeError("once"))
    assert [output.request_id for output in engine.step()] == [first]
    assert tokens_of(run_all(engine)[second]) == oracle(PROMPTS[2], 2, True)


def test_wrong_logits_are_an_error() -> None:
    engine, executor = make_engine()
    engine.add_request([1], greedy(2))
    executor.run = lambda plan: torch.zeros(2, 4)  # type: ignore[method-assign]
    (output,) = engine.step()
    assert "logits (2, 4) for 1 rows" in str(output.error)
    engine.check_integrity()


def test_a_stale_plan_is_rejected_before_it_runs() -> None:
    engine, executor = make_engine()
    name = engine.add_request(PROMPTS[0], greedy(4))
    engine.step()
    build = engine.plans.build

    def build_then_correct(segments, pad_to=0):  # type: ignore[no-untyped-def]
        plan = build(segments, pad_to)
        request = engine.scheduler.running[name]
        request.lease = engine.store.renew(request.lease, request.lease.row)  # type: ignore[union-attr, arg-type]
        return plan

    engine.plans.build = build_then_correct  # type: ignore[method-assign]
    runs = len(executor.plans)
    (output,) = engine.step()
    assert type(output.error).__name__ == "StalePlan"
    assert len(executor.plans) == runs
    engine.check_integrity()


def boom(ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    if ids.shape[1] > 4:
        raise ZeroDivisionError("in a callback")
    return torch.zeros(1, 24) if scores is None else scores


@pytest.mark.parametrize("where", ["processor", "stop"])
def test_a_callback_fault_ends_only_its_request(where: str) -> None:
    engine, _ = make_engine()
    rule = boom if where == "processor" else lambda ids, scores: boom(ids, scores) is None
    bad = engine.add_request(PROMPTS[0], greedy(9, **{where: rule}))
    good = engine.add_request(PROMPTS[1], greedy(9))
    outputs = run_all(engine)
    assert tokens_of(outputs[good]) == oracle(PROMPTS[1], 9, True)
    last = outputs[bad][-1]
    assert last.finish_reason == "error"
    assert isinstance(last.error, ZeroDivisionError)
    # a failing stop rule has its token already, a failing processor has none
    tokens = oracle(PROMPTS[0], 2, True)
    assert tokens_of(outputs[bad]) == ([*tokens, NO_TOKEN] if where == "processor" else tokens)


@pytest.mark.parametrize("params", [greedy(2), greedy(2, do_sample=True), greedy(2, processor=boom)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_of_that_request(
    params: SamplingParams, value: float
) -> None:
    engine, executor = make_engine()
    run = executor.run
    bad = engine.add_request([1, 2], params)
    good = engine.add_request([1, 2], greedy(2))

    def spoil(plan):  # type: ignore[no-untyped-def]
        logits = run(plan)
        if len(executor.plans) == 1:
            logits[0, 3] = value
        return logits

    executor.run = spoil  # type: ignore[method-assign]
    outputs = run_all(engine)
    assert [output.finish_reason for output in outputs[bad]] == ["error"]
    assert "NaN" in str(outputs[bad][0].error)
    assert tokens_of(outputs[good]) == oracle([1, 2], 2, True)


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("where", ["processor", "stop"])
def test_a_callback_may_abort(victim: str, where: str) -> None:
    engine, _ = make_engine()

    def abort(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor | bool:
        if ids.shape[1] >= 5:
            engine.abort(victim)
        return scores if where == "processor" else False

    engine.add_request(PROMPTS[0], greedy(6, **{where: abort}), "a")
    engine.add_request(PROMPTS[0], greedy(6), "b")
    outputs = run_all(engine)
    survivor = "b" if victim == "a" else "a"
    assert tokens_of(outputs[survivor]) == oracle(PROMPTS[0], 6, True)
    # The token that was being chosen when the abort came is not given out.
    assert tokens_of(outputs[victim]) == oracle(PROMPTS[0], 2 if where == "processor" else 1, True)
    assert not any(output.finished for output in outputs[victim])
    if victim == "b":
        assert engine.metrics("b").new_tokens == len(outputs["b"])


def interrupt(ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    if ids.shape[1] > 4:
        raise KeyboardInterrupt
    return torch.zeros(1, 24) if scores is None else scores


@pytest.mark.parametrize("where", ["processor", "stop", "executor"])
def test_an_interrupt_ends_what_it_swallowed_and_nothing_else(where: str) -> None:
    engine, executor = make_engine()
    before = engine.add_request(PROMPTS[1], greedy(9))
    rules = {"processor": interrupt, "stop": lambda ids, scores: interrupt(ids, scores) is None}
    hit = engine.add_request(PROMPTS[0], greedy(9, **({} if where == "executor" else {where: rules[where]})))
    after = engine.add_request(PROMPTS[2], greedy(9))
    outputs: dict[str, list[int]] = {before: [], hit: [], after: []}
    errors: dict[str, str] = {}
    interrupts = steps = 0
    while engine.has_unfinished():
        steps += 1
        if where == "executor" and steps == 3:
            executor.fault = ("after", KeyboardInterrupt())  # type: ignore[assignment]
        try:
            for output in engine.step():
                if output.error is not None:
                    errors[output.request_id] = str(output.error)
                else:
                    outputs[output.request_id].append(output.token)
        except KeyboardInterrupt:
            interrupts += 1
        engine.check_integrity()
    assert interrupts == 1
    for name, prompt in ((before, PROMPTS[1]), (hit, PROMPTS[0]), (after, PROMPTS[2])):
        want = oracle(prompt, 9, True)
        assert outputs[name] == want[: len(outputs[name])]
        assert len(outputs[name]) == 9 or "interrupted by KeyboardInterrupt" in errors[name]
    assert (hit in errors) is (where != "executor")  # nothing was computed yet: that step is simply run again
    assert (before in errors) is (where == "processor")  # a stop rule comes after the tokens before it


@pytest.mark.parametrize("result", [None, torch.zeros(1, 3), torch.zeros(1, 24, dtype=torch.long)])
def test_a_processor_must_return_scores(result: object) -> None:
    engine, _ = make_engine()
    bad = engine.add_request(PROMPTS[0], greedy(3, processor=lambda ids, scores: result))
    good = engine.add_request(PROMPTS[1], greedy(3))
    outputs = run_all(engine)
    assert "must return scores of shape (1, 24)" in str(outputs[bad][0].error)
    assert tokens_of(outputs[good]) == oracle(PROMPTS[1], 3, True)


def test_a_step_within_a_step_is_refused() -> None:
    engine, _ = make_engine()

    def step(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        engine.step()
        return scores

    bad = engine.add_request(PROMPTS[0], greedy(3, processor=step))
    good = engine.add_request(PROMPTS[1], greedy(3))
    outputs = run_all(engine)
    assert "must not generate" in str(outputs[bad][0].error)
    assert tokens_of(outputs[good]) == oracle(PROMPTS[1], 3, True)


def test_an_engine_that_has_lost_its_pages_says_so_and_does_not_spin() -> None:
    engine, _ = make_engine(pages=9)
    engine.pool.allocate(5)
    engine.add_request(PROMPTS[3], greedy(10))
    with pytest.raises(RuntimeError, match=r"1 requests wait and none runs, with 3 of 8 pages free"):
        engine.step()


def test_finished_requests_leave_nothing_behind() -> None:
    engine, _ = make_engine()
    generate(engine, PROMPTS)
    engine.check_integrity()
    assert engine.pool.held_pages == 0
    assert engine.store is not None
    engine.store.collect()
    assert engine.store.free_slots == engine.store.usable_slots
    assert not engine.store.count.any()


class EngineMachine(RuleBasedStateMachine):
    """Any order of adding, stepping, aborting and failing keeps the laws, and finished answers are right."""

    def __init__(self) -> None:
        super().__init__()
        self.engine, self.executor = make_engine(pages=14, slots=4, max_rows=6, prefill_chunk=3)
        self.expected: dict[str, list[int]] = {}
        self.got: dict[str, list[int]] = {}

    @rule(
        prompt=st.lists(st.integers(0, 23), min_size=1, max_size=12),
        new=st.integers(1, 6),
        name=st.sampled_from("abcdef"),
        data=st.data(),
    )
    def add(self, prompt: list[int], new: int, name: str, data: st.DataObject) -> None:
        if name in self.expected:
            return
        prefix = data.draw(st.integers(0, min(6, len(prompt))))
        self.engine.add_request(prompt, greedy(new, prefix_length=prefix), name)
        self.expected[name] = oracle(prompt, new, True, prefix=prefix)
        self.got[name] = []

    @precondition(lambda self: self.expected)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.expected)))
        assert self.engine.abort(name) is not None
        del self.expected[name]

    @rule(fault=st.sampled_from([None, None, None, "before", "after"]))
    def step(self, fault: str | None) -> None:
        self.executor.fault = None if fault is None else (fault, RuntimeError("fault"))
        for output in self.engine.step():
            if output.finish_reason == "error":
                assert fault
                del self.expected[output.request_id]
                continue
            self.got[output.request_id].append(output.token)
            if output.finished:
                assert self.got[output.request_id] == self.expected.pop(output.request_id)
        self.executor.fault = None

    @invariant()
    def law(self) -> None:
        self.engine.check_integrity()
        assert self.engine.has_unfinished() == bool(self.expected)

    def teardown(self) -> None:
        for _ in range(200):
            if not self.engine.has_unfinished():
                break
            self.step(None)
        self.law()
        assert not self.expected
        assert self.engine.pool.held_pages == 0


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=60, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
