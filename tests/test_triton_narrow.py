"""The cut of long rows: a program per unit, a sample that says which scores may decide, and what follows if it errs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICES, SITE, Case, Shape, build, call
from torch import Tensor

pytest.importorskip("triton")
from sparse_compile.kernels.retention import Retention
from sparse_compile.kernels.triton_tuning import Tiles, tiles_for

TILES = Tiles(
    block=16, kept_block=16, min_unit=64, max_units=4, min_kept=16, max_kept=2, gather_block=4, gather_bytes=16,
    piece=32, short=64, small_scores=64, sample=64, narrow_warps=4, narrow_piece=16, listed=8, listed_step=4,
)  # fmt: skip
UNUSED = -7654321.0
"""What lists hold where nothing was listed; no score has it."""


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    from sparse_compile.kernels import triton_backend

    monkeypatch.setattr(triton_backend, "tiles_for", lambda attention: TILES)


@dataclass
class Found:
    """What the search left for one row of one head."""

    cut: int
    ties: int
    places: Tensor  # int [units, 3]: begin, kept, ties left
    lists: Tensor  # float [units, unit]


def unit_of(length: int) -> int:
    return max(TILES.min_unit, math.ceil(math.ceil(length / TILES.max_units) / TILES.block) * TILES.block)


def cut_rows(
    rows: list[Tensor], retention: str, poison: float, device: str, keep: tuple[int, int] = (0, 0)
) -> list[Found]:
    """Run the search on one head's scores of each row, in one launch."""
    from sparse_compile.kernels import triton_backend

    sequences = tuple((len(row), 1) for row in rows)
    shape = Shape(sequences, heads=(1, 1), retention=retention, dtype=torch.float32, device=device)
    case = build(replace(shape, keep_first=keep[0], keep_last=keep[1]))
    case = case.select([int((case.plan["row_seq"] == line).nonzero()) for line in range(1, len(rows) + 1)])
    attention = replace(case.attention, k=case.k, v=case.v, query_rows=1)
    scratch = triton_backend.Scratch(attention, TILES, case.store_view.capacity, TILES.max_units)
    scratch.scores.fill_(poison)
    scratch.lists.fill_(UNUSED)
    scratch.places.fill_(-1)
    for line, row in enumerate(rows):
        scratch.scores[line, : len(row)] = row
        scratch.stats[line, 0] = row.max()
    triton_backend._short(attention, case.store_view, case.retention, scratch, None)
    triton_backend._cut(attention, case.retention, scratch, scratch.arrived)
    assert not scratch.arrived.any(), "counters are zero between launches"
    found = []
    for line, row in enumerate(rows):
        unit = unit_of(len(row))
        units = math.ceil(len(row) / unit)
        lists = torch.nn.functional.pad(scratch.lists[line].cpu(), (0, 4 * unit), value=UNUSED)
        cut, ties = scratch.cuts[line].tolist()
        places = scratch.places[line].cpu()
        assert bool((places[units:] == -1).all())
        found.append(Found(cut, ties, places[:units], lists[: units * unit].view(units, unit)))
    return found


def sortable(scores: Tensor) -> Tensor:
    whole = (scores + 0.0).view(torch.int32)
    return torch.where(whole < 0, whole ^ 0x7FFFFFFF, whole)


def always_kept(row: Tensor, keep: tuple[int, int]) -> Tensor:
    """Which keys are kept whatever their scores."""
    return Retention.of("1", first=keep[0], last=keep[1]).always(torch.arange(len(row)), len(row))


def assert_exact(row: Tensor, found: Found, retention: str, keep: tuple[int, int] = (0, 0)) -> None:
    """Cut and ties describe the reference's set; places say which part of it each unit has."""
    count = Retention.of(retention, first=keep[0], last=keep[1]).count(len(row))
    always, best = always_kept(row, keep), torch.zeros(len(row), dtype=torch.bool)
    wanted = row.masked_fill(always, torch.inf)
    best[torch.sort(wanted, descending=True, stable=True).indices[:count]] = True
    keys = sortable(row)
    same = (keys == found.cut - 1) & ~always
    assert torch.equal(best, always | (keys >= found.cut) | (same & (same.cumsum(0) <= found.ties)))
    begin, left = 0, found.ties
    for own, its_ties, place in zip(
        best.split(unit_of(len(row))), same.split(unit_of(len(row))), found.places.tolist(), strict=True
    ):
        assert place == [begin, int(own.sum()), left]
        begin, left = begin + int(own.sum()), max(0, left - int(its_ties.sum()))


def was_right(row: Tensor, found: Found, retention: str, keep: tuple[int, int] = (0, 0)) -> bool:
    """Did the sample's bracket hold the cut?"""
    chosen = row[~always_kept(row, keep)]
    count = Retention.of(retention).count(len(row)) - (len(row) - len(chosen))
    return bool((found.lists == torch.sort(chosen, descending=True).values[count - 1]).any())


def longest_list(found: Found) -> int:
    return int((found.lists != UNUSED).sum(1).max())


def sampled(length: int, keep: tuple[int, int]) -> Tensor:
    """The keys that the sample takes."""
    rest = max(1, length - sum(keep))
    return min(keep[0], length - 1) + torch.arange(TILES.sample) * rest // TILES.sample


def scores_of(kind: str, length: int, seed: int = 0, keep: tuple[int, int] = (0, 0)) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(length, generator=generator)
    if kind == "equal":
        return torch.full_like(normal, 2.5)
    if kind == "ties":
        return torch.randint(-1, 2, (length,), generator=generator).float()
    if kind == "zeros":
        return torch.where(normal > 0, 0.0, -0.0)
    if kind == "far apart":
        return normal.sign() * torch.exp(30 * normal.abs().clamp(max=2.8))
    if kind == "infinite":
        return torch.where(normal > 1, normal, -torch.inf)
    if kind == "rising":
        return torch.arange(length) / 7.0
    if kind == "falling":
        return -torch.arange(length) / 7.0
    if kind == "the sample is high":
        return normal.index_add(0, sampled(length, keep), torch.full((TILES.sample,), 50.0))
    if kind == "the sample is low":
        return normal.index_add(0, sampled(length, keep), torch.full((TILES.sample,), -50.0))
    return normal


KINDS = (
    "normal", "equal", "ties", "zeros", "far apart", "infinite", "rising", "falling", "the sample is high",
    "the sample is low",
)  # fmt: skip
RIGHT = {"normal": True, "equal": True, "the sample is high": False, "the sample is low": False}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_is_exact_whatever_the_sample_says(kind: str, device: str) -> None:
    """Short rows and long ones in one launch, each with its own number of units, behind which memory is poisoned."""
    rows = [scores_of(kind, length).to(device) for length in ((65, 200) if kind == "normal" else (200,))]
    short = scores_of(kind, 64).to(device)
    for poison in (torch.nan, torch.inf)[: 2 if kind == "normal" else 1]:
        *found, other = cut_rows([*rows, short], "0.5", poison, device)
        for row, its in zip(rows, found, strict=True):
            assert_exact(row.cpu(), its, "0.5")
        assert bool((other.places == -1).all()), "short rows are served by the other kernel"
    if kind in RIGHT:
        assert was_right(rows[-1].cpu(), found[-1], "0.5") == RIGHT[kind]
    if kind == "equal":
        assert longest_list(found[0]) == unit_of(200) > TILES.listed, "lists that registers do not hold"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("retention", ["0.0001", "0.03", "0.97", "1.0"])
def test_retained_shares_near_none_and_all(retention: str, device: str) -> None:
    for kind in ("normal", "infinite"):
        row = scores_of(kind, 97).to(device)
        (found,) = cut_rows([row], retention, torch.nan, device)
        assert_exact(row.cpu(), found, retention)


KEEPS = ((2, 3), (70, 20), (0, 120), (150, 100), (2**31 - 1, 2**31 - 1))
"""A few; over the borders of units; exactly as many as are retained; all, in ranges that overlap; more than any row."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize(
    "kind", ["normal", "ties", "equal", "infinite", "the sample is high", "the sample is low"]
)
def test_keys_that_are_always_kept_come_first_and_ties_after_them(
    kind: str, keep: tuple[int, int], device: str
) -> None:
    """Whether the sample was right, wrong, or has nothing to say because no other key is retained."""
    row = scores_of(kind, 200, keep=keep)
    (found,) = cut_rows([row.to(device)], "0.6", torch.nan, device, keep)
    assert_exact(row, found, "0.6", keep)
    chosen = 120 - sum(keep)
    if kind in RIGHT and chosen > 0:
        all_of_it = kind == "the sample is high" and chosen < TILES.sample
        assert was_right(row, found, "0.6", keep) == (RIGHT[kind] or all_of_it)
    if kind == "equal":
        assert (found.ties > 0) == (chosen > 0), "ties across the border of the retained set"


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    length=st.integers(TILES.short + 1, 200),
    retention=st.decimals("0.001", "1", places=3).map(str),
    keep=st.sampled_from(((0, 0), (2, 3), (70, 20))),
    seed=st.integers(0, 1000),
)
def test_any_row(kind: str, length: int, retention: str, keep: tuple[int, int], seed: int) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    row = scores_of(kind, length, seed, keep)
    with pytest.MonkeyPatch.context() as patch:
        from sparse_compile.kernels import triton_backend

        patch.setattr(triton_backend, "tiles_for", lambda attention: TILES)
        (found,) = cut_rows([row.to(device)], retention, torch.nan, device, keep)
    assert_exact(row, found, retention, keep)


@pytest.mark.parametrize("device", DEVICES)
def test_nan_scores_end_and_leave_enough_keys(device: str) -> None:
    """A model that overflowed: what is retained means nothing, but every place of the row's list gets a key."""
    for some in (0.1, 1.0):
        row = scores_of("normal", 100)
        row[torch.rand(100, generator=torch.Generator().manual_seed(1)) < some] = torch.nan
        (found,) = cut_rows([row.to(device)], "0.3", torch.nan, device)
        begin, kept = found.places[:, 0], found.places[:, 1]
        assert torch.equal(begin, kept.cumsum(0) - kept)
        assert int(kept.sum()) >= 30


def after(case: Case, op: str) -> Case:
    mine = case.copy()
    call(mine, op, "triton")
    return mine


@pytest.mark.parametrize("device", DEVICES)
def test_short_and_long_rows_of_one_capture(device: str) -> None:
    """References equal the batched ones, and a row's bits stay what they are alone, in a mixed call, and in a table
    that has room for longer rows.
    """
    shape = Shape(((64, 1), (120, 1)), heads=(2, 1), dtype=torch.float32, padding=1, device=device)
    case = build(shape)
    together, wanted, wide = after(case, "capture"), case.copy(), case.copy()
    call(wanted, "capture", "batched")
    wide.plan["block_table"] = torch.nn.functional.pad(case.plan["block_table"], (0, 40))
    mixed = after(replace(wide, row_mode=torch.where(case.plan["row_length"] > 0, 2, 0).int()), "mixed")
    for row, length in enumerate(case.plan["row_length"].tolist()):
        if length == 0:
            continue
        slot, count = int(case.store["row_slot"][row]), case.retention.count(length)
        alone = after(case.select([row]), "capture")
        for name in ("index", "mass", "c_ref"):
            mine, theirs = (x.store[name][slot, SITE] for x in (together, wanted))
            if name == "index":
                assert torch.equal(mine[:, :count], theirs[:, :count]), length
            else:
                torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-5)
            assert torch.equal(mixed.store[name][slot, SITE], mine), (length, name)
            assert torch.equal(alone.store[name][slot, SITE], mine), (length, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "keep"), [("capture", (0, 0)), ("capture", (4, 64)), ("mixed", (300, 700))])
def test_rows_of_more_than_8192_keys_as_the_reference_has_them(
    op: str, keep: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the tiles that are used, and scores that tie by the hundred: the set is the reference's, key by key."""
    from sparse_compile.kernels import triton_backend

    monkeypatch.setattr(triton_backend, "tiles_for", tiles_for)
    shape = Shape(
        ((8193, 1), (300, 1)), heads=(2, 1), page_size=16, retention="0.1", keep_first=keep[0], keep_last=keep[1],
        dtype=torch.float32, device=device, integers=True,
    )  # fmt: skip
    case = build(shape)
    case.row_mode.fill_(2)
    mine, wanted = after(case, op), case.copy()
    call(wanted, "capture", "reference")
    for row, length in enumerate(case.plan["row_length"].tolist()):
        slot, count = int(case.store["row_slot"][row]), case.retention.count(length)
        assert count == max(math.ceil(length / 10), min(length, sum(keep)))
        found, right = ({name: x[slot, SITE] for name, x in held.items() if name != "row_slot"}
                        for held in (mine.store, wanted.store))  # fmt: skip
        assert int(found["count"]) == count
        assert torch.equal(found["index"], right["index"]), (length, "and nothing beyond")
        for name in ("mass", "c_ref"):
            torch.testing.assert_close(found[name], right[name], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"sample": 128}, "sample=128 must not exceed short=64"),
        ({"small_scores": 128}, "small_scores=128 must not exceed short=64"),
        ({"narrow_piece": 1 << 15}, "narrow_piece=32768 .* must be at most 16384"),
    ],
)
def test_sizes_that_cannot_be_are_refused(changed: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TILES, **changed)
