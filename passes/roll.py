"""Find the loop in a traced graph and prove that its bodies are one and the same.

    a = f(x, w); b = g(a, v)                         carried: one value, starting at x
    c = f(b, w); d = g(c, v)        ->               body(s): a = f(s, w); b = g(a, v); return b
    e = f(d, w); h = g(e, v)                         invariant: v (weights are re-read by name)

Sites give the candidates: a prefix, a period of layers repeated L times, a suffix. Export is deterministic, so equal
bodies have equal node counts D, and body i is nodes [start + i D, start + (i + 1) D). Of the starts at which every body
matches the first, the one with the fewest carried values is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.fx.node import map_aggregate

from .base import Compilation, Pass
from .graph import is_shape
from .program import Carried, Roll, Site


@dataclass(frozen=True)
class Period:
    """`repeats` equal runs of `length` layers, the first at site `first`."""

    first: int
    length: int
    repeats: int

    @property
    def covered(self) -> int:
        return self.length * self.repeats


class NotIsomorphic(Exception):  # noqa: N818  a finding, not a mistake
    """Why a candidate loop was not proved; the text becomes the roll reason."""


def find_periods(layers: list[str]) -> list[Period]:
    """Candidate loops in a sequence of layer names, the one that covers most sites first, then the shortest."""
    found: list[Period] = []
    total = len(layers)
    for length in range(1, total // 2 + 1):
        run = 0
        for at in range(total - length - 1, -1, -1):
            run = run + 1 if layers[at] == layers[at + length] else 0
            starts_run = at == 0 or layers[at - 1] != layers[at - 1 + length]
            if starts_run and run >= length:
                found.append(Period(at, length, run // length + 1))
    return sorted(found, key=lambda period: (-period.covered, period.length))


def with_peeled(periods: list[Period]) -> list[Period]:
    """Each candidate, then the same without its first repetition, which some models run differently."""
    result = []
    for period in periods:
        result.append(period)
        if period.repeats > 2:
            result.append(Period(period.first + period.length, period.length, period.repeats - 1))
    return result


class _Prover:
    """Proves one candidate over the node list of one graph."""

    def __init__(self, nodes: list[fx.Node], markers: tuple[fx.Node, ...], period: Period) -> None:
        self.nodes, self.period = nodes, period
        self.place = {node: at for at, node in enumerate(nodes)}
        self.sites = [self.place[node] for node in markers]
        self.length = self._body_length()

    def _body_length(self) -> int:
        first, period, repeats = self.period.first, self.period.length, self.period.repeats
        steps = {
            self.sites[first + (i + 1) * period + j] - self.sites[first + i * period + j]
            for i in range(repeats - 1)
            for j in range(period)
        }
        if len(steps) != 1:
            raise NotIsomorphic(f"loop bodies differ in size ({', '.join(map(str, sorted(steps)))} nodes)")
        return steps.pop()

    def starts(self) -> list[int]:
        """Starts at which every node of every body has the same operation as its twin in the next body."""
        first = self.period.first
        span = (self.period.repeats - 1) * self.length
        low = self.sites[first - 1] + 1 if first else 0
        high = self.sites[first]
        last = first + self.period.covered
        limit = self.sites[last] if last < len(self.sites) else len(self.nodes) - 1
        good: list[int] = []
        differing = [
            at
            for at in range(low, min(high + span, len(self.nodes) - self.length))
            if not _same_operation(self.nodes[at], self.nodes[at + self.length])
        ]
        for start in range(low, high + 1):
            if start + span + self.length > limit:
                break
            if not any(start <= at < start + span for at in differing):
                good.append(start)
        if not good:
            at = differing[0] if differing else high
            raise NotIsomorphic(f"loop bodies differ at {self.nodes[at].name}")
        return good

    def carried_count(self, start: int) -> int:
        """Values that cross from the first body into the second, as a cheap measure of a start."""
        end = start + self.length
        return sum(
            1
            for node in self.nodes[start:end]
            if not is_shape(node) and any(self.place[user] >= end for user in node.users)
        )

    def prove(self, start: int) -> Roll:
        """The roll at this start, or NotIsomorphic."""
        self.carried: dict[int, Carried] = {}
        self.invariant: dict[fx.Node, None] = {}
        for offset in range(self.length):
            twins = [self.nodes[start + i * self.length + offset] for i in range(self.period.repeats)]
            for operands in zip(*(twin.all_input_nodes for twin in twins), strict=True):
                self._match(start, offset, list(operands))
        return Roll(
            start=start,
            length=self.length,
            repeats=self.period.repeats,
            first_site=self.period.first,
            period=self.period.length,
            carried=tuple(self.carried.values()),
            invariant=tuple(self.invariant),
            exported=self._exported(start),
        )

    def _match(self, start: int, offset: int, operands: list[fx.Node]) -> None:
        """The i-th operand is read by body i: all inside, all the same from outside, or each from the body before."""
        if all(operand is operands[0] for operand in operands):
            if self.place[operands[0]] >= start:
                raise NotIsomorphic(f"{operands[0].name} is made in one loop and read in all")
            if operands[0].op != "get_attr" and not is_shape(operands[0]):
                self.invariant.setdefault(operands[0])
            return
        offsets = [self.place[operand] - start - i * self.length for i, operand in enumerate(operands)]
        if all(place == offsets[0] and 0 <= place < self.length for place in offsets):
            return
        carried = offsets[1] + self.length
        from_before = (
            all(place + self.length == carried for place in offsets[1:]) and 0 <= carried < self.length
        )
        if not from_before or self.place[operands[0]] >= start:
            twin = self.nodes[start + offset]
            raise NotIsomorphic(f"{twin.name} reads values that do not line up between loops")
        slot = self.carried.setdefault(carried, Carried(operands[0], carried))
        if slot.initial is not operands[0]:
            raise NotIsomorphic(f"{slot.initial.name} and {operands[0].name} both start one carried value")

    def _exported(self, start: int) -> tuple[int, ...]:
        end = start + self.period.repeats * self.length
        last = end - self.length
        found = set()
        for at in range(start, end):
            node = self.nodes[at]
            if not any(self.place[user] >= end for user in node.users) or is_shape(node):
                continue
            if at < last:
                raise NotIsomorphic(f"{node.name}, made in an early loop, is read after the last one")
            found.add(at - last)
        return tuple(sorted(found))


def _shape_of(arguments: Any) -> Any:
    """Arguments with every node replaced by a mark, for comparing what is left."""
    return map_aggregate(arguments, lambda leaf: "*" if isinstance(leaf, fx.Node) else leaf)


def _same_operation(a: fx.Node, b: fx.Node) -> bool:
    if a.op != b.op or a.target != b.target or len(a.all_input_nodes) != len(b.all_input_nodes):
        return False
    if a.op not in ("call_function", "call_method"):
        return False
    for mine, other in zip(a.all_input_nodes, b.all_input_nodes, strict=True):
        if (mine.op == "get_attr" or other.op == "get_attr") and mine is not other:
            return False
    return bool(_shape_of(a.args) == _shape_of(b.args) and _shape_of(a.kwargs) == _shape_of(b.kwargs))


def find_roll(graph: fx.Graph, markers: tuple[fx.Node, ...], sites: tuple[Site, ...]) -> Roll:
    """The proved loop that covers the most sites.

    Raises:
        NotIsomorphic: with the reason of the best candidate.
    """
    nodes = list(graph.nodes)
    reason = "no run of layers is repeated"
    for number, period in enumerate(with_peeled(find_periods([site.layer for site in sites]))[:8]):
        try:
            prover = _Prover(nodes, markers, period)
            starts = sorted(prover.starts(), key=lambda start: (prover.carried_count(start), -start))
        except NotIsomorphic as error:
            reason = str(error) if number == 0 else reason
            continue
        for start in starts[:16]:
            try:
                return prover.prove(start)
            except NotIsomorphic as error:
                reason = str(error) if number == 0 else reason
    raise NotIsomorphic(reason)


class RollLoop(Pass):
    """Sets `compilation.roll`, or `roll_reason` where the loop cannot be proved or rolling is off."""

    name = "roll"

    def run(self, compilation: Compilation) -> dict[str, int]:
        if not compilation.options.roll:
            compilation.roll_reason = "rolling is off (roll=False)"
            return {"rolled": 0}
        try:
            compilation.roll = find_roll(compilation.graph.graph, compilation.markers, compilation.sites)
        except NotIsomorphic as error:
            compilation.roll_reason = str(error)
            return {"rolled": 0}
        roll = compilation.roll
        return {
            "rolled": 1,
            "bodies": roll.repeats,
            "body_nodes": roll.length,
            "carried": len(roll.carried),
            "invariant": len(roll.invariant),
        }
