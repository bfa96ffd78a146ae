"""Products of a few rows: the ops against their definition, and the Triton kernel (interpreted on the CPU)."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_compile.kernels import skinny

pytest.importorskip("triton")
from sparse_compile.kernels import skinny_choice
from sparse_compile.kernels.skinny_choice import AHEAD, AHEAD_ROWS
from sparse_compile.kernels.skinny_tuning import Gpu, Product, Tiles, default_tiles, padded_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Tiles(lines=16, columns=128, slices=2, stages=2)
HALF = [torch.bfloat16, torch.float16]
KINDS = ["linear", "gated", "add"]

# Largest error allowed beyond that of eager code, both against float64, relative to the largest result: sums in float32
# in another order than the library's. Triton's interpreter rounds bfloat16 towards zero: one unit in the last place.
MARGIN = 1e-5
INTERPRETED = {torch.bfloat16: 2**-7, torch.float16: 0.0}


@pytest.fixture(autouse=True)
def _runnable() -> None:
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")


def operands(
    kind: str, rows: int, width: int, depth: int, dtype: torch.dtype, bias: bool = False, seed: int = 0
) -> dict[str, torch.Tensor | None]:
    g = torch.Generator().manual_seed(seed)
    lines = width * (2 if kind == "gated" else 1)

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(DEVICE, dtype)

    return {
        "x": values(rows, depth),
        "weight": values(lines, depth) / depth**0.5,
        "bias": values(lines) if bias else None,
        "residual": values(rows, width) if kind == "add" else None,
    }


def kernel(
    kind: str,
    tiles: Tiles = SMALL,
    rotary: skinny.Rotary | None = None,
    norm: skinny.Norm | None = None,
    up: torch.Tensor | None = None,
    **given: torch.Tensor | None,
) -> torch.Tensor:
    from sparse_compile.kernels.skinny_backend import launch

    gated = kind == "gated"
    return launch(**given, gated=gated, tiles=tiles, rotary=rotary, norm=norm, up=up)  # type: ignore[arg-type]


def assert_as_good_as_eager(
    kind: str,
    got: torch.Tensor,
    given: dict[str, torch.Tensor | None],
    rotary: skinny.Rotary | None = None,
    norm: skinny.Norm | None = None,
    more: float = 0.0,
) -> None:
    """more: a further margin, for what is rounded on the way."""
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    turned = None if rotary is None else rotary.to(torch.float64)
    normed = None if norm is None else norm.to(torch.float64)
    truth = skinny.define(**exact, gated=kind == "gated", rotary=turned, norm=normed)  # type: ignore[arg-type]
    eager = skinny.eager(**given, gated=kind == "gated", rotary=rotary, norm=norm)  # type: ignore[arg-type]
    mine, theirs = ((x.double() - truth).abs().max().item() for x in (got, eager))
    margin = MARGIN + more + (INTERPRETED[got.dtype] if got.device.type == "cpu" else 0)
    assert mine <= theirs + margin * truth.abs().max().item(), f"error {mine:.3g}, eager {theirs:.3g}"


@settings(max_examples=16, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, 64),
    width=st.integers(1, 70),
    depth=st.integers(1, 400),
    dtype=st.sampled_from(HALF),
    bias=st.booleans(),
    tiles=st.sampled_from(
        [
            SMALL,
            Tiles(lines=16, columns=256, slices=4, stages=2),
            Tiles(lines=16, columns=64, slices=1, splits=3, stages=2),
            Tiles(lines=16, columns=128, slices=2, splits=2, stages=2),
            Tiles(lines=32, columns=512, slices=8, stages=2, warps=8),
        ]
    ),
)
def test_the_kernel_is_as_good_as_eager_code(
    kind: str, rows: int, width: int, depth: int, dtype: torch.dtype, bias: bool, tiles: Tiles
) -> None:
    given = operands(kind, rows, width, depth, dtype, bias)
    assert_as_good_as_eager(kind, kernel(kind, tiles, **given), given)


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 20),
    width=st.integers(1, 70),
    depth=st.integers(1, 300),
    dtype=st.sampled_from(HALF),
    tiles=st.sampled_from([SMALL, replace(SMALL, splits=2), replace(SMALL, slices=1)]),
    before=st.booleans(),
)
def test_gate_and_up_may_lie_anywhere(
    rows: int, width: int, depth: int, dtype: torch.dtype, tiles: Tiles, before: bool
) -> None:
    """The bits of one weight [gate; up], wherever the two are, up before gate too."""
    given = operands("gated", rows, width, depth, dtype)
    x, weight = given["x"], given["weight"]
    assert isinstance(x, torch.Tensor)
    assert isinstance(weight, torch.Tensor)
    whole = kernel("gated", tiles, **given)
    room = torch.full((3 * width + 5, depth), float("nan"), dtype=dtype, device=DEVICE)
    places = (slice(-width, None), slice(0, width)) if before else (slice(0, width), slice(-width, None))
    gate, up = (room[place].copy_(half) for place, half in zip(places, weight.chunk(2), strict=True))
    assert torch.equal(kernel("gated", tiles, up=up, **{**given, "weight": gate}), whole)
    made, wanted = (
        skinny.gated(x, *of, fixed=True, up=other) for of, other in (((gate,), up), ((weight,), None))
    )
    if DEVICE == "cuda":
        assert torch.equal(made, wanted)
    else:  # two products of a library add in another order than one of twice the width
        torch.testing.assert_close(made, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_two_weights_that_are_no_gate_and_up_are_refused() -> None:
    x, weight = torch.randn(2, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    for up, bias, message in (
        (weight[:4], None, r"up has shape .*\[4, 8\].* they must agree"),
        (weight.float(), None, "up has dtype torch.float32"),
        (torch.randn(6, 16).bfloat16()[:, :8], None, r"up has strides \(16, 1\), gate \(8, 1\)"),
        (weight, weight[:, 0], r"pass weight=\[gate; up\] and no up"),
    ):
        with pytest.raises(ValueError, match=message):
            torch.ops.sparse_compile.skinny_gated(x, weight, bias, up=up)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tiles", [SMALL, replace(SMALL, splits=2), replace(SMALL, slices=1)])
def test_a_row_does_not_know_the_others(dtype: torch.dtype, tiles: Tiles) -> None:
    """Same bits alone, among others, in another order, beside NaN, and with any padding."""
    given = operands("linear", 33, 40, 300, dtype)
    x, whole = given["x"], kernel("linear", tiles, **given)
    assert isinstance(x, torch.Tensor)
    for rows in (1, 2, 8, 17):
        assert torch.equal(kernel("linear", tiles, **{**given, "x": x[:rows]}), whole[:rows]), rows
    order = torch.randperm(33, generator=torch.Generator().manual_seed(1)).to(x.device)
    assert torch.equal(kernel("linear", tiles, **{**given, "x": x[order]}), whole[order])
    poisoned = x.clone()
    poisoned[5] = float("nan")
    made = kernel("linear", tiles, **{**given, "x": poisoned})
    assert torch.equal(made[:5], whole[:5])
    assert torch.equal(made[6:], whole[6:])
    assert made[5].isnan().all()


@pytest.mark.parametrize("kind", ["linear", "add"])
def test_any_sizes_take_every_column_once(kind: str) -> None:
    """Small integers: every order of addition is exact."""
    given = operands(kind, 5, 48, 600, torch.float16)
    given = {name: None if x is None else (x * 40).round().clamp(-2, 2) for name, x in given.items()}
    want = skinny.define(**given)  # type: ignore[arg-type]
    for slices, columns, splits in (
        (1, 64, 1),
        (1, 128, 5),
        (2, 512, 2),
        (4, 256, 3),
        (4, 1024, 1),
        (8, 512, 1),
    ):
        tiles = Tiles(slices=slices, columns=columns, splits=splits, stages=2, warps=8)
        assert torch.equal(kernel(kind, tiles, **given), want), tiles


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF)
def test_other_sizes_change_no_bits(kind: str, dtype: torch.dtype) -> None:
    """On the CPU a product of blocks adds in an order of its own, so this holds of the tensor cores only."""
    given = operands(kind, 64, 5632, 2048, dtype)
    base = Tiles(columns=256, stages=3)
    want = kernel(kind, base, **given)
    sizes = {"columns": 512}, {"stages": 5}, {"lines": 32}, {"lines": 64, "warps": 8}, {"warps": 8}
    for change in (*sizes, {"pdl": True, "ahead": AHEAD}):
        for rows in (1, 8, 9, 32, 64):
            some = {**given, "x": given["x"][:rows]}  # type: ignore[index]
            if kind == "add":
                some["residual"] = given["residual"][:rows]  # type: ignore[index]
            try:
                made = kernel(kind, replace(base, **change), **some)
            except Exception as error:
                if type(error).__name__ != "OutOfResources":
                    raise
                continue
            assert torch.equal(made, want[:rows]), (change, rows)
    assert not torch.equal(kernel(kind, replace(base, splits=3), **given), want), "an order can be seen"


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 16, 32, 64])
@pytest.mark.parametrize("shape", [(6144, 2048), (2048, 5632), (2048, 2048), (5632, 2048)])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_1_4b_model(kind: str, shape: tuple[int, int], rows: int) -> None:
    given = operands(kind, rows, *shape, torch.bfloat16)
    product = Product(rows, shape[0], shape[1], kind == "gated")
    for tiles in (default_tiles(product), replace(default_tiles(product), pdl=True, ahead=AHEAD)):
        assert_as_good_as_eager(kind, kernel(kind, tiles, **given), given)


@pytest.mark.gpu
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("ahead", [0, AHEAD, 2048])
def test_an_early_start_waits_for_what_it_reads(ahead: int, splits: int) -> None:
    """A chain of products in a CUDA graph, each of which reads the result and scratch memory of the one before."""
    late = Tiles(columns=256, splits=splits)
    early = replace(late, pdl=True, ahead=ahead)
    weights = [operands("linear", 1, 2048, 2048, torch.bfloat16, seed=seed)["weight"] for seed in range(8)]
    start = operands("linear", 4, 1, 2048, torch.bfloat16)["x"]

    def chain(tiles: Tiles) -> torch.Tensor:
        x = start
        for weight in weights * 8:
            x = kernel("linear", tiles, x=x, weight=weight, bias=None, residual=None)
        assert x is not None
        return x

    want = chain(late)
    chain(early)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = chain(early)
    for _ in range(20):
        made.zero_()
        graph.replay()
        assert torch.equal(made, want)


def test_splits_leave_the_counters_at_zero() -> None:
    from sparse_compile.kernels.arrivals import arrivals

    tiles = replace(SMALL, splits=3, columns=128)
    given = operands("add", 4, 100, 500, torch.bfloat16)
    first = kernel("add", tiles, **given)
    assert not arrivals(first.device, 1).any()
    assert torch.equal(kernel("add", tiles, **given), first)


def test_strides() -> None:
    given = operands("add", 6, 40, 200, torch.bfloat16)
    want = kernel("add", **given)
    spread: dict[str, torch.Tensor | None] = {"bias": None}
    for name in ("x", "weight", "residual"):
        tensor = given[name]
        assert tensor is not None
        wide = torch.full((tensor.shape[0] * 2, tensor.shape[1] + 24), float("nan")).to(tensor)
        wide[::2, 8:-16] = tensor
        spread[name] = wide[::2, 8:-16]
    assert torch.equal(kernel("add", **spread), want)
    across = {
        **given,
        "x": given["x"].t().contiguous().t(),
        "residual": given["residual"].t().contiguous().t(),
    }  # type: ignore[union-attr]
    assert torch.equal(kernel("add", **across), want)


# ---------------------------------------------------------------------- the ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [(2, 1), (), (0,)])
def test_opcheck(kind: str, dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    """Schema, fake and tracing agree with the real op. This proves no numbers; other tests compare those."""
    given = operands(kind, 1, 8, 16, dtype, bias=True)
    x, weight, bias = torch.randn(*lead, 16).to(DEVICE, dtype), given["weight"], given["bias"]
    args = (x, weight, torch.randn(*lead, 8).to(x), bias) if kind == "add" else (x, weight, bias)
    torch.library.opcheck(getattr(torch.ops.sparse_compile, f"skinny_{kind}").default, args)


@pytest.mark.parametrize("kind", KINDS)
def test_an_op_is_its_definition(kind: str) -> None:
    given = operands(kind, 4, 24, 40, torch.bfloat16, bias=True)
    args = [x for x in (given["x"], given["weight"], given["residual"], given["bias"]) if x is not None]
    got = getattr(torch.ops.sparse_compile, f"skinny_{kind}")(*args)
    if DEVICE == "cpu":
        assert torch.equal(got, skinny.define(**given, gated=kind == "gated"))  # type: ignore[arg-type]
    assert_as_good_as_eager(kind, got, given)


def test_refusals() -> None:
    ops, x, w = torch.ops.sparse_compile, torch.ones(2, 4), torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"x \(2, 4\) and weight \(6, 5\) do not fit"):
        ops.skinny_linear(x, torch.ones(6, 5))
    with pytest.raises(ValueError, match="weight has 5 lines; gate and up need an even number"):
        ops.skinny_gated(x, torch.ones(5, 4))
    with pytest.raises(ValueError, match=r"bias \(4,\) must have one value for each of 6 lines"):
        ops.skinny_linear(x, w, torch.ones(4))
    with pytest.raises(ValueError, match=r"residual \(6,\) must have the shape of the result, \(2, 6\)"):
        ops.skinny_add(x, w, torch.ones(6))
    with pytest.raises(ValueError, match=r"weight is torch.float16 on cpu, x torch.float32"):
        ops.skinny_linear(x, w.half())


def test_obstacles() -> None:
    w = torch.ones(6, 4)
    assert skinny.obstacle(torch.float16, w) == ""
    assert "no kernel for torch.float32" in skinny.obstacle(torch.float32, w)
    assert "not contiguous" in skinny.obstacle(torch.float16, w.t())


# ---------------------------------------------------------------------- tiles


@settings(max_examples=200, deadline=None)
@given(
    rows=st.integers(1, 64),
    width=st.integers(1, 200_000),
    depth=st.integers(1, 50_000),
    gated=st.booleans(),
    gpu=st.sampled_from([Gpu(), Gpu(108, 164 << 10), Gpu(128, 100 << 10), Gpu(40, 64 << 10)]),
)
def test_default_tiles_fit_and_add_in_one_order(
    rows: int, width: int, depth: int, gated: bool, gpu: Gpu
) -> None:
    tiles = default_tiles(Product(rows, width, depth, gated), gpu)
    held = (tiles.lines * (2 if gated else 1) + padded_rows(rows, tiles.slices)) * tiles.columns * 2
    assert held * max(1, tiles.stages - 1) <= gpu.shared_bytes - 1024, "shared memory of one multiprocessor"
    assert (tiles.slices, tiles.splits) == (4, 1)
    assert tiles.stages > 2 or gpu.shared_bytes < 100 << 10 or depth <= 2 * tiles.columns, (
        "loads overlap with products"
    )


def test_tiles_for_the_layers_of_a_1_4b_model_make_one_wave() -> None:
    for width, gated in ((6144, False), (2048, False), (5632, True)):
        for rows in (1, 8, 16):
            assert -(-width // default_tiles(Product(rows, width, 2048, gated)).lines) <= 3 * 132


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("norm", ["", "norm", "weighted norm"])
def test_few_rows_ask_for_columns_while_they_wait(
    early: bool, norm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With and without a kernel for the norm; where kernels do not start early there is no wait."""
    monkeypatch.setattr(skinny_choice, "starts_early", lambda device: early)
    monkeypatch.setattr(skinny_choice, "default_choice", skinny_choice.default_choice.__wrapped__)
    shape = skinny_choice.Shape(4096, 2048, False, torch.bfloat16, torch.device("cpu"), norm)
    for rows in skinny_choice.BUCKETS:
        wanted = AHEAD if early and rows <= AHEAD_ROWS else 0
        tried = [skinny_choice.default_choice(shape, rows), *skinny_choice.candidates(shape, rows)]
        assert all((tiles.pdl, tiles.ahead) == (early, wanted) for tiles in tried)
    weight = torch.empty(4096, 2048, dtype=torch.bfloat16, device="meta")
    assert skinny_choice.fixed_tiles(8, weight, False).ahead == (AHEAD if early else 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lines": 24}, "lines=24 must be a power of two"),
        ({"slices": 8}, "slices=8 must be between 1 and 8 and at most warps=4"),
        ({"columns": 64}, "columns=64 must hold 64 columns for each of slices=2"),
        ({"splits": 0}, "splits=0"),
        ({"ahead": 100}, "ahead=100 must be 0, or a power of two"),
    ],
)
def test_tiles_that_cannot_be(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


# ---------------------------------------------------------------------- rotated heads


def rotary_operands(
    rows: int, size: int, turned: int, heads: int, depth: int, bias: bool, dtype: torch.dtype = torch.float16
) -> tuple[dict[str, torch.Tensor | None], skinny.Rotary]:
    """`turned` of `heads` heads of `size` are rotated; the halves of a head have angles of their own."""
    given = operands("linear", rows, heads * size, depth, dtype, bias)
    g = torch.Generator().manual_seed(rows + size)
    cos, sin = (torch.rand(rows, size, generator=g).mul(7).cos().to(DEVICE, dtype) for _ in "cs")
    return given, skinny.Rotary(cos, sin, turned * size)


@settings(max_examples=12, deadline=None)
@given(
    rows=st.integers(1, 20),
    size=st.sampled_from([2, 6, 16, 64]),
    turned=st.integers(0, 3),
    others=st.integers(0, 2),
    depth=st.integers(1, 200),
    bias=st.booleans(),
    tiles=st.sampled_from([SMALL, replace(SMALL, splits=2), Tiles(lines=32, columns=64, slices=1, stages=2)]),
)
def test_rotated_heads_are_as_good_as_eager_code(
    rows: int, size: int, turned: int, others: int, depth: int, bias: bool, tiles: Tiles
) -> None:
    given, rotary = rotary_operands(rows, size, turned, max(1, turned + others), depth, bias)
    got = kernel("linear", tiles, **given, rotary=rotary)
    assert_as_good_as_eager("linear", got, given, rotary)
    if turned == 0:
        assert torch.equal(got, kernel("linear", tiles, **given))


def rows_of(
    given: dict[str, torch.Tensor | None], rotary: skinny.Rotary, order: torch.Tensor
) -> tuple[dict[str, torch.Tensor | None], skinny.Rotary]:
    x = given["x"]
    assert x is not None
    return {**given, "x": x[order]}, skinny.Rotary(rotary.cos[order], rotary.sin[order], rotary.width)


@pytest.mark.parametrize("tiles", [SMALL, replace(SMALL, splits=2)])
def test_a_rotated_row_does_not_know_the_others(tiles: Tiles) -> None:
    """Same bits alone, among others, in another order, and beside NaN."""
    given, rotary = rotary_operands(19, 16, 2, 3, 200, bias=True, dtype=torch.bfloat16)
    whole = kernel("linear", tiles, **given, rotary=rotary)
    shuffled = torch.randperm(19, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for order in (*(shuffled[:rows] for rows in (1, 2, 8, 17)), shuffled):
        some, angles = rows_of(given, rotary, order)
        assert torch.equal(kernel("linear", tiles, **some, rotary=angles), whole[order])
    poisoned = given["x"].clone()  # type: ignore[union-attr]
    poisoned[5] = float("nan")
    made = kernel("linear", tiles, **{**given, "x": poisoned}, rotary=rotary)
    assert torch.equal(made[:5], whole[:5])
    assert torch.equal(made[6:], whole[6:])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, 8, 32, 64])
def test_queries_and_keys_of_a_1_4b_model(rows: int, dtype: torch.dtype) -> None:
    """As good as eager code against float64; a row has the same bits among fewer rows, and values those that the
    product has without rotation.
    """
    given, rotary = rotary_operands(rows, 128, 32, 48, 2048, bias=False, dtype=dtype)
    default = default_tiles(Product(rows, 24 * 128, 2048, gated=True))
    wide = Tiles(lines=32, columns=128, slices=1, stages=5)
    for tiles in (default, replace(default, pdl=True, ahead=512), wide, replace(wide, splits=2, pdl=True)):
        made = kernel("linear", tiles, **given, rotary=rotary)
        assert_as_good_as_eager("linear", made, given, rotary)
        for count in {1, rows // 2, rows} - {0}:
            order = torch.arange(rows - count, rows, device=DEVICE)
            some, angles = rows_of(given, rotary, order)
            assert torch.equal(kernel("linear", tiles, **some, rotary=angles), made[order]), (tiles, count)
        plain = kernel("linear", replace(tiles, lines=2 * tiles.lines), **given)
        assert torch.equal(made[:, rotary.width :], plain[:, rotary.width :]), tiles
        assert not torch.equal(made, plain)


def test_rotation_is_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    given, rotary = rotary_operands(5, 8, 3, 4, 20, bias=False, dtype=torch.float64)
    x, w = given["x"], given["weight"]
    assert x is not None
    assert w is not None
    made = torch.ops.sparse_compile.skinny_rotary(
        x[:, None], w, rotary.cos[:, None], rotary.sin[:, None], rotated=24
    )
    heads = (x @ w.t()).view(5, 1, 4, 8).transpose(1, 2)
    q, k = apply_rotary_pos_emb(heads[:, :2], heads[:, 2:3], rotary.cos[:, None], rotary.sin[:, None])
    wanted = torch.cat((q, k, heads[:, 3:]), 1).transpose(1, 2).reshape(5, 1, 32)
    torch.testing.assert_close(made, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lead", [(2, 1), (0,)])
def test_opcheck_of_rotated_heads(dtype: torch.dtype, lead: tuple[int, ...]) -> None:
    given, _ = rotary_operands(1, 8, 1, 2, 16, bias=True, dtype=dtype)
    x, cos = torch.randn(*lead, 16).to(DEVICE, dtype), torch.randn(*lead, 8).to(DEVICE, dtype)
    args = (x, given["weight"], cos, cos.clone(), given["bias"])
    torch.library.opcheck(torch.ops.sparse_compile.skinny_rotary.default, args, {"rotated": 8})


def test_rows_with_fixed_bits_turn_by_their_own_angles() -> None:
    given, rotary = rotary_operands(6, 8, 2, 3, 40, bias=True, dtype=torch.bfloat16)
    op, rest = torch.ops.sparse_compile.skinny_rotary, {"rotated": rotary.width, "fixed": True}
    whole = op(given["x"], given["weight"], rotary.cos, rotary.sin, given["bias"], **rest)
    x = given["x"]
    assert x is not None
    for row in range(6):
        at = slice(row, row + 1)
        alone = op(x[at], given["weight"], rotary.cos[at], rotary.sin[at], given["bias"], **rest)
        assert torch.equal(alone, whole[at])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotated": 12}, "rotated=12 of 24 columns: both must be heads of 8"),
        ({"rotated": 32}, "rotated=32 of 24 columns"),
        ({"cos": torch.ones(3, 8)}, r"cos \(3, 8\) and sin \(2, 8\) must be \(2, 'D'\) with an even D"),
        ({"cos": torch.ones(2, 3), "sin": torch.ones(2, 3)}, "with an even D"),
        ({"sin": torch.ones(2, 8).half()}, "sin is torch.float16 on cpu, x torch.float32"),
    ],
)
def test_rotations_that_do_not_fit(change: dict[str, object], message: str) -> None:
    given = {"cos": torch.ones(2, 8), "sin": torch.ones(2, 8), "rotated": 16, **change}
    with pytest.raises(ValueError, match=message):
        torch.ops.sparse_compile.skinny_rotary(torch.ones(2, 4), torch.ones(24, 4), **given)
