"""Rounds that are submitted before the ones before them are read: the same tokens, the same numbers."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from looped_models import LoopedConfig
from matrix_models import FixedHuginn
from runtime_fakes import PROMPTS, generate, greedy, make_engine, oracle, run_all, tokens_of
from test_engine_models import NEW, compiled, plain_tokens, run
from test_engine_models import PROMPTS as MODEL_PROMPTS
from test_engine_models import make_engine as make_model_engine
from test_speculation import (
    compiled_double,
    fake_engine,
    model_outputs,
    numbers,
    pipeline,
    precise,
    script,
    script_pipeline,
    watch_references,
)
from test_speculation_sampling import chain_engine
from torch.utils._python_dispatch import TorchDispatchMode

from sparse_compile import sparse_compile
from sparse_compile.runtime.blocks import BlockFacts, build
from sparse_compile.runtime.compiler import PieceCompiler
from sparse_compile.runtime.flights import FlightPlan, run_step
from sparse_compile.runtime.graphs import GraphExecutor
from sparse_compile.runtime.options import Drafting
from sparse_compile.runtime.request import SamplingParams, StepOutput
from sparse_compile.runtime.seats import SeatTable

pytestmark = pytest.mark.usefixtures("shared_traces")

PIPELINE = Drafting(1, 3, pipeline=True)  # of the fake model


@pytest.mark.slow
@pytest.mark.parametrize("retention", [1.0, 0.3])
@pytest.mark.parametrize("name", ["ouro", "dory"])
def test_in_float64_too(name: str, retention: float) -> None:
    """Blocks of two lengths, and pipelines; the tests of synchronous rounds have all lengths, in float32."""
    model = compiled_double(name, retention)
    wanted = model_outputs(make_model_engine(model))
    blocks = [Drafting(d, rows) for d in (1, 2, model.program.roll.repeats) for rows in (2, 7)]
    for drafting in (*blocks, *(pipeline(model, loops) for loops in (1, 2, -1))):
        outputs = model_outputs(make_model_engine(model, drafting=drafting, async_steps=True))
        assert [tokens_of(outputs[str(n)]) for n in range(3)] == [tokens_of(wanted[str(n)]) for n in range(3)]


@functools.cache
def huginn(dtype: torch.dtype) -> FixedHuginn:
    torch.manual_seed(0)
    return FixedHuginn(LoopedConfig(vocab_size=300, num_hidden_layers=4)).to(dtype).eval()


@pytest.mark.parametrize("retention", [1.0, 0.3])
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_model_with_layers_around_its_loop(dtype: torch.dtype, retention: float) -> None:
    """Huginn's shape: a prelude whose output each pass of the core reads, and a coda that drafts go through as well."""
    looped = huginn(dtype)
    model = sparse_compile(looped, key_retention=retention, page_size=4, prefill_chunk=4, validate=False)
    repeats = model.program.roll.repeats
    wanted = model_outputs(make_model_engine(model))
    if retention == 1.0:
        for n, prompt in enumerate(MODEL_PROMPTS):
            own = looped.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
            assert own[0, len(prompt) :].tolist() == tokens_of(wanted[str(n)])
    lengths = (1, 2, 4, 7) if dtype == torch.float64 else (4,)
    blocks = [Drafting(loops, rows) for loops in (1, 2, repeats) for rows in lengths]
    for drafting in (*blocks, *(pipeline(model, loops) for loops in (1, 2, -1))):
        for async_steps in (True,) if drafting.rows in (2, 7) else (False, True):
            outputs = model_outputs(make_model_engine(model, drafting=drafting, async_steps=async_steps))
            for n in range(3):
                assert tokens_of(outputs[str(n)]) == tokens_of(wanted[str(n)])


@pytest.mark.parametrize("wrong", [None, 0, 2])
def test_in_float64_with_a_scripted_drafter_and_its_references(wrong: int | None) -> None:
    """The rows that count leave the references of ordinary decoding, slot for slot."""
    model, answers = precise("ouro")
    found = []
    for options in ({}, {"drafting": Drafting(1, 4), "async_steps": True}):
        engine = make_model_engine(model, **options)
        if options:
            script(engine, {str(n): one for n, one in enumerate(answers)}, lambda line: line == wrong)
        found.append(watch_references(engine))
        outputs = model_outputs(engine)
        assert [tokens_of(outputs[str(n)]) for n in range(3)] == answers
    assert engine.metrics().mean_accepted_length == (3 if wrong is None else wrong + 1)
    for n, prompt in enumerate(MODEL_PROMPTS):
        for at in range(NEW - 1):
            (index, count, *ordinary), (our_index, our_count, *ours) = (
                one[str(n), len(prompt) + at] for one in found
            )
            assert torch.equal(count, our_count)
            for site, kept in enumerate(count.tolist()):
                assert torch.equal(index[site, :, :kept], our_index[site, :, :kept])
            for one, other in zip(ordinary, ours, strict=True):
                torch.testing.assert_close(other, one, rtol=0, atol=1e-10)


@pytest.mark.parametrize("right", [True, False])
def test_pipelines_in_float64_with_a_scripted_drafter(right: bool) -> None:
    model, answers = precise("dory")
    engine = make_model_engine(model, drafting=pipeline(model, 1), async_steps=True)
    script_pipeline(engine, {str(n): one for n, one in enumerate(answers)}, right)
    outputs = model_outputs(engine)
    assert [tokens_of(outputs[str(n)]) for n in range(3)] == answers
    look = engine.metrics()
    assert (look.rounds, look.accepted_tokens) == ((3, 3 * (NEW - 2)) if right else (3 * (NEW - 1), 0))


@pytest.mark.parametrize("drafting", [Drafting(1, 4), PIPELINE], ids=str)
def test_a_second_round_is_submitted_before_the_first_is_read(drafting: Drafting) -> None:
    engine, unread = fake_engine(drafting, async_steps=True), []
    engine.add_request(PROMPTS[0], greedy(20), "a")
    what = "step" if drafting.pipeline else "round"
    submit = getattr(engine.executor, what)

    def watched(plan: Any) -> Any:
        unread.append(engine.scheduler.requests["a"].unread)
        return submit(plan)

    setattr(engine.executor, what, watched)
    assert tokens_of(run_all(engine)["a"]) == oracle(PROMPTS[0], 20, True)
    assert unread == [0] + [1] * (len(unread) - 1)
    assert engine.metrics().waiting_rounds == 0


class NothingIsRead(TorchDispatchMode):
    """Fails where the host would wait for what a device has computed."""

    WAITING = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.split("::")[1]
        assert not any(name.startswith(word) for word in self.WAITING), name
        assert name != "index" or not any(one is not None and one.dtype == torch.bool for one in args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("drafting", [Drafting(1, 4), Drafting(2, 3, adaptive=True), PIPELINE], ids=str)
def test_nothing_is_read_while_a_round_is_submitted(drafting: Drafting, sampled: bool) -> None:
    engine, _ = chain_engine(drafting, async_steps=True)
    rounds = engine._runner.rounds
    assert rounds is not None
    submit, count = rounds.run, 0

    def watched(works: Any, batch: Any) -> None:
        nonlocal count
        count += 1
        with NothingIsRead():
            submit(works, batch)

    rounds.run = watched  # type: ignore[method-assign]
    for n in range(3):
        generator = torch.Generator().manual_seed(n)
        params = SamplingParams(9 + n, do_sample=sampled and n != 1, generator=generator, want_logits=sampled)
        engine.add_request([n], params)
    while engine.has_unfinished():
        engine.step()
    assert count > 3
    assert engine.metrics().failed_runs == 0


@pytest.mark.parametrize("drafting", [Drafting(1, 4), PIPELINE], ids=str)
def test_requests_with_a_processor_are_read_at_once_and_counted(drafting: Drafting) -> None:
    def biased(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 == ids.shape[1] % 3, -torch.inf)

    wanted = generate(fake_engine(None), [PROMPTS[0]], 9, processor=biased)[0]
    engine = fake_engine(drafting, async_steps=True)
    engine.add_request(PROMPTS[0], greedy(9, processor=biased), "a")
    engine.add_request(PROMPTS[1], greedy(30), "b")
    outputs = run_all(engine)
    assert tokens_of(outputs["a"]) == wanted
    assert tokens_of(outputs["b"]) == oracle(PROMPTS[1], 30, True)
    mine, other = engine.metrics("a"), engine.metrics("b")
    assert mine.waiting_rounds == mine.rounds > 0
    assert 0 < other.waiting_rounds < other.rounds  # while the two run together


@settings(max_examples=60, deadline=None)
@given(
    drafting=st.one_of(
        st.builds(Drafting, st.integers(1, 3), st.integers(1, 5), st.booleans()),
        st.sampled_from((PIPELINE, Drafting(2, 2, pipeline=True), Drafting(3, 1, pipeline=True))),
    ),
    news=st.lists(st.integers(1, 14), min_size=1, max_size=4),
    below=st.integers(0, 20),
    seats=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_draws_are_those_of_synchronous_rounds(
    drafting: Drafting, news: list[int], below: int, seats: int, seed: int
) -> None:
    """Token for token, whoever runs beside a request, with blocks of any length and a few seats for all."""
    seen = []
    for async_steps in (False, True):
        engine = fake_engine(drafting, async_steps=async_steps, dense_below=below, max_seqs=seats)
        outputs: dict[str, list[StepOutput]] = {}
        for n, (prompt, new) in enumerate(zip(PROMPTS, news, strict=False)):
            generator = torch.Generator().manual_seed(seed + n)
            engine.add_request(prompt, greedy(new, do_sample=n % 3 != 1, generator=generator), str(n))
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        for name, more in run_all(engine).items():
            outputs.setdefault(name, []).extend(more)
        names = "0123"[: len(news)]
        seen.append(([tokens_of(outputs[name]) for name in names], numbers(engine, names)))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("drafting", [Drafting(1, 3), PIPELINE], ids=str)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("interrupt", [False, True])
def test_a_round_that_fails_is_repeated_while_another_one_is_unread(
    when: str, interrupt: bool, drafting: Drafting
) -> None:
    engine, executor = make_engine(slots=64, drafting=drafting, async_steps=True)
    params = {"do_sample": True}
    wanted = []
    for n, prompt in enumerate(PROMPTS):
        alone = fake_engine(drafting)
        alone.add_request(prompt, greedy(9, **params, generator=torch.Generator().manual_seed(n)), "a")
        wanted.append(tokens_of(run_all(alone)["a"]))
        engine.add_request(prompt, greedy(9, **params, generator=torch.Generator().manual_seed(n)), str(n))
    outputs: dict[str, list[StepOutput]] = {}
    for count in range(100):
        if not engine.has_unfinished():
            break
        error: BaseException = KeyboardInterrupt() if interrupt else RuntimeError("once")
        executor.fault = (when, error) if count % 2 else None
        try:
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        except KeyboardInterrupt:
            assert interrupt
        engine.check_integrity()
    assert not executor.broken
    assert [tokens_of(outputs[str(n)]) for n in range(4)] == wanted


@pytest.mark.slow
def test_compiled_steps_of_pipelines_are_the_same() -> None:
    """What lies between the runs, by Inductor: flights of all kinds, in batches of several sizes."""
    compiler, chance, width = PieceCompiler(enabled=True), random.Random(0), 3
    for count in (3, 1, 2, 5):
        left = []
        _, executor = chain_engine(None)
        seats = SeatTable(6, 2, "cpu", width)
        for seat in range(1, 7):
            rows = chance.randint(1, width)
            age = chance.randint(rows - 1, width - 1)
            facts = [chance.randint(0, 9), rows, age, *(chance.randint(0, 7) for _ in range(width))]
            seats.reached[:, :, seat] = torch.tensor(facts)
        facts = [BlockFacts(1 + n, -1 if n % 3 else 4, n - 1, width, 7 + n, 99, n % 2) for n in range(count)]
        before = seats.reached.clone()
        for fuse in (lambda function, width: function, compiler.fuse):
            seats.reached.copy_(before)
            plan = build(FlightPlan, seats, None, facts, 1, "dense", 9, [()] * count)
            drawn = run_step(executor, plan, fuse=fuse)
            left.append((drawn.flags, drawn.tokens, seats.reached.clone()))
        for one, other in zip(*left, strict=True):
            assert torch.equal(one, other)
    assert len(compiler._fused) == 3


class Rerun:
    """Stands in for a CUDA graph: a replay runs the same again, over the same plan and into the same tensors."""

    def __init__(self, run: Any, made: Any) -> None:
        self.run, self.made = run, made

    def replay(self) -> None:
        made = self.run()
        if isinstance(made, torch.Tensor):
            self.made.copy_(made)
            return
        for name in ("tokens", "logprobs", "flags"):
            getattr(self.made, name).copy_(getattr(made, name))


@pytest.mark.parametrize("drafting", [Drafting(1, 4), Drafting(2, 3, adaptive=True), None], ids=str)
def test_buckets_with_room_for_others_change_no_token(
    monkeypatch: pytest.MonkeyPatch, drafting: Drafting | None
) -> None:
    """Three requests in buckets of four, and some that draw, whose rounds are put together from other buckets."""

    def captured(self: GraphExecutor, run: Any, device: Any) -> tuple[Rerun, Any]:
        run()
        made = run()
        return Rerun(run, made), made

    monkeypatch.setattr(GraphExecutor, "_captured", captured)
    model = compiled("ouro", 0.3)
    found = []
    for graphs in (False, True):
        engine = make_model_engine(model, drafting=drafting or pipeline(model, 2), async_steps=True)
        if graphs:
            executor = GraphExecutor(engine.executor, page_size=4, rows=(4, 16))  # type: ignore[arg-type]
            engine.executor = engine._runner.executor = engine._runner.rounds.executor = executor  # type: ignore[union-attr]
        outputs = model_outputs(engine)
        assert [tokens_of(outputs[str(n)]) for n in range(3)] == plain_tokens("ouro", 0.3)
        generator = torch.Generator().manual_seed(1)
        engine.add_request(MODEL_PROMPTS[0], SamplingParams(NEW, do_sample=True, generator=generator), "d")
        engine.add_request(MODEL_PROMPTS[1], SamplingParams(NEW), "e")
        outputs = run(engine)
        found.append([tokens_of(outputs[name]) for name in "de"])
    assert found[0] == found[1]
    assert found[0][1] == plain_tokens("ouro", 0.3)[1]
    runs = {key.run for key in (*executor.round_buckets, *executor.buckets)}
    assert runs == ({"round", "draft", "verify"} if drafting else {"step", "advance"})


def test_drafts_are_charged_for_the_layers_behind_the_loop() -> None:
    """A model with such layers reads their keys once more for each draft."""
    model = compiled("dory", 1.0)
    found = []
    for last in (model.program.last_sites, ()):
        engine = make_model_engine(model, drafting=Drafting(1, 4), last_sites=last)
        model_outputs(engine)
        found.append(engine.metrics())
    assert len(model.program.last_sites) > 0
    assert found[0].drafted_tokens == found[1].drafted_tokens > 0
    more = found[0].keys_read - found[1].keys_read
    heads = sum(site.heads for site in model.program.last_sites)
    assert more % heads == 0
    assert more // heads > found[0].drafted_tokens  # each draft saw several keys


def test_rows_that_a_pipeline_gives_up_are_charged_as_far_as_they_came() -> None:
    """All drafts wrong: behind each token but the last ones there are a row of three loops, one of two, one of one."""
    model, answers = precise("dory")
    engine = make_model_engine(model, drafting=pipeline(model, 1))
    script_pipeline(engine, {str(n): one for n, one in enumerate(answers)}, right=False)
    model_outputs(engine)
    loops = model.program.roll.repeats
    for n, prompt in enumerate(MODEL_PROMPTS):
        ends = range(NEW - 1)  # rows of generated tokens that ended
        given_up = [min(loops - 1, NEW - 2 - at) for at in ends]  # rows behind each
        more = sum(sum(loops - row for row in range(1, 1 + rows)) for rows in given_up)
        assert engine.metrics(str(n)).loops_run == loops * (len(prompt) + NEW - 1) + more


def test_a_block_ends_where_its_request_does() -> None:
    """Whatever the rounds before it gave: no row beyond the last token, and no page for one."""
    drafting = Drafting(3, 7)
    for new in range(1, 12):
        engine = fake_engine(drafting, async_steps=True, max_context=len(PROMPTS[0]) + new)
        engine.add_request(PROMPTS[0], greedy(new), "a")
        assert tokens_of(run_all(engine)["a"]) == oracle(PROMPTS[0], new, True)
        longest = max(int(plan.row_length.max()) for plan in engine.executor.plans)  # type: ignore[attr-defined]
        assert longest == len(PROMPTS[0]) + new - 1
