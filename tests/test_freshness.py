"""A model that was changed after it was compiled is followed exactly, or refused; never answered from what it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sparse_compile import StaleModelError, sparse_compile
from sparse_compile.freshness import ModelState
from sparse_compile.models import tiny_model

PROMPT = torch.tensor([[5, 77, 130, 9]])


class Adapter(nn.Module):
    """A low-rank correction around a linear layer, as adapters are added."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down = base, nn.Linear(base.in_features, 2, bias=False)
        self.up, self.drop = nn.Linear(2, base.out_features, bias=False), nn.Dropout(0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(self.drop(x)))


def adapt(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)


def replace_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))


def assign(model: Any) -> None:
    model.load_state_dict(tiny_model("ouro", seed=7).state_dict(), assign=True)


def swap_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.double()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (adapt, "model.layers.0.self_attn.q_proj was replaced"),
        (replace_head, "lm_head.weight was replaced"),
        (assign, "was replaced"),
        (swap_data, "model.layers.1.mlp.up_proj.weight was torch.float32 and is torch.float64"),
        (lambda model: model.to(torch.float64), "was torch.float32 and is torch.float64"),
        (lambda model: model.to("meta"), "is meta"),
        (lambda model: model.resize_token_embeddings(280), "model.embed_tokens.weight was"),
        (lambda model: setattr(model.config, "total_ut_steps", 2), "config.total_ut_steps was 4 and is 2"),
        (lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.GELU()), "act_fn was replaced"),
        (lambda model: model.register_buffer("more", torch.zeros(1)), "more was added"),
    ],
)
def test_a_changed_model_is_refused(change: Callable[[Any], None], words: str) -> None:
    model = tiny_model("ouro")
    compiled = sparse_compile(model, validate=False)
    change(model)
    for call in (
        lambda: compiled.generate(PROMPT, max_new_tokens=2),
        lambda: compiled.stream(PROMPT, max_new_tokens=2),
        compiled.validate,
    ):
        with pytest.raises(StaleModelError, match=words) as caught:
            call()
        assert "compile it again" in str(caught.value)


def test_new_values_in_the_same_tensors_are_followed() -> None:
    model = tiny_model("ouro")
    compiled = sparse_compile(model, key_retention=1)
    compiled.generate(PROMPT, max_new_tokens=4)
    model.load_state_dict(tiny_model("ouro", seed=7).state_dict())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    own = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=12), own)


def test_use_of_the_model_is_no_change() -> None:
    model = tiny_model("ouro")
    state = ModelState(model)
    model(input_ids=PROMPT, output_hidden_states=True, use_cache=True)
    model.generate(PROMPT, max_new_tokens=2, do_sample=False)
    model.train()
    model.requires_grad_(False)
    model.config.pad_token_id, model.config.use_cache = 3, False
    model.set_attn_implementation("eager")
    model.to("cpu", torch.float32)
    state.check()


def test_adapters_dropout_and_training_mode_are_compiled() -> None:
    model = tiny_model("ouro")
    adapt(model)
    own = model.eval().generate(PROMPT, max_new_tokens=12, do_sample=False)
    model.train()
    compiled = sparse_compile(model, key_retention=1)
    assert compiled.program.rolled
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=12), own)
    assert model.training
    assert model.model.layers[0].self_attn.q_proj.drop.training
