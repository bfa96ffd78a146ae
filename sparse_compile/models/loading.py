"""Strict loading: a tensor that is missing, unexpected or of another shape is an error, not a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparse_compile.errors import ArgumentError

from .ouro import OuroConfig, OuroForCausalLM, OuroModel
from .presets import tiny_model
from .sources import TINY_PREFIX, UnknownModelError, naming, source_options
from .tokenizer import ByteTokenizer, ByteTokenizerOwner, tiny_tokenizer

_LISTED = 8  # tensor names that an error message spells out


class CheckpointError(ValueError):
    """The files of a checkpoint do not fit the model."""


def register() -> None:
    """Makes transformers' Auto classes know Ouro and the byte tokenizer. Calling it again changes nothing."""
    AutoConfig.register("ouro", OuroConfig, exist_ok=True)
    AutoModel.register(OuroConfig, OuroModel, exist_ok=True)
    AutoModelForCausalLM.register(OuroConfig, OuroForCausalLM, exist_ok=True)
    AutoTokenizer.register(ByteTokenizerOwner, tokenizer_class=ByteTokenizer, exist_ok=True)


def resolve_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name, with or without "torch."; None and "auto" give None (the checkpoint's
    own).

    Raises:
        ArgumentError: for a name that is no floating point dtype.
    """
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        limit = "must be 'auto' or a floating point dtype such as 'float32' or 'bfloat16'"
        raise ArgumentError("dtype", dtype, limit, "pass for example dtype='bfloat16'")
    return found


def load_with_info(
    name_or_path: str | Path, dtype: str | torch.dtype | None = None, **options: Any
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """(model, transformers' loading report), without judging the report. Safetensors only."""
    register()
    wanted = resolve_dtype(dtype) or "auto"
    name, found = source_options(name_or_path, **options)
    options = {"trust_remote_code": False, "use_safetensors": True, **found, **options}
    try:
        with naming(name_or_path):
            model, info = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=wanted,
                ignore_mismatched_sizes=True,  # collected in the report, with everything else that is wrong
                output_loading_info=True,
                **options,
            )
    except UnknownModelError:
        raise
    except (ValueError, KeyError, SafetensorError) as error:
        raise CheckpointError(
            f"transformers {transformers.__version__} cannot load {name!r} as a causal language model: "
            f"{error}"
        ) from error
    return model.eval(), info


def load_model(
    name_or_path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Loads a causal language model in eval mode, strictly.

    Args:
        name_or_path: a Hugging Face hub id; a local folder (no network call); ``demo``, the small trained
            model of this package; or ``tiny:ouro``, ``tiny:dory``, ``tiny:hrm-text``, a small random model.
        dtype: "float32", torch.bfloat16, ...; None or "auto" is the checkpoint's own (float32 for tiny
            models).
        device: where to put it; None leaves it on the CPU.
        options: given to ``from_pretrained`` (``revision``, ``attn_implementation``, configuration fields
            ...); for tiny models ``seed`` and configuration fields. No remote code runs unless
            ``trust_remote_code=True``.

    Raises:
        ArgumentError: for a device that is not there.
        CheckpointError: for missing, unexpected or mis-shaped tensors (all are listed), and for a model
            that the installed transformers cannot load.
        FileNotFoundError: for a path that is no folder.
        UnknownModelError: for a name that is neither in this package nor a folder nor to be had from the hub.
        ValueError: for an unknown tiny model or dtype.
    """
    where = None if device is None else usable_device(device)
    if isinstance(name_or_path, str) and name_or_path.startswith(TINY_PREFIX):
        model = tiny_model(
            name_or_path.removeprefix(TINY_PREFIX), resolve_dtype(dtype) or torch.float32, **options
        )
    else:
        model, info = load_with_info(name_or_path, dtype, **options)
        _require_complete(str(name_or_path), info)
    return model if where is None else model.to(where)


def usable_device(device: str | torch.device) -> torch.device:
    """The device, after something has been put there. Raises ArgumentError for one that cannot be used."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        limit = f"cannot be used here: {str(error).splitlines()[0]}"
        raise ArgumentError("device", device, limit, "pass device='cpu'") from None
    return found


def load_ouro(
    name_or_path: str | Path,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    **options: Any,
) -> OuroForCausalLM:
    """:func:`load_model` for an Ouro checkpoint, the published ones included. Runs no remote code.

    Raises:
        CheckpointError: also when the checkpoint is of another model.
    """
    model = load_model(name_or_path, dtype, device, **options)
    if not isinstance(model, OuroForCausalLM):
        raise CheckpointError(f"{str(name_or_path)!r} is a {type(model).__name__}, not an Ouro model")
    return model


def load_tokenizer(name_or_path: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model that :func:`load_model` can load, padding on the left.

    Raises:
        FileNotFoundError, UnknownModelError: as :func:`load_model`.
    """
    if isinstance(name_or_path, str) and name_or_path.startswith(TINY_PREFIX):
        return tiny_tokenizer(**options)
    register()
    name, found = source_options(name_or_path, **options)
    with naming(name_or_path):
        return AutoTokenizer.from_pretrained(
            name, **{"padding_side": "left", "trust_remote_code": False, **found, **options}
        )


def _require_complete(name: str, info: dict[str, Any]) -> None:
    shapes = [
        f"{key}: file {tuple(found)}, model {tuple(own)}" for key, found, own in info["mismatched_keys"]
    ]
    problems = [
        _problem("missing from the files", info["missing_keys"]),
        _problem("not part of the model", info["unexpected_keys"]),
        _problem("of another shape", shapes),
        _problem("not convertible", info["error_msgs"]),
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise CheckpointError(
            f"the checkpoint {name!r} does not fit its model. Tensors "
            + "; ".join(found)
            + ". Check that config.json "
            "and the safetensors files belong together and that all files are there."
        )


def _problem(what: str, entries: Any) -> str:
    entries = sorted(entries)
    if not entries:
        return ""
    more = f" and {len(entries) - _LISTED} more" if len(entries) > _LISTED else ""
    return f"{what} ({len(entries)}): {', '.join(entries[:_LISTED])}{more}"
