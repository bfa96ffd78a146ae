"""A decode graph from which the user gets less than was asked for: an error, a warning, or nothing."""

from __future__ import annotations

import warnings

from sparse_compile.backend.options import BackendOptions
from sparse_compile.backend.report import GraphReport
from sparse_compile.errors import SparseCompileError

_SHOWN = 12


class NothingRewritten(SparseCompileError, RuntimeError):  # noqa: N818  the name that users catch says what it is
    """A decode graph in which no attention call could be rewritten, or none became sparse.

    Attributes:
        report: the report of the graph, with a reason per node.
    """

    def __init__(self, message: str, report: GraphReport) -> None:
        super().__init__(message)
        self.report = report


def check_matched(report: GraphReport, options: BackendOptions) -> None:
    """Raise or warn, as `on_unmatched` says, if a decode graph gets nothing from this backend."""
    problem = _problem(report, options)
    if not problem or options.on_unmatched == "ignore":
        return
    message = f"{problem}\n{_reasons(report)}\n{_remedy(report, options)}"
    if options.on_unmatched == "error":
        raise NothingRewritten(message, report)
    warnings.warn(message, UserWarning, stacklevel=2)


def _problem(report: GraphReport, options: BackendOptions) -> str:
    if report.kind != "decode":
        return ""
    if not report.rewritten:
        return f"none of the {report.total} attention calls of this decode graph was rewritten:"
    wants_sparse = options.enabled and min(options.config().shares) < 1
    if wants_sparse and not report.counts["consume"]:
        return f"nothing is sparse: none of the {report.total} attention calls of this decode graph consumes:"
    return ""


def _reasons(report: GraphReport) -> str:
    lines = [f"  {one.module or 'node'} ({one.node}): {one.reason}" for one in report.left]
    lines += [f"  {site.name}: {site.kind}, {site.reason}" for site in report.sites if site.kind != "consume"]
    more = len(lines) - _SHOWN
    lines = lines[:_SHOWN] + (
        [f"  and {more} more, see sparse_compile.backend.last_report()"] if more > 0 else []
    )
    return "\n".join(lines + [f"  graph break: {one}" for one in report.breaks])


def _remedy(report: GraphReport, options: BackendOptions) -> str:
    """Which option would make something sparse, if one would, and how to go on without."""
    loops = max((site.loops for site in report.rewritten), default=0)
    others = []
    if 1 < loops <= options.capture_loop + 1:
        others.append(f"choose a lower capture_loop than {options.capture_loop}, or ")
    if loops > 1 and options.recapture_every == 1:
        others.append("choose a higher recapture_every than 1, or ")
    other = "".join(others)
    return f"To compile it all the same, {other}pass options={{'on_unmatched': 'warn'}} or 'ignore'."
