"""Lengths and sampling settings outside of their limits: refused by name, wherever they come from."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
from front_fakes import compiled_llama, tiny_llama
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from sparse_compile.errors import ArgumentError
from sparse_compile.sampling_limits import LENGTHS, LIMITS, check_lengths, check_sampling

WRONG: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": -2,
    "top_p": 1.5,
    "min_p": -0.1,
    "top_h": 0,
    "typical_p": 3.0,
    "epsilon_cutoff": 1.0,
    "eta_cutoff": -1.0,
    "repetition_penalty": 0.0,
}


@pytest.fixture(scope="module")
def compiled() -> Any:
    return compiled_llama(tiny_llama())[0]


@pytest.mark.parametrize("name", LIMITS)
def test_generate_refuses_by_name(compiled: Any, name: str) -> None:
    config = GenerationConfig(do_sample=True, max_new_tokens=2)
    setattr(config, name, WRONG[name])
    for arguments in ({"do_sample": True, name: WRONG[name]}, {"generation_config": config}):
        with pytest.raises(ArgumentError) as caught:
            compiled.generate([[5, 6]], **arguments)
        error = caught.value
        assert (error.argument, error.value) == (name, WRONG[name])
        example = error.remedy.removeprefix(f"pass for example {name}=")
        check_sampling({"do_sample": True, name: int(example) if name == "top_k" else float(example)})


def test_settings_that_are_not_in_use_are_left_alone(compiled: Any) -> None:
    unused = {name: value for name, value in WRONG.items() if not LIMITS[name].always}
    check_sampling({"do_sample": False, **unused})
    check_sampling({"do_sample": True, "temperature": 1, "repetition_penalty": 1, "top_k": 0, "top_p": 1})
    with pytest.raises(ArgumentError, match="repetition_penalty"):
        check_sampling({"do_sample": False, **WRONG})


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(compiled: Any, name: str) -> None:
    for wrong in (LENGTHS[name] - 1, 2.5, "7", True):
        with pytest.raises(ArgumentError) as caught:
            compiled.generate([[5, 6]], **{name: wrong})
        assert (caught.value.argument, caught.value.value) == (name, wrong)
    check_lengths({name: LENGTHS[name]})


@functools.cache
def llama() -> Any:
    return tiny_llama()


@given(st.sampled_from(sorted(LIMITS)), st.floats() | st.integers(-3, 3))
def test_what_is_allowed_is_what_transformers_makes_a_processor_of(name: str, value: float) -> None:
    """And never more: a value that passes here is one that transformers takes, and that has its meaning."""
    try:
        check_sampling({"do_sample": True, name: value})
    except ArgumentError:
        return
    model = llama()
    config = GenerationConfig(do_sample=True, max_new_tokens=2, max_length=4)
    setattr(config, name, value)
    assert math.isfinite(value)
    model._get_logits_processor(config, input_ids_seq_length=1, device="cpu", model_kwargs={})
