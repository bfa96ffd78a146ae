"""Counters with which the programs of a kernel find out which of them is the last."""

from __future__ import annotations

import torch
from torch import Tensor

from .beside import LANES

_counters: dict[tuple[torch.device, int], list[Tensor]] = {}


def arrivals(device: torch.device, count: int, lane: int = 0) -> Tensor:
    """int32 counters, all zero between launches: every kernel that counts arrivals sets back what it used.

    One set per device and lane (`beside`; 0 is the stream of the step), so kernels that share a set must follow each
    other. Buffers that were outgrown stay alive, since a CUDA graph may hold their address. While a graph is captured
    none can be made: the zeros would only be written when it is replayed.
    """
    buffers = _counters.setdefault((device, lane), [])
    if not buffers or buffers[-1].shape[0] < count:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"there are no {count} arrival counters yet: run the op once at this size before it is captured in a "
                "CUDA graph"
            )
        size = 1 << (max(count, 8192) - 1).bit_length()
        buffers.append(torch.zeros(size, dtype=torch.int32, device=device))
    return buffers[-1]


def reserve(device: torch.device, count: int) -> None:
    """Make `count` counters of every set now: what is first made within a CUDA graph's memory pool could not stay."""
    for lane in range(LANES + 1):
        arrivals(device, count, lane)
