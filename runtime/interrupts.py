"""Ctrl-C between two lines of bookkeeping would leave half of it done: it waits until the books are right again."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_back() -> Iterator[None]:
    """Holds a first SIGINT back until the end of the block; a second one goes through at once.

    What it goes through to is the handler that was there before, Python's own one raises KeyboardInterrupt. Only the
    main thread is ever interrupted: in others, and where SIGINT is ignored or no handler of Python's, nothing changes.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal waiting
        again, waiting = waiting, not waiting
        if again:
            before(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(signal.SIGINT, None)
