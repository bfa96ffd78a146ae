"""What it is worth that products take the norms of their rows along: a step without attention, with and without that.

    python -m benchmarks.norms --out benchmarks/results/norms-h200.json    about 90 seconds
    python -m benchmarks.norms --models hrm-text --rows 1,32
    TRITON_INTERPRET=1 python -m benchmarks.norms --tiny                   on the CPU: does the script run?

For each model, what lies between two attention calls of a layer (without the rotary embedding), with weights of their
own for each layer, layers x loops of them in one CUDA graph, compiled by Inductor; tiles are chosen by measurement, as
everywhere. The same graphs run with `passes/norms.py` at "none" and at what the line says: "alone" where the norm is a
kernel of its own that goes away, "all" where a kernel stays that made its rows. Both take turns; the figures are
medians, in milliseconds per step, and the difference in microseconds per norm that was taken along.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from benchmarks.products import CHAIN_ROWS, Bench, Model, call, norm, numbers
from benchmarks.timing import conditions, need_gpu
from sparse_compile.kernels import skinny_choice
from sparse_compile.kernels.skinny import Norm
from sparse_compile.kernels.skinny_backend import launch
from sparse_compile.kernels.skinny_tuning import Tiles
from sparse_compile.passes.norms import Norms
from sparse_compile.passes.pieces import Code
from sparse_compile.runtime.compiler import PieceCompiler

TURNS = 3
Forward = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Family:
    """Sizes of a model and its layer. attended: width of what attention hands on; behind: lines of the product behind
    the layer (q, k, v and perhaps a gate); small: widths of its small weights; norms: which are taken along, by the
    products `normed`, with a weight or without; gated: whether gate and up are one gated product.
    """

    forward: Forward
    hidden: int
    attended: int
    intermediate: int
    behind: int
    layers: int
    loops: int
    norms: Norms
    weighted: bool
    small: tuple[str, ...]
    normed: tuple[str, ...] = ("gate_up", "behind")
    gated: bool = True

    @property
    def weights(self) -> dict[str, tuple[int, int]]:
        """name -> (lines, depth)"""
        e, i = self.hidden, self.intermediate
        return {"o": (e, self.attended), "down": (e, i), "gate_up": (2 * i, e), "behind": (self.behind, e)}

    @property
    def tiny(self) -> Family:
        return replace(self, hidden=64, attended=64, intermediate=96, behind=256, layers=2, loops=2)


def ouro(
    attended: Tensor, h: Tensor, made: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, *w: Tensor
) -> tuple[Tensor, Tensor]:
    """Norms ahead of both branches and behind them."""
    o, down, gate_up, behind = w
    h = h + norm(F.linear(attended, o), a)
    gate, up = F.linear(norm(h, b), gate_up).chunk(2, -1)
    h = h + norm(F.linear(F.silu(gate) * up, down), c)
    return h, F.linear(norm(h, d), behind)


def hrm_text(attended: Tensor, h: Tensor, made: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
    """Norms without weights ahead of both branches; attention has applied its gate."""
    o, down, gate_up, behind = w
    h = h + F.linear(attended, o)
    gate, up = F.linear(unit(h), gate_up).chunk(2, -1)
    h = h + F.linear(F.silu(gate) * up, down)
    return h, F.linear(unit(h), behind)


def dory(
    attended: Tensor, h: Tensor, made: Tensor, a: Tensor, b: Tensor, s: Tensor, *w: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of length one everywhere, which are mixed by learned shares; attention is gated."""
    o, down, gate_up, behind = w
    gate = torch.sigmoid(made[..., -attended.shape[-1] :])
    h = sphere(h + a.abs() * (sphere(F.linear(sphere(attended * gate), o)) - h))
    gate, up = (F.linear(h, gate_up) * s).chunk(2, -1)
    fed = F.linear(sphere(F.silu(gate) * up), down)
    h = sphere(h + b.abs() * (sphere(fed) - h))
    return h, F.linear(h, behind)


def unit(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def sphere(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


FAMILIES = {
    "ouro-1.4b": Family(ouro, 2048, 2048, 5632, 6144, 24, 4, "all", True, ("hidden",) * 4),
    "hrm-text": Family(hrm_text, 1536, 1536, 4096, 6144, 32, 4, "alone", False, ()),
    "dory": Family(
        dory,
        2560,
        4096,
        7168,
        10240,
        20,
        2,
        "all",
        False,
        ("hidden", "hidden", "gate_up"),
        ("o", "down"),
        False,
    ),
}
"""The layers of HRM-Text are those of its two stacks, called 128 times; of Dory only those in the loop."""


class Chain:
    """All layers of a model: their code, and weights of their own."""

    def __init__(self, bench: Bench, family: Family) -> None:
        self.bench, self.family = bench, family
        shapes = family.weights
        self.widths = {"hidden": family.hidden, "gate_up": 2 * family.intermediate}
        self.layers = [
            (
                *(1 + bench.values(self.widths[name], scale=0.1) for name in family.small),
                *(bench.values(lines, depth, scale=depth**-0.5) for lines, depth in shapes.values()),
            )
            for _ in range(family.layers)
        ]
        self.inputs = [bench.values(64, 1, n) for n in (family.attended, family.hidden, family.behind)]

    def code(self) -> Code:
        forward = self.family.forward

        class Between(nn.Module):
            def forward(self, attended: Tensor, h: Tensor, made: Tensor, *w: Tensor) -> tuple[Tensor, Tensor]:
                return forward(attended, h, made, *w)

        rows: Any = (*({0: Dim.AUTO},) * 3, ({},) * len(self.layers[0]))
        given = (*(one[:3] for one in self.inputs), *self.layers[0])
        graph = export(Between(), given, dynamic_shapes=rows, strict=False).graph_module
        for node in list(graph.graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                graph.graph.erase_node(node)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return Code(graph, (0, 1, 2), "between")

    def step(self, run: Callable[..., tuple[Tensor, ...]], rows: int) -> Callable[[], Tensor]:
        attended, start, first = (one[:rows] for one in self.inputs)

        def step() -> Tensor:
            h, made = start, first
            for _ in range(self.family.loops):
                for own in self.layers:
                    h, made = run(attended, h, made, *own)
            return made

        return step

    def check(self, run: Callable[..., tuple[Tensor, ...]], rows: int) -> None:
        """Refuses a layer that is further from float64 than eager code is, by more than a fifth."""
        given = (*(one[:rows] for one in self.inputs), *self.layers[0])
        exact, eager = (self.family.forward(*some) for some in ([x.double() for x in given], given))
        for got, plain, want in zip(run(*given), eager, exact, strict=True):
            mine, theirs = ((made.double() - want).abs().mean().item() for made in (got, plain))
            if not mine <= 1.2 * theirs:
                raise SystemExit(
                    f"wrong result of a layer at {rows} rows: error {mine:.3g}, eager {theirs:.3g}"
                )


def measure(bench: Bench, name: str, family: Family) -> list[dict[str, Any]]:
    """A line for each number of rows."""
    chain, found = Chain(bench, family), []
    code = chain.code()
    compilers = {
        norms: PieceCompiler(bench.device == "cuda", skinny=True) for norms in ("none", family.norms)
    }
    for norms, compiler in compilers.items():
        compiler.norms = norms  # type: ignore[assignment]
    taken = compilers[family.norms]._few_rows(code).norms * family.layers * family.loops
    for rows in bench.rows:
        runs = {norms: functools.partial(call, one, code) for norms, one in compilers.items()}
        for run in runs.values():
            chain.check(run, rows)
        times: dict[str, list[float]] = {norms: [] for norms in runs}
        for _ in range(TURNS if bench.device == "cuda" else 1):
            for norms, run in runs.items():
                times[norms].append(bench.time([chain.step(run, rows)]) / 1000)
        without, taking = (statistics.median(times[norms]) for norms in ("none", family.norms))
        row = {
            "model": name, "rows": rows, "norms": family.norms, "taken": taken, "none_ms": without,
            "taken_ms": taking, "us_per_norm": (without - taking) * 1000 / taken, "runs_ms": times,
        }  # fmt: skip
        found.append(row)
        print(
            f"{name:10} {rows:4}  {family.norms:6} {taken:5}  {without:8.3f} {taking:8.3f}  "
            f"{row['us_per_norm']:7.2f} us  {without / taking - 1:+6.1%}",
            flush=True,
        )
    return found


def precompile(families: dict[str, Family], rows: tuple[int, ...]) -> None:
    """Compile the kernels that are measured in processes of their own; they leave them in Triton's cache on disk."""
    device = torch.device("cuda", 0)
    jobs: dict[tuple[Any, ...], None] = {}
    for family in families.values():
        for name, (lines, depth) in family.weights.items():
            gated = name == "gate_up" and family.gated
            with_norm = "weighted norm" if family.weighted else "norm"
            for kind in ("", with_norm) if name in family.normed else ("",):
                shape: Any = skinny_choice.Shape(lines, depth, gated, torch.bfloat16, device, kind)  # type: ignore[arg-type]
                for bucket in {skinny_choice._bucket(count) for count in rows}:
                    jobs |= {
                        (shape, bucket, tiles): None for tiles in skinny_choice.candidates(shape, bucket)
                    }
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
    print(f"{len(jobs)} kernels compiled", flush=True)


def compile_one(job: tuple[skinny_choice.Shape, int, Tiles]) -> None:
    shape, rows, tiles = job
    x, weight = (torch.zeros(n, shape.depth, dtype=shape.dtype, device="cuda") for n in (rows, shape.lines))
    along = Norm(1e-6, x[0] if shape.norm == "weighted norm" else None) if shape.norm else None
    with contextlib.suppress(OutOfResources):
        launch(x, weight, None, None, shape.gated, tiles, norm=along)


def names(text: str) -> list[str]:
    found = text.split(",")
    unknown = sorted(set(found) - set(FAMILIES))
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}; known: {', '.join(FAMILIES)}")
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", type=names, default=list(FAMILIES))
    parser.add_argument("--rows", type=numbers, default=CHAIN_ROWS)
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, without a compiler")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if not options.tiny:
        need_gpu()
    families = {name: FAMILIES[name].tiny if options.tiny else FAMILIES[name] for name in options.models}
    result: dict[str, Any] = {} if options.tiny else conditions()
    print(result)
    bench = Bench(Model(), options.rows, "cpu" if options.tiny else "cuda", seconds=0)
    if not options.tiny:
        precompile(families, options.rows)
    print("model      rows  norms  taken   none ms taken ms  per norm   gain", flush=True)
    result["rows"] = []
    for name, family in families.items():
        result["rows"] += measure(bench, name, family)
        if options.out:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
