"""A model that was changed after it was compiled is followed exactly, or refused; never answered from what it was."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared_models import fresh_model
from torch import nn
from torch.nn.modules import module as modules

from sparse_compile import SamplingParams, StaleModelError, sparse_compile
from sparse_compile.freshness import ModelState
from sparse_compile.models import tiny_model

pytestmark = pytest.mark.usefixtures("shared_traces")

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
    model = fresh_model("ouro")
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


def halve(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * -0.5


def keep(module: nn.Module, args: Any, kwargs: Any = None, output: Any = None) -> None:
    """A hook of any kind that does nothing."""


def patch_forward(model: Any) -> None:
    layer, own = model.model.layers[1], model.model.layers[1].forward
    layer.forward = lambda *args, **kwargs: own(*args, **kwargs) * -0.5


def rewrap(model: Any) -> None:
    """Another hook of the same name in the place of the first."""
    model.first.remove()
    model.model.layers[0].register_forward_hook(hook_named_alike())


def with_kwargs(model: Any) -> None:
    """The same hook, given more."""
    model.first.remove()
    model.model.layers[0].register_forward_hook(model.hook, with_kwargs=True)


def hook_named_alike() -> Callable[..., None]:
    def alike(*args: Any) -> None:
        pass

    return alike


class OtherMLP(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


LAYER = "model.layers.1"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda m: m.model.layers[1].register_forward_hook(halve),
            f"forward hooks of {LAYER} were none and are halve",
        ),
        (
            lambda m: m.register_forward_pre_hook(keep),
            "the forward pre-hooks of the model were none and are keep",
        ),
        (
            lambda m: m.model.layers[1].mlp.register_forward_hook(keep, with_kwargs=True),
            rf"hooks of {LAYER}\.mlp were",
        ),
        (
            lambda m: m.model.layers[1].register_forward_hook(keep, always_call=True),
            f"hooks of {LAYER} were none",
        ),
        (
            lambda m: m.first.remove(),
            r"hooks of model\.layers\.0 were .*alike, .*alike and are .*alike; compile",
        ),
        (rewrap, r"hooks of model\.layers\.0 were .*alike, .*alike and are .*alike, .*alike; compile"),
        (with_kwargs, r"hooks of model\.layers\.0 were .*alike, .*alike and are .*alike, .*alike; compile"),
        (
            patch_forward,
            rf"the forward of {LAYER} was \w+\.forward and is patch_forward\.<locals>\.<lambda>; compile",
        ),
        (
            lambda m: setattr(m.model.layers[1].mlp, "__class__", OtherMLP),
            r"mlp was OuroMLP\.forward and is OtherMLP",
        ),
    ],
)
def test_hooks_and_forwards_that_change_are_refused(change: Callable[[Any], Any], words: str) -> None:
    model: Any = tiny_model("ouro")
    model.hook = hook_named_alike()
    model.first = model.model.layers[0].register_forward_hook(model.hook)
    model.model.layers[0].register_forward_hook(hook_named_alike())
    state = ModelState(model)
    state.check()
    change(model)
    with pytest.raises(StaleModelError, match=words):
        state.check()


@pytest.mark.parametrize(
    "register", [modules.register_module_forward_hook, modules.register_module_forward_pre_hook]
)
def test_hooks_of_all_modules_are_refused_while_they_are_there(register: Callable[..., Any]) -> None:
    state = ModelState(tiny_model("ouro"))
    handle = register(keep)
    try:
        with pytest.raises(StaleModelError, match=r"of all modules were none and are keep; compile it again"):
            state.check()
    finally:
        handle.remove()
    state.check()


def test_a_forward_exchanged_in_the_class_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("ouro")
    state, kind = ModelState(model), type(model.model.layers[0].mlp)
    monkeypatch.setattr(kind, "forward", OtherMLP.forward)
    with pytest.raises(StaleModelError, match=r"mlp was OuroMLP\.forward and is OtherMLP\.forward"):
        state.check()


def test_a_hook_after_compiling_is_refused_and_its_removal_followed() -> None:
    model = fresh_model("ouro", num_hidden_layers=2, total_ut_steps=3)
    compiled = sparse_compile(model, key_retention=1)
    own = compiled.generate(PROMPT, max_new_tokens=4)
    handle = model.model.layers[1].register_forward_hook(halve)
    for call in (
        lambda: compiled.generate(PROMPT, max_new_tokens=4),
        lambda: compiled.stream(PROMPT, max_new_tokens=4),
        lambda: compiled.serve(1, 16),
        compiled.warmup,
        compiled.validate,
    ):
        with pytest.raises(
            StaleModelError, match=r"forward hooks of model\.layers\.1 were none and are halve"
        ):
            call()
    handle.remove()
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=4), own)


def test_hooks_while_compiling_are_in_the_program_and_named() -> None:
    """What they do to tensors is followed; that they do not run again is said, when compiling and in the report."""
    model, seen = tiny_model("ouro", num_hidden_layers=2, total_ut_steps=3), []
    plain = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    model.model.layers[0].register_forward_hook(halve)
    model.model.layers[1].register_forward_pre_hook(lambda *_: seen.append(1))
    patch_forward(model)
    own = model.generate(PROMPT, max_new_tokens=8, do_sample=False)
    with pytest.warns(
        UserWarning, match=r"halve among the forward hooks of model\.layers\.0; .*compiling only"
    ) as warned:
        compiled = sparse_compile(model, key_retention=1)
    assert [one.filename for one in warned] == [__file__]
    times = len(seen)
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=8), own)
    assert not torch.equal(own, plain)
    assert len(seen) == times > 0
    report = compiled.report()
    assert [words.rpartition(" ")[2] for words in report.to_dict()["hooks"]] == [
        "model.layers.0",
        "model.layers.1",
        "model.layers.1",
    ]
    assert report.hooks[2] == "patch_forward.<locals>.<lambda> as the forward of model.layers.1"


def test_a_check_is_short() -> None:
    """It is made once per call of generate: 24 layers in less than the time of a step."""
    model = tiny_model("ouro", num_hidden_layers=24)
    state = ModelState(model)
    seconds = min(timeit.repeat(state.check, number=1, repeat=5))
    assert seconds < 0.05


def test_new_values_in_the_same_tensors_are_followed() -> None:
    model = fresh_model("ouro")
    compiled = sparse_compile(model, key_retention=1)
    compiled.generate(PROMPT, max_new_tokens=4)
    model.load_state_dict(tiny_model("ouro", seed=7).state_dict())
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    own = model.generate(PROMPT, max_new_tokens=12, do_sample=False)
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=12), own)


@pytest.mark.parametrize("name", ["ouro", "dory"])
def test_use_of_the_model_is_no_change(name: str) -> None:
    """For hidden states transformers puts hooks into some models, for good."""
    model = tiny_model(name)
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
    model = fresh_model("ouro")
    adapt(model)
    own = model.eval().generate(PROMPT, max_new_tokens=12, do_sample=False)
    model.train()
    compiled = sparse_compile(model, key_retention=1)
    assert compiled.program.rolled
    assert torch.equal(compiled.generate(PROMPT, max_new_tokens=12), own)
    assert model.training
    assert model.model.layers[0].self_attn.q_proj.drop.training


# ---------------------------------------------------------------------- engines of one's own, cached pages


def tokens_of(engine: Any, prompt: list[int]) -> list[int]:
    engine.add_request(prompt, SamplingParams(6))
    tokens = []
    while engine.has_unfinished():
        tokens += [output.token for output in engine.step()]
    return tokens


@pytest.mark.parametrize(
    ("change", "words"),
    [(adapt, "q_proj was replaced"), (replace_head, "was replaced"), (swap_data, "is torch.float64")],
)
def test_an_engine_of_a_model_that_was_changed_takes_no_request(
    change: Callable[[Any], None], words: str
) -> None:
    model = fresh_model("ouro")
    engine = sparse_compile(model, validate=False).serve(2, 32)
    tokens_of(engine, [5, 77])
    change(model)
    with pytest.raises(StaleModelError, match=words):
        engine.add_request([5, 77], SamplingParams(6))
    assert not engine.has_unfinished()


def write_weights(model: Any) -> None:
    model.load_state_dict(tiny_model("ouro", seed=7, dtype=model.dtype).state_dict())


def take_a_step(model: Any) -> None:
    for weight in model.parameters():
        weight.grad = torch.ones_like(weight)
    torch.optim.SGD(model.parameters(), lr=0.02).step()


@pytest.mark.parametrize("change", [write_weights, take_a_step])
def test_cached_pages_do_not_outlive_the_weights_that_they_were_computed_with(
    change: Callable[[Any], None],
) -> None:
    model, prompt = fresh_model("ouro", dtype=torch.float64), list(range(5, 25))
    options = {"key_retention": 0.3, "validate": False, "page_size": 4, "progress": False}
    cached = sparse_compile(model, prefix_caching=True, **options)
    engine = cached.serve(1, 32)

    def both() -> list[list[int]]:
        out = cached.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        return [out[0, len(prompt) :].tolist(), tokens_of(engine, prompt)]

    before = both()
    assert both() == before
    assert engine.metrics().cached_tokens == 16
    change(model)
    wanted = tokens_of(sparse_compile(model, **options).serve(1, 32), prompt)
    assert wanted not in before
    assert both() == [wanted, wanted]
    assert engine.metrics().cached_tokens == 16
    with torch.no_grad():
        model.lm_head.weight.data.neg_()  # leaves no trace; its rows are not in the pages
    assert both() == both()
    assert engine.metrics().cached_tokens == 48
    engine.forget_prefixes()
    tokens_of(engine, prompt)
    assert engine.metrics().cached_tokens == 48


def test_weights_are_looked_at_quickly() -> None:
    state = ModelState(tiny_model("ouro"))
    seconds = min(timeit.repeat(state.weights, number=20, repeat=5)) / 20
    assert seconds < min(timeit.repeat(state.check, number=20, repeat=5)) / 20 / 3
