"""Whose turn it is: an engine belongs to one thread at a time, and a step to nobody who is called from within it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from sparse_compile.runtime.interrupts import held_back


class Turns:
    """Refuses calls that come in between, with a RuntimeError that starts with the name of the call. Within a turn
    Ctrl-C is held back.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._moving = False  # requests are being moved about

    @contextmanager
    def taken(self, what: str) -> Iterator[None]:
        """For calls that callbacks of a step may make as well."""
        with held_back():
            if not self._lock.acquire(blocking=False):
                raise RuntimeError(
                    f"{what}: another thread is in the middle of a step of this engine, or of another call to it; an "
                    "engine belongs to one thread at a time, share a lock between the threads"
                )
            try:
                yield
            finally:
                self._lock.release()

    @contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """For calls that move requests about. Callbacks run inside of it: they must not come back to it."""
        with self.taken(what):
            if self._moving:
                raise RuntimeError(
                    f"{what}: a step of this engine is running; a logits processor or a stopping criterion must not "
                    "generate with the model that calls it; compile another one for that"
                )
            self._moving = True
            try:
                yield
            finally:
                self._moving = False
