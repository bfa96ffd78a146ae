"""Compilers of pieces for deterministic decoding: a row's bits do not depend on the rows beside it.

    CUDA   one compiled graph for every number of rows up to FIXED_ROWS, made for an example of a fixed size, whose
           products are the ops of `kernels/skinny.py` with `fixed`. A row on its own runs as two.
    CPU    each row on its own.

Beyond FIXED_ROWS only prompts have rows, one prompt at a time (`EngineOptions.deterministic`): how they are computed
may depend on how many they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import fx

from ..passes.graph import is_call
from ..passes.inductor import untimed
from ..passes.pieces import Code
from .compiler import MANY, SYMBOLIC, PieceCompiler, Run
from .options import FIXED_ROWS

# Sizes of what graphs are compiled for: Inductor chooses by them in which order the sums of a row are added.
_EXAMPLE_ROWS = {SYMBOLIC: 16, MANY: 1024}
_OTHER_PRODUCTS = tuple(
    getattr(torch.ops.aten, name).default
    for name in ("matmul", "mm", "bmm", "addmm", "baddbmm", "addbmm", "einsum", "convolution", "_scaled_mm")
)

Backend = Callable[[fx.GraphModule, list[torch.Tensor]], Callable[..., object]]


class FixedCompiler(PieceCompiler):
    """For CUDA, in half precision. backend: compiles a graph; Inductor where none is given."""

    few_rows = FIXED_ROWS
    fixed = True

    def __init__(self, backend: Backend | None = None) -> None:
        super().__init__(enabled=True, static_rows=frozenset(), skinny=True)
        self.backend = backend or _inductor

    def kind(self, rows: int) -> int:
        """What row counts have in common that share a graph."""
        return MANY if rows > FIXED_ROWS else SYMBOLIC

    def prepare(self, codes: Iterable[Code]) -> None:
        """Raises ValueError for codes with products in no fixed order."""
        for code in codes:
            reasons = [f"{name}: {why}" for name, why in self._few_rows(code).left_alone]
            reasons += [f"{node.name}: it is no linear layer" for node in _other_products(code)]
            if reasons:
                raise ValueError(
                    f"deterministic=True: the sums of these products have no fixed order: {'; '.join(reasons)}; pass "
                    "deterministic=False"
                )

    def __call__(self, code: Code, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        rows, alone = self.rows(code, arguments), False
        arguments = [_standard(one) if at in code.row_inputs else one for at, one in enumerate(arguments)]
        if rows == 1 and code.row_inputs:  # compilers take a dimension of 1 for a constant
            alone = True
            arguments = [
                torch.cat((one, one)) if at in code.row_inputs else one for at, one in enumerate(arguments)
            ]
        kind = self._kind(code, rows)
        run = self._runs.get((code.key, kind))
        if run is None:
            run = self._runs[code.key, kind] = self._make(code, arguments, kind)
        made = run(*arguments)
        return tuple(one[:1] if alone and at in code.row_outputs else one for at, one in enumerate(made))

    def _make(self, code: Code, arguments: Sequence[torch.Tensor], kind: int) -> Run:
        """The compiled graph, which has run once on an example."""
        module = code.module if kind == MANY else self._few_rows(code).module
        module = fx.GraphModule(module, module.graph)
        example = list(arguments)
        for at in code.row_inputs:
            example[at] = arguments[at].new_zeros(_EXAMPLE_ROWS[kind], *arguments[at].shape[1:])
            torch._dynamo.mark_dynamic(example[at], 0)
        run = torch.compile(module, fullgraph=True, backend=_Once(self.backend))
        run(*example)
        return run


class OneRowEach(PieceCompiler):
    """For the CPU: up to FIXED_ROWS rows run one by one, compiled or operation by operation."""

    few_rows = FIXED_ROWS
    fixed = True

    def kind(self, rows: int) -> int:
        """What row counts have in common that share a graph."""
        return super().kind(1 if rows <= FIXED_ROWS else rows)

    def __call__(self, code: Code, arguments: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        rows = self.rows(code, arguments)
        if not code.row_inputs or rows > FIXED_ROWS:
            return super().__call__(code, arguments)
        made = [super(OneRowEach, self).__call__(code, list(_row(code, arguments, at))) for at in range(rows)]
        return tuple(
            torch.cat(values) if at in code.row_outputs else values[0]
            for at, values in enumerate(zip(*made, strict=True))
        )


def _row(code: Code, arguments: Sequence[torch.Tensor], row: int) -> Iterator[torch.Tensor]:
    """The arguments of one row. Copies: how a product is added may follow from where its operand begins."""
    for at, one in enumerate(arguments):
        yield one[row : row + 1].clone() if at in code.row_inputs else one


def _other_products(code: Code) -> list[fx.Node]:
    return [node for node in code.module.graph.nodes if any(is_call(node, one) for one in _OTHER_PRODUCTS)]


def _standard(rows: torch.Tensor) -> torch.Tensor:
    """The same values with the strides of a fresh tensor, which those of a dimension of 1 may not be."""
    rows = rows.contiguous()
    strides, size = [], 1
    for length in reversed(rows.shape):
        strides.append(size)
        size *= max(1, length)
    return rows.as_strided(rows.shape, strides[::-1])


class _Once:
    """A backend that compiles one graph. Another one, for inputs of another kind, would have bits of its own."""

    def __init__(self, backend: Backend) -> None:
        self.backend, self.done = backend, False

    def __call__(self, graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        if self.done:
            raise RuntimeError(
                "deterministic=True: a piece of the model would be compiled a second time, with other bits; let every "
                "call of the engine run under the same modes of torch (grad, inference, autocast)"
            )
        self.done = True
        return self.backend(graph, inputs)


def _inductor(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
    from torch._inductor.compile_fx import compile_fx

    made: Any = compile_fx(graph, inputs, config_patches=untimed())
    return cast("Callable[..., object]", made)
