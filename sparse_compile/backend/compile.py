"""The backend itself: find, rewrite, report, hand on."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx

from sparse_compile.backend.breaks import BreakLog
from sparse_compile.backend.causes import CauseLog
from sparse_compile.backend.frame import Frame
from sparse_compile.backend.options import BackendOptions
from sparse_compile.backend.report import GraphReport, Left, remember
from sparse_compile.backend.unmatched import check_matched
from sparse_compile.passes.cached import CachedCompilation, module_of, rewrite_graph
from sparse_compile.passes.program import PassRecord
from sparse_compile.passes.skinny import Replaced

log = logging.getLogger("sparse_compile.backend")
_numbers = itertools.count()
_breaks = BreakLog()
_causes = CauseLog()


def sparse_compile_backend(
    graph: fx.GraphModule,
    inputs: list[Any],
    *,
    options: Mapping[str, Any] | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """What torch.compile calls for every graph: `torch.compile(model, backend="sparse_compile", options={...})`.

    Decode graphs (one query per row over a cache) are rewritten by loop depth, all others stay dense; both go to
    Inductor.

    Raises:
        ArgumentError: an option that is unknown or outside of its limit.
        OptionError: `capture_loop` is not below the number of loops.
        NothingRewritten: nothing in a decode graph could be rewritten or became sparse (`on_unmatched="error"`).
    """
    settings = BackendOptions.of(options, mode)
    number = next(_numbers)
    before = graph.print_readable(print_output=False) if _traces() else ""
    dump = os.environ.get("SPARSE_COMPILE_DUMP")
    device = next((one.device.type for one in inputs if isinstance(one, torch.Tensor) and one.is_cuda), "cpu")
    told = settings.for_passes(Path(dump) if dump else None, device)
    compilation, passes = rewrite_graph(graph, told, Frame.current().window_of, number)
    report = _report(number, compilation, passes)
    remember(report)
    _log(report, before, graph)
    check_matched(report, settings)
    if settings.inductor is False:
        return graph.forward
    from sparse_compile.backend.inductor import compile_with_inductor

    return compile_with_inductor(graph, inputs, settings, few_rows=bool(report.products))


def _report(number: int, compilation: CachedCompilation, passes: tuple[PassRecord, ...]) -> GraphReport:
    found = [(one.node, one.reason) for one in compilation.left]
    made = compilation.products or Replaced({}, 0, 0, ())
    left, library = (
        tuple(Left(node.name, module_of(node), reason) for node, reason in some)
        for some in (found, made.left)
    )
    return GraphReport(
        number=number,
        kind=compilation.kind,
        sites=compilation.sites,
        left=left,
        breaks=_breaks.new(),
        passes=passes,
        cause=_causes.new(),
        products=made.counts,
        replaced=made.layers,
        norms=made.norms,
        library=library,
    )


def _traces() -> bool:
    """Whether anybody will read the text of whole graphs, which takes seconds to write for large ones."""
    return bool(os.environ.get("TORCH_TRACE")) or log.isEnabledFor(logging.DEBUG)


def _log(report: GraphReport, before: str, graph: fx.GraphModule) -> None:
    """TORCH_LOGS="sparse_compile.backend" shows reports, "+sparse_compile.backend" graphs too; tlparse shows both."""
    from torch._logging import trace_structured

    log.info("%s", report)
    if not _traces():
        return
    after = graph.print_readable(print_output=False)
    log.debug("graph %d before:\n%s\ngraph %d after:\n%s", report.number, before, report.number, after)
    for name, text in (("before", before), ("after", after), ("report", str(report))):
        metadata = {"name": f"sparse_compile_{name}", "encoding": "string"}
        trace_structured("artifact", metadata_fn=partial(dict, metadata), payload_fn=partial(str, text))
