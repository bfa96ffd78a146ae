"""SparseConfig: what the user may set, checked on construction. Imports no torch."""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import TYPE_CHECKING, Any

from sparse_compile.calibration import REMEDY, Calibration
from sparse_compile.errors import ArgumentError, whole_number
from sparse_compile.speculation import SpeculationConfig, chosen

if TYPE_CHECKING:
    from sparse_compile.kernels.retention import Retention

Number = float | str | Decimal | Fraction
AUTO = "auto"

# What None means. On CUDA rows below some length gain nothing from sparse attention (benchmarks/attention.py), and the
# weights should be read once for as many prompt tokens as memory allows.
_ON_CUDA: dict[str, Any] = {
    "dense_below": 1536,
    "prefill_chunk": 8192,
    "inductor": True,
    "skinny_products": True,
    "cuda_graphs": True,
    "async_steps": True,
}
_ELSEWHERE: dict[str, Any] = {
    "dense_below": 0,
    "prefill_chunk": 512,
    "inductor": False,
    "skinny_products": False,
    "cuda_graphs": False,
    "async_steps": False,
}

_MOST_KEYS = 2**31 - 1  # lengths are int32
IMPLEMENTATIONS = ("reference", "batched", "triton", "auto")


@dataclass(frozen=True)
class SparseConfig:
    """Options of `sparse_compile`. Frozen; a bad value is an `ArgumentError` (a ValueError) on construction.

    key_retention: part of the visible keys that a consume loop reads, 0 < r <= 1. The decimal as written is
        meant exactly (0.1 is one tenth): float, str ("0.1", "1/8"), Decimal, Fraction or the int 1. 1 means
        dense. A sequence has one for each attention layer, in the order of their first calls; "auto" takes those of a
        calibration.
    calibration: for key_retention="auto": a file of `sparse-compile calibrate`, or a `Calibration`. It belongs to one
        capture_loop.
    target_mass: for key_retention="auto": attention mass that the kept keys should have, 0 < mass <= 1; None = that
        for which the calibration was made.
    keep_first, keep_last: so many of the first and of the last visible keys are kept whatever their scores. They count:
        a row keeps as many keys as without them, unless they alone are more.
    capture_loop: loop (counted from 0) that selects the keys; earlier loops are dense. Its upper limit is the
        model's number of loops and is checked when a model is compiled.
    recapture_every: select anew every so many loops after the capture loop; None = select once.
    key_bucket: room for kept keys is reserved in multiples of this many keys.
    max_context: largest number of tokens (prompt + new) of one sequence; None = grow on demand.
    max_batch: largest number of sequences of one call; None = grow on demand.
    dense_below: rows with fewer visible keys than this run dense; None = 1,536 on CUDA, where shorter rows gain
        nothing, and 0 elsewhere.
    implementation: which attention kernels run; "auto" picks the fastest for the device.
    enabled: False runs everything dense (to compare, or as an off-switch).
    page_size: tokens per page of the KV pool.
    prefill_chunk: prompt tokens that one step may process; None = 8,192 on CUDA, 512 elsewhere.
    async_steps: submit a step before the tokens of the last one are read; None = on CUDA. The tokens are the same.
    loops_per_step: loops that one step takes a generated token through, so that tokens at several depths share a batch;
        None = all of them. Needs a loop that is rolled. The tokens are the same.
    speculation: a `SpeculationConfig`: the model drafts tokens with its first loops and verifies several at once;
        None or False = not. The tokens are the same, those of sampling in distribution.
    deterministic: what a request's tokens are does not depend on the requests beside it, and greedy tokens not on
        `speculation` either, in half precision too: a decode row gets the same bits in every batch and in every way of
        decoding. Prompts are computed one at a time. On CUDA it needs half precision, Inductor and the Triton kernels;
        elsewhere rows run one by one.
    prefix_caching: keep the full pages of prompts, for later prompts that begin in the same way.
    roll: fold equal loops into one body (False runs the unrolled graph; the tokens are the same).
    merge_linears: join linear layers that read the same input into one product ("auto": on CUDA). The weights are
        moved into one block of memory; names, shapes and values of the model's parameters stay as they are. Memory that
        cannot be given back is in the report, and is at most 5 % of the weights.
    fuse_gates: attention that is multiplied with a sigmoid, as in HRM-Text, does that within its own kernels:
        of decode rows in float32 and rounded once. The report says which layers do, and why others do not.
    inductor: compile what lies between attention calls with torch.compile's Inductor; None = on CUDA.
    skinny_products: in half precision, run the linear layers of a few rows with kernels of ours that stream weights,
        where they were measured to be faster than the library's; None = on CUDA. Needs `inductor`.
    cuda_graphs: replay decode steps from CUDA graphs; None = on CUDA. The tokens are the same bits either way.
    validate: compare the compiled program with the model's own forward before it is returned.
    progress: True shows progress of long work (compiling, generating, warming up) on stderr, None only on a terminal,
        False never.
    """

    key_retention: Number | Sequence[Number] = 0.1
    calibration: str | os.PathLike[str] | Calibration | None = None
    target_mass: float | None = None
    keep_first: int = 0
    keep_last: int = 0
    capture_loop: int = 1
    recapture_every: int | None = None
    key_bucket: int = 64
    max_context: int | None = None
    max_batch: int | None = None
    dense_below: int | None = None
    implementation: str = "auto"
    enabled: bool = True
    page_size: int = 16
    prefill_chunk: int | None = None
    async_steps: bool | None = None
    loops_per_step: int | None = None
    speculation: SpeculationConfig | None = None
    deterministic: bool = False
    prefix_caching: bool = False
    roll: bool = True
    merge_linears: bool | str = "auto"
    fuse_gates: bool = True
    inductor: bool | None = None
    skinny_products: bool | None = None
    cuda_graphs: bool | None = None
    validate: bool = True
    progress: bool | None = True

    def __post_init__(self) -> None:
        for name in ("capture_loop", "keep_first", "keep_last"):
            self._check_int(name, 0)
            if getattr(self, name) > _MOST_KEYS:
                limit = f"must be at most {_MOST_KEYS:,}, the longest sequence"
                raise ArgumentError(name, getattr(self, name), limit, f"pass for example {name}=4")
        self._check_retention()
        if self.dense_below is not None:
            self._check_int("dense_below", 0, "an integer >= 0, or None")
        for name in ("key_bucket", "page_size"):
            self._check_int(name, 1)
        for name in ("recapture_every", "max_batch", "loops_per_step", "prefill_chunk"):
            if getattr(self, name) is not None:
                self._check_int(name, 1, "an integer >= 1, or None")
        if self.max_context is not None:  # tokens of a prompt and new ones
            self._check_int("max_context", 2, "an integer >= 2, or None")
        object.__setattr__(self, "speculation", chosen(self.speculation, None))
        for name in ("enabled", "validate", "roll", "fuse_gates", "prefix_caching", "deterministic"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(name, getattr(self, name), "must be True or False", f"pass {name}=True")
        if self.deterministic and self.prefix_caching:
            limit = "cannot be combined with deterministic=True: what is computed of a prompt would depend on others"
            raise ArgumentError("prefix_caching", True, limit, "pass prefix_caching=False")
        if not isinstance(self.merge_linears, bool) and self.merge_linears != "auto":
            raise ArgumentError(
                "merge_linears",
                self.merge_linears,
                "must be True, False or 'auto'",
                "pass merge_linears='auto'",
            )
        for name in ("progress", "inductor", "skinny_products", "cuda_graphs", "async_steps"):
            if getattr(self, name) is not None and not isinstance(getattr(self, name), bool):
                raise ArgumentError(
                    name, getattr(self, name), "must be True, False or None", f"pass {name}=False"
                )
        if self.implementation not in IMPLEMENTATIONS:
            known = ", ".join(repr(name) for name in IMPLEMENTATIONS)
            raise ArgumentError(
                "implementation", self.implementation, f"must be one of {known}", "pass implementation='auto'"
            )

    def _check_int(self, name: str, least: int, expected: str | None = None) -> None:
        """Check one integer option and store it as a plain int."""
        object.__setattr__(self, name, whole_number(name, getattr(self, name), least, expected))

    def _check_retention(self) -> None:
        """Check what is kept, and store a sequence as a tuple and the path of a calibration as what is in the file."""
        if isinstance(self.key_retention, str) and self.key_retention == AUTO:
            object.__setattr__(self, "calibration", _calibration(self))
            return
        for name in ("calibration", "target_mass"):
            if getattr(self, name) is not None:
                limit = f"is for key_retention={AUTO!r} only, and it is {self.key_retention!r:.60}"
                raise ArgumentError(name, getattr(self, name), limit, f"pass key_retention={AUTO!r}")
        if isinstance(self.key_retention, str) or not isinstance(self.key_retention, Sequence):
            _check_share(self.key_retention)
            return
        object.__setattr__(self, "key_retention", tuple(self.key_retention))
        if not self.key_retention:
            limit = "must have a number for each attention layer"
            raise ArgumentError("key_retention", self.key_retention, limit, "pass for example [0.1, 0.2]")
        for value in self.key_retention:
            _check_share(value)

    @property
    def retention(self) -> Fraction | tuple[Fraction, ...] | dict[str, Fraction]:
        """`key_retention` as exact fractions: for all layers, for each in order, or by the names of the layers."""
        if isinstance(self.calibration, Calibration):
            return self.calibration.shares(self.target_mass)
        if isinstance(self.key_retention, tuple):
            return tuple(map(_as_fraction, self.key_retention))
        return _as_fraction(self.key_retention)

    @property
    def shares(self) -> tuple[Fraction, ...]:
        """The same without the layers: one fraction, or one for each layer."""
        given = self.retention
        return (
            (given,)
            if isinstance(given, Fraction)
            else tuple(given.values() if isinstance(given, dict) else given)
        )

    @property
    def retention_text(self) -> str:
        """What is kept, for people: "1/10", or "1/20 to 1/2, by layer"."""
        least, most = min(self.shares), max(self.shares)
        always = f", the first {self.keep_first} and the last {self.keep_last}"
        text = str(least) if isinstance(self.retention, Fraction) else f"{least} to {most}, by layer"
        return text + (always if self.keep_first or self.keep_last else "")

    def retention_for_passes(self) -> Retention | tuple[Retention, ...] | dict[str, Retention]:
        """What is kept, in the integers that the ops compute with."""
        from sparse_compile.kernels.retention import Retention

        given, always = self.retention, {"first": self.keep_first, "last": self.keep_last}
        if isinstance(given, dict):
            return {layer: Retention.of(share, **always) for layer, share in given.items()}
        if isinstance(given, tuple):
            return tuple(Retention.of(share, **always) for share in given)
        return Retention.of(given, **always)

    def for_device(self, kind: str) -> SparseConfig:
        """The same with every None that stands for a choice by device decided, for a device type such as "cuda"."""
        choices = _ON_CUDA if kind == "cuda" else _ELSEWHERE
        made = replace(
            self, **{name: value for name, value in choices.items() if getattr(self, name) is None}
        )
        if made.inductor or not made.skinny_products:
            return made
        if self.skinny_products:
            limit = "needs inductor=True: the products are ops of graphs that it compiles"
            raise ArgumentError("skinny_products", True, limit, "leave skinny_products out")
        return replace(made, skinny_products=False)

    @classmethod
    def from_options(cls, **options: Any) -> SparseConfig:
        """Build a config from keyword options; an unknown option is refused by name."""
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                raise ArgumentError(
                    name, options[name], f"unknown option; known are {', '.join(known)}", closest(name, known)
                )
        return cls(**options)


def closest(name: str, known: list[str]) -> str:
    """The remedy for a misspelt name: the closest known one, or to leave it out."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"remove {name}"


def _as_fraction(value: Any) -> Fraction:
    return value if isinstance(value, Fraction) else Fraction(str(value))


def _calibration(config: SparseConfig) -> Calibration:
    """The calibration of key_retention="auto", or an ArgumentError."""
    given = config.calibration
    if given is None:
        limit = f"is needed for key_retention={AUTO!r}"
        raise ArgumentError("calibration", None, limit, REMEDY)
    if not isinstance(given, str | os.PathLike | Calibration):
        raise ArgumentError("calibration", given, "must be the path of a file, or a Calibration", REMEDY)
    found = given if isinstance(given, Calibration) else Calibration.load(os.fspath(given))
    for name in ("capture_loop", "keep_first", "keep_last"):
        measured, asked = getattr(found, name), getattr(config, name)
        if measured != asked:
            limit = f"was measured with {name}={measured}, and it is {asked}"
            raise ArgumentError("calibration", str(given), limit, f"pass {name}={measured}")
    mass = config.target_mass
    if mass is not None and (isinstance(mass, bool) or not isinstance(mass, Real) or not 0 < mass <= 1):
        limit = "must be a number greater than 0 and at most 1"
        raise ArgumentError("target_mass", mass, limit, "pass for example target_mass=0.95")
    return found


def _check_share(value: object) -> None:
    limit, remedy = "must be a number greater than 0 and at most 1", "pass for example key_retention=0.1"
    if isinstance(value, str) and value.endswith(".json"):
        remedy = f"for a calibration pass key_retention={AUTO!r}, calibration={value!r}"
    if isinstance(value, bool) or not isinstance(value, Real | str | Decimal):
        raise ArgumentError("key_retention", value, limit, remedy)
    try:
        fraction = _as_fraction(value)
    except (ValueError, ZeroDivisionError):  # no number, nan, an infinity, or "1/0"
        raise ArgumentError("key_retention", value, limit, remedy) from None
    if not 0 < fraction <= 1:
        raise ArgumentError("key_retention", value, limit, remedy)


def warn_of_last_loop(config: SparseConfig, loops: int) -> None:
    """Warn if `capture_loop` is the last loop of the model (the most calls of one layer per forward): then no
    loop is left to run sparse. (A loop that the model does not have is refused by the schedule pass.)
    """
    if config.enabled and min(config.shares) < 1 and config.capture_loop == loops - 1:
        remedy = f"; pass capture_loop={loops - 2} or lower" if loops > 1 else ""
        warnings.warn(
            f"capture_loop={config.capture_loop} is the last of {loops} loops: "
            f"no loop is left to run sparse{remedy}",
            UserWarning,
            stacklevel=first_frame_outside(),
        )


def first_frame_outside() -> int:
    """The `stacklevel` for a warning by the caller that shows the line of the user, not one of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("sparse_compile."):
        level, frame = level + 1, frame.f_back
    return level
