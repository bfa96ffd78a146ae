"""Whole models on a CUDA device, where "auto" runs the Triton kernels."""

from __future__ import annotations

import pytest
import torch
from test_end_to_end import NEW, check_margins, pad, prompts

from sparse_compile import sparse_compile
from sparse_compile.models import tiny_model

pytestmark = pytest.mark.gpu
NAMES = ("ouro", "dory", "hrm-text")
# Sparse whatever the length, and without the compiler, which other tests run (tests/test_graphs.py).
SHORT = {"dense_below": 0, "inductor": False}


def on_gpu(model: torch.nn.Module) -> torch.nn.Module:
    return model.cuda()


def tokens(model: object, **options: object) -> torch.Tensor:
    inputs = {name: tensor.cuda() for name, tensor in pad(prompts()).items()}
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, **options)  # type: ignore[attr-defined]
    return out[:, inputs["input_ids"].shape[1] :].cpu()


@pytest.mark.parametrize("name", NAMES)
def test_dense_equals_transformers_and_the_cpu(name: str) -> None:
    want = check_margins(tiny_model(name), prompts())
    model = on_gpu(tiny_model(name))
    assert torch.equal(tokens(model), want)
    compiled = sparse_compile(model, key_retention=1.0, inductor=False)
    assert compiled.report().to_dict()["implementation"] == "triton"
    assert torch.equal(tokens(compiled), want)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_equals_batched_in_float64_up_to_float32(name: str) -> None:
    exact = sparse_compile(on_gpu(tiny_model(name, dtype=torch.float64)), key_retention=0.3, **SHORT)
    assert exact.report().to_dict()["implementation"] == "batched"
    want = tokens(exact)
    compiled = sparse_compile(on_gpu(tiny_model(name)), key_retention=0.3, **SHORT)
    agreement = float((tokens(compiled) == want).float().mean())
    # float32 selection can swap keys whose scores are within rounding of each other, after which tokens drift apart
    assert agreement > 0.9, f"{agreement:.2f} of the tokens agree"
    compiled.engine.check_integrity()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_validates(name: str, dtype: torch.dtype) -> None:
    compiled = sparse_compile(on_gpu(tiny_model(name, dtype=dtype)), key_retention=0.3, **SHORT)
    assert compiled.validate() < 0.3
    assert tokens(compiled).shape == (4, NEW)


def test_dense_below_mixes_modes() -> None:
    model = on_gpu(tiny_model("ouro"))
    dense = tokens(sparse_compile(model, enabled=False, inductor=False))
    sparse = tokens(sparse_compile(model, key_retention=0.3, **SHORT))
    mixed = tokens(sparse_compile(model, key_retention=0.3, dense_below=37, inductor=False))
    assert torch.equal(mixed[:3], dense[:3])
    assert torch.equal(mixed[3], sparse[3])
