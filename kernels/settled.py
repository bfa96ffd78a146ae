"""What a caller promises about the rows of its calls, so that kernels may start on them early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_promised = ContextVar("rows are settled", default=False)


@contextmanager
def settled_rows() -> Iterator[None]:
    """Inside the block no kernel directly ahead of an attention op writes what describes its rows: block table,
    sequences, positions, lengths, loops, modes and slots. A product, or any other kernel, lies between.
    """
    before = _promised.set(True)
    try:
        yield
    finally:
        _promised.reset(before)


def rows_are_settled() -> bool:
    """Whether the caller promises that."""
    return _promised.get()
