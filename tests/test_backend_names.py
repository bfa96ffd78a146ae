"""What the backend calls the layers of a model, and what it finds out about them, however the model is reached."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from looped_models import LoopedConfig, RotaryInside
from torch import Tensor, nn
from transformers import DynamicCache

import sparse_compile.backend as backend

pytestmark = pytest.mark.usefixtures("fresh_compiler")

MODELS: list[Any] = []
"""A global variable from which a compiled function takes a model."""


@pytest.fixture(autouse=True)
def _no_models() -> Iterator[None]:
    yield
    MODELS.clear()


def looped(kind: type[RotaryInside] = RotaryInside) -> RotaryInside:
    torch.manual_seed(0)
    return kind(LoopedConfig(num_hidden_layers=1)).double().eval()


def step(model: Any, token: Tensor, cache: Any) -> Tensor:
    return model(token, cache=cache, use_cache=True).logits


def decode(models: list[Any], function: Callable[..., Any], **options: Any) -> Any:
    """One compiled step after a prompt of 9 tokens: `function(token, one cache per model)`."""
    ids = torch.randint(3, 60, (1, 9), generator=torch.Generator().manual_seed(1))
    caches = [DynamicCache() for _ in models]
    settings = {"inductor": False, "key_retention": 0.3, **options}
    with torch.no_grad():
        for model, cache in zip(models, caches, strict=True):
            model(ids, cache=cache, use_cache=True)
        compiled = torch.compile(function, backend="sparse_compile", options=settings)
        return compiled(torch.tensor([[5]]), *caches)


def from_closure(model: Any) -> Callable[..., Any]:
    return lambda token, cache: step(model, token, cache)


def from_global(model: Any) -> Callable[..., Any]:
    MODELS.append(model)
    return lambda token, cache: step(MODELS[0], token, cache)


def from_dict(model: Any) -> Callable[..., Any]:
    held = {"model": model}
    return lambda token, cache: step(held["model"], token, cache)


def from_partial(model: Any) -> Callable[..., Any]:
    return functools.partial(step, model)


@pytest.mark.parametrize("hold", [from_closure, from_global, from_dict, from_partial])
def test_layers_and_windows_are_found_however_a_model_is_held(hold: Callable[..., Any]) -> None:
    """Names are those of the model itself, by which calibrations know layers too; the window is the module's."""
    model = looped()
    model.layers[0].sliding_window = 64
    decode([model], hold(model), on_unmatched="ignore")
    report = backend.last_report()
    assert report is not None
    assert [site.name for site in report.sites] == [f"layers.0@{loop}" for loop in range(4)]
    assert {site.window for site in report.sites} == {64}
    assert {site.reason for site in report.sites} == {"sliding window of 64 tokens"}


def test_two_models_in_one_function_are_told_apart() -> None:
    one, other = looped(), looped()
    other.load_state_dict({name: -value for name, value in one.state_dict().items()})

    def both(token: Tensor, cache: Any, second: Any) -> tuple[Tensor, Tensor]:
        return step(one, token, cache), step(other, token, second)

    results = decode([one, other], both)
    report = backend.last_report()
    assert report is not None
    assert {site.layer for site in report.sites} == {"L['one'].layers.0", "L['other'].layers.0"}
    assert report.counts == {"dense": 2, "capture": 2, "consume": 4}
    for model, result in zip((one, other), results, strict=True):
        torch._dynamo.reset()
        assert torch.equal(decode([model], from_closure(model)), result)


class OneBlockInManyPlaces(RotaryInside):
    """The loop as a list that holds one block several times, so that each call of it has a path of its own."""

    def __init__(self, config: LoopedConfig) -> None:
        super().__init__(config)
        self.blocks = nn.ModuleList([self.layers[0]] * config.loops)

    def loop(self, x: Tensor, **arguments: Any) -> Tensor:
        for slot, block in enumerate(self.blocks):
            x = x + block(self.norm(x), slot=slot, **arguments)
        return self.head(self.norm(x))


def test_a_block_that_stands_in_many_places_is_one_layer() -> None:
    model, plain = looped(OneBlockInManyPlaces), looped()
    got = decode([model], from_closure(model))
    report = backend.last_report()
    assert report is not None
    assert report.counts == {"dense": 1, "capture": 1, "consume": 2}
    torch._dynamo.reset()
    assert torch.equal(decode([plain], from_closure(plain)), got)
