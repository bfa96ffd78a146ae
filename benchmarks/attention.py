"""Time the attention ops against the best dense baseline of the same run.

    python -m benchmarks.attention --out benchmarks/results/attention-h200.json     every point that fits
    python -m benchmarks.attention --points 32x8192,8x4096:huginn:0.1:32            some of them
    python -m benchmarks.attention --tune                                           tile sizes at a few points
    python -m benchmarks.attention --plot-of benchmarks/results/attention-h200.json a table and a picture of a result

A point is ROWSxCONTEXT[:SHAPE[:RETENTION[:LOOPS]]], by default mha, 0.1 and 4. A correctness gate (against float64 on
one row) runs before a point is timed. Baselines read contiguous keys and values: PyTorch's
scaled_dot_product_attention by each of its backends, FlexAttention compiled (`--flex`, tens of seconds for each shape),
and FlashInfer where it is installed.

capture_us is the time of one of LAYERS captures in a row, each at a site of its own, with their selections on the
second stream, as a decode step runs those of its layers (`kernels/beside.py`); what follows them waits for the last
selection. capture_alone_us is that of captures whose selection ends before the next capture begins. loops_ratio is
(loop 0 dense + capture + later consumes) over (loops x best dense baseline).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import conditions, graph_time, need_gpu, need_plots
from sparse_compile.kernels import ops, triton_backend  # noqa: F401
from sparse_compile.kernels.arguments import Attention, Store
from sparse_compile.kernels.beside import beside
from sparse_compile.kernels.retention import Retention
from sparse_compile.kernels.triton_tuning import Tiles, tiles_for

ROWS = (1, 2, 4, 8, 32, 128)
CONTEXTS = (512, 2048, 8192, 32768, 65536)
SHAPES = {"mha": (16, 16, 128), "dory": (16, 4, 256), "huginn": (55, 55, 96)}
FEW = ((1, 8192), (2, 32768), (32, 512), (32, 8192))  # where other shapes and retentions are timed
POINTS = [
    *(f"{rows}x{context}" for rows in ROWS for context in CONTEXTS),
    *(f"{rows}x{context}:mha:{share}" for share in ("0.05", "0.2") for rows, context in FEW),
    *(f"{rows}x{context}:{shape}" for shape in ("dory", "huginn") for rows, context in FEW),
    *(f"8x4096:{shape}:0.1:32" for shape in ("mha", "huginn")),
]
ROTATE_BYTES = 256 << 20  # several times the L2 cache
LAYERS = 24  # sites, and so captures in a row
PAGE = 16


@dataclass(frozen=True)
class Point:
    rows: int
    context: int
    heads: int = 16
    kv_heads: int = 16
    head_dim: int = 128
    retention: str = "0.1"
    loops: int = 4

    @property
    def kv_bytes(self) -> int:
        """K and V of one plane in bfloat16."""
        return 4 * self.rows * self.context * self.kv_heads * self.head_dim

    @property
    def planes(self) -> int:
        """How many planes the calls of one graph go round, so that the L2 cache does not hold them."""
        return max(1, min(LAYERS, -(-ROTATE_BYTES // self.kv_bytes)))


class Bench:
    """One point's memory: a paged pool with several planes, contiguous copies for the baselines, one store."""

    def __init__(self, point: Point, baseline: bool = True) -> None:
        self.point = p = point
        torch.manual_seed(0)
        self.planes = p.planes
        pages = p.context // PAGE
        total = 1 + p.rows * pages
        shape = (self.planes, total, p.kv_heads, PAGE, p.head_dim)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        self.k_pool = torch.empty(shape, **options).normal_()
        self.v_pool = torch.empty(shape, **options).normal_()
        order = torch.randperm(total - 1, device="cuda").to(torch.int32) + 1
        self.table = torch.cat(
            [torch.zeros(1, pages, dtype=torch.int32, device="cuda"), order.view(p.rows, pages)]
        )
        self.q = torch.randn(self.planes, p.rows, p.heads, p.head_dim, **options)
        self.fresh = torch.randn(2, p.rows, p.kv_heads, p.head_dim, **options)
        self.row_seq = torch.arange(1, p.rows + 1, dtype=torch.int32, device="cuda")
        self.length = torch.full((p.rows,), p.context, dtype=torch.int32, device="cuda")
        self.zeros = torch.zeros(p.rows, dtype=torch.int32, device="cuda")
        self.retention = Retention.of(p.retention)
        capacity = -(-self.retention.count(p.context) // 64) * 64
        lead = (p.rows + 1, LAYERS)
        self.store = Store(
            row_slot=self.row_seq,
            index=torch.zeros(*lead, p.heads, capacity, dtype=torch.int32, device="cuda"),
            count=torch.zeros(lead, dtype=torch.int32, device="cuda"),
            mass=torch.zeros(*lead, p.heads, device="cuda"),
            o_ref=torch.zeros(*lead, p.heads, p.head_dim, **options),
            c_ref=torch.zeros(*lead, p.heads, p.head_dim, device="cuda"),
            site=0,
        )
        self.contiguous = [self.gathered(plane) for plane in range(self.planes)] if baseline else []
        self.out = torch.empty_like(self.q[0])

    def gathered(self, plane: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K, V of one plane as contiguous [rows, kv_heads, context, head_dim]."""
        p = self.point
        found = []
        for pool in (self.k_pool, self.v_pool):
            made = torch.empty(p.rows, p.kv_heads, p.context, p.head_dim, dtype=pool.dtype, device="cuda")
            for row in range(p.rows):
                pages = pool[plane, self.table[row + 1].long()]  # [pages, Hkv, PAGE, D]
                made[row] = pages.transpose(0, 1).reshape(p.kv_heads, p.context, p.head_dim)
            found.append(made)
        return found[0], found[1]

    def attention(self, plane: int) -> Attention:
        return Attention(
            q=self.q[plane], k_pool=self.k_pool, v_pool=self.v_pool, block_table=self.table, row_seq=self.row_seq,
            row_position=self.length - 1, row_length=self.length, row_loop=self.zeros, plane=plane, plane_stride=0,
            scale=self.point.head_dim**-0.5, k=self.fresh[0], v=self.fresh[1], query_rows=1,
        )  # fmt: skip

    def calls(self, op: str) -> list[Callable[[], Any]]:
        made: list[Callable[[], Any]] = []
        for site in range(LAYERS):  # one for each call, as each layer has one
            a, s = self.attention(site % self.planes), replace(self.store, site=site)
            if op == "dense":
                made.append(lambda a=a: triton_backend.dense(a, self.out))
            elif op == "capture":
                made.append(lambda a=a, s=s: triton_backend.capture(a, s, self.retention, self.out))
            else:
                made.append(lambda a=a, s=s: triton_backend.consume(a, s, self.out))
        return made

    def parts(self, op: str) -> list[Callable[[], Any]]:
        """Calls of one op, or of one half of a capture: attend, select."""
        if op == "consume":
            for capture in self.calls("capture"):
                capture()
        if op in ("dense", "consume"):
            return self.calls(op)
        return [self._part(op, self.attention(plane)) for plane in range(self.planes)]

    def _part(self, op: str, a: Attention) -> Callable[[], Any]:
        def attend() -> triton_backend.Scratch:
            mode = triton_backend.MODE_CAPTURE
            return triton_backend._attend(a, self.out, mode, self.store, self.retention)

        if op == "attend":
            return attend
        scratch = attend()
        return lambda: triton_backend._select(a, self.store, self.retention, scratch)

    def sdpa_calls(self, backend: Any) -> list[Callable[[], Any]]:
        from torch.nn.attention import sdpa_kernel

        def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
            with sdpa_kernel(backend):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])

        return [
            lambda q=self.q[plane][:, :, None], kv=kv: call(q, *kv)
            for plane, kv in enumerate(self.contiguous)
        ]

    def check(self) -> None:
        """The gate: one row of each op against float64; the retained sets against a sort. Raises on a difference."""
        p, a = self.point, self.attention(0)
        triton_backend.capture(a, self.store, self.retention, self.out)
        captured = self.out.clone()
        triton_backend.dense(a, self.out)
        assert torch.equal(captured, self.out), "capture's output is not the dense output"
        row = p.rows - 1
        k, v = (x[row].double() for x in self.gathered(0))
        k, v = (x.repeat_interleave(p.heads // p.kv_heads, 0) for x in (k, v))
        q = self.q[0, row].double()
        scores = torch.einsum("hd,hnd->hn", q, k) * a.scale
        probabilities = scores.softmax(-1)
        want = torch.einsum("hn,hnd->hd", probabilities, v)
        error = float((self.out[row].double() - want).norm() / want.norm())
        assert error < 1e-2, f"dense is off by {error:.2e}"
        count = self.retention.count(p.context)
        assert int(self.store.count[row + 1, 0]) == count
        kept = self.store.index[row + 1, 0, :, :count].long()
        assert bool((kept[:, 1:] > kept[:, :-1]).all()), "retained positions are not ascending"
        overlap = probabilities.gather(1, kept).sum(1) / probabilities.topk(count).values.sum(1)
        assert float(overlap.min()) > 1 - 1e-5, f"the retained set is not the best: {float(overlap.min())}"
        mass = probabilities.gather(1, kept).sum(1)
        assert float((self.store.mass[row + 1, 0] - mass).abs().max()) < 1e-4
        triton_backend.consume(a, self.store, self.out)
        # A consume in the capture's own plane gives the dense output back.
        error = float((self.out[row].double() - want).norm() / want.norm())
        assert error < 2e-2, f"consume is off by {error:.2e}"


def baselines(bench: Bench, flex: bool) -> Iterator[tuple[str, list[Callable[[], Any]]]]:
    """Names and calls of dense attention over contiguous K, V."""
    from torch.nn.attention import SDPBackend

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        yield f"sdpa-{backend.name.lower()}", bench.sdpa_calls(backend)
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        run = torch.compile(flex_attention, dynamic=False)
        grouped = bench.point.heads != bench.point.kv_heads
        queries = [q[:, :, None] for q in bench.q]
        yield (
            "flex-attention",
            [
                lambda q=q, kv=kv: run(q, *kv, enable_gqa=grouped)
                for q, kv in zip(queries, bench.contiguous, strict=True)
            ],
        )
    if find_spec("flashinfer") is not None:
        from flashinfer import single_decode_with_kv_cache

        yield (
            "flashinfer",
            [
                lambda q=q, kv=kv: [
                    single_decode_with_kv_cache(q[row], kv[0][row], kv[1][row], kv_layout="HND")
                    for row in range(bench.point.rows)
                ]
                for q, kv in zip(bench.q, bench.contiguous, strict=True)
            ],
        )


def best_baseline(bench: Bench, flex: bool) -> tuple[float, str]:
    """Microseconds and name of the fastest dense attention over contiguous K, V."""
    found: list[tuple[float, str]] = []
    for name, calls in baselines(bench, flex):
        try:
            found.append((graph_time(calls), name))
        except Exception as error:  # what does not serve this shape; the others do
            torch.cuda.synchronize()
            print(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:100]}", flush=True)
    return min(found)


def run_point(point: Point, flex: bool) -> dict[str, Any]:
    bench = Bench(point)
    bench.check()
    alone = graph_time(bench.calls("capture"))
    times = {
        "dense": graph_time(bench.calls("dense")),
        "capture": graph_time(bench.calls("capture"), around=partial(beside, bench.out.device)),
        "consume": graph_time(bench.calls("consume")),
    }
    best, name = best_baseline(bench, flex)
    total = times["dense"] + times["capture"] + (point.loops - 2) * times["consume"]
    row = {
        "rows": point.rows, "context": point.context, "heads": point.heads, "kv_heads": point.kv_heads,
        "head_dim": point.head_dim, "retention": float(point.retention), "loops": point.loops,
        "dense_us": round(times["dense"], 2), "dense_gbps": round(point.kv_bytes / times["dense"] / 1e3, 1),
        "capture_us": round(times["capture"], 2), "capture_alone_us": round(alone, 2),
        "consume_us": round(times["consume"], 2),
        "loops_ratio": round(total / (point.loops * best), 4),
        "best_dense_us": round(best, 2), "best_dense_name": name,
    }  # fmt: skip
    print(
        f"{point.rows:4d} x {point.context:6d}  dense {times['dense']:9.1f} us {row['dense_gbps']:7.0f} GB/s  "
        f"best {best:9.1f} ({name})  dense/best {times['dense'] / best:5.3f}  "
        f"capture/dense {times['capture'] / times['dense']:5.3f} (alone {alone / times['dense']:5.3f})  "
        f"consume/dense {times['consume'] / times['dense']:6.4f}  "
        f"loops_ratio {row['loops_ratio']:.3f}",
        flush=True,
    )
    del bench
    gc.collect()
    torch.cuda.empty_cache()
    return row


def fits(point: Point) -> bool:
    free = torch.cuda.mem_get_info()[0]
    scores = 4 * point.rows * point.heads * point.context
    return 2.1 * point.planes * point.kv_bytes + 2 * scores + (2 << 30) < free


def tune(points: list[Point]) -> None:
    """Print the time of each kernel for many tile sizes; nothing is chosen automatically."""
    benches = [Bench(point, baseline=False) for point in points]
    sweeps = {
        "dense": [
            Tiles(block=block, stages=stages, min_unit=least, max_units=units)
            for (block, stages), (least, units) in itertools.product(
                ((64, 2), (64, 3), (64, 4), (32, 3), (32, 4)), ((256, 16), (512, 16), (512, 32))
            )
        ],
        "consume": [
            Tiles(kept_block=block, kept_stages=stages, min_kept=least, max_kept=units)
            for (block, stages), (least, units) in itertools.product(
                ((32, 2), (64, 1), (64, 2), (64, 5), (128, 1), (128, 2)),
                ((128, 16), (256, 16), (512, 16), (1024, 8)),
            )
        ],
        "attend": [Tiles(stages=2), Tiles(stages=3), Tiles(block=32, stages=3)],
        "select": [
            *(Tiles(thread_scores=scores) for scores in (16, 32, 64)),
            *(Tiles(short=keys) for keys in (2048, 4096, 16384)),
            *(Tiles(sample=sample) for sample in (256, 1024)),
            *(
                Tiles(narrow_warps=warps, narrow_piece=piece, listed=listed)
                for warps, piece, listed in itertools.product((4, 8), (1024, 2048), (128, 256))
            ),
            *(
                Tiles(guesses=guesses, piece=piece, thread_keys=keys, gather_bytes=gathered)
                for guesses, piece, keys, gathered in itertools.product(
                    (0, 3), (512, 1024), (4, 8, 16), (64, 128)
                )
            ),
        ],
    }
    print("points:", *[f"{p.rows}x{p.context}" for p in points])
    for op, candidates in sweeps.items():
        print(f"--- {op}", flush=True)
        for tiles in candidates:
            triton_backend.tiles_for = lambda attention, tiles=tiles: tiles
            try:
                times = [graph_time(bench.parts(op)) for bench in benches]
            except Exception as error:  # a size that does not fit the GPU
                print(tiles, "failed:", str(error).splitlines()[0][:80])
                continue
            print("  ".join(f"{time:8.2f}" for time in times), tiles, flush=True)
    triton_backend.tiles_for = tiles_for


def parse_point(text: str) -> Point:
    """ROWSxCONTEXT[:SHAPE[:RETENTION[:LOOPS]]]. Raises ValueError."""
    size, *more = text.split(":")
    shape, retention, loops = [*more, *("mha", "0.1", "4")[len(more) :]]
    if shape not in SHAPES:
        raise ValueError(f"{text}: the shape {shape!r} must be one of {', '.join(SHAPES)}")
    rows, context = (int(x) for x in size.split("x"))
    return Point(rows, context, *SHAPES[shape], retention, int(loops))


def shape_of(row: dict[str, Any]) -> str:
    found = tuple(row[name] for name in ("heads", "kv_heads", "head_dim"))
    return next((name for name, shape in SHAPES.items() if shape == found), "x".join(map(str, found)))


def table(rows: list[dict[str, Any]]) -> Any:
    """The result for people, as a rich table."""
    from rich.table import Table

    made = Table(
        "rows x context",
        "shape",
        "r",
        "loops",
        "dense us",
        "GB/s",
        "of the best",
        "capture",
        "consume",
        "loops ratio",
    )
    for row in rows:
        dense = row["dense_us"]
        made.add_row(
            f"{row['rows']} x {row['context']:,}", shape_of(row), f"{row['retention']:g}", str(row["loops"]),
            f"{dense:,.1f}", f"{row['dense_gbps']:,.0f}", f"{dense / row['best_dense_us']:.3f}",
            f"{row['capture_us'] / dense:.3f}", f"{row['consume_us'] / dense:.3f}", f"{row['loops_ratio']:.3f}",
        )  # fmt: skip
    return made


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """loops_ratio over context, a line for each number of rows, marked where sparse begins to pay."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 4.5))
    usual = [row for row in rows if (shape_of(row), row["retention"], row["loops"]) == ("mha", 0.1, 4)]
    for count in sorted({row["rows"] for row in usual}):
        line = sorted((row["context"], row["loops_ratio"]) for row in usual if row["rows"] == count)
        drawn = axes.plot(*zip(*line, strict=True), marker="o", label=f"{count} rows")[0]
        paying = next((point for point in line if point[1] < 1), None)
        if paying:
            axes.annotate(
                f"{paying[0]:,}", paying, color=drawn.get_color(), xytext=(0, 6), textcoords="offset points"
            )
    axes.axhline(1, color="grey", linestyle="--", linewidth=1)
    axes.set(xlabel="context", ylabel="four loops, over four dense ones by the best baseline")
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def show(rows: list[dict[str, Any]], picture: Path | None) -> None:
    from rich.console import Console

    Console(width=120).print(table(rows))
    if picture is not None:
        plot(rows, picture)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", default=",".join(POINTS))
    parser.add_argument("--flex", action="store_true", help="FlexAttention among the baselines")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="a picture of the result")
    parser.add_argument("--plot-of", type=Path, metavar="JSON", help="a result to show; nothing is timed")
    options = parser.parse_args(arguments)
    if options.plot or options.plot_of:
        need_plots(parser)
    try:
        options.points = [parse_point(text) for text in options.points.split(",")]
    except ValueError as error:
        parser.error(f"--points: {error}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.plot_of:
        show(
            json.loads(options.plot_of.read_text())["rows"],
            options.plot or options.plot_of.with_suffix(".png"),
        )
        return
    need_gpu("--plot-of shows a result that is there")
    report = conditions()
    print(json.dumps(report), flush=True)
    if options.tune:
        tune(options.points)
        return
    report["rows"] = []
    for point in options.points:
        if not fits(point):
            print(f"{point.rows} x {point.context}: does not fit into memory, left out")
            continue
        report["rows"].append(run_point(point, options.flex))
        if options.out:  # after every point, so that an interrupted run leaves what it measured
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    show(report["rows"], options.plot)


if __name__ == "__main__":
    main()
