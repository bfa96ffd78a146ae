"""Products of a few rows that normalise their rows: the kernel (interpreted on the CPU) and the ops."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_compile.kernels import skinny
from sparse_compile.kernels.skinny import Norm

pytest.importorskip("triton")
from test_skinny import (
    DEVICE,
    HALF,
    KINDS,
    SMALL,
    assert_as_good_as_eager,
    kernel,
    operands,
    rotary_operands,
)

from sparse_compile.kernels import skinny_bench, skinny_choice
from sparse_compile.kernels.skinny_choice import ALONG_ROWS, MEASURED_ROWS, Shape
from sparse_compile.kernels.skinny_tuning import Gpu, Product, Tiles, default_tiles, padded_rows

TILES = [
    SMALL,
    Tiles(lines=16, columns=256, slices=4, stages=2),
    Tiles(lines=16, columns=64, slices=1, splits=3, stages=2),
    Tiles(lines=32, columns=128, slices=2, splits=2, stages=2),
    Tiles(lines=32, columns=512, slices=8, stages=2, warps=8),
    replace(SMALL, apart=True),
    Tiles(lines=32, columns=128, slices=1, splits=2, stages=2, apart=True),
]
ROUNDED = 2**-7
"""Margin where a kernel ahead may multiply rows by the weight of a norm: it rounds them, and gate and up read them."""
GAIN_ROWS = 32  # of products with the weight of a norm: twice what `MEASURED_ROWS` lets them have


@pytest.fixture(autouse=True)
def _runnable() -> None:
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported without TRITON_INTERPRET=1")


def a_norm(
    depth: int, dtype: torch.dtype, weighted: bool, eps: float = 1e-6, mean: bool = True, seed: int = 3
) -> Norm:
    generator = torch.Generator().manual_seed(seed + depth)
    weight = (1 + 0.5 * torch.randn(depth, generator=generator)).to(DEVICE, dtype) if weighted else None
    return Norm(eps, weight, mean)


@settings(max_examples=16, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    rows=st.integers(1, GAIN_ROWS),
    width=st.integers(1, 70),
    depth=st.integers(1, 400),
    norm=st.tuples(st.sampled_from([0.0, 1e-6, 0.1]), st.booleans()),
    dtype=st.sampled_from([*HALF, "weighted"]),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    bias=st.booleans(),
    tiles=st.sampled_from(TILES),
)
def test_the_kernel_is_as_good_as_eager_code(
    kind: str,
    rows: int,
    width: int,
    depth: int,
    norm: tuple[float, bool],
    dtype: torch.dtype | str,
    scale: float,
    bias: bool,
    tiles: Tiles,
) -> None:
    """With and without a weight, of the mean and of the sum, at small and large values of the rows."""
    half = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    given = operands(kind, rows, width, depth, half, bias)
    given["x"] = given["x"] * scale  # type: ignore[operator]
    normed = a_norm(depth, half, dtype == "weighted", *norm)
    made = kernel(kind, tiles, norm=normed, **given)
    more = ROUNDED if tiles.apart and normed.weight is not None else 0.0
    assert_as_good_as_eager(kind, made, given, norm=normed, more=more)


@settings(max_examples=8, deadline=None)
@given(
    rows=st.integers(1, 20),
    size=st.sampled_from([2, 16]),
    heads=st.integers(1, 3),
    depth=st.integers(1, 200),
    weighted=st.booleans(),
    tiles=st.sampled_from([SMALL, replace(SMALL, splits=2)]),
)
def test_rotated_heads_of_normalised_rows(
    rows: int, size: int, heads: int, depth: int, weighted: bool, tiles: Tiles
) -> None:
    dtype = torch.bfloat16 if weighted else torch.float16
    given, rotary = rotary_operands(rows, size, heads, heads + 1, depth, True, dtype)
    norm = a_norm(depth, dtype, weighted)
    got = kernel("linear", tiles, rotary, norm, **given)
    assert_as_good_as_eager("linear", got, given, rotary, norm)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tiles", TILES)
def test_gate_and_up_of_two_weights(weighted: bool, tiles: Tiles) -> None:
    """Normalised rows have the bits that one weight [gate; up] gives, in the kernel and in the ops."""
    given, norm = operands("gated", 5, 40, 300, torch.bfloat16), a_norm(300, torch.bfloat16, weighted)
    assert given["weight"] is not None
    up, gate = (half.clone() for half in reversed(given["weight"].chunk(2)))
    halves = {**given, "weight": gate}
    assert torch.equal(
        kernel("gated", tiles, norm=norm, up=up, **halves), kernel("gated", tiles, norm=norm, **given)
    )
    for fixed in (False, True):
        two, one = call("gated", halves, norm, up=up, fixed=fixed), call("gated", given, norm, fixed=fixed)
        if DEVICE == "cuda" and fixed:
            assert torch.equal(two, one)
        assert_as_good_as_eager("gated", two, given, norm=norm, more=ROUNDED if weighted else 0.0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "tiles", [SMALL, replace(SMALL, splits=2), replace(SMALL, slices=1), replace(SMALL, apart=True)]
)
def test_a_row_does_not_know_the_others(weighted: bool, tiles: Tiles) -> None:
    """Same bits alone, among others, in another order, beside NaN and large values, and with any padding."""
    given, norm = operands("linear", 29, 40, 300, torch.bfloat16), a_norm(300, torch.bfloat16, weighted)
    x, whole = given["x"], kernel("linear", tiles, norm=norm, **given)
    assert isinstance(x, torch.Tensor)
    for rows in (1, 2, 8, 17):
        made = kernel("linear", tiles, norm=norm, **{**given, "x": x[:rows]})
        assert torch.equal(made, whole[:rows]), rows
    order = torch.randperm(29, generator=torch.Generator().manual_seed(1)).to(x.device)
    assert torch.equal(kernel("linear", tiles, norm=norm, **{**given, "x": x[order]}), whole[order])
    for poison in (float("nan"), 1e18):
        poisoned = x.clone()
        poisoned[5] = poison
        made = kernel("linear", tiles, norm=norm, **{**given, "x": poisoned})
        assert torch.equal(made[:5], whole[:5])
        assert torch.equal(made[6:], whole[6:])
        assert made[5].isnan().all() == (poison != poison)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("tiles", TILES)
def test_powers_of_two_are_normalised_away(tiles: Tiles, weighted: bool) -> None:
    """Without an eps, rows that are 2^12 times as large have the same bits: no sum is rounded in half precision."""
    given, norm = (
        operands("gated", 3, 24, 260, torch.bfloat16),
        a_norm(260, torch.bfloat16, weighted, eps=0.0),
    )
    want = kernel("gated", tiles, norm=norm, **given)
    large = {**given, "x": given["x"] * 2**12}  # type: ignore[operator]
    assert torch.equal(kernel("gated", tiles, norm=norm, **large), want)


@pytest.mark.parametrize("tiles", [tiles for tiles in TILES if not tiles.apart])
def test_products_of_rows_and_weight_are_exact(tiles: Tiles) -> None:
    """Of (1 + 2^-7)^2 - (1 + 2^-6), half precision would leave nothing."""
    x, weight = torch.tensor([[1 + 2**-7, 1.0]]), torch.tensor([[1.0, -1.0]])
    half = [one.to(DEVICE, torch.bfloat16) for one in (x, weight, torch.tensor([1 + 2**-7, 1 + 2**-6]))]
    given = {"x": half[0], "weight": half[1], "bias": None, "residual": None}
    made = kernel("linear", tiles, norm=Norm(0.0, half[2]), **given)
    want = 2**-14 / x.pow(2).mean().sqrt()
    torch.testing.assert_close(made.float().cpu(), want.view(1, 1), rtol=2**-7, atol=0)


def test_splits_leave_the_counters_at_zero() -> None:
    from sparse_compile.kernels.arrivals import arrivals

    tiles, norm = replace(SMALL, splits=3, columns=128), a_norm(500, torch.bfloat16, True)
    given = operands("add", 4, 100, 500, torch.bfloat16)
    first = kernel("add", tiles, norm=norm, **given)
    assert not arrivals(first.device, 1).any()
    assert torch.equal(kernel("add", tiles, norm=norm, **given), first)


# ---------------------------------------------------------------------- the ops


def call(kind: str, given: dict[str, torch.Tensor | None], norm: Norm, **more: object) -> torch.Tensor:
    args = [given["x"], given["weight"], *([given["residual"]] if kind == "add" else []), given["bias"]]
    options = {"norm": norm.weight, "eps": norm.eps, "mean": norm.mean, **more}
    return getattr(torch.ops.sparse_compile, f"skinny_{kind}")(*args, **options)  # type: ignore[no-any-return]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_op_is_its_definition(kind: str, mean: bool, weighted: bool) -> None:
    given = operands(kind, 4, 24, 40, torch.bfloat16, bias=True)
    norm = a_norm(40, torch.bfloat16, weighted, mean=mean)
    got = call(kind, given, norm)
    if DEVICE == "cpu":
        assert torch.equal(got, skinny.define(**given, gated=kind == "gated", norm=norm))  # type: ignore[arg-type]
    assert_as_good_as_eager(kind, got, given, norm=norm, more=ROUNDED if weighted else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 1, 20, dtype=dtype), torch.randn(20, dtype=dtype)
    want = torch.nn.functional.rms_norm(x, (20,), weight, 1e-5)
    norm = Norm(1e-5, weight)
    torch.testing.assert_close(norm(x), want)
    torch.testing.assert_close(norm.apart(x), want)
    summed = Norm(1e-5, None, mean=False)
    torch.testing.assert_close(summed(x).norm(dim=-1), torch.ones(3, 1, dtype=dtype), rtol=1e-3, atol=0)
    torch.testing.assert_close(summed.apart(x), summed(x))


@pytest.mark.parametrize("lead", [(2, 1), (0,)])
@pytest.mark.parametrize("kind", [*KINDS, "rotary", "up"])
def test_opcheck(kind: str, lead: tuple[int, ...]) -> None:
    """Schema, fake and tracing agree with the real op. This proves no numbers; other tests compare those."""
    given = operands(kind, 1, 8, 16, torch.bfloat16, bias=kind != "up")
    x, norm = torch.randn(*lead, 16).to(DEVICE, torch.bfloat16), torch.ones(16).to(DEVICE, torch.bfloat16)
    angles = [torch.randn(*lead, 8).to(x) for _ in "cs"]
    between = {"add": [torch.randn(*lead, 8).to(x)], "rotary": angles}.get(kind, [])
    more: dict[str, object] = {"rotary": {"rotated": 8}, "up": {"up": given["weight"]}}.get(kind, {})
    name = f"skinny_{'gated' if kind == 'up' else kind}"
    args = (x, given["weight"], *between, given["bias"])
    options = {"norm": norm, "eps": 1e-6, **more}
    torch.library.opcheck(getattr(torch.ops.sparse_compile, name).default, args, options)


def test_refusals() -> None:
    op, x, w = torch.ops.sparse_compile.skinny_linear, torch.ones(2, 4), torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"norm \(5,\) must have one value for each of 4 columns"):
        op(x, w, norm=torch.ones(5), eps=1e-6)
    with pytest.raises(ValueError, match=r"norm is torch.float16 on cpu, x torch.float32"):
        op(x, w, norm=torch.ones(4).half(), eps=1e-6)
    for options in ({"norm": torch.ones(4)}, {"mean": False}):
        with pytest.raises(ValueError, match=r"eps=None: norm and mean=False .* pass eps"):
            op(x, w, **options)


def test_rows_with_fixed_bits() -> None:
    """Any number of rows, more than one launch takes too."""
    given = operands("linear", 67, 24, 320, torch.bfloat16)
    norm = a_norm(320, torch.bfloat16, True)
    whole, x = call("linear", given, norm, fixed=True), given["x"]
    assert x is not None
    for rows in (slice(0, 1), slice(3, 9), slice(20, None)):
        assert torch.equal(call("linear", {**given, "x": x[rows]}, norm, fixed=True), whole[rows])
    assert_as_good_as_eager("linear", whole, given, norm=norm, more=ROUNDED)


@settings(max_examples=16, deadline=None)
@given(
    kind=st.sampled_from([*KINDS, "rotary"]),
    rows=st.integers(1, 64),
    depth=st.integers(1, 600),
    dtype=st.sampled_from(HALF),
    mean=st.booleans(),
    splits=st.integers(1, 2),
)
def test_a_kernel_for_the_norm_changes_no_bits(
    kind: str, rows: int, depth: int, dtype: torch.dtype, mean: bool, splits: int
) -> None:
    """Without a weight: whether a product adds the squares itself, or scales its sums by those that it is given. On the
    CPU a product of blocks adds in an order of its own: there tiles are the same, and sums of squares are exact.
    """
    norm, rotary = a_norm(depth, dtype, False, mean=mean), None
    given = operands(kind, rows, 40, depth, dtype, bias=True)
    if kind == "rotary":
        given, rotary = rotary_operands(rows, 16, 2, 3, depth, False, dtype)
    along = Tiles(lines=16, columns=256, slices=4, stages=2)
    other = {"columns": 512, "lines": 32} if DEVICE == "cuda" else {}
    if DEVICE == "cpu":
        given["x"] = given["x"].mul(2).round()  # type: ignore[union-attr]
    apart = replace(along, **other, apart=True)
    assert torch.equal(kernel(kind, apart, rotary, norm, **given), kernel(kind, along, rotary, norm, **given))
    parted = replace(apart, splits=splits)
    assert_as_good_as_eager(kind, kernel(kind, parted, rotary, norm, **given), given, rotary, norm)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", HALF)
def test_tiles_for_fixed_bits_give_a_row_the_same(dtype: torch.dtype, weighted: bool) -> None:
    """However many rows there are: on both sides of where a kernel of its own does the norm."""
    given, norm = operands("linear", 64, 40, 600, dtype), a_norm(600, dtype, weighted)
    assert given["x"] is not None
    if weighted and dtype == torch.float16:
        given["x"], norm = given["x"] * 1000, norm._replace(weight=norm.weight * 1000)  # type: ignore[operator]
    made = {}
    for rows in (1, ALONG_ROWS, ALONG_ROWS + 1, 64):
        tiles = skinny_choice.fixed_tiles(rows, given["weight"], False, norm)  # type: ignore[arg-type]
        made[rows] = kernel("linear", tiles, norm=norm, **{**given, "x": given["x"][:rows]})
        assert tiles.apart == (weighted or rows > ALONG_ROWS)
        assert made[rows].isfinite().all()
    assert all(torch.equal(some, made[64][:rows]) for rows, some in made.items())


# ---------------------------------------------------------------------- tiles


def test_norms_are_choices_of_their_own() -> None:
    weight = torch.empty(2048, 512, dtype=torch.bfloat16)
    shapes = [
        skinny_choice.shape_of(weight, False, norm)
        for norm in (None, Norm(1e-6), Norm(1e-5, weight[0]), Norm(1e-6, mean=False))
    ]
    assert len({shape.key for shape in shapes}) == 4
    assert shapes[0].key.endswith("| linear 2048x512 torch.bfloat16"), (
        "what was measured before keeps its name"
    )
    assert [shape.product(4).gain for shape in shapes] == [False, False, True, False]


@pytest.mark.parametrize("mean", [True, False])
def test_the_norm_that_runs_is_the_one_that_is_measured(mean: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one kernel for the mean of the squares, and several for their sum."""
    monkeypatch.setattr(skinny_bench, "ROTATE_BYTES", 1)
    weight = torch.empty(48, 64, dtype=torch.bfloat16)
    bench = skinny_bench.Bench(skinny_choice.shape_of(weight, False, Norm(1e-5, weight[0], mean)))
    assert bench.norm is not None
    assert bench.norm.mean == mean


def test_many_rows_have_a_kernel_for_the_norm() -> None:
    """By default from some rows on; of a few more it is measured, and in float16 a weight may not be taken along."""
    for dtype, norm in (
        (torch.bfloat16, "norm"),
        (torch.bfloat16, "weighted norm"),
        (torch.float16, "weighted norm"),
    ):
        shape = Shape(6144, 1536, False, dtype, torch.device("cpu"), norm)  # type: ignore[arg-type]
        for rows in skinny_choice.BUCKETS:
            tried = skinny_choice.candidates(shape, rows)
            plain = skinny_choice.candidates(replace(shape, norm=""), rows)
            assert [replace(one, apart=False) for one in tried if one.apart] == plain
            half = dtype == torch.float16
            assert any(not one.apart for one in tried) == (rows <= MEASURED_ROWS and not half)
            default = skinny_choice.default_choice(shape, rows)
            assert default.apart == (rows > ALONG_ROWS or half)
            assert default in tried


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, GAIN_ROWS),
    width=st.integers(1, 200_000),
    depth=st.integers(1, 50_000),
    gated=st.booleans(),
    gpu=st.sampled_from([Gpu(), Gpu(108, 164 << 10), Gpu(128, 100 << 10)]),
)
def test_default_tiles_have_room_for_the_weight_of_a_norm(
    rows: int, width: int, depth: int, gated: bool, gpu: Gpu
) -> None:
    tiles = default_tiles(Product(rows, width, depth, gated, gain=True), gpu)
    lines = tiles.lines * (2 if gated else 1) + padded_rows(rows, tiles.slices) + 1
    assert lines * tiles.columns * 2 * max(1, tiles.stages - 1) <= gpu.shared_bytes - 1024
    assert (tiles.slices, tiles.splits) == (4, 1)


@settings(max_examples=50, deadline=None)
@given(
    width=st.integers(1, 200_000), depth=st.integers(1, 50_000), gated=st.booleans(), weighted=st.booleans()
)
def test_tiles_for_fixed_bits_have_one_order(width: int, depth: int, gated: bool, weighted: bool) -> None:
    weight = torch.empty(width * (2 if gated else 1), depth, dtype=torch.bfloat16, device="meta")
    norm = Norm(1e-6, weight[0] if weighted else None)
    orders = set()
    for rows in (1, 8, 9, 17, 32, 64):
        tiles = skinny_choice.fixed_tiles(rows, weight, gated, norm)
        orders.add((tiles.slices, tiles.splits, 256 if tiles.apart else tiles.columns))
        lines = tiles.lines * (2 if gated else 1) + padded_rows(rows, tiles.slices)
        assert lines * tiles.columns * 2 * max(1, tiles.stages - 1) <= Gpu().shared_bytes - 1024
        assert tiles.apart == (weighted or rows > ALONG_ROWS)
    assert orders == {(4, 1, 256)}


# ---------------------------------------------------------------------- at real sizes


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64])
@pytest.mark.parametrize("shape", [(6144, 2048), (2560, 7168), (4096, 1536)])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_real_models(kind: str, shape: tuple[int, int], rows: int) -> None:
    """Tiles as they are chosen by default, and wide ones whose sums are parted, with an early start."""
    given = operands(kind, rows, *shape, torch.bfloat16)
    wide = Tiles(lines=32 if kind == "gated" else 64, columns=128, slices=1, stages=4, splits=2)
    for weighted in (False, True) if rows <= GAIN_ROWS else (False,):
        norm = a_norm(shape[1], torch.bfloat16, weighted)
        first = default_tiles(Product(rows, shape[0], shape[1], kind == "gated", gain=weighted))
        for tiles in (first, replace(first, pdl=True, ahead=512), replace(wide, pdl=True)):
            assert_as_good_as_eager(kind, kernel(kind, tiles, norm=norm, **given), given, norm=norm)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*HALF, "weighted"])
@pytest.mark.parametrize("kind", KINDS)
def test_other_sizes_change_no_bits(kind: str, dtype: torch.dtype | str) -> None:
    """But those of the columns of a step that adds squares; nor do other numbers of rows, or a kernel for the norm. On
    the CPU a product of blocks adds in an order of its own.
    """
    half = dtype if isinstance(dtype, torch.dtype) else torch.bfloat16
    most, norm = 64 if dtype != "weighted" else GAIN_ROWS, a_norm(2048, half, dtype == "weighted")
    given = operands(kind, most, 5632, 2048, half)
    base = Tiles(columns=256, stages=3)
    want = kernel(kind, base, norm=norm, **given)
    apart = [] if dtype == "weighted" else [{"apart": True}, {"apart": True, "columns": 512, "stages": 2}]
    for change in ({"stages": 4}, {"lines": 32}, {"lines": 64, "warps": 8}, {"warps": 8}, *apart):
        for rows in (1, 8, 9, 32, most):
            some = {**given, "x": given["x"][:rows]}  # type: ignore[index]
            if kind == "add":
                some["residual"] = given["residual"][:rows]  # type: ignore[index]
            try:
                made = kernel(kind, replace(base, **change), norm=norm, **some)
            except Exception as error:
                if type(error).__name__ != "OutOfResources":
                    raise
                continue
            assert torch.equal(made, want[:rows]), (change, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*KINDS, "rotary"])
@pytest.mark.parametrize("fixed", [False, True])
def test_ops_at_every_number_of_rows(kind: str, fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In and out of CUDA graphs, with and without a weight; with fixed bits a row has those that it has alone."""
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", "0")
    for weighted in (False, True):
        norm = a_norm(1024, torch.bfloat16, weighted)
        given, rotary = operands(kind, 65, 24 * 64, 1024, torch.bfloat16), None
        if kind == "rotary":
            given, rotary = rotary_operands(65, 64, 16, 24, 1024, False, torch.bfloat16)
        whole = None
        for rows in (65, 64, 33, 32, 16, 8, 1):
            some = {
                name: x[:rows] if name in ("x", "residual") and x is not None else x
                for name, x in given.items()
            }
            turned = None if rotary is None else rotary.rows(65, 0, rows)
            made, again = (run_op(kind, some, norm, turned, fixed, graph) for graph in (False, True))
            assert torch.equal(made, again), rows
            assert_near_eager(kind, made, some, turned, norm)
            whole = made if whole is None else whole
            assert not fixed or torch.equal(made, whole[:rows]), rows


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["linear", "gated"])
@pytest.mark.parametrize("weighted", [False, True])
def test_measured_tiles(kind: str, weighted: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever was measured to be the fastest, the library behind a kernel for the norm among them."""
    monkeypatch.setenv("SPARSE_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(skinny_choice, "_choices", {})
    given, norm = operands(kind, 64, 4096, 1024, torch.bfloat16), a_norm(1024, torch.bfloat16, weighted)
    for rows in (8, 32, 64):
        some = {**given, "x": given["x"][:rows]}  # type: ignore[index]
        assert_near_eager(kind, run_op(kind, some, norm, None, False, False), some, None, norm)
    assert all(shape.norm for shape, _ in skinny_choice._choices)


def assert_near_eager(
    kind: str,
    got: torch.Tensor,
    given: dict[str, torch.Tensor | None],
    rotary: skinny.Rotary | None,
    norm: Norm,
) -> None:
    """Where the library may serve a call: its mean error against float64 is that of eager code, but for a twentieth."""
    exact = {name: None if x is None else x.double() for name, x in given.items()}
    turned, normed = None if rotary is None else rotary.to(torch.float64), norm.to(torch.float64)
    truth = skinny.define(**exact, gated=kind == "gated", rotary=turned, norm=normed)  # type: ignore[arg-type]
    eager = skinny.eager(**given, gated=kind == "gated", rotary=rotary, norm=norm)  # type: ignore[arg-type]
    mine, theirs = ((one.double() - truth).abs().mean().item() for one in (got, eager))
    assert mine <= 1.05 * theirs


def run_op(
    kind: str,
    given: dict[str, torch.Tensor | None],
    norm: Norm,
    rotary: skinny.Rotary | None,
    fixed: bool,
    in_graph: bool,
) -> torch.Tensor:
    def run() -> torch.Tensor:
        if rotary is None:
            return call(kind, given, norm, fixed=fixed)
        op, options = torch.ops.sparse_compile.skinny_rotary, {"rotated": rotary.width, "fixed": fixed}
        args = (given["x"], given["weight"], rotary.cos, rotary.sin)
        return op(*args, norm=norm.weight, eps=norm.eps, **options)  # type: ignore[no-any-return]

    if not in_graph:
        return run()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    graph.replay()
    return made


def test_the_benchmark_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    from benchmarks import norms

    norms.main(["--tiny", "--models", "hrm-text", "--rows", "1", "--out", str(tmp_path / "norms.json")])
    assert "hrm-text      1  alone      8" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        norms.main(["--models", "ouro"])
    assert "known: ouro-1.4b, hrm-text, dory" in capsys.readouterr().err
