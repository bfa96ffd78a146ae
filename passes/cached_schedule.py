"""Dense, capture or consume for each call, by loop depth, as far as the graph allows it.

Sites are scheduled as in `schedule`. On top of that a consume needs to see the very keys that its capture saw: the same
mask over a cache of the same length. Where it does not, it stays dense.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from .base import Compilation, Pass
from .masks import seen_key
from .nodes import fake
from .program import Site
from .schedule import check_capture_loop, check_order, give_retention, schedule_site
from .values import Values

if TYPE_CHECKING:
    from .calls import AttentionCall


class ScheduleCalls(Pass):
    name = "schedule_calls"

    def run(self, compilation: Compilation) -> dict[str, int]:
        calls: tuple[AttentionCall, ...] = compilation.calls  # type: ignore[attr-defined]
        looped = any(site.loops > 1 for site in compilation.sites)
        if looped:
            check_capture_loop(compilation.sites, compilation.options)
        sites = []
        for site in give_retention(compilation.sites, compilation.options) if looped else compilation.sites:
            kind, reason = schedule_site(site, compilation.options)
            sites.append(replace(site, kind=kind, reason=reason))
        _demote(sites, calls, Values(compilation.graph.graph))
        compilation.sites = tuple(sites)
        check_order(compilation.sites)
        counts = Counter(site.kind for site in sites)
        return {kind: counts[kind] for kind in ("dense", "capture", "consume")}


def _sees_the_same(one: AttentionCall, other: AttentionCall, values: Values) -> bool:
    """Whether two calls see the same keys under the same numbers.

    Sizes may be symbolic, as those of growing caches are. Comparing them makes their equality a guard of the compiled
    graph, so it holds whenever the graph runs.
    """
    if seen_key(one.mask, values, one.node) != seen_key(other.mask, values, other.node):
        return False
    sizes = [(*fake(call.query).shape, *fake(call.key).shape) for call in (one, other)]
    return all(bool(mine == theirs) for mine, theirs in zip(*sizes, strict=True))


def _demote(sites: list[Site], calls: tuple[AttentionCall, ...], values: Values) -> None:
    """In place: consumes that see other keys than their capture become dense, captures that nobody reads too."""
    source: dict[str, int] = {}
    readers: Counter[int] = Counter()
    for at, site in enumerate(sites):
        if site.kind == "capture":
            source[site.layer] = at
        elif site.kind == "consume":
            captured = source[site.layer]
            if _sees_the_same(calls[at], calls[captured], values):
                readers[captured] += 1
            else:
                reason = f"sees other keys than the capture in loop {sites[captured].loop}"
                sites[at] = replace(site, kind="dense", reason=reason)
    for at, site in enumerate(sites):
        if site.kind == "capture" and not readers[at]:
            sites[at] = replace(site, kind="dense", reason="would capture, but no later loop consumes it")
