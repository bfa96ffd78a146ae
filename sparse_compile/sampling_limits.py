"""Which values the lengths and the sampling settings of a call may have. Imports no torch.

transformers takes some of them without a word where they mean nothing (top_p=1.5 leaves all tokens, as if it were not
there), and refuses others in words that name neither the argument nor a remedy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from sparse_compile.errors import ArgumentError, whole_number

LENGTHS = {"max_new_tokens": 1, "min_new_tokens": 0, "max_length": 1, "min_length": 0}
"""The least value of each length of a call."""


@dataclass(frozen=True)
class Limit:
    """holds: whether a number is allowed. text: which ones are. example: one of them. always: without sampling too."""

    holds: Callable[[Any], bool]
    text: str
    example: str
    always: bool = False


def _positive(value: Any) -> bool:
    """transformers takes no integer but 1, which does nothing."""
    return value == 1 or (isinstance(value, float) and 0 < value < math.inf)


def _share(value: Any) -> bool:
    return bool(0 < value <= 1)


def _share_or_none(value: Any) -> bool:
    return bool(0 <= value <= 1)


def _cutoff(value: Any) -> bool:
    return bool(0 <= value < 1)


LIMITS = {
    "temperature": Limit(_positive, "must be a float greater than 0", "0.7"),
    "top_k": Limit(
        lambda value: isinstance(value, int) and value >= 0,
        "must be an integer >= 1, or 0 for all tokens",
        "50",
    ),
    "top_p": Limit(_share_or_none, "must be a number from 0 to 1", "0.9"),
    "min_p": Limit(_share_or_none, "must be a number from 0 to 1", "0.05"),
    "top_h": Limit(_share, "must be a number greater than 0 and at most 1", "0.5"),
    "typical_p": Limit(_share, "must be a number greater than 0 and at most 1", "0.9"),
    "epsilon_cutoff": Limit(_cutoff, "must be a number from 0 to below 1", "0.0003"),
    "eta_cutoff": Limit(_cutoff, "must be a number from 0 to below 1", "0.0003"),
    "repetition_penalty": Limit(_positive, "must be a float greater than 0", "1.2", always=True),
}


def check_lengths(settings: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a length that is no integer or too small. None and what is not there are left out."""
    for name, least in LENGTHS.items():
        if settings.get(name) is not None:
            whole_number(name, settings[name], least)


def check_sampling(settings: Mapping[str, Any]) -> None:
    """Raise ArgumentError for a sampling setting that is in use and outside of its limit."""
    for name, limit in LIMITS.items():
        value = settings.get(name)
        if value is None or not (limit.always or settings.get("do_sample")):
            continue
        if isinstance(value, bool) or not isinstance(value, Real) or not limit.holds(value):
            raise ArgumentError(name, value, limit.text, f"pass for example {name}={limit.example}")
