"""Quality over retention and capture loop: one model compiled in many ways, measured on the same texts."""

from __future__ import annotations

import gc
import os
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparse_compile.api import sparse_compile
from sparse_compile.compile import arguments_of_options, pass_options
from sparse_compile.config import AUTO, SparseConfig
from sparse_compile.passes.schedule import schedule_sites
from sparse_compile.quality.measure import OPTIONS, Meter, Settings, check_lengths

if TYPE_CHECKING:
    from sparse_compile.compiled import CompiledModel

RETENTIONS = ("0.02", "0.05", "0.1", "0.2", "0.5", "1.0")
CAPTURE_LOOPS = (0, 1)


@dataclass(frozen=True)
class Sweep:
    """What is compared with the dense model: each retention with each capture loop, with further `options`."""

    retentions: tuple[str, ...] = RETENTIONS
    capture_loops: tuple[int, ...] = CAPTURE_LOOPS
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def points(self) -> list[tuple[str, int]]:
        return [(retention, loop) for loop in self.capture_loops for retention in self.retentions]


SUBSET_SWEEP = Sweep(retentions=("0.1", "1.0"), capture_loops=(1,))
"""What goes with the settings of the same name."""


def point_options(sweep: Sweep) -> list[dict[str, Any]]:
    """Options of `sparse_compile` at each point of the sweep."""
    return [_options(sweep, retention, capture_loop) for retention, capture_loop in sweep.points]


def check_points(compiled: CompiledModel, sweep: Sweep) -> None:
    """Raises ArgumentError for a point of the sweep that this model has not, before the first one is measured."""
    for options in point_options(sweep):
        config = SparseConfig.from_options(**options)
        with arguments_of_options():
            schedule_sites(compiled.program.sites, pass_options(config, compiled.device))


def measure_all(
    model: Any,
    text: Tensor,
    settings: Settings,
    sweep: Sweep,
    tasks: bool,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> dict[str, Any]:
    """The figures of a model: conditions, the dense model's, and a row for each point of the sweep.

    text: token ids. tasks: whether the model reads bytes as the synthetic tasks do. progress: told (done, total).
    """
    state = {"done": 0, "total": 0}

    def done(units: int) -> None:
        state["done"] += units
        progress(state["done"], state["total"])

    check_lengths(model, settings.window, settings.task_contexts if tasks else ())
    meter = Meter(text, settings, tasks, done)
    dense_options = {**OPTIONS, "implementation": dict(sweep.options).get("implementation", "auto")}
    compiled = sparse_compile(model, **dense_options, enabled=False)
    check_points(compiled, sweep)
    state["total"] = (1 + len(sweep.points)) * meter.units(compiled) + len(meter.windows)
    state["total"] += int(len(meter.prompts) > 0)
    dense = meter.dense(compiled)
    result = {**conditions(model), "settings": asdict(settings), "options": dict(sweep.options)}
    result["dense"] = meter.measure(compiled, dense).to_dict()
    del compiled
    result["rows"] = []
    for retention, capture_loop in sweep.points:
        compiled = sparse_compile(model, **_options(sweep, retention, capture_loop), validate=False)
        row = {
            "retention": _number(retention),
            "capture_loop": capture_loop,
            "kept": compiled.sparse_config.retention_text,
        }
        result["rows"].append(row | meter.measure(compiled, dense).to_dict())
        del compiled
        gc.collect()  # engines refer to themselves, and the next one needs their memory
    return result


def _options(sweep: Sweep, retention: str, capture_loop: int) -> dict[str, Any]:
    """Options of `sparse_compile` at a point of the sweep. A calibration is for "auto" alone."""
    given = dict(sweep.options)
    if retention != AUTO:
        given = {name: value for name, value in given.items() if name not in ("calibration", "target_mass")}
    return {**OPTIONS, **given, "key_retention": retention, "capture_loop": capture_loop}


def _number(retention: str) -> float | str:
    return retention if retention == AUTO else float(Fraction(retention))


def full_retention_is_dense(result: dict[str, Any]) -> bool:
    """Whether every row at retention 1 is exactly the dense model."""
    return all(row["exact"] for row in result["rows"] if row["retention"] == 1)


def conditions(model: Any) -> dict[str, Any]:
    """What figures depend on: model, device, versions and commit."""
    cuda = model.device.type == "cuda"
    return {
        "model": type(model).__name__,
        "parameters": sum(one.numel() for one in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "gpu": torch.cuda.get_device_name(model.device) if cuda else "none (CPU)",
        "torch": torch.__version__,
        "triton": version("triton") if cuda else None,
        "transformers": version("transformers"),
        "commit": commit(),
    }


def commit() -> str:
    """The commit that runs, from SPARSE_COMPILE_COMMIT or from the folder of this package; "unknown" without either."""
    given = os.environ.get("SPARSE_COMPILE_COMMIT", "")
    if given:
        return given
    folder = os.path.dirname(os.path.abspath(__file__))
    try:
        found = subprocess.run(
            ["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, check=False
        )
    except OSError:
        return "unknown"
    return found.stdout.strip() or "unknown"
