"""The Triton kernels against the reference: on CUDA as compiled, on the CPU in Triton's interpreter.

The interpreter is slow, so there the shapes are small and so are the units, which makes rows of a few dozen keys cross
units, merges and partial blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import DEVICES, SITE, Case, Shape, arguments, bits, build, call, live_rows, next_loop
from kernel_oracle import naive_consume, naive_dense

pytest.importorskip("triton")
from sparse_compile.kernels import dispatch
from sparse_compile.kernels.arguments import Attention
from sparse_compile.kernels.triton_tuning import Tiles

SMALL = Tiles(
    block=16, kept_block=16, min_unit=16, max_units=4, min_kept=16, max_kept=2, gather_block=4,
    piece=32, short=128, small_scores=64, sample=32, gather_bytes=16,
)  # fmt: skip
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# Largest difference allowed beyond the error of eager code in the same dtype, both against float64. Outputs stay below
# 8 in size. float32: a few ulps of sums in another order. Half precision: probabilities are rounded to the values'
# dtype before they meet the values, as eager code rounds them, but relative to the running maximum of a block.
MARGIN = {torch.float32: 4e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")
    from sparse_compile.kernels import triton_backend

    monkeypatch.setattr(triton_backend, "tiles_for", lambda attention: SMALL)


def assert_as_good_as_eager(got: torch.Tensor, eager: torch.Tensor, truth: torch.Tensor) -> None:
    mine, theirs = ((x.double() - truth).abs().max().item() for x in (got, eager))
    assert mine <= theirs + MARGIN[got.dtype], f"error {mine:.3g}, eager {theirs:.3g}"


def run(case: Case, op: str) -> tuple[torch.Tensor, Case]:
    mine = case.copy()
    return call(mine, op, "triton"), mine


def assert_agrees(case: Case) -> None:
    """Dense, capture and consume of one case: outputs, store, and bits between dense and capture."""
    exact = case.to(torch.float64)
    dense, _ = run(case, "dense")
    captured, after = run(case, "capture")
    assert torch.equal(dense, captured)
    assert_as_good_as_eager(dense, naive_dense(case), call(exact.copy(), "dense", "reference"))
    ungated = captured if case.gate is None else run(case.ungated, "dense")[0]
    theirs = case.copy()
    call(theirs, "capture", "batched")
    for row in live_rows(case):
        slot = int(case.store["row_slot"][row])
        count = int(theirs.store["count"][slot, SITE])
        assert int(after.store["count"][slot, SITE]) == count
        assert torch.equal(
            after.store["index"][slot, SITE, :, :count], theirs.store["index"][slot, SITE, :, :count]
        )
        for name in ("mass", "c_ref"):
            torch.testing.assert_close(
                after.store[name][slot, SITE], theirs.store[name][slot, SITE], rtol=2e-5, atol=2e-5
            )
        assert torch.equal(after.store["o_ref"][slot, SITE], ungated[row])
    later = next_loop(after)
    consumed, _ = run(later, "consume")
    assert_as_good_as_eager(
        consumed, naive_consume(later), call(later.to(torch.float64), "consume", "reference")
    )


SHAPES = {
    "ragged": Shape(((1, 1), (13, 1), (30, 1), (70, 1)), heads=(4, 4), padding=1),
    "grouped, gated": Shape(((1, 1), (33, 1), (65, 1)), heads=(6, 2), head_dim=12, page_size=3, gated=True),
    "chunk, gated": Shape(((5, 3), (40, 4)), heads=(2, 1), head_dim=16, padding=1, gated=True),
    "softcap": Shape(((33, 1), (40, 1)), heads=(4, 2), softcap=5.0),
    "ties": Shape(((33, 1), (64, 1)), heads=(2, 2), integers=True),
    "retain few": Shape(((33, 1), (100, 1)), heads=(2, 2), retention="0.01"),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_the_reference(device: str, dtype: torch.dtype, shape: Shape) -> None:
    assert_agrees(build(replace(shape, device=device, dtype=dtype)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("heads", [(3, 1), (5, 1), (7, 1), (8, 1), (16, 2), (1, 1)])
@pytest.mark.parametrize("head_dim", [72, 80, 96, 128, 256])
def test_every_head_ratio_and_dimension(device: str, heads: tuple[int, int], head_dim: int) -> None:
    if device == "cpu" and (heads not in ((3, 1), (1, 1)) or head_dim not in (72, 128)):
        pytest.skip("one corner of the grid is enough for the interpreter; the GPU runs all of it")
    assert_agrees(
        build(Shape(((37, 1),), heads=heads, head_dim=head_dim, dtype=torch.float32, device=device))
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [*range(1, 9), 16, 17, 32, 33])
def test_lengths_around_blocks_and_retention(device: str, length: int) -> None:
    shape = Shape(((length, 1),), heads=(2, 2), retention="0.5", dtype=torch.float32, device=device)
    assert_agrees(build(shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [1, 5, 16, 40, 100])
def test_sliding_window(device: str, window: int) -> None:
    case = build(
        Shape(((3, 1), (30, 1), (70, 1)), heads=(4, 2), window=window, dtype=torch.float32, device=device)
    )
    got, _ = run(case, "dense")
    assert_as_good_as_eager(got, naive_dense(case), call(case.to(torch.float64), "dense", "reference"))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_does_not_depend_on_its_neighbours(device: str) -> None:
    shape = Shape(((70, 1), (3, 1), (41, 1), (16, 1)), heads=(4, 2), dtype=torch.bfloat16, device=device)
    case = build(shape)
    together, after = run(case, "capture")
    later = next_loop(after)
    consumed, _ = run(later, "consume")
    for row in live_rows(case):
        assert torch.equal(run(case.select([row]), "capture")[0][0], together[row])
        assert torch.equal(run(later.select([row]), "consume")[0][0], consumed[row]), "consume"
    order = [2, 0, 3, 1]
    permuted, _ = run(case.select(order), "capture")
    assert torch.equal(permuted, together[order])
    assert torch.equal(run(case, "capture")[0], together)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_touches_the_dummy_only(device: str) -> None:
    case = build(Shape(((9, 1),), heads=(2, 2), padding=3, dtype=torch.float32, device=device, gated=True))
    before = {name: value.clone() for name, value in bits(case.store | case.pool).items()}
    rows = [row for row in range(case.rows) if row not in live_rows(case)]
    padding = case.select(rows)
    out, after = run(padding, "capture")
    assert torch.equal(out, torch.zeros_like(out))
    for name, value in bits(after.store | after.pool).items():
        if name == "row_slot":
            continue
        own = (slice(None), slice(1, None)) if name in after.pool else slice(1, None)
        assert torch.equal(value[own], before[name][own]), name


@pytest.mark.parametrize("device", DEVICES)
def test_an_empty_slot_gives_nan_not_numbers(device: str) -> None:
    """The row's own key is written all the same."""
    case = build(Shape(((20, 1),), heads=(2, 2), dtype=torch.float32, device=device, gated=True))
    case.store["count"].zero_()
    written = case.copy()
    from sparse_compile.kernels import triton_backend

    attention = replace(case.attention, k=case.k, v=case.v, query_rows=1)
    out = torch.zeros_like(case.q)
    triton_backend.consume(attention, case.store_view, out)
    assert bool(out.isnan().all())
    call(written, "dense", "batched")
    for name, pool in case.pool.items():
        assert torch.equal(pool.nan_to_num(7.0), written.pool[name].nan_to_num(7.0))


@pytest.mark.parametrize("device", DEVICES)
def test_writing_fused_equals_writing_first(device: str) -> None:
    case = build(Shape(((33, 1), (70, 1)), heads=(4, 2), dtype=torch.float32, device=device))
    results = []
    for query_rows in (0, 1):
        from sparse_compile.kernels import triton_backend

        mine = case.copy()
        out = torch.empty_like(mine.q)
        triton_backend.dense(replace(mine.attention, k=mine.k, v=mine.v, query_rows=query_rows), out)
        results.append((out, *mine.pool.values()))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("window", [0, 13])
@pytest.mark.parametrize(("heads", "dim"), [((4, 2), 8), ((32, 1), 80)], ids=["share", "too many for a tile"])
def test_rows_of_one_sequence_share_a_tile(
    device: str, window: int, heads: tuple[int, int], dim: int
) -> None:
    """Blocks of four rows; two rows of the last block are padding."""
    sequences = ((40, 4), (21, 4), (35, 2))
    case = build(
        Shape(sequences, heads, dim, padding=2, window=window, dtype=torch.float32, device=device, gated=True)
    )
    case = case.select(in_blocks(case, sequences=3))
    from sparse_compile.kernels import triton_backend

    mine = case.copy()
    out = torch.full_like(mine.q, 7.0)
    triton_backend.dense(replace(mine.attention, k=mine.k, v=mine.v, query_rows=4), out)
    assert_as_good_as_eager(out, naive_dense(case), call(case.to(torch.float64), "dense", "reference"))
    assert not out[-2:].any()


def in_blocks(case: Case, sequences: int) -> list[int]:
    """Rows by sequence and position, padding last."""
    places = zip(case.plan["row_seq"].tolist(), case.plan["row_position"].tolist(), strict=True)
    where = [(sequence or sequences + 1, position) for sequence, position in places]
    return sorted(range(case.rows), key=where.__getitem__)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_that_share_a_tile_are_captured(device: str) -> None:
    """What each row selects is what it selects on its own, given the same scores."""
    sequences = ((40, 4), (70, 4))
    case = build(Shape(sequences, heads=(4, 2), dtype=torch.float32, integers=True, device=device))
    case = case.select(in_blocks(case, sequences=2))
    args, kwargs = arguments(shared := case.copy(), "capture", "triton")
    together = torch.ops.sparse_compile.capture(*args, **kwargs, query_rows=4)
    out, alone = run(case, "capture")
    torch.testing.assert_close(together, out, rtol=1e-5, atol=1e-5)
    for row in range(case.rows):
        slot = int(case.store["row_slot"][row])
        count = int(alone.store["count"][slot, SITE])
        assert int(shared.store["count"][slot, SITE]) == count
        assert torch.equal(
            shared.store["index"][slot, SITE, :, :count], alone.store["index"][slot, SITE, :, :count]
        )
        for name in ("mass", "c_ref"):
            torch.testing.assert_close(shared.store[name][slot, SITE], alone.store[name][slot, SITE])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("captures", [True, False])
def test_mixed_rows(device: str, captures: bool) -> None:
    sequences = ((33, 1), (40, 1), (70, 1), (9, 1))
    case = build(Shape(sequences, heads=(4, 2), dtype=torch.float32, device=device, gated=True))
    _, captured = run(case, "capture")
    later = next_loop(captured)
    modes = [1, 2 if captures else 1, 3, 0]
    later = replace(later, row_mode=torch.tensor(modes, dtype=torch.int32, device=device))
    after = later.copy()
    args, kwargs = arguments(after, "mixed", "triton")
    got = torch.ops.sparse_compile.mixed(*args, **kwargs, captures=captures)
    singles = {1: run(later, "dense")[0], 2: run(later, "capture")[0], 3: run(later, "consume")[0]}
    for row, mode in enumerate(modes):
        want = singles[mode][row] if mode else torch.zeros_like(got[row])
        assert torch.equal(got[row], want), f"row {row}, mode {mode}"
    if captures:
        alone = run(later, "capture")[1]
        slot = int(later.store["row_slot"][1])
        for name in ("index", "count", "mass", "o_ref", "c_ref"):
            assert torch.equal(after.store[name][slot, SITE], alone.store[name][slot, SITE]), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["dense", "capture", "consume"])
def test_strides_of_a_gate_do_not_matter(device: str, op: str) -> None:
    """Columns of a wider product, heads first, and one number for a whole head."""
    if device == "cpu" and op != "consume":
        pytest.skip("one op is enough for the interpreter; the GPU runs all of them")
    shape = Shape(((33, 1), (70, 1)), heads=(2, 1), dtype=torch.bfloat16, device=device, gated=True)
    case = build(shape)
    call(case, "capture", "batched")
    later = next_loop(case)
    assert later.gate is not None
    wide = torch.full((later.rows, 2, 24), torch.nan, dtype=later.gate.dtype, device=device)
    wide[..., 8:16] = later.gate
    views = [wide[..., 8:16], later.gate.transpose(0, 1).contiguous().transpose(0, 1)]
    views.append(later.gate[..., :1].expand_as(later.gate))
    for gate in views:
        got, _ = run(replace(later, gate=gate), op)
        assert torch.equal(got, run(replace(later, gate=gate.contiguous()), op)[0])
        assert not torch.equal(got, run(later.ungated, op)[0])


@pytest.mark.gpu
def test_keys_are_written_when_what_is_ahead_is_done() -> None:
    """By a kernel of its own, of rows that others read: each call overwrites keys that the one ahead has just read."""
    sequences = ((3000, 4), (1500, 4), (17, 4))
    case = build(Shape(sequences, heads=(4, 4), head_dim=64, dtype=torch.bfloat16, device="cuda"))
    fresh = [(case.k * scale, case.v * scale) for scale in (1.0, -2.0, 0.5, 3.0)]

    def chain(mine: Case, settle: Callable[[], None]) -> list[torch.Tensor]:
        outs = []
        for k, v in fresh:
            outs.append(call(replace(mine, k=k, v=v), "dense", "triton"))
            settle()
        return outs

    want = chain(case.copy(), torch.cuda.synchronize)
    mine, graph = case.copy(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = chain(mine, lambda: None)
    for _ in range(20):
        graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(got, one) for got, one in zip(outs, want, strict=True))


@pytest.mark.gpu
def test_graph_replay_with_other_lengths_counts_and_modes() -> None:
    """One captured graph serves every length and mode that fits its block table."""
    sequences = ((90, 1), (70, 1), (40, 1))
    shape = Shape(sequences, heads=(4, 2), dtype=torch.bfloat16, device="cuda", gated=True)
    case = build(shape)
    static = case.copy()
    for _ in range(2):
        call(static, "capture", "triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(static, "capture", "triton")
    longest = case.plan["row_length"].clone()
    for lengths in ((90, 70, 90), (17, 33, 2), (1, 16, 40)):
        chosen = torch.minimum(torch.tensor(lengths, dtype=torch.int32, device="cuda"), longest)
        static.plan["row_length"].copy_(chosen)
        static.plan["row_position"].copy_(chosen - 1)
        graph.replay()
        torch.cuda.synchronize()
        eager = static.copy()
        assert torch.equal(call(eager, "capture", "triton"), out)
        assert torch.equal(eager.store["count"], static.store["count"])


def test_auto_is_batched_on_the_cpu_and_obstacles_are_named() -> None:
    case = build(Shape(((9, 1),), dtype=torch.float32))
    assert torch.equal(call(case.copy(), "dense", "auto"), call(case.copy(), "dense", "batched"))
    assert "float64" in dispatch.triton_obstacle("cpu", torch.float64, 64)
    assert "head_dim 512" in dispatch.triton_obstacle("cpu", torch.float32, 512)
    with pytest.raises(ValueError, match=r'cannot run here: .*use implementation="batched"'):
        call(build(Shape(((9, 1),), dtype=torch.float64)), "dense", "triton")


@pytest.mark.parametrize("processors", [1, 132])
@given(pages=st.integers(1, 4000), lines=st.integers(1, 4000), mode=st.integers(0, 1))
def test_every_row_has_its_programs(processors: int, pages: int, lines: int, mode: int) -> None:
    """Shorter rows may have more units than the longest that the table could hold."""
    from triton import cdiv

    from sparse_compile.kernels import triton_backend

    table, pool = torch.zeros(2, pages, dtype=torch.int32), torch.zeros(1, 1, 1, 16, 8)
    nothing = torch.zeros(1, dtype=torch.int32)
    a = Attention(pool[0], pool, pool, table, *[nothing] * 4, plane=0, plane_stride=0, scale=1.0)
    for tiles in (SMALL, Tiles()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_backend, "_multiprocessors", lambda device: processors)
            programs, span, _ = triton_backend._grid(tiles, a, mode, lines, None)
        keys = pages * 16
        for length in {
            1,
            keys,
            *range(max(1, keys - 200), keys),
            *(1 + keys * i // 17 for i in range(1, 17)),
        }:
            unit = max(tiles.min_unit, cdiv(cdiv(length, tiles.max_units), tiles.block) * tiles.block)
            assert cdiv(length, unit) <= programs * span


@pytest.mark.parametrize(
    ("rows", "keys", "expected"),
    [
        (2, 33_000, (16, 1, 2)),  # all of 512 programs run at once
        (1, 8_200, (16, 1, 4)),  # 256 programs: two on each multiprocessor
        (1, 1_024, (4, 1, 3)),  # fewer than there are multiprocessors
        (8, 8_192, (4, 4, 2)),
        (32, 8_192, (16, 1, 3)),  # more than can run at once
    ],
)
def test_programs_fill_a_gpu_of_132_multiprocessors(
    rows: int, keys: int, expected: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparse_compile.kernels import triton_backend

    table = torch.zeros(2, -(-keys // 16), dtype=torch.int32)
    pool = torch.zeros(1, 1, 1, 16, 128, dtype=torch.bfloat16)
    nothing = torch.zeros(1, dtype=torch.int32)
    a = Attention(pool[0, 0], pool, pool, table, *[nothing] * 4, plane=0, plane_stride=0, scale=1.0)
    monkeypatch.setattr(triton_backend, "_multiprocessors", lambda device: 132)
    monkeypatch.setattr(triton_backend, "_shared_bytes", lambda device: 233_472)
    assert triton_backend._grid(Tiles(), a, 0, 16 * rows, None) == expected
    monkeypatch.setattr(triton_backend, "_shared_bytes", lambda device: 102_400)
    programs, span, stages = expected
    assert triton_backend._grid(Tiles(), a, 0, 16 * rows, None) == (programs, span, min(stages, 3))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.bfloat16, 128),
        (torch.float16, 96),
        (torch.bfloat16, 64),
        (torch.float16, 80),
        (torch.bfloat16, 16),
    ],
    ids=str,
)
def test_few_retained_keys_take_a_smaller_step_with_the_same_bits(
    device: str, dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparse_compile.kernels import triton_backend

    lengths = tuple((length, 1) for length in (1, 2, 17, 60, 64, 100, 126))
    shape = Shape(lengths, heads=(4, 2), head_dim=head_dim, dtype=dtype, device=device, retention="0.5")
    _, captured = run(build(shape), "capture")
    later, found = next_loop(captured), []
    for few in (64, 128):
        tiles = Tiles(few_kept=few)
        steps = tiles.consuming(captured.store_view.capacity)[0]
        assert steps == few, "both sizes of a step are compared"
        monkeypatch.setattr(triton_backend, "tiles_for", lambda attention, tiles=tiles: tiles)
        found.append(run(later, "consume")[0])
    assert not found[0].isnan().any()
    if device == "cpu":  # a product in the interpreter may add in another order where there are more zeros
        torch.testing.assert_close(*found, rtol=0, atol=MARGIN[dtype])
    else:
        assert torch.equal(*found)


def widened(case: Case, pages: int, kept: int) -> Case:
    """The same rows in a table of so many pages, with a store for so many retained keys."""
    table = torch.nn.functional.pad(case.plan["block_table"], (0, pages - case.plan["block_table"].shape[1]))
    index = torch.nn.functional.pad(case.store["index"], (0, kept - case.store["index"].shape[-1]))
    wide = replace(case, plan=case.plan | {"block_table": table}, store=case.store | {"index": index})
    return wide.copy()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_wider_table_and_a_larger_store_change_no_bits(
    device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many partial results a launch has room for follows from them; a row's own keys decide about its bits."""
    from sparse_compile.kernels import triton_backend

    tiles = replace(SMALL, max_units=16, max_kept=8)
    monkeypatch.setattr(triton_backend, "tiles_for", lambda attention: tiles)
    slots: list[int] = []
    scratch = triton_backend.Scratch

    def noted(*args: object) -> object:
        made = scratch(*args)
        slots.append(made.units)
        return made

    monkeypatch.setattr(triton_backend, "Scratch", noted)
    narrow = build(
        Shape(((1, 1), (17, 1), (40, 1), (60, 1)), heads=(4, 2), dtype=dtype, device=device, retention="0.9")
    )
    found = []
    for case in (narrow.copy(), widened(narrow, pages=60, kept=100)):
        captured, after = run(case, "capture")
        found.append((run(case, "dense")[0], captured, run(next_loop(after), "consume")[0], after.store))
    assert slots == [4, 4, 4, 16, 16, 8]
    for ours, theirs in zip(found[0][:3], found[1][:3], strict=True):
        assert torch.equal(ours, theirs)
    for name in ("count", "mass", "c_ref", "o_ref"):
        assert torch.equal(bits(found[0][3])[name], bits(found[1][3])[name])
