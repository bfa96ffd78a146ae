"""The retained count is exact: against rational arithmetic, for any decimal, on host and tensors."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sparse_compile.kernels import Retention, retained_count
from sparse_compile.kernels.retention import MAX_LENGTH

shares = st.one_of(
    st.floats(min_value=1e-12, max_value=1.0),
    st.decimals(min_value="0.0001", max_value="1", places=4).map(str),
    st.fractions(min_value=Fraction(1, 10**6), max_value=1),
)
lengths = st.one_of(st.integers(0, 300), st.integers(0, MAX_LENGTH))


def by_definition(length: int, share: Fraction) -> int:
    return min(length, max(1, math.ceil(length * share)))


@settings(max_examples=300, deadline=None)
@given(shares, lengths)
@example(0.1, 70)
@example(0.30000000000000004, 10)
@example(0.12345678901234567, MAX_LENGTH)
@example(1e-12, MAX_LENGTH)
@example(0.9999999999999999, MAX_LENGTH)
def test_count_is_that_of_rational_arithmetic(share: float | str | Fraction, length: int) -> None:
    exact = share if isinstance(share, Fraction) else Fraction(str(share))
    retention = Retention.of(share)
    expected = by_definition(length, exact)
    assert retention.count(length) == expected
    tensor = retained_count(torch.tensor([length]), retention.numerator, retention.denominator)
    assert tensor.dtype == torch.int64
    assert tensor.tolist() == [expected]


@pytest.mark.parametrize(
    ("length", "share", "count"), [(13, 0.1, 2), (70, 0.1, 7), (1, 0.1, 1), (0, 0.1, 0), (10, 0.3, 3)]
)
def test_known_counts(length: int, share: float, count: int) -> None:
    assert Retention.of(share).count(length) == count


def test_full_retention_keeps_everything() -> None:
    assert all(Retention.of(1.0).count(n) == n for n in range(200))
    assert Retention.of(1) == Retention.of("1.0") == Retention(1, 1)


@settings(max_examples=200, deadline=None)
@given(st.fractions(min_value=Fraction(1, 10**9), max_value=1), st.integers(1, 40))
def test_large_denominators_become_the_upper_farey_neighbour(share: Fraction, limit: int) -> None:
    retention = Retention.of(share, max_length=limit)
    found = Fraction(retention.numerator, retention.denominator)
    candidates = {Fraction(p, q) for q in range(1, limit + 1) for p in range(1, q + 1)}
    assert found == (share if share.denominator <= limit else min(f for f in candidates if f >= share))
    assert all(retention.count(n) == by_definition(n, share) for n in range(limit + 1))


@pytest.mark.parametrize(
    "share", [0, -0.1, 1.5, 1.0000001, math.nan, math.inf, "half", "", "1/0", True, None]
)
def test_anything_else_is_refused_by_name(share: Any) -> None:
    with pytest.raises(ValueError, match="key_retention=") as error:
        Retention.of(share)
    assert repr(share) in str(error.value)


@pytest.mark.parametrize("limit", [0, 2**31])
def test_max_length_is_an_int32_length(limit: int) -> None:
    with pytest.raises(ValueError, match=f"max_length={limit}"):
        Retention.of(0.1, max_length=limit)


@pytest.mark.parametrize("pair", [(0, 1), (2, 1), (-1, 2), (1, 2**31)])
def test_a_retention_is_a_share(pair: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"Retention\.of"):
        Retention(*pair)


def test_tensors_must_be_int64() -> None:
    with pytest.raises(TypeError, match="int64"):
        retained_count(torch.tensor([7], dtype=torch.int32), 1, 10)


@given(
    length=st.integers(0, 2000),
    share=st.fractions(Fraction(1, 100), 1),
    first=st.integers(0, 50),
    last=st.integers(0, 50),
)
def test_keys_that_are_always_kept_count(length: int, share: Fraction, first: int, last: int) -> None:
    plain, forced = Retention.of(share), Retention.of(share, first=first, last=last)
    count = forced.count(length)
    assert count == max(plain.count(length), min(length, first + last))
    assert int(forced.count(torch.tensor(length))) == count
    always = forced.always(torch.arange(length), length)
    assert int(always.sum()) == min(length, first + last) <= count
    assert always.tolist() == [at < first or at >= length - last for at in range(length)]


def test_numbers_of_keys_are_checked() -> None:
    with pytest.raises(ValueError, match="first=-1 must lie in"):
        Retention(1, 10, first=-1)
    assert str(Retention(1, 10, 2, 3)) == "1/10 with the first 2 and the last 3"
