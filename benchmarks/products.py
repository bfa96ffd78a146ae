"""Time the products of a decode step at a few rows, alone and in the chain of a whole step without attention.

    python -m benchmarks.products --out benchmarks/results/products-h200.json    everything, about two minutes
    python -m benchmarks.products --no-sweep --rows 1,4 --seconds 60             default tiles only
    python -m benchmarks.products --no-products --no-chain --inductor --rows 4,32,1,8    Inductor's choice, minutes
    TRITON_INTERPRET=1 python -m benchmarks.products --tiny                      on the CPU: does the script run?

Products: each shape at each number of rows, the library (F.linear, without what follows it) against the Triton kernel
with the tiles that the runtime has where nothing is measured ("default"), and at 4 and 32 rows with other tiles, in
CUDA graphs over rotating weights. Every kernel is compared with float64 before it is timed. The floor is the time to
read the weight at READ_TBS.

Chain: what lies between two attention calls of an Ouro layer (o, norm, residual, norm, gate and up, down, norm,
residual, norm, q and k and v), with weights of their own for each layer, layers x loops of them in one CUDA graph,
compiled by Inductor: all of a step outside of attention but the embedding, the rotary embedding and the head. "ours, as
in the runtime" has the tiles that the runtime has; the others those of one rule for all products.

Inductor (`--inductor`): each product with its activation as Inductor would choose it with max-autotune, beside the
library and the default tiles (`inductor_products`). It compiles for seconds each; `--inductor-seconds` bounds that.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.nn import functional as F
from triton.runtime.errors import OutOfResources

from benchmarks.inductor_products import time_inductor
from benchmarks.timing import conditions, graph_time, need_gpu
from sparse_compile.kernels import skinny, skinny_choice
from sparse_compile.kernels.skinny_backend import launch
from sparse_compile.kernels.skinny_tuning import Product, Tiles, default_tiles, padded_rows
from sparse_compile.passes.pieces import Code
from sparse_compile.passes.skinny import use_skinny
from sparse_compile.runtime.compiler import PieceCompiler

ROWS = (1, 2, 4, 8, 16, 32, 64)
SWEPT = (4, 32)
CHAIN_ROWS = (1, 2, 4, 8, 32)
AHEAD = (0, 256, 512, 1024)  # columns that are asked for ahead of time in the chain
READ_TBS = 4.35  # reading alone, one H200
ROTATE_BYTES = 200 << 20
Calls = list[Callable[[], Any]]
Pick = Callable[..., Tiles | None]  # of the arguments of `skinny_choice.tiles_maybe`


@dataclass(frozen=True)
class Model:
    """Sizes of a model; the defaults are Ouro-1.4B's."""

    hidden: int = 2048
    intermediate: int = 5632
    vocabulary: int = 49152
    layers: int = 24
    loops: int = 4

    def products(self) -> dict[str, tuple[int, int, bool]]:
        """name -> (lines of the weight, depth, gated)"""
        e, i = self.hidden, self.intermediate
        return {
            "qkv": (3 * e, e, False), "o": (e, e, False), "gate_up": (2 * i, e, True), "down": (e, i, False),
            "gate": (i, e, False), "head": (self.vocabulary, e, False),
        }  # fmt: skip

    @property
    def chain_bytes(self) -> int:
        used = ("qkv", "o", "gate_up", "down")
        return 2 * self.layers * self.loops * sum(n * k for n, k, _ in map(self.products().__getitem__, used))


class Bench:
    """Where and how long to run; times of everything in microseconds."""

    def __init__(self, model: Model, rows: tuple[int, ...], device: str, seconds: float) -> None:
        self.model, self.rows, self.device = model, rows, device
        self.until = time.monotonic() + seconds
        self.best: dict[tuple[str, int], Tiles] = {}
        self.generator = torch.Generator(device).manual_seed(0)

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self.until

    def values(self, *shape: int, scale: float = 1.0) -> Tensor:
        made = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return made.normal_(0, scale, generator=self.generator)

    def weights(self, lines: int, depth: int) -> list[Tensor]:
        """Copies, on a GPU more than its L2 cache holds."""
        copies = max(2, -(-ROTATE_BYTES // (2 * lines * depth))) if self.device == "cuda" else 1
        return [self.values(lines, depth, scale=depth**-0.5) for _ in range(copies)]

    def time(self, calls: Calls) -> float:
        if self.device == "cuda":
            return graph_time(calls, replays=5)
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) * 1e6 / len(calls)


# ---------------------------------------------------------------------- products


def precompile(bench: Bench, sweep: bool) -> None:
    """Compile every kernel in processes of their own; they leave it in Triton's cache on disk."""
    jobs: dict[tuple[Any, ...], None] = {}
    for name, (lines, depth, gated) in bench.model.products().items():
        for rows in bench.rows:
            product = Product(rows, lines // (2 if gated else 1), depth, gated)
            tried = [default_tiles(product), shipped(bench, rows, lines, depth, gated)]
            if sweep and rows in SWEPT and name != "head":
                tried += swept(product)
            for tiles in tried:
                jobs[padded_rows(rows, tiles.slices), lines, depth, gated, tiles] = None
    workers = min(14, os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_one, jobs))
    print(f"{len(jobs)} kernels compiled by {workers} processes", flush=True)


def compile_one(job: tuple[int, int, int, bool, Tiles]) -> None:
    rows, lines, depth, gated, tiles = job
    options: Any = {"dtype": torch.bfloat16, "device": "cuda"}
    with contextlib.suppress(OutOfResources):
        launch(
            torch.zeros(rows, depth, **options),
            torch.zeros(lines, depth, **options),
            None,
            None,
            gated,
            tiles,
        )


def shipped(bench: Bench, rows: int, lines: int, depth: int, gated: bool) -> Tiles:
    """Those of the runtime where nothing is measured."""
    shape = skinny_choice.Shape(lines, depth, gated, torch.bfloat16, torch.device(bench.device))
    return skinny_choice.default_choice(shape, rows)


def early(ahead: int, product: Product) -> Tiles:
    """The default tiles, started before the kernel ahead has finished."""
    return replace(default_tiles(product), pdl=True, ahead=ahead)


def swept(product: Product) -> list[Tiles]:
    """Tiles to try: the default with a late start, and others."""
    first = default_tiles(product)
    height = 2 if product.gated else 1
    wide = Tiles(lines=64 // height, columns=128, slices=1, stages=5)
    blocks = -(-product.width // wide.lines)
    tried = [
        first,
        replace(first, columns=256, stages=2 * first.stages - 1),
        replace(first, columns=1024, slices=8, warps=8, stages=3),
        replace(first, lines=2 * first.lines, columns=256, stages=4),
        replace(first, warps=8),
        replace(first, splits=2, stages=min(4, first.stages)),
        replace(first, lines=16, columns=256, warps=4),
        *(replace(wide, splits=max(1, min(8, round(per_sm * 132 / blocks)))) for per_sm in (1, 2)),
        *(early(ahead, product) for ahead in AHEAD),
    ]
    return list(dict.fromkeys(tried))


def wrong(got: Tensor, x: Tensor, weight: Tensor, gated: bool) -> str:
    """Why a result is wrong: its error against float64 is above that of eager code; "" where it is not."""
    exact = skinny.define(x.double(), weight.double(), gated=gated)
    eager = skinny.eager(x, weight, gated=gated)
    mine, theirs = ((made.double() - exact).abs().max().item() for made in (got, eager))
    if mine <= theirs * 1.01 + 2**-7 * exact.abs().max().item() * (x.device.type == "cpu") + 1e-4:
        return ""
    return f"wrong result: error {mine:.3g}, eager {theirs:.3g}"


def time_tiles(bench: Bench, x: Tensor, weights: list[Tensor], gated: bool, tiles: Tiles) -> float | None:
    """Microseconds; None for tiles that the GPU has no room for."""
    try:
        reason = wrong(launch(x, weights[0], None, None, gated, tiles), x, weights[0], gated)
    except OutOfResources:
        return None
    if reason:
        raise SystemExit(reason)
    return bench.time([functools.partial(launch, x, w, None, None, gated, tiles) for w in weights])


def product_row(
    bench: Bench, name: str, rows: int, weights: list[Tensor], gated: bool, sweep: bool
) -> dict[str, Any]:
    """One line of the table."""
    lines, depth = weights[0].shape
    product = Product(rows, lines // (2 if gated else 1), depth, gated)
    x, tiles = bench.values(rows, depth), shipped(bench, rows, lines, depth, gated)
    times = {tiles: time_tiles(bench, x, weights, gated, tiles)}
    for other in swept(product) if sweep else ():
        if bench.in_time and other not in times:
            times[other] = time_tiles(bench, x, weights, gated, other)
    known = {made: us for made, us in times.items() if us is not None}
    best = min(known, key=known.__getitem__) if known else tiles
    alone = [made for made in known if not made.pdl]
    bench.best[name, rows] = min(alone, key=known.__getitem__) if alone else default_tiles(product)
    return {
        "product": name, "rows": rows, "floor_us": floor_us(product.weight_bytes),
        "library_us": bench.time([functools.partial(F.linear, x, w) for w in weights]),
        "default_us": times[tiles], "best_us": known.get(best), "best": asdict(best),
        "tried": [{"us": us, **asdict(made)} for made, us in times.items()],
    }  # fmt: skip


def time_products(bench: Bench, sweep: bool) -> list[dict[str, Any]]:
    found = []
    print(f"{'product':8} rows  floor  library  default     best   GB/s  share  best tiles")
    for name, (lines, depth, gated) in bench.model.products().items():
        weights = bench.weights(lines, depth)
        for rows in bench.rows:
            if not bench.in_time:
                print(f"{name:8} {rows:4}  out of time")
                continue
            row = product_row(bench, name, rows, weights, gated, sweep and rows in SWEPT and name != "head")
            found.append(row)
            us = row["best_us"] or float("nan")
            print(
                f"{name:8} {rows:4} {row['floor_us']:6.2f} {row['library_us']:8.2f} {row['default_us'] or -1:8.2f} "
                f"{us:8.2f} {2 * lines * depth / us / 1e3:6.0f} {row['floor_us'] / us:6.0%}  {describe(row['best'])}",
                flush=True,
            )
        del weights
    return found


def time_shipped(bench: Bench, x: Tensor, weights: list[Tensor], gated: bool) -> float | None:
    """Microseconds with the runtime's tiles; None where the GPU has no room for them."""
    lines, depth = weights[0].shape
    return time_tiles(bench, x, weights, gated, shipped(bench, x.shape[0], lines, depth, gated))


def floor_us(size: int) -> float:
    """Microseconds to read so many bytes."""
    return size / READ_TBS / 1e6


def describe(tiles: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in tiles.items() if value != getattr(Tiles(), name))


# ---------------------------------------------------------------------- the chain of a step


def norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Between(nn.Module):
    """From one attention call's output to the next one's q, k, v; with norms behind both branches, as in Ouro."""

    def __init__(self, merged: bool) -> None:
        super().__init__()
        self.merged = merged

    def forward(self, attended: Tensor, h: Tensor, *w: Tensor) -> tuple[Tensor, ...]:
        norms, o, down, others = w[:4], w[4], w[5], w[6:]
        h = h + norm(F.linear(attended, o), norms[0])
        x = norm(h, norms[1])
        if self.merged:
            gate, up = F.linear(x, others[0]).chunk(2, -1)
        else:
            gate, up = F.linear(x, others[0]), F.linear(x, others[1])
        h = h + norm(F.linear(F.silu(gate) * up, down), norms[2])
        x = norm(h, norms[3])
        return (h, *(F.linear(x, weight) for weight in others[1 if self.merged else 2 :]))


class Chain:
    """The pieces of all layers, and their weights: the merged ones and their parts are the same memory."""

    def __init__(self, bench: Bench) -> None:
        self.bench, model = bench, bench.model
        e, i = model.hidden, model.intermediate
        self.inputs = bench.values(2, 64, 1, e)
        self.layers = []
        for _ in range(model.layers):
            norms = [1 + bench.values(e, scale=0.1) for _ in range(4)]
            weights = [bench.values(n, k, scale=k**-0.5) for n, k in ((e, e), (e, i), (2 * i, e), (3 * e, e))]
            self.layers.append((*norms, *weights))

    def weights(self, layer: int, merged: bool) -> tuple[Tensor, ...]:
        *rest, gate_up, qkv = self.layers[layer]
        return (*rest, gate_up, qkv) if merged else (*rest, *gate_up.chunk(2), *qkv.chunk(3))

    def code(self, merged: bool) -> Code:
        x = self.bench.values(3, 1, self.bench.model.hidden)
        weights = self.weights(0, merged)
        rows: Any = ({0: Dim.AUTO}, {0: Dim.AUTO}, ({},) * len(weights))
        program = export(Between(merged), (x, x.clone(), *weights), dynamic_shapes=rows, strict=False)
        graph = program.graph_module
        for node in list(graph.graph.nodes):
            if node.target is torch.ops.aten._assert_tensor_metadata.default:
                graph.graph.erase_node(node)
        graph.graph.eliminate_dead_code()
        graph.recompile()
        return Code(graph, (0, 1), f"merged={merged}")

    def step(self, run: Callable[..., tuple[Tensor, ...]], rows: int, merged: bool) -> Callable[[], Tensor]:
        """All layers and loops; the attention is left out, so its output is a constant."""
        attended, start = self.inputs[0, :rows], self.inputs[1, :rows]
        weights = [self.weights(layer, merged) for layer in range(self.bench.model.layers)]

        def step() -> Tensor:
            h = start
            for _ in range(self.bench.model.loops):
                for own in weights:
                    h = run(attended, h, *own)[0]
            return h

        return step


@contextlib.contextmanager
def tiles_by(pick: Pick) -> Iterator[None]:
    """Let the ops run with these tiles, instead of measuring."""
    before = skinny_choice.tiles_maybe
    skinny_choice.tiles_maybe = pick
    try:
        yield
    finally:
        skinny_choice.tiles_maybe = before


def default_pick(rows: int, *call: Any) -> Tiles:
    return default_tiles(skinny_choice.shape_of(*call).product(rows))


def picks(bench: Bench) -> dict[str, Pick]:
    """Ways to choose tiles in the chain."""
    by_shape = {(n, k, gated): name for name, (n, k, gated) in bench.model.products().items()}

    def best(rows: int, *call: Any) -> Tiles:
        shape = skinny_choice.shape_of(*call)
        name, near = by_shape[shape.lines, shape.depth, shape.gated], SWEPT[0] if rows <= 8 else SWEPT[1]
        return bench.best.get((name, near)) or default_pick(rows, *call)

    def early_pick(ahead: int, rows: int, *call: Any) -> Tiles:
        return early(ahead, skinny_choice.shape_of(*call).product(rows))

    starts = {f"ours, early start, {ahead} ahead": functools.partial(early_pick, ahead) for ahead in AHEAD}
    own = {"ours, as in the runtime": skinny_choice.tiles_maybe}
    return {"ours": default_pick, "ours, best tiles": best, **starts, **own}


def time_chain(bench: Bench, chain_rows: tuple[int, ...]) -> list[dict[str, Any]]:
    """Milliseconds of every variant at every number of rows."""
    chain, floor = Chain(bench), bench.model.chain_bytes / READ_TBS / 1e9
    print(f"\nchain of {bench.model.layers} x {bench.model.loops}: floor {floor:.2f} ms", flush=True)
    on_cuda = bench.device == "cuda"
    found: list[dict[str, Any]] = []
    plain = {merged: PieceCompiler(on_cuda, skinny=False) for merged in (False, True)}
    ours = PieceCompiler(on_cuda, skinny=True)
    codes = {merged: chain.code(merged) for merged in (False, True)}
    variants: list[tuple[str, PieceCompiler, bool, Any]] = [
        ("library, unmerged", plain[False], False, default_pick),
        ("library, merged", plain[True], True, default_pick),
        *((name, ours, True, pick) for name, pick in picks(bench).items()),
    ]
    late: dict[int, Tensor] = {}
    for name, compiler, merged, pick in variants:
        times, same = {}, True
        with tiles_by(pick):
            for rows in chain_rows:
                run = functools.partial(call, compiler, codes[merged])
                check_piece(chain, run, codes[merged], rows, merged)
                step = chain.step(run, rows, merged)
                times[rows] = bench.time([step]) / 1000
                made = replayed(step) if on_cuda else step()
                if name == "ours":
                    late[rows] = made
                same &= "early" not in name or torch.equal(made, late[rows])
        found.append({"variant": name, "ms": times, "floor_ms": floor, "same_bits": same})
        figures = "".join(f"  {rows}: {ms:.3f}" for rows, ms in times.items())
        print(f"{name:30}{figures}{'' if same else '  OTHER BITS than a late start'}", flush=True)
    return found


def replayed(step: Callable[[], Tensor]) -> Tensor:
    """The result of the third replay of a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = step()
    for _ in range(3):
        graph.replay()
    return made.clone()


def call(compiler: PieceCompiler, code: Code, *arguments: Tensor) -> tuple[Tensor, ...]:
    if compiler.skinny and not compiler.enabled:  # --tiny: as it would be compiled
        return use_skinny(code.module, norms=compiler.norms).module(*arguments)
    return compiler(code, arguments)


def check_piece(
    chain: Chain, run: Callable[..., tuple[Tensor, ...]], code: Code, rows: int, merged: bool
) -> None:
    """Refuses a piece that is further from float64 than eager code is, by more than a fifth."""
    hidden = chain.bench.model.hidden
    given = (*(chain.bench.values(rows, 1, hidden) for _ in range(2)), *chain.weights(0, merged))
    exact = Between(merged)(*(x.double() for x in given))
    for got, eager, want in zip(run(*given), code.module(*given), exact, strict=True):
        mine, theirs = ((made.double() - want).abs().mean().item() for made in (got, eager))
        if not mine <= 1.2 * theirs:
            raise SystemExit(f"wrong result of a piece at {rows} rows: error {mine:.3g}, eager {theirs:.3g}")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=numbers, default=ROWS)
    parser.add_argument("--chain-rows", type=numbers, default=CHAIN_ROWS)
    parser.add_argument("--no-sweep", action="store_true", help="default tiles only")
    parser.add_argument("--no-products", action="store_true", help="without the products")
    parser.add_argument("--no-chain", action="store_true", help="without the chain")
    parser.add_argument(
        "--seconds", type=float, default=75, help="after this the products stop; then the chain"
    )
    parser.add_argument(
        "--inductor", action="store_true", help="Inductor's own choice of each product as well"
    )
    parser.add_argument(
        "--inductor-seconds", type=float, default=240, help="after this Inductor compiles nothing new"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, without a compiler")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not options.tiny:
        need_gpu()
    model = Model(64, 96, 160, layers=2, loops=2) if options.tiny else Model()
    rows, chain_rows = ((1, 4), (1, 3)) if options.tiny else (options.rows, options.chain_rows)
    bench = Bench(model, rows, "cpu" if options.tiny else "cuda", options.seconds)
    result: dict[str, Any] = {} if options.tiny else conditions()
    print(result)
    result["model"] = asdict(model)
    if not options.tiny:
        precompile(bench, sweep=not options.no_sweep and not (options.no_products and options.no_chain))
    if not options.no_products:
        result["products"] = time_products(bench, sweep=not options.no_sweep)
    if not options.no_chain:
        result["chain"] = time_chain(bench, chain_rows)
    if options.inductor:
        ours = functools.partial(time_shipped, bench)
        result["inductor"] = time_inductor(bench, ours, wrong, floor_us, options.inductor_seconds)
    if options.out:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
