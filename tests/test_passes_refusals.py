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

from sparse_compile import sparse_compile
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


def test_one_layer_with_two_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("ouro")
    run_layers = type(model.model).run_layers

    def windowed(self: nn.Module, hidden: torch.Tensor, loop: int, **kwargs: object) -> torch.Tensor:
        window = {"sliding_window": 1000} if loop == 1 else {}  # wider than any prompt that is compared
        return run_layers(self, hidden, loop, **kwargs, **window)

    monkeypatch.setattr(type(model.model), "run_layers", windowed)
    error = refusal(model)
    assert error.module == "model.layers.0.self_attn"
    assert "one window in all its loops" in error.reason


def test_a_window_that_may_hide_in_a_mask_of_the_models_own(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_compile.models.ouro import modeling_ouro

    def own_mask(inputs_embeds: torch.Tensor, **_: object) -> torch.Tensor:
        n = inputs_embeds.shape[1]
        return torch.ones(1, 1, n, n, dtype=torch.bool).tril()

    monkeypatch.setattr(modeling_ouro, "create_causal_mask", own_mask)
    model = tiny_model("ouro")
    build_program(model, OPTIONS)
    model.config.sliding_window = 1000
    assert "sliding_window=1000 may be in it" in refusal(model).reason


def test_weights_that_are_not_there() -> None:
    model = tiny_model("ouro")
    model.model.layers[1].to("meta")
    assert "meta device" in refusal(model).reason


def test_dtypes() -> None:
    assert "float8_e4m3fn" in refusal(tiny_model("ouro").to(torch.float8_e4m3fn)).reason
    model = tiny_model("ouro")
    model.model.layers[1].to(torch.bfloat16)
    assert "dtype" in refusal(model).reason


def test_attention_in_another_dtype_than_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_compile.models.ouro import layers

    rotary = layers.apply_rotary
    monkeypatch.setattr(layers, "apply_rotary", lambda *args: tuple(x.double() for x in rotary(*args)))
    monkeypatch.setattr(layers.OuroAttention, "forward", _attend_in_double)
    assert "one KV pool serves one dtype" in refusal(tiny_model("ouro")).reason


def _attend_in_double(
    self: nn.Module, hidden_states: torch.Tensor, **kwargs: object
) -> tuple[torch.Tensor, None]:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    shape = (*hidden_states.shape[:-1], -1, self.head_dim)
    q, k, v = (
        project(hidden_states).view(shape).transpose(1, 2).double()
        for project in (self.q_proj, self.k_proj, self.v_proj)
    )
    attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
    out, _ = attend(self, q, k, v, kwargs["attention_mask"], scaling=self.scaling)
    return self.o_proj(out.to(hidden_states.dtype).reshape(*hidden_states.shape[:-1], -1)), None


def test_a_model_without_logits() -> None:
    assert "no language-model head" in refusal(tiny_model("ouro").model).reason


def test_damaged_weights_are_named_as_such() -> None:
    model = tiny_model("ouro")
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    error = refusal(model)
    assert error.module == "model.layers.1.mlp.up_proj"
    assert "NaN in its weight" in error.reason


def test_a_model_that_cannot_be_run_on_a_few_tokens() -> None:
    model = tiny_model("ouro")
    model.lm_head = nn.Linear(7, 5)
    assert "trial run of OuroForCausalLM" in refusal(model).reason


class _Embedding(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.inner(ids)


def test_a_wrapped_embedding_is_compiled() -> None:
    model = tiny_model("ouro")
    model.model.embed_tokens = _Embedding(model.model.embed_tokens)
    assert build_program(model, OPTIONS).rolled


def test_positions_of_the_whole_batch_in_a_rotary_embedding() -> None:
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [9.0, 3.0, 7.0, 5.0],
        "original_max_position_embeddings": 30,
    }
    error = refusal(tiny_model("ouro", rope_parameters=longrope))
    assert error.module == "model.rotary_emb"
    assert "neighbours" in error.reason
    assert (
        "torch.export"
        in refusal(
            tiny_model("ouro", rope_parameters={**longrope, "rope_type": "dynamic", "factor": 2.0})
        ).reason
    )


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_rotary_embeddings_of_fixed_frequencies_are_compiled(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10_000.0, "factor": 2.0, "original_max_position_embeddings": 256}
    if kind == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert build_program(tiny_model("ouro", rope_parameters=rope), OPTIONS).rolled


def test_a_model_under_torch_compile_is_named_with_the_remedy() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"OptimizedModule is a model under torch.compile; pass .* _orig_mod"
    ):
        sparse_compile(torch.compile(tiny_model("ouro"), backend="eager"))
