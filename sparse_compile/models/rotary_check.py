"""Rotary frequency buffers against their closed formula.

They are in no checkpoint file, so a load that leaves them uninitialised or rounds them shows in no
comparison of tensors, only in the text the model writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_SUFFIX = "inv_freq"
# float32 pow differs by a few units in the last place (6e-8 each) between devices and versions; a bfloat16
# rounding is 2e-3 and a wrong theta or dimension is larger still.
RELATIVE_TOLERANCE = 1e-6


@dataclass(frozen=True)
class BufferCheck:
    """One buffer: ``reason`` says what is wrong, or which formula it meets."""

    name: str
    ok: bool
    dtype: str
    largest_relative_error: float | None
    reason: str
    # Wrong beyond the rounding of the buffer's own dtype: left uninitialised, or of other settings. Rope types that
    # change their frequencies while they run are only required to be finite.
    damaged: bool = False


def check_rotary_buffers(model: nn.Module) -> tuple[tuple[BufferCheck, ...], tuple[str, ...]]:
    """(a check of each rotary frequency buffer, names of the other buffers that no file holds)."""
    in_files = set(model.state_dict())
    checks: list[BufferCheck] = []
    unchecked: list[str] = []
    for module_name, module in model.named_modules():
        for buffer_name, buffer in module.named_buffers(recurse=False):
            name = f"{module_name}.{buffer_name}".lstrip(".")
            config = getattr(module, "config", None)
            if name in in_files:
                continue
            if buffer_name.endswith(_SUFFIX) and _has_formula(config, _layer_type(buffer_name)):
                checks.append(_check(name, buffer, config, _layer_type(buffer_name)))
            else:
                unchecked.append(name)
    return tuple(checks), tuple(unchecked)


def _layer_type(buffer_name: str) -> str | None:
    """ "full_attention_original_inv_freq" -> "full_attention"; "inv_freq" -> None."""
    prefix = buffer_name.removesuffix(_SUFFIX).rstrip("_").removesuffix("original").rstrip("_")
    return prefix or None


def _check(name: str, buffer: Tensor, config: Any, layer_type: str | None) -> BufferCheck:
    dtype = str(buffer.dtype).removeprefix("torch.")
    expected, formula = expected_frequencies(config, layer_type)
    kind = _parameters(config, layer_type)["rope_type"]
    if expected.shape != buffer.shape:
        shapes = f"shape {tuple(buffer.shape)}, expected {tuple(expected.shape)}"
        return BufferCheck(name, False, dtype, None, f"{shapes} from {formula}", damaged=kind == "default")
    actual = buffer.detach().cpu().double()
    error = float(((actual - expected.double()).abs() / expected.double().abs()).max())
    if not error <= RELATIVE_TOLERANCE:  # also true for nan
        reason = f"off by {error:.3g} (relative) from {formula}"
        damaged = not (
            _is_rounded(buffer, actual, expected.double()) if kind == "default" else math.isfinite(error)
        )
        return BufferCheck(name, False, dtype, error, reason, damaged)
    return BufferCheck(name, True, dtype, error, formula)


def _is_rounded(buffer: Tensor, actual: Tensor, expected: Tensor) -> bool:
    """Whether `actual` is `expected` in the buffer's dtype, whose smallest numbers are coarser than its eps."""
    info = torch.finfo(buffer.dtype)
    slack = max(RELATIVE_TOLERANCE, info.eps) * expected.abs() + info.smallest_normal * info.eps
    return bool(((actual - expected).abs() <= slack).all())


def _parameters(config: Any, layer_type: str | None) -> dict[str, Any]:
    """The rope parameters of a layer type, empty where the configuration has none."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return parameters if layer_type is None else parameters.get(layer_type) or {}


def _has_formula(config: Any, layer_type: str | None) -> bool:
    kind = _parameters(config, layer_type).get("rope_type")
    return kind == "default" or kind in ROPE_INIT_FUNCTIONS


def expected_frequencies(config: Any, layer_type: str | None = None) -> tuple[Tensor, str]:
    """(frequencies [D / 2], the formula in words), computed on the CPU from the configuration alone.

    For the rope type "default" this is theta ** (-2i / D) in float64, independent of the model's code.
    Other types use transformers' own function, which catches buffers that were not initialised or were
    rounded.
    """
    parameters = _parameters(config, layer_type)
    kind = parameters["rope_type"]
    if kind != "default":
        named = {} if layer_type is None else {"layer_type": layer_type}
        frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), **named)
        return frequencies, f"transformers' formula for rope type {kind!r}"
    theta = parameters["rope_theta"]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    exponents = torch.arange(0, size, 2, dtype=torch.float64, device="cpu") / size
    return float(theta) ** -exponents, f"{theta:g} ** (-2i / {size})"
