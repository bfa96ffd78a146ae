"""The batched implementation against the reference, and the laws that hold for both.

float64 is compared at 1e-10. Lower precisions by two errors: the error of the batched result against the
float64 reference on the same inputs may exceed that of eager code in the same dtype by the margin of `MARGIN`
and no more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from kernel_cases import (
    BOTH,
    DEVICES,
    HEAD_DIMS,
    HEADS,
    SITE,
    Case,
    Shape,
    build,
    call,
    live_rows,
    next_loop,
    shapes,
)
from kernel_oracle import kept_keys, naive_consume, naive_dense, naive_probabilities, row_operands

from sparse_compile.kernels import batched, tiles

quick = settings(max_examples=20, deadline=None)
steady = settings(
    max_examples=10, deadline=None, derandomize=True
)  # thresholds on rounding: same inputs each run

EXACT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-10}
ROUNDING: dict[str, Any] = {"rtol": 0.0, "atol": 1e-12}
MARGIN = {
    # Eager sums are themselves lucky or unlucky by a few ulps. Outputs stay below 8 in size, where half an
    # ulp of float32 is 2.4e-7; sums over at most 33 keys of 96 dimensions lose a few of those.
    torch.float32: 4e-6,
    # Both round their last value to bfloat16, and no rounding is nearer than the batched one, except where
    # its float32 error pushes it across a midpoint: the float32 margin covers that.
    torch.bfloat16: 4e-6,
}
NEAR_TIE = 1e-5
"""Scores that differ by less may change places in float32: scores up to 8 carry about 33 float32 roundings,
33 * 2.4e-7.
"""


def assert_same_store(got: Case, expected: Case) -> None:
    """All of the store but the dummy slot: integers equal, floats to 1e-10, NaN where nothing was written."""
    for name in ("index", "count"):
        assert torch.equal(got.store[name][1:], expected.store[name][1:]), name
    for name in ("mass", "o_ref", "c_ref"):
        torch.testing.assert_close(got.store[name][1:], expected.store[name][1:], equal_nan=True, **EXACT)


def by_reference(case: Case, op: str) -> tuple[torch.Tensor, Case]:
    mine = case.copy()
    return call(mine, op, "reference"), mine


def by_batched(case: Case, op: str) -> tuple[torch.Tensor, Case]:
    mine = case.copy()
    return call(mine, op, "batched"), mine


@pytest.mark.parametrize("device", DEVICES)
@quick
@given(shape=shapes())
def test_equals_the_reference_in_float64(device: str, shape: Shape) -> None:
    case = build(replace(shape, device=device))
    got, mine = by_batched(case, "capture")
    expected, theirs = by_reference(case, "capture")
    torch.testing.assert_close(got, expected, **EXACT)
    assert_same_store(mine, theirs)
    assert torch.equal(got, by_batched(case, "dense")[0])
    later = next_loop(theirs)
    torch.testing.assert_close(by_batched(later, "consume")[0], by_reference(later, "consume")[0], **EXACT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("head_dim", [*HEAD_DIMS, 128, 256])
def test_every_head_ratio_and_dimension(device: str, heads: tuple[int, int], head_dim: int) -> None:
    case = build(Shape(((1, 1), (13, 3), (30, 1)), heads=heads, head_dim=head_dim, padding=1, device=device))
    expected, theirs = by_reference(case, "capture")
    got, mine = by_batched(case, "capture")
    torch.testing.assert_close(got, expected, **EXACT)
    assert_same_store(mine, theirs)
    later = next_loop(theirs)
    torch.testing.assert_close(by_batched(later, "consume")[0], by_reference(later, "consume")[0], **EXACT)


def assert_two_errors(got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> None:
    mine, theirs = ((x.double() - truth).abs().max().item() for x in (got, eager))
    assert mine <= theirs + MARGIN[got.dtype], f"error {mine:.3g}, eager {theirs:.3g}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@steady
@given(shape=shapes())
def test_low_precision_is_as_good_as_eager(device: str, dtype: torch.dtype, shape: Shape) -> None:
    case = build(replace(shape, dtype=dtype, device=device))
    captured, after = by_batched(case, "capture")
    assert_two_errors(captured, naive_dense(case), by_reference(case.to(torch.float64), "dense")[0])
    assert_sound_capture(after)
    later = next_loop(after)
    truth = by_reference(later.to(torch.float64), "consume")[0]
    assert_two_errors(by_batched(later, "consume")[0], naive_consume(later), truth)


def assert_sound_capture(case: Case) -> None:
    """The kept keys are the best but for near ties, and mass and C_ref are theirs."""
    exact = case.to(torch.float64)
    for row in live_rows(case):
        p, v = naive_probabilities(exact, row), row_operands(exact, row)[2]
        slot = int(case.store["row_slot"][row])
        for head in range(p.shape[1]):
            kept = kept_keys(case, row, head)
            assert torch.equal(kept, kept.unique())
            rest = torch.ones(p.shape[0], dtype=torch.bool, device=p.device)
            rest[kept] = False
            always = case.retention.always(torch.arange(p.shape[0], device=p.device), p.shape[0])
            assert not (always & rest).any()
            chosen = ~rest & ~always
            if rest.any() and chosen.any():
                assert p[chosen, head].min().log() >= p[rest, head].max().log() - NEAR_TIE
            mass = p[kept, head].sum()
            c_ref = (p[kept, head] @ v[kept, head]) / mass
            assert (case.store["mass"][slot, SITE, head] - mass).abs() <= MARGIN[torch.float32]
            assert (case.store["c_ref"][slot, SITE, head] - c_ref).abs().max() <= MARGIN[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_ties_go_to_the_lowest_position(device: str, dtype: torch.dtype, seed: int) -> None:
    """Small integers: every score is exact, and many are equal, also across the cut."""
    shape = Shape(
        ((29, 3), (12, 1), (1, 1)), heads=(6, 2), integers=True, dtype=dtype, seed=seed, device=device
    )
    case = build(shape)
    mine, theirs = by_batched(case, "capture")[1], by_reference(case, "capture")[1]
    assert torch.equal(mine.store["index"][1:], theirs.store["index"][1:])
    row = case.plan["row_length"].argmax().item()
    distinct = naive_probabilities(case.to(torch.float64), int(row))[:, 0].unique()
    assert distinct.shape[0] < case.plan["row_length"].max()  # the case does tie


@pytest.mark.parametrize("implementation", BOTH)
def test_equal_keys_keep_the_first(implementation: str) -> None:
    case = build(Shape(((20, 1),), retention="0.3"))
    case.q.zero_()
    call(case, "capture", implementation)
    assert all(kept_keys(case, 0, head).tolist() == list(range(6)) for head in range(4))


@pytest.mark.parametrize("retention", ["0.3", "0.9", "1.0", "0.01"])
def test_lengths_from_one_to_beyond_the_count(retention: str) -> None:
    case = build(Shape(tuple((n, 1) for n in range(1, 13)), retention=retention))
    mine, theirs = by_batched(case, "capture")[1], by_reference(case, "capture")[1]
    assert_same_store(mine, theirs)
    later = next_loop(theirs)
    torch.testing.assert_close(by_batched(later, "consume")[0], by_reference(later, "consume")[0], **EXACT)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [1, 4, 5, 8, 64])
@pytest.mark.parametrize("prefix", [False, True])
def test_window_and_soft_cap(device: str, window: int, prefix: bool) -> None:
    sequences = ((3, 3), (40, 7), (40, 1), (9, 1), (8, 1))
    case = build(Shape(sequences, window=window, softcap=2.0, prefix=prefix, padding=1, device=device))
    torch.testing.assert_close(by_batched(case, "dense")[0], by_reference(case, "dense")[0], **EXACT)


def test_pages_before_the_window_are_not_read() -> None:
    case = build(Shape(((40, 2), (33, 1)), window=5, page_size=4))
    expected = by_batched(case, "dense")[0]
    for sequence, oldest in ((1, 34), (2, 28)):  # the earliest first visible key of its rows
        for number in range(oldest // 4):
            page = int(case.plan["block_table"][sequence, number])
            case.pool["k_pool"][:, page] = case.pool["v_pool"][:, page] = torch.nan
    for implementation in BOTH:
        torch.testing.assert_close(call(case.copy(), "dense", implementation), expected, **ROUNDING)


def test_small_budgets_change_only_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of one row, tiles of one group: a long prompt's temporaries are bounded, its result the same."""
    case = build(Shape(((33, 20), (33, 2), (30, 2), (5, 1), (7, 1)), padding=1))
    expected, theirs = by_batched(case, "capture")
    later = next_loop(theirs)
    consumed = by_batched(later, "consume")[0]
    monkeypatch.setattr(tiles, "SCORES", 200)
    monkeypatch.setattr(tiles, "GATHERED", 2000)
    blocks = [len(tile.blocks) for tile in tiles.host_tiles(case.attention)]
    assert max(blocks) > 5
    assert len(blocks) > 3
    got, mine = by_batched(case, "capture")
    torch.testing.assert_close(got, expected, **ROUNDING)
    assert_same_store(mine, theirs)
    torch.testing.assert_close(by_batched(later, "consume")[0], consumed, **ROUNDING)


def test_keys_of_a_chunk_are_gathered_once() -> None:
    case = build(Shape(((33, 30), (33, 1), (31, 1))))
    planned = list(tiles.host_tiles(case.attention))
    assert sorted(tuple(tile.rows.shape) for tile in planned) == [(1, 30), (2, 1)]


def test_short_rows_are_not_padded_to_long_ones() -> None:
    case = build(Shape(((4, 1), (8, 1), (200, 1), (150, 1)), page_size=4))
    assert sorted(tile.pages for tile in tiles.host_tiles(case.attention)) == [2, 50]


@quick
@given(shape=shapes())
def test_planning_without_host_reads_gives_the_same(shape: Shape) -> None:
    """What CUDA graph capture uses, run on the CPU."""
    case = build(shape)
    expected, theirs = by_batched(case, "capture")
    mine = case.copy()
    call(mine, "kv_write")
    got = torch.empty_like(case.q)
    batched.dense(mine.attention, got, static=True)
    torch.testing.assert_close(got, expected, **ROUNDING)
    batched.capture(mine.attention, mine.store_view, case.retention, got, static=True)
    torch.testing.assert_close(got, expected, **ROUNDING)
    assert_same_store(mine, theirs)
    later = next_loop(theirs)
    later.row_mode = torch.where(later.plan["row_length"] > 0, torch.arange(later.rows) % 4, 0).int()
    for op in ("consume", "mixed"):
        mine = later.copy()
        expected, theirs = by_batched(later, op)
        call(mine, "kv_write")
        if op == "consume":
            batched.consume(mine.attention, mine.store_view, got, static=True)
        else:
            batched.mixed(mine.attention, mine.row_mode, mine.store_view, case.retention, got, static=True)
        torch.testing.assert_close(got, expected, **ROUNDING)
        assert_same_store(mine, theirs)


@pytest.mark.parametrize("window", [3, 8])
def test_planning_without_host_reads_honours_the_window(window: int) -> None:
    case = build(Shape(((40, 3), (2, 1)), window=window, padding=1))
    expected, mine = by_batched(case, "dense")
    got = torch.empty_like(expected)
    batched.dense(mine.attention, got, static=True)
    torch.testing.assert_close(got, expected, **ROUNDING)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graph_replay_equals_eager() -> None:
    case = build(Shape(((40, 1), (9, 1), (23, 1)), padding=2, device="cuda", heads=(10, 2), head_dim=72))
    call(case, "capture", "batched")
    later = next_loop(case)
    later.row_mode = torch.where(
        later.plan["row_length"] > 0, torch.arange(5, device="cuda") % 3 + 1, 0
    ).int()
    expected, theirs = by_batched(later, "mixed")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        call(later.copy(), "mixed", "batched")  # cuBLAS workspaces are made outside the capture
    torch.cuda.synchronize()
    graph, mine = torch.cuda.CUDAGraph(), later.copy()
    with torch.cuda.graph(graph):
        got = call(mine, "mixed", "batched")
    for name in mine.store:
        mine.store[name].copy_(later.store[name])
    graph.replay()
    torch.testing.assert_close(got, expected, **ROUNDING)
    assert_same_store(mine, theirs)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_pool_beyond_int32_addresses() -> None:
    """Two rows near the end of pools of more than 2**31 elements: exactly what a small pool gives."""
    small = build(
        Shape(
            ((40, 1), (70, 2)), heads=(8, 8), head_dim=128, page_size=16, dtype=torch.bfloat16, device="cuda"
        )
    )
    pages = 2**31 // (8 * 16 * 128 * 3) + 64
    shift = pages - small.pool["k_pool"].shape[1]
    large = small.copy()
    for name, pool in small.pool.items():
        large.pool[name] = torch.full(
            (pool.shape[0], pages, *pool.shape[2:]), torch.nan, dtype=pool.dtype, device="cuda"
        )
        assert large.pool[name].numel() > 2**31
        large.pool[name][:, shift:] = pool
    table = small.plan["block_table"]
    large.plan = small.plan | {"block_table": torch.where(table < 10_000, table + shift, table)}
    assert torch.equal(call(large, "capture"), call(small, "capture"))
    later_small, later_large = next_loop(small), replace(next_loop(large), pool=large.pool)
    assert torch.equal(call(later_large, "consume"), call(later_small, "consume"))
