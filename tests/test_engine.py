"""The laws of generation: the shape of the work never changes the tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import (
    PROMPTS,
    generate,
    greedy,
    make_engine,
    oracle,
    run_all,
    tokens_of,
)

from sparse_compile.runtime.reference_store import SlotState

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
    assert engine.scheduler.running[name].lease == leases[-1]
    assert engine.store.state(leases[-1].slot) is SlotState.REUSABLE


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


def test_no_more_requests_run_than_a_step_has_rows() -> None:
    engine, _ = make_engine(max_rows=2)
    for n in range(5):
        engine.add_request([n], greedy(3))

    def limit() -> None:
        assert len(engine.scheduler.running) <= 2

    assert len(run_all(engine, limit)) == 5
