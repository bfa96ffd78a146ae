"""What is said on stderr while a command runs, and --quiet, which silences all of it but warnings and errors."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar

_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
_PATIENCE = 1.0  # seconds before a wait is explained


@contextmanager
def quietly(quiet: bool) -> Iterator[None]:
    """Within this, notes and progress are shown unless `quiet`."""
    before = _quiet.set(quiet)
    try:
        yield
    finally:
        _quiet.reset(before)


def progress_mode() -> bool:
    """The mode of `WorkProgress` and the option `progress`: shown, or not."""
    return not _quiet.get()


def bar_mode() -> bool | None:
    """The same for work that a note has told of already: a bar, where there is a terminal."""
    return None if progress_mode() else False


def note(message: str) -> None:
    """A line on stderr about what is going on."""
    if not _quiet.get():
        say(message)


def say(message: str) -> None:
    """A line on stderr that --quiet does not silence."""
    print(message, file=sys.stderr, flush=True)


@contextmanager
def waiting(what: str, patience: float = _PATIENCE) -> Iterator[None]:
    """Notes what is waited for, once that takes longer than `patience` seconds."""
    if _quiet.get():
        yield
        return
    timer = threading.Timer(patience, say, (f"{what} ...",))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def bars(shown: bool) -> Iterator[None]:
    """With or without the progress bars of transformers and the hub: never with --quiet, or where nobody sees them."""
    with nullcontext() if shown and sys.stderr.isatty() and not _quiet.get() else _no_bars():
        yield


@contextmanager
def _no_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
