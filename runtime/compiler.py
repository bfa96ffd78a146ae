"""Compile the pieces of a program with Inductor, each distinct graph once per kind of row count."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx

from ..kernels.skinny import MAX_ROWS
from ..passes.inductor import early_start, one_pass_reductions, untimed
from ..passes.norms import DEFAULT, Norms
from ..passes.pieces import Code
from ..passes.skinny import Rewritten, use_skinny

Run = Callable[..., tuple[torch.Tensor, ...]]

# Row counts with a graph of their own. A single row is one whatever is asked for: compilers take a dimension of 1 for a
# constant. Every other count shares one graph with symbolic rows; where products of a few rows are used, one up to
# MAX_ROWS, with those products, and one beyond, without.
STATIC_ROWS = frozenset({1})
SYMBOLIC, MANY = 0, -1


class PieceCompiler:
    """Runs pieces, compiled on first use. With `enabled=False` they run as they are, operation by operation.

    skinny: whether a few rows run with the products of `passes/skinny.py`.
    `rewritten` says, by the key of a code, what that changed and what it left alone.
    """

    few_rows = MAX_ROWS  # beyond them a graph may run with other products
    norms: Norms = DEFAULT  # which norms the products of a few rows take along
    fixed = False  # whether the bits of a row must not depend on the rows beside it

    def __init__(
        self, enabled: bool, static_rows: frozenset[int] = STATIC_ROWS, skinny: bool = False
    ) -> None:
        self.enabled = enabled
        self.static_rows = static_rows | STATIC_ROWS
        self.skinny = skinny
        self.rewritten: dict[str, Rewritten] = {}
        self._runs: dict[tuple[str, int], Run] = {}
        self._fused: dict[tuple[str, int], Callable[..., Any]] = {}

    @property
    def compiled(self) -> int:
        """Graphs compiled so far."""
        return len(self._runs)

    def kind(self, rows: int) -> int:
        """What row counts have in common that share a graph."""
        if rows in self.static_rows:
            return rows
        return MANY if self.skinny and rows > MAX_ROWS else SYMBOLIC

    def _kind(self, code: Code, rows: int) -> int:
        """The same for one code: where many rows would run with the same products, they share the graph of a few."""
        kind = self.kind(rows)
        return SYMBOLIC if kind == MANY and not self._few_rows(code).counts else kind

    def prepare(self, codes: Iterable[Code]) -> None:
        """Raises ValueError for codes that cannot run as this compiler promises; this one promises nothing."""

    def one_of_each_kind(self, rows: Iterable[int]) -> list[int]:
        """The smallest of these row counts of each kind."""
        found: dict[int, int] = {}
        for count in sorted(rows):
            found.setdefault(self.kind(count), count)
        return list(found.values())

    def __call__(self, code: Code, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        if not self.enabled:
            return code.module(*arguments)
        rows = self.rows(code, arguments)
        kind = self._kind(code, rows)
        run = self._runs.get((code.key, kind))
        if run is None:
            few = rows <= MAX_ROWS and self.skinny
            module = self._few_rows(code).module if few else code.module
            run = self._runs[code.key, kind] = self._compile(module, code, arguments, dynamic=kind <= 0)
            with one_pass_reductions():  # it is compiled now
                return run(*arguments)
        return run(*arguments)

    @staticmethod
    def rows(code: Code, arguments: Sequence[torch.Tensor]) -> int:
        """How many rows a call has; 1 for a code that reads none."""
        return arguments[code.row_inputs[0]].shape[0] if code.row_inputs else 1

    def fuse(self, function: FunctionType, width: int) -> Callable[..., Any]:
        """A function of tensors with as few kernels as may be; itself, when nothing is compiled. width: a size that
        its graphs are for; others are symbolic.
        """
        if not self.enabled:
            return function
        key = (function.__name__, width)
        if key not in self._fused:
            # Code of its own, as in `_compile`.
            code = function.__code__.replace(co_name=f"{function.__name__}_{id(self)}_{width}")
            own = FunctionType(code, function.__globals__)
            self._fused[key] = torch.compile(own, fullgraph=True)
        return self._fused[key]

    def _few_rows(self, code: Code) -> Rewritten:
        if code.key not in self.rewritten:
            self.rewritten[code.key] = use_skinny(code.module, self.fixed, self.norms)
        return self.rewritten[code.key]

    @staticmethod
    def _compile(module: fx.GraphModule, code: Code, arguments: Sequence[torch.Tensor], dynamic: bool) -> Run:
        # A module of its own: Dynamo counts recompilations per code object, and two kinds of rows are two graphs.
        module = fx.GraphModule(module, module.graph)
        if dynamic:
            for at in code.row_inputs:
                torch._dynamo.mark_dynamic(arguments[at], 0)
        options = untimed() | (early_start(arguments[0].device, module.graph) if arguments else {})
        return torch.compile(module, fullgraph=True, dynamic=None if dynamic else False, options=options)
