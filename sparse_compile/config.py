"""SparseConfig: what the user may set, checked on construction. Imports no torch."""

from __future__ import annotations

import difflib
import sys
import warnings
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from fractions import Fraction
from numbers import Real
from typing import Any

from sparse_compile.errors import ArgumentError, whole_number
from sparse_compile.speculation import SpeculationConfig, chosen

# What None means. On CUDA rows below some length gain nothing from sparse attention (benchmarks/attention.py), and the
# weights should be read once for as many prompt tokens as memory allows.
_ON_CUDA: dict[str, Any] = {
    "dense_below": 1536,
    "prefill_chunk": 8192,
    "inductor": True,
    "cuda_graphs": True,
    "async_steps": True,
}
_ELSEWHERE: dict[str, Any] = {
    "dense_below": 0,
    "prefill_chunk": 512,
    "inductor": False,
    "cuda_graphs": False,
    "async_steps": False,
}

IMPLEMENTATIONS = ("reference", "batched", "triton", "auto")


@dataclass(frozen=True)
class SparseConfig:
    """Options of `sparse_compile`. Frozen; a bad value is an `ArgumentError` (a ValueError) on construction.

    key_retention: part of the visible keys that a consume loop reads, 0 < r <= 1. The decimal as written is
        meant exactly (0.1 is one tenth): float, str ("0.1", "1/8"), Decimal, Fraction or the int 1. 1 means
        dense.
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
        None = not. The tokens are the same, those of sampling in distribution.
    prefix_caching: keep the full pages of prompts, for later prompts that begin in the same way.
    roll: fold equal loops into one body (False runs the unrolled graph; the tokens are the same).
    merge_linears: join linear layers that read the same input into one product ("auto": on CUDA). The weights are
        moved into one block of memory; names, shapes and values of the model's parameters stay as they are.
    inductor: compile what lies between attention calls with torch.compile's Inductor; None = on CUDA.
    cuda_graphs: replay decode steps from CUDA graphs; None = on CUDA. The tokens are the same bits either way.
    validate: compare the compiled program with the model's own forward before it is returned.
    progress: True shows progress of long work on stderr, None only on a terminal, False never.
    """

    key_retention: float | str | Decimal | Fraction = 0.1
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
    prefix_caching: bool = False
    roll: bool = True
    merge_linears: bool | str = "auto"
    inductor: bool | None = None
    cuda_graphs: bool | None = None
    validate: bool = True
    progress: bool | None = True

    def __post_init__(self) -> None:
        _check_retention(self.key_retention)
        self._check_int("capture_loop", 0)
        if self.dense_below is not None:
            self._check_int("dense_below", 0, "an integer >= 0, or None")
        for name in ("key_bucket", "page_size"):
            self._check_int(name, 1)
        for name in ("recapture_every", "max_context", "max_batch", "loops_per_step", "prefill_chunk"):
            if getattr(self, name) is not None:
                self._check_int(name, 1, "an integer >= 1, or None")
        chosen(self.speculation, None)
        for name in ("enabled", "validate", "roll", "prefix_caching"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(name, getattr(self, name), "must be True or False", f"pass {name}=True")
        if not isinstance(self.merge_linears, bool) and self.merge_linears != "auto":
            raise ArgumentError(
                "merge_linears",
                self.merge_linears,
                "must be True, False or 'auto'",
                "pass merge_linears='auto'",
            )
        for name in ("progress", "inductor", "cuda_graphs", "async_steps"):
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

    @property
    def retention(self) -> Fraction:
        """`key_retention` as the exact fraction that the user wrote."""
        return _as_fraction(self.key_retention)

    def for_device(self, kind: str) -> SparseConfig:
        """The same with every None that stands for a choice by device decided, for a device type such as "cuda"."""
        choices = _ON_CUDA if kind == "cuda" else _ELSEWHERE
        return replace(
            self, **{name: value for name, value in choices.items() if getattr(self, name) is None}
        )

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


def _check_retention(value: object) -> None:
    limit, remedy = "must be a number greater than 0 and at most 1", "pass for example key_retention=0.1"
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
    if config.enabled and config.retention < 1 and config.capture_loop == loops - 1:
        remedy = f"; pass capture_loop={loops - 2} or lower" if loops > 1 else ""
        warnings.warn(
            f"capture_loop={config.capture_loop} is the last of {loops} loops: "
            f"no loop is left to run sparse{remedy}",
            UserWarning,
            stacklevel=_first_frame_outside(),
        )


def _first_frame_outside() -> int:
    """The `stacklevel` for a warning by the caller that shows the line of the user, not one of this package."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("sparse_compile."):
        level, frame = level + 1, frame.f_back
    return level
