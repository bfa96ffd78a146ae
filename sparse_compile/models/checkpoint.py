"""Is the model in memory the one in its files?

Tensors are compared bit by bit, rotary tables with their formula.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from .loading import CheckpointError, load_model, load_with_info
from .rotary_check import BufferCheck, check_rotary_buffers
from .sources import TINY_PREFIX, source_options

_FILE_OPTIONS = ("revision", "token", "cache_dir", "subfolder", "local_files_only")


@dataclass(frozen=True)
class TensorDifference:
    """A tensor of the files whose value in the model is another one."""

    name: str
    elements: int  # elements that differ in at least one bit
    of: int  # elements in all
    largest: float  # largest absolute difference; nan where a value is nan


@dataclass(frozen=True)
class ShapeDifference:
    name: str
    file_shape: tuple[int, ...]
    model_shape: tuple[int, ...]


@dataclass(frozen=True)
class CheckpointReport:
    """What :func:`check_checkpoint` found. ``ok`` is the verdict, ``str()`` a text of a few lines."""

    source: str
    model: str  # class name
    dtype: str  # of the model; tensors of the files are cast to it before they are compared
    compared: int  # tensors compared bit by bit
    differing: tuple[TensorDifference, ...]
    missing: tuple[str, ...]  # of the model, in no file
    unexpected: tuple[str, ...]  # in the files, not of the model
    ignored: tuple[str, ...]  # in the files; the model class declares that it does not want them
    mismatched: tuple[ShapeDifference, ...]
    reinitialised: tuple[str, ...]  # the value changed between two loads: random, not read from the files
    rotary: tuple[BufferCheck, ...]
    unchecked_buffers: tuple[str, ...]  # buffers outside the files for which no formula is known

    @property
    def ok(self) -> bool:
        wrong = (self.differing, self.missing, self.unexpected, self.mismatched, self.reinitialised)
        return not any(wrong) and all(buffer.ok for buffer in self.rotary)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data for JSON, with ``ok``."""
        return {"ok": self.ok, **asdict(self)}

    def __str__(self) -> str:
        verdict = "identical to its files" if self.ok else "DIFFERS from its files"
        lines = [
            f"{self.model} from {self.source} ({self.dtype}): {verdict}, {self.compared} tensors compared, "
            f"{len(self.rotary)} rotary buffers checked"
        ]
        lines += [
            f"  differs: {d.name} ({d.elements} of {d.of} elements, largest {d.largest:.3g})"
            for d in self.differing
        ]
        lines += [f"  missing from the files: {name}" for name in self.missing]
        lines += [f"  not part of the model: {name}" for name in self.unexpected]
        lines += [
            f"  another shape: {m.name} (file {m.file_shape}, model {m.model_shape})" for m in self.mismatched
        ]
        lines += [f"  random at each load: {name}" for name in self.reinitialised]
        lines += [f"  rotary buffer: {b.name}: {b.reason}" for b in self.rotary if not b.ok]
        return "\n".join(lines)


def check_checkpoint(
    model: PreTrainedModel | str | Path,
    checkpoint: str | Path | None = None,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> CheckpointReport:
    """Compares a model with its safetensors files.

    Args:
        model: a loaded model; or a folder, hub id or ``tiny:NAME``, which is loaded here the way users
            load it. (A tiny model is saved to a temporary folder and loaded from there.)
        checkpoint: where the files are; default: where the model came from.
        dtype: to load in, when a name is given. None: the checkpoint's own.
        options: given to ``from_pretrained``, when a name is given; of a given model only those saying where
            files are (``revision``, ``token``, ``cache_dir`` ...) are used.

    A named model with a problem is loaded a second time under another random seed: tensors that differ
    between the loads are random and reported as ``reinitialised``.

    Raises:
        CheckpointError: when there are no safetensors files, or a given model does not say where it came
        from.
    """
    if isinstance(model, PreTrainedModel):
        source = checkpoint or model.name_or_path
        if not source:
            raise CheckpointError("this model was not loaded from files; name them: checkpoint=FOLDER")
        return _compare(model, source, _file_options(options, model))
    if isinstance(model, str) and model.startswith(TINY_PREFIX):
        with tempfile.TemporaryDirectory() as folder:
            load_model(model, dtype, **options).save_pretrained(folder)
            return _load_and_compare(folder, folder, dtype, {}, label=model)
    return _load_and_compare(model, checkpoint or model, dtype, options, label=str(model))


def _load_and_compare(
    name: str | Path,
    checkpoint: str | Path,
    dtype: str | torch.dtype | None,
    options: dict[str, Any],
    label: str,
) -> CheckpointReport:
    def load(seed: int) -> PreTrainedModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return load_with_info(name, dtype, **options)[0]

    model = load(seed=0)
    where = _file_options(options, model)
    report = _compare(model, checkpoint, where, label)
    if report.differing or report.missing or report.mismatched:
        return _compare(model, checkpoint, where, label, second=load(seed=1))
    return report


def _file_options(options: dict[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """Those options that say where files are. From a hub, the very commit the model was loaded from."""
    where = {name: options[name] for name in _FILE_OPTIONS if name in options}
    commit = getattr(model.config, "_commit_hash", None)
    return where if commit is None else {"revision": commit, **where}


def _compare(
    model: PreTrainedModel,
    checkpoint: str | Path,
    where: dict[str, Any],
    label: str = "",
    second: PreTrainedModel | None = None,
) -> CheckpointReport:
    own = revert_weight_conversion(model, model.state_dict())  # under the names of the files
    in_files: set[str] = set()
    unexpected: list[str] = []
    differing: list[TensorDifference] = []
    mismatched: list[ShapeDifference] = []
    for name, tensor in _file_tensors(checkpoint, where):
        in_files.add(name)
        if name not in own:
            unexpected.append(name)
        elif tensor.shape != own[name].shape:
            mismatched.append(ShapeDifference(name, tuple(tensor.shape), tuple(own[name].shape)))
        elif difference := _difference(name, tensor, own[name].detach()):
            differing.append(difference)
    ignored = [name for name in unexpected if _is_ignored(name, model)]
    rotary, unchecked = check_rotary_buffers(model)
    return CheckpointReport(
        source=label or str(checkpoint),
        model=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        compared=len(in_files) - len(unexpected) - len(mismatched),
        differing=tuple(sorted(differing, key=lambda d: d.name)),
        missing=tuple(_missing(own, in_files)),
        unexpected=tuple(sorted(set(unexpected) - set(ignored))),
        ignored=tuple(sorted(ignored)),
        mismatched=tuple(sorted(mismatched, key=lambda m: m.name)),
        reinitialised=() if second is None else tuple(_changed(model, second)),
        rotary=rotary,
        unchecked_buffers=unchecked,
    )


def _file_tensors(checkpoint: str | Path, where: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor on the CPU) of every tensor in the files, one at a time."""
    for path in _checkpoint_files(checkpoint, where):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (this object cannot be iterated)
                yield name, file.get_tensor(name)


def _checkpoint_files(checkpoint: str | Path, where: dict[str, Any]) -> list[str]:
    """Paths of the safetensors files of a folder or a hub id, sharded or not."""
    name, options = source_options(checkpoint, **where)

    def find(file: str) -> str | None:
        return cached_file(name, file, _raise_exceptions_for_missing_entries=False, **{**where, **options})

    if single := find(SAFE_WEIGHTS_NAME):
        return [single]
    index = find(SAFE_WEIGHTS_INDEX_NAME)
    if index is None:
        raise CheckpointError(f"no {SAFE_WEIGHTS_NAME} and no {SAFE_WEIGHTS_INDEX_NAME} in {name!r}")
    shards = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    paths = {shard: find(shard) for shard in shards}
    if absent := [shard for shard, path in paths.items() if path is None]:
        raise CheckpointError(f"{name!r} lists files that are not there: {', '.join(absent)}")
    return [path for path in paths.values() if path is not None]


def _difference(name: str, file: Tensor, own: Tensor) -> TensorDifference | None:
    own = own.cpu()
    file = file.to(own.dtype)
    unequal = _bits(file) != _bits(own)
    elements = int(unequal.sum())
    if elements == 0:
        return None
    largest = float((file.double() - own.double()).abs().max())
    return TensorDifference(name, elements, own.numel(), largest)


def _bits(tensor: Tensor) -> Tensor:
    """The same bits as integers: nan equals itself, and 0.0 differs from -0.0."""
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(views[tensor.element_size()])


def _missing(own: dict[str, Tensor], in_files: set[str]) -> list[str]:
    """Tensors of the model in no file. A tied tensor is there when its twin is."""
    stored = {_storage(own[name]) for name in in_files if name in own}
    return sorted(name for name in own if name not in in_files and _storage(own[name]) not in stored)


def _storage(tensor: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def _is_ignored(name: str, model: PreTrainedModel) -> bool:
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_unexpected or ())


def _changed(first: PreTrainedModel, second: PreTrainedModel) -> list[str]:
    """Names, in the model's own spelling, of tensors that two loads gave different bits."""
    others = second.state_dict()
    return sorted(n for n, t in first.state_dict().items() if not torch.equal(_bits(t), _bits(others[n])))
