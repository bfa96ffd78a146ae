"""The committed figures of the demo model: whole, as good as said, as the README has them, and measured again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sparse_compile.cli import app
from sparse_compile.quality.sweep import CAPTURE_LOOPS, RETENTIONS

pytestmark = pytest.mark.usefixtures("shared_traces")

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = {"keep_first": 4, "keep_last": 32}
BY_LAYER = [0.05, 0.05, 0.05, 0.2]
WHERE = ("retention", "capture_loop", "options", "kept")  # what a row says of where it was measured

# The committed subset was measured in bfloat16 on a GPU, and the test measures in float32 on a CPU, so near-ties fall
# to the other side. Beside each what was seen, at most. Everything else, answers to tasks and generated text too, came
# out equal and must: from CPU to CPU float32 differs in its last bits alone, and no answer here hangs on those. What
# tells sparse from dense here is perplexity, agreement, mass and tasks: drafts are as often right in both.
TOLERANCES = {
    "perplexity": 0.006,  # 0.0028, or 0.12 %; a tenth of the keys costs 0.016
    "agreement": 0.014,  # 0.0053: 2 rows of 382
    "acceptance": 0.03,  # 0.0158: 6 rows of 382
    "accepted": 0.05,  # none; one draft of 23 is 0.044
    "mass": 0.003,  # 0.0009 of the mean of a head
    "mass_low": 0.02,  # 0.0081 of the 5th percentile of a head
    "mass_mean": 0.0005,  # 0.00004
    "mass_p5": 0.003,  # 0.0004
}


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks/results/quality-demo.json").read_text())
    return found


def row_of(result: dict[str, Any], retention: Any, loop: int, options: Any = None) -> dict[str, Any] | None:
    """The row of a point, if it was measured."""
    wanted = {"retention": retention, "capture_loop": loop, "options": options or {}}
    return next((row for row in result["rows"] if wanted.items() <= row.items()), None)


def same_figures(row: dict[str, Any], dense: dict[str, Any]) -> bool:
    return {name: value for name, value in row.items() if name not in WHERE} == dense


def test_they_are_whole(committed: dict[str, Any]) -> None:
    assert committed["complete"]
    assert committed["gpu"].startswith("NVIDIA")
    assert re.fullmatch("[0-9a-f]{40}", committed["commit"])
    for part in (committed, committed["subset"]):
        assert part["command"].startswith("python -m benchmarks.quality ")
        assert not re.search(r"[\s=][/~]", part["command"]), "a path of the machine that measured"
    rows = [row_of(committed, float(kept), loop) for kept, loop in product(RETENTIONS, CAPTURE_LOOPS)]
    rows += [row_of(committed, 0.1, loop, ALWAYS) for loop in CAPTURE_LOOPS]
    figures = {"perplexity", "agreement", "generated_agreement", "tasks", "task_mean", "recall_2k"}
    for row in rows:
        assert row is not None
        assert all(row[name] is not None for name in figures)
        assert list(row["acceptance"]) == ["1", "2", "3"]
        assert all(0 <= one <= 1 for found in row["tasks"].values() for one in found.values())
        assert (row["mass_p5"] is None) == (row["retention"] == 1)


def test_they_are_as_good_as_said(committed: dict[str, Any]) -> None:
    """At a tenth of the keys at most a point of the tasks and 1 % of perplexity: after a capture in loop 1; after one
    in loop 0 with the first and last keys kept, or else with half of the keys and not with fewer.
    """
    dense = committed["dense"]
    assert dense["recall_2k"] >= 0.95
    assert dense["acceptance"]["1"] >= 0.5
    assert dense["acceptance"]["2"] >= 0.75

    def holds(retention: float, loop: int, options: Any = None) -> bool:
        row = row_of(committed, retention, loop, options)
        assert row is not None
        costs = (dense["task_mean"] - row["task_mean"], row["perplexity"] / dense["perplexity"] - 1)
        return costs[0] <= 0.01 and costs[1] <= 0.01

    assert [holds(float(kept), 1) for kept in RETENTIONS] == [True] * 6
    assert [holds(float(kept), 0) for kept in RETENTIONS] == [False] * 4 + [True] * 2
    assert holds(0.1, 0, ALWAYS)


def test_full_retention_was_exactly_dense(committed: dict[str, Any]) -> None:
    for part, rows in ((committed, 2), (committed["subset"], 1)):
        full = [row for row in part["rows"] if row["retention"] == 1]
        assert len(full) == rows
        assert all(row["exact"] and same_figures(row, part["dense"]) for row in full)


# ---------------------------------------------------------------------- the README


def cells(row: dict[str, Any] | None, dense: dict[str, Any]) -> list[str]:
    """Perplexity with its change, agreement, mean of the tasks."""
    if row is None:
        return ["", "", ""]
    change = "" if row is dense else f" ({100 * (row['perplexity'] / dense['perplexity'] - 1):+.2f} %)"
    agreement = "" if row is dense else f"{100 * row['agreement']:.1f} %"
    return [f"{row['perplexity']:.4f}{change}", agreement, f"{100 * row['task_mean']:.1f} %"]


def test_the_table_of_the_readme_is_what_was_measured(committed: dict[str, Any]) -> None:
    dense = committed["dense"]
    points: list[tuple[str, Any, Any]] = [(f"{kept:g}", kept, {}) for kept in (0.5, 0.2, 0.1, 0.05, 0.02)]
    points += [(f"{kept:g}, `keep_first=4`, `keep_last=32`", kept, ALWAYS) for kept in (0.2, 0.1)]
    points += [("0.05; 0.2 in the last layer", BY_LAYER, {})]
    lines = [["all (dense)", *cells(dense, dense), *cells(dense, dense)]]
    for name, kept, options in points:
        one, zero = (row_of(committed, kept, loop, options) for loop in (1, 0))
        lines.append([name, *cells(one, dense), *cells(zero, dense)])
    section = (ROOT / "README.md").read_text().split("\n## What it costs\n")[1].split("\n## ")[0]
    table = [line for line in section.splitlines() if line.startswith("| ")]
    assert table[1:] == [f"| {' | '.join(line)} |".replace("|  ", "| ") for line in lines]


# ---------------------------------------------------------------------- measured again


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(where it stands, what it is) of all that is no list and no dictionary."""
    if isinstance(value, list):
        value = {str(number): one for number, one in enumerate(value)}
    if not isinstance(value, dict):
        yield path, value
        return
    for name, one in value.items():
        yield from leaves(one, (*path, name))


def differences(mine: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """What of two rows, or of two dense models, differs by more than the tolerances."""
    ours, want = ({path: one for path, one in leaves(row) if path[0] != "options"} for row in (mine, theirs))
    assert ours.keys() == want.keys()

    def close(path: tuple[str, ...]) -> bool:
        one, other = ours[path], want[path]
        if isinstance(one, float) and isinstance(other, float):
            return abs(one - other) <= TOLERANCES.get(path[0], 0)
        return bool(one == other)

    return [f"{'.'.join(path)}: {ours[path]}, committed {want[path]}" for path in want if not close(path)]


def test_the_tolerances_tell_a_tenth_of_the_keys_from_all(committed: dict[str, Any]) -> None:
    subset = committed["subset"]
    sparse, full = subset["rows"]
    assert differences(sparse, sparse) == []
    assert len(differences({**sparse, "perplexity": full["perplexity"]}, sparse)) == 1
    assert len(differences({**sparse, "agreement": full["agreement"]}, sparse)) == 1
    assert len(differences({**sparse, "tasks": full["tasks"]}, sparse)) == 1


@pytest.mark.slow
def test_the_command_measures_the_committed_subset_again(committed: dict[str, Any]) -> None:
    """`sparse-compile quality demo --subset`, whole, in float32 on this CPU."""
    want = committed["subset"]
    arguments = ["quality", "demo", "--subset", "--dtype", "float32", "--device", "cpu", "--json"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    got = json.loads(found.stdout)
    assert (got["gpu"], got["dtype"], got["settings"]) == ("none (CPU)", "float32", want["settings"])
    assert differences(got["dense"], want["dense"]) == []
    assert len(got["rows"]) == len(want["rows"])
    for mine, theirs in zip(got["rows"], want["rows"], strict=True):
        assert differences(mine, theirs) == []
    full = got["rows"][-1]
    assert full["retention"] == 1
    assert same_figures(full, got["dense"])
