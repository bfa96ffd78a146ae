"""The command that runs everything that needs a GPU: parts, logs, exit codes, limits."""

from __future__ import annotations

import json
import re
import signal
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks import attention, decode, figures, norms, timing

ROOT = Path(__file__).parents[1]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that writes its result, one that fails, one whose program is missing, and one that keeps what it has when it
    is interrupted.
    """
    wait = (
        "import sys, time, pathlib\n"
        "try:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    pathlib.Path(sys.argv[1]).write_text('kept')"
    )
    monkeypatch.setattr(figures, "need_gpu", lambda remedy: None)
    monkeypatch.setattr(
        figures,
        "PARTS",
        {
            "good": figures.Part(
                "PYTHON -c 'import sys, pathlib; pathlib.Path(sys.argv[1]).write_text(\"1\"); print(5)' OUT",
                60,
                "a.json",
            ),
            "bad": figures.Part("PYTHON -c 'raise SystemExit(3)'", 60),
            "missing": figures.Part("no-such-program-here PYTHON", 60),
            "slow": figures.Part(f'PYTHON -c "{wait}" OUT', 4, "kept.json"),
        },
    )


def test_a_part_that_fails_does_not_stop_the_next(
    parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main(["bad", "good", "--into", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.index("failed with exit code 3") < shown.index("ok after")
    assert (tmp_path / "a.json").read_text() == "1"
    assert (tmp_path / "good.log").read_text().splitlines()[-1] == "5"
    assert figures.main(["good", "--into", str(tmp_path)]) == 0


def test_a_part_whose_program_is_missing_does_not_stop_the_next(
    parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert figures.main(["missing", "good", "--into", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert shown.index("could not be run") < shown.index("ok after")
    assert "no-such-program-here cannot be run" in (tmp_path / "missing.log").read_text()


def test_a_part_named_twice_runs_once(
    parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures.main(["good", "bad", "good", "--into", str(tmp_path)])
    assert capsys.readouterr().out.count("=== good") == 1


def test_a_file_is_no_folder_for_results(
    parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "flat").write_text("")
    with pytest.raises(SystemExit):
        figures.main(["good", "--into", str(tmp_path / "flat")])
    assert "flat is a file; name a folder" in capsys.readouterr().err


@pytest.mark.parametrize("ignored", [False, True])
def test_a_part_that_takes_too_long_keeps_what_it_has(
    parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], ignored: bool
) -> None:
    """ignored: the command itself is not to hear Ctrl-C, as in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        assert figures.main(["slow", "--into", str(tmp_path)]) == 1
        assert (signal.getsignal(signal.SIGINT) is signal.SIG_IGN) == ignored
    finally:
        signal.signal(signal.SIGINT, before)
    assert "took too long" in capsys.readouterr().out
    assert (tmp_path / "kept.json").read_text() == "kept"


def test_unknown_parts_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.parse(["decode", "prefil"])
    assert "unknown prefil; known: tests," in capsys.readouterr().err


def test_parts_are_commands_that_are_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert figures.main(["--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == len(figures.PARTS)
    for part in figures.PARTS.values():
        modules = re.findall(r"PYTHON -m (\S+)", part.command)
        assert modules
        assert all(find_spec(module) for module in modules)
        assert bool(part.result) == ("OUT" in part.command.split())
        paths = re.findall(r"tests/\S+\.py", part.command)
        assert all((ROOT / path).exists() for path in paths)


def test_results_have_a_part_that_writes_them() -> None:
    written = {part.result for part in figures.PARTS.values()}
    apart = {"selftest-h200.json", "speculation-deterministic-h200.json"}  # with deterministic kernels
    found = {path.name for path in (ROOT / figures.RESULTS).glob("*.json")}
    assert found == (written | apart) - {""}
    for name in found:
        assert json.loads((ROOT / figures.RESULTS / name).read_text())["command"].startswith(
            ("python -m benchmarks.", "sparse-compile ")
        )


def test_the_interpreter_is_this_one(parts: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures.main(["good", "--into", str(tmp_path)])
    assert sys.executable in capsys.readouterr().out


def test_without_matplotlib_a_plot_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timing, "find_spec", lambda name: None)
    for parse, option in (
        (decode.parse, "--plot"),
        (attention.parse, "--plot"),
        (attention.parse, "--plot-of"),
    ):
        with pytest.raises(SystemExit):
            parse([option, "steps.png"])
        assert "pip install 'sparse-compile[bench]'" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run(tmp_path: Path) -> None:
    into = tmp_path / "results"
    for run in (
        partial(figures.main, ["tests", "--into", str(into)]),
        partial(decode.main, ["--systems", "sparse", "--out", str(into)]),
        partial(norms.main, []),
        partial(attention.main, []),
    ):
        with pytest.raises(SystemExit, match="PyTorch finds none here"):
            run()
    assert not into.exists()
