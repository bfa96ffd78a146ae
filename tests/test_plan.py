"""Row plans: what the rows of a step say, and what a wrong plan is caught by."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparse_compile.runtime.leases import Lease
from sparse_compile.runtime.plan import FROM_DEVICE, PlanBuilder, PlanError, RowPlan, Segment
from sparse_compile.runtime.seats import OutOfSeats, SeatTable

LEASE = Lease(slot=3, request="b", row=5, incarnation=2)
PAGES = ([4, 7], [2, 1], [5])  # of seats 1, 2, 3
PREFILL = Segment(tokens=[11, 12, 13], start=2, seat=1, wants_logits=True)
DECODE = Segment(tokens=[21], start=5, seat=2, decode=True, sparse=True, lease=LEASE, wants_logits=True)
CHUNK = Segment(tokens=[31, 32], start=0, seat=3)


def seats() -> SeatTable:
    table = SeatTable(3, 2, "cpu")
    assert [table.take(pages) for pages in PAGES] == [1, 2, 3]
    return table


def build(*segments: Segment, pad_to: int = 0, loops: int | None = None) -> RowPlan:
    plan = PlanBuilder(seats()).build(segments, pad_to, loops)
    plan.validate(page_size=4, pages=9, slots=5)
    return plan


def changed(plan: RowPlan, name: str, values: list[int]) -> RowPlan:
    """The plan with another row column."""
    packed = plan.packed.clone()
    packed[RowPlan.ROW_FIELDS.index(name)] = torch.tensor(values, dtype=torch.int32)
    return replace(plan, packed=packed)


def test_rows_of_a_mixed_step() -> None:
    plan = build(PREFILL, DECODE, CHUNK)
    assert plan.block_table.tolist() == [[0, 0], [4, 7], [2, 1], [5, 0]]
    assert plan.row_seq.tolist() == [1, 1, 1, 2, 3, 3]
    assert plan.row_position.tolist() == [2, 3, 4, 5, 0, 1]
    assert plan.row_length.tolist() == [3, 4, 5, 6, 1, 2]
    assert plan.row_loop.tolist() == [0] * 6
    assert plan.row_slot.tolist() == [0, 0, 0, 3, 0, 0]
    assert plan.row_mode.tolist() == [1, 1, 1, 3, 1, 1]
    assert plan.token_ids.tolist() == [11, 12, 13, 21, 31, 32]
    assert plan.positions.tolist() == plan.row_position.tolist()
    assert plan.logit_rows.tolist() == [2, 3]
    assert (plan.kind, plan.max_length, plan.leases, plan.rows) == ("mixed", 6, (LEASE,), 6)
    assert [(chunk.row, chunk.rows, chunk.seat, chunk.start) for chunk in plan.chunks] == [
        (0, 3, 1, 2),
        (3, 1, 2, 5),
        (4, 2, 3, 0),
    ]
    assert plan.token_ids.dtype == plan.positions.dtype == plan.logit_rows.dtype == torch.int64
    assert plan.block_table.dtype == torch.int32


def test_the_table_is_the_seats_own() -> None:
    table = seats()
    plan = PlanBuilder(table).build([DECODE])
    assert plan.block_table is table.block_table
    table.write(2, [3])
    assert plan.block_table[2].tolist() == [3, 0]


def test_tokens_that_only_the_device_knows() -> None:
    table = seats()
    table.last_token[2] = 17
    plan = PlanBuilder(table).build([replace(DECODE, tokens=[FROM_DEVICE]), CHUNK])
    assert plan.token_ids.tolist() == [17, 31, 32]


def test_rows_between_loops() -> None:
    plan = build(replace(DECODE, loop=2), replace(CHUNK, tokens=[31]), pad_to=3, loops=1)
    assert (plan.loops, plan.depths, plan.row_loop.tolist()) == (1, frozenset({0, 2}), [2, 0, 0])
    with pytest.raises(PlanError, match="row_loop holds"):
        replace(plan, depths=frozenset({0})).validate(4, 9, 5)


def test_seats_are_lent_and_come_back() -> None:
    table = seats()
    with pytest.raises(OutOfSeats, match="all 3 seats"):
        table.take([1])
    table.release(2)
    table.check_integrity([1, 3])
    with pytest.raises(RuntimeError, match="seat table broken"):
        table.check_integrity([1, 2, 3])
    with pytest.raises(ValueError, match="seat 2 is not taken"):
        table.release(2)
    with pytest.raises(ValueError, match="3 pages exceed the table's 2"):
        table.write(1, [1, 2, 3])
    assert table.take([6]) == 2


def test_kind_says_which_program_runs_the_plan() -> None:
    assert build(PREFILL, CHUNK).kind == "dense"
    assert build(DECODE).kind == "sparse"
    assert build(DECODE, PREFILL).kind == "mixed"


def test_mode_at_a_site() -> None:
    plan = build(CHUNK, DECODE, pad_to=4)
    assert plan.mode_at("dense").tolist() == [1, 1, 1, 0]
    assert plan.mode_at("capture").tolist() == [1, 1, 2, 0]
    assert plan.mode_at("consume").tolist() == [1, 1, 3, 0]


def test_padding_rows_belong_to_the_dummies() -> None:
    plan = build(DECODE, pad_to=3)
    assert plan.rows == 3
    for name in (*RowPlan.ROW_FIELDS, "token_ids", "positions"):
        assert getattr(plan, name)[1:].tolist() == [0, 0], name
    assert plan.kind == "sparse"


def test_an_empty_plan() -> None:
    plan = build(pad_to=2)
    assert (plan.rows, plan.kind, plan.max_length) == (2, "dense", 0)


def test_prefix_rows_see_the_whole_prefix() -> None:
    segment = Segment(tokens=[1, 2, 3, 4, 5], start=0, seat=1, prefix_length=3)
    assert build(segment).row_length.tolist() == [3, 3, 3, 4, 5]
    later = Segment(tokens=[6], start=5, seat=1, prefix_length=3)
    assert build(later).row_length.tolist() == [6]


def test_columns_are_contiguous() -> None:
    plan = build(PREFILL, DECODE)
    for name in (*RowPlan.ROW_FIELDS, "token_ids", "positions", "logit_rows"):
        assert getattr(plan, name).is_contiguous(), name


def test_sparse_segments_need_one_row_and_a_lease() -> None:
    with pytest.raises(PlanError, match="needs the lease"):
        Segment(tokens=[1], start=0, seat=1, sparse=True)
    with pytest.raises(PlanError, match="one row"):
        Segment(tokens=[1, 2], start=0, seat=1, sparse=True, lease=LEASE)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_length", 5, "max_length=5 is below the longest row, 6"),
        ("row_length", [3, 4, 5, 9], "within the sequence's pages"),
        ("row_length", [3, 4, 5, -1], "negative"),
        ("row_length", [3, 4, 5, 4], "see its own key"),
        ("row_length", [3, 4, 0, 6], "exactly on inactive rows"),
        ("row_seq", [1, 1, 1, 4], "point into block_table"),
        ("row_slot", [0, 0, 0, 0], "must have a slot"),
        ("row_slot", [0, 0, 0, 4], "a leased slot of its own"),
        ("row_slot", [0, 0, 0, 5], "5 slots"),
        ("row_mode", [1, 1, 1, 1], "must have a slot"),
        ("block_table", [[1, 0], [4, 7], [2, 1]], "line 0"),
        ("block_table", [[0, 0], [4, 7], [2, 9]], "9 pages"),
    ],
)
def test_validate_catches(field: str, value: object, message: str) -> None:
    plan = build(PREFILL, DECODE)
    if field in RowPlan.ROW_FIELDS:
        plan = changed(replace(plan, max_length=9), field, value)  # type: ignore[arg-type]
    elif field == "block_table":
        plan = replace(plan, block_table=torch.tensor(value, dtype=torch.int32))
    else:
        plan = replace(plan, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=message):
        plan.validate(page_size=4, pages=9, slots=5)


def test_validate_catches_a_wrong_dtype_and_a_writing_padding_row() -> None:
    plan = build(PREFILL, pad_to=4)
    with pytest.raises(PlanError, match="int32"):
        replace(plan, packed=plan.packed.long()).validate(4, 9, 5)
    with pytest.raises(PlanError, match="8 columns"):
        replace(plan, packed=plan.packed[:6]).validate(4, 9, 5)
    with pytest.raises(PlanError, match="position 0"):
        changed(plan, "row_position", [2, 3, 4, 1]).validate(4, 9, 5)
