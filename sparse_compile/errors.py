"""The errors of the front room, and the one place where their messages are formatted.

Every message about a value names the argument, the value, the limit and the remedy. What the passes refuse is
`sparse_compile.passes.errors.UnsupportedModel`; both are ValueErrors where the caller's value is at fault.
"""

from __future__ import annotations

import operator

_LONGEST_VALUE = 80


def limit_message(argument: str, value: object, limit: str, remedy: str) -> str:
    """One line: which argument, the value it had, the limit that the value breaks, and what to do instead."""
    shown = repr(value)
    if len(shown) > _LONGEST_VALUE:
        shown = shown[: _LONGEST_VALUE - 3] + "..."
    return f"{argument}={' '.join(shown.split())}: {limit}; {remedy}"


class SparseCompileError(Exception):
    """Base of the errors that this package raises on its own account."""


class ArgumentError(SparseCompileError, ValueError):
    """A value that was given is outside of its limit, or an argument is not supported."""

    def __init__(self, argument: str, value: object, limit: str, remedy: str) -> None:
        super().__init__(argument, value, limit, remedy)
        self.argument, self.value, self.limit, self.remedy = argument, value, limit, remedy

    def __str__(self) -> str:
        return limit_message(self.argument, self.value, self.limit, self.remedy)


def whole_number(name: str, given: object, least: int, expected: str | None = None) -> int:
    """An integer option as a plain int (numpy integers come in too; bools do not), or an ArgumentError."""
    try:
        value = None if isinstance(given, bool) else operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        value = None
    if value is None or value < least:
        limit = f"must be {expected or f'an integer >= {least}'}"
        raise ArgumentError(name, given, limit, f"pass for example {name}={max(least, 1)}")
    return value


class StaleModelError(SparseCompileError, RuntimeError):
    """The model was changed after it was compiled, in a way that its program does not follow."""

    def __init__(self, change: str) -> None:
        super().__init__(change)
        self.change = change

    def __str__(self) -> str:
        return f"the model was changed after it was compiled: {self.change}; compile it again"


class ValidationError(SparseCompileError, RuntimeError):
    """The compiled program disagrees with the model's own forward."""
