"""The comparison before use: it must not depend on the model's habits, and must fit the smallest models."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from shared_models import shared_model

from sparse_compile import ArgumentError, sparse_compile, validation
from sparse_compile.compiled import CompiledModel
from sparse_compile.errors import ValidationError
from sparse_compile.models import tiny_model
from sparse_compile.validation import NOISE_FACTOR, TOLERANCE, forward_logits, relative_error

pytestmark = pytest.mark.usefixtures("shared_traces")

PROMPT = torch.tensor([[5, 77, 130, 9]])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("stop_strings", ["x"]),
        ("num_return_sequences", 2),
        ("penalty_alpha", 0.5),
        ("repetition_penalty", 1.5),
        ("max_time", 0.0),
    ],
)
def test_the_models_generation_settings_stay_out_of_it(
    setting: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shared_model("ouro", num_hidden_layers=1, total_ut_steps=3)
    monkeypatch.setattr(model.generation_config, setting, value)
    own = model.generation_config
    assert sparse_compile(model).validate() < 1e-5
    assert model.generation_config is own


@pytest.mark.parametrize("tied", [False, True])
def test_half_precision_is_compared_with_the_model_in_float32(tied: bool) -> None:
    """A tied weight is one tensor under two names: both must be widened."""
    model = tiny_model("ouro", num_hidden_layers=1, total_ut_steps=3, tie_word_embeddings=tied).to(
        torch.bfloat16
    )
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == tied
    before = {name: value.clone() for name, value in model.state_dict().items()}
    prompt, tokens = PROMPT, torch.tensor([3, 4])
    logits = forward_logits(model, prompt, tokens, torch.float32)
    assert logits.dtype == torch.float32
    wide = copy.deepcopy(model).float()
    own = wide(torch.cat([prompt[0], tokens])[None], use_cache=False).logits[0, 3:-1]
    torch.testing.assert_close(logits, own, rtol=1e-5, atol=1e-5)
    assert 0 < sparse_compile(model).validate() < 0.3
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@cache
def of_layers(layers: int) -> CompiledModel:
    return sparse_compile(tiny_model("ouro", num_hidden_layers=layers), validate=False)


DEPTHS = pytest.mark.parametrize("layers", [2, 8])


@DEPTHS
def test_float32_may_be_as_far_off_as_the_models_own_rounding(layers: int) -> None:
    """Four loops of 8 layers amplify the rounding of a float32 to a thousandth of the logits, whoever computes them."""
    error = of_layers(layers).validate()
    assert (error < 1e-4) == (layers == 2)
    assert error < 5e-3


@contextmanager
def some_weights_off(compiled: CompiledModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While the program runs, half the rows of one matrix are off by 2 %. (All of them would be undone by a norm.)"""
    weight, run = compiled.model.model.layers[1].mlp.down_proj.weight, validation.program_logits
    right, half = weight.detach().clone(), len(weight) // 2

    def wrong(*args: Any) -> torch.Tensor:
        with torch.no_grad():
            weight[:half].mul_(1.02)
        try:
            return run(*args)
        finally:
            with torch.no_grad():
                weight.copy_(right)

    monkeypatch.setattr(validation, "program_logits", wrong)
    yield


def nodes(compiled: CompiledModel) -> Iterator[torch.fx.Node]:
    for stage in compiled.program.variants["dense"].stages:
        yield from stage.module.graph.nodes


@contextmanager
def one_scale_off(compiled: CompiledModel, _: Any) -> Iterator[None]:
    """One layer's scores are off by 10 %, in one graph."""
    node = next(node for node in nodes(compiled) if "dense" in str(node.target))
    right = node.kwargs
    node.kwargs = {**right, "scale": 1.1 * right["scale"]}
    yield
    node.kwargs = right


@contextmanager
def one_residual_lost(compiled: CompiledModel, _: Any) -> Iterator[None]:
    """One addition takes one of its operands twice."""
    adds = (torch.ops.aten.add.Tensor, operator.add)
    node = next(
        node for node in nodes(compiled) if node.target in adds and isinstance(node.args[1], torch.fx.Node)
    )
    right = node.args
    node.args = (right[0], right[0])
    yield
    node.args = right


@DEPTHS
@pytest.mark.parametrize("fault", [some_weights_off, one_scale_off, one_residual_lost])
def test_a_broken_program_is_refused_at_any_depth(
    layers: int, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        fault(of_layers(layers), monkeypatch),
        pytest.raises(ValidationError, match=r"disagrees .* \(the model's own error against float64 is "),
    ):
        of_layers(layers).validate()


def test_the_limit_is_a_multiple_of_the_models_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Just below it is accepted, just above it is refused; below the dtype's limit nothing wider is computed."""
    model = of_layers(8).model
    prompt, tokens = PROMPT, torch.tensor([3, 4])
    own, exact = forward_logits(model, prompt, tokens), forward_logits(model, prompt, tokens, torch.float64)
    assert exact.dtype == torch.float64
    noise = relative_error(own, exact)
    limit = max(TOLERANCE[torch.float32], NOISE_FACTOR * noise)
    for share, accepted in ((0.98, True), (1.02, False)):
        found = validation.compare(model, prompt, tokens, own, exact * (1 + share * limit))
        assert found.limit == pytest.approx(limit)
        assert found.accepted is accepted
    monkeypatch.setattr(validation, "forward_logits", None)
    assert validation.compare(model, prompt, tokens, own, own * (1 + 5e-5)).accepted


def test_float32_without_room_for_a_float64_copy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "free_memory", lambda device: 1000)
    assert of_layers(2).validate() < 1e-4
    with pytest.raises(
        ValidationError, match=r"a float64 copy of .* does not fit into memory\); .*validate=False"
    ):
        of_layers(8).validate()


def test_float32_of_a_model_that_cannot_run_in_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def insists(model: Any, prompt: Any, tokens: Any, dtype: Any = None) -> torch.Tensor:
        raise RuntimeError("mat1 and mat2 must have the same dtype\nand more")

    monkeypatch.setattr(validation, "forward_logits", insists)
    with pytest.raises(ValidationError, match=r"does not run in float64: mat1 and mat2 .* same dtype\)"):
        of_layers(8).validate()


@pytest.mark.parametrize("positions", [2, 5, 8])
def test_models_of_few_positions(positions: int) -> None:
    model = tiny_model("ouro", num_hidden_layers=1, total_ut_steps=3, max_position_embeddings=positions)
    compiled = sparse_compile(model, key_retention=1, page_size=128)
    own = model.generate(PROMPT[:, :1], max_new_tokens=positions - 1, do_sample=False)
    assert torch.equal(compiled.generate(PROMPT[:, :1], max_new_tokens=positions - 1), own)
    with pytest.raises(
        ArgumentError, match=rf"max_new_tokens={positions}: .*1 prompt tokens .* {positions} positions"
    ):
        compiled.generate(PROMPT[:, :1], max_new_tokens=positions)
    with pytest.raises(ArgumentError, match="positions"):
        compiled.stream(
            PROMPT[:, :1], max_new_tokens=positions
        )  # at once, before the first item is asked for


def test_masked_logits_are_compared_too() -> None:
    one = torch.tensor([[1.0, -torch.inf, 3.0]])
    assert relative_error(one, one) == 0
    assert 0 < relative_error(one + torch.tensor([1e-6, 0, 0]), one) < 1e-5
    assert relative_error(torch.tensor([[1.0, 2.0, 3.0]]), one) == float("inf")
    assert relative_error(one, torch.tensor([[1.0, 2.0, 3.0]])) == float("inf")
    assert relative_error(torch.full((1, 3), torch.nan), torch.full((1, 3), torch.nan)) == float("inf")


@pytest.mark.parametrize("value", [1.5, "5", True])
def test_lengths_are_whole_numbers(value: object) -> None:
    model = shared_model("ouro", num_hidden_layers=1, total_ut_steps=3)
    compiled = sparse_compile(model, validate=False)
    with pytest.raises((ArgumentError, TypeError), match=r"max_new_tokens=|not supported between"):
        compiled.generate(PROMPT, max_new_tokens=value)
    assert compiled.engine is None


def test_implementation_is_what_runs_and_a_missing_one_is_refused() -> None:
    model = shared_model("ouro", num_hidden_layers=1, total_ut_steps=3)
    report = sparse_compile(model, validate=False).report().to_dict()
    assert (report["implementation"], report["implementation_option"]) == ("batched", "auto")
    report = sparse_compile(model, validate=False, implementation="reference").report().to_dict()
    double = shared_model("ouro", torch.float64, num_hidden_layers=1, total_ut_steps=3)
    assert (report["implementation"], report["implementation_option"]) == ("reference", "reference")
    with pytest.raises(ArgumentError, match="implementation='triton'") as caught:
        sparse_compile(double, validate=False, implementation="triton")
    assert "no kernels for torch.float64" in caught.value.limit
    assert caught.value.remedy == "pass implementation='auto'"


def test_capture_loop_beyond_the_model_is_an_argument_error() -> None:
    with pytest.raises(ArgumentError, match=r"capture_loop=9: must be below 3") as caught:
        sparse_compile(shared_model("ouro", num_hidden_layers=1, total_ut_steps=3), capture_loop=9)
    assert caught.value.argument == "capture_loop"
    assert caught.value.value == 9
    assert "between 0 and 2" in caught.value.remedy


@pytest.mark.parametrize(
    ("name", "options", "over"),
    [
        ("ouro", {"key_retention": "1/3", "dense_below": 9}, {"num_key_value_heads": 2, "head_dim": 12}),
        ("dory", {"key_retention": 0.07, "capture_loop": 0}, {"sliding_window": 5}),
        ("hrm-text", {"recapture_every": 2}, {"H_cycles": 2, "L_cycles": 3}),
    ],
)
def test_reported_reads_are_those_of_a_count_by_hand(
    name: str, options: dict[str, Any], over: dict[str, Any]
) -> None:
    import math
    from fractions import Fraction

    compiled = sparse_compile(tiny_model(name, **over), validate=False, **options)
    retention = Fraction(str(options.get("key_retention", 0.1)))
    for context in (1, 4, 8, 9, 70):
        dense = sparse = 0
        for site in compiled.program.sites:
            key = 2 * site.head_dim * 4  # bytes of one key and one value of one head in float32
            whole = site.kv_heads * key * (min(context, site.window) if site.window else context)
            kept = site.heads * key * max(1, math.ceil(context * retention))
            dense += whole
            small = site.kind == "consume" and context >= options.get("dense_below", 0)
            sparse += min(whole, kept) if small else whole
        (found,) = compiled.report((context,)).to_dict()["reads"]
        assert (found["dense_bytes"], found["sparse_bytes"]) == (dense, sparse)
