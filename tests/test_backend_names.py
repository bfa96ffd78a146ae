"""What the backend calls the layers of a model, and what it finds out about them, however the model is reached."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attention_forms import Attend, example, sdpa
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


class OneForward(nn.Module):
    """Layers written out in one forward; `loops` times."""

    def __init__(self, layers: int, loops: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers)).double()
        self.loops = loops

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return sdpa(self.q[number](q), k, v, mask)

    def forward(self, q: Tensor, ks: list[Tensor], vs: list[Tensor], mask: Tensor) -> Tensor:
        for place, (k, v) in enumerate(zip(ks, vs, strict=True)):
            q = q + self.attend(place % len(self.q), q, k, v, mask)
        return q


class SharedCore(OneForward):
    """One module without weights attends for all layers."""

    def __init__(self, layers: int, loops: int) -> None:
        super().__init__(layers, loops)
        self.core = Attend(sdpa)

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return self.core(self.q[number](q), k, v, mask)


@torch.library.custom_op("sparse_compile_tests::packed_product", mutates_args=())
def packed_product(x: Tensor, packed: Tensor) -> Tensor:
    return x @ packed.to(x.dtype)


@packed_product.register_fake
def _(x: Tensor, packed: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[1])


class Packed(OneForward):
    """Weights are buffers of whole numbers, which an operator of its own reads."""

    def __init__(self, layers: int, loops: int) -> None:
        super().__init__(layers, loops)
        for number in range(layers):
            self.register_buffer(f"packed_{number}", torch.randint(-2, 3, (16, 16), dtype=torch.int8))

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return sdpa(packed_product(q * 1.0, getattr(self, f"packed_{number}")), k, v, mask)


class Difference(OneForward):
    """Two calls of each layer, with queries of one weight, whose results are subtracted."""

    def attend(self, number: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        one, other = self.q[number](q), -self.q[number](q)
        return sdpa(one, k, v, mask) - sdpa(other, k, v, mask)


def kinds_of(model: Any, loops: int, **options: Any) -> dict[str, list[str]]:
    settings = {"inductor": False, "key_retention": 0.3, **options}
    with torch.no_grad():
        torch.compile(model, backend="sparse_compile", options=settings)(*example(loops=loops))
    report = backend.last_report()
    assert report is not None
    found: dict[str, list[str]] = {}
    for site in report.sites:
        found.setdefault(site.layer, []).append(site.kind)
    return found


@pytest.mark.parametrize("kind", [OneForward, SharedCore, Packed])
def test_layers_that_one_module_attends_for_are_no_loops(kind: type[OneForward]) -> None:
    """Their queries come from different weights: keys that one layer chose mean nothing to the next."""
    flat = kinds_of(kind(4, 1), 4, on_unmatched="ignore")
    assert list(flat.values()) == [["dense"]] * 4
    torch._dynamo.reset()
    looped_ones = kinds_of(kind(2, 3), 6)
    assert list(looped_ones.values()) == [["dense", "capture", "consume"]] * 2


def test_calls_beside_each_other_are_no_loops() -> None:
    """The query of the second does not depend on what the first gave; in the next loop each finds its own."""
    found = kinds_of(Difference(1, 3), 3)
    assert list(found.values()) == [["dense", "capture", "consume"]] * 2


def test_a_function_without_modules_is_no_loop_without_weights() -> None:
    def function(q: Tensor, ks: list[Tensor], vs: list[Tensor], mask: Tensor) -> Tensor:
        for k, v in zip(ks, vs, strict=True):
            q = q + sdpa(q, k, v, mask)
        return q

    found = kinds_of(function, 4, on_unmatched="ignore")
    assert list(found) == ["function", "function#1", "function#2", "function#3"]
