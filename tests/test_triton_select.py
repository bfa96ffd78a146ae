"""The Triton selection alone: scores of any kind in, and the retained set must be the reference's, exactly."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from kernel_cases import DEVICES, SITE, Case, Shape, build, call
from torch import Tensor

pytest.importorskip("triton")
from sparse_compile.kernels.triton_tuning import Tiles

HEADS = 2
TILES = Tiles(
    block=16, kept_block=16, min_unit=16, max_units=4, min_kept=16, max_kept=2,
    gather_block=16, register_scores=64, small_scores=32,
)  # fmt: skip
LENGTHS = (1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129)
"""Around slices (16), the two tensors of scores (32, 64), several passes, and several slices per program."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    from sparse_compile.kernels import triton_backend

    monkeypatch.setattr(triton_backend, "tiles_for", lambda attention: TILES)


def some_scores(kind: str, lines: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    normal = torch.randn(lines, length, generator=generator)
    if kind == "equal":
        return torch.full((lines, length), -1.25)
    if kind == "ties":
        return torch.randint(-1, 2, (lines, length), generator=generator).float()
    if kind == "zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    if kind == "far apart":
        return normal.sign() * torch.exp(30 * normal.abs().clamp(max=2.8))
    if kind == "infinite":
        return torch.where(normal > 1, normal, -torch.inf)
    return normal


def select(case: Case, scores: list[Tensor], poison: float) -> Case:
    """Run the selection on given scores, one [HEADS, length] per row."""
    from sparse_compile.kernels import triton_backend

    mine = case.copy()
    attention = replace(mine.attention, k=mine.k, v=mine.v, query_rows=1)
    scratch = triton_backend.Scratch(attention, TILES, mine.store_view.capacity)
    scratch.guess_stats.fill_(torch.inf)  # no guess helps
    scratch.scores.fill_(poison)
    for row, own in enumerate(scores):
        for head in range(HEADS):
            line = row * HEADS + head
            scratch.scores[line, : own.shape[1]] = own[head]
            scratch.stats[line, 0] = own[head].max()
            scratch.stats[line, 1] = (own[head] - own[head].max()).exp().sum()
    triton_backend._select(attention, mine.store_view, mine.retention, scratch)
    return mine


def rows_of(lengths: tuple[int, ...], retention: str, device: str) -> Case:
    sequences = tuple((length, 1) for length in lengths)
    shape = Shape(sequences, heads=(HEADS, HEADS), retention=retention, dtype=torch.float32, device=device)
    return build(shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("retention", ["0.3", "1.0"])
@pytest.mark.parametrize("kind", ["normal", "equal", "ties", "zeros", "far apart", "infinite"])
def test_the_set_is_the_best_and_ties_go_to_the_lowest_positions(
    kind: str, retention: str, device: str
) -> None:
    case = rows_of(LENGTHS if kind in ("normal", "ties") else LENGTHS[3::3], retention, device)
    lengths = case.plan["row_length"].tolist()
    scores = [some_scores(kind, HEADS, length).to(device) for length in lengths]
    poison = torch.inf if retention == "0.3" else torch.nan
    after = select(case, scores, poison)
    for row, own in enumerate(scores):
        slot, count = int(case.store["row_slot"][row]), case.retention.count(lengths[row])
        assert int(after.store["count"][slot, SITE]) == count
        best = torch.sort(own, dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
        index = after.store["index"][slot, SITE]
        assert torch.equal(index[:, :count].long(), best), f"length {lengths[row]}"
        assert torch.equal(index[:, count:], case.store["index"][slot, SITE][:, count:]), "room beyond"
        mass = own.double().softmax(1).gather(1, best).sum(1)
        torch.testing.assert_close(after.store["mass"][slot, SITE].double(), mass, rtol=1e-5, atol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_scores_keep_to_their_room(device: str) -> None:
    """A model that overflowed: what is retained means nothing, but it is made of the row's own keys."""
    case = rows_of((40, 70), "0.3", device)
    lengths = case.plan["row_length"].tolist()
    for some in (0.1, 0.9, 1.0):
        scores = []
        for length in lengths:
            own = some_scores("normal", HEADS, length)
            own[torch.rand(own.shape, generator=torch.Generator().manual_seed(1)) < some] = torch.nan
            scores.append(own.to(device))
        after = select(case, scores, torch.nan)
        for row, length in enumerate(lengths):
            slot, count = int(case.store["row_slot"][row]), case.retention.count(length)
            index = after.store["index"][slot, SITE]
            assert bool(((index[:, :count] >= 0) & (index[:, :count] < length)).all())
            assert torch.equal(index[:, count:], case.store["index"][slot, SITE][:, count:])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_unit_or_two_per_program_make_the_same_bits(
    dtype: torch.dtype, heads: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparse_compile.kernels import triton_backend

    case = build(Shape(((16, 1), (70, 1), (130, 1)), heads=heads, dtype=dtype, device=device))
    results = []
    for pair in (False, True):
        made = replace(TILES, pair=pair)
        monkeypatch.setattr(triton_backend, "tiles_for", lambda attention, made=made: made)
        mine = case.copy()
        results.append((call(mine, "capture", "triton"), mine.store["mass"], mine.store["c_ref"]))
    for one, two in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(7.0), two.nan_to_num(7.0))
    assert torch.equal(call(case.copy(), "dense", "triton"), results[0][0])
    wanted = call(case.copy(), "dense", "batched")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results[0][0], wanted, rtol=tolerance, atol=tolerance)
