"""Suspension: a request steps aside and later goes on with the same tokens, as if it had never stopped.

What it has computed are the pages of its keys and values. Between two loops of a row there is more: what the row
carries (`Executor.save`), and, under a sparse schedule, the contents of its slot of the reference store. All of it is
saved, in one of two places:

    resident     pages and slot stay where they are; the seat is given up
    offloaded    copies in host memory, page-locked on CUDA; pages, slot and seat are given up

Copies are submitted on the one stream that all work is ordered by, so the host waits for none of them: what is copied
out was computed before, and pages that are given up are not written by others before the copy has read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparse_compile.runtime.holdings import Holdings
from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.request import Request, RequestState

if TYPE_CHECKING:
    from sparse_compile.runtime.engine import Executor


@dataclass
class Saved:
    """What a suspended request needs to go on, beside what it still holds."""

    carried: tuple[torch.Tensor, ...] = ()  # of a row between two loops
    reached: torch.Tensor | None = None  # `SeatTable.reached` of a pipeline, whose rows will be run again
    pages: tuple[torch.Tensor, ...] | None = (
        None  # k and v, [pages, planes, kv_heads, page_size, head_dim]; None: resident
    )
    slot: tuple[torch.Tensor, ...] = ()  # index, count, mass, o_ref, c_ref, between two loops of a sparse row

    @property
    def offloaded(self) -> bool:
        return self.pages is not None


class Suspension:
    """Saves and restores requests, whose tokens have all been read."""

    def __init__(self, executor: Executor, holdings: Holdings) -> None:
        self.executor, self.holdings = executor, holdings

    def suspend(self, request: Request) -> None:
        """RUNNING -> SUSPENDED, resident."""
        assert len(request.tokens) == request.length, "a token is still on its way"
        assert not request.unread, "a round is still on its way"
        carried = self.executor.save(request.seat) if request.loop else ()
        request.saved = Saved(carried, self._leave_course(request))
        self.holdings.leave_seat(request)
        request.state = RequestState.SUSPENDED

    def offload(self, request: Request) -> None:
        """Moves what a suspended request holds into host memory. If a copy fails, it stays resident."""
        saved, store = request.saved, self.holdings.store
        assert saved is not None
        if saved.offloaded:
            return
        used = request.computed + 1 if request.loop else request.computed
        pages = request.pages[: self.holdings.pool.spec.pages_for(used)]
        slot: tuple[torch.Tensor, ...] = ()
        if request.loop and store is not None and request.leases:
            slot = tuple(to_host(tensor) for tensor in store.contents(request.leases[0]))
        request.saved = Saved(
            tuple(to_host(tensor) for tensor in saved.carried),
            None if saved.reached is None else to_host(saved.reached),
            save_pages(self.holdings.pool, pages),
            slot,
        )
        self.holdings.release(request)

    def resume(self, request: Request) -> None:
        """SUSPENDED -> RUNNING, with a new seat and, if it was offloaded, new pages and a new slot."""
        saved = request.saved
        assert saved is not None
        self.holdings.admit(request)
        if saved.pages is not None:
            load_pages(self.holdings.pool, request.pages, saved.pages)
        if saved.slot and self.holdings.store is not None and request.leases:
            self.holdings.store.fill(request.leases[0], saved.slot)
        if request.loop:
            self.executor.load(request.seat, saved.carried)
        if saved.reached is not None:
            self._reached(request).copy_(saved.reached, non_blocking=True)
        request.saved = None
        request.state = RequestState.RUNNING

    def _leave_course(self, request: Request) -> torch.Tensor | None:
        if request.course is None or not request.course.aloft:
            return None
        request.course.afloat = False
        return self._reached(request).clone()

    def _reached(self, request: Request) -> torch.Tensor:
        """What the next step of its pipeline reads."""
        return self.holdings.seats.reached[request.rounds % 2, :, request.seat]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, page-locked and perhaps still under way for a CUDA tensor."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def save_pages(pool: KVPool, pages: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Host copies of pages of k and v, one page after the other: that needs no room on a full device."""
    return tuple(_save(tensor, pages) for tensor in (pool.k_pool, pool.v_pool))


def _save(tensor: torch.Tensor, pages: Sequence[int]) -> torch.Tensor:
    shape = (len(pages), tensor.shape[0], *tensor.shape[2:])
    host = torch.empty(shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
    for line, page in zip(host, pages, strict=True):
        line.copy_(tensor[:, page], non_blocking=True)
    return host


def load_pages(pool: KVPool, pages: Sequence[int], saved: tuple[torch.Tensor, ...]) -> None:
    """Writes what `save_pages` gave to the first of other pages."""
    for tensor, host in zip((pool.k_pool, pool.v_pool), saved, strict=True):
        for line, page in zip(host, pages, strict=False):
            tensor[:, page].copy_(line, non_blocking=True)
