"""Quality over retention and capture loop: one model compiled in many ways, measured on the same texts."""

from __future__ import annotations

import gc
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparse_compile.api import sparse_compile
from sparse_compile.compile import arguments_of_options, pass_options
from sparse_compile.config import AUTO, SparseConfig
from sparse_compile.errors import ArgumentError, SparseCompileError
from sparse_compile.passes.schedule import schedule_sites
from sparse_compile.quality.measure import OPTIONS, Dense, Done, Meter, Settings, check_lengths

if TYPE_CHECKING:
    from sparse_compile.compiled import CompiledModel

RETENTIONS = ("0.02", "0.05", "0.1", "0.2", "0.5", "1.0")
CAPTURE_LOOPS = (0, 1)
TOGETHER = 2  # points that are measured at once: they share their prompts, and are saved together


@dataclass(frozen=True)
class Point:
    """One way of compiling: the retention, of all layers or of each, the capture loop, and further `options`."""

    retention: str | tuple[str, ...]
    capture_loop: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        kept = self.retention if isinstance(self.retention, str) else "[" + ", ".join(self.retention) + "]"
        others = "".join(f", {name}={value}" for name, value in self.options)
        return f"retention {kept}, capture loop {self.capture_loop}{others}"

    def compile_options(self) -> dict[str, Any]:
        """Options of `sparse_compile`. A calibration is for "auto" alone."""
        given = dict(self.options)
        if self.retention != AUTO:
            given = {name: one for name, one in given.items() if name not in ("calibration", "target_mass")}
        return {**OPTIONS, **given, "key_retention": self.retention, "capture_loop": self.capture_loop}

    def head(self) -> dict[str, Any]:
        """What a row of the JSON says of where it was measured."""
        kept = self.retention
        number = [_number(one) for one in kept] if isinstance(kept, tuple) else _number(kept)
        return {
            "retention": number,
            "capture_loop": self.capture_loop,
            "options": _plain(dict(self.options)),
        }


@dataclass(frozen=True)
class Sweep:
    """What is compared with the dense model: each retention with each capture loop, with further `options`; and
    `others`, with the same options beside their own.
    """

    retentions: tuple[str, ...] = RETENTIONS
    capture_loops: tuple[int, ...] = CAPTURE_LOOPS
    options: tuple[tuple[str, Any], ...] = ()
    others: tuple[Point, ...] = ()

    @property
    def points(self) -> list[Point]:
        grid = [Point(kept, loop, self.options) for loop in self.capture_loops for kept in self.retentions]
        shared = dict(self.options)
        return grid + [
            replace(one, options=tuple((shared | dict(one.options)).items())) for one in self.others
        ]


SUBSET_SWEEP = Sweep(retentions=("0.1", "1.0"), capture_loops=(1,))
"""What goes with the settings of the same name."""

Rows = dict[Point, dict[str, Any]]
Measure = Callable[[Sequence[Sequence[Point]], Dense, Done], Iterator[Rows]]


class PointError(SparseCompileError, RuntimeError):
    """Points of a sweep could not be measured. The message names them, and says why."""

    def __init__(self, points: Sequence[Point], reason: str) -> None:
        super().__init__(f"measuring {'; or '.join(map(str, points))} failed: {reason}")


def check_points(compiled: CompiledModel, sweep: Sweep) -> None:
    """Raises ArgumentError for a point of the sweep that this model has not, before the first one is measured."""
    for point in sweep.points:
        config = SparseConfig.from_options(**point.compile_options())
        with arguments_of_options():
            schedule_sites(compiled.program.sites, pass_options(config, compiled.device))


def measure_all(
    model: Any,
    text: Tensor,
    settings: Settings,
    sweep: Sweep,
    tasks: bool,
    progress: Callable[[int, int], object] = lambda done, total: None,
    *,
    known: dict[str, Any] | None = None,
    save: Callable[[dict[str, Any]], object] = lambda result: None,
    measure: Measure | None = None,
) -> dict[str, Any]:
    """The figures of a model: conditions, the dense model's, and a row for each point of the sweep.

    text: token ids. tasks: whether the model reads bytes as the synthetic tasks do. progress: told (done, total).
    known: an earlier result, perhaps not complete, whose rows are taken over. save: given the result whenever rows have
    come in; "complete" says whether all are there. measure: measures groups of points in place of this process.

    Raises PointError, which names the points, for whatever happens while points are measured.
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
    points = sweep.points
    result = {
        **conditions(model),
        "settings": _plain(asdict(settings)),
        "options": _plain(dict(sweep.options)),
    }
    rows = _known_rows(known, result, points)
    missing = [point for point in points if point not in rows]
    state["total"] = (1 + len(missing)) * meter.units(compiled) + len(meter.windows)
    state["total"] += int(len(meter.prompts) > 0)
    dense = meter.dense(compiled)
    result["dense"] = _plain(meter.measure([compiled], dense)[0].to_dict())
    del compiled
    groups = [missing[first : first + TOGETHER] for first in range(0, len(missing), TOGETHER)]
    for made in (measure or partial(_measure_here, model, meter))(groups, dense, done):
        rows |= made
        save(_result(result, rows, points))
    return _result(result, rows, points)


def _result(result: dict[str, Any], rows: Rows, points: Sequence[Point]) -> dict[str, Any]:
    """With the rows that there are, in the order of the points."""
    there = [rows[point] for point in points if point in rows]
    return {**result, "complete": len(there) == len(points), "rows": there}


def _measure_here(
    model: Any, meter: Meter, groups: Sequence[Sequence[Point]], dense: Dense, done: Done
) -> Iterator[Rows]:
    for group in groups:
        yield measure_points(model, meter, group, dense)


def measure_points(model: Any, meter: Meter, points: Sequence[Point], dense: Dense) -> Rows:
    """Points that share their prompts. Raises PointError."""
    compiled = []
    at: Sequence[Point] = points
    try:
        for point in points:
            at = [point]
            compiled.append(sparse_compile(model, **point.compile_options(), validate=False))
        at = points
        found = meter.measure(compiled, dense)
    except Exception as error:
        raise PointError(at, f"{type(error).__name__}: {error}") from error
    rows = {
        point: _plain({**point.head(), "kept": one.sparse_config.retention_text, **quality.to_dict()})
        for point, one, quality in zip(points, compiled, found, strict=True)
    }
    del compiled
    gc.collect()  # engines refer to themselves, and the next ones need their memory
    return rows


def _known_rows(known: dict[str, Any] | None, result: dict[str, Any], points: Sequence[Point]) -> Rows:
    """The points that an earlier result has. Raises ArgumentError where that was measured in another way."""
    if known is None:
        return {}
    for name, value in result.items():
        if known.get(name) != value:
            limit = f"the file to go on with has {name}={known.get(name)!r:.200}"
            raise ArgumentError(name, value, limit, "measure in the same way, or start again without resume")
    heads = [(point, _plain(point.head())) for point in points]
    return {
        point: row
        for point, head in heads
        for row in known["rows"]
        if all(row[name] == value for name, value in head.items())
    }


def _plain(value: Any) -> Any:
    """As JSON gives it back, so that rows of an earlier run and new ones are alike."""
    return json.loads(json.dumps(value, default=str))


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
