"""Laws of the ops that hold for every implementation: what may change around a row without touching it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import (
    BOTH,
    DUMMY_PAGE,
    DUMMY_SLOT,
    SITE,
    Shape,
    bits,
    build,
    call,
    live_rows,
    next_loop,
    plane_of,
    shapes,
)

quick = settings(max_examples=20, deadline=None)
ROUNDING: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}


@pytest.mark.parametrize("implementation", BOTH)
@quick
@given(shape=shapes())
def test_mixed_is_the_single_op_of_each_row(implementation: str, shape: Shape) -> None:
    case = build(shape)
    call(case, "capture", implementation)  # so that any row can consume
    later = next_loop(case)
    modes = torch.randint(0, 4, (case.rows,), generator=torch.Generator().manual_seed(shape.seed)).int()
    later.row_mode = torch.where(later.plan["row_length"] > 0, modes, 0).int()
    singles = {mode: later.copy() for mode in (1, 2, 3)}
    by_mode = {
        mode: call(singles[mode], op, implementation)
        for mode, op in enumerate(("dense", "capture", "consume"), 1)
    }
    ungated = call(later.ungated.copy(), "dense", implementation)
    mixed = later.copy()
    got = call(mixed, "mixed", implementation)
    for row, mode in enumerate(later.row_mode.tolist()):
        expected = by_mode[mode][row] if mode else torch.zeros_like(got[row])
        torch.testing.assert_close(got[row], expected, **ROUNDING)
        source = singles[2] if mode == 2 else later
        slot = int(later.store["row_slot"][row])
        for name in ("index", "count", "mass", "o_ref", "c_ref"):
            ours, theirs = mixed.store[name][slot], source.store[name][slot]
            torch.testing.assert_close(ours, theirs, equal_nan=True, **ROUNDING)
        if mode == 2:
            torch.testing.assert_close(mixed.store["o_ref"][slot, SITE], ungated[row], **ROUNDING)
            if case.gate is None:
                assert torch.equal(got[row], mixed.store["o_ref"][slot, SITE])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("implementation", BOTH)
def test_capture_stores_what_dense_returns_without_a_gate_and_returns_what_it_returns_with_one(
    dtype: torch.dtype, implementation: str, gated: bool
) -> None:
    sequences = ((31, 5), (31, 1), (6, 1), (2, 2))
    case = build(Shape(sequences, dtype=dtype, padding=1, heads=(8, 1), head_dim=80, gated=gated))
    mine = case.copy()
    out = call(mine, "capture", implementation)
    assert torch.equal(out, call(case.copy(), "dense", implementation))
    rows = live_rows(case)
    ungated = call(case.ungated.copy(), "dense", implementation)
    assert torch.equal(ungated[rows], mine.store["o_ref"][mine.store["row_slot"][rows].long(), SITE])
    assert torch.equal(out, ungated) != gated


@quick
@given(shape=shapes(gated=True))
def test_a_gate_changes_nothing_that_is_stored(shape: Shape) -> None:
    for implementation in BOTH:
        with_gate, without = (build(shape) for _ in range(2))
        call(with_gate, "capture", implementation)
        call(without.ungated, "capture", implementation)
        for name, value in bits(with_gate.store | with_gate.pool).items():
            assert torch.equal(value, bits(without.store | without.pool)[name]), name


@quick
@given(shape=shapes())
def test_a_row_alone_equals_the_row_in_a_batch(shape: Shape) -> None:
    case = build(shape)
    mine = case.copy()
    together = call(mine, "capture", "batched")
    later = next_loop(mine)
    consumed = call(later, "consume", "batched")
    row = live_rows(case)[shape.seed % len(live_rows(case))]
    written = case.copy()
    call(written, "kv_write")
    alone = written.select([row])
    torch.testing.assert_close(call(alone, "capture", "batched")[0], together[row], **ROUNDING)
    torch.testing.assert_close(call(later.select([row]), "consume", "batched")[0], consumed[row], **ROUNDING)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("chunk", [1, 3, 8])
def test_a_prompt_in_one_chunk_equals_many(implementation: str, chunk: int) -> None:
    case = build(Shape(((17, 17), (9, 9)), page_size=4))
    for name in ("k_pool", "v_pool"):
        case.pool[name][:] = torch.nan  # no history: what a row sees, this call or an earlier one wrote
    whole, parts = case.copy(), case.copy()
    expected = call(whole, "dense", implementation)
    position = case.plan["row_position"]
    for start in range(0, 17, chunk):
        rows = [r for r in range(case.rows) if start <= int(position[r]) < start + chunk]
        got = call(parts.select(rows), "dense", implementation)
        torch.testing.assert_close(got, expected[rows], **ROUNDING)
    assert expected.isfinite().all()
    assert all(torch.equal(bits(whole.pool)[name], bits(parts.pool)[name]) for name in whole.pool)


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", ["kv_write", "dense", "capture", "consume", "mixed"])
def test_padding_touches_only_the_dummy_page_and_slot(op: str, implementation: str) -> None:
    case = build(Shape(((6, 1), (13, 2)), padding=3, loops=2, gated=True))
    if op == "consume":
        call(case, "capture", implementation)
    before = case.copy()
    out = call(case, op, implementation)
    for name, new in (("k_pool", case.k), ("v_pool", case.v)):
        for row in live_rows(case):
            sequence, position = int(case.plan["row_seq"][row]), int(case.plan["row_position"][row])
            page = int(case.plan["block_table"][sequence, position // 4])
            before.pool[name][plane_of(case, row), page, :, position % 4] = new[row]
        old, now = bits(before.pool)[name], bits(case.pool)[name]
        assert torch.equal(old[:, DUMMY_PAGE + 1 :], now[:, DUMMY_PAGE + 1 :])
    written = {int(s) for s in case.store["row_slot"]} if op in ("capture", "mixed") else set()
    untouched = [s for s in range(case.store["count"].shape[0]) if s not in written | {DUMMY_SLOT}]
    for name, tensor in bits(case.store).items():
        if name != "row_slot":
            assert torch.equal(tensor[untouched], bits(before.store)[name][untouched]), name
            assert torch.equal(tensor[:, SITE + 1 :], bits(before.store)[name][:, SITE + 1 :]), name
    if out is not None:
        padding = [row for row in range(case.rows) if row not in live_rows(case)]
        assert not out[padding].any()


@pytest.mark.parametrize("implementation", BOTH)
def test_a_batch_of_padding_alone(implementation: str) -> None:
    case = build(Shape(((6, 1),), padding=4, gated=True))
    padding = [row for row in range(case.rows) if row not in live_rows(case)]
    for op in ("dense", "capture", "consume", "mixed"):
        assert not call(case.copy().select(padding), op, implementation).any()
        assert call(case.copy().select([]), op, implementation).shape == (0, 4, 8)


@pytest.mark.parametrize("implementation", BOTH)
def test_a_row_of_nan_stays_alone(implementation: str) -> None:
    """A query of NaN gives NaN for its row and nothing else, also in the consume that reads its reference."""
    case = build(Shape(((9, 3), (4, 1)), padding=1))
    expected = call(case.copy(), "capture", implementation)
    sick, *healthy = live_rows(case)
    case.q[sick] = torch.nan
    got = call(case, "capture", implementation)
    assert got[sick].isnan().all()
    torch.testing.assert_close(got[healthy], expected[healthy], **ROUNDING)
    consumed = call(next_loop(case), "consume", implementation)
    assert consumed[sick].isnan().all()
    assert consumed[healthy].isfinite().all()
