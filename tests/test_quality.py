"""Figures of quality: what each is, the sweep, and the command."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared_models import shared_model
from typer.testing import CliRunner

from sparse_compile import ArgumentError, sparse_compile
from sparse_compile.calibration import Calibration, LayerCalibration
from sparse_compile.cli import app
from sparse_compile.cli.quality import _load_quietly
from sparse_compile.quality.jobs import JobError, Jobs
from sparse_compile.quality.measure import OPTIONS, Meter, Settings, quantile, windows_of
from sparse_compile.quality.sweep import (
    Point,
    PointError,
    Sweep,
    full_retention_is_dense,
    measure_all,
)
from sparse_compile.quality.tasks import to_ids
from sparse_compile.quality.text import held_out_text
from sparse_compile.quality.view import plot, render

pytestmark = pytest.mark.usefixtures("shared_traces")

SMALL = Settings(
    windows=2, window=40, prompt=10, tasks=("recall", "count"), task_contexts=(96,), task_samples=3, question=8,
    generate_prompts=2, generate_prompt=10, generate_tokens=5, texts=2, rows=64,
)  # fmt: skip
TEXT = to_ids(held_out_text()[:400])


SWEEP = Sweep(("0.3", "1"), (1,), others=(Point("0.1", 0, (("keep_last", 3),)),))


def tiny() -> Any:
    return shared_model("ouro", dtype=torch.float64)


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Of a tiny model, at a retention and at 1, and at a point with an option; with what progress was told."""
    seen: list[tuple[int, int]] = []
    found = measure_all(tiny(), TEXT, SMALL, SWEEP, True, lambda *now: seen.append(now))
    assert seen[-1][0] == seen[-1][1]
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert found["complete"]
    return found


@pytest.mark.slow
def test_processes_and_resumed_runs_measure_the_same(
    result: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with a point or two each, in one go; and what a run had written before it was cut off."""
    monkeypatch.setattr("sparse_compile.quality.sweep.TOGETHER", 2)
    saved: list[dict[str, Any]] = []

    def save(found: dict[str, Any]) -> None:
        saved.append(json.loads(json.dumps(found)))

    with Jobs(2, partial(_load_quietly, "tiny:ouro", "float64", "cpu", TEXT, True), SMALL) as jobs:
        found = measure_all(tiny(), TEXT, SMALL, SWEEP, True, save=save, measure=jobs.measure)
        with pytest.raises(
            JobError, match=r"retention 0\.1, capture loop 7 failed: ArgumentError: capture_loop=7"
        ):
            list(jobs.measure([[Point("0.1", 7)]], None, lambda units: None))  # type: ignore[arg-type]
        with pytest.raises(
            JobError, match="process that measured retention 1, capture loop 1 ended with exit code"
        ):
            list(jobs.measure([[Point("1")]], None, lambda units: None))  # type: ignore[arg-type]
    assert found == result
    assert [one["complete"] for one in saved] == [False, True]
    assert saved[1] == result
    others: list[list[Point]] = []

    def measure(groups: Any, dense: Any, done: Any) -> Any:
        others.extend(groups)
        yield dict(zip(SWEEP.points, result["rows"], strict=True))

    assert measure_all(tiny(), TEXT, SMALL, SWEEP, True, known=saved[0], measure=measure) == result
    assert sum(map(len, others)) == 3 - len(saved[0]["rows"])
    with pytest.raises(ArgumentError, match=r"settings=.*: the file to go on with has settings="):
        measure_all(tiny(), TEXT, replace(SMALL, rows=65), SWEEP, True, known=saved[0])


def test_an_error_names_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(meter: Meter, found: Any, compiled: Any, forced: Any) -> None:
        if forced.mass is not None:
            raise RuntimeError("out of memory")

    monkeypatch.setattr(Meter, "_add_mass", fails)
    with pytest.raises(
        PointError, match=r"retention 0\.3, capture loop 1 failed: RuntimeError: out of memory"
    ):
        measure_all(tiny(), TEXT, replace(SMALL, drafts=False), Sweep(("0.3",), (1,)), False)


def test_full_retention_is_the_dense_model_and_less_is_not(result: dict[str, Any]) -> None:
    sparse, full, other = result["rows"]
    assert full_retention_is_dense(result)
    same = {name: value for name, value in full.items() if name not in (*Point("1").head(), "kept")}
    assert same == result["dense"]
    assert (full["agreement"], full["generated_agreement"], full["generated_prefix"]) == (1, 1, 5)
    assert not sparse["exact"]
    assert (other["options"], other["kept"]) == ({"keep_last": 3}, "1/10, the first 0 and the last 3")
    assert sparse["agreement"] < 1
    assert not full_retention_is_dense({"rows": [{**sparse, "retention": 1.0}]})


def test_dense_figures_are_those_of_the_model_itself(result: dict[str, Any]) -> None:
    model = tiny()
    ids = windows_of(TEXT, 2, 40)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            model(ids).logits[:, 10:-1].flatten(0, 1), ids[:, 11:].flatten()
        )
    assert result["dense"]["perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-5)
    own = model.generate(ids[:, :10], attention_mask=torch.ones(2, 10), max_new_tokens=5, do_sample=False)
    meter = Meter(TEXT, SMALL, tasks=False)
    assert (
        meter.dense(sparse_compile(model, enabled=False, **OPTIONS)).generated.tolist()
        == own[:, 10:].tolist()
    )  # type: ignore[union-attr]


def test_masses_and_drafts(result: dict[str, Any]) -> None:
    sparse = result["rows"][0]
    assert sparse["mass_layers"] == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for table in (sparse["mass"], sparse["mass_low"]):
        assert [len(row) for row in table] == [4, 4]
        assert all(0 < one <= 1 for row in table for one in row)
    assert sparse["mass_mean"] == pytest.approx(sum(sum(row) for row in sparse["mass"]) / 8)
    assert min(map(min, sparse["mass_low"])) <= sparse["mass_p5"] <= sparse["mass_mean"]
    assert list(sparse["acceptance"]) == list(sparse["accepted"]) == ["1", "2", "3"]
    assert all(0 <= one <= 1 for one in [*sparse["acceptance"].values(), *sparse["accepted"].values()])


class _Answers:
    """A runner that says the answer of every other sample, and of the others all but the last token."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def run(self, ids: torch.Tensor, parts: Any, done: Any) -> Any:
        self.calls = [(part.start, part.dense_rows) for part in parts]
        right = torch.ones(len(ids), ids.shape[1], dtype=torch.bool)
        right[::2, -1] = False
        return [SimpleNamespace(right=right[:, part.start + 1 :]) for part in parts]


def test_an_answer_counts_when_all_of_it_is_right() -> None:
    meter, runner = Meter(TEXT, replace(SMALL, task_samples=4), tasks=True), _Answers()
    from sparse_compile.quality.measure import Quality

    found = Quality(1.0, 1.0, True)
    meter._add_task([found], runner, meter.asked[0])  # type: ignore[arg-type]
    assert found.tasks == found.tasks_prompt_dense == {"recall": {96: 0.5}}
    prompt = meter.asked[0].prompts.shape[1]
    # the last row of a dense prompt; the question decoded
    assert runner.calls == [(prompt - 1, 1), (prompt - 8, 0)]
    assert found.to_dict()["recall_longest"] == found.task_mean == 0.5
    assert found.to_dict()["recall_2k"] is None


def test_quantile_is_the_value_that_so_many_reach() -> None:
    values = torch.arange(100.0).flip(0)[:, None]
    assert [float(quantile(values, share)) for share in (0.05, 0.001, 1.0)] == [4, 0, 99]


def test_settings_are_checked() -> None:
    with pytest.raises(ArgumentError, match="windows=0"):
        replace(SMALL, windows=0)
    with pytest.raises(ArgumentError, match="prompt=39: leaves nothing to decode"):
        replace(SMALL, prompt=39)
    with pytest.raises(ArgumentError, match="window=2: must be at least 3 tokens"):
        replace(SMALL, window=2)
    with pytest.raises(ArgumentError, match=r"windows=11: of 40 tokens each need 440, and .* or windows=10"):
        windows_of(TEXT, 11, 40)
    with pytest.raises(ArgumentError, match=r"windows=2: .* or a smaller window"):
        windows_of(TEXT, 2, 401)
    with pytest.raises(ArgumentError, match="windows=0: must be an integer >= 1"):
        windows_of(TEXT, 0, 40)


def test_what_cannot_be_measured_is_refused_before_anything_is() -> None:
    model = shared_model("ouro", max_position_embeddings=256)
    told: list[int] = []
    for sweep, message in (
        (Sweep(("0.5",), (0, 4)), "capture_loop=4: must be below 4"),
        (Sweep(("1", "auto"), (1,), (("calibration", other_model()),)), "is a layer of one side only"),
    ):
        with pytest.raises(ArgumentError, match=message):
            measure_all(model, TEXT, SMALL, sweep, False, lambda done, _: told.append(done))
    for settings, message in (
        (replace(SMALL, window=257), "window=257: .* has 256 positions .* pass window=256"),
        (replace(SMALL, task_contexts=(96, 300)), "task_contexts=300: .* has 256 positions .* --subset"),
    ):
        with pytest.raises(ArgumentError, match=message):
            measure_all(model, TEXT, settings, Sweep(), True, lambda done, _: told.append(done))
    assert told == []


def other_model() -> Calibration:
    layers = (LayerCalibration("other.layer", "0.1", 1.0, ()),)
    return Calibration("Other", capture_loop=1, target_mass=0.9, tokens=1, layers=layers)


@pytest.mark.parametrize("command", [["quality", "tiny:ouro", "--subset"], ["calibrate", "tiny:ouro"]])
@pytest.mark.parametrize(("out", "message"), [(".", "is a folder"), ("file/x.json", "File exists")])
def test_files_that_cannot_be_written_are_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str], out: str, message: str
) -> None:
    (tmp_path / "file").write_text("a file, no folder")

    def load(*_: Any) -> None:
        raise AssertionError("the model was loaded first")

    monkeypatch.setattr("sparse_compile.cli.common.load", load)
    found = CliRunner().invoke(app, [*command, "--out", str(tmp_path / out), "--json"])
    assert (found.exit_code, message in json.loads(found.stdout)["error"]["message"]) == (2, True)


def test_tables_and_plots(result: dict[str, Any], tmp_path: Path) -> None:
    from rich.console import Console

    written = io.StringIO()
    Console(width=200, file=written).print(render(result))
    text = written.getvalue()
    assert all(word in text for word in ("perplexity", "recall 96", "draft of 3", "dense"))
    assert "float64, CPU: 2 windows of " in text
    one = {**result, "gpu": "NVIDIA H200", "settings": {**result["settings"], "windows": 1}}
    Console(width=200, file=written).print(render(one))
    assert "NVIDIA H200: 1 window of " in written.getvalue()
    pytest.importorskip("matplotlib")
    paths = plot(result, tmp_path / "plots")
    assert [path.name for path in paths] == ["quality-over-retention.png", "retained-mass.png"]
    assert all(path.stat().st_size > 5000 for path in paths)


def test_the_command(tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "quality.json"
    text.write_bytes(held_out_text()[:200])
    arguments = ["quality", "tiny:ouro", "--subset", "--windows", "1", "--window", "60", "--text", str(text)]
    arguments += ["--samples", "2", "--retentions", "0.2", "--device", "cpu", "--out", str(out), "--json"]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0, found.output
    value = json.loads(found.stdout)
    assert value == json.loads(out.read_text())
    assert [(row["retention"], row["capture_loop"]) for row in value["rows"]] == [(0.2, 1)]
    assert value["settings"]["prompt"] == 15
    assert {"gpu", "commit", "command", "dense", "source", "text"} <= set(value)


def test_the_command_refuses_before_it_loads() -> None:
    for wrong, name in (
        (["--retentions", "0.1,3"], "--retentions 3: must be"),
        (["--capture-loops", "a"], "--capture-loops a"),
    ):
        found = CliRunner().invoke(app, ["quality", "no-such-model", *wrong])
        assert found.exit_code == 2
        assert name in found.stderr


def test_calibrate_writes_what_compiles(tmp_path: Path) -> None:
    out = tmp_path / "retention.json"
    arguments = [
        "calibrate",
        "tiny:ouro",
        "--windows",
        "1",
        "--window",
        "40",
        "--out",
        str(out),
        "--target-mass",
        "0.8",
    ]
    found = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout) == json.loads(out.read_text())
    plan = ["plan", "tiny:ouro", "--gpu-memory", "8GiB", "--context", "128", "--json"]
    planned = CliRunner().invoke(app, [*plan, "--retention", "auto", "--calibration", str(out)])
    assert planned.exit_code == 0, planned.output
    assert json.loads(planned.stdout)["settings"]["key_retention"].endswith(("by layer", "by layer)"))
