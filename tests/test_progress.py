"""Compiling shows what it is at: on a terminal at once, elsewhere by a line now and then, or not at all."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sparse_compile import sparse_compile
from sparse_compile.models import tiny_model
from sparse_compile.passes.pipeline import PASSES
from sparse_compile.progress import WorkProgress


def make_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines come without the seconds of silence before them."""
    defaults = WorkProgress.__init__.__defaults__
    assert defaults is not None
    monkeypatch.setattr(WorkProgress.__init__, "__defaults__", (0.0, *defaults[1:]))


def small() -> Any:
    return tiny_model("ouro", num_hidden_layers=1, total_ut_steps=3)


def test_a_unit_ends_where_the_next_begins() -> None:
    seen: list[tuple[int, int]] = []
    with WorkProgress(2, lambda done, total: seen.append((done, total))) as bar:
        bar.begin("one")
        assert not seen
        bar.begin("two")
        assert seen == [(1, 2)]
    assert seen == [(1, 2), (2, 2)]
    bar = WorkProgress(2, lambda *now: seen.append(now))
    bar.begin("one")
    bar.__exit__(KeyError, KeyError(), None)
    assert len(seen) == 2  # what failed is not done


@pytest.mark.parametrize("validate", [True, False])
def test_every_pass_is_a_step_and_validation_is_one(
    validate: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_terminal(monkeypatch)
    begun, begin = [], WorkProgress.begin
    totals = []

    def watch(self: WorkProgress, step: str) -> None:
        begin(self, step)
        begun.append(step)
        totals.append((self.done, self.total))
        assert self._bar is not None, "a terminal has the bar at once"

    monkeypatch.setattr(WorkProgress, "begin", watch)
    sparse_compile(small(), validate=validate)
    assert begun == ["trace", *(step.name for step in PASSES), *(["validation"] if validate else [])]
    assert totals == [(done, len(begun)) for done in range(len(begun))]
    captured = capsys.readouterr()
    assert "compiling: trace" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("mode", [None, False])
def test_nothing_is_shown_where_nobody_looks(
    mode: bool | None, at_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse_compile(small(), validate=False, progress=mode)
    assert capsys.readouterr() == ("", "")


def test_false_is_silent_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_terminal(monkeypatch)
    sparse_compile(small(), validate=False, progress=False)
    assert capsys.readouterr() == ("", "")


def test_true_gives_lines_where_there_is_no_terminal(
    at_once: None, capsys: pytest.CaptureFixture[str]
) -> None:
    sparse_compile(small(), validate=False, progress=True)
    assert re.fullmatch(r"compiling: 1 of at most 9 steps\n", capsys.readouterr().err)
