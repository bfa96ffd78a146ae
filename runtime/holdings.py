"""What requests hold of the pools: pages, a slot of the reference store, a seat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.prefix_cache import PageCache
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.seats import SeatTable


class Holdings:
    """Gives and takes back. A request that waits or is offloaded holds nothing, a suspended resident one pages and
    slots, a running one a seat as well.
    """

    def __init__(
        self,
        pool: KVPool,
        store: ReferenceStore | None,
        seats: SeatTable,
        prefix_caching: bool,
        rows: int = 1,
    ) -> None:
        """rows: of one request that may be under way at once, each with a slot of its own."""
        self.pool, self.store, self.seats, self.rows = pool, store, seats, rows
        self.pages = PageCache(pool)
        self.prefix_caching = prefix_caching

    # ------------------------------------------------------------------ what is there

    @property
    def free_pages(self) -> int:
        return self.pages.free_pages

    def missing_pages(self, request: Request) -> int:
        """Pages that the request needs for its whole prompt and for its next rows, beyond those it holds."""
        tokens = max(request.prompt_length, request.computed) + request.ahead + self.rows
        return self.pool.spec.pages_for(min(tokens, request.max_length)) - len(request.pages)

    def has_pages(self, request: Request, headroom: int = 0) -> bool:
        """Whether it can have the pages it needs, and `headroom` are left over for others."""
        cached = self._cached(request)
        missing = self.missing_pages(request) - len(cached)
        return missing <= 0 or missing + headroom <= self.free_pages - self.pages.idle(cached)

    def has_slot(self, request: Request, wait: bool = False) -> bool:
        """Whether it has its slots, needs none, or can have them; `wait` for those whose last readers are at work."""
        if self.store is None or request.leases:
            return True
        self.store.collect(wait=wait)
        return self.store.free_slots >= self.rows

    def may_grow(self, request: Request) -> bool:
        """It may need further pages before it ends."""
        return len(request.pages) < self.pool.spec.pages_for(request.max_length)

    # ------------------------------------------------------------------ give and take

    def admit(self, request: Request) -> None:
        """Everything that a running request holds and this one does not have yet; cached pages first.

        If it fails halfway, the request holds what it has got so far, and `release` gives that back.
        """
        cached = self._cached(request)
        if request.state is RequestState.WAITING and self._may_cache(request):
            request.chain, request.filed = self.pages.share(cached), len(cached)
            request.pages = cached
            request.computed = request.metrics.cached_tokens = len(cached) * self.pool.spec.page_size
        missing = self.missing_pages(request)
        if missing > 0:
            request.pages += self.pages.allocate(missing)
        if self.store is not None and not request.leases:
            for _ in range(self.rows):
                request.leases.append(self.store.acquire(request.id, request.computed))
        request.seat = self.seats.take(request.pages)

    def grow(self, request: Request) -> None:
        """The pages that the next rows need."""
        missing = self.missing_pages(request)
        if missing > 0:
            request.pages += self.pages.allocate(missing)
            self.seats.write(request.seat, request.pages)

    def leave_seat(self, request: Request) -> None:
        if request.seat:
            self.seats.release(request.seat)
            request.seat = 0

    def release(self, request: Request) -> None:
        """All of it. Work that is submitted already is safe: the stream orders it before the next owner's."""
        self.leave_seat(request)
        self.pages.free(request.pages)
        request.pages, request.chain = [], None
        for lease in request.leases:
            assert self.store is not None
            self.store.retire(lease)
        request.leases = []

    # ------------------------------------------------------------------ cached pages

    def file(self, request: Request) -> None:
        """Files those full pages of the prompt that are computed, or submitted: the stream orders readers behind."""
        size = self.pool.spec.page_size
        while request.chain is not None and (request.filed + 1) * size <= min(
            request.computed, request.prompt_length
        ):
            start = request.filed * size
            tokens = request.tokens[start : start + size]
            request.chain = self.pages.file(request.pages[request.filed], request.chain, tokens)
            request.filed += 1

    def forget_prefixes(self, requests: Iterable[Request]) -> None:
        """Forgets all cached pages; these requests, which are unfinished, file no more of theirs."""
        for request in requests:
            request.chain = None
        self.pages.forget()

    def _may_cache(self, request: Request) -> bool:
        return self.prefix_caching and not request.params.prefix_length

    def _cached(self, request: Request) -> list[int]:
        """Pages that a request that has not begun would find."""
        if request.state is not RequestState.WAITING or not self._may_cache(request):
            return []
        return self.pages.find(request.tokens)

    # ------------------------------------------------------------------ the law

    def check_integrity(self, requests: Sequence[Request]) -> None:
        """Raises RuntimeError unless the pools are whole and lend exactly what these unfinished requests hold."""
        running = [request for request in requests if request.state is RequestState.RUNNING]
        self.seats.check_integrity([request.seat for request in running])
        if any(request.seat for request in requests if request.state is not RequestState.RUNNING):
            raise RuntimeError("a request that does not run holds a seat")
        self.pages.check_integrity([request.pages for request in requests])
        if self.store is None:
            return
        self.store.check_integrity()
        leases = [lease for request in requests for lease in request.leases]
        self.store.check(leases)
        if len(leases) != self.store.live_upper_bound:
            raise RuntimeError(
                f"requests hold {len(leases)} slots, the store lent {self.store.live_upper_bound}"
            )
