"""What an engine has done so far, and how full it is."""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from dataclasses import dataclass

from sparse_compile.runtime.request import RequestMetrics, RequestState
from sparse_compile.runtime.scheduler import Scheduler

FINISHED_KEPT = 4096  # finished requests whose metrics can still be asked for


@dataclass(frozen=True)
class EngineMetrics:
    """One look at an engine: requests by state, sums since it was made, room in the pools.

    Requests that their caller has suspended count as suspended, also those that had not begun. Means are over all
    tokens so far; None before the first one.
    """

    requests_waiting: int
    requests_running: int
    requests_suspended: int
    requests_finished: int
    steps: int
    prompt_tokens: int  # of all requests that came
    tokens_generated: int
    rounds: int  # of speculation, summed over requests; see RequestMetrics
    waiting_rounds: int
    drafted_tokens: int
    accepted_tokens: int
    round_tokens: int
    cached_tokens: int  # prompt tokens that were found in cached pages
    keys_read: int  # see RequestMetrics
    keys_dense: int
    pages_free: int
    pages_total: int
    slots_free: int  # of the reference store: those that nobody leases; 0 of 0 without one
    slots_total: int
    preemptions: int  # requests that the engine suspended, for memory or for a higher priority
    failed_runs: int  # runs that raised and were repeated one request at a time
    resumed: int  # requests that went on, whoever suspended them
    time_to_first_token_s: float | None  # mean
    time_per_token_s: float | None  # mean over tokens after the first of each request

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens per round of speculation; None without one."""
        return self.round_tokens / self.rounds if self.rounds else None


_ROUNDS = ("rounds", "waiting_rounds", "drafted_tokens", "accepted_tokens", "round_tokens")
_SUMMED = ("prompt_tokens", "new_tokens", "cached_tokens", "keys_read", "keys_dense", *_ROUNDS)


class Ledger:
    """Keeps the metrics of the last finished requests, and sums over all that have finished.

    lock: held while a request goes from the unfinished to the finished ones, and while both are summed up, which other
    threads may do: no sum may go back in between.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.steps = self.finished = 0
        self._kept: OrderedDict[str, RequestMetrics] = OrderedDict()
        self._sums: dict[str, float] = defaultdict(float)

    def forget(self, request_id: str) -> None:
        """The id is used again."""
        self._kept.pop(request_id, None)

    def file(self, request_id: str, metrics: RequestMetrics) -> None:
        """A request has finished."""
        self.finished += 1
        self._kept[request_id] = metrics
        if len(self._kept) > FINISHED_KEPT:
            self._kept.popitem(last=False)
        _add(self._sums, metrics)

    def of(self, request_id: str) -> RequestMetrics:
        """Raises KeyError for ids that were never seen, or too long ago."""
        if request_id not in self._kept:
            raise KeyError(f"no request {request_id!r}, nor among the last {FINISHED_KEPT} finished ones")
        return self._kept[request_id]

    def look(self, scheduler: Scheduler, failed_runs: int) -> EngineMetrics:
        """The numbers of this moment. The caller has the lock."""
        sums, unfinished = self._sums.copy(), list(scheduler.requests.values())
        for request in unfinished:
            _add(sums, request.metrics)
        suspended = sum(one.held or one.state is RequestState.SUSPENDED for one in unfinished)
        holdings = scheduler.holdings
        store = holdings.store
        return EngineMetrics(
            requests_waiting=len(unfinished) - len(scheduler.running) - suspended,
            requests_running=len(scheduler.running),
            requests_suspended=suspended,
            requests_finished=self.finished,
            steps=self.steps,
            prompt_tokens=int(sums["prompt_tokens"]),
            tokens_generated=int(sums["new_tokens"]),
            **{name: int(sums[name]) for name in _ROUNDS},
            cached_tokens=int(sums["cached_tokens"]),
            keys_read=int(sums["keys_read"]),
            keys_dense=int(sums["keys_dense"]),
            pages_free=holdings.free_pages,
            pages_total=holdings.pool.usable_pages,
            slots_free=store.usable_slots - store.live_upper_bound if store is not None else 0,
            slots_total=store.usable_slots if store is not None else 0,
            preemptions=scheduler.preempted,
            failed_runs=failed_runs,
            resumed=scheduler.resumed,
            time_to_first_token_s=sums["first_s"] / sums["firsts"] if sums["firsts"] else None,
            time_per_token_s=sums["later_s"] / sums["laters"] if sums["laters"] else None,
        )


def _add(sums: dict[str, float], metrics: RequestMetrics) -> None:
    for name in _SUMMED:
        sums[name] += getattr(metrics, name)
    if metrics.time_to_first_token_s is not None:
        sums["firsts"] += 1
        sums["first_s"] += metrics.time_to_first_token_s
    if metrics.time_per_token_s is not None:
        later = metrics.new_tokens - 1
        sums["laters"] += later
        sums["later_s"] += later * metrics.time_per_token_s
