"""The laws of generation: the shape of the work never changes the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import (
    PROMPTS,
    FakeExecutor,
    generate,
    greedy,
    make_engine,
    oracle,
    run_all,
    tokens_of,
)

from sparse_compile.runtime.reference_store import SlotState
from sparse_compile.runtime.request import StepOutput

# ---------------------------------------------------------------------- laws


@pytest.mark.parametrize("sparse", [False, True])
def test_a_batch_of_ragged_requests_equals_the_oracle(sparse: bool) -> None:
    engine, executor = make_engine(sparse=sparse)
    assert generate(engine, PROMPTS) == [oracle(prompt, 6, sparse) for prompt in PROMPTS]
    kinds = {plan.kind for plan in executor.plans}
    assert kinds == ({"dense", "sparse"} if sparse else {"dense"})


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
    st.integers(1, 5),
    st.integers(8, 30),
    st.integers(0, 30),
    st.booleans(),
    st.sampled_from((None, 1, 2, 3)),
)
@settings(max_examples=100, deadline=None)
def test_any_shape_of_the_work_gives_the_same_tokens(
    requests: list[tuple[list[int], int]],
    chunk: int,
    rows: int,
    seats: int,
    pages: int,
    dense_below: int,
    async_steps: bool,
    loops: int | None,
) -> None:
    engine, executor = make_engine(
        pages=pages,
        slots=4,
        prefill_chunk=chunk,
        max_prefill_tokens=rows,
        max_seqs=seats,
        dense_below=dense_below,
        async_steps=async_steps,
        loops_per_step=loops,
    )
    ids = [engine.add_request(prompt, greedy(new)) for prompt, new in requests]
    outputs = run_all(engine)
    assert [tokens_of(outputs[name]) for name in ids] == [
        oracle(prompt, new, True, dense_below) for prompt, new in requests
    ]
    assert all(
        plan.rows <= (seats if plan.chunks[0].start >= 20 else max(rows, seats)) for plan in executor.plans
    )


def test_rows_below_the_break_even_length_run_dense() -> None:
    engine, executor = make_engine(dense_below=6)
    assert generate(engine, [PROMPTS[0]]) == [oracle(PROMPTS[0], 6, True, dense_below=6)]
    assert [plan.kind for plan in executor.plans] == ["dense"] * 3 + ["sparse"] * 3


def test_prompts_are_computed_in_ragged_chunks_of_several_requests() -> None:
    engine, executor = make_engine(prefill_chunk=4, max_prefill_tokens=9)
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


def test_each_sparse_token_is_a_new_incarnation_of_the_same_slot() -> None:
    engine, executor = make_engine()
    name = engine.add_request(PROMPTS[0], greedy(5))
    for _ in range(4):
        engine.step()
    leases = [lease for plan in executor.plans for lease in plan.leases]
    assert [lease.row for lease in leases] == [3, 4, 5]
    assert len({lease.slot for lease in leases}) == 1
    assert [lease.incarnation - leases[0].incarnation for lease in leases] == [0, 1, 2]
    assert engine.store is not None
    assert engine.scheduler.running[name].leases == leases[-1:]
    assert engine.store.state(leases[-1].slot) is SlotState.REUSABLE


# ---------------------------------------------------------------------- prefix-LM


@pytest.mark.parametrize("prefix", [1, 6, 13])
@pytest.mark.parametrize("chunk", [2, 64])
def test_a_prefix_is_prefilled_in_one_chunk(prefix: int, chunk: int) -> None:
    engine, executor = make_engine(prefill_chunk=chunk)
    tokens = generate(engine, [PROMPTS[3]], prefix_length=prefix)
    assert tokens == [oracle(PROMPTS[3], 6, True, prefix=prefix)]
    assert executor.plans[0].rows == min(13, max(prefix, chunk))


def test_a_prefix_is_prefilled_beside_decode_rows() -> None:
    engine, _ = make_engine(max_prefill_tokens=8, prefill_chunk=2)
    ids = [engine.add_request([n], greedy(10)) for n in range(3)]
    engine.step()
    ids.append(engine.add_request(PROMPTS[1] + [1], greedy(2, prefix_length=8)))
    outputs = engine.step()
    assert [output.request_id for output in outputs] == [ids[3], *ids[:3]]
    outputs = outputs[:1]
    rest = run_all(engine)
    assert tokens_of(outputs + rest[ids[3]]) == oracle(PROMPTS[1] + [1], 2, True, prefix=8)


def test_a_prefix_and_causal_requests_share_a_batch() -> None:
    engine, _ = make_engine(prefill_chunk=3)
    a = engine.add_request(PROMPTS[1], greedy(5, prefix_length=4))
    b = engine.add_request(PROMPTS[1], greedy(5))
    outputs = run_all(engine)
    assert tokens_of(outputs[a]) == oracle(PROMPTS[1], 5, True, prefix=4)
    assert tokens_of(outputs[b]) == oracle(PROMPTS[1], 5, True)


def test_no_more_requests_run_than_there_are_seats() -> None:
    engine, _ = make_engine(max_seqs=2)
    for n in range(5):
        engine.add_request([n], greedy(3))

    def limit() -> None:
        assert len(engine.scheduler.running) <= 2

    assert len(run_all(engine, limit)) == 5


def test_prompts_and_decode_rows_of_one_step_are_two_runs() -> None:
    engine, executor = make_engine(prefill_chunk=2)
    engine.add_request([1, 2], greedy(5))
    engine.step()
    engine.add_request([3, 4, 5], greedy(2))
    executor.plans.clear()
    engine.step()
    assert [(plan.kind, plan.rows) for plan in executor.plans] == [("dense", 2), ("sparse", 1)]


# ---------------------------------------------------------------------- asynchronous steps


def test_a_step_is_submitted_before_the_last_one_is_read() -> None:
    engine, executor = make_engine(async_steps=True)
    name = engine.add_request(PROMPTS[0], greedy(3))
    assert engine.step() == []
    for n in range(2):
        (output,) = engine.step()
        assert len(executor.plans) == n + 2
        assert int(executor.plans[-1].token_ids[0]) == output.token  # the device knew it already
    (last,) = engine.step()
    assert last.finish_reason == "length"
    assert len(executor.plans) == 3  # none beyond the end, which the host knows
    assert engine.metrics(name).new_tokens == 3
    assert not engine.has_unfinished()


def test_a_row_beyond_the_end_is_dropped_and_not_counted() -> None:
    tokens = oracle(PROMPTS[0], 6, True)
    cut = next(n for n in range(1, 6) if tokens[n] not in tokens[:n])
    rows, metrics = [], []
    for async_steps in (False, True):
        engine, executor = make_engine(async_steps=async_steps)
        name = engine.add_request(PROMPTS[0], greedy(6, eos_token_ids=(tokens[cut],)))
        assert tokens_of(run_all(engine)[name]) == tokens[: cut + 1]
        rows.append(len(executor.plans))
        of = engine.metrics(name)
        metrics.append((of.new_tokens, of.keys_read, of.keys_dense, of.loops_run))
    assert rows[1] == rows[0] + 1
    assert metrics[0] == metrics[1]


# ---------------------------------------------------------------------- some loops per step


@pytest.mark.parametrize("loops", [1, 2, 3])
def test_rows_at_several_depths_share_a_batch(loops: int) -> None:
    engine, executor = make_engine(loops_per_step=loops)
    prompts, ids = [[3, 1, 4], [2, 7], [1, 5, 9, 2]], []
    outputs: dict[str, list[StepOutput]] = {}
    for prompt in prompts:
        ids.append(engine.add_request(prompt, greedy(5)))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    for name, more in run_all(engine).items():
        outputs.setdefault(name, []).extend(more)
    assert [tokens_of(outputs[name]) for name in ids] == [oracle(prompt, 5, True) for prompt in prompts]
    depths = set().union(*(plan.depths for plan in executor.plans if plan.loops is not None))
    assert depths == set(range(0, 3, loops))
    if loops == 1:
        assert any(len(plan.depths) == 3 for plan in executor.plans)
    leases = [lease for plan in executor.plans for lease in plan.leases if lease.request == ids[0]]
    runs = -(-3 // loops)
    assert [lease.row for lease in leases] == [row for row in range(3, 7) for _ in range(runs)]
    assert len({lease.incarnation for lease in leases}) == 4  # one per token


@pytest.mark.parametrize(
    ("loops", "asked", "message"),
    [
        (1, 1, "loops_per_step=1 needs a program whose loop is rolled.*roll=True"),
        (3, 4, "loops_per_step=4 must be from 1 to the program's 3 loops"),
        (3, 0, "loops_per_step=0 must be from 1"),
    ],
)
def test_loops_per_step_must_fit_the_program(
    loops: int, asked: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeExecutor, "loops", loops)
    with pytest.raises(ValueError, match=message):
        make_engine(loops_per_step=asked)
