"""Ouro against its formula, and against itself: caches, padding, saving, attention implementations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from sparse_compile.models import (
    CheckpointError,
    OuroConfig,
    OuroForCausalLM,
    OuroModel,
    exit_distribution,
    exit_loop,
    load_model,
    load_ouro,
    preset_config,
    register,
    tiny_config,
    tiny_model,
)
from sparse_compile.models.ouro import configuration_ouro

NEW = 24
Change = Callable[[dict[str, Tensor]], object]


@pytest.fixture(scope="module")
def model() -> OuroForCausalLM:
    return tiny_model("ouro")


def prompt(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 259, (1, length), generator=torch.Generator().manual_seed(seed))


def greedy_without_cache(model: OuroForCausalLM, ids: Tensor, new: int) -> Tensor:
    for _ in range(new):
        logits = model(ids, use_cache=False).logits[:, -1]
        ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return ids


# The formula, sharing no code with the model


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def closed_formula(config: OuroConfig) -> Tensor:
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    return 1.0 / config.rope_parameters["rope_theta"] ** exponents


def rotate(x: Tensor, frequencies: Tensor) -> Tensor:
    """x [T, H, D]: each pair (i, i + D/2) is a complex number, turned by position * frequency_i."""
    angles = torch.arange(x.shape[0], dtype=torch.float32)[:, None] * frequencies  # [T, D/2]
    turn = torch.complex(angles.cos().double(), angles.sin().double())[:, None]
    first, second = x.chunk(2, dim=-1)
    turned = torch.complex(first.contiguous(), second.contiguous()) * turn
    return torch.cat((turned.real, turned.imag), dim=-1)


def attend(x: Tensor, w: dict[str, Tensor], config: OuroConfig) -> Tensor:
    """Causal attention of one sequence [T, E], one row and one head at a time."""
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    length = x.shape[0]
    q = rotate((x @ w["self_attn.q_proj.weight"].T).view(length, heads, size), closed_formula(config))
    k = rotate((x @ w["self_attn.k_proj.weight"].T).view(length, kv_heads, size), closed_formula(config))
    v = (x @ w["self_attn.v_proj.weight"].T).view(length, kv_heads, size)
    out = torch.empty_like(q)
    for t in range(length):
        for head in range(heads):
            kv = head * kv_heads // heads
            p = torch.softmax(k[: t + 1, kv] @ q[t, head] / size**0.5, dim=0)
            out[t, head] = p @ v[: t + 1, kv]
    return out.view(length, heads * size) @ w["self_attn.o_proj.weight"].T


def formula(weights: dict[str, Tensor], config: OuroConfig, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [T, vocabulary], gates [T, loops]) of one sequence [T]."""
    eps = config.rms_norm_eps
    h = weights["model.embed_tokens.weight"][ids]
    gates = []
    for _ in range(config.total_ut_steps):
        for layer in range(config.num_hidden_layers):
            start = f"model.layers.{layer}."
            w = {name.removeprefix(start): t for name, t in weights.items() if name.startswith(start)}
            attended = attend(rms_norm(h, w["input_layernorm.weight"], eps), w, config)
            h = h + rms_norm(attended, w["input_layernorm_2.weight"], eps)
            x = rms_norm(h, w["post_attention_layernorm.weight"], eps)
            gate = x @ w["mlp.gate_proj.weight"].T
            up = x @ w["mlp.up_proj.weight"].T
            fed = (gate * torch.sigmoid(gate) * up) @ w["mlp.down_proj.weight"].T
            h = h + rms_norm(fed, w["post_attention_layernorm_2.weight"], eps)
        h = rms_norm(h, weights["model.norm.weight"], eps)
        gates.append(h @ weights["model.early_exit_gate.weight"][0] + weights["model.early_exit_gate.bias"])
    return h @ weights["lm_head.weight"].T, torch.stack(gates, dim=-1)


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_equals_the_formula_in_float64(kv_heads: int, attention: str) -> None:
    model = tiny_model("ouro", torch.float64, num_key_value_heads=kv_heads, attn_implementation=attention)
    ids = prompt(9)
    expected, gates = formula(model.state_dict(), model.config, ids[0])
    output = model(ids, output_gates=True)
    torch.testing.assert_close(output.logits[0], expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(output.gate_logits[0], gates, rtol=0, atol=1e-10)


def test_parameter_names_are_the_published_ones(model: OuroForCausalLM) -> None:
    layer = [f"self_attn.{name}_proj" for name in "qkvo"]
    layer += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    layer += ["input_layernorm", "input_layernorm_2"]
    layer += ["post_attention_layernorm", "post_attention_layernorm_2"]
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    expected |= {"model.early_exit_gate.weight", "model.early_exit_gate.bias"}
    expected |= {f"model.layers.{n}.{name}.weight" for n in range(2) for name in layer}
    assert set(model.state_dict()) == expected
    assert model.lm_head.weight is not model.model.embed_tokens.weight


@pytest.mark.parametrize(("preset", "billions"), [("ouro-1.4b", 1.43), ("ouro-2.6b", 2.67)])
def test_published_sizes(preset: str, billions: float) -> None:
    with torch.device("meta"):
        model = OuroForCausalLM(preset_config(preset))
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(billions * 1e9, rel=0.01)
    config = model.config
    bytes_per_token = config.num_slots * 2 * config.num_key_value_heads * config.head_dim * 2
    assert bytes_per_token == {"ouro-1.4b": 786_432, "ouro-2.6b": 1_572_864}[preset]


# Caches, padding, attention implementations


@pytest.mark.parametrize("length", [1, 3, 12])
def test_cached_generation_equals_a_forward_per_token(model: OuroForCausalLM, length: int) -> None:
    ids = prompt(length)
    expected = greedy_without_cache(model, ids, NEW)
    assert torch.equal(model.generate(ids, max_new_tokens=NEW, do_sample=False), expected)
    static = model.generate(ids, max_new_tokens=NEW, do_sample=False, cache_implementation="static")
    assert torch.equal(static, expected)


def test_one_cache_slot_per_loop_and_layer(model: OuroForCausalLM) -> None:
    ids = prompt(5)
    caches = [DynamicCache(config=model.config), DynamicCache(), StaticCache(model.config, max_cache_len=16)]
    with torch.no_grad():
        outputs = [model(ids, cache=cache) for cache in caches]
    for cache, output in zip(caches, outputs, strict=True):
        assert len(cache.layers) == model.config.num_slots == 8
        assert output.cache is cache
        torch.testing.assert_close(output.logits, outputs[0].logits)
    keys = {layer.keys.numpy().tobytes() for layer in caches[0].layers}
    assert len(keys) == 8, "two slots hold the same keys"


def test_slot_is_loop_times_layers_plus_layer(model: OuroForCausalLM) -> None:
    """A model with fewer loops writes the same keys into the same slots, as far as it runs."""
    short = OuroForCausalLM(tiny_config("ouro", total_ut_steps=2)).eval()
    short.load_state_dict(model.state_dict())
    full, part = model(prompt(6)).cache, short(prompt(6)).cache
    assert len(part.layers) == 4
    for a, b in zip(full.layers, part.layers, strict=False):
        assert torch.equal(a.keys, b.keys)


def test_a_cache_of_another_model_is_refused(model: OuroForCausalLM) -> None:
    cache = tiny_model("ouro", total_ut_steps=2)(prompt(4)).cache
    with pytest.raises(ValueError, match=r"4 slots and 4 tokens.*needs 8 slots"):
        model(prompt(1), cache=cache)


def test_left_padded_batch_equals_solo(model: OuroForCausalLM) -> None:
    prompts = [prompt(length, seed=length) for length in (3, 7, 12, 40)]
    batch = torch.zeros((4, 40), dtype=torch.long)
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(prompts):
        batch[row, -ids.shape[1] :] = ids
        mask[row, -ids.shape[1] :] = 1
    together = model.generate(batch, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    for row, ids in enumerate(prompts):
        alone = model.generate(ids, max_new_tokens=NEW, do_sample=False)
        assert torch.equal(together[row, 40:], alone[0, ids.shape[1] :])


def test_eager_equals_sdpa() -> None:
    eager, sdpa = (tiny_model("ouro", attn_implementation=name) for name in ("eager", "sdpa"))
    ids = prompt(11)
    torch.testing.assert_close(eager(ids).logits, sdpa(ids).logits, rtol=1e-4, atol=1e-4)
    assert len(eager(ids, output_attentions=True).attentions) == eager.config.num_slots


def test_a_registered_attention_sees_every_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def recording(module: torch.nn.Module, *args: object, **kwargs: object) -> object:
        seen.append(module.layer_idx)
        return sdpa_attention_forward(module, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "test_recording", recording)
    model = tiny_model("ouro")
    model.set_attn_implementation("test_recording")
    logits = model(prompt(5), use_cache=False).logits
    assert seen == [0, 1] * 4
    assert logits.isfinite().all()


def test_hidden_states_of_every_loop_on_request(model: OuroForCausalLM) -> None:
    output = model(prompt(4), output_hidden_states=True)
    assert len(output.hidden_states) == model.config.num_slots + 1
    assert model(prompt(4)).gate_logits is None


def test_exactly_one_input(model: OuroForCausalLM) -> None:
    with pytest.raises(ValueError, match="exactly one of input_ids and inputs_embeds"):
        model()
    embeds = model.model.embed_tokens(prompt(4))
    torch.testing.assert_close(model(inputs_embeds=embeds).logits, model(prompt(4)).logits)


# Gates


def test_exit_distribution_follows_the_hazards(model: OuroForCausalLM) -> None:
    gates = model(prompt(6), output_gates=True).gate_logits
    chance, hazard = exit_distribution(gates), torch.sigmoid(gates)
    torch.testing.assert_close(chance.sum(-1), torch.ones_like(chance[..., 0]))
    torch.testing.assert_close(chance[..., 0], hazard[..., 0])
    third = hazard[..., 2] * (1 - hazard[..., 0]) * (1 - hazard[..., 1])
    torch.testing.assert_close(chance[..., 2], third)
    assert exit_distribution(gates[..., :1]).eq(1).all()


def test_exit_loop_at_the_threshold() -> None:
    gates = torch.tensor([[0.0, 0.0, 0.0, 0.0], [40.0, 0.0, 0.0, 0.0], [-40.0, -40.0, -40.0, 5.0]])
    assert exit_loop(gates, 0.5).tolist() == [0, 0, 3]  # summed: 0.5, 0.75, 0.875, 1
    assert exit_loop(gates, 0.7).tolist() == [1, 0, 3]
    assert exit_loop(gates, 1.0).tolist() == [3, 3, 3]  # never early, saturated gate or not
    with pytest.raises(ValueError, match="above 0 and at most 1, got 0"):
        exit_loop(gates, 0)


@pytest.mark.parametrize("threshold", [0.5, 0.0, 2.0])
def test_early_exit_is_refused_and_never_ignored(threshold: float) -> None:
    with pytest.raises(NotImplementedError, match=rf"early_exit_threshold={threshold}.*only 1\.0"):
        tiny_model("ouro", early_exit_threshold=threshold)
    model = tiny_model("ouro")
    model.config.early_exit_threshold = threshold
    with pytest.raises(NotImplementedError, match="early_exit_threshold"):
        model(prompt(2))


# Configuration

PUBLISHED = {
    "architectures": ["OuroForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_ouro.OuroConfig", "AutoModelForCausalLM": "m.OuroForCausalLM"},
    "bos_token_id": 0,
    "early_exit_threshold": 1.0,
    "eos_token_id": 0,
    "head_dim": 8,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.02,
    "intermediate_size": 64,
    "layer_types": ["full_attention"] * 2,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "model_type": "ouro",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "total_ut_steps": 4,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 272,
}


@pytest.fixture
def published(tmp_path: Path, model: OuroForCausalLM) -> Path:
    """A folder like the published ones: config.json names remote code and all token ids are 0."""
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    (tmp_path / "generation_config.json").write_text(json.dumps(ids))
    tensors = {name: tensor.to(torch.bfloat16).clone() for name, tensor in model.state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path


def test_published_format_loads_without_remote_code(published: Path) -> None:
    model = load_ouro(published)
    assert type(model) is OuroForCausalLM
    assert model.dtype == torch.bfloat16
    assert model.config.rope_parameters == {"rope_theta": 1_000_000.0, "rope_type": "default"}
    for found in (model.config, model.generation_config):
        assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 0)


def test_loops_can_be_overridden_at_load(published: Path) -> None:
    model = load_ouro(published, "float32", total_ut_steps=2)
    assert model.config.num_slots == 4
    assert len(model(prompt(3)).cache.layers) == 4


def test_wrong_token_ids_are_corrected_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    monkeypatch.setattr(
        configuration_ouro.logger, "warning", lambda text, *args: messages.append(text % args)
    )
    config = OuroConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert len(messages) == 1
    assert "using bos 1, eos 2, pad 0" in messages[0]
    own = OuroConfig(bos_token_id=7, eos_token_id=[0, 9], pad_token_id=0)
    assert (own.bos_token_id, own.eos_token_id, own.pad_token_id) == (7, [0, 9], 0)
    assert len(messages) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"total_ut_steps": 0}, "total_ut_steps must be at least 1, got 0"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\) must be a multiple"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "full attention only"),
        ({"use_sliding_window": True}, "full attention only"),
    ],
)
def test_bad_configurations_are_refused(fields: dict, message: str) -> None:
    with pytest.raises(Exception, match=message):
        tiny_config("ouro", **fields)


def test_registered_with_the_auto_classes() -> None:
    register()
    register()
    assert type(AutoConfig.for_model("ouro", hidden_size=32, num_attention_heads=4)) is OuroConfig
    assert type(AutoModelForCausalLM.from_config(tiny_config("ouro"))) is OuroForCausalLM


# Saving, loading, dtypes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_save_and_load_through_the_meta_device(tmp_path: Path, dtype: torch.dtype) -> None:
    model = tiny_model("ouro", dtype)
    model.save_pretrained(tmp_path)
    ids = prompt(10)
    for loaded in (AutoModelForCausalLM.from_pretrained(tmp_path), load_model(tmp_path, dtype)):
        rotary = loaded.model.rotary_emb
        for buffer in (rotary.inv_freq, rotary.original_inv_freq):
            assert torch.equal(buffer, closed_formula(loaded.config))
        logits = loaded(ids).logits
        assert logits.isfinite().all()
        assert torch.equal(logits, model(ids).logits)


def test_rotary_frequencies_survive_casts_and_moves() -> None:
    model = tiny_model("ouro", head_dim=16)
    expected = closed_formula(model.config)
    for cast in (model.bfloat16, model.half, model.double, model.float):
        assert torch.equal(cast().model.rotary_emb.inv_freq, expected)
    assert model.bfloat16().model.rotary_emb.inv_freq.dtype == torch.float32
    with torch.device("meta"):
        empty = OuroModel(model.config)
    assert empty.rotary_emb.inv_freq.is_meta
    assert torch.equal(empty.to_empty(device="cpu").rotary_emb.inv_freq, expected)


def damage(folder: Path, change: Change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"missing from the files \(1\): model\.norm\.weight"),
        (lambda t: t.update(extra=torch.ones(2)), r"not part of the model \(1\): extra"),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(5, 32)}),
            r"of another shape \(1\): lm_head\.weight: file \(5, 32\), model \(272, 32\)",
        ),
    ],
)
def test_loading_is_strict(published: Path, change: Change, message: str) -> None:
    damage(published, change)
    with pytest.raises(CheckpointError, match=message):
        load_ouro(published)


def test_all_problems_are_listed_at_once(published: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["strange"] = tensors.pop("model.early_exit_gate.bias")
        tensors["model.norm.weight"] = torch.ones(3)

    damage(published, change)
    with pytest.raises(CheckpointError) as caught:
        load_model(published)
    for name in ("strange", "model.early_exit_gate.bias", "model.norm.weight: file (3,), model (32,)"):
        assert name in str(caught.value)


def test_load_ouro_refuses_another_model(tmp_path: Path) -> None:
    tiny_model("dory").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="is a DoryForCausalLM, not an Ouro model"):
        load_ouro(tmp_path)
