"""The trained model of the package is what its card says: small, complete, and able to look things up.

The bounds are wide: few samples, so that a CPU can take them. Measured figures are in the card.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from benchmarks.demo.forward import Forward
from sparse_compile import SpeculationConfig, sparse_compile
from sparse_compile.models import OuroForCausalLM, check_checkpoint, load_model, load_tokenizer, preset_config
from sparse_compile.models.presets import DEMO_FOLDER
from sparse_compile.quality import tasks, text


@pytest.fixture(scope="module")
def model() -> OuroForCausalLM:
    found = load_model("demo", dtype="float32")
    assert isinstance(found, OuroForCausalLM)
    return found


def test_it_is_small_complete_and_the_preset(model: OuroForCausalLM) -> None:
    assert sum(file.stat().st_size for file in DEMO_FOLDER.iterdir()) <= 16_000_000
    card = (DEMO_FOLDER / "README.md").read_text()
    assert card.startswith("---\nlicense:")
    assert all(f"| {name} | " in card for name in tasks.TASKS)
    assert load_model("demo").dtype == torch.bfloat16
    assert check_checkpoint("demo").ok
    expected, own = preset_config("demo").to_dict(), model.config.to_dict()
    differing = {name for name in expected if expected[name] != own.get(name)}
    assert differing <= {"architectures", "dtype", "transformers_version", "_name_or_path"}
    tokenizer = load_tokenizer("demo")
    assert tokenizer.decode(tokenizer("a key")["input_ids"]) == "a key"
    assert tokenizer.padding_side == "left"


def test_text_is_predicted_and_early_loops_draft(model: OuroForCausalLM) -> None:
    ids = tasks.to_ids(text.held_out_text()[20_000:21_025])[None]
    logits = Forward(model, torch.float32).logits(ids[:, :-1])
    bits = [float(functional.cross_entropy(one[0], ids[0, 1:])) / math.log(2) for one in logits]
    assert bits[-1] < 2.5  # without context, bytes of this text take about 4.5
    same = [float((one.argmax(-1) == logits[-1].argmax(-1)).float().mean()) for one in logits]
    assert same[0] >= 0.5
    assert same[1] >= 0.75


@pytest.mark.parametrize(("loops", "least"), [(1, 0.4), (2, 0.6), (3, 0.8)])
def test_it_drafts_for_itself_on_held_out_text(model: OuroForCausalLM, loops: int, least: float) -> None:
    """In blocks and pipelines; the tokens are those of ordinary decoding."""
    prompts = torch.stack(
        [tasks.to_ids(text.held_out_text()[at : at + 96]) for at in (5_000, 60_000, 120_000)]
    )
    compiled = _compiled(model)
    wanted = compiled.generate(prompts, max_new_tokens=16, do_sample=False)
    for mode in ("block", "pipeline"):
        found = compiled.generate(
            prompts,
            max_new_tokens=16,
            do_sample=False,
            speculation=SpeculationConfig(mode, draft_loops=loops, num_draft_tokens=3),
            return_dict_in_generate=True,
        )
        assert torch.equal(found.sequences, wanted)
        accepted = sum(one.accepted_tokens for one in found.metrics)
        assert accepted >= least * sum(one.drafted_tokens for one in found.metrics)


@functools.cache
def _compiled(model: OuroForCausalLM) -> Any:
    return sparse_compile(model, key_retention=0.1, validate=False, progress=False)


def test_far_keys_are_found(model: OuroForCausalLM) -> None:
    def logits(ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return model(ids, logits_to_keep=8).logits

    asked = tasks.samples("recall", 6, 512, seed=2)
    assert tasks.forced_accuracy(logits, asked) >= 5 / 6


def test_drafts_are_kept_and_change_no_token(model: OuroForCausalLM) -> None:
    compiled = _compiled(model)
    ids = tasks.to_ids(text.held_out_text()[3_000:3_100])[None]
    settings = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 24, "min_new_tokens": 24}
    alone = compiled.generate(ids, **settings)
    speculation = SpeculationConfig(draft_loops=2, num_draft_tokens=4)
    drafted = compiled.generate(ids, **settings, speculation=speculation, return_dict_in_generate=True)
    assert torch.equal(drafted.sequences, alone)
    metrics = drafted.metrics[0]
    assert metrics.accepted_tokens >= 0.5 * metrics.drafted_tokens > 0
