"""A report for people: rich tables. Neighbouring layers that were treated alike share a line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console, ConsoleOptions, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sparse_compile.report import LayerRow, Report

Treatment = TypeVar("Treatment", str, tuple[str, str])

LEAST_REASON = 28
"""Characters of a line that reasons need at least, beside the columns of loops."""

STYLES = {"dense": "blue", "capture": "yellow", "consume": "green"}


def render(report: Report) -> Group:
    """Tables for the layers and the reads, lines for the rest."""
    parts: list[Table | Text | _Layers] = [_title(report), _Layers(report), _counts(report)]
    parts.append(Text(f"KV cache: {_bytes(report.kv_bytes_per_token)} per token, all layers and loops"))
    if report.reads:
        parts.append(_read_table(report))
    parts += [_roll(report), *_gates(report), *_linears(report), *_quantised(report), *_hooks(report)]
    parts += [_passes(report), _implementation(report)]
    if report.speculation:
        parts.append(_speculation(report.speculation))
    if report.budget:
        parts.append(_budget(report.budget))
    if report.memory:
        held = ", ".join(f"{name.replace('_', ' ')} {_bytes(size)}" for name, size in report.memory.items())
        parts.append(Text(f"held by the engine: {held}"))
    return Group(*parts)


def _speculation(asked: dict[str, Any]) -> Text:
    return Text(
        f"speculation: {asked['mode']}, drafts with {asked['draft_loops']} loops, {asked['rows']} rows of a request at "
        f"once; rounds are synchronous for {asked['synchronous_for']}"
    )


def _title(report: Report) -> Text:
    kept = f"key_retention {report.retention['key_retention']:g}"
    if report.retention["by_layer"]:
        kept = f"key_retention {report.retention['fraction']}"
    elif report.retention["keep_first"] or report.retention["keep_last"]:
        kept += f", first {report.retention['keep_first']}, last {report.retention['keep_last']}"
    kept = kept if report.retention["enabled"] else "sparse off"
    return Text(f"{report.model}: {report.loops} loops, {kept}", style="bold")


@dataclass(frozen=True)
class _Layers:
    """What became of each layer in each loop: a column for every loop, or where those do not fit, a line for loops that
    were treated alike.
    """

    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        wide = _wide_table(self.report)
        reasons = wide.columns.pop()
        fits = Measurement.get(console, options, wide).maximum + LEAST_REASON <= options.max_width
        wide.columns.append(reasons)
        yield wide if fits else _narrow_table(self.report)


def _alike(report: Report) -> Iterator[list[LayerRow]]:
    """Runs of layers that were treated alike."""
    for _, same in groupby(
        report.layers, key=lambda row: (row.kinds, row.reasons, row.window, row.retention, row.gated)
    ):
        yield list(same)


def _wide_table(report: Report) -> Table:
    table = Table(header_style="bold", title_justify="left")
    table.add_column("layer", overflow="fold")
    for loop in range(report.loops):
        table.add_column(f"loop {loop}")
    by_layer = report.retention["by_layer"]
    if by_layer:
        table.add_column("keeps", justify="right")
    if report.gated:
        table.add_column("gated")
    table.add_column("why, by loop", overflow="fold")
    for rows in _alike(report):
        cells = [Text(kind, style=STYLES.get(kind, "")) for kind in rows[0].kinds]
        cells += [Text("")] * (report.loops - len(cells))
        if by_layer:
            cells.append(Text(_keeps(rows[0])))
        if report.gated:
            cells.append(Text("yes" if rows[0].gated else "no"))
        table.add_row(_layer_name(rows), *cells, _why(rows[0]))
    return table


def _narrow_table(report: Report) -> Table:
    table = Table(header_style="bold", title_justify="left")
    for name in ("layer", "loops", "attention", "why"):
        table.add_column(name, overflow="fold")
    for rows in _alike(report):
        loops = _loops_by(zip(rows[0].kinds, rows[0].reasons, strict=True))
        lines = [
            (_ranges(same), Text(kind, style=STYLES.get(kind, "")), reason)
            for (kind, reason), same in loops.items()
        ]
        heads = [_layer_name(rows)]
        if report.retention["by_layer"] and _keeps(rows[0]):
            heads.append(f"keeps {_keeps(rows[0])}")
        if report.gated:
            heads.append("gated" if rows[0].gated else "not gated")
        for head, line in zip_longest(heads, lines):
            table.add_row(head, *(line or ()))
        table.add_section()
    return table


def _loops_by(treatments: Iterable[Treatment]) -> dict[Treatment, list[int]]:
    """The loops of each treatment, which are given loop by loop."""
    loops: dict[Treatment, list[int]] = {}
    for loop, treatment in enumerate(treatments):
        loops.setdefault(treatment, []).append(loop)
    return loops


def _ranges(numbers: list[int]) -> str:
    """ "0,2-5" for ascending numbers."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _keeps(row: LayerRow) -> str:
    return f"{float(row.retention.share):g}" if "consume" in row.kinds else ""


def _layer_name(rows: list[LayerRow]) -> str:
    """ "model.layers.0..23.self_attn" for a run of layers whose names differ in one number."""
    first, last = rows[0].layer, rows[-1].layer
    if len(rows) == 1:
        return first
    heads, tails = re.split(r"(\d+)", first), re.split(r"(\d+)", last)
    differing = [place for place, (a, b) in enumerate(zip(heads, tails, strict=False)) if a != b]
    if len(heads) == len(tails) and len(differing) == 1:
        heads[differing[0]] += f"..{tails[differing[0]]}"
        return "".join(heads)
    return f"{first} .. {last} ({len(rows)} layers)"


def _why(row: LayerRow) -> str:
    """Every reason once, after the loops that it holds for; alone where it holds for all of them."""
    loops = _loops_by(row.reasons)
    if len(loops) == 1:
        return row.reasons[0]
    return "; ".join(f"{_ranges(same)}: {reason}" for reason, same in loops.items())


def _counts(report: Report) -> Text:
    total = sum(report.counts.values())
    text = Text(f"{total} attention calls per token: ")
    for place, (kind, number) in enumerate(report.counts.items()):
        text.append(", " if place else "").append(f"{number} {kind}", style=STYLES[kind])
    if report.retention["enabled"] and not report.counts["consume"]:
        text.append(" (nothing is sparse)", style="bold")
    return text


def _read_table(report: Report) -> Table:
    table = Table(header_style="bold")
    for name in ("visible tokens", "dense reads per new token", "sparse reads (at most)", "sparse / dense"):
        table.add_column(name, justify="right")
    for one in report.reads:
        table.add_row(
            f"{one.context:,}", _bytes(one.dense_bytes), _bytes(one.sparse_bytes), f"{one.ratio:.3f}"
        )
    return table


def _roll(report: Report) -> Text:
    return Text("loop: rolled into one body" if report.rolled else f"loop: not rolled, {report.roll_reason}")


def _gates(report: Report) -> list[Text]:
    """How many attention calls apply their gate themselves (the table says which), and why others do not."""
    taken = (
        [Text(f"gates: {report.gated} attention calls apply the gate of their output")]
        if report.gated
        else []
    )
    left = [((layer,), reason) for layer, reason in report.gates_left_alone]
    return taken + _by_reason("gates left alone", left)


def _linears(report: Report) -> list[Text]:
    """How many linear layers became how many, and every reason why others did not, once."""
    lines = []
    if report.merged:
        layers = sum(len(parts) for parts in report.merged)
        twice = f", {_bytes(report.held_twice)} of them held twice" if report.held_twice else ""
        lines.append(Text(f"linear layers: merged {layers} into {len(report.merged)}{twice}"))
    lines += _by_reason("linear layers left alone", report.left_alone)
    if report.skinny is not None:
        lines.append(
            Text(f"products of a few rows: {report.skinny} linear layers have kernels that stream weights")
        )
        lines += _by_reason(
            "products of a few rows left alone", [((one,), why) for one, why in report.not_skinny]
        )
    return lines


def _quantised(report: Report) -> list[Text]:
    return [
        Text(
            f"quantised weights: {one['weights']} of kind {kind}, {_bytes(one['bytes'])}, run as they compute "
            f"themselves; steps with them are {'measured' if one['measured'] else 'not measured'}"
        )
        for kind, one in report.quantised.items()
    ]


def _hooks(report: Report) -> list[Text]:
    return [
        Text(f"ran while compiling only, beside what it did to tensors: {words}") for words in report.hooks
    ]


def _by_reason(title: str, left: Iterable[tuple[tuple[str, ...], str]]) -> list[Text]:
    """A line for each reason, with the first that it holds for."""
    by_reason: dict[str, list[tuple[str, ...]]] = {}
    for weights, reason in left:
        by_reason.setdefault(reason, []).append(weights)
    lines = []
    for reason, groups in by_reason.items():
        more = f" and {len(groups) - 1} more" if len(groups) > 1 else ""
        lines.append(Text(f"{title}: {', '.join(groups[0])}{more}: {reason}"))
    return lines


def _passes(report: Report) -> Text:
    return Text(
        "compile passes: "
        + ", ".join(f"{name} {seconds * 1000:.0f} ms" for name, seconds, _ in report.passes)
    )


def _budget(budget: dict[str, int]) -> Text:
    parts = [
        f"{name.replace('_', ' ')} {_bytes(size)}"
        for name, size in budget.items()
        if name not in ("batch", "context", "total")
    ]
    return Text(
        f"memory for {budget['batch']} x {budget['context']:,} tokens: {', '.join(parts)}; "
        f"in all {_bytes(budget['total'])}"
    )


def _implementation(report: Report) -> Text:
    chosen = "" if report.implementation == report.implementation_option else " (auto)"
    return Text(f"attention implementation: {report.implementation}{chosen}")


def _bytes(size: float) -> str:
    from sparse_compile.report import format_bytes

    return format_bytes(size)
