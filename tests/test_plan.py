"""Row plans: what the rows of a step say, and what a wrong plan is caught by."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from sparse_compile.runtime.leases import Lease
from sparse_compile.runtime.plan import PlanBuilder, PlanError, RowPlan, Segment

LEASE = Lease(slot=3, request="b", row=5, incarnation=2)
PREFILL = Segment(tokens=[11, 12, 13], start=2, pages=[4, 7], wants_logits=True)
DECODE = Segment(tokens=[21], start=5, pages=[2, 1], decode=True, sparse=True, lease=LEASE, wants_logits=True)
CHUNK = Segment(tokens=[31, 32], start=0, pages=[5])


def build(*segments: Segment, pad_to: int = 0) -> RowPlan:
    plan = PlanBuilder("cpu").build(segments, pad_to)
    plan.validate(page_size=4, pages=9, slots=5)
    return plan


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
    assert plan.token_ids.dtype == plan.positions.dtype == plan.logit_rows.dtype == torch.int64
    assert plan.block_table.dtype == torch.int32


def test_the_order_of_the_fields_is_fixed() -> None:
    rows = "block_table row_seq row_position row_length row_loop row_slot row_mode token_ids positions"
    assert [field.name for field in fields(RowPlan)] == [
        *rows.split(),
        *("logit_rows", "kind", "max_length", "leases"),
    ]


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


def test_only_the_sequences_of_the_step_have_lines() -> None:
    assert build(DECODE).block_table.shape == (2, 2)


def test_an_empty_plan() -> None:
    plan = build(pad_to=2)
    assert (plan.rows, plan.kind, plan.max_length) == (2, "dense", 0)


def test_prefix_rows_see_the_whole_prefix() -> None:
    segment = Segment(tokens=[1, 2, 3, 4, 5], start=0, pages=[1, 2], prefix_length=3)
    assert build(segment).row_length.tolist() == [3, 3, 3, 4, 5]
    later = Segment(tokens=[6], start=5, pages=[1, 2], prefix_length=3)
    assert build(later).row_length.tolist() == [6]


def test_columns_are_contiguous() -> None:
    plan = build(PREFILL, DECODE)
    for field in fields(plan):
        value = getattr(plan, field.name)
        assert not isinstance(value, torch.Tensor) or value.is_contiguous(), field.name


def test_sparse_segments_need_one_row_and_a_lease() -> None:
    with pytest.raises(PlanError, match="needs the lease"):
        Segment(tokens=[1], start=0, pages=[1], sparse=True)
    with pytest.raises(PlanError, match="one row"):
        Segment(tokens=[1, 2], start=0, pages=[1], sparse=True, lease=LEASE)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_length", 5, "max_length=5 is below the longest row, 6"),
        ("row_length", [3, 4, 5, 9], "within the sequence's pages"),
        ("row_length", [3, 4, 5, -1], "negative"),
        ("row_length", [3, 4, 5, 4], "see its own key"),
        ("row_length", [3, 4, 0, 6], "exactly on inactive rows"),
        ("row_seq", [1, 1, 1, 3], "point into block_table"),
        ("row_slot", [0, 0, 0, 0], "must have a slot"),
        ("row_slot", [0, 0, 0, 4], "leases must match"),
        ("row_slot", [0, 0, 0, 5], "5 slots"),
        ("row_mode", [1, 1, 1, 1], "must have a slot"),
        ("row_position", [2, 3, 4], "4 rows"),
        ("block_table", [[1, 0], [4, 7], [2, 1]], "line 0"),
        ("block_table", [[0, 0], [4, 7], [2, 9]], "9 pages"),
    ],
)
def test_validate_catches(field: str, value: object, message: str) -> None:
    if isinstance(value, list):
        value = torch.tensor(value, dtype=torch.int32)
    changes = {"max_length": 9, field: value}
    plan = replace(build(PREFILL, DECODE), **changes)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=message):
        plan.validate(page_size=4, pages=9, slots=5)


def test_validate_catches_a_wrong_dtype_and_a_writing_padding_row() -> None:
    plan = build(PREFILL, pad_to=4)
    with pytest.raises(PlanError, match="int32"):
        replace(plan, row_loop=plan.row_loop.long()).validate(4, 9, 5)
    position = plan.row_position.clone()
    position[3] = 1
    with pytest.raises(PlanError, match="position 0"):
        replace(plan, row_position=position).validate(4, 9, 5)
