"""Ctrl-C between two lines of bookkeeping would leave half of it done: it waits until the books are right again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Holds a first SIGINT back until the end of the block; a second one goes through at once.

    What it goes through to is the handler that was there before, Python's own one raises KeyboardInterrupt. Only the
    main thread is ever interrupted: in others, and where SIGINT is ignored or no handler of Python's, nothing changes.
    Inside of another such block the outer one does all of it.
    """
    before = signal.getsignal(signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    if not main or not callable(before) or isinstance(before, _Note):
        yield
        return
    note = _Note(before)
    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if note.waiting:
            before(signal.SIGINT, None)


class _Note:
    """A handler that notes a first signal, and hands a second one on."""

    def __init__(self, before: Callable[[int, FrameType | None], object]) -> None:
        self.before, self.waiting = before, False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        again, self.waiting = self.waiting, not self.waiting
        if again:
            self.before(number, frame)
