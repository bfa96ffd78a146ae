"""The correctness gate of `benchmarks/torch_compile.py` can fail."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

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
