"""Kernels that read what describes their rows before the one ahead has finished: the same bits, and no sooner than may
be.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import DEVICES, Case, Shape, arguments, bits, build, call, next_loop

pytest.importorskip("triton")
from sparse_compile.kernels.settled import rows_are_settled, settled_rows
from sparse_compile.kernels.triton_tuning import Tiles

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton was imported without TRITON_INTERPRET=1", allow_module_level=True)
from sparse_compile.kernels import triton_backend

SMALL = Tiles(
    block=16, kept_block=32, min_unit=16, max_units=4, min_kept=32, max_kept=2, gather_block=4,
    piece=32, short=128, small_scores=64, sample=32, gather_bytes=16,
)  # fmt: skip
SHAPES = {
    "ragged": Shape(((1, 1), (13, 1), (30, 1), (70, 1)), heads=(2, 2), padding=1, dtype=torch.bfloat16),
    "grouped, gated": Shape(((1, 1), (65, 1)), (6, 2), 12, page_size=3, gated=True, dtype=torch.float32),
    "window": Shape(((3, 1), (70, 1)), heads=(4, 2), window=20, dtype=torch.float32),
    "blocks": Shape(((40, 4), (21, 4)), heads=(2, 1), dtype=torch.bfloat16, padding=1),
    "long": Shape(((150, 1), (140, 1)), heads=(2, 2), dtype=torch.float32),
}


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "tiles_for", lambda attention: SMALL)


@pytest.fixture
def ready(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """READY and ASKED of every launch of the attention kernel."""
    found, kernel = [], triton_backend.attention_kernel

    class Watched:
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **kwargs: Any) -> Any:
                found.append((kwargs["READY"], kwargs["ASKED"]))
                return kernel[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(triton_backend, "attention_kernel", Watched())
    return found


MODES = (3, 1, 2, 3)


def run(case: Case, op: str, fused: bool) -> torch.Tensor:
    """fused: no row reads what another one writes, so the kernel of attention writes keys too."""
    args, kwargs = arguments(case, op, "triton")
    return getattr(torch.ops.sparse_compile, op)(*args, **kwargs, **({"query_rows": 1} if fused else {}))


def mixed(case: Case) -> Case:
    """With rows of every mode but inactive ones."""
    modes = torch.tensor([MODES[row % 4] for row in range(case.rows)], dtype=torch.int32)
    return replace(case, row_mode=modes.to(case.q.device))


def all_ops(case: Case, fused: bool) -> list[torch.Tensor]:
    """Outputs and stores of each op in turn, a loop later from the first consume on."""
    made = [run(case.copy(), "dense", fused)]
    captured = case.copy()
    made.append(run(captured, "capture", fused))
    if not case.shape.window:
        later = next_loop(captured)
        made += [run(later, "consume", fused) for _ in range(2)]
        made += [run(both := mixed(later), "mixed", fused), *both.store.values(), *captured.store.values()]
    return [x for one in made for x in bits({"": one}).values()]


@pytest.mark.usefixtures("small_units")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_promise_changes_no_bits(device: str, shape: Shape) -> None:
    case = build(replace(shape, device=device))
    fused = all(rows == 1 for _, rows in shape.sequences)
    plain = all_ops(case, fused)
    with settled_rows():
        early = all_ops(case, fused)
    assert len(plain) == len(early)
    assert all(torch.equal(one, other) for one, other in zip(plain, early, strict=True))


@pytest.mark.usefixtures("small_units")
def test_what_is_read_early_depends_on_promises_and_on_the_op_before(ready: list[tuple[int, int]]) -> None:
    case = build(Shape(((33, 1), (9, 1)), heads=(2, 2), dtype=torch.float32))
    later = next_loop(captured := case.copy())
    for promise in (nullcontext(), settled_rows()):
        with promise:
            call(captured, "capture", "triton")
            later.store.update(captured.store)
            for op in ("consume", "consume", "dense", "consume", "capture", "mixed", "mixed"):
                call(later, op, "triton")
        assert not rows_are_settled()
    without, with_it = ready[:8], ready[8:]
    assert without == [(0, 0)] * 8
    # A consume right behind a selection waits for it before it reads what was selected.
    assert with_it == [(2, 1), (1, 0), (2, 1), (2, 1), (2, 1), (2, 1), (1, 0), (1, 0)]


@pytest.mark.gpu
@pytest.mark.parametrize("context", [300, 3000, 12000])
def test_ops_right_behind_each_other_in_a_graph(context: int) -> None:
    """Each reads what the one ahead has just written: keys, references, lists."""
    sequences = ((context, 1), (context // 2, 1), (17, 1))
    shape = Shape(sequences, heads=(4, 4), head_dim=128, dtype=torch.bfloat16, device="cuda", gated=True)
    case = mixed(build(shape))
    plain, early = case.copy(), case.copy()

    def chain(mine: Case) -> list[torch.Tensor]:
        outs = []
        for op in ("dense", "capture", "consume", "consume", "mixed", "consume", "capture", "mixed", "mixed"):
            outs.append(run(mine, op, fused=True))
            mine.q = mine.q + outs[-1] / 8  # a kernel between, and other queries
            outs.append(run(mine, op, fused=True))  # none between
        return outs

    graphs = []
    for mine, promise in ((plain, nullcontext()), (early, settled_rows())):
        start = mine.q
        with promise:
            chain(mine)
            mine.q = start
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                outs = chain(mine)
        graphs.append((graph, outs))
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(30):
        for name in case.fresh:
            x = getattr(case, name)
            x.copy_(torch.randn(x.shape, generator=generator, device="cuda"))
        for graph, _ in graphs:
            graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(graphs[0][1], graphs[1][1], strict=True):
            assert torch.equal(one, other)
