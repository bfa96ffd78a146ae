"""Linear layers that read one input become one product; the user's weights keep names, values and bits."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from shared_models import fresh_model
from test_freshness import adapt
from test_passes import check_golden
from torch import nn
from toy import Toy, ToyAttention, toy_compile, toy_graph

from sparse_compile import StaleModelError, sparse_compile
from sparse_compile.compile import pass_options
from sparse_compile.config import SparseConfig
from sparse_compile.kernels.retention import Retention
from sparse_compile.models import tiny_model
from sparse_compile.models.loading import load_model
from sparse_compile.passes.base import Compilation, Options
from sparse_compile.passes.graph import is_call
from sparse_compile.passes.merge_linears import MergeLinears
from sparse_compile.passes.pipeline import build_program
from sparse_compile.passes.program import Program
from sparse_compile.passes.weights import join, lie_in_a_row, named_tensors

pytestmark = pytest.mark.usefixtures("shared_traces")

LINEAR = torch.ops.aten.linear.default
PROMPT = torch.tensor([[5, 77, 130, 9, 33, 41]])
MODELS = ("ouro", "dory", "hrm-text")


def merged_program(model: Any) -> Program:
    return build_program(model, Options(Retention.of(0.3), merge_linears=True))


@cache
def merged(name: str) -> tuple[Any, Program]:
    """A tiny model whose weights were joined, and its program; not to be changed."""
    model = fresh_model(name)
    return model, merged_program(model)


def storages(model: nn.Module) -> dict[int, int]:
    """Bytes of every block of memory that the model's parameters lie in."""
    found = [parameter.untyped_storage() for parameter in model.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


class SplitAttention(ToyAttention):
    """Three layers on one input; `bias` names those that have one."""

    def __init__(self, bias: str = "") -> None:
        super().__init__()
        del self.qkv
        for name in "qkv":
            setattr(self, name, nn.Linear(8, 8, bias=name in bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x[:, 0]
        parts = [getattr(self, name)(x).view(-1, 2, 4) for name in "qkv"]
        out = torch.ops.sparse_compile.site(*parts, scale=0.5, window=0, softcap=0.0)
        return out.reshape(-1, 1, 8)


class Split(Toy):
    def __init__(self, bias: str = "", loops: int = 3) -> None:
        super().__init__(loops=loops)
        self.layers = nn.ModuleList([SplitAttention(bias)])

    @property
    def attention(self) -> Any:
        return self.layers[0]


def merge(model: nn.Module, change: Callable[[Compilation], None] | None = None) -> Compilation:
    """The pass alone over a toy model."""
    compilation = Compilation(
        toy_graph(model), Options(Retention.of(0.3), merge_linears=True), tensors=named_tensors(model)
    )
    if change:
        change(compilation)
    MergeLinears().run(compilation)
    MergeLinears().ensure(compilation)
    return compilation


def products(compilation: Compilation) -> int:
    return sum(is_call(node, LINEAR) for node in compilation.graph.graph.nodes)


# --- the graphs


def test_golden_ouro() -> None:
    program = merged_program(tiny_model("ouro", num_hidden_layers=1, total_ut_steps=2))
    check_golden("ouro_merged_body", program.variants["dense"].stages[1].text())


def test_golden_dory() -> None:
    # Of one kind of attention: the model walks a set of kinds, whose order changes from process to process.
    program = merged_program(tiny_model("dory", layer_types=["full_attention"] * 4))
    check_golden("dory_merged_prologue", program.variants["dense"].stages[0].text())


@pytest.mark.parametrize(("name", "layers", "into"), [("ouro", 10, 4), ("dory", 24, 8), ("hrm-text", 24, 8)])
def test_real_models_merge_and_still_roll(name: str, layers: int, into: int) -> None:
    _, program = merged(name)
    assert program.rolled, program.roll_reason
    assert (sum(len(one.parts) for one in program.merged), len(program.merged)) == (layers, into)
    assert program.left_alone == ()
    record = next(record for record in program.passes if record.name == "merge_linears")
    assert record.counters == {"layers": layers, "into": into, "left_alone": 0}


def test_every_loop_reads_the_one_joined_weight() -> None:
    compilation = merge(Split())
    joined = [node for node in compilation.graph.graph.nodes if "merged" in str(node.target)]
    assert [node.target for node in joined] == ["layers.0.merged_q_k_v.weight"]
    assert len(joined[0].users) == compilation.merged[0].calls == 3
    assert products(compilation) == 3 + 1  # one per loop, and the head


def test_off_by_default_in_the_passes() -> None:
    compilation = toy_compile(Split())
    assert compilation.merged == compilation.left_alone == []


@pytest.mark.parametrize("bias", ["", "qkv"])
def test_values_and_biases(bias: str) -> None:
    model = Split(bias)
    ids, positions = torch.arange(5)[:, None], torch.arange(5)[:, None]
    before = toy_graph(model)
    part = [node for node in before.graph.nodes if is_call(node, LINEAR)][:3]
    compilation = merge(model)
    assert len(compilation.merged) == 1
    assert products(compilation) == 4
    slices = [n for n in compilation.graph.graph.nodes if is_call(n, torch.ops.aten.slice.Tensor)]
    slices = [node for node in slices if node.meta.get("pass") == "merge_linears"][:3]
    for graph, nodes in ((before, part), (compilation.graph, slices)):
        graph.graph.output_node().args = (tuple(nodes),)
        graph.graph.eliminate_dead_code()
        graph.recompile()
    for own, ours in zip(before(ids, positions), compilation.graph(ids, positions), strict=True):
        torch.testing.assert_close(ours, own, rtol=1e-6, atol=1e-6)  # the order of additions may differ


# --- what is left alone, and why


class Subclass(torch.Tensor):
    pass


def replace_tensor(compilation: Compilation, name: str, value: torch.Tensor) -> None:
    module, _, leaf = name.rpartition(".")
    setattr(compilation.graph.get_submodule(module), leaf, value)
    compilation.tensors[name] = value


def quantised(compilation: Compilation) -> None:
    weight = compilation.tensors["layers.0.k.weight"]
    replace_tensor(
        compilation, "layers.0.k.weight", nn.Parameter(weight.detach().as_subclass(Subclass).clone())
    )


def other_dtype(compilation: Compilation) -> None:
    compilation.tensors["layers.0.v.weight"].data = torch.randn(8, 8, dtype=torch.float64)


def other_device(compilation: Compilation) -> None:
    replace_tensor(compilation, "layers.0.k.weight", nn.Parameter(torch.empty(8, 8, device="meta")))


def transposed(compilation: Compilation) -> None:
    compilation.tensors["layers.0.q.weight"].data = torch.randn(8, 8).t()


def hooked(compilation: Compilation) -> None:
    compilation.tensors["layers.0.q.weight"].register_hook(lambda gradient: gradient)


def hooked_after(compilation: Compilation) -> None:
    weight = compilation.tensors["layers.0.v.weight"]
    weight.register_post_accumulate_grad_hook(lambda parameter: None)


def overlapping(compilation: Compilation) -> None:
    compilation.tensors["elsewhere"] = compilation.tensors["layers.0.k.weight"].detach()[1:2]


def strides(compilation: Compilation) -> None:
    node = next(node for node in compilation.graph.graph.nodes if is_call(node, LINEAR))
    with compilation.graph.graph.inserting_after(node):
        compilation.graph.graph.call_function(torch.ops.aten.as_strided.default, (node, [8], [1]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (quantised, "layers.0.k.weight is a Subclass, not a plain parameter"),
        (other_dtype, "they differ in dtype"),
        (other_device, "they differ in device"),
        (transposed, "layers.0.q.weight is not contiguous"),
        (hooked, "layers.0.q.weight has gradient hooks"),
        (hooked_after, "layers.0.v.weight has gradient hooks"),
        (overlapping, "layers.0.k.weight shares its memory with elsewhere"),
        (strides, "reads the strides"),
    ],
)
def test_left_alone_with_the_reason(change: Callable[[Compilation], None], reason: str) -> None:
    model = Split()
    compilation = merge(model, change)
    assert compilation.merged == []
    assert products(compilation) == 3 * 3 + 1
    assert [left.weights for left in compilation.left_alone] == [
        ("layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight")
    ]
    assert reason in compilation.left_alone[0].reason


class Tied(Split):
    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids, position_ids)
        return logits + (self.embed(input_ids) @ self.attention.k.weight).sum(-1, keepdim=True)


class TwoSets(Split):
    """k goes with q and v in the loops, and with the gate after them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for _ in range(3):
            x = x + self.attention(x)
        return self.head(self.attention.k(x) * self.gate(x))


class Repeated(Split):
    """The same layer reads the same input in every loop."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        start = x = self.embed(input_ids)
        for _ in range(3):
            x = x + self.attention.q(start) + ToyLike.attend(self.attention, x)
        return self.head(x)


class ToyLike:
    @staticmethod
    def attend(layer: Any, x: torch.Tensor) -> torch.Tensor:
        part = layer.k(x[:, 0]).view(-1, 2, 4)
        out = torch.ops.sparse_compile.site(part, part, part, scale=0.5, window=0, softcap=0.0)
        return out.reshape(-1, 1, 8)


class Narrow(Split):
    """Weights of 5 x 8 numbers: their slices would not be aligned."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 5, bias=False), nn.Linear(8, 5, bias=False)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input_ids, position_ids)
        x = self.embed(input_ids)
        return logits + (self.a(x) * self.b(x)).sum(-1, keepdim=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Split("q"), "some have a bias and some have none"),
        (Tied, "layers.0.k.weight is read elsewhere too"),
        (TwoSets, "layers.0.k.weight is read elsewhere too"),
        (Repeated, "called more than once on the same input"),
        (Narrow, "no multiples of 64 bytes"),
    ],
)
def test_models_that_are_left_alone(make: Callable[[], Split], reason: str) -> None:
    assert reason in " / ".join(left.reason for left in merge(make()).left_alone)


def test_a_computed_weight_is_named_and_the_others_merge() -> None:
    model = Split()
    nn.utils.parametrizations.weight_norm(model.attention.k)
    compilation = merge(model)
    assert [merged.parts for merged in compilation.merged] == [("layers.0.q.weight", "layers.0.v.weight")]
    assert [left.weights for left in compilation.left_alone] == [("layers.0.k",)]
    assert "computed" in compilation.left_alone[0].reason


def test_layers_of_an_adapter_stay_and_their_neighbours_merge() -> None:
    class Lora(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.lora_A = base, nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base_layer(x) + self.lora_A(x)

    model = Split()
    model.attention.q = Lora(model.attention.q)
    compilation = merge(model)
    assert [merged.parts for merged in compilation.merged] == [("layers.0.k.weight", "layers.0.v.weight")]
    assert "belongs to an adapter" in compilation.left_alone[0].reason


def test_no_memory_to_join_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: object) -> torch.Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("sparse_compile.passes.merge_linears.join", full)
    compilation = merge(Split())
    assert products(compilation) == 10
    assert "no memory" in compilation.left_alone[0].reason


class Block(Split):
    """All parameters but the last in one storage, as flattened models have them; q, k, v side by side or not."""

    def __init__(self, order: str, own: int = 0) -> None:
        super().__init__()
        names = {name: parameter for name, parameter in self.named_parameters() if "attention" not in name}
        ordered = [f"layers.0.{name}.weight" for name in order if name in "qkv"]
        ordered += [name for name in names if name not in ordered]
        flat = torch.cat([names[name].detach().flatten() for name in ordered])
        at = 0
        for name in ordered:
            parameter, size = names[name], names[name].numel()
            parameter.data = flat[at : at + size].view(parameter.shape)
            at += size
        self.extra = nn.Parameter(torch.zeros(own))


THREE = 3 * 8 * 8 * 4  # bytes of q, k, v


def test_memory_that_others_need_is_held_twice_and_reported() -> None:
    """A little beside the weights: the joined weight is made, and the flat block stays."""
    model = Block("vkq", own=20 * THREE)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    compilation = merge(model)
    assert [merged.held_twice for merged in compilation.merged] == [THREE]
    assert all(torch.equal(value, before[name]) for name, value in model.named_parameters())


def test_too_much_memory_held_twice_is_refused() -> None:
    compilation = merge(Block("vkq"))
    assert compilation.merged == []
    (left,) = compilation.left_alone
    assert "in one storage with other tensors" in left.reason
    assert f"{THREE:,} bytes would be held twice" in left.reason
    assert "(5% of the weights)" in left.reason


def test_neighbours_in_one_storage_are_joined_where_they_are() -> None:
    model = Block("qkv")
    places = storages(model)
    (merged,) = merge(model).merged
    assert merged.held_twice == 0
    assert storages(model) == places


# --- the user's model


@pytest.mark.parametrize("name", MODELS)
def test_the_model_keeps_names_values_bits_and_memory(name: str) -> None:
    (model, _), untouched = merged(name), tiny_model(name)
    assert torch.equal(model(input_ids=PROMPT).logits, untouched(input_ids=PROMPT).logits)
    assert sum(storages(model).values()) == sum(storages(untouched).values())
    state, own = model.state_dict(), untouched.state_dict()
    assert list(state) == list(own)
    assert all(torch.equal(state[key], own[key]) for key in own)
    assert {key: value.stride() for key, value in state.items()} == {k: v.stride() for k, v in own.items()}


def test_saving_loading_and_copying(tmp_path: Path) -> None:
    model = fresh_model("ouro")
    own = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merged_program(model)
    model.save_pretrained(tmp_path / "hub")
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    torch.save(model.state_dict(), tmp_path / "plain.pt")
    loaded = load_model(str(tmp_path / "hub"), device="cpu", dtype="float32")
    copies = (
        loaded.state_dict(),
        load_file(tmp_path / "plain.safetensors"),
        torch.load(tmp_path / "plain.pt"),
        copy.deepcopy(model).state_dict(),
    )
    for state in copies:
        assert set(state) == set(own)
        assert all(torch.equal(state[name], own[name]) for name in own)
    compiled = sparse_compile(loaded, key_retention=1, merge_linears=True)  # weights that lie in one file
    assert len(compiled.program.merged) == 4
    expected = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=8), expected)


def test_gradients_reach_the_moved_parameters() -> None:
    model, plain = fresh_model("ouro"), tiny_model("ouro")
    merged_program(model)
    for one in (model, plain):
        one(input_ids=PROMPT).logits.square().mean().backward()
    weights = [one.model.layers[0].self_attn.k_proj.weight for one in (model, plain)]
    assert torch.equal(weights[0].grad, weights[1].grad)


# --- tokens


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_unchanged(name: str) -> None:
    prompts = torch.randint(3, 272, (3, 12), generator=torch.Generator().manual_seed(1))
    outputs = [
        sparse_compile(fresh_model(name), key_retention=0.3, merge_linears=merge, validate=merge).generate(
            prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16
        )
        for merge in (False, True)
    ]
    assert torch.equal(*outputs)


def test_bfloat16_is_no_further_from_float64_than_the_model() -> None:
    model, exact = tiny_model("ouro", torch.bfloat16), tiny_model("ouro", torch.bfloat16).double()
    own = model(input_ids=PROMPT).logits.double()
    reference = exact(input_ids=PROMPT).logits
    compiled = sparse_compile(model, key_retention=1, merge_linears=True)
    out = compiled.generate(PROMPT, max_new_tokens=1, return_dict_in_generate=True, output_logits=True)
    error = (out.logits[0].double() - reference[:, -1]).norm()
    # Both round at the same places; a merged product adds in another order, which is worth a fifth at most.
    assert error <= 1.2 * (own[:, -1] - reference[:, -1]).norm()


# --- freshness


def compiled_ouro() -> tuple[Any, Any]:
    model = fresh_model("ouro")
    return model, sparse_compile(model, key_retention=1, merge_linears=True, validate=False)


def test_new_values_are_followed() -> None:
    model, compiled = compiled_ouro()
    compiled.generate(PROMPT, max_new_tokens=2)
    model.load_state_dict(tiny_model("ouro", seed=7).state_dict())
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    own = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=12), own)


def move_data(model: Any) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.data = weight.data.clone()


def replace_parameter(model: Any) -> None:
    layer = model.model.layers[0].self_attn.k_proj
    layer.weight = nn.Parameter(layer.weight.detach().clone())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (move_data, "model.layers.1.mlp.up_proj.weight was moved to other memory"),
        (replace_parameter, "model.layers.0.self_attn.k_proj.weight was replaced"),
        (adapt, "q_proj was replaced"),
    ],
)
def test_other_weights_are_refused(change: Callable[[Any], None], words: str) -> None:
    model, compiled = compiled_ouro()
    change(model)
    with pytest.raises(StaleModelError, match=words):
        compiled.generate(PROMPT, max_new_tokens=2)


def test_two_compilations_share_the_joined_weights() -> None:
    model, first = compiled_ouro()
    second = sparse_compile(model, key_retention=0.3, merge_linears=True)
    addresses = [
        {
            stage_buffer.data_ptr()
            for name, stage_buffer in one.program.traced.named_buffers()
            if "merged" in name
        }
        for one in (first, second)
    ]
    assert addresses[0] == addresses[1]
    own = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert torch.equal(first.generate(PROMPT, max_new_tokens=8), own)


def test_compiling_in_inference_mode_leaves_ordinary_parameters() -> None:
    model = fresh_model("ouro")
    with torch.inference_mode():
        sparse_compile(model, merge_linears=True)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.mul_(2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_cuda_merging_is_the_default_and_changes_no_bit_of_the_model(name: str) -> None:
    model = tiny_model(name, torch.bfloat16).cuda()
    prompt = PROMPT.cuda()
    logits = model(input_ids=prompt).logits
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    program = build_program(model, pass_options(SparseConfig(), model.device))
    assert program.merged
    assert torch.equal(model(input_ids=prompt).logits, logits)
    del program
    gc.collect()
    assert torch.cuda.memory_allocated() <= held + 2**20  # nothing is held twice


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_on_cuda_tokens_are_unchanged(name: str) -> None:
    prompts = torch.randint(3, 272, (3, 12), generator=torch.Generator().manual_seed(1)).cuda()
    outputs = [
        sparse_compile(
            tiny_model(name, torch.float64).cuda(), key_retention=0.3, merge_linears=merge
        ).generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=16)
        for merge in (False, True)
    ]
    assert torch.equal(*outputs)


# --- memory


@settings(max_examples=30, deadline=None)
@given(rows=st.lists(st.integers(1, 5), min_size=2, max_size=4), columns=st.integers(1, 4))
def test_join_moves_and_joins_again_in_place(rows: list[int], columns: int) -> None:
    weights = [nn.Parameter(torch.randn(count, columns)) for count in rows]
    values = [weight.detach().clone() for weight in weights]
    joined = join(weights)
    assert torch.equal(joined, torch.cat(values))
    assert all(torch.equal(weight, value) for weight, value in zip(weights, values, strict=True))
    assert lie_in_a_row(weights)
    assert join(weights).data_ptr() == joined.data_ptr()
    assert not lie_in_a_row(weights[::-1])
    joined.zero_()
    assert all(not weight.any() for weight in weights)
