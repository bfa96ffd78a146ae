"""Models that tests compile again and again, each exported once: that takes seconds, all passes behind it a tenth."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
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


class Traces:
    """Stands in for `trace`: who compiles a model again begins with a copy of its graph, unless the model has changed,
    by the rules that compiled models check before each call.

    shared: models whose traces are kept for all modules of tests.
    """

    def __init__(self) -> None:
        self.shared: set[nn.Module] = set()
        self._trace = pipeline.trace
        self._kept: dict[nn.Module, tuple[ModelState, fx.GraphModule]] = {}

    def __call__(self, model: nn.Module) -> fx.GraphModule:
        if model not in self._kept or self._changed(model):
            traced = self._trace(model)
            self._kept[model] = ModelState(model), traced
        traced = self._kept[model][1]
        return lazy_module(traced, copy.deepcopy(traced.graph), "Rows")

    def _changed(self, model: nn.Module) -> bool:
        try:
            self._kept[model][0].check()
        except StaleModelError:
            assert model not in self.shared, "a test has changed a model that others use"
            return True
        return False

    def forget(self) -> None:
        """Drops all but those of shared models."""
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
