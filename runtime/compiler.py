"""Compile the pieces of a program with Inductor, each distinct graph once per kind of row count."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import fx

from ..passes.pieces import Code

Run = Callable[..., tuple[torch.Tensor, ...]]

# Row counts with a graph of their own. A single row is one whatever is asked for: compilers take a dimension of 1 for a
# constant. Every other count shares one graph with symbolic rows.
STATIC_ROWS = frozenset({1})


class PieceCompiler:
    """Runs pieces, compiled on first use. With `enabled=False` they run as they are, operation by operation."""

    def __init__(self, enabled: bool, static_rows: frozenset[int] = STATIC_ROWS) -> None:
        self.enabled = enabled
        self.static_rows = static_rows | STATIC_ROWS
        self._runs: dict[tuple[str, int], Run] = {}

    @property
    def compiled(self) -> int:
        """Graphs compiled so far."""
        return len(self._runs)

    def __call__(self, code: Code, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if not self.enabled:
            return code.module(*arguments)
        rows = arguments[code.row_inputs[0]].shape[0] if code.row_inputs else 1
        key = code.key, rows if rows in self.static_rows else 0
        run = self._runs.get(key)
        if run is None:
            run = self._runs[key] = self._compile(code, arguments, dynamic=key[1] == 0)
        return run(*arguments)

    @staticmethod
    def _compile(code: Code, arguments: Sequence[torch.Tensor], dynamic: bool) -> Run:
        # A module of its own: Dynamo counts recompilations per code object, and two kinds of rows are two graphs.
        module = fx.GraphModule(code.module, code.module.graph)
        if dynamic:
            for at in code.row_inputs:
                torch._dynamo.mark_dynamic(arguments[at], 0)
        return torch.compile(module, fullgraph=True, dynamic=None if dynamic else False)
