"""Quality of a model over retention and capture loop; `sparse-compile quality` with files for results and plots.

    python -m benchmarks.quality                                  # the demo model, on a GPU: benchmarks/results
    python -m benchmarks.quality --model tiny:ouro --subset       # what a CPU measures in a minute

The JSON also has a `subset`: a few texts and tasks that tests/test_quality.py measures again on the CPU.
"""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec
from pathlib import Path

from sparse_compile.cli.quality import check_outputs, run_quality, show_quality
from sparse_compile.quality.measure import SUBSET, Settings
from sparse_compile.quality.sweep import SUBSET_SWEEP, Sweep

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--subset", action="store_true", help="measure the subset alone")
    parser.add_argument(
        "--out", type=Path, default=None, help="by default benchmarks/results/quality-MODEL.json"
    )
    parser.add_argument(
        "--plots",
        type=Path,
        default=None,
        help="by default docs/figures; none with --subset or without matplotlib",
    )
    options = parser.parse_args()
    how = (options.dtype, options.device, "python -m benchmarks.quality")
    name = options.model.replace("/", "-").replace(":", "-")
    out, plots = options.out, options.plots
    if not options.subset:
        out = out or RESULTS / f"quality-{name}.json"
        plots = plots or (FIGURES if find_spec("matplotlib") else None)
    check_outputs(out, plots)
    subset = run_quality(options.model, None, SUBSET, SUBSET_SWEEP, *how)
    if options.subset:
        return show_quality(subset, out, plots, as_json=False)
    result = run_quality(options.model, None, Settings(), Sweep(), *how)
    return show_quality({**result, "subset": subset}, out, plots, as_json=False)


if __name__ == "__main__":
    sys.exit(main())
