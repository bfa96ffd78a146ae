"""SparseConfig and the lazy package: what is accepted, and what every refusal says."""

from __future__ import annotations

import dataclasses
import math
import pickle
import subprocess
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest

from sparse_compile.config import SparseConfig, warn_of_last_loop
from sparse_compile.errors import ArgumentError, SparseCompileError


@pytest.mark.parametrize(
    ("value", "fraction"),
    [
        (0.1, Fraction(1, 10)),
        ("0.1", Fraction(1, 10)),
        ("1/8", Fraction(1, 8)),
        (Fraction(1, 3), Fraction(1, 3)),
        (Decimal("0.25"), Fraction(1, 4)),
        (1, Fraction(1)),
        (1.0, Fraction(1)),
        (1e-9, Fraction(1, 10**9)),
    ],
)
def test_retention_is_the_decimal_as_written(value: object, fraction: Fraction) -> None:
    assert SparseConfig.from_options(key_retention=value).retention == fraction


@pytest.mark.parametrize(
    "value", [0, 0.0, -0.1, 1.5, 2, math.nan, math.inf, "", "a lot", "1/0", "nan", True, None, {0.1}, 1j]
)
def test_bad_retention_names_argument_value_limit_and_remedy(value: object) -> None:
    with pytest.raises(ValueError, match="key_retention") as caught:
        SparseConfig.from_options(key_retention=value)
    message = str(caught.value)
    assert repr(value) in message
    assert "greater than 0 and at most 1" in message
    assert "key_retention=0.1" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("capture_loop", -1),
        ("capture_loop", True),
        ("capture_loop", 1.0),
        ("capture_loop", "1"),
        ("recapture_every", 0),
        ("key_bucket", 0),
        ("max_context", 0),
        ("max_context", 1),  # a token of a prompt and a new one
        ("max_batch", -3),
        ("dense_below", -1),
        ("page_size", 0),
        ("prefill_chunk", 0),
        ("implementation", "cuda"),
        ("implementation", None),
        ("enabled", 1),
        ("validate", None),
        ("roll", "no"),
        ("merge_linears", "yes"),
        ("merge_linears", None),
        ("fuse_gates", "auto"),
        ("fuse_gates", None),
        ("progress", "yes"),
        ("async_steps", 1),
        ("loops_per_step", 0),
        ("prefix_caching", None),
    ],
)
def test_bad_values_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=name) as caught:
        SparseConfig.from_options(**{name: value})
    assert isinstance(caught.value, SparseCompileError)
    assert caught.value.argument == name
    assert caught.value.value == value
    assert caught.value.remedy


def test_unknown_option_lists_the_known_and_suggests_the_closest() -> None:
    with pytest.raises(ArgumentError, match="did you mean key_retention") as caught:
        SparseConfig.from_options(key_retain=0.1)
    assert "capture_loop, recapture_every" in str(caught.value)
    with pytest.raises(ArgumentError, match="remove xyz"):
        SparseConfig.from_options(xyz=1)


def test_config_is_frozen_and_hashable() -> None:
    config = SparseConfig()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.enabled = False  # type: ignore[misc]
    assert hash(config) == hash(SparseConfig())


def test_errors_survive_pickling() -> None:
    error = ArgumentError("a", 1, "must be 2", "pass a=2")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a=1: must be 2; pass a=2"


def test_a_capture_in_the_last_loop_is_warned_of() -> None:
    warn_of_last_loop(SparseConfig(capture_loop=2), 4)
    with pytest.warns(UserWarning, match="last of 2 loops"):
        warn_of_last_loop(SparseConfig(), 2)
    from sparse_compile import sparse_compile
    from sparse_compile.models import tiny_model

    with pytest.warns(UserWarning, match="last of 4 loops") as caught:
        sparse_compile(tiny_model("ouro"), capture_loop=3, validate=False)
    assert [Path(one.filename).name for one in caught] == [
        "test_config.py"
    ]  # the line that a user can change
    warn_of_last_loop(SparseConfig(key_retention=1), 2)


def test_import_is_light_and_exports_are_there() -> None:
    code = (
        "import sys, sparse_compile\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules), 'heavy import'\n"
        "from sparse_compile import SparseConfig, SparseCompileError\n"
        "assert 'torch' not in sys.modules\n"
        "assert sparse_compile.__version__.count('.') == 2\n"
        "assert 'CompiledModel' in dir(sparse_compile)\n"
        "from sparse_compile import sparse_compile as function, CompiledModel\n"
        "assert callable(function)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_attribute_of_the_package() -> None:
    import sparse_compile

    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = sparse_compile.nothing
