"""Turn markers into ops by loop depth, and cut the graph into the stages that the executor runs.

    o = site(q, k, v, scale=s, window=0, softcap=0)

becomes, at loop depths 0, 1 and 2 of the default schedule,

    o = dense  (q, k, v, k_pool, v_pool, block_table, ..., plane=p)
    o = capture(q, k, v, k_pool, v_pool, block_table, ..., row_slot, index, ..., plane=p, site=n)
    o = consume(q, k, v, k_pool, v_pool, block_table, ..., row_slot, index, ..., plane=p, site=n)

Variants: "dense" (prefill, short rows, sparse off), "sparse" (the schedule), "mixed" (the schedule for rows that want
it and dense for the others, mode per row), and for rolled programs "depth" (one body for rows at any depth, where each
site that is not always dense reads a mode per row of its own). A rolled program runs prologue, one body per loop, an
epilogue and the head; an unrolled one runs trunk and head. The head is everything after the last site: it only runs for
the rows that need logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from ..kernels.retention import Retention
from .base import Compilation, Options, Pass
from .errors import PassError
from .graph import SITE, Piece, free_inputs, is_call, is_row_tensor
from .program import (
    MODE_INPUTS,
    PLAN_INPUTS,
    POOL_INPUTS,
    STORE_INPUTS,
    Roll,
    Site,
    Stage,
    Variant,
    depth_mode_input,
)

_ops = torch.ops.sparse_compile


@dataclass(frozen=True)
class Place:
    """What stands in for one marker: the op that the schedule wants, or a mixed op, whose mode input each row reads."""

    site: Site
    kind: str
    plane: int
    mode_input: str = ""  # "": not mixed


class _SitePiece(Piece):
    """A piece whose markers become ops; plan, pool and store inputs are added as they are needed."""

    def __init__(
        self, root: fx.GraphModule, inputs: Sequence[fx.Node], name: str, options: Options, stride: int
    ) -> None:
        super().__init__(root, inputs, name)
        self.options, self.stride = options, stride
        self.runtime_inputs: dict[str, fx.Node] = {}

    def runtime_input(self, name: str) -> fx.Node:
        if name not in self.runtime_inputs:
            self.runtime_inputs[name] = self.placeholder(name)
        return self.runtime_inputs[name]

    def rewrite(self, marker: fx.Node, place: Place) -> fx.Node:
        """Place the op for `marker`."""
        site, kind = place.site, place.kind
        q, k, v, *gate = (self.resolve(node) for node in marker.args)  # type: ignore[arg-type]
        arguments: list[Any] = [q, k, v]
        arguments += [self.runtime_input(name) for name in (*POOL_INPUTS, *PLAN_INPUTS)]
        keywords: dict[str, Any] = {"plane": place.plane, "plane_stride": self.stride, "scale": site.scale}
        keywords |= {"softcap": site.softcap, "implementation": self.options.implementation}
        retention = {
            "retention_num": site.retention.numerator,
            "retention_den": site.retention.denominator,
            **always_kept(site.retention),
        }
        if kind == "dense":
            target, keywords = _ops.dense.default, keywords | {"window": site.window}
        else:
            arguments.append(self.runtime_input("row_slot"))
            if place.mode_input:
                arguments.append(self.runtime_input(place.mode_input))
            arguments += [self.runtime_input(name) for name in STORE_INPUTS]
            keywords["site"] = site.store_site
            if place.mode_input:
                target, keywords = _ops.mixed.default, keywords | retention
            elif kind == "capture":
                target, keywords = _ops.capture.default, keywords | retention
            else:
                target = _ops.consume.default
        made = self.graph.call_function(target, (*arguments, *gate), keywords)
        made.meta = {**marker.meta, "pass": "rewrite", "site": site.name}
        self.map[marker] = made
        return made


def always_kept(retention: Retention) -> dict[str, int]:
    """Keywords of an op for the keys that are kept whatever their scores; none where there are none."""
    given = {"keep_first": retention.first, "keep_last": retention.last}
    return {name: count for name, count in given.items() if count}


class Rewriter:
    """Builds the variants of one compilation."""

    def __init__(self, compilation: Compilation) -> None:
        self.compilation = compilation
        self.root = compilation.graph
        self.options = compilation.options
        self.nodes = [n for n in compilation.graph.graph.nodes if n.op not in ("placeholder", "output")]
        self.inputs = [n for n in compilation.graph.graph.nodes if n.op == "placeholder"]
        output = compilation.graph.graph.output_node().args[0]
        assert isinstance(output, fx.Node)
        self.logits = output
        self.site_of = dict(zip(compilation.markers, compilation.sites, strict=True))

    def place(self, site: Site, variant: str, plane: int) -> Place:
        """The op of `site` in a variant where its loop is fixed."""
        kind = "dense" if variant == "dense" else site.kind
        mixed = variant in ("mixed", "depth") and kind != "dense"
        return Place(site, kind, plane, MODE_INPUTS[kind] if mixed else "")

    def depth_place(self, number: int, roll: Roll) -> Place:
        """The op of the `number`-th site of a body that rows at any depth go through."""
        at = roll.first_site + number
        sites = self.compilation.sites[at : at + roll.repeats * roll.period : roll.period]
        sparse = next((site for site in sites if site.kind != "dense"), None)
        if sparse is None:
            return Place(sites[0], "dense", at)
        return Place(sparse, sparse.kind, at, depth_mode_input(number))

    def stage(
        self,
        name: str,
        nodes: Sequence[fx.Node],
        outputs: Sequence[fx.Node],
        names: dict[fx.Node, str],
        variant: str,
        *,
        out_names: Sequence[str] | None = None,
        places: dict[fx.Node, Place] | None = None,
        stride: int = 0,
    ) -> Stage:
        """Cut `nodes` out as one stage; `names` maps outside values to names in the executor's environment."""
        inputs = self._inputs_of(nodes, outputs)
        piece = _SitePiece(self.root, inputs, name.split(" ")[0].capitalize(), self.options, stride)
        for node in nodes:
            if is_call(node, SITE):
                site = self.site_of[node]
                piece.rewrite(node, (places or {}).get(node) or self.place(site, variant, site.plane))
            else:
                piece.copy(node)
        module = piece.finish(outputs)
        placeholders = [node.target for node in module.graph.nodes if node.op == "placeholder"]
        environment = {node.name: names.get(node, node.name) for node in inputs}
        out_names = tuple(out_names if out_names is not None else (names.get(n, n.name) for n in outputs))
        row_inputs = (names.get(n, n.name) for n in inputs if is_row_tensor(n)) if name == "head" else ()
        return Stage(
            name=name,
            module=module,
            inputs=tuple(environment.get(str(target), str(target)) for target in placeholders),
            outputs=out_names,
            row_inputs=frozenset(row_inputs),
            row_outputs=frozenset(
                made for made, n in zip(out_names, outputs, strict=True) if is_row_tensor(n)
            ),
        )

    def _inputs_of(self, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> list[fx.Node]:
        """Inputs of a stage; one row tensor at least, so that the number of rows is known inside."""
        inputs = free_inputs(nodes)
        inside = set(nodes)
        inputs += [n for n in outputs if n not in inside and n not in inputs]
        if not any(is_row_tensor(node) for node in inputs):
            inputs.insert(0, self.inputs[0])
        return inputs

    def tail(self, nodes: list[fx.Node], names: dict[fx.Node, str], variant: str, name: str) -> list[Stage]:
        """Everything up to the last site as one stage, and the head after it."""
        last = max((at for at, node in enumerate(nodes) if is_call(node, SITE)), default=-1)
        layers, head = nodes[: last + 1], nodes[last + 1 :]
        stages = []
        if layers:
            inside = set(layers)
            outputs = [node for node in self._inputs_of(head, [self.logits]) if node in inside]
            stages.append(self.stage(name, layers, outputs, names, variant))
        stages.append(self.stage("head", head, [self.logits], names, variant, out_names=["logits"]))
        return stages

    def unrolled(self, variant: str) -> Variant:
        return Variant(variant, tuple(self.tail(self.nodes, {}, variant, "trunk")))

    def rolled(self, variant: str, roll: Roll) -> Variant:
        nodes = list(self.root.graph.nodes)
        bodies = [
            nodes[roll.start + i * roll.length : roll.start + (i + 1) * roll.length]
            for i in range(roll.repeats)
        ]
        before = [n for n in nodes[: roll.start] if n.op != "placeholder"]
        after = [n for n in nodes[roll.start + roll.repeats * roll.length :] if n.op != "output"]
        names = {bodies[-1][offset]: name for offset, name in _result_names(roll).items()}
        stages = self._prologue(variant, roll, before, after)
        stages += self._bodies(variant, roll, bodies)
        stages += self.tail(after, names, variant, "epilogue")
        return Variant(variant, tuple(stages))

    def _prologue(self, variant: str, roll: Roll, before: list[fx.Node], after: list[fx.Node]) -> list[Stage]:
        made = set(before)
        later = [*roll.invariant, *free_inputs(after), *([self.logits] if self.logits in made else [])]
        outputs = [slot.initial for slot in roll.carried]
        out_names = [f"carry{number}" for number in range(len(outputs))]
        for node in dict.fromkeys(later):
            if node in made:
                outputs.append(node)
                out_names.append(node.name)
        return [self.stage("prologue", before, outputs, {}, variant, out_names=out_names)]

    def _bodies(self, variant: str, roll: Roll, bodies: list[list[fx.Node]]) -> list[Stage]:
        if variant == "depth":
            places = [self.depth_place(number, roll) for number in range(roll.period)]
            return [replace(self._body("body (any depth)", variant, roll, bodies, places), any_depth=True)]
        built: dict[tuple[str, ...], Stage] = {}
        stages = []
        for loop in range(roll.repeats):
            at = roll.first_site + loop * roll.period
            sites = self.compilation.sites[at : at + roll.period]
            places = [self.place(site, variant, roll.first_site + n) for n, site in enumerate(sites)]
            kinds = tuple(place.kind for place in places)
            name = f"body {loop} ({'/'.join(dict.fromkeys(kinds))})"
            if kinds not in built:
                built[kinds] = self._body(name, variant, roll, bodies, places)
            stages.append(replace(built[kinds], name=name, loop=loop))
        return stages

    def _body(
        self, name: str, variant: str, roll: Roll, bodies: list[list[fx.Node]], places: list[Place]
    ) -> Stage:
        # The second body is the pattern: it reads carried values from the first one and invariant values from outside,
        # where the first body may read one and the same node as both.
        pattern = bodies[1]
        names = {bodies[0][slot.offset]: f"carry{number}" for number, slot in enumerate(roll.carried)}
        outputs = [pattern[slot.offset] for slot in roll.carried]
        out_names = list(names.values())
        for offset, result in _result_names(roll).items():
            if result not in out_names:
                outputs.append(pattern[offset])
                out_names.append(result)
        markers = [node for node in pattern if is_call(node, SITE)]
        return self.stage(
            name,
            pattern,
            outputs,
            names,
            variant,
            out_names=out_names,
            places=dict(zip(markers, places, strict=True)),
            stride=roll.period,
        )


def _result_names(roll: Roll) -> dict[int, str]:
    """Environment names of what later nodes read of the last body: the carried value where it is one."""
    carried = {slot.offset: f"carry{number}" for number, slot in enumerate(roll.carried)}
    return {offset: carried.get(offset, f"body{offset}") for offset in roll.exported}


class Rewrite(Pass):
    """Fills `compilation.variants`."""

    name = "rewrite"

    def run(self, compilation: Compilation) -> dict[str, int]:
        rewriter = Rewriter(compilation)
        sparse = any(site.kind == "consume" for site in compilation.sites)
        roll = compilation.roll
        names = ("dense", "sparse", "mixed") if sparse else ("dense",)
        for variant in names if roll is None else (*names, "depth"):
            built = rewriter.rolled(variant, roll) if roll is not None else rewriter.unrolled(variant)
            compilation.variants[variant] = built
        counts = compilation.variants["sparse" if sparse else "dense"].op_counts()
        return {kind: counts[kind] for kind in ("dense", "capture", "consume")}

    def ensure(self, compilation: Compilation) -> None:
        for variant in compilation.variants.values():
            for stage in variant.stages:
                left = [node.name for node in stage.module.graph.nodes if is_call(node, SITE)]
                if left:
                    raise PassError(
                        f"stage {stage.name!r} of variant {variant.name!r} still holds markers: {left}"
                    )
