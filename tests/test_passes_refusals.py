"""What the passes refuse, each with one sentence that names the module at fault."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import (
    DoryConfig,
    DoryForCausalLM,
    Inkling2LoopForCausalLM,
    Inkling2LoopTextConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from sparse_compile.kernels.retention import Retention
from sparse_compile.models import tiny_model
from sparse_compile.passes.base import Options
from sparse_compile.passes.errors import OptionError, UnsupportedModel
from sparse_compile.passes.pipeline import build_program
from sparse_compile.passes.probe import read_mask_function, read_mask_tensor

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
OPTIONS = Options(Retention.of(0.3))


def refusal(model: nn.Module, options: Options = OPTIONS) -> UnsupportedModel:
    with pytest.raises(UnsupportedModel) as caught:
        build_program(model, options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_plain_llama_is_not_looped() -> None:
    error = refusal(LlamaForCausalLM(LlamaConfig(**SMALL, num_hidden_layers=2)))
    assert "not a looped model" in error.reason


def test_short_convolution_is_named() -> None:
    config = Lfm2Config(
        **SMALL, num_hidden_layers=3, num_key_value_heads=2, layer_types=["conv", "full_attention", "conv"]
    )
    error = refusal(Lfm2ForCausalLM(config))
    assert error.module == "model.layers.0.conv"
    assert "mixes tokens outside attention" in error.reason


def test_linear_attention_is_named() -> None:
    config = Qwen3NextConfig(
        **SMALL,
        num_hidden_layers=2,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    assert refusal(Qwen3NextForCausalLM(config)).module == "model.layers.0.linear_attn"


def test_inkling_short_convolutions_are_named() -> None:
    config = Inkling2LoopTextConfig(
        vocab_size=64,
        unpadded_vocab_size=64,
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=8,
        d_rel=4,
        rel_extent=16,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_layers_per_attn_res_block=2,
        loop_layer_index_start=2,
        loop_layer_index_end=4,
        loop_gate_rank=4,
        eos_token_id=None,
        max_position_embeddings=128,
    )
    error = refusal(Inkling2LoopForCausalLM(config))
    assert error.module == "model.layers.0.self_attn.k_proj.sconv"


def test_dory_last_loop() -> None:
    config = DoryConfig(
        **SMALL,
        num_hidden_layers=3,
        num_key_value_heads=2,
        head_dim=8,
        n_input_layers=1,
        n_output_layers=1,
        recurrent_kv_cache_mode="last_loop",
    )
    assert "per_loop" in refusal(DoryForCausalLM(config)).reason


class _RandomState(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


def test_random_state_is_named() -> None:
    model = tiny_model("ouro")
    model.model.norm = nn.Sequential(model.model.norm, _RandomState())
    error = refusal(model)
    assert error.module == "model.norm.1"
    assert "random" in error.reason


class _Shift(nn.Module):
    """Adds the token before, with a weight of zero: invisible in the numbers, still a dependence."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.0 * torch.roll(x, 1, dims=1)


def test_mixing_with_zero_weight_is_seen() -> None:
    model = tiny_model("ouro")
    model.model.layers[1].mlp = nn.Sequential(model.model.layers[1].mlp, _Shift())
    assert refusal(model).module == "model.layers.1.mlp.1"


def test_bidirectional_attention() -> None:
    model = tiny_model("ouro")
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    model.model._update_causal_mask = None
    from sparse_compile.passes import probe

    recorder = probe._Recorder(model, 11)
    q = torch.zeros(1, 4, 11, 8)
    with pytest.raises(UnsupportedModel, match="both directions"):
        recorder.attention(model.model.layers[0].self_attn, q, q, q, None)


def test_cross_attention() -> None:
    model = tiny_model("ouro")
    from sparse_compile.passes import probe

    recorder = probe._Recorder(model, 11)
    with pytest.raises(UnsupportedModel, match="cross attention"):
        recorder.attention(
            model.model.layers[0].self_attn,
            torch.zeros(1, 4, 11, 8),
            torch.zeros(1, 4, 7, 8),
            torch.zeros(1, 4, 7, 8),
        )


def test_attention_argument_that_ops_do_not_know() -> None:
    from sparse_compile.passes.trace import _check_call

    q = torch.zeros(1, 4, 1, 8)
    with pytest.raises(UnsupportedModel, match="position_bias"):
        _check_call("a.b", q, q, q, {"position_bias": q})
    with pytest.raises(UnsupportedModel, match="no whole ratio"):
        _check_call("a.b", q, q[:, :3], q[:, :3], {})
    with pytest.raises(UnsupportedModel, match="values of 4"):
        _check_call("a.b", q, q, q[..., :4], {})


def test_not_a_transformers_model() -> None:
    assert "PreTrainedModel" in refusal(nn.Linear(2, 2)).reason


def test_capture_loop_beyond_the_model() -> None:
    with pytest.raises(OptionError, match=r"capture_loop=9 must be below 4.*between 0 and 3"):
        build_program(tiny_model("ouro"), Options(Retention.of(0.3), capture_loop=9))


def test_masks_are_read_by_meaning() -> None:
    from transformers.masking_utils import (
        bidirectional_mask_function,
        causal_mask_function,
        chunked_causal_mask_function,
        sliding_window_causal_mask_function,
    )

    assert read_mask_function(causal_mask_function) == 0
    assert read_mask_function(sliding_window_causal_mask_function(1024)) == 1024
    assert read_mask_function(sliding_window_causal_mask_function(7)) == 7
    assert read_mask_function(bidirectional_mask_function) is None
    assert read_mask_function(chunked_causal_mask_function(8192, torch.zeros(1, dtype=torch.long))) is None
    causal = torch.ones(11, 11, dtype=torch.bool).tril()
    assert read_mask_tensor(causal) == 0
    assert read_mask_tensor(torch.zeros(1, 1, 11, 11).masked_fill(~causal, float("-inf"))) == 0
    assert read_mask_tensor(causal & ~causal.tril(-3)) == 3
    assert read_mask_tensor(~causal) is None
