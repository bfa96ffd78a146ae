"""The engine on a CUDA device: the host waits for nothing while requests decode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases_common import prompts

from sparse_compile import Engine, SamplingParams, sparse_compile
from sparse_compile.models import tiny_model

pytestmark = pytest.mark.gpu
NEW = 40


@contextmanager
def no_waiting() -> Iterator[None]:
    """Anything that makes the host wait for the stream is an error; waiting for an event is not."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ban_even(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(
        torch.arange(scores.shape[-1], device=scores.device) % 2 == ids[:, -1:] % 2, -torch.inf
    )


def all_params() -> list[SamplingParams]:
    return [
        SamplingParams(NEW),
        SamplingParams(NEW, do_sample=True, generator=torch.Generator("cuda").manual_seed(1)),
        SamplingParams(NEW, processor=ban_even),
        SamplingParams(NEW, eos_token_ids=(300,), want_logits=True),
    ]


def make_engine(dtype: torch.dtype = torch.float32, **options: Any) -> Engine:
    options = {"key_retention": 0.3, "page_size": 4, "dense_below": 0, "inductor": False, **options}
    model = sparse_compile(tiny_model("ouro", dtype=dtype).cuda(), **options)
    return model.serve(max_batch=4, max_context=64)


def run(engine: Engine, rows: list[list[int]]) -> list[list[int]]:
    ids = [engine.add_request(row, params) for row, params in zip(rows, all_params(), strict=True)]
    tokens: dict[str, list[int]] = {name: [] for name in ids}
    while engine.has_unfinished():
        for output in engine.step():
            tokens[output.request_id].append(output.token)
    engine.check_integrity()
    return [tokens[name] for name in ids]


@pytest.mark.parametrize("loops", [None, 1])
def test_the_host_waits_for_nothing_in_the_steady_state(loops: int | None) -> None:
    """Greedy, drawn, processed and with logits kept; pages are added on the way."""
    engine = make_engine(async_steps=True, loops_per_step=loops)
    run(engine, prompts(5, 9, 3, 12))  # kernels are compiled, pinned memory is there
    for row, params in zip(prompts(5, 9, 3, 12), all_params(), strict=True):
        engine.add_request(row, params)
    for _ in range(4):
        engine.step()
    with no_waiting():
        outputs = [output for _ in range(24) for output in engine.step()]
    assert len(outputs) >= 4 * 5
    while engine.has_unfinished():
        engine.step()


def test_asynchronous_steps_give_the_tokens_of_synchronous_ones() -> None:
    rows = prompts(5, 9, 3, 12)
    wanted = run(make_engine(async_steps=False), rows)
    for options in ({"async_steps": True}, {"async_steps": True, "loops_per_step": 1}, {"loops_per_step": 2}):
        assert run(make_engine(**options), rows) == wanted


def run_suspended(
    engine: Engine, rows: list[list[int]], params: list[SamplingParams], offload: bool
) -> list[list[int]]:
    """The tokens of four requests, one of which is suspended and resumed after every third step."""
    ids = [engine.add_request(row, one) for row, one in zip(rows, params, strict=True)]
    tokens: dict[str, list[int]] = {name: [] for name in ids}
    for count in range(1000):
        if not engine.has_unfinished():
            break
        for output in engine.step():
            tokens[output.request_id].append(output.token)
        if count % 3 == 0 and engine.suspend(ids[count % 4], offload=offload):
            engine.resume(ids[count % 4])
    engine.check_integrity()
    return [tokens[name] for name in ids]


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("loops", [None, 1])
def test_suspension_changes_no_token(loops: int | None, offload: bool) -> None:
    rows = prompts(5, 9, 3, 12)
    wanted = run(make_engine(async_steps=True), rows)
    engine = make_engine(async_steps=True, loops_per_step=loops)
    assert run_suspended(engine, rows, all_params(), offload) == wanted


def test_draws_are_those_of_multinomial() -> None:
    from sparse_compile.runtime.sampler import draw

    ours, own = (torch.Generator("cuda").manual_seed(1) for _ in range(2))
    for vocabulary in (2, 272, 50_000):
        probs = torch.randn(1, vocabulary, device="cuda").softmax(-1)
        assert torch.equal(draw(probs, ours), torch.multinomial(probs, 1, generator=own))
        assert torch.equal(ours.get_state(), own.get_state())
