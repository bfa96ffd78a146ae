"""The memory plan: a survey without weights sees what a trace sees, and its arithmetic is that of the real pools."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_compile import cli, sparse_compile
from sparse_compile.config import SparseConfig
from sparse_compile.kernels.retention import Retention
from sparse_compile.models import tiny_config, tiny_model
from sparse_compile.passes.base import Options
from sparse_compile.passes.errors import UnsupportedModel
from sparse_compile.passes.pipeline import build_program
from sparse_compile.passes.survey import survey
from sparse_compile.passes.weights import named_tensors
from sparse_compile.planning import MemoryPlan, empty_model, load_config, make_plan, parse_size, parse_tokens
from sparse_compile.runtime.budget import CONTEXT_BYTES, Budget, PoolSizes

GIB = 2**30


def plan(
    name: str = "ouro-1.4b", gpu: int = 80 * GIB, context: int = 32768, batch: int = 2, **options: Any
) -> Any:
    return make_plan(name, gpu, context, batch, SparseConfig.from_options(**options), None)


@pytest.mark.parametrize("name", ["ouro", "dory", "hrm-text"])
def test_a_survey_sees_what_a_trace_sees(name: str) -> None:
    options = Options(Retention.of(0.3))
    model = tiny_model(name)
    program = build_program(model, options)
    found = survey(empty_model(tiny_config(name), torch.float32), options)
    # Gates are taken along when the program is made, and cost no memory.
    assert found.sites == tuple(replace(site, gated=False) for site in program.sites)
    assert found.vocabulary == program.vocabulary
    assert found.weight_bytes == sum(tensor.nbytes for tensor in named_tensors(model).values())
    assert found.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_what_a_row_makes_by_hand() -> None:
    found = survey(empty_model(tiny_config("ouro"), torch.bfloat16), Options(Retention.of(0.3)))
    hidden, inner = 32, 64
    # At least attention's output projection, gate, up, their product, down, and the next q, k, v.
    least = (hidden + 3 * inner + hidden + 3 * hidden) * 2
    assert least < found.layer_bytes < 40 * least


def test_attention_within_a_token_needs_no_cache() -> None:
    from looped_models import LoopedConfig, MixedResiduals

    with torch.device("meta"):
        model = MixedResiduals(LoopedConfig())
    assert {site.layer for site in survey(model, Options(Retention.of(0.3))).sites} == {
        "layers.0",
        "layers.1",
    }


def test_ouro_by_hand() -> None:
    found = plan()
    assert found.budget.pools.kv_spec().bytes_per_token == 786_432
    assert found.needs["KV pool"] == (2 * 32768 + 16) * 786_432
    assert found.needs["weights"] == pytest.approx(2 * 1.4347e9, rel=1e-3)
    assert found.needs["logits"] == 2 * 49152 * 10
    assert found.fits
    assert found.changes == []


def test_the_plan_is_what_a_compiled_model_needs() -> None:
    compiled = sparse_compile(
        tiny_model("dory"), key_retention=0.3, max_context=100, max_batch=3, validate=False
    )
    found = make_plan("tiny:dory", GIB, 100, 3, SparseConfig.from_options(key_retention=0.3), torch.float32)
    budget = compiled.report().budget
    assert found.needs["KV pool"] == budget["kv_pool"]
    assert found.needs["reference store"] == budget["reference_store"]
    assert found.needs["weights"] == budget["weights"]


def test_dense_needs_no_store() -> None:
    assert "reference store" not in plan(enabled=False).needs
    assert "reference store" not in plan(key_retention=1).needs


class _Site:
    heads, kv_heads, head_dim, retention = 4, 2, 8, Retention(1, 10)

    def __init__(self, store_site: int | None) -> None:
        self.store_site = store_site


@settings(max_examples=60, deadline=None)
@given(
    gpu=st.integers(CONTEXT_BYTES // 2, 4 * GIB),
    batch=st.integers(1, 40),
    context=st.integers(1, 20_000),
    captures=st.integers(0, 3),
)
def test_largest_settings_fit_and_one_more_does_not(
    gpu: int, batch: int, context: int, captures: int
) -> None:
    sites = [_Site(number if number < captures else None) for number in range(6)]
    pools = PoolSizes(sites, 64, 16, torch.bfloat16)
    budget = Budget(gpu, 10**7, pools, 5000, 512, 300)
    longest, most = budget.max_context(batch, 2**40), budget.max_batch(context)
    assert budget.fits(batch, context) == (longest >= context) == (most >= batch)
    for held, one_more in (
        ((batch, longest), (batch, longest + 1)),
        ((most, context), (most + 1, context)),
    ):
        assert 0 in held or budget.fits(*held)
        assert not budget.fits(*one_more)
    least = budget.least_gpu_bytes(batch, context)
    enough = Budget(least + 16, 10**7, pools, 5000, 512, 300)
    scarce = Budget(least - 16, 10**7, pools, 5000, 512, 300)
    assert enough.fits(batch, context)
    assert not scarce.fits(batch, context)


@pytest.mark.parametrize(
    ("text", "size"),
    [("80GiB", 80 * GIB), ("80 gib", 80 * GIB), ("141GB", 141 * 10**9), ("1.5KiB", 1536), ("7B", 7)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["80", "80G", "GiB", "-1GiB", "0GiB", "", "1e3GiB", "nanGiB"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="such as 80GiB"):
        parse_size(text)


@pytest.mark.parametrize(("text", "tokens"), [("32k", 32768), ("1K", 1024), ("4096", 4096), ("1M", 2**20)])
def test_tokens(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["32KiB", "k", "0", "-4", "1.5k", ""])
def test_bad_tokens(text: str) -> None:
    with pytest.raises(ValueError, match="4096 or 32k"):
        parse_tokens(text)


def test_configurations_by_name(tmp_path: Path) -> None:
    tiny_config("dory").save_pretrained(tmp_path)
    assert load_config(str(tmp_path)).model_type == "dory"
    assert load_config("ouro-2.6b").num_hidden_layers == 48
    assert load_config("tiny:hrm-text").H_cycles == 3


def test_refusals(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    with pytest.raises(ValueError, match="batch=0: must be at least 1"):
        plan(batch=0)
    with pytest.raises(ValueError, match="context=1000: the model has 512 positions"):
        plan("tiny:ouro", context=1000)
    with pytest.raises(ValueError, match="capture_loop=7"):
        plan("tiny:ouro", context=100, capture_loop=7)
    LlamaConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="not a looped model"):
        plan(str(tmp_path), context=100)


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "ouro-1.4b", "--gpu-memory", "80GiB", "--context", "32k"]
    assert cli.run([*words, "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert "it fits: yes" in out
    assert "768.00 KiB per token" in out
    assert cli.run([*words, "--batch", "8", "--json"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: 8 x 32768 tokens do not fit into 80GiB; choose --context ")
    value = json.loads(captured.out)
    assert value["fits"] is False
    assert value["total"] == sum(value["needs"].values())
    taken = sum(value["needs"][name] for name in ("weights", "cuda_and_kernels"))
    assert value["gpu_memory"] == taken + value["pool_limit"] + value["reserve"]
    assert value["reserve"] >= value["needs"]["activations"] + value["needs"]["logits"]
    assert value["changes"][:2] == [
        f"--context {value['max_context']} or less",
        f"--batch {value['max_batch']} or less",
    ]
    assert cli.run(["plan", "ouro-1.4b", "--gpu-memory", "80", "--context", "32k"]) == 2
    assert "--gpu-memory: '80'" in capsys.readouterr().err
    assert cli.run(["plan", "ouro-1.4b", "--gpu-memory", "80GiB", "--context", "1"]) == 2
    assert "--context 1: must be at least 2" in capsys.readouterr().err
    assert cli.run(["plan", "ouro-1.4b", "--gpu-memory", "3GiB", "--context", "8k"]) == 1
    assert "largest --context at --batch 1: none" in capsys.readouterr().out


@given(context=st.integers(1, 65536), batch=st.integers(1, 2000), gpu=st.integers(1, 300 * GIB))
@settings(deadline=None)
def test_what_it_says_would_fit_does(context: int, batch: int, gpu: int) -> None:
    """Each change that is named, alone, as it is written."""
    found = _ouro()
    found = replace(found, context=context, batch=batch, budget=replace(found.budget, gpu_bytes=gpu))
    for change in found.changes:
        what, value = re.fullmatch(r"(--context|--batch|a GPU with) (.+) or (?:less|more)", change).groups()
        if what == "a GPU with":
            changed = replace(found, budget=replace(found.budget, gpu_bytes=parse_size(value)))
        else:
            changed = replace(found, **{what.removeprefix("--"): int(value)})
        assert changed.fits, change


@functools.cache
def _ouro() -> MemoryPlan:
    return plan()
