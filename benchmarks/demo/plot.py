"""The losses of a run as a picture, from its log."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any


def draw(log: Path, picture: Path) -> None:
    """Losses of all loops on text and on tasks, and held-out bits per byte and recall, over steps. Without matplotlib
    there is no picture, and a line on stderr says so."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    figure, panels = pyplot.subplots(1, 3, figsize=(15, 4.2))
    losses = [entry for entry in entries if "text" in entry]
    for panel, kind, title in zip(
        panels, ("text", "tasks"), ("text, bits per byte", "answers, bits per byte"), strict=False
    ):
        _lines(panel, [(e["step"], [v / math.log(2) for v in e[kind]]) for e in losses if kind in e])
        panel.set_title(f"training: {title}")
    evaluations = [entry for entry in entries if entry.get("event") == "evaluation"]
    names = sorted({name for entry in evaluations for name in entry["tasks"]})
    longest = max((int(name.split("@")[1]) for name in names), default=0)
    for name in names:
        if name.endswith(f"@{longest}"):
            panels[2].plot(
                [e["step"] for e in evaluations], [e["tasks"][name] for e in evaluations], label=name
            )
    panels[2].set_title("exact answers")
    for panel in panels:
        panel.set_xlabel("step")
        if panel.lines:
            panel.legend()
    figure.tight_layout()
    figure.savefig(picture, dpi=90)
    pyplot.close(figure)


def _lines(panel: Any, points: list[tuple[int, list[float]]]) -> None:
    for loop in range(len(points[0][1]) if points else 0):
        panel.plot(
            [step for step, _ in points], [v[loop] for _, v in points], label=f"loop {loop}", linewidth=1
        )
