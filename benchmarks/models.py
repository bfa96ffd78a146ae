"""The models that are measured: published shapes with random weights, and the setup that benchmarks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DoryConfig, HrmTextConfig, PreTrainedConfig, PreTrainedModel

from benchmarks.systems import Setup
from benchmarks.timing import need_gpu
from sparse_compile.config import SparseConfig
from sparse_compile.models import preset_config, random_model, tiny_model


@dataclass(frozen=True)
class Shape:
    """A published size of a model, the tiny model of its kind, the loop in which it can capture, and weights that are
    made smaller: (the last part of their names, factor).
    """

    config: Callable[[], PreTrainedConfig]
    tiny: str
    capture_loop: int = 1
    smaller: tuple[str, float] = ("", 1.0)


MODELS = {
    "ouro-1.4b": Shape(lambda: preset_config("ouro-1.4b"), "ouro"),
    "ouro-2.6b": Shape(lambda: preset_config("ouro-2.6b"), "ouro"),
    # Dory has two loops: what its second one consumes is captured in the first.
    # The rates at which its layers change the state are a quarter of what they begin with: 112 random layers at their
    # own rates make noise of rounding (logits in bfloat16 are off by 0.8 of their size, at a quarter by 0.03).
    "dory": Shape(
        lambda: DoryConfig(recurrent_kv_cache_mode="per_loop"),
        "dory",
        capture_loop=0,
        smaller=("lambda", 0.25),
    ),
    "hrm-text": Shape(HrmTextConfig, "hrm-text"),
}


@torch.no_grad()
def make_smaller(model: PreTrainedModel, name: str, factor: float) -> PreTrainedModel:
    """Multiplies the parameters whose last part begins with `name`; "" means none. ValueError where there is none."""
    if not name:
        return model
    meant = [weight for path, weight in model.named_parameters() if path.rpartition(".")[2].startswith(name)]
    if not meant:
        raise ValueError(
            f"{name!r} begins no name of the parameters of {type(model).__name__}; see benchmarks.models"
        )
    for weight in meant:
        weight.mul_(factor)
    return model


def make_setup(name: str, *, tiny: bool, room: int, **options: Any) -> Setup:
    """A model of MODELS and what all systems share. tiny: the small one of its kind, in float32 on the CPU and not
    compiled; otherwise bfloat16, on a GPU (SystemExit without). room: tokens that a sequence can get beyond its
    context. options: of `SparseConfig`.
    """
    if not tiny:
        need_gpu()
    shape = MODELS[name]
    device = torch.device("cpu" if tiny else "cuda")
    common: dict[str, Any] = {"capture_loop": shape.capture_loop, "validate": False, "progress": False}
    config = SparseConfig(**common, **options).for_device(device.type)
    if tiny:
        torch.set_num_threads(1)
        model = tiny_model(shape.tiny)
    else:
        with torch.device(device):
            model = make_smaller(random_model(shape.config(), torch.bfloat16), *shape.smaller)
    named = f"tiny:{shape.tiny}" if tiny else name
    return Setup(named, model.to(device), config, room, compile_backend="eager" if tiny else "inductor")
