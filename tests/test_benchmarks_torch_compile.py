"""The correctness gate of `benchmarks/torch_compile.py` can fail."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.breakdown import Event, kernel_lines
from benchmarks.sparse_eager import logits_of
from benchmarks.torch_compile import Bench, wrong
from sparse_compile.kernels.retention import Retention

OPTIONS = Namespace(tiny=True, layers=2, rows=2, cache=48, retention="0.3", branch_scale=0.1)


@pytest.mark.parametrize(("kept", "passes"), [("0.3", True), ("0.25", False), ("0.5", False), (None, False)])
@pytest.mark.parametrize("held", [48, 20])
def test_the_gate_knows_which_keys_were_kept(
    kept: str | None, passes: bool, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    retention = None if kept is None else Retention.of(kept)

    def compiled(bench: Bench, variant: str, options: Namespace) -> Any:
        def step(**arguments: Any) -> SimpleNamespace:
            return SimpleNamespace(logits=logits_of(bench.model, bench.model.forward, arguments, retention))

        return step

    monkeypatch.setattr(Bench, "compiled", compiled)
    torch.manual_seed(0)
    errors = Bench("ours", OPTIONS).errors(held)
    assert 0 < errors["rounding"] < 1e-5
    assert bool(wrong(errors)) != passes
    assert wrong({"error": float("inf"), "rounding": 0.0})


def test_kernels_are_listed_per_step() -> None:
    """Two steps: the longest names first, and time in which two ran counts once."""
    long = "k" * 80
    events = [Event(long, 0, 10, 10), Event("b", 5, 8, 3), Event(long, 12, 20, 8), Event("b", 20, 25, 5)]
    first, last = kernel_lines(events, steps=2, most=1)
    assert first.split() == ["k" * 57 + "...", "1.0", "x", "9.0", "us"]
    assert last == "per step: 2.0 kernels, 13.0 us of kernels, 11.5 us with any running, 12.5 us in all"
    assert len(kernel_lines(events, steps=2, most=9)) == 3
    assert kernel_lines([], steps=2, most=9)[-1].startswith("per step: 0.0 kernels")
