"""The reference against formulas that share no code with it: torch's own attention and textbook sums, in
float64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import SITE, Case, Shape, build, call, live_rows, next_loop, shapes
from kernel_oracle import (
    kept_keys,
    naive_consume,
    naive_dense,
    naive_gate,
    naive_probabilities,
    row_operands,
)

from sparse_compile.kernels import compute_dtype, reference

quick = settings(max_examples=15, deadline=None)
EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


def torch_attention(case: Case) -> torch.Tensor:
    """scaled_dot_product_attention over each row's visible keys."""
    out = torch.zeros_like(case.q)
    for row in live_rows(case):
        q, k, v, first = row_operands(case, row)
        k, v = k[first:].transpose(0, 1), v[first:].transpose(0, 1)
        attended = torch.nn.functional.scaled_dot_product_attention(q[:, None], k, v, scale=case.scale)
        out[row] = attended[:, 0]
    return naive_gate(case, out)


@quick
@given(shapes(softcap=0.0))
def test_dense_is_torch_attention(shape: Shape) -> None:
    case = build(shape)
    torch.testing.assert_close(call(case.copy(), "dense", "reference"), torch_attention(case), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_gate_is_applied_before_the_one_rounding(dtype: torch.dtype) -> None:
    """What comes out is sigmoid(gate) times what attention computes in the compute dtype."""
    case = build(Shape(((25, 2), (9, 1)), dtype=dtype, gated=True, padding=1))
    call(case, "capture", "reference")
    later = next_loop(case)
    wide = compute_dtype(dtype)
    for op in ("dense", "consume"):
        got = call(later.copy(), op, "reference")
        mine = later.copy()
        call(mine, "kv_write")
        plain, store = torch.empty(later.q.shape, dtype=wide), () if op == "dense" else (mine.store_view,)
        getattr(reference, op)(mine.ungated.attention, *store, plain)
        assert torch.equal(got, naive_sigmoid(later, plain).to(dtype)), op


def naive_sigmoid(case: Case, plain: torch.Tensor) -> torch.Tensor:
    assert case.gate is not None
    gated = plain.clone()
    gated[live_rows(case)] *= torch.sigmoid(case.gate.to(plain.dtype))[live_rows(case)]
    return gated


@pytest.mark.parametrize("window", [1, 3, 8, 100])
@pytest.mark.parametrize("prefix", [False, True])
def test_window_is_the_last_keys_including_the_own(window: int, prefix: bool) -> None:
    case = build(Shape(((2, 2), (7, 1), (21, 6)), window=window, prefix=prefix, padding=1))
    torch.testing.assert_close(call(case.copy(), "dense", "reference"), torch_attention(case), **EXACT)


@pytest.mark.parametrize("softcap", [0.5, 30.0])
def test_soft_cap(softcap: float) -> None:
    case = build(Shape(((17, 3), (4, 1)), softcap=softcap))
    torch.testing.assert_close(call(case.copy(), "dense", "reference"), naive_dense(case), **EXACT)


@quick
@given(shapes())
def test_capture_keeps_the_largest_probabilities(shape: Shape) -> None:
    case = build(shape)
    ungated = call(case.ungated.copy(), "dense", "reference")
    out = call(case, "capture", "reference")
    for row in live_rows(case):
        p, (_, _, v, _) = naive_probabilities(case, row), row_operands(case, row)
        slot, length = int(case.store["row_slot"][row]), p.shape[0]
        count = math.ceil(length * case.retention.numerator / case.retention.denominator - 1e-9)
        count = max(count, min(length, shape.keep_first + shape.keep_last))
        wanted = p.clone()
        wanted[: shape.keep_first] = torch.inf
        wanted[max(0, length - shape.keep_last) :] = torch.inf
        assert int(case.store["count"][slot, SITE]) == count
        for head in range(p.shape[1]):
            kept = kept_keys(case, row, head)
            assert kept.tolist() == sorted(wanted[:, head].topk(count).indices.tolist())
            mass = p[kept, head].sum()
            c_ref = (p[kept, head] @ v[kept, head]) / mass
            torch.testing.assert_close(case.store["mass"][slot, SITE, head], mass, **EXACT)
            torch.testing.assert_close(case.store["c_ref"][slot, SITE, head], c_ref, **EXACT)
        assert torch.equal(case.store["o_ref"][slot, SITE], ungated[row])
    torch.testing.assert_close(out, naive_dense(case), **EXACT)


@quick
@given(shapes())
def test_consume_corrects_the_captured_output(shape: Shape) -> None:
    case = build(shape)
    call(case, "capture", "reference")
    later = next_loop(case)
    torch.testing.assert_close(call(later.copy(), "consume", "reference"), naive_consume(later), **EXACT)


def test_full_retention_consume_is_dense() -> None:
    case = build(Shape(((19, 2), (3, 1)), retention="1.0"))
    call(case, "capture", "reference")
    later = next_loop(case)
    torch.testing.assert_close(call(later, "consume", "reference"), naive_dense(later), **EXACT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_arithmetic_runs_in_the_dtype_that_is_asked_for(dtype: torch.dtype) -> None:
    case = build(Shape(((25, 2), (9, 1)), dtype=dtype))
    call(case, "capture", "reference")
    later = next_loop(case)
    call(later, "dense", "reference")  # puts the new keys and values into the pool
    default, wide = torch.empty_like(later.q), torch.empty(later.q.shape, dtype=torch.float64)
    reference.consume(later.attention, later.store_view, default)
    reference.consume(later.attention, later.store_view, wide, dtype=torch.float64)
    torch.testing.assert_close(wide, naive_consume(later.to(torch.float64)), **EXACT)
    in_default = torch.empty_like(default)
    reference.consume(later.attention, later.store_view, in_default, dtype=compute_dtype(dtype))
    assert torch.equal(default, in_default)
    assert not torch.equal(default.double(), wide) or dtype == torch.float64


def test_selection_is_by_score_where_probabilities_underflow() -> None:
    """Two keys whose probabilities are both zero in float32 still have an order."""
    case = build(Shape(((4, 1),), heads=(1, 1), page_size=4, dtype=torch.float32, retention="0.75"))
    page = int(case.plan["block_table"][1, 0])
    case.scale = 1.0
    case.q.zero_()[..., 0] = 1.0
    case.pool["k_pool"][1, page, 0] = 0
    case.pool["k_pool"][1, page, 0, :3, 0] = torch.tensor([-300.0, -200.0, -250.0])
    case.k.zero_()
    for implementation in ("reference", "batched"):
        mine = case.copy()
        call(mine, "capture", implementation)
        assert kept_keys(mine, 0, 0).tolist() == [1, 2, 3]


def test_inactive_rows_are_zero_and_leave_the_others_alone() -> None:
    case = build(Shape(((5, 2), (11, 1)), padding=3))
    without = case.select(live_rows(case))
    got = call(case.copy(), "dense", "reference")
    assert torch.equal(got[live_rows(case)], call(without.copy(), "dense", "reference"))
    off = torch.ones(case.rows, dtype=torch.bool)
    off[live_rows(case)] = False
    assert not got[off].any()


def test_mixed_mode_zero_is_inactive_whatever_its_length() -> None:
    case = build(Shape(((5, 2), (11, 1))))
    case = replace(case, row_mode=torch.zeros_like(case.row_mode))
    before = case.store["count"].clone()
    assert not call(case, "mixed", "reference").any()
    assert torch.equal(before, case.store["count"])
