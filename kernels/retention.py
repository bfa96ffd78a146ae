"""How many keys a row retains: the decimal that the user wrote, in exact integer arithmetic.

A retention such as 0.1 has no exact binary form, and `ceil(70 * 0.1)` is 8 in floating point where the user
meant 7. So the number is taken as the exact fraction of its decimal text, and the count is computed in
integers, by the same expression on the host, in torch tensors and in device code.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import torch

MAX_LENGTH = 2**31 - 1
"""The longest sequence for which counts are exact; row lengths are int32."""

Length = TypeVar("Length", int, torch.Tensor)


def retained_count(length: Length, numerator: int, denominator: int) -> Length:
    """`min(N, max(1, ceil(N * numerator / denominator)))` for N visible keys; 0 for N = 0.

    `length` is a Python int or an int64 tensor of any shape; the result has the same type. Because 0 <
    numerator <= denominator, ceil(N * r) is at least 1 for N >= 1 and never above N: the two clamps of the
    definition never act, and what is left is one integer expression that device code can use as it stands.
    With a `Retention` and N <= 2**31 - 1 every intermediate is below 2**63.

    Raises TypeError for a tensor of another dtype, whose products could overflow.
    """
    if isinstance(length, torch.Tensor) and length.dtype != torch.int64:
        raise TypeError(f"length must be an int64 tensor, got {length.dtype}; convert it with length.long()")
    return (length * numerator + (denominator - 1)) // denominator


@dataclass(frozen=True)
class Retention:
    """The kept share of the visible keys as an exact fraction, 0 < numerator / denominator <= 1.

    first, last: so many of the first and of the last visible keys are kept whatever their scores. They count: a row
    keeps as many keys as without them, unless they alone are more.
    """

    numerator: int
    denominator: int
    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        share = f"{self.numerator}/{self.denominator}"
        return share + (
            f" with the first {self.first} and the last {self.last}" if self.first or self.last else ""
        )

    def always(self, position: torch.Tensor, length: torch.Tensor | int) -> torch.Tensor:
        """Which of the keys at `position` are kept whatever their scores, of rows that see `length` keys."""
        return (position < length) & ((position < self.first) | (position >= length - self.last))

    def __post_init__(self) -> None:
        if not 0 < self.numerator <= self.denominator <= MAX_LENGTH:
            raise ValueError(
                f"Retention({self.numerator}, {self.denominator}) is not a share in (0, 1] with a "
                f"denominator of at most {MAX_LENGTH}; "
                "build it with Retention.of(value)"
            )
        for name in ("first", "last"):
            if not 0 <= getattr(self, name) <= MAX_LENGTH:
                raise ValueError(
                    f"{name}={getattr(self, name)} must lie in 0 .. {MAX_LENGTH}: a number of keys"
                )

    @classmethod
    def of(
        cls,
        value: float | str | int | Fraction,
        max_length: int = MAX_LENGTH,
        *,
        first: int = 0,
        last: int = 0,
    ) -> Retention:
        """The retention that `value` means as a decimal: `Fraction(str(value))`, so 0.1 is exactly 1/10.

        A denominator above `max_length` is replaced by the upper Farey neighbour p/q: the smallest fraction
        >= value whose denominator is at most `max_length`. Every count up to that length stays the same:
        suppose ceil(N * r) < ceil(N * p/q) for some N <= max_length. Then with c = ceil(N * r) we have N * r
        <= c < N * p/q, so c/N is a fraction in [r, p/q) with a denominator of at most N <= max_length, which
        the choice of p/q rules out. Numerator and denominator are then at most 2**31 - 1, so N * p + q - 1 <
        2**62 + 2**31 fits int64.

        Raises ValueError for anything outside (0, 1] or not a number, and for a max_length outside
        1 .. 2**31 - 1.
        """
        if not 1 <= max_length <= MAX_LENGTH:
            raise ValueError(f"max_length={max_length} must lie in 1 .. {MAX_LENGTH} (row lengths are int32)")
        exact = _exact(value)
        if not 0 < exact <= 1:
            raise ValueError(
                f"key_retention={value!r} must lie in (0, 1]: the share of the visible keys that is kept; "
                f"1.0 keeps all of them"
            )
        upper = _upper_neighbour(exact, max_length)
        return cls(upper.numerator, upper.denominator, first, last)

    @property
    def share(self) -> Fraction:
        return Fraction(self.numerator, self.denominator)

    @property
    def keeps_all(self) -> bool:
        return self.numerator == self.denominator

    def count(self, length: Length) -> Length:
        """`retained_count` of this share, or the keys that are always kept where those are more: int -> int, int64
        tensor -> int64 tensor.
        """
        count = retained_count(length, self.numerator, self.denominator)
        always = self.first + self.last
        if not always:
            return count
        if isinstance(length, torch.Tensor):
            return torch.maximum(count, length.clamp(max=always))
        return torch.sym_max(count, torch.sym_min(length, always))  # sizes may be symbolic


def _exact(value: float | str | int | Fraction) -> Fraction:
    if isinstance(value, Fraction):
        return value
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ValueError(
            f"key_retention={value!r} is not a finite number; give a share in (0, 1], for example 0.1"
        ) from None


def _upper_neighbour(value: Fraction, limit: int) -> Fraction:
    """The smallest fraction >= value with a denominator <= limit, for 0 < value <= 1."""
    if value.denominator <= limit:
        return value
    nearest = value.limit_denominator(limit)
    if nearest > value:
        return nearest
    # Nothing with a small denominator lies in (nearest, value], or it would be nearer. So the answer is the
    # successor p/q of nearest = a/b in the Farey sequence of order limit: p*b - a*q = 1 with the largest such
    # q <= limit.
    a, b = nearest.numerator, nearest.denominator
    residue = -pow(a, -1, b) % b
    q = limit - (limit - residue) % b
    return Fraction((a * q + 1) // b, q)
