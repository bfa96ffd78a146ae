"""Cases from the field, continued from test_cases: changing batches, live rows, padding, aborts, the pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from cases_common import compiled_ouro, left_padded, new_tokens, prompts
from oracle import SparseOracle
from shared_models import shared_model
from transformers import LogitsProcessorList

from sparse_compile import sparse_compile
from sparse_compile.runtime.engine import Engine
from sparse_compile.runtime.plan import RowPlan, Segment
from sparse_compile.runtime.request import SamplingParams, StepOutput

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def ouro() -> Any:
    return compiled_ouro()


@pytest.fixture
def engine(ouro: Any) -> Iterator[Engine]:
    """A fresh engine of it, for 4 sequences of 32 tokens, that validates every plan."""
    made = ouro._keeper.make_engine(4, 32)
    object.__setattr__(made.options, "debug", True)
    yield made
    made.check_integrity()
    assert made.pool.held_pages == 0


def plans_of(engine: Engine) -> list[RowPlan]:
    """The plans that the engine will have run, as they come."""
    plans: list[RowPlan] = []
    watch(engine, lambda plan, logits: plans.append(plan))
    return plans


def watch(engine: Engine, seen: Callable[[RowPlan, torch.Tensor], None]) -> None:
    """Calls `seen` with each plan that the engine runs, and with its logits."""
    executor = engine.executor

    def watched(run: Callable[[RowPlan], torch.Tensor]) -> Callable[[RowPlan], torch.Tensor]:
        def record(plan: RowPlan) -> torch.Tensor:
            logits = run(plan)
            seen(plan, logits)
            return logits

        return record

    executor.prefill, executor.decode = watched(executor.prefill), watched(executor.decode)  # type: ignore[method-assign]


def run_all(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return outputs


# torch.compile


def test_a11_batches_and_lengths_that_change(ouro: Any) -> None:
    for batch, new in ((4, 8), (2, 64), (8, 8)):
        rows = prompts(*[5] * batch, seed=batch)
        got = new_tokens(ouro, rows, new)
        assert got[-1] == SparseOracle(ouro.model, 0.3).generate(rows[-1], new)
        assert [len(row) for row in got] == [new] * batch
    limited = sparse_compile(ouro.model, max_batch=4, max_context=32, validate=False)
    limited.generate(**left_padded(prompts(5, 5, 5, 5)), max_new_tokens=8)
    with pytest.raises(
        ValueError, match=r"max_context=32: the call needs 69 tokens.*; compile with max_context=69"
    ):
        limited.generate(**left_padded(prompts(5, 5)), max_new_tokens=64)
    with pytest.raises(
        ValueError, match=r"max_batch=4: the call has 8 sequences.*; compile with max_batch=8"
    ):
        limited.generate(**left_padded(prompts(*[5] * 8)), max_new_tokens=8)


def test_a15_three_two_then_one_live_rows(ouro: Any, engine: Engine) -> None:
    """And a prompt of one token: its first row sees one key."""
    rows, lengths, plans = prompts(1, 1, 2), (6, 2, 4), plans_of(engine)
    ids = [engine.add_request(row, SamplingParams(new)) for row, new in zip(rows, lengths, strict=True)]
    outputs = run_all(engine)
    assert [plan.rows for plan in plans] == [4, 3, 2, 2, 1, 1]
    assert int(plans[0].row_length.min()) == 1
    for name, row, new in zip(ids, rows, lengths, strict=True):
        wanted = SparseOracle(ouro.model, 0.3).generate(row, new)
        assert [output.token for output in outputs[name]] == wanted


@pytest.mark.parametrize("async_steps", [False, True])
def test_a16_logits_of_a_step_outlive_the_next_step(engine: Engine, async_steps: bool) -> None:
    """The executor's own logits are good until its next run, as with CUDA graphs: here they are spoilt then."""
    object.__setattr__(engine.options, "async_steps", async_steps)
    raw: list[torch.Tensor] = []

    def spoil(plan: RowPlan, logits: torch.Tensor) -> None:
        for old in raw:
            old.fill_(torch.nan)
        raw.append(logits)

    watch(engine, spoil)
    for row in prompts(3, 6):
        engine.add_request(row, SamplingParams(6, want_logits=True))
    kept: list[tuple[StepOutput, torch.Tensor, torch.Tensor]] = []
    while engine.has_unfinished():
        for output in engine.step():
            assert output.logits is not None
            assert output.scores is not None
            kept.append((output, output.logits.clone(), output.scores.clone()))
    assert len(kept) == 12
    for output, logits, scores in kept:
        assert torch.equal(output.logits, logits)
        assert torch.equal(output.scores, scores)
        assert int(logits.argmax()) == output.token


def test_a16_output_logits_are_those_of_their_step(ouro: Any) -> None:
    settings = {"max_new_tokens": 5, "output_logits": True, "return_dict_in_generate": True}
    long = ouro.generate(**left_padded(prompts(4, 7)), **settings)
    short = ouro.generate(**left_padded(prompts(4, 7)), **{**settings, "max_new_tokens": 2})
    assert len({step.data_ptr() for step in long.logits}) == 5
    for step in range(2):
        torch.testing.assert_close(long.logits[step], short.logits[step], rtol=1e-10, atol=1e-10)
    assert torch.equal(torch.stack(long.logits, 1).argmax(-1), long.sequences[:, 7:])


@pytest.mark.parametrize("sparse", [False, True])
def test_a18_three_live_rows_in_a_bucket_of_four(ouro: Any, sparse: bool) -> None:
    """The padded plan leaves every live page and slot as the plan without padding does."""
    states, logits = [], []
    for bucket in (0, 4):
        engine = ouro._keeper.make_engine(3, 32)
        pools = {"k_pool": engine.pool.k_pool, "v_pool": engine.pool.v_pool}
        store = {name: getattr(engine.store, name) for name in ("index", "count", "mass", "o_ref", "c_ref")}
        for tensor in (*pools.values(), store["mass"], store["o_ref"], store["c_ref"]):
            tensor.fill_(torch.nan)
        store["index"].fill_(-7)
        pages = [engine.pool.allocate(2) for _ in range(3)]
        seats = [engine.plans.seats.take(page) for page in pages]
        rows = prompts(5, 3, 9)
        engine.executor.prefill(
            engine.plans.build([Segment(row, 0, seat) for row, seat in zip(rows, seats, strict=True)])
        )
        leases = [engine.store.renew(engine.store.acquire(str(n), 0), len(row)) for n, row in enumerate(rows)]
        segments = [
            Segment(
                [9],
                len(row),
                seat,
                decode=True,
                sparse=sparse,
                lease=lease if sparse else None,
                wants_logits=True,
            )
            for row, seat, lease in zip(rows, seats, leases, strict=True)
        ]
        plan = engine.plans.build(segments, pad_to=bucket)
        assert plan.rows == max(3, bucket)
        logits.append(engine.executor.decode(plan))
        live = {name: tensor[:, 1:] for name, tensor in pools.items()}
        live |= {name: tensor[1:] for name, tensor in store.items()}
        states.append(live)
    assert logits[0].isfinite().all()
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-10, atol=1e-10)
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-10, atol=1e-10, equal_nan=True)
        if tensor.is_floating_point():
            assert torch.equal(states[1][name].isnan(), tensor.isnan())  # not one entry more was written


# Kernels, speculation, scheduling


def test_a28_lengths_that_grow_after_a_buffer_was_sized(ouro: Any, engine: Engine) -> None:
    """One source of truth: the plan's own rows. The debug mode of the engine checks every plan against it."""
    plans = plans_of(engine)
    name = engine.add_request(prompts(9)[0], SamplingParams(23))  # 9 + 23 = 32, over two page boundaries
    tokens = [output.token for output in run_all(engine)[name]]
    assert tokens == SparseOracle(ouro.model, 0.3).generate(prompts(9)[0], 23)
    assert [plan.max_length for plan in plans] == [int(plan.row_length.max()) for plan in plans]
    assert plans[-1].max_length == 31  # the last token is never an input
    with pytest.raises(
        ValueError, match=r"exceed max_context=32; shorten them or compile with a larger max_context"
    ):
        engine.add_request(prompts(10)[0], SamplingParams(23))


@pytest.mark.parametrize("steps", [25, 26, 27])
def test_a31_abort_near_the_token_limit(ouro: Any, engine: Engine, steps: int) -> None:
    """Prompt and answer fill the context; the last steps before its end, and the end itself."""
    plans = plans_of(engine)
    row, other = prompts(8, 5)
    engine.add_request(
        row, SamplingParams(24), "doomed"
    )  # 2 prefill steps, the second gives a token: 25 in all
    engine.add_request(other, SamplingParams(24), "other")
    outputs = [output for _ in range(steps - 2) for output in engine.step()]
    last = engine.abort("doomed")
    assert (last is None) == (steps - 2 >= 25)
    if last is not None:
        assert (last.finish_reason, last.finished) == ("abort", True)
    assert engine.metrics("doomed").new_tokens == min(24, steps - 3)
    engine.check_integrity()
    engine.add_request(
        row[:3], SamplingParams(5), "doomed"
    )  # the id, its pages and its slot serve the next request
    finished = run_all(engine)
    assert all(int(plan.row_length.min()) > 0 for plan in plans)
    oracle = SparseOracle(ouro.model, 0.3)
    assert [output.token for output in finished["doomed"]] == oracle.generate(row[:3], 5)
    others = [o.token for o in (*outputs, *finished.get("other", [])) if o.request_id == "other"]
    assert others == oracle.generate(other, 24)


def test_a31_closing_a_stream_near_the_token_limit() -> None:
    compiled = sparse_compile(shared_model("ouro"), max_context=16, max_batch=2, page_size=4)
    whole = [item.token_id for item in compiled.stream(prompts(4)[0], max_new_tokens=12)]
    for taken in (11, 12):
        stream = compiled.stream(prompts(4)[0], max_new_tokens=12)
        assert [next(stream).token_id for _ in range(taken)] == whole[:taken]
        stream.close()
        compiled.engine.check_integrity()
        assert compiled.engine.pool.held_pages == 0
    assert len(whole) == 12


def test_a33_a_logits_processor_acts_on_every_token(ouro: Any) -> None:
    """A grammar: after an even token comes an odd one, and the other way round."""

    def alternate(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        banned = torch.arange(scores.shape[-1]) % 2 == input_ids[:, -1:] % 2
        return scores.masked_fill(banned, -torch.inf)

    rows = prompts(4, 9)
    dense = sparse_compile(ouro.model, enabled=False, validate=False)
    for compiled in (ouro, dense):
        for row, tokens in zip(
            rows, new_tokens(compiled, rows, 12, logits_processor=[alternate]), strict=True
        ):
            parity = [token % 2 for token in [row[-1], *tokens]]
            assert all(a != b for a, b in zip(parity[1:], parity, strict=False))
    own = new_tokens(ouro.model, rows, 12, logits_processor=LogitsProcessorList([alternate]))
    assert new_tokens(dense, rows, 12, logits_processor=[alternate]) == own


def test_a34_two_requests_that_each_need_most_of_the_pool(ouro: Any) -> None:
    """Room for one: the second waits, and nothing is computed twice."""
    engine = ouro._keeper.make_engine(1, 32)
    plans = plans_of(engine)
    rows = prompts(20, 17)
    ids = [engine.add_request(row, SamplingParams(11)) for row in rows]
    outputs = run_all(engine)
    for name, row in zip(ids, rows, strict=True):
        assert [o.token for o in outputs[name]] == SparseOracle(ouro.model, 0.3).generate(row, 11)
    assert sum(plan.rows for plan in plans) == 20 + 10 + 17 + 10
    engine.check_integrity()


def test_inference_mode_may_come_and_go() -> None:
    """The pools belong to no mode: an engine that is made inside of it serves calls outside of it, and back."""
    compiled = sparse_compile(shared_model("ouro"), key_retention=0.3)
    rows = left_padded(prompts(3, 6))
    with torch.inference_mode():
        first = compiled.generate(**rows, max_new_tokens=4)
    assert torch.equal(compiled.generate(**rows, max_new_tokens=4), first)
    with torch.inference_mode():
        stream = compiled.stream(**rows, max_new_tokens=4)
        next(stream)
        assert torch.equal(compiled.generate(**rows, max_new_tokens=4), first)
    stream.close()
    assert torch.equal(compiled.generate(**rows, max_new_tokens=4), first)
    compiled.engine.check_integrity()
