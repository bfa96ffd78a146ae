"""Calibrations: how much of the attention mass each layer keeps at which retention, and the retention chosen for it.

A file of `sparse-compile calibrate`, which `sparse_compile(model, key_retention="auto", calibration=FILE)` loads:

    {"format": 1, "model": "OuroForCausalLM", "capture_loop": 1, "keep_first": 0, "keep_last": 0,
     "target_mass": 0.95, "tokens": 8192, "layers": [
        {"layer": "model.layers.0.self_attn", "retention": "0.08", "mass": 0.957,
         "curve": [["0.01", 0.71], ["0.02", 0.8], ...]}, ...]}

`retention` is what counts; `curve` is read where another target mass is asked for. Imports no torch.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from sparse_compile.errors import ArgumentError

FORMAT = 1
REMEDY = "make one: sparse-compile calibrate MODEL --text FILE --out retention.json"


@dataclass(frozen=True)
class LayerCalibration:
    """One attention layer. retention: the decimal chosen for it, which kept `mass` on the text. curve: (retention, mean
    mass) by rising retention.
    """

    layer: str
    retention: str
    mass: float
    curve: tuple[tuple[str, float], ...]

    @classmethod
    def choose(cls, layer: str, curve: tuple[tuple[str, float], ...], target: float) -> LayerCalibration:
        """With the smallest retention of `curve` from which on the mass is never below `target`; else with 1."""
        chosen, kept = "1", 1.0
        for retention, mass in reversed(curve):
            if mass < target:
                break
            chosen, kept = retention, mass
        return cls(layer, chosen, kept, curve)


@dataclass(frozen=True)
class Calibration:
    """What was measured on a text with one capture loop. tokens: rows that were measured."""

    model: str
    capture_loop: int
    target_mass: float
    tokens: int
    layers: tuple[LayerCalibration, ...]
    keep_first: int = 0
    keep_last: int = 0

    def shares(self, target_mass: float | None = None) -> dict[str, Fraction]:
        """The retention of each layer: as chosen, or anew for another target mass."""
        layers = self.layers
        if target_mass is not None:
            layers = tuple(LayerCalibration.choose(one.layer, one.curve, target_mass) for one in layers)
        return {one.layer: Fraction(one.retention) for one in layers}

    def to_dict(self) -> dict[str, Any]:
        layers = [{**vars(one), "curve": [list(point) for point in one.curve]} for one in self.layers]
        return {"format": FORMAT, **vars(self), "layers": layers}

    def save(self, path: str | Path) -> None:
        Path(path).write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """The calibration of a file. Raises ArgumentError for one that cannot be read or is none."""
        try:
            return cls.of_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise ArgumentError(
                "calibration", str(path), f"cannot be read: {error.strerror}", REMEDY
            ) from None
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            limit = f"is no calibration of format {FORMAT}: {type(error).__name__}: {error}"
            raise ArgumentError("calibration", str(path), limit, REMEDY) from None

    @classmethod
    def of_dict(cls, value: dict[str, Any]) -> Calibration:
        """From what `to_dict` gave. Raises ValueError, KeyError or TypeError for anything else."""
        if value["format"] != FORMAT:
            raise ValueError(f"format is {value['format']!r}")
        layers = tuple(_layer(one) for one in value["layers"])
        names = [one.layer for one in layers]
        if not layers or len(set(names)) != len(names):
            raise ValueError("it must have layers, and each once")
        numbers = {
            name: _count(value, name) for name in ("capture_loop", "tokens", "keep_first", "keep_last")
        }
        target = _mass(value["target_mass"], "target_mass")
        return cls(model=str(value["model"]), target_mass=target, layers=layers, **numbers)


def _count(value: dict[str, Any], name: str) -> int:
    count = value[name]
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise ValueError(f"{name} is {count!r}, not an integer >= 0")
    return count


def _mass(value: Any, name: str) -> float:
    """A mass; up to a rounding above 1, as sums of float32 are."""
    if not 0 <= float(value) <= 1.001:  # false for nan too
        raise ValueError(f"{name} is {value!r}, not in [0, 1]")
    return float(value)


def _layer(value: dict[str, Any]) -> LayerCalibration:
    name = str(value["layer"])
    curve = tuple((str(retention), _mass(mass, f"a mass of {name}")) for retention, mass in value["curve"])
    shares = [Fraction(retention) for retention, _ in curve]
    if not all(0 < share <= 1 for share in [*shares, Fraction(str(value["retention"]))]):
        raise ValueError(f"a retention of {name} is not in (0, 1]")
    if shares != sorted(set(shares)):
        raise ValueError(f"the curve of {name} does not rise")
    return LayerCalibration(name, str(value["retention"]), _mass(value["mass"], f"the mass of {name}"), curve)
