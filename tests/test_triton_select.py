"""The Triton selection alone: scores of any kind in, and the retained set must be the reference's, exactly."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from kernel_cases import DEVICES, SITE, Case, Shape, build, call, plane_of
from torch import Tensor

pytest.importorskip("triton")
from sparse_compile.kernels.triton_tuning import Tiles

HEADS = 2
TILES = Tiles(
    block=16, kept_block=16, min_unit=16, max_units=4, min_kept=16, max_kept=2,
    gather_block=4, gather_bytes=16, piece=32, short=256, small_scores=64, sample=32,
)  # fmt: skip
LENGTHS = (1, 2, 3, 4, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 129)
"""Around blocks (16), pieces (32), the tensors of scores (64, 256), and several units."""


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
    scratch = triton_backend.Scratch(attention, TILES, mine.store_view.capacity, TILES.max_units)
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


def rows_of(lengths: tuple[int, ...], retention: str, device: str, keep: tuple[int, int] = (0, 0)) -> Case:
    sequences = tuple((length, 1) for length in lengths)
    shape = Shape(sequences, heads=(HEADS, HEADS), retention=retention, dtype=torch.float32, device=device)
    return build(replace(shape, keep_first=keep[0], keep_last=keep[1]))


KINDS_OF_SCORES = ("normal", "equal", "ties", "zeros", "far apart", "infinite")
SELECTIONS = [(kind, retention, (0, 0)) for kind in KINDS_OF_SCORES for retention in ("0.3", "1.0")]
SELECTIONS += [
    ("normal", "0.3", (2, 3)),
    ("normal", "0.3", (1, 40)),
    ("ties", "0.3", (2, 3)),
    ("ties", "0.1", (20, 0)),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "retention", "keep"), SELECTIONS)
def test_the_set_is_the_best_and_ties_go_to_the_lowest_positions(
    kind: str, retention: str, keep: tuple[int, int], device: str
) -> None:
    case = rows_of(LENGTHS if kind in ("normal", "ties") else LENGTHS[3::3], retention, device, keep)
    lengths = case.plan["row_length"].tolist()
    scores = [some_scores(kind, HEADS, length).to(device) for length in lengths]
    poison = torch.inf if retention == "0.3" else torch.nan
    after = select(case, scores, poison)
    for row, own in enumerate(scores):
        slot, count = int(case.store["row_slot"][row]), case.retention.count(lengths[row])
        assert int(after.store["count"][slot, SITE]) == count
        wanted = own.clone()
        wanted[:, : keep[0]] = wanted[:, max(0, lengths[row] - keep[1]) :] = torch.inf
        best = torch.sort(wanted, dim=1, descending=True, stable=True).indices[:, :count].sort(1).values
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
def test_what_a_row_leaves_depends_on_the_row_alone(device: str) -> None:
    """Neither neighbours nor the width of the block table change a bit, though both change how work is shared."""
    case = build(Shape(((16, 1), (70, 1), (130, 1)), heads=(4, 2), dtype=torch.float32, device=device))
    together, wide = case.copy(), case.copy()
    wide.plan["block_table"] = torch.nn.functional.pad(
        wide.plan["block_table"], (0, 3 * wide.plan["block_table"].shape[1])
    )
    for mine in (together, wide):
        call(mine, "capture", "triton")
    for row in range(case.rows):
        alone, slot = case.select([row]), int(case.store["row_slot"][row])
        call(alone, "capture", "triton")
        for name in ("index", "count", "mass", "o_ref", "c_ref"):
            want = alone.store[name][slot, SITE]
            assert torch.equal(together.store[name][slot, SITE], want), (row, name)
            assert torch.equal(wide.store[name][slot, SITE], want), (row, name)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_number_of_units_per_program_makes_the_same_bits(
    dtype: torch.dtype, heads: tuple[int, int], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparse_compile.kernels import triton_backend

    case = build(Shape(((16, 1), (70, 1), (130, 1)), heads=heads, dtype=dtype, device=device))
    results = []
    for span in (1, 2, 3, 16):
        made = replace(TILES, span=span)
        monkeypatch.setattr(triton_backend, "tiles_for", lambda attention, made=made: made)
        mine = case.copy()
        results.append((call(mine, "capture", "triton"), mine.store["mass"], mine.store["c_ref"]))
    for parts in zip(*results, strict=True):
        for part in parts[1:]:
            assert torch.equal(parts[0].nan_to_num(7.0), part.nan_to_num(7.0))
    assert torch.equal(call(case.copy(), "dense", "triton"), results[0][0])
    wanted = call(case.copy(), "dense", "batched")
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(results[0][0], wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("graphed", [False, True])
def test_selections_beside_what_follows_change_no_bits(graphed: bool) -> None:
    """Captures in a row, a dense call that could reuse their scratch, then what consumes them, in one block."""
    from sparse_compile.kernels.beside import beside

    shapes = [
        Shape(((length, 1), (3000, 1)), heads=(4, 4), dtype=torch.bfloat16, device="cuda")
        for length in (40, 700)
    ]
    plain, mine = ([build(shape) for shape in shapes] for _ in range(2))
    wanted = [call(case, "capture", "triton") for case in plain]
    wanted += [call(case, "consume", "triton") for case in plain]

    def run() -> list[torch.Tensor]:
        with beside(torch.device("cuda")):
            captured = [call(case, "capture", "triton") for case in mine]
            for case in mine:
                call(case, "dense", "triton")
            return captured + [call(case, "consume", "triton") for case in mine]

    found = run()
    if graphed:
        for case in mine:
            for name in ("index", "count", "mass", "o_ref", "c_ref"):
                case.store[name].zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        graph.replay()
    for one, other in zip(wanted, found, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(plain, mine, strict=True):
        slots = one.store["row_slot"].long()
        for name in ("count", "mass", "o_ref", "c_ref"):
            assert torch.equal(one.store[name][slots, SITE], other.store[name][slots, SITE]), name


def test_without_a_second_stream_selections_run_at_once() -> None:
    from sparse_compile.kernels.beside import beside, make_room, run_beside, wait_for

    done: list[int] = []
    with beside(torch.device("cpu")):
        run_beside(torch.device("cpu"), done.append, 0, None, 1)
        assert done == [False]
        make_room(torch.device("cpu"), 1 << 40)
        wait_for(torch.device("cpu"), 0)


def test_work_beside_is_waited_for_where_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on which of two lanes and what waits for what, on a device that only keeps a record."""
    from contextlib import nullcontext

    from sparse_compile.kernels import beside as module

    device, lanes, waited = torch.device("cuda", 0), list[int](), list[str]()

    class Stream:
        def __init__(self, name: str) -> None:
            self.name, self.events = name, 0

        def wait_stream(self, other: object) -> None: ...

        def record_event(self) -> str:
            self.events += 1
            return f"{self.name}{self.events}"

        def wait_event(self, event: str) -> None:
            waited.append(event)

    def work(site: int, size: int) -> None:
        module.run_beside(device, lanes.append, site, None, size)

    main, quarter = Stream("main"), module.HELD_BYTES // 4
    monkeypatch.setattr(module, "_sides", {device: module._Side([Stream("a"), Stream("b")])})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    with module.beside(device):
        for site in range(5):  # a1 b1 a2 b2 a3
            work(site, quarter // 2)
        module.make_room(device, 0)
        assert waited == []
        assert module.wait_for(device, 1)  # with all but the newest of each lane
        assert waited == ["a2", "b1"]
        assert not any(module.wait_for(device, site) for site in (0, 1, 2, 9))
        assert waited == ["a2", "b1"]
        work(5, 2 * quarter)  # b3
        module.make_room(device, 2 * quarter)
        assert waited[2:] == ["b2", "a3"]
        work(6, 1)  # a4
        assert module.wait_for(device, 6)  # the newest itself
        assert waited[4:] == ["b3", "a4"]
        work(7, 1)  # b4
    assert waited[6:] == ["b4"]
    assert lanes == [1, 2, 1, 2, 1, 2, 1, 2]
    work(0, 1)  # no block is open: at once
    assert lanes[-1] == 0
    assert len(waited) == 7

    def failing() -> None:
        with module.beside(device):
            module.run_beside(device, lambda apart: None, 0, None, 1)
            raise KeyError

    with pytest.raises(KeyError):
        failing()
    assert waited[7:] == ["a5"], "an exception leaves nothing behind"


def with_scores(
    kind: str, lengths: tuple[int, ...], dtype: torch.dtype, device: str, keep: tuple[int, int] = (0, 0)
) -> Case:
    """A case whose scores are of one kind: each key holds its score, each query a one."""
    sequences = tuple((length, 1) for length in lengths)
    shape = Shape(sequences, heads=(HEADS, HEADS), retention="0.2", dtype=dtype, device=device)
    case = build(replace(shape, keep_first=keep[0], keep_last=keep[1]))
    case.q.zero_()
    case.q[..., 0] = 1.0
    case.scale = 1.0
    table, page = case.plan["block_table"], case.pool["k_pool"].shape[3]
    for row, length in enumerate(case.plan["row_length"].tolist()):
        own = shaped_scores(kind, length).to(case.q)  # [HEADS, length]
        keys = torch.zeros(length, *case.k.shape[1:]).to(case.q)
        keys[..., 0] = own.T
        plane, sequence = plane_of(case, row), int(case.plan["row_seq"][row])
        for n in range(length - 1):
            case.pool["k_pool"][plane, table[sequence, n // page], :, n % page] = keys[n]
        case.k[row] = keys[-1]
    return case


def shaped_scores(kind: str, length: int) -> Tensor:
    """[HEADS, length]. Units hold 16 keys or more, and guess from their first 16."""
    generator = torch.Generator().manual_seed(length)
    normal = torch.randn(HEADS, length, generator=generator)
    n = torch.arange(length)
    if kind == "equal":
        return torch.full_like(normal, -1.25)
    if kind == "two peaks":
        return normal + 8.0 * (torch.rand(HEADS, length, generator=generator) < 0.1)
    if kind == "one huge":
        return torch.where(n == 3, 60.0, normal * 0.5)
    if kind == "never":
        return torch.where(normal > 0.5, normal, -torch.inf)
    if kind == "local":
        return normal + 6.0 * (n >= length - 16)
    if kind == "a first block unlike the rest":
        return normal + 5.0 * (n % 64 >= 16)
    return normal


KINDS = ["normal", "equal", "two peaks", "one huge", "never", "local", "a first block unlike the rest"]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_good_guesses_and_bad_ones_give_the_same_answer(kind: str, dtype: torch.dtype, device: str) -> None:
    check_capture(with_scores(kind, (5, 31, 130), dtype, device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["normal", "local", "never"])
def test_keys_that_are_always_kept_below_a_guess_are_added(kind: str, device: str) -> None:
    check_capture(with_scores(kind, (5, 130), torch.float32, device, (9, 4)))


def check_capture(case: Case) -> None:
    """Triton's against the batched one."""
    mine, theirs = case.copy(), case.copy()
    out = call(mine, "capture", "triton")
    call(theirs, "capture", "batched")
    assert torch.equal(out, call(case.copy(), "dense", "triton"))
    for row, length in enumerate(case.plan["row_length"].tolist()):
        slot, count = int(case.store["row_slot"][row]), case.retention.count(length)
        assert torch.equal(mine.store["o_ref"][slot, SITE], out[row])
        for name in ("index", "mass", "c_ref"):
            got, want = mine.store[name][slot, SITE], theirs.store[name][slot, SITE]
            if name == "index":
                assert torch.equal(got[:, :count], want[:, :count]), length
            else:
                torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("kind", "helps"), [("normal", True), ("equal", False)])
def test_guesses_are_used_where_they_help(kind: str, helps: bool, device: str) -> None:
    """Fewer values are read than keys retained, and the rest comes from what attention left."""
    from sparse_compile.kernels import triton_backend

    case = with_scores(kind, (130,), torch.float32, device)
    attention = replace(case.attention, k=case.k, v=case.v, query_rows=1)
    out = torch.empty_like(case.q)
    scratch = triton_backend._attend(
        attention, out, triton_backend.MODE_CAPTURE, case.store_view, case.retention
    )
    slot, found = int(case.store["row_slot"][0]), []
    for factor in (1.0, 2.0):
        scratch.guess_acc.mul_(factor)
        scratch.fixes.fill_(-1)
        triton_backend._select(attention, case.store_view, case.retention, scratch)
        found.append(case.store["c_ref"][slot, SITE].clone())
    assert torch.equal(*found) != helps
    if helps:
        fixes = (scratch.fixes >= 0).sum(1)
        assert bool(fixes.any())
        assert bool((fixes < 0.7 * case.retention.count(130)).all())
