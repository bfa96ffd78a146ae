"""Is the model still the one that was compiled? Asked once per call, on the host, without reading a weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from sparse_compile.errors import ArgumentError, StaleModelError
from sparse_compile.passes.weights import is_plain, parts

# Settings of a config that no forward of a decoding step depends on; token ids are read anew by every call.
_INERT = frozenset(
    (
        "architectures",
        "dtype",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    )
)


class ModelState:
    """What a program was made from: the modules, parameters, buffers and settings of a model at one time.

    Values written into the same tensors (`load_state_dict`, an optimiser step) are no change: the program
    reads the very memory of the model on every step. Another tensor, module, device, dtype or shape is one, so is
    other memory under the same tensor (`parameter.data = ...`, which joined weights and CUDA graphs would not see),
    and so is another setting that the forward may read.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parts = dict(_parts(model))
        self._settings = _settings(model)

    def check(self) -> None:
        """Raise StaleModelError when the model is no longer what the program was made from."""
        found = dict(_parts(self._model))
        for name in dict.fromkeys((*self._parts, *found)):
            before, now = self._parts.get(name), found.get(name)
            if before != now:
                raise StaleModelError(f"{name} {_difference(before, now)}")
        settings = _settings(self._model)
        for name in dict.fromkeys((*self._settings, *settings)):
            if settings.get(name) != self._settings.get(name):
                was, now = self._settings.get(name), settings.get(name)
                raise StaleModelError(f"config.{name} was {was!r} and is {now!r}")


class _Same:
    """An object compared by identity, and kept alive so that its identity is not reused."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    __hash__ = None  # type: ignore[assignment]


def _parts(model: torch.nn.Module) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name, identity and layout) of every module, parameter and buffer."""
    for path, module in model.named_modules():
        yield path or "the model", (_Same(module),)
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    layout = (tensor.dtype, tensor.device, tuple(tensor.shape))
                    addresses = tuple(part.data_ptr() for part in parts(tensor) if is_plain(part))
                    yield f"{path}.{name}".lstrip("."), (_Same(tensor), *layout, addresses)


def _difference(before: tuple[Any, ...] | None, now: tuple[Any, ...] | None) -> str:
    if before is None:
        return "was added"
    if now is None:
        return "was removed"
    changed = [f"was {a} and is {b}" for a, b in zip(before[1:4], now[1:4], strict=False) if a != b]
    if changed:
        return ", ".join(changed)
    return "was replaced by another object" if before[0] != now[0] else "was moved to other memory"


def _settings(model: torch.nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else {}
    return {
        name: value
        for name, value in values.items()
        if name not in _INERT and not name.startswith("_") and not name.endswith("token_id")
    }


def refuse_autocast(device: torch.device) -> None:
    """Raise ArgumentError inside an autocast region: it would change the dtype of single operations of the
    program, whose KV pool has the model's dtype.
    """
    if torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        limit = "the compiled program runs in the dtype of its weights"
        remedy = f"leave the autocast region, or compile the model in that dtype: model.to({dtype})"
        raise ArgumentError("autocast", str(dtype), limit, remedy)
