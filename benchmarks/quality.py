"""Quality of a model over retention and capture loop; `sparse-compile quality` with files for results and plots.

    python -m benchmarks.quality --jobs 8                         # the demo model, on a GPU: benchmarks/results
    python -m benchmarks.quality --jobs 8 --resume                # goes on where a run was cut off
    python -m benchmarks.quality --model tiny:ouro --subset       # what a CPU measures in a minute

The JSON also has a `subset`: a few texts and tasks that tests/test_quality.py measures again on the CPU. It is written
whenever points have been measured ("complete" says whether all have).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sparse_compile.cli import common
from sparse_compile.cli.quality import check_outputs, run_quality, show_quality
from sparse_compile.errors import whole_number
from sparse_compile.models import DEMO
from sparse_compile.quality.measure import SUBSET, Settings
from sparse_compile.quality.sweep import SUBSET_SWEEP, Point, Sweep

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent.parent / "docs" / "figures"
SETTINGS = Settings(windows=32, generate_tokens=96)
TEXTS_ON_CUDA = 50  # in one run: half of a task's samples. A CPU has less memory, and no launches to save
ALWAYS = (("keep_first", 4), ("keep_last", 32))
OTHERS = (
    Point("0.1", 0, ALWAYS),
    Point("0.2", 0, ALWAYS),
    Point("0.1", 1, ALWAYS),
    Point(("0.05", "0.05", "0.05", "0.2"), 1),  # about the same mass in each layer
)
"""Points of the demo model beside the grid: what options win back where the grid loses, and at which retention."""


def main() -> int:
    options = _parser().parse_args()
    whole_number("jobs", options.jobs, 1)
    how = (options.dtype, options.device)
    program = "python -m benchmarks.quality"
    name = options.model.replace("/", "-").replace(":", "-")
    out, plots = options.out, options.plots
    if not options.subset:
        out = out or RESULTS / f"quality-{name}.json"
        plots = plots or (FIGURES if find_spec("matplotlib") else None)
    check_outputs(out, plots)
    known = _known(out) if options.resume else None
    subset = None if known is None else known.get("subset")
    if subset is None:
        subset = run_quality(options.model, None, SUBSET, SUBSET_SWEEP, *how, program=program)
    if options.subset:
        return show_quality(subset, out, plots, as_json=False)
    settings = SETTINGS
    if common.place(options.device).type == "cuda":
        settings = replace(SETTINGS, texts=TEXTS_ON_CUDA)
    sweep = Sweep(others=OTHERS if options.model == DEMO else ())
    result = run_quality(
        options.model, None, settings, sweep, *how, out, program=program, known=known,
        jobs=options.jobs, more={"subset": subset},
    )  # fmt: skip
    return show_quality(result, out, plots, as_json=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--subset", action="store_true", help="measure the subset alone")
    parser.add_argument("--jobs", type=int, default=1, help="processes that measure points at once")
    parser.add_argument(
        "--resume", action="store_true", help="take over the points that the file of --out has"
    )
    parser.add_argument(
        "--out", type=Path, default=None, help="by default benchmarks/results/quality-MODEL.json"
    )
    parser.add_argument(
        "--plots",
        type=Path,
        default=None,
        help="by default docs/figures; none with --subset or without matplotlib",
    )
    return parser


def _known(out: Path | None) -> dict[str, Any]:
    """The result to go on with. Raises SystemExit where there is none."""
    if out is None or not out.exists():
        raise SystemExit(f"--resume: there is no {out}; leave --resume out to begin")
    return json.loads(out.read_text(encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
