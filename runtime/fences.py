"""Fences: how the host learns that work it has submitted is complete."""

from __future__ import annotations

from typing import Protocol

import torch


class Fence(Protocol):
    """A point in the work of a stream."""

    def done(self) -> bool: ...

    def wait(self) -> None: ...


class ImmediateFence:
    """The fence of a device that finishes work before it returns: the CPU."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class CudaFence:
    """An event, recorded where `stream` stands now."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def done(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        self._event.synchronize()
