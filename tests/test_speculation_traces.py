"""What rounds and pipelines leave behind in a model of Huginn's shape: keys, values and references, place for place."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest
import torch
from looped_models import LoopedConfig
from matrix_models import FixedHuginn
from runtime_fakes import tokens_of
from test_engine_models import PROMPTS, make_engine
from test_speculation import model_outputs, pipeline, script, script_pipeline, watch_ends, watch_references

from sparse_compile import sparse_compile
from sparse_compile.runtime.engine import Engine
from sparse_compile.runtime.options import Drafting

NEW = 7


@functools.cache
def huginn() -> Any:
    """In float64, with a prelude, a coda, and captures in the first loop."""
    torch.manual_seed(0)
    looped = FixedHuginn(LoopedConfig(vocab_size=300, num_hidden_layers=4)).double().eval()
    options = {"key_retention": 0.3, "capture_loop": 0, "page_size": 4, "prefill_chunk": 4}
    return sparse_compile(looped, validate=False, **options)


def traces(engine: Engine) -> tuple[list[list[int]], dict[str, Any], dict[tuple[str, int], Any]]:
    """Tokens of three requests; their keys and values when they end; references by request and position."""
    keys: dict[str, Any] = {}
    watch_ends(engine, keys)
    references = watch_references(engine)
    outputs = model_outputs(engine, NEW)
    return [tokens_of(outputs[str(n)]) for n in range(len(PROMPTS))], keys, references


@functools.cache
def ordinary() -> tuple[list[list[int]], dict[str, Any], dict[tuple[str, int], Any]]:
    return traces(make_engine(huginn()))


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("how", [Drafting(1, 4), Drafting(2, 3), Drafting(4, 7), 1, 3], ids=str)
def test_drafts_that_are_right_at_random_leave_what_ordinary_decoding_leaves(
    how: Drafting | int, async_steps: bool
) -> None:
    """how: blocks, or the draft loops of a pipeline."""
    answers, keys, references = ordinary()
    drafting = how if isinstance(how, Drafting) else pipeline(huginn(), how)
    engine = make_engine(huginn(), drafting=drafting, async_steps=async_steps)
    by_name = {str(n): answer for n, answer in enumerate(answers)}
    if drafting.pipeline:
        script_pipeline(engine, by_name, right=not async_steps)
    else:
        chance = random.Random(drafting.rows)
        script(engine, by_name, lambda row: chance.random() < 0.4)
    tokens, our_keys, our_references = traces(engine)
    assert tokens == answers
    for n, prompt in enumerate(PROMPTS):
        computed = slice(0, len(prompt) + NEW - 1)
        for ours, theirs in zip(our_keys[str(n)], keys[str(n)], strict=True):
            torch.testing.assert_close(ours[:, computed], theirs[:, computed], rtol=0, atol=1e-10)
    assert len(references) == len(PROMPTS) * (NEW - 1)
    for place, (index, count, *numbers) in references.items():
        our_index, our_count, *ours = our_references[place]
        assert torch.equal(our_count, count)
        for site, kept in enumerate(count.tolist()):
            assert torch.equal(our_index[site, :, :kept], index[site, :, :kept])
        for one, other in zip(ours, numbers, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
