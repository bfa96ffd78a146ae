"""A training run on disk: few small files from which it goes on exactly where it was.

    model.safetensors      the weights in bfloat16, ready to be used
    residual.safetensors   what rounding to bfloat16 took from the float32 parameters, int16
    optimizer.safetensors  momentum in bfloat16, as the optimizer keeps it, and Adam's state
    config.json            of the model
    state.json             the recipe, the step, the digest of the text, minutes so far, figures
    log.jsonl              what happened

6 bytes per parameter and a little, and no file larger than the weights.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.demo.optimizer import Optimizer
from benchmarks.demo.recipe import Recipe, as_tuples
from sparse_compile.models import OuroForCausalLM

TENSORS = ("model", "residual", "optimizer")


class ResumeError(ValueError):
    """A checkpoint cannot be gone on with."""


@dataclass
class State:
    """Where a run is. step: how many are done."""

    recipe: Recipe
    digest: str
    step: int = 0
    minutes: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


def split(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """float32 -> (bfloat16, rounded; int16, the rest of the bits). Nothing is lost: see :func:`join`."""
    bits = tensor.detach().cpu().contiguous().view(torch.int32)
    high = (bits + 0x8000) >> 16
    return high.to(torch.int16).view(torch.bfloat16), (bits - (high << 16)).to(torch.int16)


def join(rounded: Tensor, rest: Tensor) -> Tensor:
    """The float32 tensor that :func:`split` took apart."""
    high = rounded.contiguous().view(torch.int16).to(torch.int32)
    return ((high << 16) + rest.to(torch.int32)).view(torch.float32)


def save(folder: Path, model: OuroForCausalLM, optimizer: Optimizer, state: State) -> None:
    """Write all files under other names, then rename them: what is there is never half of something."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = {name: split(p) for name, p in model.state_dict().items()}
    tensors = {
        "model": {name: rounded for name, (rounded, _) in parts.items()},
        "residual": {name: rest for name, (_, rest) in parts.items()},
        "optimizer": {name: t.cpu().contiguous() for name, t in optimizer.state().items()},
    }
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving-") as made:
        for kind, named in tensors.items():
            metadata = {"format": "pt", "step": str(state.step)}
            save_file(named, Path(made, f"{kind}.safetensors"), metadata=metadata)
        model.config.architectures = [type(model).__name__]
        model.config.dtype = torch.bfloat16
        model.config.to_json_file(Path(made, "config.json"))
        Path(made, "state.json").write_text(json.dumps(asdict(state), indent=2))
        for file in sorted(os.listdir(made)):
            os.replace(Path(made, file), folder / file)


def load(folder: Path, model: OuroForCausalLM, optimizer: Optimizer, digest: str) -> State:
    """Fill model and optimizer from a checkpoint, and give its state. digest: of the text that is there now.

    Raises:
        ResumeError: for no or a torn checkpoint, or other text.
    """
    found = read_state(folder)
    if found.digest != digest:
        raise ResumeError(
            f"{folder} was trained on other text (digest {found.digest}, here {digest}): go on with the same "
            "versions of Python, torch and transformers"
        )
    tensors = {kind: _read(folder / f"{kind}.safetensors", found.step) for kind in TENSORS}
    for name, tensor in model.state_dict().items():
        tensor.copy_(join(tensors["model"][name], tensors["residual"][name]))
    optimizer.load(tensors["optimizer"])
    return found


def read_state(folder: Path) -> State:
    """The state of a checkpoint.

    Raises:
        ResumeError: when there is none.
    """
    path = folder / "state.json"
    if not path.exists():
        raise ResumeError(f"there is no checkpoint in {folder}: no state.json")
    known = json.loads(path.read_text())
    recipe = {name: as_tuples(value) for name, value in known["recipe"].items()}
    return State(**{**known, "recipe": Recipe(**recipe)})


def _read(path: Path, step: int) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        if (file.metadata() or {}).get("step") != str(step):
            raise ResumeError(
                f"{path.name} is of step {(file.metadata() or {}).get('step')}, state.json of {step}"
            )
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
