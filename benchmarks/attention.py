"""Time the attention ops against the best dense baseline of the same run.

    python -m benchmarks.attention --out benchmarks/results/attention-h200.json     every point that fits
    python -m benchmarks.attention --points 32x8192,2x32768                         some of them
    python -m benchmarks.attention --tune                                           tile sizes at a few points

Each point is rows x context. A correctness gate (against float64 on one row) runs before a point is timed. loops_ratio
is (loop 0 dense + capture + later consumes) over (loops x best dense baseline).
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import conditions, graph_time
from sparse_compile.kernels import ops, triton_backend  # noqa: F401
from sparse_compile.kernels.arguments import Attention, Store
from sparse_compile.kernels.retention import Retention
from sparse_compile.kernels.triton_tuning import Tiles, tiles_for

ROWS = (1, 2, 4, 8, 32, 128)
CONTEXTS = (512, 2048, 8192, 32768, 65536)
SHAPES = {"mha": (16, 16, 128), "dory": (16, 4, 256), "huginn": (55, 55, 96)}
ROTATE_BYTES = 256 << 20  # several times the L2 cache
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
        return max(1, min(24, -(-ROTATE_BYTES // self.kv_bytes)))


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
        lead = (p.rows + 1, 1)
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
        for plane in range(self.planes):
            a = self.attention(plane)
            if op == "dense":
                made.append(lambda a=a: triton_backend.dense(a, self.out))
            elif op == "capture":
                made.append(lambda a=a: triton_backend.capture(a, self.store, self.retention, self.out))
            else:
                made.append(lambda a=a: triton_backend.consume(a, self.store, self.out))
        return made

    def parts(self, op: str) -> list[Callable[[], Any]]:
        """Calls of one op, or of one of the three kernels of a capture: attend, cut, retain."""
        if op == "consume":
            triton_backend.capture(self.attention(0), self.store, self.retention, self.out)
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
        triton_backend._cut(a, self.retention, scratch)
        if op == "cut":
            return lambda: triton_backend._cut(a, self.retention, scratch)
        return lambda: triton_backend._retain(a, self.store, self.retention, scratch)

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


def best_baseline(bench: Bench) -> tuple[float, str]:
    """Microseconds and name of the fastest dense attention over contiguous K, V."""
    from torch.nn.attention import SDPBackend

    found: list[tuple[float, str]] = []
    backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
    for backend in backends:
        try:
            found.append((graph_time(bench.sdpa_calls(backend)), f"sdpa-{backend.name.lower()}"))
        except RuntimeError:
            torch.cuda.synchronize()
            continue
    return min(found)


def run_point(point: Point) -> dict[str, Any]:
    bench = Bench(point)
    bench.check()
    times = {op: graph_time(bench.calls(op)) for op in ("dense", "capture", "consume")}
    best, name = best_baseline(bench)
    total = times["dense"] + times["capture"] + (point.loops - 2) * times["consume"]
    row = {
        "rows": point.rows, "context": point.context, "heads": point.heads, "kv_heads": point.kv_heads,
        "head_dim": point.head_dim, "retention": float(point.retention), "loops": point.loops,
        "dense_us": round(times["dense"], 2), "dense_gbps": round(point.kv_bytes / times["dense"] / 1e3, 1),
        "capture_us": round(times["capture"], 2), "consume_us": round(times["consume"], 2),
        "loops_ratio": round(total / (point.loops * best), 4),
        "best_dense_us": round(best, 2), "best_dense_name": name,
    }  # fmt: skip
    print(
        f"{point.rows:4d} x {point.context:6d}  dense {times['dense']:9.1f} us {row['dense_gbps']:7.0f} GB/s  "
        f"best {best:9.1f} ({name})  dense/best {times['dense'] / best:5.3f}  "
        f"capture/dense {times['capture'] / times['dense']:5.3f}  "
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
        "cut": [Tiles(thread_scores=scores) for scores in (16, 32, 64)],
        "retain": [
            Tiles(guesses=guesses, thread_keys=keys, gather_block=block)
            for guesses, keys, block in itertools.product((0, 3), (4, 8, 16), (8, 16))
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


def parse_points(text: str, shape: str) -> list[Point]:
    heads, kv_heads, head_dim = SHAPES[shape]
    pairs = [tuple(int(x) for x in item.split("x")) for item in text.split(",")]
    return [Point(rows, context, heads, kv_heads, head_dim) for rows, context in pairs]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", default=",".join(f"{r}x{c}" for r in ROWS for c in CONTEXTS))
    parser.add_argument("--shape", choices=SHAPES, default="mha")
    parser.add_argument("--retention", default="0.1")
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    points = [
        replace(point, retention=options.retention, loops=options.loops)
        for point in parse_points(options.points, options.shape)
    ]
    report = conditions()
    print(json.dumps(report), flush=True)
    if options.tune:
        tune(points)
        return
    report["rows"] = []
    for point in points:
        if not fits(point):
            print(f"{point.rows} x {point.context}: does not fit into memory, left out")
            continue
        report["rows"].append(run_point(point))
        if options.out:  # after every point, so that an interrupted run leaves what it measured
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
