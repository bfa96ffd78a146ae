"""Figures of `sweep.measure_all` for people: tables, and plots where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from sparse_compile.errors import ArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

COLUMNS = {
    "perplexity": "perplexity",
    "agreement": "agreement",
    "generated_agreement": "generated",
    "recall_longest": "recall",
    "task_mean": "tasks",
    "task_mean_prompt_dense": "tasks, dense prompt",
    "mass_mean": "mass",
    "mass_p5": "mass, p5",
}
"""Figure -> head of its column."""


def render(result: dict[str, Any]) -> Group:
    """Tables for the sweep, the tasks and the drafts."""
    settings = result["settings"]
    place = "CPU" if result["gpu"].startswith("none") else result["gpu"]
    windows = f"{settings['windows']} window{'s' if settings['windows'] > 1 else ''}"
    title = (
        f"{result['model']}, {result['parameters']:,} parameters, {result['dtype']}, {place}: "
        f"{windows} of {settings['window']} tokens, the first {settings['prompt']} dense"
    )
    parts: list[Any] = [Text(title, style="bold"), _sweep_table(result)]
    if result["dense"]["tasks"]:
        parts.append(_task_table(result))
    if result["dense"]["acceptance"]:
        parts.append(_draft_table(result))
    return Group(*parts)


def _sweep_table(result: dict[str, Any]) -> Table:
    table = Table(header_style="bold")
    for name in ("keys kept", "capture loop", *COLUMNS.values()):
        table.add_column(name, justify="right")
    for row in _rows(result):
        name, loop = _name(row)
        table.add_row(name, loop, *(_number(figure, row[figure]) for figure in COLUMNS))
    return table


def _task_table(result: dict[str, Any]) -> Table:
    """Each task at each context, with the question decoded."""
    table = Table(header_style="bold")
    heads = [(task, context) for task, found in result["dense"]["tasks"].items() for context in found]
    for name in ("keys kept", "capture loop", *(f"{task} {context}" for task, context in heads)):
        table.add_column(name, justify="right")
    for row in _rows(result):
        table.add_row(*_name(row), *(f"{100 * row['tasks'][task][context]:.0f} %" for task, context in heads))
    return table


def _draft_table(result: dict[str, Any]) -> Table:
    """Drafts of the first loops: of given tokens, and of blocks while generating."""
    table = Table(header_style="bold")
    loops = list(result["dense"]["acceptance"])
    for name in (
        "keys kept",
        "capture loop",
        *(f"draft of {d}" for d in loops),
        *(f"kept of {d}" for d in loops),
    ):
        table.add_column(name, justify="right")
    for row in _rows(result):
        cells = [row[kind].get(d) for kind in ("acceptance", "accepted") for d in loops]
        table.add_row(*_name(row), *("" if cell is None else f"{100 * cell:.1f} %" for cell in cells))
    return table


def _rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [result["dense"], *result["rows"]]


def _numbered(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the grid: one retention for all layers, and the options that all points have."""
    return [row for row in result["rows"] if _is_number(row) and row["options"] == result["options"]]


def _is_number(row: dict[str, Any]) -> bool:
    return isinstance(row["retention"], int | float)


def _name(row: dict[str, Any]) -> tuple[str, str]:
    if "retention" not in row:
        return "dense", ""
    always = any(row["options"].get(name) for name in ("keep_first", "keep_last"))
    kept = f"{row['retention']:g}" if _is_number(row) and not always else row["kept"]
    return kept, str(row["capture_loop"])


def _number(figure: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if figure.startswith(("perplexity", "mass")) else f"{100 * value:.1f} %"


def check_plots(folder: Path) -> None:
    """Make the folder, for a matplotlib without a screen. Raises ArgumentError without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        limit = "needs matplotlib, which is not installed"
        raise ArgumentError("plots", str(folder), limit, "pip install 'sparse-compile[bench]'") from None
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)


def plot(result: dict[str, Any], folder: Path, heat_at: float = 0.1) -> list[Path]:
    """Write `quality-over-retention.png` and `retained-mass.png` to a folder; returns the paths.

    heat_at: the retention of the heat map; the nearest that was measured. Raises as `check_plots`.
    """
    check_plots(folder)
    paths = [_plot_quality(result, folder / "quality-over-retention.png")]
    captured = [row for row in _numbered(result) if row["mass"]]
    if captured:
        paths.append(_plot_mass(captured, folder / "retained-mass.png", heat_at))
    return paths


def _plot_quality(result: dict[str, Any], path: Path) -> Path:
    from matplotlib import pyplot

    figures = {
        "perplexity": "perplexity",
        "agreement": "agreement with dense",
        "task_mean": "mean of the tasks",
    }
    shown = {name: head for name, head in figures.items() if result["dense"][name] is not None}
    figure, axes = pyplot.subplots(1, len(shown), figsize=(4.2 * len(shown), 3.4), squeeze=False)
    for axis, (name, head) in zip(axes[0], shown.items(), strict=True):
        for loop in sorted({row["capture_loop"] for row in _numbered(result)}):
            rows = [row for row in _numbered(result) if row["capture_loop"] == loop]
            _line(axis, rows, name, f"capture loop {loop}")
        axis.axhline(result["dense"][name], color="gray", linestyle=":", label="dense")
        axis.set(xscale="log", xlabel="keys kept", title=head)
        measured = sorted({row["retention"] for row in _numbered(result)})
        axis.set_xticks(measured, [f"{one:g}" for one in measured])
        axis.minorticks_off()
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path


def _line(axis: Any, rows: Sequence[dict[str, Any]], name: str, label: str) -> None:
    ordered = sorted(rows, key=lambda row: row["retention"])
    axis.plot([row["retention"] for row in ordered], [row[name] for row in ordered], marker="o", label=label)


def _label_cells(axis: Any, values: list[list[float]], most: int = 128) -> None:
    """Whole numbers on the axes, and the value in each cell of a map that is not too fine."""
    axis.set_xticks(range(0, len(values[0]), 1 + len(values[0]) // 16))
    axis.set_yticks(range(0, len(values), 1 + len(values) // 16))
    if len(values) * len(values[0]) > most:
        return
    for layer, row in enumerate(values):
        for head, value in enumerate(row):
            color = "black" if value > 0.6 else "white"
            axis.text(head, layer, f"{value:.2f}", ha="center", va="center", fontsize=7, color=color)


def _plot_mass(rows: Sequence[dict[str, Any]], path: Path, heat_at: float) -> Path:
    """Mean mass of the kept keys, layers x heads, a map for each capture loop."""
    from matplotlib import pyplot

    loops = sorted({row["capture_loop"] for row in rows})
    figure, axes = pyplot.subplots(1, len(loops), figsize=(4.4 * len(loops), 3.6), squeeze=False)
    for axis, loop in zip(axes[0], loops, strict=True):
        row = min(
            (one for one in rows if one["capture_loop"] == loop),
            key=lambda one: abs(one["retention"] - heat_at),
        )
        image = axis.imshow(row["mass"], vmin=0, vmax=1, aspect="auto", cmap="viridis")
        title = f"attention mass of {row['retention']:g} of the keys,\ncapture loop {loop}"
        axis.set(xlabel="head", ylabel="layer", title=title)
        figure.colorbar(image, ax=axis)
        _label_cells(axis, row["mass"])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
