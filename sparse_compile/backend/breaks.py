"""Where Dynamo cut the user's function into several graphs, and why."""

from __future__ import annotations

from typing import Any


class BreakLog:
    """Dynamo appends every graph break of the process to one list; this reads what is new in it."""

    def __init__(self) -> None:
        self.read = 0

    def new(self) -> tuple[str, ...]:
        """The breaks since the last call, as "reason at file:line (code)", each once."""
        from torch._dynamo.output_graph import graph_break_reasons

        if len(graph_break_reasons) < self.read:  # Dynamo was reset
            self.read = 0
        fresh, self.read = graph_break_reasons[self.read :], len(graph_break_reasons)
        return tuple(dict.fromkeys(_described(reason) for reason in fresh))


def _described(reason: Any) -> str:
    first = (str(reason.reason).strip() or "no reason given").splitlines()[0]
    stack = list(reason.user_stack or ())
    return f"{first} at {stack[-1].filename}:{stack[-1].lineno} ({stack[-1].line})" if stack else first
