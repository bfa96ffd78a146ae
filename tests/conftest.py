"""Shared by all tests: one thread per process, no network, gpu tests skipped where there is no CUDA device.

Where there is none, Triton kernels run in Triton's interpreter; the switch must be set before triton is imported.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_collection_finish() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton.language" in sys.modules:
        from interpreter import shorten

        shorten()


def pytest_configure(config: pytest.Config) -> None:
    """Takes from pytest-xdist what it does by itself: a module of one slow test would run last, on one core."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules with slow tests first, then those of many tests: small ones at the end keep all cores busy."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    count = Counter(item.path for item in items)
    items.sort(key=lambda item: (item.path not in slow, -count[item.path]))
    for item in items:
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module")
def shared_traces() -> Iterator[None]:
    """Models are exported once, however many tests compile them; see `shared_models`."""
    from shared_models import traced_once

    with traced_once():
        yield


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is left of what other tests compiled with torch.compile and reported, nor for those that follow."""
    import sparse_compile.backend as backend

    torch._dynamo.reset()
    backend.clear_reports()
    yield
    torch._dynamo.reset()
