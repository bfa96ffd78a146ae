"""A looped model small enough that its graphs can be read, traced straight to markers without transformers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from shared_models import copied
from torch import fx, nn
from torch.export import Dim, export

from sparse_compile.kernels.retention import Retention
from sparse_compile.passes.base import Compilation, Options, PassManager
from sparse_compile.passes.grammar import check_grammar
from sparse_compile.passes.pipeline import PASSES
from sparse_compile.passes.trace import _inline_weights

HEADS, HEAD_DIM = 2, 4


class ToyAttention(nn.Module):
    def __init__(self, window: int = 0) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24, bias=False)
        self.window = window

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x[:, 0]).view(-1, 3, HEADS, HEAD_DIM).unbind(1)
        out = torch.ops.sparse_compile.site(q, k, v, scale=0.5, window=self.window, softcap=0.0)
        return out.reshape(-1, 1, 8)


class Toy(nn.Module):
    """embed -> loops x (x + attention(x) per layer, then + the input) -> head; `twist(x, loop)` runs before a loop."""

    def __init__(
        self,
        layers: int = 1,
        loops: int = 3,
        inject: bool = True,
        twist: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
        windows: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(ToyAttention(windows[i] if windows else 0) for i in range(layers))
        self.head = nn.Linear(8, 16, bias=False)
        self.loops, self.inject, self.twist = loops, inject, twist

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        start = self.embed(input_ids) + position_ids[..., None].float()
        x = start
        for loop in range(self.loops):
            x = self.twist(x, loop) if self.twist else x
            for layer in self.layers:
                x = x + layer(x)
            x = x + start if self.inject else x
        return self.head(x)


class _Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids, position_ids)


def toy_graph(model: nn.Module) -> fx.GraphModule:
    """The graph that `trace` would give for a transformers model of this shape."""
    ids, positions = torch.ones(3, 1, dtype=torch.long), torch.arange(3)[:, None]
    rows = {0: Dim.AUTO}
    with torch.no_grad():
        program = export(_Wrapper(model), (ids, positions), dynamic_shapes=(rows, rows), strict=False)
    return _inline_weights(program, model)


def toy_compile(model: nn.Module, **options: object) -> Compilation:
    """Run every pass over a toy model, or over a copy of its graph, at retention 0.3."""
    graph = copied(model) if isinstance(model, fx.GraphModule) else toy_graph(model)
    compilation = Compilation(graph, Options(Retention.of(0.3), **options))  # type: ignore[arg-type]
    PassManager(PASSES, check_grammar).run(compilation)
    return compilation
