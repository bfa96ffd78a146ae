"""Who runs in a step: admission first come, first served, then rows up to the limit of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparse_compile.runtime.accounting import SiteLike
from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.plan import Segment
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.seats import SeatTable


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine, and what it must know of its program."""

    max_context: int  # tokens of prompt and answer together
    prefill_chunk: int = 256  # rows of one prompt per step
    max_rows: int = 512  # rows of a step, and so the most requests that run at once
    dense_below: int = 0  # decode rows with fewer visible keys run dense
    sites: Sequence[SiteLike] = ()  # of the program, for the count of keys read
    retention: tuple[int, int] | None = None  # (numerator, denominator); None runs everything dense
    debug: bool = False  # validate every plan, which reads the device

    def __post_init__(self) -> None:
        for name, least in (("max_context", 2), ("prefill_chunk", 1), ("max_rows", 1), ("dense_below", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.retention is not None and not 0 < self.retention[0] <= self.retention[1]:
            raise ValueError(f"retention={self.retention} must be (numerator, denominator) in (0, 1]")


@dataclass(frozen=True)
class Work:
    """The next `rows` tokens of a request, computed in this step."""

    request: Request
    rows: int

    @property
    def completes(self) -> bool:
        """After it every known token is computed, so the next one can be sampled."""
        return self.request.computed + self.rows == len(self.request.tokens)


class Scheduler:
    """Holds the requests that are not finished, and what the running ones hold of the pools."""

    def __init__(self, pool: KVPool, store: ReferenceStore | None, options: EngineOptions) -> None:
        self.pool = pool
        self.store = store
        self.options = options
        self.seats = SeatTable(
            options.max_rows, min(pool.pages, pool.spec.pages_for(options.max_context)), pool.device
        )
        self.waiting: dict[str, Request] = {}  # in the order of arrival
        self.running: dict[str, Request] = {}  # in the order of admission

    def add(self, request: Request) -> None:
        self.waiting[request.id] = request

    def find(self, request_id: str) -> Request | None:
        """The waiting or running request of that id."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def remove(self, request: Request) -> None:
        """Ends a request in any state, and gives back all it held."""
        if request.state is RequestState.WAITING:
            del self.waiting[request.id]
        elif request.state is RequestState.RUNNING:
            del self.running[request.id]
            self._release(request)
        request.state = RequestState.FINISHED

    def pick(self) -> list[Work]:
        """Admits who can be admitted and shares out the rows of a step, in the order of admission.

        A prefix that must be prefilled whole goes first, or decode rows could keep it out for ever; then one
        row per decoding request; then chunks of prompts. Raises RuntimeError when nobody runs and nobody can be
        admitted, which a step later would not change.
        """
        self._admit()
        if self.waiting and not self.running:
            raise RuntimeError(
                f"{len(self.waiting)} requests wait and none runs, with {self.pool.free_pages} of "
                f"{self.pool.usable_pages} pages free: pages or slots were lost; make a new engine"
            )
        left = self.options.max_rows
        shares: dict[str, int] = {}
        for wants in (self._whole_prefix, self._decode_row, self._prompt_chunk):
            for request in self.running.values():
                if request.id not in shares and (rows := wants(request, left)):
                    shares[request.id] = rows
                    left -= rows
        return [
            Work(request, shares[request.id]) for request in self.running.values() if request.id in shares
        ]

    def segment(self, work: Work) -> Segment:
        """The rows of `work`; a sparse one takes a new incarnation of the request's lease."""
        request, start = work.request, work.request.computed
        sparse = self._is_sparse(request)
        if sparse and request.lease is not None and self.store is not None:
            request.lease = self.store.renew(request.lease, start)
        return Segment(
            tokens=request.tokens[start : start + work.rows],
            start=start,
            seat=request.seat,
            prefix_length=request.params.prefix_length,
            decode=request.decoding,
            sparse=sparse,
            lease=request.lease if sparse else None,
            wants_logits=work.completes,
        )

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the pools are whole and hold exactly what the running requests hold."""
        self.pool.check_integrity()
        self.seats.check_integrity([request.seat for request in self.running.values()])
        pages = [page for request in self.running.values() for page in request.pages]
        if len(pages) != self.pool.held_pages:
            raise RuntimeError(f"requests hold {len(pages)} pages, the KV pool lent {self.pool.held_pages}")
        if self.store is None:
            return
        self.store.check_integrity()
        leases = [request.lease for request in self.running.values() if request.lease is not None]
        self.store.check(leases)
        if len(leases) != self.store.live_upper_bound:
            raise RuntimeError(
                f"requests hold {len(leases)} slots, the store lent {self.store.live_upper_bound}"
            )

    # ------------------------------------------------------------------ inside

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.options.max_rows:
            request = next(iter(self.waiting.values()))
            if not self._has_room(request):
                return  # first come, first served: a smaller one behind it does not overtake
            del self.waiting[request.id]
            self._start(request)

    def _start(self, request: Request) -> None:
        request.pages = self.pool.allocate(self.pool.spec.pages_for(request.max_length))
        request.seat = self.seats.take(request.pages)
        if self.store is not None:
            request.lease = self.store.acquire(request.id, 0)
        request.state = RequestState.RUNNING
        self.running[request.id] = request

    def _has_room(self, request: Request) -> bool:
        if self.pool.spec.pages_for(request.max_length) > self.pool.free_pages:
            return False
        if self.store is None:
            return True
        self.store.collect(wait=not self.running)  # with nobody running, only time can free a slot
        return self.store.free_slots > 0

    def _release(self, request: Request) -> None:
        self.pool.free(request.pages)
        self.seats.release(request.seat)
        request.pages, request.seat = [], 0
        if self.store is not None and request.lease is not None:
            self.store.retire(request.lease)
            request.lease = None

    def _is_sparse(self, request: Request) -> bool:
        enabled = self.store is not None and self.options.retention is not None
        return enabled and request.decoding and len(request.tokens) >= self.options.dense_below

    def _whole_prefix(self, request: Request, left: int) -> int:
        prefix = request.params.prefix_length
        if request.computed or not prefix or prefix > left:
            return 0
        return min(left, max(prefix, self.options.prefill_chunk), request.prompt_length)

    def _decode_row(self, request: Request, left: int) -> int:
        return min(left, 1) if request.decoding else 0

    def _prompt_chunk(self, request: Request, left: int) -> int:
        if request.decoding or (request.params.prefix_length and not request.computed):
            return 0
        return min(left, self.options.prefill_chunk, request.prompt_length - request.computed)
