"""Why Dynamo compiles a graph: the first call of a function, or a guard of an earlier compilation that failed."""

from __future__ import annotations

import re
from types import CodeType

FIRST = "first call of this function"
_ENTRY = re.compile(r"^\d+/\d+(_\d+)?: ")  # which compilation the guard belongs to
_INNER = re.compile(r" \(_dynamo/[^()]*\)$")  # where in Dynamo the guard was made


class CauseLog:
    """Dynamo keeps every failed guard of the process, by function; this reads what is new of the present one."""

    def __init__(self) -> None:
        self.read: dict[CodeType, int] = {}

    def new(self) -> str:
        """Why the graph of now is compiled, in a line; empty where Dynamo does not say or does not run."""
        from torch._dynamo.symbolic_convert import InstructionTranslator
        from torch._dynamo.utils import guard_failures
        from torch._guards import CompileContext

        current = CompileContext.current_compile_id()
        try:
            code = InstructionTranslator.current_tx().output.root_tx.f_code
        except AttributeError:  # no compilation is going on
            return ""
        failures = guard_failures.get(code, [])
        seen = self.read.get(code, 0)
        fresh = failures[seen if seen <= len(failures) else 0 :]  # fewer: Dynamo was reset
        self.read[code] = len(failures)
        if fresh:  # one for each earlier compilation, the latest first
            return f"failed guard {_described(fresh[0])}"
        return FIRST if current is not None and current.frame_compile_id == 0 else ""


def _described(failure: object) -> str:
    line = (str(failure).strip() or "unnamed").splitlines()[0]
    return " ".join(_INNER.sub("", _ENTRY.sub("", line)).split())
