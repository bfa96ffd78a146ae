"""Self-speculation on a CUDA device: the host waits for nothing while requests decode in rounds or pipelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from cases_common import prompts
from test_engine_gpu import ban_even, no_waiting, run_suspended

from sparse_compile import Engine, SamplingParams, SpeculationConfig, sparse_compile
from sparse_compile.models import tiny_model

pytestmark = pytest.mark.gpu
NEW = 40
ROWS = prompts(5, 9, 3, 12)
SPECULATIONS = (
    SpeculationConfig("block", draft_loops=1, num_draft_tokens=3),
    SpeculationConfig("block", draft_loops=2, num_draft_tokens=4, adaptive=True),
    SpeculationConfig("block", draft_loops=4, num_draft_tokens=4),
    SpeculationConfig("pipeline", draft_loops=1),
    SpeculationConfig("pipeline", draft_loops=2),
)
STEADY = 6  # steps of which no request is at its end before: blocks of 4 are all right when all loops draft


def make_engine(name: str = "ouro", dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    options = {"key_retention": 0.3, "page_size": 4, "dense_below": 0, "inductor": False, **options}
    model = sparse_compile(tiny_model(name, dtype=dtype).cuda(), validate=False, **options)
    return model.serve(max_batch=4, max_context=64)


def drawn(seed: int) -> SamplingParams:
    return SamplingParams(NEW, do_sample=True, generator=torch.Generator("cuda").manual_seed(seed))


def run(engine: Engine, params: list[SamplingParams]) -> list[list[int]]:
    """Requests that arrive two steps after each other."""
    tokens: dict[str, list[int]] = {}
    for row, one in zip(ROWS, params, strict=True):
        tokens[engine.add_request(row, one)] = []
        for output in (*engine.step(), *engine.step()):
            tokens[output.request_id].append(output.token)
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id].append(output.token)
    engine.check_integrity()
    return list(tokens.values())


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("asked", SPECULATIONS, ids=str)
def test_the_host_waits_for_nothing_in_the_steady_state(
    asked: SpeculationConfig, sampled: bool, graphs: bool
) -> None:
    engine = make_engine(speculation=asked, async_steps=True, cuda_graphs=graphs)

    def begin() -> None:
        for n, row in enumerate(ROWS):
            engine.add_request(row, drawn(n) if sampled and n % 2 else SamplingParams(NEW))

    begin()
    while engine.has_unfinished():
        engine.step()  # the same once before: kernels are compiled, graphs captured, pinned memory is there
    begin()
    for _ in range(3):
        engine.step()
    with no_waiting():
        outputs = [output for _ in range(STEADY) for output in engine.step()]
    assert outputs
    while engine.has_unfinished():
        engine.step()
    assert engine.metrics().waiting_rounds == 0
    engine.check_integrity()


@pytest.mark.parametrize("name", ["ouro", "dory"])
@pytest.mark.parametrize("asked", SPECULATIONS, ids=str)
def test_asynchronous_rounds_give_the_tokens_of_ordinary_decoding(
    name: str, asked: SpeculationConfig
) -> None:
    """In float64, which runs without graphs. Requests that draw are compared with synchronous rounds."""
    asked = replace(asked, draft_loops=min(asked.draft_loops, 3))  # as many as Dory has
    greedy = [SamplingParams(NEW)] * 4
    wanted, mixed = run(make_engine(name, torch.float64), greedy), []
    for async_steps in (False, True):
        engine = make_engine(name, torch.float64, speculation=asked, async_steps=async_steps)
        assert run(engine, greedy) == wanted
        own = [SamplingParams(NEW, processor=ban_even), SamplingParams(NEW, want_logits=True)]
        mixed.append(run(engine, [drawn(1), own[0], drawn(2), own[1]]))
        assert (engine.metrics().waiting_rounds > 0) == async_steps
    assert mixed[0] == mixed[1]


@pytest.mark.parametrize(
    ("asked", "inductor"),
    [*((asked, False) for asked in SPECULATIONS), (SPECULATIONS[0], True), (SPECULATIONS[-1], True)],
    ids=str,
)
def test_graphs_change_no_bits_of_asynchronous_rounds(asked: SpeculationConfig, inductor: bool) -> None:
    """Tokens and log-probabilities of requests alone; tokens of four together, some of which draw."""
    found = []
    for graphs in (False, True):
        engine = make_engine(speculation=asked, async_steps=True, cuda_graphs=graphs, inductor=inductor)
        alone: list[tuple[int, float]] = []
        for row in ROWS:
            engine.add_request(row, SamplingParams(NEW))
            while engine.has_unfinished():
                alone += [(output.token, output.logprob) for output in engine.step()]
        together = run(engine, [SamplingParams(NEW), drawn(1), SamplingParams(NEW), drawn(2)])
        found.append((alone, together))
        assert bool(getattr(engine.executor, "round_buckets", None)) == graphs
    assert found[0] == found[1]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("asked", SPECULATIONS, ids=str)
def test_suspension_changes_no_token(asked: SpeculationConfig, offload: bool) -> None:
    params = [SamplingParams(NEW), drawn(1), SamplingParams(NEW), drawn(2)]
    wanted = run(make_engine(dtype=torch.float64, speculation=asked, async_steps=True), params)
    engine = make_engine(dtype=torch.float64, speculation=asked, async_steps=True)
    params = [SamplingParams(NEW), drawn(1), SamplingParams(NEW), drawn(2)]
    assert run_suspended(engine, ROWS, params, offload) == wanted


def test_a_warm_up_captures_what_rounds_need() -> None:
    for asked in SPECULATIONS:
        model = sparse_compile(
            tiny_model("ouro").cuda(),
            key_retention=0.3,
            page_size=4,
            inductor=False,
            validate=False,
            speculation=asked,
            max_batch=2,
            max_context=64,
        )
        model.warmup()
        buckets = dict(model.engine.executor.round_buckets)
        for rows in (ROWS[:1], ROWS[:2]):
            width = max(map(len, rows))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in rows]).cuda()
            model.generate(
                input_ids=ids, attention_mask=(ids != 0).long(), max_new_tokens=20, do_sample=False
            )
        assert model.engine.executor.round_buckets == buckets
