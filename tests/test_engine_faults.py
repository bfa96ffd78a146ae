"""Refusals, aborts, tight memory and faults: the pools stay whole, and others go on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from runtime_fakes import (
    PROMPTS,
    RETENTION,
    generate,
    greedy,
    make_engine,
    no_room,
    oracle,
    run_all,
    tokens_of,
)

from sparse_compile.runtime import steps
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
        (
            [1] * 20,
            greedy(1, prefix_length=17),
            "prefix_length=17 .* max_prefill_tokens=16 rows of prompts; raise",
        ),
    ],
)
def test_impossible_requests_are_refused(prompt: list[int], params: SamplingParams, message: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, params)
    assert not engine.has_unfinished()
    engine.check_integrity()


@pytest.mark.parametrize(
    "prompt",
    [
        5,
        None,
        "567",
        {5, 6},
        [1.5, 2],
        [True, 2],
        ["a"],
        torch.tensor([1.5]),
        torch.tensor([True]),
        torch.tensor(1),
    ],
    ids=str,
)
def test_prompts_are_integers_and_nothing_is_rounded(prompt: Any) -> None:
    engine, _ = make_engine()
    with pytest.raises(
        ValueError, match=r"^prompt_ids.*; (pass what a tokenizer gives|one request takes a 1-D)"
    ):
        engine.add_request(prompt, greedy(1))
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    "prompt", [(3, 1, 4), torch.tensor(PROMPTS[0], dtype=torch.int32), np.array(PROMPTS[0])]
)
def test_prompts_of_every_integer_kind_are_one_prompt(prompt: Any) -> None:
    engine, _ = make_engine()
    assert generate(engine, [prompt]) == [oracle(PROMPTS[0], 6, True)]
    with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
        engine.add_request(np.array([PROMPTS[0]]), greedy(1))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5 must be at least 1, an integer"),
        ({"max_new_tokens": "3"}, "max_new_tokens='3'"),
        ({"max_new_tokens": True}, "max_new_tokens=True"),
        ({"max_new_tokens": 2, "eos_token_ids": 2}, "eos_token_ids=2 must be a tuple of token ids"),
        ({"max_new_tokens": 2, "eos_token_ids": None}, "eos_token_ids=None"),
        ({"max_new_tokens": 2, "prefix_length": 1.0}, "prefix_length=1.0 must be an integer"),
        ({"max_new_tokens": 2, "do_sample": "no"}, "do_sample='no' must be True or False"),
        ({"max_new_tokens": 2, "want_logits": 1}, "want_logits=1 must be True or False"),
        ({"max_new_tokens": 2, "generator": 5}, "generator=5 must be a torch.Generator"),
        ({"max_new_tokens": 2, "processor": 5}, "processor=5 must be callable"),
        ({"max_new_tokens": 2, "stop": "."}, "stop='.' must be callable"),
    ],
)
def test_parameters_are_checked_before_anything_runs(asked: dict[str, Any], message: str) -> None:
    engine, _ = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.add_request([1], SamplingParams(**asked))
    with pytest.raises(ValueError, match=r"params=3 must be SamplingParams; pass"):
        engine.add_request([1], 3)  # type: ignore[arg-type]
    assert not engine.has_unfinished()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"request_id": 5}, "request_id=5 must be a string"),
        ({"priority": None}, "priority=None must be an integer"),
        ({"priority": float("nan")}, "priority=nan must be an integer"),
    ],
)
def test_what_cannot_be_ordered_does_not_come_in(given: dict[str, Any], message: str) -> None:
    """It would break the queue for those that are in it."""
    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(2), "a")
    with pytest.raises(ValueError, match=message):
        engine.add_request([1], greedy(1), **given)
    assert tokens_of(run_all(engine)["a"]) == oracle(PROMPTS[0], 2, True)


def test_ids_that_the_model_does_not_know_and_prefixes_that_it_does_not_have_are_refused() -> None:
    engine, _ = make_engine(vocabulary=24, prefix_lm=False)
    with pytest.raises(
        ValueError, match=r"prompt_ids holds 24; the model knows ids up to 23, check the tokenizer"
    ):
        engine.add_request([1, 24, 3], greedy(1))
    with pytest.raises(ValueError, match=r"prefix_length=2: the model is no prefix-LM.*pass prefix_length=0"):
        engine.add_request([1, 2, 3], greedy(1, prefix_length=2))
    engine.add_request([1, 23], greedy(1))
    run_all(engine)


def test_an_id_is_not_used_again_before_its_last_outputs_were_returned() -> None:
    """They would be taken for those of the new request."""
    engine, _ = make_engine(async_steps=True)
    engine.add_request(PROMPTS[0], greedy(2), "a")
    engine.add_request(PROMPTS[0], greedy(9), "b")
    engine.step()
    engine.step()
    engine.suspend("b")  # reads the last token of "a"
    with pytest.raises(ValueError, match=r"request_id='a' has outputs that step\(\) has not returned yet"):
        engine.add_request(PROMPTS[2], greedy(2), "a")
    assert [output.request_id for output in engine.step()] == ["a", "b"]
    engine.add_request(PROMPTS[2], greedy(2), "a")
    assert tokens_of(run_all(engine)["a"]) == oracle(PROMPTS[2], 2, True)


def test_a_request_larger_than_the_pool_is_refused() -> None:
    engine, _ = make_engine(pages=5)
    with pytest.raises(
        ValueError, match=r"17 tokens need 5 pages of 4, the pool has 4 in all; .* pool_tokens"
    ):
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
        ({"max_context": 1}, "max_context=1 must be at least 2; pass max_context=2 or more"),
        ({"max_seqs": 0}, "max_seqs=0"),
        ({"max_prefill_tokens": 0}, "max_prefill_tokens=0"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"dense_below": -1}, "dense_below=-1"),
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
    assert all(len(plan.chunks) == 1 for plan in executor.plans)


def test_a_small_request_does_not_overtake() -> None:
    engine, _ = make_engine(pages=9)
    big = [engine.add_request([1] * 20, greedy(3)) for _ in range(2)]
    small = engine.add_request([1], greedy(1))
    while engine.metrics(big[0]).new_tokens < 3:
        assert list(engine.scheduler.running) == big[:1] or not engine.scheduler.running
        engine.step()
    assert set(run_all(engine)) == {big[1], small}


@pytest.mark.parametrize("count", range(6))
def test_abort_in_every_state(count: int) -> None:
    engine, _ = make_engine(prefill_chunk=3)
    doomed = engine.add_request(PROMPTS[1], greedy(4), "doomed")
    other = engine.add_request(PROMPTS[0], greedy(6))
    outputs = [output for _ in range(count) for output in engine.step()]
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


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("loops", [None, 1, 2])
@pytest.mark.parametrize("count", range(6))
def test_an_executor_fault_ends_only_the_request_that_causes_it(
    when: str, count: int, loops: int | None, async_steps: bool
) -> None:
    engine, executor = make_engine(prefill_chunk=3, async_steps=async_steps, loops_per_step=loops)
    ids = [engine.add_request(prompt, greedy(8)) for prompt in PROMPTS]
    outputs = [output for _ in range(count) for output in engine.step()]
    if not count:
        engine.scheduler.pick()  # everyone sits down
    error = torch.OutOfMemoryError("too much")
    executor.curse = (engine.scheduler.requests[ids[1]], when, error)
    for more in run_all(engine).values():
        outputs += more
    for name, prompt in zip(ids, PROMPTS, strict=True):
        mine = [output for output in outputs if output.request_id == name]
        if name != ids[1]:
            assert tokens_of(mine) == oracle(prompt, 8, True)
            continue
        assert mine[-1].error is error
        assert tokens_of(mine[:-1]) == oracle(prompt, 8, True)[: len(mine) - 1]
    assert engine.pool.held_pages == 0


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("loops", [None, 1, 2])
def test_a_fault_that_does_not_come_back_costs_nobody_anything(when: str, loops: int | None) -> None:
    for when_step in range(8):
        engine, executor = make_engine(prefill_chunk=3, loops_per_step=loops)
        ids = [engine.add_request(prompt, greedy(8)) for prompt in PROMPTS]
        outputs = {name: [] for name in ids}
        for step in range(200):
            if step == when_step:
                executor.fault = (when, RuntimeError("once"))
            for output in engine.step():
                outputs[output.request_id].append(output)
        assert [tokens_of(outputs[name]) for name in ids] == [oracle(prompt, 8, True) for prompt in PROMPTS]


@pytest.mark.parametrize("options", [{}, {"async_steps": True, "loops_per_step": 1, "prefix_caching": True}])
@pytest.mark.parametrize("where", ["take", "write", "acquire", "allocate", "grow", "renew", "resume"])
def test_memory_that_runs_out_anywhere_ends_one_request(where: str, options: dict[str, Any]) -> None:
    """While a request is admitted, gets a page, begins a row or comes back; the first time, the second, ..."""
    for count in (1, 2, 3, 5, 8):
        engine, _ = make_engine(pages=9, prefill_chunk=3, **options)
        ids = [engine.add_request(prompt, greedy(8)) for prompt in PROMPTS]
        with no_room(engine, where, count):
            outputs = run_all(engine)
        failed = [name for name in ids if outputs[name][-1].finish_reason == "error"]
        assert len(failed) == 1 or (count > 1 and not failed)  # there may be fewer such calls
        for name, prompt in zip(ids, PROMPTS, strict=True):
            if name not in failed:
                assert tokens_of(outputs[name]) == oracle(prompt, 8, True)
        assert all(str(outputs[name][-1].error) == "no room" for name in failed)
        assert engine.metrics().pages_free == engine.pool.usable_pages


def test_slots_that_cannot_be_cleared_are_not_lost() -> None:
    engine, _ = make_engine(slots=2)
    engine.add_request(PROMPTS[0], greedy(1))
    run_all(engine)
    assert engine.store is not None
    name = engine.add_request(PROMPTS[1], greedy(3))
    with no_room(engine, "_clear"), pytest.raises(torch.OutOfMemoryError):
        engine.step()
    engine.check_integrity()
    assert tokens_of(run_all(engine)[name]) == oracle(PROMPTS[1], 3, True)


@pytest.mark.parametrize("where", ["choose", "TokenReader"])
def test_a_fault_while_tokens_are_chosen_ends_those_that_cannot_choose_twice(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make_engine()
    ids = [
        engine.add_request(PROMPTS[0], greedy(3)),
        engine.add_request(PROMPTS[2], greedy(3, do_sample=True)),
    ]
    whole = getattr(steps, where)

    def fail(*args: object) -> None:
        monkeypatch.setattr(steps, where, whole)
        raise RuntimeError("no memory for a token")

    monkeypatch.setattr(steps, where, fail)
    outputs = run_all(engine)
    assert tokens_of(outputs[ids[0]]) == oracle(PROMPTS[0], 3, True)
    assert [str(output.error) for output in outputs[ids[1]]] == ["no memory for a token"]


def test_wrong_logits_are_an_error() -> None:
    engine, executor = make_engine()
    engine.add_request([1], greedy(2))
    executor.prefill = lambda plan: torch.zeros(2, 4)  # type: ignore[method-assign]
    (output,) = engine.step()
    assert "logits (2, 4) for 1 rows" in str(output.error)
    engine.check_integrity()


def test_a_stale_plan_is_rejected_before_it_runs() -> None:
    engine, executor = make_engine()
    name = engine.add_request(PROMPTS[0], greedy(4))
    engine.step()
    build = engine.plans.build

    def build_then_correct(segments, loops=None):  # type: ignore[no-untyped-def]
        plan = build(segments, loops=loops)
        request = engine.scheduler.running[name]
        request.leases[0] = engine.store.renew(request.leases[0], request.leases[0].row)  # type: ignore[union-attr]
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
    assert engine.metrics(bad).loops_run == 3 * (5 if where == "processor" else 4)  # the last row has run


@pytest.mark.parametrize("params", [greedy(2), greedy(2, do_sample=True), greedy(2, processor=boom)])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error_of_that_request(
    params: SamplingParams, value: float
) -> None:
    engine, executor = make_engine()
    run = executor.prefill
    bad = engine.add_request([1, 2], params)
    good = engine.add_request([1, 2], greedy(2))

    def spoil(plan):  # type: ignore[no-untyped-def]
        logits = run(plan)
        if len(executor.plans) == 1:
            logits[0, 3] = value
        return logits

    executor.prefill = spoil  # type: ignore[method-assign]
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


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("loops", [None, 1])
@pytest.mark.parametrize("async_steps", [False, True])
def test_the_processor_of_a_prompt_may_abort_what_decodes_in_the_same_step(
    async_steps: bool, loops: int | None, again: bool
) -> None:
    """Prompts run first: the row that was picked behind them has lost its seat, its pages and its slot."""
    engine, _ = make_engine(async_steps=async_steps, loops_per_step=loops)
    engine.add_request(PROMPTS[0], greedy(12), "a")
    engine.add_request(PROMPTS[2], greedy(12), "b")
    outputs = [output for _ in range(5) for output in engine.step() if output.request_id == "b"]

    def abort(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == len(PROMPTS[0]):
            engine.abort("a")
            if again:
                engine.add_request(PROMPTS[1], greedy(4), "a")
        return scores

    engine.add_request(PROMPTS[0], greedy(3, processor=abort), "c")
    rest = run_all(engine)
    assert tokens_of([*outputs, *rest["b"]]) == oracle(PROMPTS[2], 12, True)
    assert tokens_of(rest["c"]) == oracle(PROMPTS[0], 3, True)
    if again:
        assert tokens_of(rest["a"])[-4:] == oracle(PROMPTS[1], 4, True)
    assert engine.metrics().failed_runs == 0


def test_scores_of_a_processor_keep_no_graph() -> None:
    weight = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
    for do_sample in (False, True):
        engine, _ = make_engine()
        asked = greedy(
            2, processor=lambda ids, scores: scores * weight, want_logits=True, do_sample=do_sample
        )
        engine.add_request(PROMPTS[0], asked, "a")
        outputs = run_all(engine)["a"]
        assert [output.error for output in outputs] == [None, None]
        assert not any(output.scores.requires_grad for output in outputs if output.scores is not None)


def interrupt(ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
    if ids.shape[1] > 4:
        raise KeyboardInterrupt
    return torch.zeros(1, 24) if scores is None else scores


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("loops", [None, 2])
@pytest.mark.parametrize("where", ["processor", "stop", "executor"])
def test_an_interrupt_ends_what_it_swallowed_and_nothing_else(
    where: str, loops: int | None, async_steps: bool
) -> None:
    engine, executor = make_engine(async_steps=async_steps, loops_per_step=loops)
    before = engine.add_request(PROMPTS[1], greedy(9))
    rules = {"processor": interrupt, "stop": lambda ids, scores: interrupt(ids, scores) is None}
    hit = engine.add_request(PROMPTS[0], greedy(9, **({} if where == "executor" else {where: rules[where]})))
    after = engine.add_request(PROMPTS[2], greedy(9))
    outputs: dict[str, list[int]] = {before: [], hit: [], after: []}
    errors: dict[str, str] = {}
    interrupts = count = 0
    while engine.has_unfinished():
        count += 1
        if where == "executor" and count == 4:
            executor.fault = ("after", KeyboardInterrupt())
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
    assert not executor.broken
    for name, prompt in ((before, PROMPTS[1]), (hit, PROMPTS[0]), (after, PROMPTS[2])):
        want = oracle(prompt, 9, True)
        assert outputs[name] == want[: len(outputs[name])]
        assert len(outputs[name]) == 9 or "interrupted by KeyboardInterrupt" in errors[name]
    # Only the interrupted callback cannot be asked again; everything else is simply run, or read, again.
    assert set(errors) == (set() if where == "executor" else {hit})


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
    look = engine.metrics()
    assert (look.pages_free, look.slots_free) == (look.pages_total, look.slots_total)
    engine.store.collect()
    assert engine.store.free_slots == engine.store.usable_slots
    assert not engine.store.count.any()
