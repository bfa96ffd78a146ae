"""The retention rule in exact integer arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch


@dataclass(frozen=True)
class Retention:
    """A key retention as a fraction, `0 < numerator / denominator <= 1`."""

    numerator: int
    denominator: int

    @classmethod
    def of(cls, value: float | str | int | Fraction, max_length: int = 2**31 - 1) -> Retention:
        """The decimal the user wrote, taken as an exact fraction."""
        ratio = value if isinstance(value, Fraction) else Fraction(str(value))
        if not 0 < ratio <= 1 or ratio.denominator > max_length:
            raise ValueError(f"key_retention={value} must lie in (0, 1], denominator at most {max_length}")
        return cls(ratio.numerator, ratio.denominator)


def retained_count(length: int, numerator: int, denominator: int) -> int:
    """`min(N, max(1, ceil(N * r)))`; works on Python ints and on int64 tensors. N = 0 gives 0."""
    count = (length * numerator + denominator - 1) // denominator
    if isinstance(length, torch.Tensor):
        return torch.minimum(torch.clamp(count, min=1), length)
    return min(length, max(1, count))
