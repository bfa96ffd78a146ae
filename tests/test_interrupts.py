"""Ctrl-C anywhere in a step: no token is lost, none comes twice, and the pools stay whole."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from runtime_fakes import PROMPTS, greedy, make_engine, run_all

from sparse_compile.runtime import metrics
from sparse_compile.runtime.engine import Engine
from sparse_compile.runtime.interrupts import held_back
from sparse_compile.runtime.request import StepOutput

NEW = 6
STEPS = 200  # more than any run takes
PLACES = 30  # that are tried in a run
BOOKS = (
    "engine",
    "steps",
    "scheduler",
    "suspension",
    "holdings",
    "prefix_cache",
    "kv_pool",
    "seats",
    "request",
)


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt, also where this process was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


main_thread = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(),
    reason="signals interrupt the main thread alone",
)


class Interrupter:
    """Sends SIGINT at the line of that number, counted over the lines of bookkeeping that steps go through."""

    def __init__(self, at: int | None) -> None:
        self.at, self.lines, self.done = at, 0, False

    def step(self, engine: Engine) -> list[StepOutput]:
        before = sys.gettrace()
        sys.settrace(before if self.done else self._calls)
        try:
            return engine.step()
        finally:
            sys.settrace(before)

    def _calls(self, frame: Any, event: str, _: object) -> Any:
        file = Path(frame.f_code.co_filename)
        return self._line if file.parent.name == "runtime" and file.stem in BOOKS else None

    def _line(self, frame: Any, event: str, _: object) -> Any:
        self.lines += event == "line"
        if self.lines == self.at and not self.done:
            self.done = True
            signal.raise_signal(signal.SIGINT)
        return self._line


def run(at: int | None, **options: Any) -> tuple[Interrupter, dict[str, list[int]], int]:
    """(interrupter, tokens by request, interrupts that came through)."""
    engine, _ = make_engine(pages=9, max_seqs=2, **options)  # so few pages that requests have to step aside
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(NEW), str(number))
    interrupter, came = Interrupter(at), 0
    tokens: dict[str, list[int]] = {str(number): [] for number in range(len(PROMPTS))}
    for _ in range(STEPS):
        if not engine.has_unfinished():
            break
        try:
            for output in interrupter.step(engine):
                assert output.finish_reason in (None, "length"), output.error
                tokens[output.request_id].append(output.token)
        except KeyboardInterrupt:
            came += 1
        engine.check_integrity()
    assert not engine.has_unfinished()
    assert engine.scheduler.holdings.free_pages == engine.pool.usable_pages
    return interrupter, tokens, came


@main_thread
@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    "options", [{}, {"async_steps": True, "prefix_caching": True}, {"loops_per_step": 1}], ids=str
)
def test_a_step_is_interrupted_between_any_two_lines(options: dict[str, Any]) -> None:
    counted, want, _ = run(None, **options)
    for at in range(1, counted.lines, counted.lines // PLACES):
        _, tokens, came = run(at, **options)
        assert (tokens, came) == (want, 1), at


@main_thread
@pytest.mark.usefixtures("ctrl_c")
def test_a_second_interrupt_goes_through_at_once() -> None:
    with pytest.raises(KeyboardInterrupt), held_back():  # noqa: PT012  the second one is what raises
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@main_thread
@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL])
def test_other_handlings_of_the_signal_are_left_alone(handler: signal.Handlers) -> None:
    before = signal.signal(signal.SIGINT, handler)
    try:
        with held_back():
            assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


@main_thread
@pytest.mark.usefixtures("ctrl_c")
def test_a_second_interrupt_goes_through_at_once_however_deep() -> None:
    """`generate` holds it back around the step of an engine, which does so too."""
    came = 0
    with contextlib.suppress(KeyboardInterrupt), held_back(), held_back():
        signal.raise_signal(signal.SIGINT)
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            came += 1
    assert came == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("call", ["step", "add_request", "abort", "suspend", "forget_prefixes"])
def test_a_call_beside_a_step_of_another_thread_is_refused(call: str) -> None:
    engine, _ = make_engine()
    arguments = {"add_request": ([5], greedy(1)), "abort": ("a",), "suspend": ("a",)}.get(call, ())
    refused: list[BaseException] = []

    def beside() -> None:
        try:
            getattr(engine, call)(*arguments)
        except RuntimeError as error:
            refused.append(error)

    def processor(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=beside)
        thread.start()
        thread.join()
        return scores

    engine.add_request([5, 6], greedy(1, processor=processor), "a")
    assert [output.finish_reason for output in run_all(engine)["a"]] == ["length"]
    assert str(refused[0]).startswith(
        f"{call}: another thread is in the middle of a step of this engine, or of another call to it; "
    )
    assert engine.metrics().requests_finished == 1


def test_metrics_may_be_read_by_any_thread_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Prometheus does. Requests come and go meanwhile, and no sum ever goes back."""
    engine, _ = make_engine()
    seen: list[int] = []
    threads: list[threading.Thread] = []
    file = engine._ledger.file

    def beside(name: str, of: Any) -> None:
        """While a request is among the unfinished ones no more, and not yet among the finished ones."""
        threads.append(threading.Thread(target=lambda: seen.append(engine.metrics().tokens_generated)))
        threads[-1].start()
        threads[-1].join(0.1)
        file(name, of)

    engine.add_request(PROMPTS[0], greedy(3))
    engine._ledger.file = beside  # type: ignore[method-assign]
    run_all(engine)
    for thread in threads:
        thread.join()
    assert seen == [3]
    add = metrics._add

    def add_and_let_one_come(*arguments: Any) -> None:
        monkeypatch.setattr(metrics, "_add", add)
        add(*arguments)
        engine.add_request(PROMPTS[1], greedy(3))

    engine.add_request(PROMPTS[0], greedy(3))
    monkeypatch.setattr(metrics, "_add", add_and_let_one_come)
    assert engine.metrics().requests_waiting in (1, 2)
