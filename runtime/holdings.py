"""What requests hold of the pools: pages, a slot of the reference store, a seat."""

from __future__ import annotations

from collections.abc import Sequence

from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.seats import SeatTable


class Holdings:
    """Gives and takes back. A request that waits or is offloaded holds nothing, a suspended resident one pages and
    slot, a running one a seat as well.
    """

    def __init__(self, pool: KVPool, store: ReferenceStore | None, seats: SeatTable) -> None:
        self.pool, self.store, self.seats = pool, store, seats

    # ------------------------------------------------------------------ what is there

    @property
    def free_pages(self) -> int:
        return self.pool.free_pages

    def missing_pages(self, request: Request) -> int:
        """Pages that the request needs for its whole prompt and for its next row, beyond those it holds."""
        tokens = max(request.prompt_length, request.computed) + 1
        return self.pool.spec.pages_for(min(tokens, request.max_length)) - len(request.pages)

    def has_pages(self, request: Request, headroom: int = 0) -> bool:
        """Whether it can have the pages it needs, and `headroom` are left over for others."""
        missing = self.missing_pages(request)
        return missing <= 0 or missing + headroom <= self.free_pages

    def has_slot(self, request: Request, wait: bool = False) -> bool:
        """Whether it has a slot, needs none, or can have one; `wait` for slots whose last readers are at work."""
        if self.store is None or request.lease is not None:
            return True
        self.store.collect(wait=wait)
        return self.store.free_slots > 0

    def may_grow(self, request: Request) -> bool:
        """It may need further pages before it ends."""
        return len(request.pages) < self.pool.spec.pages_for(request.max_length)

    # ------------------------------------------------------------------ give and take

    def admit(self, request: Request) -> None:
        """Everything that a running request holds and this one does not have yet."""
        missing = self.missing_pages(request)
        if missing > 0:
            request.pages += self.pool.allocate(missing)
        if self.store is not None and request.lease is None:
            request.lease = self.store.acquire(request.id, request.computed)
        request.seat = self.seats.take(request.pages)

    def grow(self, request: Request) -> None:
        """The pages that the next row needs."""
        missing = self.missing_pages(request)
        if missing > 0:
            request.pages += self.pool.allocate(missing)
            self.seats.write(request.seat, request.pages)

    def leave_seat(self, request: Request) -> None:
        if request.seat:
            self.seats.release(request.seat)
            request.seat = 0

    def release(self, request: Request) -> None:
        """All of it. Work that is submitted already is safe: the stream orders it before the next owner's."""
        self.leave_seat(request)
        self.pool.free(request.pages)
        request.pages = []
        if self.store is not None and request.lease is not None:
            self.store.retire(request.lease)
            request.lease = None

    # ------------------------------------------------------------------ the law

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raises RuntimeError unless the pools are whole and lend exactly what these unfinished requests hold."""
        running = [request for request in requests if request.state is RequestState.RUNNING]
        self.seats.check_integrity([request.seat for request in running])
        if any(request.seat for request in requests if request.state is not RequestState.RUNNING):
            raise RuntimeError("a request that does not run holds a seat")
        self._check_pages(requests)
        if self.store is None:
            return
        self.store.check_integrity()
        leases = [request.lease for request in requests if request.lease is not None]
        self.store.check(leases)
        if len(leases) != self.store.live_upper_bound:
            raise RuntimeError(
                f"requests hold {len(leases)} slots, the store lent {self.store.live_upper_bound}"
            )

    def _check_pages(self, requests: Sequence[Request]) -> None:
        self.pool.check_integrity()
        pages = [page for request in requests for page in request.pages]
        if len(pages) != self.pool.held_pages:
            raise RuntimeError(f"requests hold {len(pages)} pages, the KV pool lent {self.pool.held_pages}")
