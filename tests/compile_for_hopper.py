"""Compiles the Triton kernels for a GPU of generation 9 on a machine without one; run by tests/test_compiles.py.

The interpreter accepts what the compiler does not, such as values of two shapes in the branches of one test. Here each
call launches what it would launch on a GPU, with the arguments that follow from the call; kernels are compiled and not
run. Prints a JSON object: name of a call -> what failed, "" where nothing did.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from kernel_cases import Case, Shape, arguments, build
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from sparse_compile.kernels import dispatch, ops, skinny_backend  # noqa: F401
from sparse_compile.kernels.skinny import Norm, Rotary
from sparse_compile.kernels.skinny_choice import AHEAD
from sparse_compile.kernels.skinny_tuning import Product, default_tiles

HOPPER = GPUTarget("cuda", 90, 32)
ON_GPU = {"ASSEMBLY": True, "PDL": True, "UPCAST": False}
compiled: set[tuple[Any, ...]] = set()
assembly: list[tuple[str, str]] = []  # names of kernels, and what they became
_run = JITFunction.run


def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    """Compiles a launch as it would be on a GPU, unless one with the same constants and dtypes was."""
    options |= {name: value for name, value in ON_GPU.items() if name in options}
    if options.get("PRECISION") == "upcast":
        options["PRECISION"] = "tf32"
    dtypes = tuple(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
    key = (kernel.fn, dtypes, *((name, str(value)) for name, value in sorted(options.items())))
    if key not in compiled:
        compiled.add(key)
        made = _run(kernel, *args, grid=grid, warmup=True, launch_pdl=True, **options)
        assembly.append((kernel.fn.__name__, made.asm["ptx"]))


def pretend() -> None:
    """A GPU that kernels can be compiled for."""
    driver.set_active(
        SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: HOPPER,
        )
    )
    JITFunction.run = run
    dispatch.triton_obstacle = lambda *_: ""


def attend(case: Case, op: str, query_rows: int = 1, **more: Any) -> None:
    args, kwargs = arguments(case, op, "triton")
    getattr(torch.ops.sparse_compile, op)(*args, **kwargs, query_rows=query_rows, **more)


def referring(shape: Shape) -> Case:
    """A case whose slots hold references."""
    case = build(shape)
    case.store["count"].fill_(8)
    case.store["index"].copy_(torch.arange(case.store["index"].shape[-1]))
    return case


def product(
    rows: int, width: int, depth: int, *, gated: bool = False, norm: bool = False, weighted: bool = False,
    sums: bool = False, splits: int = 1, dtype: torch.dtype = torch.bfloat16, rotary: Rotary | None = None,
) -> None:  # fmt: skip
    """norm: done in the product, and in a kernel ahead. sums: with a bias and a residual."""
    tiles = default_tiles(Product(rows, width, depth, gated, gain=weighted))
    tiles = replace(tiles, pdl=True, ahead=AHEAD, splits=splits)
    x, weight = (torch.zeros(n, depth, dtype=dtype) for n in (rows, width * (2 if gated else 1)))
    made = Norm(1e-6, x[0] if weighted else None) if norm else None
    bias, residual = (weight[:, 0], x[:, :width]) if sums else (None, None)
    for apart in (False, True) if norm else (False,):
        mine = replace(tiles, apart=apart)
        skinny_backend.launch(x, weight, bias, residual, gated, mine, rotary, made)


def calls() -> dict[str, Callable[[], None]]:
    """Everything that is compiled."""
    wide: dict[str, Any] = {"heads": (4, 2), "head_dim": 128, "dtype": torch.bfloat16}
    plain = referring(Shape(((40, 1), (300, 1)), **wide))
    gated = referring(Shape(((40, 1), (300, 1)), **wide, gated=True, softcap=5.0))
    window = build(Shape(((40, 1), (300, 1)), **wide, window=50))
    blocks = build(Shape(((40, 4), (300, 4)), **wide))
    long = build(Shape(((9000, 1),), heads=(2, 2), head_dim=64, dtype=torch.float16))
    turn = Rotary(torch.zeros(4, 64), torch.zeros(4, 64), 128)
    made: dict[str, Callable[[], None]] = {
        "window": partial(attend, window, "dense"),
        "blocks": partial(attend, blocks, "dense", query_rows=4),
        "rows that read others": partial(attend, blocks, "dense", query_rows=0),
        "long": partial(attend, long, "capture"),
        "long mixed": partial(attend, long, "mixed"),
        "linear": partial(product, 4, 256, 1024),
        "activation": partial(product, 4, 256, 1024, gated=True, norm=True),
        "heads": partial(product, 4, 256, 1024, rotary=turn),
        "many rows": partial(product, 64, 256, 1024, norm=True),
        "the weight of a norm": partial(product, 4, 256, 1024, norm=True, weighted=True),
        "columns parted": partial(product, 4, 256, 1024, norm=True, splits=2),
        "bias and residual, uneven": partial(product, 4, 250, 1000, sums=True, dtype=torch.float16),
    }
    for op in ("dense", "capture", "consume", "mixed"):
        made |= {op: partial(attend, plain, op), f"{op}, gated": partial(attend, gated, op)}
    made["mixed without captures"] = partial(attend, gated, "mixed", captures=False)
    return made


def main() -> None:
    pretend()
    failed = {}
    for name, call in calls().items():
        try:
            call()
            failed[name] = ""
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error)[-600:]}"
    attention = [ptx for name, ptx in assembly if name == "attention_kernel"]
    made = {
        "kernels": len(compiled),
        "asking": sum("prefetch.global.L2" in ptx for _, ptx in assembly),
        "attention": len(attention),
        "copying": sum("cp.async.cg.shared.global" in ptx for ptx in attention),
    }
    json.dump({"triton": triton.__version__, **made, "failed": failed}, sys.stdout)


if __name__ == "__main__":
    main()
