"""Products of a few rows as Inductor itself would choose them, beside the library and our kernel: a part of `products`.

    python -m benchmarks.products --no-products --no-chain --inductor --rows 4,32,1,8 --out X.json

Inductor: a product with its activation, for one number of rows, compiled with max-autotune, which times the library's
products and templates of its own. The library runs the same lines one by one. Ours is the kernel with the tiles that
the runtime has where nothing is measured.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sparse_compile.kernels.skinny_bench import plain, tuned

if TYPE_CHECKING:
    from benchmarks.products import Bench

COLUMNS = ("cublas_us", "inductor_us", "ours_us")
Ours = Callable[[Tensor, list[Tensor], bool], float | None]
"""Microseconds of our kernel for x [M, K] over weights; None where it cannot run."""
Wrong = Callable[[Tensor, Tensor, Tensor, bool], str]
"""Why a result is wrong for x, weight and gated; "" where it is not."""


def time_inductor(
    bench: Bench, ours: Ours, wrong: Wrong, floor: Callable[[int], float], seconds: float
) -> list[dict[str, Any]]:
    """A row for each number of rows, in the order of `bench.rows`, and each product; nothing new is compiled after
    `seconds`. floor: microseconds to read so many bytes.
    """
    until, found = time.monotonic() + seconds, []
    weights = {
        name: bench.weights(lines, depth) for name, (lines, depth, _) in bench.model.products().items()
    }
    print(f"\n{'product':8} rows  floor   cublas  inductor     ours  compiled in", flush=True)
    for rows in bench.rows:
        for name, (lines, depth, gated) in bench.model.products().items():
            if time.monotonic() > until:
                print(f"{name:8} {rows:4}  out of time", flush=True)
                continue
            x, own = bench.values(rows, depth), weights[name]
            row = {
                "product": name, "rows": rows, "floor_us": floor(2 * lines * depth),
                "cublas_us": time_plain(bench, plain, x, own, gated),
                **inductor_row(bench, wrong, x, own, gated), "ours_us": ours(x, own, gated),
            }  # fmt: skip
            found.append(row)
            print(line(row), flush=True)
    return found


def time_plain(
    bench: Bench, run: Callable[..., Tensor], x: Tensor, weights: list[Tensor], gated: bool
) -> float:
    return bench.time([functools.partial(run, x, weight, gated) for weight in weights])


def inductor_row(bench: Bench, wrong: Wrong, x: Tensor, weights: list[Tensor], gated: bool) -> dict[str, Any]:
    """Time of Inductor's choice, and seconds to make it; or None and why there is none."""
    start = time.monotonic()
    try:
        run = tuned(plain, x, weights[0], gated)
        compiled = time.monotonic() - start
        error = wrong(run(x, weights[0], gated), x, weights[0], gated)
        us = None if error else time_plain(bench, run, x, weights, gated)
    except Exception as reason:  # whatever a compiler may raise: the other figures stand without it
        compiled, us = time.monotonic() - start, None
        error = f"{type(reason).__name__}: {reason}".strip().splitlines()[0][:200]
    return {"inductor_us": us, "compile_s": compiled} | ({"inductor_error": error} if error else {})


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    times = (f"{'-' if row[name] is None else format(row[name], '.2f'):>8}" for name in COLUMNS)
    text = f"{row['product']:8} {row['rows']:4} {row['floor_us']:6.2f} {'  '.join(times)}  {row['compile_s']:6.1f} s"
    return f"{text}  {row['inductor_error']}" if "inductor_error" in row else text
