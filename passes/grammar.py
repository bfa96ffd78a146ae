"""What must hold of the rewritten programs before anything runs them.

- The ops that one step runs, plane by plane, are those of the schedule, and every plane is written exactly once.
- Every consume reads the line of the store that an earlier op of the same step captured, and depends on that capture
  through data, so that neither dead-code elimination nor reordering can part them.
- Pool, plan and store arguments are inputs of the stage, and nothing but our ops touches pool or store: no clone, no
  view.
- The ops of gated sites, and no others, have a gate, as large as the queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import fx

from ..kernels import ops as _registered  # noqa: F401  registers torch.ops.sparse_compile
from .base import Compilation, Pass
from .errors import PassError
from .nodes import fake, same_sizes
from .program import DEPTH_MODE, MODE_INPUTS, PLAN_INPUTS, POOL_INPUTS, STORE_INPUTS, Site, Stage, Variant
from .schedule import check_order

_ops = torch.ops.sparse_compile
_PLAN = (*POOL_INPUTS, *PLAN_INPUTS)
_RUNTIME_INPUTS = {*_PLAN, *STORE_INPUTS, "row_slot", *MODE_INPUTS.values()}
_INPUTS = {
    _ops.dense.default: (_PLAN,),
    _ops.capture.default: ((*_PLAN, "row_slot", *STORE_INPUTS),),
    _ops.consume.default: ((*_PLAN, "row_slot", *STORE_INPUTS),),
    _ops.mixed.default: tuple((*_PLAN, "row_slot", mode, *STORE_INPUTS) for mode in MODE_INPUTS.values()),
}
_MODE_AT = 11  # place of the mode among the arguments of a mixed op


def attention_ops(stage: Stage) -> Iterator[fx.Node]:
    """Our attention ops of one stage, in order."""
    return (
        node for node in stage.module.graph.nodes if node.op == "call_function" and node.target in _INPUTS
    )


def op_kind(node: fx.Node) -> str:
    """ "dense", "capture" or "consume"; a mixed op is what its mode input says."""
    if node.target is _ops.mixed.default:
        return next(kind for kind, name in MODE_INPUTS.items() if name == _mode_name(node))
    return next(
        kind for kind in ("dense", "capture", "consume") if node.target is getattr(_ops, kind).default
    )


def _mode_name(node: fx.Node) -> str:
    """Name of the mode input of a mixed op; "" for another op."""
    mode = node.args[_MODE_AT] if node.target is _ops.mixed.default else None
    return str(mode.target) if isinstance(mode, fx.Node) else ""


def _gate_maybe(node: fx.Node) -> fx.Node | None:
    """What stands behind the plan and store arguments of an op."""
    behind = node.args[3 + len(_INPUTS[node.target][0]) :]  # type: ignore[index]
    return behind[0] if behind and isinstance(behind[0], fx.Node) else None


def _is_any_depth(node: fx.Node) -> bool:
    return _mode_name(node).startswith(DEPTH_MODE)


def _is_runtime(node: fx.Node) -> bool:
    """Whether an input is one of plan, pool and store."""
    return node.target in _RUNTIME_INPUTS or str(node.target).startswith(DEPTH_MODE)


def _check_inputs(stage: Stage) -> None:
    for node in attention_ops(stage):
        given = node.args[3:] if _gate_maybe(node) is None else node.args[3:-1]
        names = tuple(arg.target for arg in given if isinstance(arg, fx.Node) and arg.op == "placeholder")
        if _is_any_depth(node):
            names = tuple(MODE_INPUTS["consume"] if name == _mode_name(node) else name for name in names)
        if names not in _INPUTS[node.target]:  # type: ignore[index]
            raise PassError(f"{node.name} in {stage.name!r} has the wrong plan inputs: {names}")
        gate, query = _gate_maybe(node), node.args[0]
        if gate is not None and gate.op == "placeholder" and _is_runtime(gate):
            raise PassError(f"{node.name} in {stage.name!r} is handed a runtime input as its gate.")
        if gate is not None and not same_sizes(fake(gate).shape, fake(query).shape):  # type: ignore[arg-type]
            raise PassError(f"{node.name} in {stage.name!r} has a gate of another shape than its queries.")
    for node in stage.module.graph.nodes:
        if node.op != "placeholder" or not _is_runtime(node):
            continue
        strangers = [user.name for user in node.users if user.target not in _INPUTS]
        if strangers:
            raise PassError(
                f"{strangers[0]} in {stage.name!r} touches {node.target}, which only our ops may."
            )


def _unfolded(variant: Variant, sites: tuple[Site, ...]) -> Iterator[Stage]:
    """The stages of a run through the whole model: a body for any depth stands for one at each."""
    for stage in variant.stages:
        ops = list(attention_ops(stage))
        if not stage.any_depth:
            yield stage
            continue
        around = sum(1 for other in variant.stages if other is not stage for _ in attention_ops(other))
        for loop in range((len(sites) - around) // len(ops)):
            yield replace(stage, loop=loop)


def _any_kind(node: fx.Node, site: Site) -> tuple[int, str, int | None] | None:
    """What the schedule wants at `site`, for an op that gets its rows' modes from a table of the schedule."""
    if not _is_any_depth(node) or (site.kind != "dense" and node.kwargs.get("site") != site.store_site):
        return None
    return site.plane, site.kind, site.store_site


def _check_planes(variant: Variant, sites: tuple[Site, ...]) -> None:
    """Each plane written once, in order, by the op that the schedule names, with a gate where the site has one."""
    ran = []
    for stage in _unfolded(variant, sites):
        for node in attention_ops(stage):
            plane = int(node.kwargs["plane"]) + stage.loop * int(node.kwargs["plane_stride"])  # type: ignore[arg-type]
            found = _any_kind(node, sites[plane]) or (plane, op_kind(node), node.kwargs.get("site"))
            ran.append((*found, _gate_maybe(node) is not None))
    wanted = [
        (site.plane, "dense", None, site.gated)
        if variant.name == "dense" or site.kind == "dense"
        else (site.plane, site.kind, site.store_site, site.gated)
        for site in sites
    ]
    if ran != wanted:
        at = next(
            (i for i, (a, b) in enumerate(zip(ran, wanted, strict=False)) if a != b),
            min(len(ran), len(wanted)),
        )
        same = at < min(len(ran), len(wanted)) and ran[at][:-1] == wanted[at][:-1]
        broken = "has a gate too many or too few" if same else "does not follow the schedule"
        raise PassError(f"variant {variant.name!r} {broken} at site {at}.")


def _depends_on(node: fx.Node, source: fx.Node) -> bool:
    seen, waiting = {node}, [node]
    while waiting:
        for parent in waiting.pop().all_input_nodes:
            if parent is source:
                return True
            if parent not in seen:
                seen.add(parent)
                waiting.append(parent)
    return False


def _check_data_edges(variant: Variant) -> None:
    """Within a stage, a consume depends on its capture; between stages, the stage that captures feeds what follows."""
    for number, stage in enumerate(variant.stages):
        captures: dict[object, fx.Node] = {}
        for node in attention_ops(stage):
            line = node.kwargs.get("site")
            if _is_any_depth(node):
                continue
            if op_kind(node) == "capture":
                captures[line] = node
            elif op_kind(node) == "consume" and line in captures and not _depends_on(node, captures[line]):
                raise PassError(
                    f"{node.name} in {stage.name!r} consumes without depending on {captures[line].name}."
                )
        later = {name for following in variant.stages[number + 1 :] for name in following.inputs}
        if captures and number + 1 < len(variant.stages) and not later & set(stage.outputs):
            raise PassError(f"stage {stage.name!r} captures, but nothing after it reads its outputs.")


def check_grammar(compilation: Compilation) -> None:
    """Raise PassError unless all that exists so far holds; the manager asks after every pass."""
    check_order(compilation.sites)
    for variant in compilation.variants.values():
        for stage in variant.stages:
            _check_inputs(stage)
        _check_planes(variant, compilation.sites)
        _check_data_edges(variant)


class Grammar(Pass):
    """Checks the finished program and counts what is in it; changes nothing."""

    name = "grammar"

    def run(self, compilation: Compilation) -> dict[str, int]:
        check_grammar(compilation)
        stages = [stage for variant in compilation.variants.values() for stage in variant.stages]
        ops = sum(1 for stage in stages for _ in attention_ops(stage))
        return {"variants": len(compilation.variants), "ops": ops}
