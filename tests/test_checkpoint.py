"""The checkpoint check finds every kind of damage, names it, and is silent about a sound model."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_compile.models import (
    TINY_MODELS,
    CheckpointError,
    check_checkpoint,
    load_model,
    load_tokenizer,
    tiny_model,
    tiny_tokenizer,
)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model("ouro").save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Replaces tensors of a file by name; None deletes one."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


# Sound models


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_a_sound_model_passes_in_any_dtype(name: str, dtype: str | None) -> None:
    report = check_checkpoint(f"tiny:{name}", dtype=dtype)
    assert report.ok, str(report)
    assert report.source == f"tiny:{name}"
    assert report.compared >= 19
    assert report.dtype == (dtype or "float32")
    assert len(report.rotary) == (4 if name == "dory" else 2)
    assert report.unchecked_buffers == ()
    assert "identical to its files" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_two_loads_are_identical(saved: Path) -> None:
    first, second = load_model(saved).state_dict(), load_model(saved).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert check_checkpoint(saved).ok


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=32,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    report = check_checkpoint(tmp_path)
    assert report.ok, str(report)


def test_other_rope_types_are_checked_too(tmp_path: Path) -> None:
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10_000.0}
    tiny_model("ouro", rope_parameters=rope).save_pretrained(tmp_path)
    report = check_checkpoint(tmp_path)
    assert report.ok, str(report)
    assert "rope type 'linear'" in report.rotary[0].reason


def test_sharded_files(tmp_path: Path) -> None:
    tiny_model("ouro").save_pretrained(tmp_path, max_shard_size="40KB")
    assert not (tmp_path / "model.safetensors").exists()
    assert check_checkpoint(tmp_path).ok
    min(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match="lists files that are not there: model-0"):
        check_checkpoint(tiny_model("ouro"), tmp_path)


# Damage


def test_one_changed_bit_is_found_and_named(saved: Path) -> None:
    model = load_model(saved)
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(9.0))
    report = check_checkpoint(model)
    assert not report.ok
    (difference,) = report.differing
    assert difference.name == "model.layers.1.mlp.up_proj.weight"
    assert (difference.elements, difference.of) == (1, 64 * 32)
    assert 0 < difference.largest < 1e-6
    assert "differs: model.layers.1.mlp.up_proj.weight (1 of 2048 elements" in str(report)


def test_nan_equals_nan_and_minus_zero_differs_from_zero(saved: Path) -> None:
    rewrite(saved, {"model.norm.weight": torch.tensor([float("nan"), 0.0] * 16)})
    model = load_model(saved)
    assert check_checkpoint(model).ok
    model.model.norm.weight.data[1] = -0.0
    assert [d.name for d in check_checkpoint(model).differing] == ["model.norm.weight"]


def test_missing_tensors_and_those_drawn_anew_at_each_load(saved: Path) -> None:
    rewrite(saved, {"lm_head.weight": None, "model.norm.weight": None})
    report = check_checkpoint(saved)
    assert not report.ok
    assert report.missing == ("lm_head.weight", "model.norm.weight")
    assert report.reinitialised == ("lm_head.weight",)  # the norm is set to ones at each load
    assert "random at each load: lm_head.weight" in str(report)


def test_unexpected_and_mis_shaped_tensors(saved: Path) -> None:
    rewrite(saved, {"extra": torch.ones(2), "model.norm.weight": torch.ones(5)})
    report = check_checkpoint(saved)
    assert not report.ok
    assert report.unexpected == ("extra",)
    (shape,) = report.mismatched
    assert (shape.name, shape.file_shape, shape.model_shape) == ("model.norm.weight", (5,), (32,))


def test_a_re_initialised_model_is_found(saved: Path) -> None:
    """What a loader does wrong that initialises after it has loaded."""
    model = load_model(saved)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.reset_parameters()
    names = {difference.name for difference in check_checkpoint(model).differing}
    assert {"lm_head.weight", "model.layers.0.self_attn.q_proj.weight"} <= names
    assert "model.embed_tokens.weight" not in names


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_rounded_rotary_buffers_are_found(name: str, tmp_path: Path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    model = load_model(tmp_path)
    for module in model.modules():
        for key, buffer in list(module.named_buffers(recurse=False)):
            if key.endswith("inv_freq"):
                setattr(module, key, buffer.bfloat16())
    report = check_checkpoint(model)
    assert not report.ok
    bad = [check for check in report.rotary if not check.ok]
    assert bad
    assert all(check.dtype == "bfloat16" and "off by" in check.reason for check in bad)


@pytest.mark.parametrize("value", [float("nan"), 0.0])
def test_uninitialised_rotary_buffers_are_found(saved: Path, value: float) -> None:
    model = load_model(saved)
    model.model.rotary_emb.inv_freq.fill_(value)
    report = check_checkpoint(model)
    checks = {check.name: check.ok for check in report.rotary}
    assert checks == {"model.rotary_emb.inv_freq": False, "model.rotary_emb.original_inv_freq": True}
    assert "rotary buffer: model.rotary_emb.inv_freq: off by" in str(report)


def test_a_rotary_buffer_of_another_size_is_found(saved: Path) -> None:
    model = load_model(saved)
    model.model.rotary_emb.inv_freq = torch.ones(3)
    (bad,) = [check for check in check_checkpoint(model).rotary if not check.ok]
    assert "shape (3,), expected (4,)" in bad.reason


# What cannot be loaded or compared


def test_where_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="was not loaded from files"):
        check_checkpoint(tiny_model("ouro"))
    with pytest.raises(
        CheckpointError, match=r"no model\.safetensors and no model\.safetensors\.index\.json"
    ):
        check_checkpoint(tiny_model("ouro"), tmp_path)
    for path in (tmp_path / "nowhere", "./nowhere", "~/no/where"):
        with pytest.raises(FileNotFoundError, match="no model folder at"):
            check_checkpoint(path)


def test_a_local_path_makes_no_network_call(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_tokenizer().save_pretrained(saved)

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a network call")

    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    load_model(saved)
    assert load_tokenizer(saved)("a").input_ids == [100]
    load_model("tiny:ouro")
    assert check_checkpoint(str(saved)).ok


def test_what_transformers_cannot_load_names_its_version(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    with pytest.raises(CheckpointError, match=r"transformers \d+\.\d+.* cannot load .*no_such_model"):
        load_model(tmp_path)


@pytest.mark.parametrize("dtype", ["float31", "int8", torch.int32])
def test_bad_dtypes_are_refused(dtype: str | torch.dtype, saved: Path) -> None:
    for name in ("tiny:ouro", str(saved)):
        with pytest.raises(ValueError, match="must be 'auto' or a floating point dtype") as caught:
            load_model(name, dtype)
        assert not isinstance(caught.value, CheckpointError)
