"""From a finished run to what is shipped: weights, configuration, tokenizer, model card."""

from __future__ import annotations

from pathlib import Path

from sparse_compile.models.presets import DEMO_FOLDER as PACKAGED


def export(run: Path, into: Path) -> str:
    raise NotImplementedError


__all__ = ["PACKAGED", "export"]
