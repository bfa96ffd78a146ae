"""Is the model still the one that was compiled? Asked once per call, on the host, without reading a weight."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.modules import module as global_hooks

from sparse_compile.config import first_frame_outside
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
    """What a program was made from: modules, their code and hooks, parameters, buffers and settings at one time.

    Values written into the same tensors (`load_state_dict`, an optimiser step) are no change: the program
    reads the very memory of the model on every step. Another tensor, module, device, dtype or shape is one, so is
    other memory under the same tensor (`parameter.data = ...`, which joined weights and CUDA graphs would not see),
    and so is another setting that the forward may read. So are another `forward` and forward hooks: the program has
    what they did to tensors when they were traced, and calls none of them.

    traced: the hooks that there were, and the modules with a forward of their own, in words.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._parts = dict(_parts(model))
        self._settings = _settings(model)
        self._places = list(_places(model))
        tensors = [
            part for _, _, value in self._places if isinstance(value, torch.Tensor) for part in parts(value)
        ]
        self._addresses = [(part, part.data_ptr()) for part in tensors if is_plain(part)]
        self._counted = [part for part in tensors if not part.is_inference()]
        self._forwards, self._hooks = dict(_forwards(model)), dict(_hooks(model))
        self.traced = (
            *(f"{_words(hooks)} among {name}" for name, hooks in self._hooks.items()),
            *(f"{_word(found)} as {name}" for name, (found, own) in self._forwards.items() if own),
        )

    def check(self) -> None:
        """Raise StaleModelError when the model is no longer what the program was made from."""
        found = dict(_parts(self._model))
        for name in dict.fromkeys((*self._parts, *found)):
            before, now = self._parts.get(name), found.get(name)
            if before != now:
                raise StaleModelError(f"{name} {_difference(before, now)}")
        self._check_calls()
        settings = _settings(self._model)
        for name in dict.fromkeys((*self._settings, *settings)):
            if settings.get(name) != self._settings.get(name):
                was, now = self._settings.get(name), settings.get(name)
                raise StaleModelError(f"config.{name} was {was!r} and is {now!r}")

    def weights(self) -> int:
        """The part of `check` that is fast enough for every request: whether the model has still the modules and
        tensors that the program reads. Returns a number that grows when values are written into them, unless through
        `parameter.data`, by a fused optimizer, or into tensors of inference mode: that leaves no trace.
        """
        same = all(table.get(name) is value for table, name, value in self._places)
        if not same or any(part.data_ptr() != address for part, address in self._addresses):
            self.check()
        return sum(part._version for part in self._counted)

    def _check_calls(self) -> None:
        for name, now in _forwards(self._model):
            before = self._forwards[name]
            if before != now:
                raise StaleModelError(f"{name} was {_word(before[0])} and is {_word(now[0])}")
        hooks = dict(_hooks(self._model))
        for name in dict.fromkeys((*self._hooks, *hooks)):
            was, are = self._hooks.get(name, ()), hooks.get(name, ())
            if was != are:
                raise StaleModelError(f"{name} were {_words(was)} and are {_words(are)}")


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


def _places(model: torch.nn.Module) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """(table, name, what is there) of every module, parameter and buffer."""
    for module in model.modules():
        for table in (module._modules, module._parameters, module._buffers):
            for name, value in table.items():
                if value is not None:
                    yield table, name, value


# One hook: the function, and whether it is given keyword arguments, and is called after an error too.
_Hook = tuple[_Same, bool, bool]


def _forwards(model: torch.nn.Module) -> Iterator[tuple[str, tuple[_Same, bool]]]:
    """(words, what a module's call runs and whether that is the module's own, not its class's) of every module."""
    of_classes: dict[type, _Same] = {}
    for path, module in model.named_modules():
        own, kind = module.__dict__.get("forward"), type(module)
        if kind not in of_classes:
            # As it lies in the class: looking it up may make another object every time.
            tables = (base.__dict__ for base in kind.__mro__)
            of_classes[kind] = _Same(next((one["forward"] for one in tables if "forward" in one), None))
        found = of_classes[kind] if own is None else _Same(own)
        yield f"the forward of {path or 'the model'}", (found, own is not None)


def _hooks(model: torch.nn.Module) -> Iterator[tuple[str, tuple[_Hook, ...]]]:
    """(words, hooks) of every module that has forward hooks, and of those for all modules of the process.

    transformers' hooks for output_hidden_states are left out: they come with the first call that asks for them, stay,
    and change nothing.
    """
    yield from _named_hooks(
        "all modules",
        global_hooks._global_forward_pre_hooks,
        {},
        global_hooks._global_forward_hooks,
        global_hooks._global_forward_hooks_with_kwargs,
        global_hooks._global_forward_hooks_always_called,
    )
    for path, module in model.named_modules():
        if module._forward_pre_hooks or module._forward_hooks:
            yield from _named_hooks(
                path or "the model",
                module._forward_pre_hooks,
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks,
                module._forward_hooks_with_kwargs,
                module._forward_hooks_always_called,
            )


def _named_hooks(
    name: str,
    before: Mapping[int, Callable[..., Any]],
    before_with_kwargs: Mapping[int, bool],
    after: Mapping[int, Callable[..., Any]],
    after_with_kwargs: Mapping[int, bool],
    always: Mapping[int, bool],
) -> Iterator[tuple[str, tuple[_Hook, ...]]]:
    for words, hooks, with_kwargs, called in (
        ("forward pre-hooks", before, before_with_kwargs, {}),
        ("forward hooks", after, after_with_kwargs, always),
    ):
        found = tuple(
            (_Same(hook), number in with_kwargs, number in called)
            for number, hook in hooks.items()
            if not str(getattr(hook, "__module__", "")).startswith("transformers.utils.")
        )
        if found:
            yield f"the {words} of {name}", found


def _word(found: _Same) -> str:
    return getattr(found.value, "__qualname__", None) or type(found.value).__qualname__


def _words(hooks: tuple[_Hook, ...]) -> str:
    return ", ".join(_word(found) for found, *_ in hooks) or "none"


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


def warn_of_hooks(traced: tuple[str, ...]) -> None:
    """Warn that hooks ran while the model was traced, and never will again: whatever they do beside tensors is lost."""
    if traced:
        more = f" and {len(traced) - 3} more" if len(traced) > 3 else ""
        warnings.warn(
            f"{'; '.join(traced[:3])}{more}: what hooks and replaced forwards do to tensors is in the compiled "
            "program; what else they do (logging, recording) happened while compiling only",
            UserWarning,
            stacklevel=first_frame_outside(),
        )
