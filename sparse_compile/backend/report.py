"""What the backend did to each graph, as data and as text."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from sparse_compile.passes.program import PassRecord, Site

KEPT = 256
"""How many reports are remembered; the oldest are dropped."""

_reports: deque[GraphReport] = deque(maxlen=KEPT)


@dataclass(frozen=True)
class Left:
    """An attention call, something like one, or a linear layer, left as it is: its node, module and the reason."""

    node: str
    module: str
    reason: str


@dataclass(frozen=True)
class GraphReport:
    """One graph that torch.compile handed over.

    Attributes:
        number: its place among all graphs of this process.
        kind: "decode" (one query per row over a cache), "prefill", or "other" (no attention call).
        sites: the calls that were rewritten or, with a window, kept; in execution order.
        left: the calls that were not.
        breaks: why and where Dynamo broke the function up since the graph before this one.
        passes: what each pass counted.
        cause: why it was compiled: a first call, or the guard that failed; empty where Dynamo does not say.
        products: how often each op of few rows was put in (`skinny_products`).
        replaced: in the place of how many linear layers; gate and up are two.
        norms: how many norms they do as well.
        library: the linear layers of a decode graph that keep the library's product all the same.
    """

    number: int
    kind: str
    sites: tuple[Site, ...]
    left: tuple[Left, ...]
    breaks: tuple[str, ...]
    passes: tuple[PassRecord, ...]
    cause: str = ""
    products: dict[str, int] = field(default_factory=dict)
    replaced: int = 0
    norms: int = 0
    library: tuple[Left, ...] = ()

    @property
    def rewritten(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if not site.window)

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(site.kind for site in self.rewritten)
        return {kind: found[kind] for kind in ("dense", "capture", "consume")}

    @property
    def total(self) -> int:
        """Attention calls of the graph: rewritten or not."""
        return len(self.sites) + len(self.left)

    def to_dict(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "kind": self.kind,
            "cause": self.cause,
            "rewritten": len(self.rewritten),
            "total": self.total,
            "counts": self.counts,
            "sites": [
                {"name": site.name, "kind": "window" if site.window else site.kind, "reason": site.reason}
                for site in self.sites
            ],
            "left": [vars(one) for one in self.left],
            "products": dict(self.products),
            "linear_layers_replaced": self.replaced,
            "norms_replaced": self.norms,
            "library": [vars(one) for one in self.library],
            "breaks": list(self.breaks),
            "passes": [{"name": one.name, "counters": one.counters} for one in self.passes],
        }

    def __str__(self) -> str:
        return "\n".join([self.headline(), *self.details()])

    def headline(self) -> str:
        """The summary, and why the graph was compiled."""
        cause = f"\n  cause: {self.cause}" if self.cause else ""
        return f"graph {self.number} ({self.kind}): {self.summary()}{cause}"

    def details(self) -> list[str]:
        """A line for every call, product and break."""
        lines = []
        for site in self.sites:
            kind = "kept" if site.window else site.kind
            lines.append(f"  {site.name}: {kind}, {site.reason}")
        lines += [f"  {one.module or one.node}: left as it is, {one.reason}" for one in self.left]
        if self.products or self.library:
            lines.append(f"  {self.products_summary()}")
        lines += [f"  {one.module or one.node}: the library's product, {one.reason}" for one in self.library]
        return lines + [f"  graph break: {one}" for one in self.breaks]

    def products_summary(self) -> str:
        """ "products of few rows: 54 of 57 linear layers (24 skinny_linear, 30 skinny_rotary), with 8 norms"."""
        kinds = ", ".join(f"{number} {name}" for name, number in self.products.items())
        total = self.replaced + len(self.library)
        made = f"products of few rows: {self.replaced} of {total} linear layers"
        made += f" ({kinds})" if kinds else ""
        return f"{made}, with {self.norms} norm{'s' * (self.norms > 1)}" if self.norms else made

    def summary(self) -> str:
        """ "rewrote 8 of 8 attention calls (2 layers x 4 loops): 2 dense, 2 capture, 4 consume"."""
        if not self.total:
            return "no attention call"
        shape = ""
        if self.sites:
            layers, loops = len({site.layer for site in self.sites}), max(site.loops for site in self.sites)
            shape = f" ({layers} layers, up to {loops} loops)"
        kinds = ", ".join(f"{number} {kind}" for kind, number in self.counts.items())
        return f"rewrote {len(self.rewritten)} of {self.total} attention calls{shape}: {kinds}"


def remember(report: GraphReport) -> None:
    _reports.append(report)


def reports() -> tuple[GraphReport, ...]:
    """The reports of all graphs compiled in this process, oldest first (at most the last 256)."""
    return tuple(_reports)


def last_report(kind: str = "decode") -> GraphReport | None:
    """The latest report of a kind, None if there is none."""
    return next((report for report in reversed(_reports) if report.kind == kind), None)


def clear_reports() -> None:
    _reports.clear()
