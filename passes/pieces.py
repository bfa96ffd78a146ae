"""Cut a stage at our ops into pieces of plain computation, and let equal pieces share one graph.

    a = f(x, w1); o = dense(a, ...); b = g(o, w2); p = dense(b, ...); c = g(p, w3)

becomes the calls

    piece0(x; w1) -> a,  dense(a, ...) -> o,  piece1(o; w2) -> b,  dense(b, ...) -> p,  piece1(p; w3) -> c

Weights become inputs of a piece, so the layers of a model, the loops, and the variants of a program come down to a few
distinct graphs. Nothing that a compiler could fuse is parted: our ops are opaque to it anyway.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import map_arg

from .graph import Piece, free_inputs, is_row_tensor, is_shape
from .program import Stage


@dataclass(frozen=True, eq=False)
class Code:
    """The graph that equal pieces share: `module(*inputs, *weights)` returns a tuple.

    row_inputs: places of the inputs whose first dimension is rows.
    """

    module: fx.GraphModule
    row_inputs: tuple[int, ...]
    key: str

    @cached_property
    def row_outputs(self) -> tuple[int, ...]:
        """Places of the outputs whose first dimension is rows."""
        made = cast("tuple[fx.Node, ...]", self.module.graph.output_node().args[0])
        return tuple(at for at, node in enumerate(made) if is_row_tensor(node))


@dataclass(frozen=True)
class PieceCall:
    """One use of a code: names of its inputs and outputs in the stage, and its own weights."""

    code: Code
    inputs: tuple[str, ...]
    weights: tuple[torch.Tensor, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class Name:
    """A value of the stage among the arguments of an op."""

    name: str


@dataclass(frozen=True)
class OpCall:
    """One call of one of our ops. `args` holds Names and constants; `at` is its place among the stage's ops."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: str
    at: int


Call = PieceCall | OpCall


@dataclass(frozen=True)
class CutStage:
    """A stage as calls over values that bear the names of its graph's nodes.

    inputs, results: those of the values that `stage.inputs` and `stage.outputs` name for the executor.
    done: for each call, the values that nothing reads after it.
    """

    stage: Stage
    inputs: tuple[str, ...]
    calls: tuple[Call, ...]
    results: tuple[str, ...]
    done: tuple[tuple[str, ...], ...]


class _LiftedPiece(Piece):
    """A piece whose weights are inputs, behind the others."""

    def __init__(self, root: fx.GraphModule, inputs: Sequence[fx.Node]) -> None:
        super().__init__(root, inputs, "Piece")
        self.weights: dict[str, fx.Node] = {}

    def resolve(self, node: fx.Node) -> fx.Node:
        if node in self.map or node.op != "get_attr":
            return super().resolve(node)
        target = str(node.target)
        if target not in self.weights:
            made = self.placeholder(f"weight{len(self.weights)}")
            made.meta = dict(node.meta)
            self.weights[target] = made
        self.map[node] = self.weights[target]
        return self.weights[target]


@dataclass
class Cutter:
    """Cuts stages; `codes` holds the distinct graphs of all that were cut so far. Loops that share a module share its
    calls.
    """

    codes: dict[str, Code] = field(default_factory=dict)
    _made: dict[fx.GraphModule, CutStage] = field(default_factory=dict)

    def cut(self, stage: Stage) -> CutStage:
        """The calls of one stage, in its order."""
        if stage.module not in self._made:
            self._made[stage.module] = self._cut(stage)
        return replace(self._made[stage.module], stage=stage)

    def _cut(self, stage: Stage) -> CutStage:
        nodes = list(stage.module.graph.nodes)
        output = nodes[-1].args[0]
        runs = list(_runs([node for node in nodes if node.op == "call_function"]))
        calls: list[Call] = []
        for at, run in enumerate(runs):
            if isinstance(run, fx.Node):
                calls.append(_op_call(run, sum(isinstance(call, OpCall) for call in calls)))
                continue
            later = {
                node
                for other in runs[at + 1 :]
                for node in ([other] if isinstance(other, fx.Node) else other)
            }
            wanted = [node for node in run if node in output or any(user in later for user in node.users)]
            outputs = [node for node in wanted if not is_shape(node)]
            if outputs:
                calls.append(self._piece(stage, run, outputs))
        results = tuple(node.name for node in output)
        inputs = tuple(node.name for node in nodes if node.op == "placeholder")
        return CutStage(stage, inputs, tuple(calls), results, _last_reads(calls, results))

    def _piece(self, stage: Stage, nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> PieceCall:
        inputs = free_inputs(nodes)
        if not any(is_row_tensor(node) for node in inputs) and any(_reads_rows(node) for node in nodes):
            inputs.insert(0, next(n for n in stage.module.graph.nodes if is_row_tensor(n)))
        piece = _LiftedPiece(stage.module, inputs)
        for node in nodes:
            if not is_shape(node):
                piece.copy(node)
        module = piece.finish(outputs)
        key = structure(module.graph)
        code = self.codes.setdefault(
            key, Code(module, tuple(at for at, node in enumerate(inputs) if is_row_tensor(node)), key)
        )
        weights = tuple(attrgetter(name)(stage.module) for name in piece.weights)
        return PieceCall(
            code,
            tuple(node.name for node in inputs),
            tuple(weight.detach() for weight in weights),
            tuple(node.name for node in outputs),
        )


def structure(graph: fx.Graph) -> str:
    """A text that two graphs share exactly if they compute the same from inputs of the same shapes and dtypes."""
    number = {node: f"%{at}" for at, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        named = map_arg((node.args, dict(node.kwargs)), lambda leaf: number[leaf])
        kind = _describe(node.meta.get("val")) if node.op == "placeholder" else str(node.target)
        lines.append(f"{number[node]} {node.op} {kind} {named}")
    return "\n".join(lines)


def is_ours(node: fx.Node) -> bool:
    """Whether a node calls one of our attention ops."""
    return str(getattr(node.target, "namespace", "")) == "sparse_compile"


def _runs(nodes: list[fx.Node]) -> Iterator[fx.Node | list[fx.Node]]:
    """Our ops one by one, and the runs of other nodes between them."""
    run: list[fx.Node] = []
    for node in nodes:
        if not is_ours(node):
            run.append(node)
            continue
        if run:
            yield run
        yield node
        run = []
    if run:
        yield run


def _last_reads(calls: Sequence[Call], results: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Per call, the names that it reads or makes and nothing after it reads."""
    alive, done = set(results), []
    for call in reversed(calls):
        if isinstance(call, PieceCall):
            names = {*call.inputs, *call.outputs}
        else:
            names = {call.output, *(arg.name for arg in call.args if isinstance(arg, Name))}
        done.append(tuple(sorted(names - alive)))
        alive |= names
    return tuple(reversed(done))


def _op_call(node: fx.Node, at: int) -> OpCall:
    args = tuple(Name(arg.name) if isinstance(arg, fx.Node) else arg for arg in node.args)
    return OpCall(node.target, args, dict(node.kwargs), node.name, at)


def _reads_rows(node: fx.Node) -> bool:
    return any(is_shape(source) for source in node.all_input_nodes)


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(type(value).__name__)
    return f"{value.dtype} {tuple(value.shape)} {tuple(value.stride())} {value.device}"
