"""Models that tests compile again and again, each exported once: that takes seconds, all passes behind it a tenth."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import PreTrainedModel

from sparse_compile.errors import StaleModelError
from sparse_compile.freshness import ModelState
from sparse_compile.models import loading, tiny_model
from sparse_compile.passes import pipeline
from sparse_compile.passes.graph import lazy_module


def shared_model(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any
) -> PreTrainedModel:
    """What `tiny_model` makes of these, once in a process, for tests that leave it as it is."""
    return _made(name, dtype, seed, tuple(sorted(fields.items())))


@functools.cache
def _made(name: str, dtype: torch.dtype, seed: int, fields: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    model = tiny_model(name, dtype, seed, **dict(fields))
    _TRACES.shared.add(model)
    return model


def fresh_model(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any
) -> PreTrainedModel:
    """What `tiny_model` makes of these, for a test that changes it. As long as nobody has, it is traced as the shared
    model of its kind is, whose graph is the same but for the weights.
    """
    model = tiny_model(name, dtype, seed, **fields)
    _TRACES.twins[model] = ModelState(model), shared_model(name, dtype, **fields)
    return model


def copied(traced: fx.GraphModule) -> fx.GraphModule:
    """The same graph with the same weights, for passes that change it."""
    return lazy_module(traced, copy.deepcopy(traced.graph), "Rows")


def with_weights_of(model: nn.Module, traced: fx.GraphModule) -> fx.GraphModule:
    names = {str(node.target) for node in traced.graph.nodes if node.op == "get_attr"}
    weights = {name: attrgetter(name)(traced if name.startswith("constants.") else model) for name in names}
    return lazy_module(weights, traced.graph, "Rows")


def is_unchanged(state: ModelState) -> bool:
    """By the rules that compiled models check before each call."""
    try:
        state.check()
    except StaleModelError:
        return False
    return True


class Traces:
    """Stands in for `trace`: who compiles a model again, as it was, begins with a copy of its graph.

    shared: models whose traces are kept for all modules of tests.
    twins: how models of one's own were made, and the shared ones of their kind.
    """

    def __init__(self) -> None:
        self.shared: set[nn.Module] = set()
        self.twins: dict[nn.Module, tuple[ModelState, nn.Module]] = {}
        self._trace = pipeline.trace
        self._kept: dict[nn.Module, tuple[ModelState, fx.GraphModule]] = {}

    def __call__(self, model: nn.Module) -> fx.GraphModule:
        if model in self.twins and is_unchanged(self.twins[model][0]):
            return with_weights_of(model, self(self.twins[model][1]))
        if model not in self._kept or not is_unchanged(self._kept[model][0]):
            assert model not in self.shared or model not in self._kept, "a test has changed a shared model"
            traced = self._trace(model)
            self._kept[model] = ModelState(model), traced
        return copied(self._kept[model][1])

    def forget(self) -> None:
        """Drops all but those of shared models, which must be as they were: who compiles them next could not tell
        which module of tests has changed them.
        """
        self.twins.clear()
        for model in self.shared & self._kept.keys():
            self._kept[model][0].check()
        self._kept = {model: kept for model, kept in self._kept.items() if model in self.shared}


_TRACES = Traces()


@contextmanager
def traced_once() -> Iterator[None]:
    """Within this, a model is exported when it is compiled for the first time, and `tiny:NAME` loads a shared one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "trace", _TRACES)
        if not torch.cuda.is_available():  # where loading may mean moving
            patch.setattr(loading, "tiny_model", shared_model)
        yield
    _TRACES.forget()
