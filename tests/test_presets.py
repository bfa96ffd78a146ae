"""Presets and tiny models: what later tests and the command line rely on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparse_compile.models import (
    PRESETS,
    TINY_MODELS,
    load_model,
    load_tokenizer,
    preset_config,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
)

NAMES = sorted(TINY_MODELS)


def prompt(length: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 259, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", NAMES)
def test_one_seed_is_one_model_and_the_callers_random_state_is_untouched(name: str) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = tiny_model(name), load_model(f"tiny:{name}"), tiny_model(name, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    ids = prompt(9)
    assert torch.equal(first(ids).logits, again(ids).logits)
    assert not torch.allclose(first(ids).logits, other(ids).logits)
    assert not first.training


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_seed_gives_the_same_weights_in_every_dtype(name: str, dtype: torch.dtype) -> None:
    wide, cast = tiny_model(name), load_model(f"tiny:{name}", dtype)
    assert cast.dtype == dtype
    for key, tensor in wide.state_dict().items():
        assert torch.equal(cast.state_dict()[key], tensor.to(dtype)), key


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_is_varied_and_not_cut_short(name: str) -> None:
    model = tiny_model(name)
    for length in (3, 7, 12, 40):
        tokens = model.generate(prompt(length), max_new_tokens=24, do_sample=False)[0, length:]
        assert tokens.numel() == 24
        assert tokens.unique().numel() >= 5, f"{name}: {tokens.tolist()}"


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_parameters_are_uneven(name: str) -> None:
    model = tiny_model(name)
    logits = model(prompt(40)).logits[0]
    best, second = logits.topk(2).values.unbind(-1)
    assert logits.std() > 0.5
    assert (best - second).median() > 0.05
    for key, parameter in model.named_parameters():
        assert parameter.numel() == 1 or parameter.std() > 1e-3, f"{key} is constant"


def test_shapes_of_the_tiny_models() -> None:
    ouro, dory, hrm = (tiny_config(name) for name in ("ouro", "dory", "hrm-text"))
    assert (ouro.num_hidden_layers, ouro.total_ut_steps, ouro.num_slots) == (2, 4, 8)
    assert dory.n_recurrent_loops == 3
    recurrent = dory.layer_types[dory.n_input_layers : dory.n_input_layers + dory.n_recurrent_layers]
    assert set(recurrent) == {"sliding_attention", "full_attention"}
    assert min(dory.n_input_layers, dory.n_output_layers) >= 1
    assert dory.num_attention_heads > dory.num_key_value_heads
    assert dory.sliding_window == 8
    assert (hrm.H_cycles, hrm.L_cycles, hrm.num_layers_per_stack, hrm.num_hidden_layers) == (3, 2, 2, 18)
    for config in (ouro, dory, hrm):
        assert config.vocab_size == len(tiny_tokenizer())
        assert config.max_position_embeddings == 512


def test_overrides_reach_the_configuration() -> None:
    assert tiny_model("ouro", total_ut_steps=7, vocab_size=64).lm_head.out_features == 64
    dory = tiny_model("dory", recurrent_kv_cache_mode="last_loop")
    assert dory.config.recurrent_kv_cache_mode == "last_loop"
    assert load_model("tiny:ouro", seed=3, num_key_value_heads=1).config.num_key_value_heads == 1
    eager = load_model("tiny:hrm-text", attn_implementation="eager")
    assert eager.config._attn_implementation == "eager"
    assert preset_config("ouro-1.4b", total_ut_steps=2).num_slots == 48


def test_published_presets() -> None:
    small, large = preset_config("ouro-1.4b"), preset_config("ouro-2.6b")
    assert (small.num_hidden_layers, large.num_hidden_layers) == (24, 48)
    for config in (small, large):
        assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (2048, 5632, 49152)
        assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (16, 16, 128)
        assert (config.total_ut_steps, config.early_exit_threshold, config.rms_norm_eps) == (4, 1.0, 1e-6)
        assert config.rope_parameters["rope_theta"] == 1_000_000
        assert config.max_position_embeddings == 65_536
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert set(PRESETS) == {"ouro-1.4b", "ouro-2.6b", "demo", "ouro-tiny"}


def test_unknown_names_say_what_is_known() -> None:
    with pytest.raises(
        ValueError, match=r"unknown tiny model 'ouros'; known: ouro, dory, hrm-text\. Did you"
    ):
        load_model("tiny:ouros")
    with pytest.raises(ValueError, match=r"unknown preset 'gpt'; known: ouro-1\.4b"):
        preset_config("gpt")


# Tokenizer


@pytest.mark.parametrize("text", ["Hello", "", "naïve 🙂", "two\nlines"])
def test_text_survives_the_byte_tokenizer(text: str) -> None:
    tokenizer = load_tokenizer("tiny:ouro")
    ids = tokenizer(text).input_ids
    assert ids == [byte + 3 for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_every_id_a_tiny_model_can_emit_is_decodable() -> None:
    tokenizer = tiny_tokenizer()
    for token in range(len(tokenizer)):
        assert isinstance(tokenizer.decode([token]), str)
    assert isinstance(tokenizer.decode(list(range(len(tokenizer)))), str)


def test_batches_are_padded_on_the_left_with_a_mask() -> None:
    tokenizer = tiny_tokenizer()
    batch = tokenizer(["ab", "wxyz"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[0, 0, 100, 101], [122, 123, 124, 125]]
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1]]
    assert tokenizer.pad_token_id == tiny_config("ouro").pad_token_id


def test_the_demo_model_without_its_weights_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sparse_compile.models.presets.DEMO_FOLDER", tmp_path)
    for load in (load_model, load_tokenizer):
        with pytest.raises(
            FileNotFoundError, match=r"weights of the model 'demo' are not in this .*train_demo"
        ):
            load("demo")
