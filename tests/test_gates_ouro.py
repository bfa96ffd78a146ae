"""Gates that cross loops and layers, in sparse decoding of a tiny Ouro: tokens and logits are those without fusing."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sparse_compile import CompiledModel, sparse_compile
from sparse_compile.models import tiny_model
from sparse_compile.models.ouro.layers import (
    ALL_ATTENTION_FUNCTIONS,
    OuroAttention,
    apply_rotary,
    eager_attention_forward,
)

Kept = dict[str, Tensor]
Form = Callable[[Kept, int, bool, Tensor, Tensor], Tensor]
"""(what forms keep, the layer, whether this is the first loop, what attention returns, the gate) -> the product"""
PROMPT = torch.arange(5, 25)[None]


def first_loop(kept: Kept, layer: int, first: bool, out: Tensor, gate: Tensor) -> Tensor:
    if first:
        kept[f"{layer}"] = gate
    return out * torch.sigmoid(kept[f"{layer}"])


def previous_loop(kept: Kept, layer: int, first: bool, out: Tensor, gate: Tensor) -> Tensor:
    before = gate if first else kept[f"{layer}"]
    kept[f"{layer}"] = gate
    return out * torch.sigmoid(before)


def shared_by_layers(kept: Kept, layer: int, first: bool, out: Tensor, gate: Tensor) -> Tensor:
    if layer == 0:
        kept["gate"] = gate
    return out * torch.sigmoid(kept["gate"])


def product_as_gate(kept: Kept, layer: int, first: bool, out: Tensor, gate: Tensor) -> Tensor:
    product = out * torch.sigmoid(kept["product"] if layer else gate)
    kept["product"] = product
    return product


def gated_ouro(form: Form) -> Any:
    torch.manual_seed(0)
    model = tiny_model("ouro", dtype=torch.float64)
    kept: Kept = {}
    for layer in model.modules():
        if isinstance(layer, OuroAttention):
            width = layer.q_proj.in_features, layer.o_proj.in_features
            layer.gate_proj = nn.Linear(*width, bias=False, dtype=torch.float64)
            layer.forward = types.MethodType(gated_forward(form, kept), layer)
    return model.eval()


def gated_forward(form: Form, kept: Kept) -> Callable[..., Any]:
    def forward(
        self: Any,
        x: Tensor,
        position_embeddings: Any,
        attention_mask: Any = None,
        cache: Any = None,
        slot_offset: int = 0,
        **settings: Any,
    ) -> tuple[Tensor, None]:
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (one.view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2) for one in projected)
        gate = self.gate_proj(x)
        q, k = apply_rotary(q, k, *position_embeddings)
        if cache is not None:
            k, v = cache.update(k, v, slot_offset + self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out = attend(self, q, k, v, attention_mask, dropout=0.0, scaling=self.scaling, **settings)[0]
        out = out.reshape(*x.shape[:-1], -1)
        return self.o_proj(form(kept, self.layer_idx, slot_offset == 0, out, gate)), None

    return forward


def compiled(form: Form, fuse: bool) -> CompiledModel:
    return sparse_compile(gated_ouro(form), key_retention=0.3, fuse_gates=fuse, validate=fuse, progress=False)


@pytest.mark.parametrize("form", [first_loop, previous_loop, shared_by_layers, product_as_gate])
def test_gates_from_other_loops_and_layers(form: Form) -> None:
    fused, apart = compiled(form, True), compiled(form, False)
    assert (fused.report().gated, apart.report().gated) == (8, 0)
    assert fused.report().gates_left_alone == ()
    assert fused.program.rolled == apart.program.rolled == (form is not previous_loop)
    assert fused.program.counts()["consume"] > 0
    ours, theirs = (
        one.generate(PROMPT, max_new_tokens=4, output_logits=True, return_dict_in_generate=True)
        for one in (fused, apart)
    )
    assert torch.equal(ours.sequences, theirs.sequences)
    for mine, other in zip(ours.logits, theirs.logits, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)
