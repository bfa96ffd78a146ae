"""What a model would do, from its configuration alone: no weights, no device, nothing is computed.

The model is built on the meta device and called on two tokens. Every attention call between tokens is noted with its
module and its shapes, and so is the size of everything that is computed between one such call and the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .attention import attention_override, evaluation_mode
from .base import Options
from .errors import UnsupportedModel
from .program import Site
from .schedule import schedule_sites
from .sites import refuse_hopeless
from .weights import named_tensors

_TOKENS = 2  # one would not tell attention between tokens from attention within a token


@dataclass(frozen=True)
class Survey:
    """What one forward of a token does.

    Attributes:
        sites: its attention calls, scheduled.
        weight_bytes: bytes of all parameters and buffers, tied ones once.
        parameters: number of parameters, tied ones once.
        layer_bytes: bytes of everything that one row makes between two attention calls, the largest such stretch.
        vocabulary: logits per row.
    """

    sites: tuple[Site, ...]
    weight_bytes: int
    parameters: int
    layer_bytes: int
    vocabulary: int


class _Sizes(TorchDispatchMode):
    """Adds up the memory of new results; `stretches` starts a new sum at every attention call."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.alive = [tensor.untyped_storage() for tensor in known]  # kept, so that no identity is used twice
        self.seen = {storage._cdata for storage in self.alive}
        self.stretches = [0]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.seen:
                self.alive.append(tensor.untyped_storage())
                self.seen.add(self.alive[-1]._cdata)
                self.stretches[-1] += tensor.nbytes
        return result


def _recorder(model: nn.Module, sizes: _Sizes, calls: list[dict[str, Any]]) -> Callable[..., Any]:
    names = {id(module): name for name, module in model.named_modules()}

    def attention(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        softcap: float | None = None,
        sliding_window: int | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        out = torch.empty_like(query).transpose(1, 2)
        if query.shape[2] != _TOKENS:  # within one token
            return out, None
        calls.append(
            {
                "layer": names.get(id(module), type(module).__name__),
                "heads": query.shape[1],
                "kv_heads": key.shape[1],
                "head_dim": query.shape[3],
                "scale": float(scaling if scaling is not None else query.shape[-1] ** -0.5),
                "window": int(sliding_window or 0),
                "softcap": float(softcap or 0.0),
            }
        )
        sizes.stretches.append(0)
        return out, None

    return attention


def _sites(calls: list[dict[str, Any]]) -> tuple[Site, ...]:
    loops = Counter(call["layer"] for call in calls)
    seen: Counter[str] = Counter()
    sites = []
    for plane, call in enumerate(calls):
        loop = seen[call["layer"]]
        seen[call["layer"]] += 1
        place = {"loop": loop, "loops": loops[call["layer"]], "plane": plane}
        kind = {"store_site": None, "kind": "dense", "reason": "not scheduled yet"}
        sites.append(Site(name=f"{call['layer']}@{loop}", **place, **kind, **call))  # type: ignore[arg-type]
    return tuple(sites)


def survey(model: nn.Module, options: Options) -> Survey:
    """Look at a model on the meta device.

    Raises:
        UnsupportedModel: the model has no loops, layers of different shapes, or cannot run on the meta device.
        OptionError: `capture_loop` is not below the model's number of loops.
    """
    tensors = {id(tensor): tensor for tensor in named_tensors(model).values()}
    sizes, calls = _Sizes(tensors.values()), []  # type: tuple[_Sizes, list[dict[str, Any]]]
    ids = torch.zeros(1, _TOKENS, dtype=torch.long, device="meta")
    try:
        with evaluation_mode(model), attention_override(model, _recorder(model, sizes, calls)), sizes:
            logits = model(input_ids=ids, position_ids=ids, use_cache=False).logits
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModel(
            f"{type(model).__name__} cannot be surveyed without its weights: {first}"
        ) from error
    sites = _sites(calls)
    refuse_hopeless(sites)
    parameters = {id(parameter): parameter.numel() for parameter in model.parameters()}
    return Survey(
        sites=schedule_sites(sites, options),
        weight_bytes=sum(tensor.nbytes for tensor in tensors.values()),
        parameters=sum(parameters.values()),
        layer_bytes=-(-max(sizes.stretches[1:-1]) // _TOKENS),
        vocabulary=int(logits.shape[-1]),
    )
