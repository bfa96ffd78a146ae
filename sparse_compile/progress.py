"""A progress bar on stderr for work that takes longer than two seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

ProgressCallback = Callable[[int, int], None]

_QUIET_SECONDS = 2.0
_LINE_SECONDS = 10.0  # between lines where stderr is no terminal


class WorkProgress:
    """Counts the tokens of a call, or other units of work; `total` shrinks when a row ends early.

    mode: True shows a bar on a terminal and otherwise a line now and then, None only a bar on a terminal,
    False nothing. A callable replaces all that: it is called with (done, total) after each token.
    Work whose units have names, and take long, says `begin(name)` instead of `advance()`.
    """

    def __init__(
        self,
        total: int,
        mode: bool | ProgressCallback | None,
        quiet: float = _QUIET_SECONDS,
        verb: str = "generating",
        unit: str = "tokens",
    ) -> None:
        self.done, self.total, self.verb, self.unit = 0, total, verb, unit
        self._callback = mode if callable(mode) else None
        self._terminal = sys.stderr.isatty()
        self._shown = self._callback is None and (self._terminal if mode is None else bool(mode))
        self._next_line = time.monotonic() + quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._begun = False

    def __enter__(self) -> WorkProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun and kind is None:
            self.advance()
        if self._bar is not None:
            self._bar.stop()

    def begin(self, step: str) -> None:
        """The unit `step` begins, and ends with the next one or with the block. On a terminal the bar names it, at
        once: the first unit may be the longest.
        """
        if self._begun:
            self.advance()
        self._begun = True
        if self._shown and self._terminal:
            if self._bar is None:
                self._open_bar()
            assert self._bar is not None
            assert self._task is not None
            self._bar.update(self._task, description=f"{self.verb}: {step}")

    def advance(self, skipped: int = 0) -> None:
        """One unit more; `skipped` of them will not come, because the row has ended."""
        self.update(self.done + 1, self.total - skipped)

    def update(self, done: int, total: int) -> None:
        """So many units are done, of so many."""
        self.done, self.total = done, total
        if self._callback is not None:
            self._callback(self.done, self.total)
        elif self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=self.done, total=self.total)
        elif self._shown and time.monotonic() >= self._next_line:
            self._show()

    def _show(self) -> None:
        if self._terminal:
            self._open_bar()
            return
        self._next_line = time.monotonic() + _LINE_SECONDS
        print(f"{self.verb}: {self.done} of at most {self.total} {self.unit}", file=sys.stderr, flush=True)

    def _open_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(self.unit),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,  # or rich would hold what others print, and move it to stderr
        )
        self._task = self._bar.add_task(self.verb, total=self.total, completed=self.done)
        self._bar.start()
