"""The engine: laws of generation, faults, edges. The model is the deterministic one of runtime_fakes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from runtime_fakes import (
    RETENTION,
    SITES,
    FakeSite,
    greedy,
    make_engine,
    oracle,
    oracle_logits,
    run_all,
    tokens_of,
)

from sparse_compile.kernels.retention import retained_count
from sparse_compile.runtime.engine import Engine, EngineOptions
from sparse_compile.runtime.request import NO_TOKEN, SamplingParams, StepOutput
from sparse_compile.runtime.sampler import sample

torch.set_num_threads(1)

PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4])


def only(outputs: dict[str, list[StepOutput]]) -> list[StepOutput]:
    (values,) = outputs.values()
    return values


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], new: int = 6, **params: object
) -> list[list[int]]:
    ids = [engine.add_request(prompt, greedy(new, **params)) for prompt in prompts]
    outputs = run_all(engine)
    assert all(outputs[name][-1].finished for name in ids)
    return [tokens_of(outputs[name]) for name in ids]


# ---------------------------------------------------------------------- laws


@pytest.mark.parametrize("sparse", [False, True])
def test_a_batch_of_ragged_requests_equals_the_oracle(sparse: bool) -> None:
    engine, executor = make_engine(sparse=sparse)
    assert generate(engine, PROMPTS) == [oracle(prompt, 6, sparse) for prompt in PROMPTS]
    kinds = {plan.kind for plan in executor.plans}
    assert kinds == ({"dense", "mixed", "sparse"} if sparse else {"dense"})


@pytest.mark.parametrize("chunk", [1, 2, 5, 64])
def test_one_chunk_equals_many(chunk: int) -> None:
    engine, executor = make_engine(prefill_chunk=chunk)
    assert generate(engine, PROMPTS[3:]) == [oracle(PROMPTS[3], 6, True)]
    assert max(plan.rows for plan in executor.plans) == min(chunk, 13)


def test_a_batch_equals_each_alone() -> None:
    alone = [generate(make_engine()[0], [prompt])[0] for prompt in PROMPTS]
    assert generate(make_engine()[0], PROMPTS) == alone


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 23), min_size=1, max_size=20), st.integers(1, 8)), max_size=7),
    st.integers(1, 7),
    st.integers(1, 9),
    st.integers(8, 30),
    st.integers(0, 30),
)
@settings(max_examples=100, deadline=None)
def test_any_shape_of_the_work_gives_the_same_tokens(
    requests: list[tuple[list[int], int]], chunk: int, rows: int, pages: int, dense_below: int
) -> None:
    engine, executor = make_engine(
        pages=pages, slots=4, prefill_chunk=chunk, max_rows=rows, dense_below=dense_below
    )
    ids = [engine.add_request(prompt, greedy(new)) for prompt, new in requests]
    outputs = run_all(engine)
    assert [tokens_of(outputs[name]) for name in ids] == [
        oracle(prompt, new, True, dense_below) for prompt, new in requests
    ]
    assert all(plan.rows <= rows for plan in executor.plans)


def test_rows_below_the_break_even_length_run_dense() -> None:
    engine, executor = make_engine(dense_below=6)
    assert generate(engine, [PROMPTS[0]]) == [oracle(PROMPTS[0], 6, True, dense_below=6)]
    assert [plan.kind for plan in executor.plans] == ["dense"] * 3 + ["sparse"] * 3


def test_prompts_are_computed_in_ragged_chunks_of_several_requests() -> None:
    engine, executor = make_engine(prefill_chunk=4, max_rows=9)
    for prompt in PROMPTS:
        engine.add_request(prompt, greedy(1))
    engine.step()
    assert executor.plans[0].row_seq.tolist() == [1] * 3 + [2] * 4 + [3] * 2
    assert executor.plans[0].logit_rows.tolist() == [2, 8]


def test_outputs_come_in_the_order_of_admission() -> None:
    engine, _ = make_engine()
    ids = [engine.add_request(prompt, greedy(3)) for prompt in ([1], [2], [3])]
    while engine.has_unfinished():
        assert [output.request_id for output in engine.step()] == ids


def test_a_waiting_request_joins_a_running_batch() -> None:
    engine, _ = make_engine()
    first = engine.add_request(PROMPTS[0], greedy(8))
    outputs = {first: engine.step()}
    second = engine.add_request(PROMPTS[1], greedy(4))
    for name, more in run_all(engine).items():
        outputs.setdefault(name, []).extend(more)
    assert tokens_of(outputs[first]) == oracle(PROMPTS[0], 8, True)
    assert tokens_of(outputs[second]) == oracle(PROMPTS[1], 4, True)


# ---------------------------------------------------------------------- prefix-LM


@pytest.mark.parametrize("prefix", [1, 6, 13])
@pytest.mark.parametrize("chunk", [2, 64])
def test_a_prefix_is_prefilled_in_one_chunk(prefix: int, chunk: int) -> None:
    engine, executor = make_engine(prefill_chunk=chunk)
    tokens = generate(engine, [PROMPTS[3]], prefix_length=prefix)
    assert tokens == [oracle(PROMPTS[3], 6, True, prefix=prefix)]
    assert executor.plans[0].rows == min(13, max(prefix, chunk))


def test_a_prefix_is_not_kept_out_by_decode_rows() -> None:
    engine, _ = make_engine(max_rows=8, prefill_chunk=2)
    ids = [engine.add_request([n], greedy(10)) for n in range(3)]
    engine.step()
    ids.append(engine.add_request(PROMPTS[1] + [1], greedy(2, prefix_length=8)))
    outputs = engine.step()
    assert [output.request_id for output in outputs] == ids[3:]
    rest = run_all(engine)
    assert tokens_of(outputs + rest[ids[3]]) == oracle(PROMPTS[1] + [1], 2, True, prefix=8)


def test_a_prefix_and_causal_requests_share_a_batch() -> None:
    engine, _ = make_engine(prefill_chunk=3)
    a = engine.add_request(PROMPTS[1], greedy(5, prefix_length=4))
    b = engine.add_request(PROMPTS[1], greedy(5))
    outputs = run_all(engine)
    assert tokens_of(outputs[a]) == oracle(PROMPTS[1], 5, True, prefix=4)
    assert tokens_of(outputs[b]) == oracle(PROMPTS[1], 5, True)


# ---------------------------------------------------------------------- sampling and finishing


def test_finish_by_length() -> None:
    engine, _ = make_engine()
    name = engine.add_request(PROMPTS[0], greedy(1))
    (output,) = engine.step()
    assert (output.finished, output.finish_reason, output.request_id) == (True, "length", name)
    assert engine.step() == []


def test_finish_by_eos_emits_it() -> None:
    tokens = oracle(PROMPTS[0], 6, True)
    cut = next(n for n in range(1, 6) if tokens[n] not in tokens[:n])
    engine, _ = make_engine()
    engine.add_request(
        PROMPTS[0], greedy(6, eos_token_ids=(tokens[cut], 999), stop=lambda ids, scores: False)
    )
    outputs = only(run_all(engine))
    assert tokens_of(outputs) == tokens[: cut + 1]
    assert [output.finish_reason for output in outputs] == [None] * cut + ["eos"]


def test_eos_wins_over_length_and_stop() -> None:
    first = oracle(PROMPTS[0], 1)[0]
    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(1, eos_token_ids=(first,), stop=lambda ids, scores: True))
    assert engine.step()[0].finish_reason == "eos"


def test_stop_rules_see_the_new_token_and_the_scores() -> None:
    seen: list[tuple[list[list[int]], torch.Tensor]] = []

    def stop(ids: torch.Tensor, scores: torch.Tensor | None) -> torch.Tensor:
        assert ids.dtype == torch.int64
        assert scores is not None
        seen.append((ids.tolist(), scores.clone()))
        return torch.tensor([len(seen) == 3])

    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(6, stop=stop))
    outputs = only(run_all(engine))
    tokens = oracle(PROMPTS[0], 3, True)
    assert tokens_of(outputs) == tokens
    assert outputs[-1].finish_reason == "stop"
    assert [ids for ids, _ in seen] == [[PROMPTS[0] + tokens[: n + 1]] for n in range(3)]
    assert torch.equal(seen[0][1][0], oracle_logits(PROMPTS[0], 3))


def test_a_processor_decides_and_the_logprob_is_of_its_scores() -> None:
    def ban_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.shape[0] == scores.shape[0] == 1
        scores[:, ::2] = -torch.inf  # in place, as transformers' processors may
        return scores

    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(4, processor=ban_even, want_logits=True))
    tokens = list(PROMPTS[0])
    for output in only(run_all(engine)):
        raw = oracle_logits(tokens, 3, True)
        scores = raw.clone()
        scores[::2] = -torch.inf
        assert output.token == int(scores.argmax())
        assert output.token % 2
        assert output.logprob == pytest.approx(float(scores.log_softmax(-1)[output.token]))
        assert output.logits is not None
        assert output.scores is not None
        assert torch.equal(output.logits, raw)
        assert torch.equal(output.scores, scores)
        tokens.append(output.token)


def test_logprobs_of_plain_greedy_are_those_of_the_raw_logits() -> None:
    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(1))
    (output,) = engine.step()
    expected = oracle_logits(PROMPTS[0], 3).log_softmax(-1)
    assert output.logprob == pytest.approx(float(expected.max()), abs=1e-12)
    assert (output.logits, output.scores) == (None, None)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(8, do_sample=True, generator=torch.Generator().manual_seed(seed))


def test_a_seed_gives_the_same_tokens_whoever_the_neighbours_are() -> None:
    engine, _ = make_engine()
    engine.add_request(PROMPTS[1], sampled(5), "alone")
    alone = tokens_of(run_all(engine)["alone"])
    for neighbour in (greedy(3), sampled(6)):
        engine.add_request(PROMPTS[0], neighbour, "neighbour")
        engine.add_request(PROMPTS[1], sampled(5), "batched")
        assert tokens_of(run_all(engine)["batched"]) == alone
    engine.add_request(PROMPTS[1], sampled(7), "other")
    assert tokens_of(run_all(engine)["other"]) != alone


def test_without_a_generator_torch_manual_seed_decides() -> None:
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(generate(make_engine()[0], PROMPTS[:2], do_sample=True))
    assert results[0] == results[1]


def test_sampling_has_the_distribution_of_the_scores() -> None:
    engine, _ = make_engine()
    logits = torch.tensor([[0.0, 1.0, 2.0, -torch.inf]])
    engine.add_request([1], SamplingParams(1, do_sample=True), "a")
    request = engine.scheduler.find("a")
    assert request is not None
    request.params.generator.manual_seed(0)  # type: ignore[union-attr]
    draws = [sample(logits, [request])[0].token for _ in range(2000)]  # type: ignore[union-attr]
    counts = torch.bincount(torch.tensor(draws), minlength=4).double()
    expected = logits[0].double().softmax(-1) * 2000
    assert counts[3] == 0
    chi_square = float(((counts - expected)[:3] ** 2 / expected[:3]).sum())
    assert chi_square < 13.8  # two degrees of freedom, p = 0.001


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_scores_are_float32_or_float64(dtype: torch.dtype) -> None:
    seen: list[torch.dtype] = []

    def note(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(scores.dtype)
        return scores

    engine, _ = make_engine()
    engine.add_request([1], greedy(1, processor=note), "a")
    sample(torch.zeros(1, 4, dtype=dtype), [engine.scheduler.find("a")])  # type: ignore[list-item]
    assert seen == [torch.float64 if dtype == torch.float64 else torch.float32]


# ---------------------------------------------------------------------- metrics


def keys(site: FakeSite, length: int, sparse: bool, retention: tuple[int, int]) -> int:
    visible = min(length, site.window) if site.window else length
    return site.heads * (retained_count(length, *retention) if sparse and site.kind == "consume" else visible)


@pytest.mark.parametrize("retention", [(3, 10), (1, 10)])
def test_keys_read_is_the_sum_over_sites_and_rows(retention: tuple[int, int]) -> None:
    engine, _ = make_engine(retention=retention)
    name = engine.add_request(PROMPTS[1], greedy(4))
    (*_, last) = run_all(engine)[name]
    prompt = sum(keys(site, n, False, retention) for n in range(1, 8) for site in SITES)
    read = sum(keys(site, n, True, retention) for n in range(8, 11) for site in SITES)
    dense = sum(keys(site, n, False, retention) for n in range(8, 11) for site in SITES)
    metrics = engine.metrics(name)
    assert last.metrics is metrics
    assert (metrics.keys_read, metrics.keys_dense) == (prompt + read, prompt + dense)
    assert (metrics.decode_keys_read, metrics.decode_keys_dense) == (read, dense)
    assert (metrics.prompt_tokens, metrics.new_tokens, metrics.loops_run) == (7, 4, 3 * 10)


def test_full_retention_reads_what_dense_reads() -> None:
    for options in ({"retention": (1, 1)}, {"sparse": False}):
        engine, _ = make_engine(**options)
        name = engine.add_request(PROMPTS[1], greedy(4))
        run_all(engine)
        metrics = engine.metrics(name)
        assert metrics.keys_read == metrics.keys_dense > 0


def test_windows_of_prefix_rows() -> None:
    engine, _ = make_engine(sites=(FakeSite("dense", heads=1, window=2),))
    name = engine.add_request([1, 2, 3, 4, 5], greedy(1, prefix_length=4))
    run_all(engine)
    # keys >= position - 1, below the visible length: 4, 4, 3, 2 of the prefix, then 2
    assert engine.metrics(name).keys_read == 4 + 4 + 3 + 2 + 2


def test_times_are_measured() -> None:
    engine, _ = make_engine()
    name = engine.add_request(PROMPTS[0], greedy(3))
    assert engine.metrics(name).time_to_first_token_s is None
    engine.step()
    first = engine.metrics(name).time_to_first_token_s
    assert first is not None
    assert first > 0
    assert engine.metrics(name).time_per_token_s is None
    run_all(engine)
    per_token = engine.metrics(name).time_per_token_s
    assert per_token is not None
    assert per_token > 0
    assert engine.metrics(name).time_to_first_token_s == first


def test_metrics_of_an_unknown_request() -> None:
    with pytest.raises(KeyError, match="no request 'x'"):
        make_engine()[0].metrics("x")


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
        ([1] * 20, greedy(1, prefix_length=17), "prefix_length=17 .* max_rows=16 rows; raise max_rows"),
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
    assert not any(output.finished for output in outputs[victim])


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
    """Any order of adding, stepping, aborting and failing keeps the laws; and every finished answer is right."""

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
