"""From a Hugging Face model to a program: trace, then every pass in order."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from .base import Compilation, Options, PassManager, ignore
from .canonicalize import Canonicalize
from .gates import FuseGates
from .grammar import Grammar, check_grammar
from .merge_linears import MergeLinears
from .program import PassRecord, Program
from .rewrite import Rewrite
from .roll import RollLoop
from .schedule import Schedule
from .sites import LabelSites
from .trace import trace
from .weights import named_tensors

PASSES = (
    Canonicalize(),
    LabelSites(),
    Schedule(),
    MergeLinears(),
    FuseGates(),
    RollLoop(),
    Rewrite(),
    Grammar(),
)


STEPS = ("trace", *(step.name for step in PASSES))


def build_program(model: nn.Module, options: Options, begin: Callable[[str], None] = ignore) -> Program:
    """Trace `model` and rewrite it by `options`. begin: told each of STEPS before it runs.

    Raises:
        UnsupportedModel: the model cannot be compiled; the message is one sentence that names the module.
        OptionError: `capture_loop` is not below the model's number of loops.
        PassError: a bug of the compiler.
    """
    import time

    begin("trace")
    start = time.perf_counter()
    graph = trace(model)
    traced = PassRecord("trace", time.perf_counter() - start, {"nodes": len(graph.graph.nodes)})
    compilation = Compilation(graph, options, tensors=named_tensors(model))
    records = PassManager(PASSES, check_grammar, begin).run(compilation)
    return Program(
        sites=compilation.sites,
        traced=compilation.graph,
        variants=compilation.variants,
        roll=compilation.roll,
        roll_reason=compilation.roll_reason,
        passes=(traced, *records),
        merged=tuple(compilation.merged),
        left_alone=tuple(compilation.left_alone),
        gates_left_alone=tuple(compilation.gates_left_alone),
    )
