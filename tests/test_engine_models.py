"""Real models: however a request runs, its tokens are the same, in float32, token for token."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from cases_common import prompts
from oracle import SparseOracle
from shared_models import shared_model, traced_once

from sparse_compile import SpeculationConfig, sparse_compile
from sparse_compile.passes.pieces import Cutter
from sparse_compile.runtime import executor
from sparse_compile.runtime.engine import Engine
from sparse_compile.runtime.options import EngineOptions
from sparse_compile.runtime.request import SamplingParams, StepOutput

PROMPTS = prompts(5, 13, 3)
NEW = 7
MODES = ("none", "resident", "offloaded", "converted")


@functools.cache
def compiled(name: str, retention: float) -> Any:
    with traced_once():
        return sparse_compile(
            shared_model(name, torch.float32),
            key_retention=retention,
            prefill_chunk=4,
            page_size=4,
            validate=False,
        )


@functools.cache
def cutter_of(model: Any) -> Cutter:
    """Engines of one model share the pieces that its program is cut into, and their Python code."""
    return Cutter()


def make_engine(
    model: Any, rows: int = 3, context: int = 24, pool_tokens: int | None = None, **options: Any
) -> Engine:
    """An engine over poisoned pools, with other options than the model's own."""
    factory, drafting = model._keeper.make_engine, options.get("drafting")
    speculation = SpeculationConfig("block", drafting.loops, drafting.rows) if drafting else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "Cutter", lambda: cutter_of(model))
        made = factory(rows, context, pool_tokens, speculation)
    settings = {name: getattr(made.options, name) for name in EngineOptions.__dataclass_fields__}
    engine = Engine(made.executor, made.pool, made.store, EngineOptions(**(settings | options)))
    stores = () if engine.store is None else (engine.store.mass, engine.store.o_ref, engine.store.c_ref)
    for tensor in (engine.pool.k_pool, engine.pool.v_pool, *stores):
        tensor.fill_(torch.nan)
    return engine


@functools.cache
def plain_tokens(name: str, retention: float) -> list[list[int]]:
    """The simple loop: one request at a time, everything synchronous; and an oracle of its own beside it."""
    model = compiled(name, retention)
    tokens = []
    for prompt in PROMPTS:
        engine = make_engine(model)
        engine.add_request(prompt, SamplingParams(NEW), "alone")
        tokens.append([output.token for output in run(engine)["alone"]])
    oracle = SparseOracle(model.model, retention)
    for prompt, ours in zip(PROMPTS, tokens, strict=True):
        assert oracle.generate(prompt, NEW) == ours
        best = torch.stack(oracle.logits).topk(2).values  # equal tokens mean something only without near-ties
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-4
    return tokens


def run(engine: Engine, outputs: dict[str, list[StepOutput]] | None = None) -> dict[str, list[StepOutput]]:
    outputs = {} if outputs is None else outputs
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
    assert engine.metrics().failed_runs == 0
    return outputs


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loops", [None, 1, 2, -1])
@pytest.mark.parametrize("retention", [1.0, 0.3])
@pytest.mark.parametrize("name", ["ouro", "dory"])
def test_however_it_runs_the_tokens_are_the_same(
    name: str, retention: float, loops: int | None, mode: str
) -> None:
    """Synchronous and asynchronous, 1, 2 or all loops a step, suspended after every number of steps up to 9."""
    model = compiled(name, retention)
    if loops == -1:
        loops = model.program.roll.repeats
    for turn, async_steps in enumerate((False, True)):
        engine = make_engine(model, async_steps=async_steps, loops_per_step=loops)
        ids = [engine.add_request(prompt, SamplingParams(NEW), str(n)) for n, prompt in enumerate(PROMPTS)]
        outputs: dict[str, list[StepOutput]] = {}
        for step in range(0 if mode == "none" else 9 + turn):
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
            disturb(engine, ids[step % 3], mode)
        run(engine, outputs)
        assert [[output.token for output in outputs[one]] for one in ids] == plain_tokens(name, retention)
        assert engine.pool.held_pages == 0
        if mode != "none":
            assert engine.metrics().resumed > 2


def disturb(engine: Engine, name: str, mode: str) -> None:
    """Suspends a request in one of the modes, wipes what it gave up, and lets it go on."""
    if not engine.suspend(name, offload=mode == "offloaded"):
        return
    if mode == "converted":
        engine.offload(name)
    held = {page for request in engine.scheduler.requests.values() for page in request.pages}
    for page in set(range(1, engine.pool.pages)) - held:
        engine.pool.k_pool[:, page] = engine.pool.v_pool[:, page] = torch.nan
    engine.resume(name)


def test_a_suspension_falls_between_the_capture_and_its_consumes() -> None:
    model = compiled("ouro", 0.3)
    engine = make_engine(model, rows=1, loops_per_step=1)
    engine.add_request(PROMPTS[0], SamplingParams(NEW), "a")
    outputs: dict[str, list[StepOutput]] = {}
    depths = []
    while engine.has_unfinished():
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        request = engine.scheduler.requests.get("a")
        if request is None:
            continue
        depths.append(request.loop)
        disturb(engine, "a", "offloaded")
        assert engine.store is not None
        for tensor in (engine.store.mass, engine.store.o_ref, engine.store.c_ref):
            tensor.fill_(torch.nan)
    assert set(depths) == {0, 1, 2, 3}
    assert [output.token for output in outputs["a"]] == plain_tokens("ouro", 0.3)[0]
    assert engine.metrics().failed_runs == 0


@pytest.mark.parametrize("async_steps", [False, True])
def test_a34_pools_that_are_too_small_change_no_token(async_steps: bool) -> None:
    """Three sequences of up to 20 tokens share room for 20: they push each other out, and all of them finish."""
    model = compiled("ouro", 0.3)
    engine = make_engine(model, pool_tokens=20, async_steps=async_steps)
    for n, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, SamplingParams(NEW), str(n))
    outputs = run(engine)
    assert [[output.token for output in outputs[str(n)]] for n in range(3)] == plain_tokens("ouro", 0.3)


def test_cached_prompts_change_no_token() -> None:
    engine = make_engine(compiled("dory", 0.3), prefix_caching=True)
    for turn in range(2):
        for n, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, SamplingParams(NEW), f"{turn}{n}")
        outputs = run(engine)
        assert [[o.token for o in outputs[f"{turn}{n}"]] for n in range(3)] == plain_tokens("dory", 0.3)
    assert engine.metrics().cached_tokens == 4 + 12 + 0
