"""`CompiledModel.serve`: an engine for those who schedule requests themselves, and the options that shape it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases_common import new_tokens, prompts
from oracle import SparseOracle
from shared_models import shared_model

from sparse_compile import ArgumentError, Engine, SamplingParams, sparse_compile
from sparse_compile.runtime.request import StepOutput

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return shared_model("ouro", torch.float64)


def compiled(model: torch.nn.Module, **options: object) -> Any:
    return sparse_compile(model, **({"key_retention": 0.3, "validate": False, "page_size": 4} | options))


def run(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished():
        for output in engine.step():
            tokens.setdefault(output.request_id, []).append(output.token)
        engine.check_integrity()
    return tokens


def test_options_reach_the_engine(model: torch.nn.Module) -> None:
    engine = compiled(
        model, max_batch=3, max_context=32, async_steps=True, loops_per_step=2, prefix_caching=True
    ).serve()
    options = engine.options
    assert (options.max_seqs, options.max_context) == (3, 32)
    assert (options.async_steps, options.loops_per_step, options.prefix_caching) == (True, 2, True)
    assert engine.pool.usable_pages == 3 * 8
    small = compiled(model).serve(2, 32, pool_tokens=40)
    assert small.pool.usable_pages == 10
    assert not small.options.async_steps  # on the CPU nothing is gained


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "max_batch=None: an engine needs it.*pass max_batch="),
        ({"max_batch": 2}, "max_context=None: an engine needs it"),
        ({"max_batch": 0, "max_context": 8}, "max_batch=0"),
        ({"max_batch": 2, "max_context": 10**6}, "max_context=1000000: the model has"),
        ({"max_batch": 2, "max_context": 8, "pool_tokens": 0}, "pool_tokens=0"),
        ({"max_batch": 2, "max_context": 8, "pool_tokens": 1.5}, "pool_tokens=1.5: must be an integer >= 1"),
        ({"max_batch": 2, "max_context": 8, "pool_tokens": "8"}, "pool_tokens='8'"),
    ],
)
def test_sizes_are_checked(model: torch.nn.Module, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        compiled(model).serve(**sizes)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8), "max_batch=0: must be an integer >= 1"),
        ((1.5, 8), "max_batch=1.5"),
        ((1, "8"), "max_context='8'"),
        ((1, -1), "max_context=-1"),
        ((1, 10**6), "max_context=1000000: the model has 512 positions.*; pass max_context=512 or less"),
    ],
)
def test_sizes_of_a_warm_up_are_checked(model: torch.nn.Module, sizes: tuple[Any, Any], message: str) -> None:
    asked = compiled(model)
    with pytest.raises(ArgumentError, match=message):
        asked.warmup(*sizes, progress=False)
    assert asked.capacity == (0, 0)


def test_a_warm_up_without_sizes_takes_those_of_the_options(model: torch.nn.Module) -> None:
    limited = compiled(model, max_batch=2, max_context=16)
    limited.warmup(progress=False)
    assert limited.capacity == (2, 16)
    free = compiled(model)
    free.warmup(progress=False)
    assert free.capacity == (1, 512)  # all positions of the model, which has fewer than 2,048


@pytest.mark.parametrize("loops", [None, 1, 3])
def test_a_warm_up_runs_the_steps_that_requests_will_run(model: torch.nn.Module, loops: int | None) -> None:
    """Of `loops_per_step` bodies, captures and none among them."""
    asked = compiled(model, loops_per_step=loops, dense_below=9)
    ran: list[tuple[int | None, str]] = []
    make = asked._keeper.make_engine

    def watched(*sizes: int) -> Engine:
        engine = make(*sizes)
        run = engine.executor.decode
        engine.executor.decode = lambda plan, *more: ran.append((plan.loops, plan.kind)) or run(plan, *more)
        return engine

    asked._keeper.make_engine = watched
    asked.warmup(2, 32, progress=False)
    assert {loops} == {each for each, _ in ran}
    assert {kind for _, kind in ran} == ({"mixed"} if loops else {"dense", "sparse", "mixed"})
    tokens = new_tokens(asked, prompts(5, 3), 8)
    assert tokens == new_tokens(compiled(model, dense_below=9), prompts(5, 3), 8)


def test_what_the_model_cannot_read_is_refused(model: torch.nn.Module) -> None:
    engine = compiled(model).serve(2, 32)
    with pytest.raises(ValueError, match=r"prompt_ids holds 272; the model knows ids up to 271"):
        engine.add_request([5, 272], SamplingParams(2))
    with pytest.raises(ValueError, match=r"prefix_length=2: the model is no prefix-LM"):
        engine.add_request([5, 6], SamplingParams(2, prefix_length=2))


def test_loops_per_step_is_checked_against_the_program(model: torch.nn.Module) -> None:
    with pytest.raises(ArgumentError, match=r"loops_per_step=1: needs a loop that is rolled.*rolling is off"):
        compiled(model, roll=False, loops_per_step=1)
    with pytest.raises(ArgumentError, match=r"loops_per_step=5: the program has 4 loops.*loops_per_step=4"):
        compiled(model, loops_per_step=5)


@pytest.mark.parametrize(
    "options",
    [
        {"async_steps": True},
        {"loops_per_step": 1},
        {"async_steps": True, "loops_per_step": 3, "prefix_caching": True},
    ],
    ids=str,
)
def test_generate_gives_the_same_tokens(model: torch.nn.Module, options: dict[str, object]) -> None:
    rows = prompts(5, 13, 3)
    wanted = [SparseOracle(model, 0.3).generate(row, 8) for row in rows]
    asked = compiled(model, **options)
    for _ in range(2):
        assert new_tokens(asked, rows, 8) == wanted
    items = list(asked.stream(torch.tensor(rows[1]), max_new_tokens=8))
    assert [item.token_id for item in items] == wanted[1]
    stop = asked.generate(
        torch.tensor([rows[0]]),
        max_new_tokens=8,
        do_sample=False,
        stopping_criteria=[lambda ids, scores: ids.shape[1] == 8],
    )
    assert stop[0, 5:].tolist() == wanted[0][:3]
    asked.engine.check_integrity()


def test_seeds_and_logprobs_do_not_depend_on_how_it_runs(model: torch.nn.Module) -> None:
    outs = []
    for options in ({}, {"async_steps": True}, {"loops_per_step": 1}):
        outs.append(
            compiled(model, **options).generate(
                torch.tensor([prompts(6)[0]]),
                max_new_tokens=8,
                do_sample=True,
                top_k=20,
                seed=3,
                return_dict_in_generate=True,
                output_scores=True,
            )
        )
    for out in outs:
        assert torch.equal(out.sequences, outs[0].sequences)
        assert out.logprobs[0] == pytest.approx(outs[0].logprobs[0], abs=1e-9)
        chosen = [s.log_softmax(-1)[0, t] for s, t in zip(out.scores, out.sequences[0, 6:], strict=True)]
        assert out.logprobs[0] == pytest.approx([float(value) for value in chosen], abs=1e-9)


def test_a_stream_may_be_dropped_in_the_middle_of_a_step(
    model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python collects cycles at any line, also while the scheduler goes through the requests that run."""
    asked, (row, other) = compiled(model, max_batch=3, max_context=32), prompts(5, 4)
    stream = asked.stream(torch.tensor(other), max_new_tokens=8)
    wanted = [item.token_id for item in asked.stream(torch.tensor(row), max_new_tokens=8)]
    next(stream)
    may_grow = asked.engine.scheduler.holdings.may_grow

    def drop(request: Any) -> bool:
        stream.close()
        return may_grow(request)

    monkeypatch.setattr(asked.engine.scheduler.holdings, "may_grow", drop)
    assert new_tokens(asked, [row, row], 8) == [wanted, wanted]
    asked.engine.check_integrity()
    assert asked.engine.pool.held_pages == 0
    assert not asked.engine.scheduler.requests


# ---------------------------------------------------------------------- cases from the field


@pytest.mark.parametrize("async_steps", [False, True])
def test_a5_prompts_in_chunks_in_one_batch(model: torch.nn.Module, async_steps: bool) -> None:
    engine = compiled(model, prefill_chunk=4, async_steps=async_steps).serve(2, 32)
    rows = prompts(5, 13)
    ids = [engine.add_request(row, SamplingParams(8)) for row in rows]
    tokens = run(engine)
    assert [tokens[name] for name in ids] == [SparseOracle(model, 0.3).generate(row, 8) for row in rows]


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_a35_an_abort_while_a_prompt_is_handed_over_to_decode(
    model: torch.nn.Module, count: int, async_steps: bool
) -> None:
    """The prompt takes three steps: before, in and after the hand-over, the next request gets seat, slot and pages."""
    engine = compiled(model, prefill_chunk=4, async_steps=async_steps, prefix_caching=True).serve(1, 32)
    doomed, heir = prompts(11, 11)
    engine.add_request(doomed, SamplingParams(8), "x")
    for _ in range(count):
        engine.step()
    last = engine.abort("x")
    assert isinstance(last, StepOutput)
    engine.check_integrity()
    engine.add_request(heir, SamplingParams(8), "x")
    assert run(engine)["x"] == SparseOracle(model, 0.3).generate(heir, 8)


@pytest.mark.parametrize("async_steps", [False, True])
def test_a19_a_python_callback_per_step(model: torch.nn.Module, async_steps: bool) -> None:
    """A processor and a stop rule run for every token, with the tokens before it, however steps are submitted."""
    seen: dict[str, list[list[int]]] = {"processor": [], "stop": []}

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen["processor"].append(ids[0].tolist())
        return scores

    def stop(ids: torch.Tensor, scores: torch.Tensor | None) -> bool:
        seen["stop"].append(ids[0].tolist())
        return ids.shape[1] == 5 + 4

    row = prompts(5)[0]
    engine = compiled(model, async_steps=async_steps).serve(2, 32)
    name = engine.add_request(row, SamplingParams(8, processor=processor, stop=stop))
    tokens = run(engine)[name]
    assert tokens == SparseOracle(model, 0.3).generate(row, 8)[:4]
    assert seen["stop"] == [[*row, *tokens[:n]] for n in range(1, 5)]
    assert seen["processor"][:4] == [[*row, *tokens[:n]] for n in range(4)]
    assert len(seen["processor"]) == (5 if async_steps else 4)  # once more, for what is then dropped
