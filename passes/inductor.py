"""How Inductor compiles graphs of a few rows: settings that pieces and the graphs of torch.compile share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import fx

from ..kernels.skinny import starts_early
from .nodes import operation

log = logging.getLogger(__name__)

ONE_PASS = 4096
"""Numbers of a row that a sum over them reads in one pass: see `one_pass_reductions`."""

# By the first part of their names. What is computed element by element, and layouts, become part of the kernels that
# read them; and what is made of a shape alone reads no memory.
_LAYOUTS = {"getitem", "unsqueeze", "reshape", "expand", "transpose", "permute", "slice", "cast"}
_ELEMENTWISE = {"add", "sub", "mul", "div", "where", "lt", "le", "gt", "ge", "eq", "ne", "and_", "or_"}
_MADE_LIKE = {"zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"}
_FILLS = {"fill_", "zero_", "setitem"}


@contextmanager
def one_pass_reductions() -> Iterator[None]:
    """Within it Inductor compiles sums over the numbers of a row, as of a norm, so that they are read once and stay in
    registers, up to ONE_PASS of them. By itself it does so up to 1,024, and beyond reads them once per step: for a few
    rows each is a trip through memory that nothing hides.
    """
    from torch._inductor.virtualized import V

    with V.set_choices_handler(_choices()):
        yield


def untimed() -> dict[str, Any]:
    """Options with which Inductor chooses nothing by how fast it was that decides in which order a sum is added, where
    it has them: a graph that is compiled twice has the same bits.
    """
    from torch._inductor import config

    return {"deterministic": True} if hasattr(config, "deterministic") else {}


@cache
def _choices() -> Any:
    from torch._inductor.choices import InductorChoices
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.virtualized import V

    class Choices(InductorChoices):
        @staticmethod
        def should_use_persistent_reduction(
            features: SIMDKernelFeatures, cooperative_reduction: bool
        ) -> bool:
            by_row = features.get_reduction_hint() == ReductionHint.INNER and not cooperative_reduction
            if by_row and V.graph.sizevars.statically_known_leq(features.reduction_numel, ONE_PASS):
                return True
            return InductorChoices.should_use_persistent_reduction(features, cooperative_reduction)

    return Choices()


def early_start(device: torch.device, graph: fx.Graph) -> dict[str, Any]:
    """Options that let Inductor's kernels start before those ahead of them have finished, where GPU and Inductor can:
    a kernel waits for them before it reads what they wrote.

    Not where a kernel might read nothing: it might wait for nothing, and let those behind it start too early.
    """
    from torch._inductor import config

    if not starts_early(device) or not hasattr(config.triton, "enable_pdl"):
        return {}
    obstacle = reads_nothing_maybe(graph)
    if obstacle is not None:
        log.info("kernels of a graph do not start early: one for %s might read nothing", obstacle.name)
    return {} if obstacle is not None else {"triton.enable_pdl": True}


def reads_nothing_maybe(graph: fx.Graph) -> fx.Node | None:
    """A node for which there may be a kernel that reads no memory.

    A constant, or numbers counted from a shape, that are only computed with, element by element and together with
    something that is read, have no kernel of their own.
    """
    made = set[fx.Node]()
    for node in graph.nodes:
        given = [source for source in node.all_input_nodes if _may_be_tensor(source)]
        constant = [source for source in given if source in made]
        name = operation(node).partition(".")[0]
        if node.op in ("placeholder", "get_attr") or (not given and not _may_be_tensor(node)):
            continue
        if (name in _FILLS and not isinstance(node.args[-1], fx.Node | None)) or name == "zero_":
            return node
        if not given or name in _MADE_LIKE or (constant == given and name in _LAYOUTS):
            made.add(node)
        elif constant and (constant == given or name not in _ELEMENTWISE):
            return constant[0]
    return None


def _may_be_tensor(node: fx.Node) -> bool:
    """Whether a node's value is a tensor or holds some; also where the graph does not say what it is."""
    value = node.meta.get("example_value", node.meta.get("val", node))
    return node.op != "output" and not isinstance(value, torch.SymInt | torch.SymFloat | int | float | None)
