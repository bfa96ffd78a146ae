"""Tiny models that the tests of a process share, each exported once: an export takes seconds, all passes behind it a
tenth.
"""

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

from sparse_compile.freshness import ModelState
from sparse_compile.models import tiny_model
from sparse_compile.passes import pipeline
from sparse_compile.passes.graph import lazy_module


def shared_model(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """What `tiny_model` makes of these, for tests that leave it as it is."""
    return _made(name, dtype, tuple(sorted(fields.items())))


@functools.cache
def _made(name: str, dtype: torch.dtype, fields: tuple[tuple[str, Any], ...]) -> PreTrainedModel:
    model = tiny_model(name, dtype=dtype, **dict(fields))
    _TRACES.models.add(model)
    return model


class SharedTraces:
    """Stands in for `trace`. Who compiles a shared model again begins with a copy of its graph; any other model is
    traced as ever.

    models: those that are shared.
    """

    def __init__(self) -> None:
        self.models: set[nn.Module] = set()
        self._trace = pipeline.trace
        self._kept: dict[nn.Module, tuple[ModelState, fx.GraphModule]] = {}

    def __call__(self, model: nn.Module) -> fx.GraphModule:
        if model not in self.models:
            return self._trace(model)
        if model not in self._kept:
            traced = self._trace(model)
            self._kept[model] = ModelState(model), traced
        state, traced = self._kept[model]
        state.check()  # what compiled models check before a call: no test has changed it since
        return lazy_module(traced, copy.deepcopy(traced.graph), "Rows")


_TRACES = SharedTraces()


@contextmanager
def traced_once() -> Iterator[None]:
    """Within this, shared models are exported when they are compiled for the first time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "trace", _TRACES)
        yield
