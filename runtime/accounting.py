"""Keys read, computed on the host from lengths: no kernel counts anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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


class KeyCounter:
    """Charges rows to a request's metrics. The unit: one key attended by one query head at one site.

    A dense or capture site reads `visible` keys per head, those of a window of W at most W; a consume site
    reads the retained count per head when the row is sparse, and is dense otherwise. At retention 1 both sums
    agree.
    """

    def __init__(self, sites: Sequence[SiteLike]) -> None:
        # window (0: none) -> query heads of all sites that always read it whole
        self._full: Counter[int] = Counter()
        # retention -> query heads of all consume sites that keep so much
        self._retained: Counter[Retention] = Counter()
        self._loops = max((site.loops for site in sites), default=1)
        for site in sites:
            if site.kind == "consume":
                self._retained[site.retention] += site.heads
            else:
                self._full[site.window] += site.heads

    def charge(self, metrics: RequestMetrics, segment: Segment) -> None:
        """Adds the rows of `segment` to `metrics`."""
        read = dense = 0
        for position, length in segment.rows():
            full = sum(
                heads * (length - (max(0, position - window + 1) if window else 0))
                for window, heads in self._full.items()
            )
            whole = sum(self._retained.values()) * length
            kept = sum(heads * one.count(length) for one, heads in self._retained.items())
            read += full + (kept if segment.sparse else whole)
            dense += full + whole
        metrics.loops_run += self._loops * len(segment.tokens)
        metrics.keys_read += read
        metrics.keys_dense += dense
        if segment.decode:
            metrics.decode_keys_read += read
            metrics.decode_keys_dense += dense
