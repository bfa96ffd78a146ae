"""Where a model of a name comes from: this package, a folder, or the hub; one error where it is nowhere."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from sparse_compile.errors import ArgumentError

from .presets import DEMO, PRESETS, TINY_MODELS, demo_folder, preset_config, tiny_config

TINY_PREFIX = "tiny:"
_HUB_OPTIONS = ("revision", "token")
_HUB_SECONDS = 10.0  # that the hub may take for its first answer


class UnknownModelError(ArgumentError):
    """No model of this name can be had: it is no preset, no folder, and not to be had from the hub."""

    def __str__(self) -> str:
        return f"{self.argument} {self.value!r}: {self.limit}; {self.remedy}"


def is_hub_name(name_or_path: str | Path) -> bool:
    """Whether a name can only be one of the hub: not of this package, no folder, and not written like a path."""
    name = os.path.expanduser(os.fspath(name_or_path))
    if isinstance(name_or_path, Path) or os.path.isabs(name) or str(name_or_path).startswith((".", "~")):
        return False
    known = name in PRESETS or name.startswith(TINY_PREFIX)
    return not known and not os.path.isdir(name)


def source_options(name_or_path: str | Path, **options: Any) -> tuple[str, dict[str, Any]]:
    """(name for transformers, options): a local folder is never looked up on the network, and "demo" is a folder of
    this package. options: of `from_pretrained`; those that say where on the hub are used here.

    Raises:
        FileNotFoundError: for what is written like a path (starting with "/", "." or "~") and is no folder; for "demo"
            without its weights.
        UnknownModelError: for a preset that has no weights, and for a name that the hub does not give.
    """
    if name_or_path == DEMO:
        return str(demo_folder()), {"local_files_only": True}
    name = os.path.expanduser(os.fspath(name_or_path))
    if os.path.isdir(name):
        return name, {"local_files_only": True}
    if name in PRESETS:
        limit = (
            "is a preset, a shape without weights, which only `plan` and `selftest` of the command line take"
        )
        remedy = "pass demo or tiny:ouro, or the hub id of published weights such as ByteDance/Ouro-1.4B"
        raise UnknownModelError("MODEL", name, limit, remedy)
    if not is_hub_name(name_or_path):
        raise FileNotFoundError(f"no model folder at {name!r}")
    if not options.get("local_files_only"):
        _ask_hub(name, options)
    return name, {}


def load_config(name: str) -> PreTrainedConfig:
    """The configuration of a preset, a `tiny:` model, a local folder (no network call) or a hub id. A folder with the
    name of a preset comes first, but for "demo". Raises as `source_options` does.
    """
    if name == DEMO or (name in PRESETS and not os.path.isdir(name)):
        return preset_config(name)
    if name.startswith(TINY_PREFIX):
        return tiny_config(name.removeprefix(TINY_PREFIX))
    path, options = source_options(name)
    with naming(name):
        return AutoConfig.from_pretrained(path, trust_remote_code=False, **options)


@contextmanager
def naming(name_or_path: str | Path) -> Iterator[None]:
    """What goes wrong with files of the hub becomes an error that says of which model."""
    try:
        yield
    except OSError as error:
        if not is_hub_name(name_or_path):
            raise
        raise _unknown(str(name_or_path), f"it cannot be had from the hub: {_reason(error)}") from error


def _ask_hub(name: str, options: dict[str, Any]) -> None:
    """Raise UnknownModelError unless the hub has a model of this name, or its configuration is in the cache.

    transformers asks again and again for half a minute before it says that there is no network. This asks once.
    """
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = {key: options[key] for key in ("cache_dir", "revision") if options.get(key) is not None}
    asked = {key: options[key] for key in _HUB_OPTIONS if options.get(key) is not None}
    try:
        if isinstance(try_to_load_from_cache(name, "config.json", **where), str):
            return
        HfApi().model_info(name, timeout=_HUB_SECONDS, **asked)
    except HFValidationError:
        raise _unknown(name, "it is no hub id, which is written owner/name") from None
    except GatedRepoError:
        raise _unknown(name, "the hub gives it only to accounts that asked for it (hf auth login)") from None
    except RevisionNotFoundError:
        raise _unknown(name, f"the hub has no revision {options.get('revision')!r} of it") from None
    except RepositoryNotFoundError:
        raise _unknown(name, "the hub has no such model, or only for its owner (hf auth login)") from None
    except Exception as error:  # of the transport, whose library differs by version
        raise _unknown(name, f"the hub cannot be reached: {_reason(error)}") from error


def _unknown(name: str, hub: str) -> UnknownModelError:
    """hub: what the hub says, or what keeps it from saying anything."""
    if "/" in name:
        remedy = "pass a folder or another hub id, or demo, which needs no network"
        return UnknownModelError("MODEL", name, f"no folder, and {hub}", remedy)
    known = [*PRESETS, *(TINY_PREFIX + tiny for tiny in TINY_MODELS)]
    close = difflib.get_close_matches(name, known, n=1)
    listed = ", ".join([*close, *(one for one in known if one not in close)])
    remedy = f"did you mean {close[0]}?" if close else "pass one of these, a folder, or a hub id: owner/name"
    return UnknownModelError("MODEL", name, f"no preset ({listed}), no folder, and {hub}", remedy)


def _reason(error: BaseException) -> str:
    """One short line: what the error that all others come from says."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return str(text).strip().splitlines()[0][:160]
