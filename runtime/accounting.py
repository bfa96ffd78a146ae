"""Keys read, computed on the host from lengths: no kernel counts anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from sparse_compile.kernels.retention import Retention
from sparse_compile.runtime.plan import Segment
from sparse_compile.runtime.request import RequestMetrics


class SiteLike(Protocol):
    """What is read of a site of the compiled program."""

    @property
    def kind(self) -> str: ...

    @property
    def window(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def loops(self) -> int: ...

    @property
    def retention(self) -> Retention: ...


@dataclass(frozen=True)
class _Heads:
    """Query heads of some sites: by window (0: none) of those that always read it whole, and of consume sites by what
    they keep.
    """

    full: Counter[int]
    retained: Counter[Retention]

    @classmethod
    def of(cls, sites: Sequence[SiteLike]) -> _Heads:
        found = cls(Counter(), Counter())
        for site in sites:
            if site.kind == "consume":
                found.retained[site.retention] += site.heads
            else:
                found.full[site.window] += site.heads
        return found

    def keys(self, position: int, length: int, sparse: bool) -> tuple[int, int]:
        """Keys that one row reads at these sites, and keys that it would read were they all dense."""
        full = sum(
            heads * (length - (max(0, position - window + 1) if window else 0))
            for window, heads in self.full.items()
        )
        whole = sum(self.retained.values()) * length
        kept = sum(heads * one.count(length) for one, heads in self.retained.items()) if sparse else whole
        return full + kept, full + whole


class KeyCounter:
    """Charges rows to a request's metrics. The unit: one key attended by one query head at one site.

    A dense or capture site reads `visible` keys per head, those of a window of W at most W; a consume site
    reads the retained count per head when the row is sparse, and is dense otherwise. At retention 1 both sums
    agree. body_sites, last_sites: see EngineOptions.
    """

    def __init__(
        self,
        sites: Sequence[SiteLike],
        body_sites: Sequence[Sequence[SiteLike]] = (),
        last_sites: Sequence[SiteLike] = (),
    ) -> None:
        self._all, self._last = _Heads.of(sites), _Heads.of(last_sites)
        self._bodies = [_Heads.of(body) for body in body_sites]
        self._loops = max((site.loops for site in sites), default=1)

    def charge(
        self, metrics: RequestMetrics, segment: Segment, drafted: bool = False, loops: int | None = None
    ) -> None:
        """Adds the rows of `segment` to `metrics`. drafted: each of them made a draft as well. loops: that they have
        gone through, and nothing behind them; None for the whole model.
        """
        parts = [self._all] if loops is None else self._bodies[:loops]
        read = dense = 0
        for position, length in segment.rows():
            for heads in [*parts, self._last] if drafted else parts:
                keys, keys_dense = heads.keys(position, length, segment.sparse)
                read, dense = read + keys, dense + keys_dense
        metrics.loops_run += (self._loops if loops is None else loops) * len(segment.tokens)
        metrics.keys_read += read
        metrics.keys_dense += dense
        if segment.decode:
            metrics.decode_keys_read += read
            metrics.decode_keys_dense += dense
