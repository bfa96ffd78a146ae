"""Rounds of block self-speculation: whatever is drafted, the tokens are those of ordinary decoding."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from runtime_fakes import PROMPTS, generate, greedy, make_engine, only, oracle, run_all, tokens_of
from shared_models import shared_model, traced_once
from test_engine_models import NEW, compiled, disturb, plain_tokens, run
from test_engine_models import PROMPTS as MODEL_PROMPTS
from test_engine_models import make_engine as make_model_engine

from sparse_compile import sparse_compile
from sparse_compile.runtime.choices import Choices
from sparse_compile.runtime.engine import Engine
from sparse_compile.runtime.metrics import EngineMetrics
from sparse_compile.runtime.options import Drafting, EngineOptions
from sparse_compile.runtime.plan import RowPlan
from sparse_compile.runtime.request import SamplingParams, StepOutput

SLOTS = 64
BLOCK = Drafting(1, 4)
SPECULATIONS = (BLOCK, Drafting(1, 3, pipeline=True))  # of the fake model


def fake_engine(drafting: Drafting | None, **options: Any) -> Engine:
    return make_engine(slots=SLOTS, drafting=drafting, **options)[0]


def script(engine: Engine, answers: dict[str, list[int]], wrong: Callable[[int], bool]) -> None:
    """Drafts by the book instead of by a model: the right token, or another one where `wrong` says so of a row. The
    first row of a round counts as row 0.
    """
    draft, line = engine.executor.draft, 0

    def drafting(plan: RowPlan) -> torch.Tensor:
        nonlocal line
        row, line = (
            line,
            line + 1 if plan.logit_rows.shape[0] else 0,
        )  # the last row of a block drafts nothing
        logits = draft(plan)
        requests = {request.seat: request for request in engine.scheduler.running.values()}
        for number in plan.logit_rows.tolist():
            request = requests.get(int(plan.row_seq[number]))
            if request is None:
                continue  # there is no such row
            right = answers[request.id][int(plan.row_position[number]) + 1 - request.prompt_length]
            logits[number] = 0
            logits[number, (right + 1) % logits.shape[1] if wrong(row) else right] = 1
        return logits

    engine.executor.draft = drafting  # type: ignore[method-assign]


@functools.cache
def precise(name: str) -> tuple[Any, list[list[int]]]:
    """A model in float64 at retention 0.3, and its tokens."""
    model = compiled_double(name, 0.3)
    outputs = model_outputs(make_model_engine(model))
    return model, [tokens_of(outputs[str(n)]) for n in range(3)]


def compiled_double(name: str, retention: float) -> Any:
    """What `compiled` makes, in float64."""
    with traced_once():
        return sparse_compile(
            shared_model(name, torch.float64),
            key_retention=retention,
            page_size=4,
            prefill_chunk=4,
            validate=False,
        )


def model_outputs(engine: Engine, new: int = NEW) -> dict[str, list[StepOutput]]:
    """Three requests that arrive one step after the other."""
    outputs: dict[str, list[StepOutput]] = {}
    for n, prompt in enumerate(MODEL_PROMPTS):
        engine.add_request(prompt, SamplingParams(new), str(n))
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return run(engine, outputs)


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize("loops", [1, 2, -1])
@pytest.mark.parametrize("retention", [1.0, 0.3])
@pytest.mark.parametrize("name", ["ouro", "dory"])
def test_blocks_give_the_tokens_of_ordinary_decoding(name: str, retention: float, loops: int) -> None:
    """Random weights: most drafts are wrong. With all loops drafting, every draft is right. Rounds that are submitted
    before those ahead of them are read have the same numbers too.
    """
    model = compiled(name, retention)
    loops = model.program.roll.repeats if loops == -1 else loops
    for rows in (1, 2, 4, 7):
        look = metrics_of_both(name, retention, Drafting(loops, rows))
        assert look.round_tokens == 3 * (NEW - 1) == look.accepted_tokens + look.rounds
        if loops == model.program.roll.repeats:
            assert look.accepted_tokens == look.drafted_tokens
            assert look.rounds == 3 * -(-(NEW - 1) // rows)
        elif rows > 1:
            assert look.accepted_tokens < look.drafted_tokens


def metrics_of_both(name: str, retention: float, drafting: Drafting) -> EngineMetrics:
    """Of requests that arrive while others run: synchronously and asynchronously, the tokens of ordinary decoding."""
    looks, model = [], compiled(name, retention)
    for async_steps in (False, True):
        engine = make_model_engine(model, drafting=drafting, async_steps=async_steps)
        outputs = model_outputs(engine)
        assert [tokens_of(outputs[str(n)]) for n in range(3)] == plain_tokens(name, retention)
        assert engine.pool.held_pages == 0
        looks.append((numbers(engine, "012"), engine.metrics()))
    assert looks[0][0] == looks[1][0]
    return looks[0][1]


def numbers(engine: Engine, names: str) -> list[dict[str, Any]]:
    """The metrics of requests, without times."""
    return [
        {key: value for key, value in asdict(engine.metrics(name)).items() if not key.endswith("_s")}
        for name in names
    ]


@pytest.mark.parametrize("loops", [1, 2, -1])
@pytest.mark.parametrize("retention", [1.0, 0.3])
@pytest.mark.parametrize("name", ["ouro", "dory"])
def test_pipelines_give_the_tokens_of_ordinary_decoding(name: str, retention: float, loops: int) -> None:
    look = metrics_of_both(name, retention, pipeline(compiled(name, retention), loops))
    assert look.round_tokens == 3 * (NEW - 1)
    assert (look.drafted_tokens > 0) == (loops != -1)


def test_a_model_with_gates_drafts_and_verifies_in_the_same_way() -> None:
    block = metrics_of_both("hrm-text", 0.3, Drafting(1, 4))
    assert block.accepted_tokens + block.rounds == 3 * (NEW - 1)
    test_pipelines_give_the_tokens_of_ordinary_decoding("hrm-text", 0.3, 1)


def pipeline(model: Any, loops: int) -> Drafting:
    repeats = model.program.roll.repeats
    loops = repeats if loops == -1 else loops
    return Drafting(loops, -(-repeats // loops), pipeline=True)


@pytest.mark.parametrize("wrong", [None, 0, 1, 2])
@pytest.mark.parametrize("name", ["ouro", "dory"])
def test_a30_a31_one_wrong_token_each_time_vanishes_from_all_loops(name: str, wrong: int | None) -> None:
    """The keys and values that are left in the pool are those of ordinary decoding, in every plane."""
    model, answers = precise(name)
    engines = [make_model_engine(model, drafting=drafting) for drafting in (None, Drafting(1, 4))]
    script(engines[1], {str(n): answer for n, answer in enumerate(answers)}, lambda line: line == wrong)
    left = []
    for engine in engines:
        keys: dict[str, Any] = {}
        watch_ends(engine, keys)
        outputs = model_outputs(engine)
        assert [tokens_of(outputs[str(n)]) for n in range(3)] == answers
        left.append(keys)
    look = engines[1].metrics()
    # Six tokens: in blocks of 4 and 2, or as many each time as there are before the correction, with it.
    assert look.mean_accepted_length == (3 if wrong is None else wrong + 1)
    for n, prompt in enumerate(MODEL_PROMPTS):
        for ordinary, ours in zip(left[0][str(n)], left[1][str(n)], strict=True):
            computed = slice(0, len(prompt) + NEW - 1)
            torch.testing.assert_close(ours[:, computed], ordinary[:, computed], rtol=0, atol=1e-10)


def watch_ends(engine: Engine, keys: dict[str, Any]) -> None:
    """Notes the keys and values of each request, [planes, tokens, ...], when it ends."""
    remove = engine.scheduler.remove

    def removing(request: Any) -> None:
        keys[request.id] = [
            pool[:, request.pages].transpose(2, 3).flatten(1, 2).clone()
            for pool in (engine.pool.k_pool, engine.pool.v_pool)
        ]
        remove(request)

    engine.scheduler.remove = removing  # type: ignore[method-assign]


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("name", ["ouro", "dory"])
def test_a30_drafts_of_a_pipeline_that_are_all_right_or_all_wrong(name: str, right: bool) -> None:
    model, answers = precise(name)
    engines = [make_model_engine(model, drafting=drafting) for drafting in (None, pipeline(model, 1))]
    script_pipeline(engines[1], {str(n): answer for n, answer in enumerate(answers)}, right)
    left = []
    for engine in engines:
        keys: dict[str, Any] = {}
        watch_ends(engine, keys)
        outputs = model_outputs(engine)
        assert [tokens_of(outputs[str(n)]) for n in range(3)] == answers
        left.append(keys)
    look = engines[1].metrics()
    assert (look.rounds, look.accepted_tokens) == ((3, 3 * (NEW - 2)) if right else (3 * (NEW - 1), 0))
    for n, prompt in enumerate(MODEL_PROMPTS):
        for ordinary, ours in zip(left[0][str(n)], left[1][str(n)], strict=True):
            computed = slice(0, len(prompt) + NEW - 1)
            torch.testing.assert_close(ours[:, computed], ordinary[:, computed], rtol=0, atol=1e-10)


def script_pipeline(engine: Engine, answers: dict[str, list[int]], right: bool) -> None:
    advance = engine.executor.advance

    def advancing(plan: RowPlan) -> torch.Tensor:
        logits = advance(plan)
        requests = {request.seat: request for request in engine.scheduler.running.values()}
        for number, row in enumerate(plan.logit_rows.tolist()):
            request = requests.get(int(plan.row_seq[row]))
            if request is None or int(plan.row_loop[row]):
                continue  # there is no such row, or it does not begin
            answer = answers[request.id][int(plan.row_position[row]) + 1 - request.prompt_length]
            logits[number] = 0
            logits[number, answer if right else answer - 1] = 1
        return logits

    engine.executor.advance = advancing  # type: ignore[method-assign]


@pytest.mark.parametrize("loops", [1, 2, 3, 4])
@pytest.mark.parametrize("in_pipeline", [False, True])
def test_verification_consumes_the_references_of_ordinary_decoding(loops: int, in_pipeline: bool) -> None:
    """Slot for slot, whether the capture (loop 1) falls into the draft or into the verification."""
    model, answers = precise("ouro")
    found = []
    drafting = pipeline(model, loops) if in_pipeline else Drafting(loops, 4)
    for asked in (None, drafting):
        engine = make_model_engine(model, drafting=asked)
        found.append(watch_references(engine))
        outputs = model_outputs(engine)
        assert [tokens_of(outputs[str(n)]) for n in range(3)] == answers
    positions = {(str(n), len(p) + at) for n, p in enumerate(MODEL_PROMPTS) for at in range(NEW - 1)}
    assert set(found[0]) == positions <= set(found[1])
    for place in positions:
        (index, count, *ordinary), (our_index, our_count, *ours) = found[0][place], found[1][place]
        assert torch.equal(count, our_count)
        for site, kept in enumerate(count.tolist()):
            assert torch.equal(index[site, :, :kept], our_index[site, :, :kept])
        for one, other in zip(ordinary, ours, strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=1e-10)


def watch_references(engine: Engine) -> dict[tuple[str, int], list[torch.Tensor]]:
    """What the slot of each row holds after its last run, by request and position. A position that is computed again
    replaces what was rejected.
    """
    found: dict[tuple[str, int], list[torch.Tensor]] = {}
    executor, store = engine.executor, engine.store
    assert store is not None

    def watched(method: Callable[[RowPlan], torch.Tensor]) -> Callable[[RowPlan], torch.Tensor]:
        def running(plan: RowPlan) -> torch.Tensor:
            logits = method(plan)
            names = {request.seat: request.id for request in engine.scheduler.running.values()}
            slots = {lease.slot: lease for lease in plan.leases}
            rows = zip(
                *(column.tolist() for column in (plan.row_seq, plan.row_position, plan.row_slot)), strict=True
            )
            for seat, position, slot in rows:
                if slot:
                    found[names[seat], position] = [tensor.clone() for tensor in store.contents(slots[slot])]
            return logits

        return running

    executor.decode = watched(executor.decode)  # type: ignore[method-assign]
    executor.verify = watched(executor.verify)  # type: ignore[method-assign]
    executor.advance = watched(executor.advance)  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize("drafting", [Drafting(2, 3), Drafting(1, 4, pipeline=True)], ids=str)
@pytest.mark.parametrize("mode", ["resident", "offloaded", "converted"])
@pytest.mark.parametrize("async_steps", [False, True])
def test_suspended_at_any_time(async_steps: bool, mode: str, drafting: Drafting) -> None:
    """Between rounds, or with rows before and behind their capture loop."""
    engine = make_model_engine(compiled("ouro", 0.3), drafting=drafting, async_steps=async_steps)
    for n, prompt in enumerate(MODEL_PROMPTS):
        engine.add_request(prompt, SamplingParams(NEW), str(n))
    outputs: dict[str, list[StepOutput]] = {}
    for step in range(5):
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        disturb(engine, str(step % 3), mode)
    run(engine, outputs)
    assert [tokens_of(outputs[str(n)]) for n in range(3)] == plain_tokens("ouro", 0.3)


def test_a_block_may_begin_dense_and_end_sparse() -> None:
    model, drafting = compiled("ouro", 0.3), Drafting(1, 4)
    for below in (7, 8, 9):
        tokens = []
        for options in ({}, {"drafting": drafting}):
            engine = make_model_engine(model, dense_below=below, **options)
            if options:
                script(engine, {str(n): answer for n, answer in enumerate(tokens[0])}, lambda line: line == 2)
            outputs = model_outputs(engine)
            tokens.append([tokens_of(outputs[str(n)]) for n in range(3)])
        assert tokens[0] == tokens[1]


# ---------------------------------------------------------------------- ends


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("loops", [1, 3])
@pytest.mark.parametrize("sparse", [False, True])
def test_the_fake_model_too(sparse: bool, loops: int, async_steps: bool) -> None:
    want = [oracle(prompt, 11, sparse) for prompt in PROMPTS]
    for rows in (1, 2, 4, 7):
        engine = fake_engine(Drafting(loops, rows), sparse=sparse, async_steps=async_steps)
        assert generate(engine, PROMPTS, 11) == want


@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("how", ["eos", "stop", "length"])
@pytest.mark.parametrize(
    ("drafting", "async_steps"),
    [*((one, False) for one in SPECULATIONS), *((Drafting(3, 4), on) for on in (False, True)), (BLOCK, True)],
    ids=str,
)
def test_a_request_ends_at_any_position_of_a_block(
    how: str, at: int, drafting: Drafting, async_steps: bool
) -> None:
    prompt = PROMPTS[0]
    tokens = oracle(prompt, 10, True)
    seen = []
    for asked in (None, drafting):
        engine = fake_engine(asked, async_steps=async_steps)
        params = greedy(at if how == "length" else 10, want_logits=True)
        if how == "eos":
            params.eos_token_ids = (tokens[at - 1],)
        if how == "stop":
            params.stop = lambda ids, scores: ids.shape[1] == len(prompt) + at
        engine.add_request(prompt, params)
        outputs = only(run_all(engine))
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        seen.append(outputs)
    want, got = seen
    assert tokens_of(got) == tokens_of(want) == tokens[: len(want)]
    assert want[-1].finish_reason == got[-1].finish_reason == how
    for one, other in zip(want, got, strict=True):
        assert one.logprob == pytest.approx(other.logprob)
        assert one.logits is not None
        assert torch.equal(one.logits, other.logits)
        assert torch.equal(one.scores, other.scores)


@pytest.mark.parametrize("drafting", SPECULATIONS, ids=str)
@pytest.mark.parametrize("after", range(1, 6))
def test_a31_an_abort_near_the_limit(after: int, drafting: Drafting) -> None:
    """At any step of a request whose blocks get shorter towards its end."""
    engine = fake_engine(drafting)
    engine.add_request(PROMPTS[0], greedy(6), "a")
    engine.add_request(PROMPTS[1], greedy(9), "b")
    outputs: list[StepOutput] = []
    for _ in range(after):
        outputs += engine.step()
        engine.check_integrity()
    engine.abort("a")
    engine.check_integrity()
    outputs += run_all(engine).get("b", [])
    assert [o.token for o in outputs if o.request_id == "b"] == oracle(PROMPTS[1], 9, True)
    assert engine.pool.held_pages == 0


# ---------------------------------------------------------------------- callbacks


def test_a33_a_processor_is_applied_at_each_draft_position(monkeypatch: pytest.MonkeyPatch) -> None:
    """A structure that forbids most tokens: drafts obey it, and the tokens are those of ordinary decoding."""

    def allowed(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        wanted = (int(ids[0, -1]) + ids.shape[1]) % 3
        return scores.masked_fill(torch.arange(scores.shape[1]) % 3 != wanted, -torch.inf)

    plain, engine = fake_engine(None), fake_engine(Drafting(1, 4))
    propose, drafted = Choices.propose, []

    def watched(self: Choices, logits: torch.Tensor, rows: torch.Tensor, line: int) -> torch.Tensor:
        tokens = propose(self, logits, rows, line)
        for block, token in zip(self.blocks, tokens.tolist(), strict=True):
            _, position, length, *_, last = rows[:, block.number, line].tolist()
            if length:
                drafted.append((token - last - position - 1) % 3)
        return tokens

    monkeypatch.setattr(Choices, "propose", watched)
    got = [generate(one, PROMPTS, 9, processor=allowed) for one in (plain, engine)]
    assert got[0] == got[1]
    assert len(drafted) > 20
    assert not any(drafted)


def test_a_processor_that_fails_beyond_the_end_harms_nobody() -> None:
    """It raises where no token of the request will ever be: drafting stops there, and the request ends as it should."""
    prompt, tokens = PROMPTS[0], oracle(PROMPTS[0], 10, True)

    def picky(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > len(prompt) + 3:
            raise KeyError("too long")
        return scores

    for drafting in (*SPECULATIONS, Drafting(3, 2), Drafting(3, 7)):
        engine = fake_engine(drafting)
        engine.add_request(prompt, greedy(10, processor=picky, eos_token_ids=(tokens[3],)))
        outputs = only(run_all(engine))
        assert (tokens_of(outputs), outputs[-1].finish_reason) == (tokens[:4], "eos")
        engine.add_request(prompt, greedy(10, processor=picky))
        outputs = only(run_all(engine))
        assert (tokens_of(outputs), outputs[-1].finish_reason) == ([*tokens[:4], -1], "error")
        assert isinstance(outputs[-1].error, KeyError)


@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize("drafting", SPECULATIONS, ids=str)
def test_a_processor_ends_a_request_in_the_middle_of_a_round(
    victim: str, call: int, drafting: Drafting
) -> None:
    engine = fake_engine(drafting)
    calls = 0

    def ending(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == call:
            engine.abort(victim)
        return scores

    engine.add_request(PROMPTS[0], greedy(8, processor=ending), "a")
    engine.add_request(PROMPTS[1], greedy(8), "b")
    outputs = run_all(engine)
    other, prompt = ("b", PROMPTS[1]) if victim == "a" else ("a", PROMPTS[0])
    assert tokens_of(outputs[other]) == oracle(prompt, 8, True)
    assert engine.pool.held_pages == 0
    assert engine.metrics().failed_runs == 0


@pytest.mark.parametrize("drafting", SPECULATIONS, ids=str)
def test_scores_that_are_no_numbers_end_the_request(drafting: Drafting) -> None:
    engine = fake_engine(drafting)

    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * torch.nan if ids.shape[1] == 6 else scores

    for sampling in ({}, {"do_sample": True}):
        engine.add_request(PROMPTS[0], greedy(9, processor=broken, **sampling))
        outputs = only(run_all(engine))
        assert outputs[-1].finish_reason == "error"
        assert "NaN" in str(outputs[-1].error)
        assert len(outputs) == 4


# ---------------------------------------------------------------------- options


def test_adaptive_blocks_follow_what_is_accepted() -> None:
    """All drafts wrong: blocks of two rows. All right: as long as they may be."""
    answer = oracle(PROMPTS[0], 20, True)
    sizes = []
    for wrong in (True, False):
        engine = fake_engine(Drafting(1, 6, adaptive=True))
        script(engine, {"a": answer}, lambda line, wrong=wrong: wrong)  # type: ignore[misc]
        engine.add_request(PROMPTS[0], greedy(20), "a")
        assert tokens_of(run_all(engine)["a"]) == answer
        sizes.append((engine.metrics().rounds, engine.metrics().drafted_tokens))
    assert sizes == [(19, 5 + 5 + 16 + 0), (4, 5 + 5 + 5 + 0)]  # the second block is as long as the first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loops_per_step": 1}, "loops_per_step=1 cannot be combined with drafting"),
        ({"drafting": Drafting(1, 2, pipeline=True)}, "drafting rows=2 must be 3 in a pipeline"),
        ({"drafting": Drafting(4, 2)}, "drafting loops=4 must be from 1 to the program's 3 loops"),
    ],
    ids=str,
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_engine(**({"drafting": Drafting(1, 2)} | options))


def test_drafting_needs_rows_and_a_rolled_program() -> None:
    with pytest.raises(ValueError, match="drafting rows=0 must be at least 1"):
        Drafting(1, 0)
    with pytest.raises(ValueError, match="needs a program whose loop is rolled"):
        EngineOptions(max_context=8, drafting=Drafting(1, 2)).check_loops(1)


def test_the_numbers_of_a_request_are_those_of_its_rounds() -> None:
    engine = fake_engine(Drafting(3, 4))
    name = engine.add_request(PROMPTS[0], greedy(10))
    run_all(engine)
    metrics = engine.metrics(name)
    assert (metrics.rounds, metrics.drafted_tokens, metrics.accepted_tokens) == (3, 6, 6)
    assert metrics.mean_accepted_length == engine.metrics().mean_accepted_length == 3
    assert metrics.loops_run == 3 * (len(PROMPTS[0]) + 9)
    assert fake_engine(None).metrics().mean_accepted_length is None
