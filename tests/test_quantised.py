"""Models with weights in int8 and fp8, as torchao quantises them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised import QUANTISERS, StandIn, stand_in
from rich.console import Console

from sparse_compile import sparse_compile
from sparse_compile.errors import StaleModelError
from sparse_compile.models import tiny_model
from sparse_compile.passes.weights import memory, parts
from sparse_compile.validation import forward_logits, relative_error

PROMPT = torch.tensor([[5, 77, 130, 9, 33, 201, 4]])
KINDS = pytest.mark.parametrize("kind", QUANTISERS)


def make(kind: str, dtype: torch.dtype = torch.float32, name: str = "ouro") -> Any:
    # Narrow weights: in bfloat16 the wide ones of the tiny model amplify rounding beyond what validation accepts.
    model = tiny_model(name, dtype, initializer_range=0.1)
    QUANTISERS[kind](model)
    return model


def own(model: Any, new: int = 6) -> torch.Tensor:
    return model.generate(PROMPT, max_new_tokens=new, do_sample=False)


@KINDS
def test_tokens_are_the_model_s_own(kind: str) -> None:
    model = make(kind)
    kinds = {name: type(weight) for name, weight in model.named_parameters()}
    compiled = sparse_compile(model, key_retention=1.0, merge_linears=True)
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=6), own(model))
    assert compiled.program.rolled
    assert {name: type(weight) for name, weight in model.named_parameters()} == kinds
    assert float(compiled.validate()) < 1e-5


@KINDS
def test_linears_are_left_alone_with_the_reason(kind: str) -> None:
    model = make(kind)
    report = sparse_compile(model, key_retention=0.5, merge_linears=True, validate=False).report()
    q = "model.layers.0.self_attn.q_proj.weight"
    kind_name = type(model.get_parameter(q)).__name__
    assert report.merged == ()
    assert ((q,), f"{q} is a {kind_name}, not a plain parameter") in report.left_alone
    beside = (
        "q_proj",
        "k_proj",
        "v_proj",
        "gate_proj",
        "up_proj",
    )  # those that share their input with another
    found = {name.split(".")[-2] for (name,), _ in report.left_alone}
    assert found == set(beside)
    assert len(report.left_alone) == 2 * len(beside)


@pytest.mark.parametrize("kind", ["torchao-int8", "torchao-fp8"])
def test_half_precision_is_validated_against_the_numbers_that_weights_stand_for(kind: str) -> None:
    """torchao's fp8 weights cannot be cast to float32 as a model's float32 reference needs."""
    model = make(kind, torch.bfloat16)
    compiled = sparse_compile(model, key_retention=1.0)
    assert 0 < float(compiled.validate()) < 0.1


def test_the_float32_reference_of_quantised_weights() -> None:
    model, tokens = make("stand-in", torch.bfloat16), torch.tensor([9, 8, 7])
    plain = make("stand-in", torch.bfloat16)
    for module in plain.modules():
        if isinstance(getattr(module, "weight", None), StandIn):
            module.weight = torch.nn.Parameter(module.weight.dequantize())
    wanted = forward_logits(plain.float(), PROMPT, tokens)
    assert relative_error(forward_logits(model, PROMPT, tokens, torch.float32), wanted) < 1e-6


def test_the_program_reads_the_weights_own_memory() -> None:
    """What is written into a quantised weight is followed; another one in its place is refused."""
    model = make("stand-in")
    compiled = sparse_compile(model, key_retention=1.0)
    before = compiled.generate(PROMPT, max_new_tokens=6)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.scale.mul_(-3)
    assert not torch.equal(own(model), before)
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=6), own(model))
    weight = model.model.layers[0].self_attn.v_proj.weight
    weight.scale = weight.scale.clone()
    with pytest.raises(StaleModelError, match=r"v_proj.weight was moved to other memory"):
        compiled.generate(PROMPT, max_new_tokens=2)


def test_products_of_few_rows_leave_them_alone() -> None:
    model = make("stand-in", torch.bfloat16)
    options = {"merge_linears": True, "inductor": True, "skinny_products": True}
    report = sparse_compile(model, key_retention=1.0, validate=False, **options).report()
    assert report.skinny == 0
    assert len(report.not_skinny) == 2 * 7 + 1  # of each layer, and the head
    assert {reason for _, reason in report.not_skinny} == {"its weight is computed by the forward"}


def test_the_report_says_what_is_quantised_and_whether_it_was_measured() -> None:
    compiled = sparse_compile(make("stand-in"), key_retention=0.5, validate=False)
    report, layers = compiled.report(), 2 * 7 + 2  # of each layer, the head and the exit gate
    held = memory(weight for weight in compiled.model.parameters() if isinstance(weight, StandIn))
    assert report.quantised == {"StandIn": {"weights": layers, "bytes": held, "measured": False}}
    assert report.to_dict()["quantised"] == report.quantised
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.render())
    assert f"quantised weights: {layers} of kind StandIn" in (text := console.export_text())
    assert "steps with them are not measured" in text
    assert sparse_compile(tiny_model("ouro"), key_retention=0.5, validate=False).report().quantised == {}


def test_one_plain_layer_among_quantised_ones() -> None:
    """The plain one keeps its product for a few rows; nothing is merged with it."""
    model = tiny_model("ouro", torch.float32, initializer_range=0.1)
    plain = [layer.self_attn.q_proj.weight for layer in model.model.layers]
    stand_in(model)
    for layer, weight in zip(model.model.layers, plain, strict=True):
        layer.self_attn.q_proj.weight = weight
    compiled = sparse_compile(model, key_retention=1.0, merge_linears=True)
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=6), own(model))
    assert compiled.program.merged == ()
    assert any("k_proj" in left.weights[0] for left in compiled.program.left_alone)


@pytest.mark.gpu
@KINDS
def test_on_a_gpu_with_all_that_is_on_there(kind: str) -> None:
    """Compiled pieces, merged and few-row products where weights are plain, CUDA graphs; float32 has no near ties."""
    model = tiny_model("ouro", initializer_range=0.1).cuda()
    QUANTISERS[kind](model)
    compiled, prompt = sparse_compile(model, key_retention=1.0), PROMPT.cuda()
    wanted = model.generate(prompt, max_new_tokens=6, do_sample=False)
    assert torch.equal(compiled.generate(prompt, max_new_tokens=6), wanted)
    assert compiled.program.merged == ()


def test_memory_is_what_weights_hold() -> None:
    weight = StandIn.quantise(torch.randn(8, 16))
    assert [part.dtype for part in parts(weight)] == [torch.int8, torch.float32]
    assert memory([weight, weight]) == 8 * 16 + 8 * 4
    assert weight.nbytes == 8 * 16 * 4
    sparse = torch.eye(3, dtype=torch.float64)
    assert memory([sparse.to_sparse(), sparse.to_sparse_csr()]) == 2 * 3 * 8


def test_a_model_loaded_with_a_quantisation_config(tmp_path: Path) -> None:
    """As users load them: from_pretrained quantises."""
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    from transformers import AutoModelForCausalLM, TorchAoConfig

    tiny_model("dory", initializer_range=0.5).save_pretrained(tmp_path)
    asked = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=asked)
    assert type(model.model.layers[0].self_attn.q_proj.weight).__name__ == "Int8Tensor"
    compiled = sparse_compile(model, key_retention=1.0, capture_loop=0)
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=6), own(model))
