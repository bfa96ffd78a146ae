"""From a text to a retention per layer: how much attention mass the kept keys have, at every retention of a grid.

What a capture keeps does not reach back to the capture itself: all loops up to it are dense, in this row and in the
keys of earlier ones. So layers can be looked at one by one, and one run for each retention of the grid says all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparse_compile.api import sparse_compile
from sparse_compile.calibration import Calibration, LayerCalibration
from sparse_compile.errors import ArgumentError
from sparse_compile.kernels.retention import Retention
from sparse_compile.quality.forced import Forced, Part, TeacherForcing
from sparse_compile.quality.measure import OPTIONS, capturing_layers, check_lengths, check_window, windows_of

if TYPE_CHECKING:
    from sparse_compile.passes.program import Site

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
    keep_first: int = 0,
    keep_last: int = 0,
) -> Calibration:
    """The smallest retention of each layer, of `grid`, that keeps `target_mass` on a text, on average over rows, heads.

    text: token ids, of which `windows` parts of `window` tokens are taken; the first `prompt` tokens of each are a
    prompt, the others are decoded and measured. progress: told (done, total).

    Raises ArgumentError for a target outside (0, 1] or a model in which nothing captures, ValueError for a short text.
    """
    check_settings(target_mass, window)
    check_lengths(model, window)
    ids = windows_of(text, windows, window)
    chosen = {"capture_loop": capture_loop, "keep_first": keep_first, "keep_last": keep_last}
    compiled = sparse_compile(model, **OPTIONS, key_retention=grid[-1], **chosen)
    layers = capturing_layers(compiled.program.sites)
    if not layers:
        limit = "no loop captures, so there is nothing to calibrate"
        raise ArgumentError("capture_loop", capture_loop, limit, "choose a lower capture_loop")
    runner = TeacherForcing(compiled, window)
    parts = [Part(prompt, retention=Retention.of(one, first=keep_first, last=keep_last)) for one in grid]
    state = {"done": 0}

    def done(texts: int) -> None:
        state["done"] += texts
        progress(state["done"], windows * len(grid))

    points = [_means(forced) for forced in runner.run(ids, parts, done)]  # [grid][layer]
    runner.close()
    curves = [
        tuple(zip(grid, (round(one, 6) for one in masses), strict=True))
        for masses in zip(*points, strict=True)
    ]
    return Calibration(
        model=type(model).__name__,
        capture_loop=capture_loop,
        keep_first=keep_first,
        keep_last=keep_last,
        target_mass=target_mass,
        tokens=windows * (window - prompt - 1),
        layers=_with_dense(compiled.program.sites, dict(zip(layers, curves, strict=True)), target_mass),
    )


def check_settings(target_mass: float, window: int) -> None:
    """Raises ArgumentError for a target outside (0, 1], and for windows in which nothing would be decoded."""
    if not 0 < target_mass <= 1:
        limit = "must be a number greater than 0 and at most 1"
        raise ArgumentError("target_mass", target_mass, limit, "pass for example target_mass=0.95")
    check_window(window)


def _means(forced: Forced) -> list[float]:
    """Mean mass of each layer."""
    assert forced.mass is not None
    return forced.mass.double().mean((0, 1, 3)).tolist()


def _with_dense(
    sites: Sequence[Site], curves: dict[str, tuple[tuple[str, float], ...]], target: float
) -> tuple[LayerCalibration, ...]:
    """Every attention layer in the order of first calls; those that never capture keep all."""
    layers = dict.fromkeys(site.layer for site in sites)
    return tuple(LayerCalibration.choose(layer, curves.get(layer, ()), target) for layer in layers)
