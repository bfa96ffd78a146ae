"""Quantised models: torchao's, and a stand-in for its weights that needs nothing installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

aten = torch.ops.aten


class StandIn(torch.Tensor):
    """A weight of int8 numbers with a scale per line, which computes F.linear in its own way, as torchao's do."""

    qdata: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, qdata: torch.Tensor, scale: torch.Tensor) -> StandIn:
        made = torch.Tensor._make_wrapper_subclass(cls, qdata.shape, dtype=scale.dtype, device=qdata.device)
        made.qdata, made.scale = qdata, scale
        return made

    @classmethod
    def quantise(cls, weight: torch.Tensor) -> StandIn:
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return cls((weight / scale).round().to(torch.int8), scale)

    def dequantize(self) -> torch.Tensor:
        return self.qdata.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["qdata", "scale"], None

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: Any, size: Any, stride: Any
    ) -> StandIn:
        return cls(**inner)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and isinstance(args[1], cls):
            x, weight, bias = (*args, None)[:3]
            out = (x @ weight.qdata.to(x.dtype).t()) * weight.scale[:, 0]
            return out if bias is None else out + bias
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default, aten.clone.default):
            return cls(func(args[0].qdata), func(args[0].scale))
        raise NotImplementedError(f"a quantised weight knows no {func}")


def stand_in(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(StandIn.quantise(module.weight.detach()), requires_grad=False)


def _torchao(config: str) -> Callable[[nn.Module], None]:
    def quantise(model: nn.Module) -> None:
        reason = "torchao is not installed: its own weights are not tested, the stand-in's are"
        torchao = pytest.importorskip("torchao.quantization", reason=reason)
        torchao.quantize_(model, getattr(torchao, config)())

    return quantise


QUANTISERS = {
    "stand-in": stand_in,
    "torchao-int8": _torchao("Int8WeightOnlyConfig"),
    "torchao-fp8": _torchao("Float8WeightOnlyConfig"),
}
