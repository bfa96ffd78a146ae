"""Who runs in a step.

All unfinished requests stand in one total order: the higher priority first, then the earlier arrival. It decides

    admission      the first of those that do not run is admitted as soon as it fits, and until then nobody behind it:
                   small requests do not starve a big one
    preemption     for a waiting request of strictly higher priority, or for the next page of a running one, the last of
                   the running requests is suspended; before that, suspended requests are moved out of the pool

so there is no live-lock. Take the first request F of the order that its caller does not hold back. While it runs it is
suspended only if it is also the last one running, for a page that nobody else holds; but alone it fits, or it would
have been refused when it came. While it does not run, nobody is admitted before it, and each of those that do run ends
after at most max_new_tokens rows or makes room earlier; once none is left, F is admitted. So F runs to its end, and
then there is a next one.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from sparse_compile.runtime.accounting import KeyCounter
from sparse_compile.runtime.blocks import BlockFacts
from sparse_compile.runtime.holdings import Holdings
from sparse_compile.runtime.options import EngineOptions
from sparse_compile.runtime.plan import FROM_DEVICE, Segment
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.suspension import Suspension

Lacking = Literal["seat", "slot", "pages"]


@dataclass(frozen=True)
class Work:
    """The next `rows` tokens of a request, computed in this step."""

    request: Request
    rows: int


class Scheduler:
    """Holds the requests that are not finished.

    loops: of the program. settle: called before a request is suspended; reads the tokens that are still on their way,
    which may end requests, and says whether there were any. fail: ends a request for which there is no memory.
    """

    def __init__(
        self,
        holdings: Holdings,
        suspension: Suspension,
        options: EngineOptions,
        loops: int,
        settle: Callable[[], bool],
        fail: Callable[[Request, Exception], object],
    ) -> None:
        self.holdings, self.suspension, self.options = holdings, suspension, options
        self.loops, self.settle, self.fail = loops, settle, fail
        self.counter = KeyCounter(options.sites, options.body_sites, options.last_sites)
        self.requests: dict[str, Request] = {}  # all that are unfinished
        self.queue: list[Request] = []  # those that wait to run, or to run again, in order
        self.running: dict[str, Request] = {}
        self.preempted = self.resumed = 0

    # ------------------------------------------------------------------ the requests

    def add(self, request: Request) -> None:
        self.requests[request.id] = request
        self.enqueue(request)

    def enqueue(self, request: Request) -> None:
        bisect.insort(self.queue, request, key=lambda one: one.order)

    def remove(self, request: Request) -> None:
        """Ends a request in any state, and gives back all it held."""
        if request.finished:
            return
        del self.requests[request.id]
        self.running.pop(request.id, None)
        if request in self.queue:
            self.queue.remove(request)
        self.holdings.release(request)
        request.saved = None
        request.state = RequestState.FINISHED

    def suspend(self, request: Request) -> None:
        """Suspends a running request, whose tokens have all been read. It stays in its pages."""
        self.suspension.suspend(request)
        del self.running[request.id]
        self.enqueue(request)

    def hold(self, request: Request) -> None:
        """The caller wants it to stop, in whatever state it is."""
        if request.state is RequestState.RUNNING:
            self.suspension.suspend(request)
            del self.running[request.id]
        elif request in self.queue:
            self.queue.remove(request)
        request.held = True

    def offload(self, request: Request) -> None:
        """Moves a request that does not run out of the pools, if there is anything of it."""
        if request.saved is not None:
            self.suspension.offload(request)

    def let_go(self, request: Request) -> None:
        """The opposite of `hold`."""
        request.held = False
        self.enqueue(request)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless the pools are whole and hold exactly what the requests hold."""
        self.holdings.check_integrity(list(self.requests.values()))

    # ------------------------------------------------------------------ the rows of a step

    def pick(self) -> tuple[list[Work], list[Work]]:
        """Admits who can be admitted; then (chunks of prompts, decode rows), in order.

        Raises RuntimeError when nobody runs and nobody can be admitted, which a step later would not change.
        """
        self._admit()
        decode = self._decode_rows()
        return self._prompt_chunks(), [work for work in decode if work.request.state is RequestState.RUNNING]

    def _in_order(self) -> list[Request]:
        return sorted(self.running.values(), key=lambda request: request.order)

    def _decode_rows(self) -> list[Work]:
        works = []
        for request in self._in_order():
            # What comes first may suspend what comes later, and reading tokens may end any of them.
            if request.decoding and self._can_grow(request):
                works.append(Work(request, self._decode_count(request)))
        return works

    def _decode_count(self, request: Request) -> int:
        """Rows of a request that decodes: one, or a block. The device cuts off what goes beyond its last token."""
        drafting = self.options.drafting
        if drafting is None or drafting.pipeline:
            return 1
        if drafting.adaptive and request.pace is not None:
            return min(drafting.rows, math.ceil(request.pace) + 1)
        return drafting.rows

    def _prompt_chunks(self) -> list[Work]:
        works, left = [], self.options.max_prefill_tokens
        for request in self._in_order():
            if request.has_rows and not request.decoding and (rows := self._chunk(request, left)):
                works.append(Work(request, rows))
                left -= rows
        return works

    def _chunk(self, request: Request, left: int) -> int:
        """Rows of a prompt in this step, of which all prompts together have `left`."""
        rows, prefix = self.options.prefill_chunk, request.params.prefix_length
        if not request.computed and prefix:
            if prefix > left:
                return 0  # it goes in one piece; the first in order has the whole budget
            rows = max(rows, prefix)
        rows = min(rows, request.prompt_length - request.computed)
        if self.options.deterministic:  # the whole of its own chunk, or nothing yet
            rows = min(rows, self.options.max_prefill_tokens)
            return rows if rows <= left else 0
        return min(left, rows)

    def segment(self, work: Work) -> Segment:
        """The rows of `work`; a sparse one that begins takes a new incarnation of the request's lease."""
        request, start = work.request, work.request.computed
        decode, sparse = request.decoding, self._is_sparse(request, start)
        if sparse and not request.loop:
            assert self.holdings.store is not None
            request.leases[0] = self.holdings.store.renew(request.leases[0], start)
        step = self.options.loops_per_step or self.loops
        tokens = request.tokens[start : start + work.rows]
        return Segment(
            tokens=tokens or [FROM_DEVICE],
            start=start,
            seat=request.seat,
            prefix_length=request.params.prefix_length,
            decode=decode,
            sparse=sparse,
            lease=request.leases[0] if sparse else None,
            wants_logits=request.loop + step >= self.loops
            if decode
            else start + work.rows == request.prompt_length,
            loop=request.loop,
        )

    def block(self, request: Request, rows: int, aloft: bool) -> BlockFacts:
        """What is known of the next rows of a request, under new incarnations of its leases. aloft: the device alone
        knows where they begin.
        """
        start, store = request.computed, self.holdings.store
        if store is not None:
            lines = range(start, start + rows)
            request.leases[:rows] = store.renew_all(request.leases[:rows], lines, on_device=True)
        sparse = store is not None and self.options.retention is not None
        return BlockFacts(
            seat=request.seat,
            start=FROM_DEVICE if aloft else start,
            token=(request.tokens[start : start + 1] or [FROM_DEVICE])[0],
            rows=rows,
            end=request.max_length - 1,
            sparse_from=self.options.dense_below if sparse else request.max_length,
            turn=request.rounds % 2,
            slots=tuple(lease.slot for lease in request.leases[:rows]),
        )

    def row(self, request: Request, at: int) -> Segment:
        """The row of a token that a request generated, as it is charged."""
        sparse = self._is_sparse(request, at)
        return Segment(
            tokens=[FROM_DEVICE],
            start=at,
            seat=request.seat,
            decode=True,
            sparse=sparse,
            lease=request.leases[0] if sparse else None,
        )

    def _is_sparse(self, request: Request, position: int) -> bool:
        enabled = self.holdings.store is not None and self.options.retention is not None
        return enabled and request.decoding and position + 1 >= self.options.dense_below

    # ------------------------------------------------------------------ admission

    def _admit(self) -> None:
        while self.queue:
            request = self.queue[0]
            lacking = self._lacking(request)
            if lacking is None:
                self._start(self.queue.pop(0))
            elif not self._make_room(request, lacking):
                break
        if self.queue and not self.running and not self.settle():
            raise RuntimeError(
                f"{len(self.queue)} requests wait and none runs, with {self.holdings.free_pages} of "
                f"{self.holdings.pool.usable_pages} pages free: pages or slots were lost; make a new engine"
            )

    def _start(self, request: Request) -> None:
        again = request.saved is not None
        if self._try(self.suspension.resume if again else self.holdings.admit, request):
            request.state = RequestState.RUNNING
            self.running[request.id] = request
            self.resumed += again

    def _try(self, what: Callable[[Request], None], request: Request) -> bool:
        """Does what needs memory of the host or the device; a request for which that fails ends with the error."""
        try:
            what(request)
        except Exception as error:
            self.fail(request, error)
            return False
        return True

    def _lacking(self, request: Request) -> Lacking | None:
        """What keeps the request from running. A page is left for each running one that will need more."""
        if not self.holdings.seats.free_seats:
            return "seat"
        if not self.holdings.has_slot(request, wait=not self.running):
            return "slot"
        headroom = sum(self.holdings.may_grow(other) for other in self.running.values())
        return None if self.holdings.has_pages(request, headroom) else "pages"

    def _make_room(self, request: Request, lacking: Lacking) -> bool:
        """One action towards room for a request of the queue; False when there is none to take."""
        if lacking == "seat" or not self._offload_resident(request):
            victims = [other for other in self.running.values() if other.priority < request.priority]
            if not victims:
                return False
            if self.settle():
                return True
            self._preempt(max(victims, key=lambda other: other.order), offload=lacking != "seat")
        if lacking == "slot":
            self.holdings.has_slot(request, wait=True)
        return True

    # ------------------------------------------------------------------ pages of those that run

    def _can_grow(self, request: Request) -> bool:
        """Makes sure of the page that its next row needs; False when it does not run any more, or has no row."""
        while request.state is RequestState.RUNNING and request.has_rows:
            if self.holdings.has_pages(request):
                return self._try(self.holdings.grow, request)
            if self._offload_resident(request) or self.settle():
                continue
            if len(self.running) == 1:
                raise RuntimeError(
                    f"request {request.id!r} runs alone and lacks a page, with {self.holdings.free_pages} of "
                    f"{self.holdings.pool.usable_pages} free: pages were lost; make a new engine"
                )
            self._preempt(max(self.running.values(), key=lambda other: other.order), offload=True)
        return False

    def _offload_resident(self, request: Request) -> bool:
        """Moves the last of the other suspended requests out of the pool, if one is still there."""
        resident = [
            other
            for other in self.requests.values()
            if other is not request and other.saved is not None and not other.saved.offloaded
        ]
        if resident:
            self._try(self.suspension.offload, max(resident, key=lambda other: other.order))
        return bool(resident)

    def _preempt(self, victim: Request, offload: bool) -> None:
        self.preempted += 1
        victim.metrics.preemptions += 1
        if self._try(self.suspend, victim) and offload:
            self._try(self.suspension.offload, victim)
