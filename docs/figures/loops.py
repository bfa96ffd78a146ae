"""Draw docs/figures/loops.svg: which keys each loop of each layer reads when one token is decoded.

    python docs/figures/loops.py [OUTPUT ...]

Without arguments the committed SVG is rewritten; other formats follow from the suffix (loops.png to look
at). Needs the `bench` extra (matplotlib). The picture shows a schedule, not a measurement: the kept keys are
drawn at random.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

LOOPS, KEYS, KEPT = 4, 20, 4
LAYERS = ("layer 0", "layer 1", "layer 2", "...", "layer 23")
KIND = ("dense", "capture", "consume", "consume")
FILL = {"dense": "#dbe8f8", "capture": "#fdeac4", "consume": "#d8f0dc"}
DARK = {"dense": "#2f6db5", "capture": "#c27c00", "consume": "#23803b"}
READS = {
    "dense": "reads all N keys",
    "capture": "reads all N keys\nand notes which k\nmattered most",
    "consume": "reads those k keys and\ncorrects loop 1's output",
}
INK, FAINT = "#24292f", "#c9ced6"
WIDTH, HEIGHT, GAP = 2.5, 0.62, 0.5  # of a cell, and between columns


def draw_cell(axes: Axes, left: float, bottom: float, kind: str, kept: set[int]) -> None:
    """One attention call: a box with one bar for every visible key, dark where the key is read."""
    box = FancyBboxPatch((left, bottom), WIDTH, HEIGHT, boxstyle="round,pad=0,rounding_size=0.08")
    box.set(facecolor=FILL[kind], edgecolor=DARK[kind], linewidth=1.1)
    axes.add_patch(box)
    step = (WIDTH - 0.3) / KEYS
    for key in range(KEYS):
        read = kind != "consume" or key in kept
        tall = 0.36 if kind == "capture" and key in kept else 0.26
        bar = Rectangle((left + 0.15 + key * step, bottom + (HEIGHT - tall) / 2), step * 0.55, tall)
        noted = kind == "capture" and key not in kept
        bar.set(facecolor=DARK[kind] if read else FAINT, alpha=0.4 if noted else 1.0, linewidth=0)
        axes.add_patch(bar)


def draw_column(axes: Axes, loop: int, tops: list[float], kept: dict[str, set[int]]) -> None:
    left, kind = loop * (WIDTH + GAP), KIND[loop]
    middle = left + WIDTH / 2
    axes.text(middle, tops[0] + HEIGHT + 0.62, f"loop {loop}", ha="center", fontsize=10, color=INK)
    axes.text(
        middle,
        tops[0] + HEIGHT + 0.2,
        kind,
        ha="center",
        fontsize=13,
        weight="bold",
        color=DARK[kind],
    )
    for name, bottom in zip(LAYERS, tops, strict=True):
        if name == "...":
            axes.text(middle, bottom + HEIGHT / 2, "...", ha="center", va="center", fontsize=12, color=INK)
        else:
            draw_cell(axes, left, bottom, kind, kept[name])
    axes.text(middle, tops[-1] - 0.2, READS[kind], ha="center", va="top", fontsize=9.5, color=INK)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], color: str) -> None:
    style = {"arrowstyle": "-|>", "mutation_scale": 11, "linewidth": 1.3, "color": color}
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **style))


def draw() -> plt.Figure:
    draws = random.Random(7)
    kept = {name: {*draws.sample(range(KEYS - 1), KEPT - 1), KEYS - 1} for name in LAYERS}
    tops = [-(HEIGHT + 0.16) * row for row in range(len(LAYERS))]
    right = LOOPS * (WIDTH + GAP) - GAP
    figure, axes = plt.subplots(figsize=(10.4, 5.4))
    for loop in range(LOOPS):
        draw_column(axes, loop, tops, kept)
        if loop:
            start, height = loop * (WIDTH + GAP) - GAP, tops[LAYERS.index("...")] + HEIGHT / 2
            arrow(axes, (start - 0.5, height), (start + GAP + 0.5, height), INK)
            axes.text(start + GAP / 2, height + 0.09, "hidden state", ha="center", fontsize=8, color=INK)
    for name, bottom in zip(LAYERS, tops, strict=True):
        if name != "...":
            axes.text(-0.15, bottom + HEIGHT / 2, name, ha="right", va="center", fontsize=9.5, color=INK)
    bus = tops[-1] - 1.35
    first, last = 1.5 * WIDTH + GAP, 3.5 * WIDTH + 3 * GAP
    axes.plot([first, first, last], [bus + 0.32, bus, bus], color=DARK["capture"], linewidth=1.3)
    for loop in (2, 3):
        x = (loop + 0.5) * WIDTH + loop * GAP
        arrow(axes, (x, bus), (x, bus + 0.58), DARK["capture"])
    axes.text(
        (first + last) / 2,
        bus - 0.12,
        "per layer and head: the kept positions S, their mass m, the centre C_ref, the output O_ref",
        ha="center",
        va="top",
        fontsize=9.5,
        color=DARK["capture"],
    )
    legend = "one bar: one key that the token may see    coloured: read    grey: not read    tall: kept"
    axes.text(right / 2, bus - 0.62, legend, ha="center", va="top", fontsize=9, color="#57606a")
    axes.set_xlim(-1.1, right + 0.15)
    axes.set_ylim(bus - 0.95, tops[0] + HEIGHT + 0.95)
    axes.set_aspect("equal")
    axes.axis("off")
    return figure


def main(outputs: list[str]) -> None:
    # Fixed ids and no date: the same script and library give the same bytes.
    plt.rcParams.update({"svg.hashsalt": "sparse_compile", "font.family": "DejaVu Sans"})
    figure = draw()
    for output in outputs or [str(Path(__file__).with_suffix(".svg"))]:
        metadata = {"Date": None} if output.endswith(".svg") else None
        figure.savefig(output, bbox_inches="tight", facecolor="white", dpi=110, metadata=metadata)


if __name__ == "__main__":
    main(sys.argv[1:])
