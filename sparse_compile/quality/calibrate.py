"""From a text to a retention per layer: how much attention mass the kept keys have, at every retention of a grid.

What a capture keeps does not reach back to the capture itself: all loops up to it are dense, in this row and in the
keys of earlier ones. So layers can be looked at one by one, and one run for each retention of the grid says all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from sparse_compile.api import sparse_compile
from sparse_compile.calibration import Calibration, LayerCalibration
from sparse_compile.errors import ArgumentError
from sparse_compile.quality.forced import Forced, TeacherForcing
from sparse_compile.quality.measure import OPTIONS, capturing_layers, windows_of

GRID = (
    "0.01", "0.02", "0.03", "0.04", "0.05", "0.06", "0.08", "0.1", "0.12", "0.15", "0.2", "0.25", "0.3", "0.4",
    "0.5", "0.6", "0.7", "0.8", "0.9",
)  # fmt: skip


def calibrate(
    model: Any,
    text: Tensor,
    target_mass: float = 0.95,
    *,
    windows: int = 8,
    window: int = 2048,
    prompt: int = 512,
    grid: Sequence[str] = GRID,
    progress: Callable[[int, int], object] = lambda done, total: None,
    capture_loop: int = 1,
) -> Calibration:
    """The smallest retention of each layer, of `grid`, that keeps `target_mass` on a text, on average over rows, heads.

    text: token ids, of which `windows` parts of `window` tokens are taken; the first `prompt` tokens of each are a
    prompt, the others are decoded and measured. progress: told (done, total).

    Raises ArgumentError for a target outside (0, 1] or a model in which nothing captures, ValueError for a short text.
    """
    if not 0 < target_mass <= 1:
        limit = "must be a number greater than 0 and at most 1"
        raise ArgumentError("target_mass", target_mass, limit, "pass for example target_mass=0.95")
    ids = windows_of(text, windows, window)
    curves: dict[str, list[tuple[str, float]]] = {}
    for done, retention in enumerate(grid):
        layers, forced = _measure(model, ids, prompt, retention, capture_loop, validate=not done)
        if forced.mass is None:
            limit = "no loop captures with these options, so there is nothing to calibrate"
            raise ArgumentError("capture_loop", capture_loop, limit, "choose a lower capture_loop")
        means = forced.mass.double().mean((0, 1, 3)).tolist()
        for layer, mass in zip(layers, means, strict=True):
            curves.setdefault(layer, []).append((retention, round(mass, 6)))
        progress(done + 1, len(grid))
    return Calibration(
        model=type(model).__name__,
        capture_loop=capture_loop,
        target_mass=target_mass,
        tokens=windows * (window - prompt - 1),
        layers=tuple(
            LayerCalibration.choose(layer, tuple(curve), target_mass) for layer, curve in curves.items()
        ),
    )


def _measure(
    model: Any, ids: Tensor, prompt: int, retention: str, capture_loop: int, validate: bool
) -> tuple[list[str], Forced]:
    """The layers that capture, in the order of the masses, and what the text gave."""
    chosen = {"key_retention": retention, "capture_loop": capture_loop, "validate": validate}
    compiled = sparse_compile(model, **OPTIONS, **chosen)
    runner = TeacherForcing(compiled, ids.shape[1])
    forced = runner.run(ids, prompt)
    runner.close()
    return capturing_layers(compiled.program.sites), forced
