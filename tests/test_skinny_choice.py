"""Which tiles a shape runs with: measured once, remembered in a file, never silently wrong."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from sparse_compile.kernels import skinny, skinny_bench, skinny_choice, skinny_file
from sparse_compile.kernels.skinny_choice import BUCKETS, TUNING, Shape
from sparse_compile.kernels.skinny_file import Choice
from sparse_compile.kernels.skinny_tuning import Gpu, Tiles

CPU = torch.device("cpu")
SHAPE = Shape(2048, 512, False, torch.bfloat16, CPU)
CHOICE: dict[int, Tiles | None] = {8: Tiles(lines=32, columns=256), 16: Tiles(), 32: None, 64: None}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Shape, int]]:
    """Every test has a folder of its own, and a machine that can measure; the list has what was measured."""
    found: list[tuple[Shape, int]] = []

    def measure(shape: Shape, bucket: int, with_inductor: bool) -> Choice:
        found.append((shape, bucket))
        more: dict[str, float | None] = {"inductor": 11.0} if with_inductor else {}
        return Choice(CHOICE[bucket], {"ours": 9.0 if CHOICE[bucket] else 10.5, "cublas": 10.0, **more})

    monkeypatch.setenv("SPARSE_COMPILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARSE_COMPILE_TUNE", raising=False)
    monkeypatch.setattr(skinny_choice, "_choices", {})
    monkeypatch.setattr(skinny_choice, "_may_measure", lambda shape: True)
    monkeypatch.setattr(skinny_choice, "measure", measure)
    return found


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a new process."""
    monkeypatch.setattr(skinny_choice, "_choices", {})


def test_a_shape_is_measured_once(measured: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    assert skinny_choice.choose(SHAPE, 8) == skinny_choice.choose(SHAPE, 8) == CHOICE[8]
    assert skinny_choice.choose(SHAPE, 32) is None
    forget(monkeypatch)
    for bucket, want in CHOICE.items():
        assert skinny_choice.choose(SHAPE, bucket) == want, "from the file where it was measured"
    assert measured == [(SHAPE, 8), (SHAPE, 32), (SHAPE, 16), (SHAPE, 64)]
    other = Shape(2048, 512, True, torch.bfloat16, CPU)
    skinny_choice.choose(other, 8)
    forget(monkeypatch)
    assert skinny_choice.choose(SHAPE, 8) == CHOICE[8]
    assert measured[4:] == [(other, 8)]


def test_rows_find_their_bucket() -> None:
    weight = torch.empty(2048, 512, dtype=torch.bfloat16)
    for rows, want in ((1, 8), (8, 8), (9, 16), (16, 16), (17, 32), (64, 64)):
        assert skinny_choice.tiles_maybe(rows, weight, False) == CHOICE[want]
    assert BUCKETS[-1] == skinny.MAX_ROWS


@pytest.mark.parametrize(
    "content",
    [
        '{"format": 1, "entr',
        "[]",
        "null",
        *(f'{{"format": {skinny_file.FORMAT}{entries}}}' for entries in ("", ', "entries": []')),
    ],
)
def test_a_file_that_cannot_be_read_is_measured_anew(
    content: str, measured: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = skinny_choice.cache_file()
    file.parent.mkdir(parents=True)
    file.write_text(content)
    with pytest.warns(UserWarning, match=r"skinny\.json cannot be read .* measured and written anew"):
        assert skinny_choice.choose(SHAPE, 8) == CHOICE[8]
    forget(monkeypatch)
    skinny_choice.choose(SHAPE, 8)
    assert measured == [(SHAPE, 8)]


def test_another_format_and_a_folder_that_cannot_be_written(
    measured: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    skinny_choice.choose(SHAPE, 8)
    file = skinny_choice.cache_file()
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "format": 0}))
    forget(monkeypatch)
    skinny_choice.choose(SHAPE, 8)
    assert measured == [(SHAPE, 8)] * 2
    (tmp_path / "flat").write_text("")
    monkeypatch.setenv("SPARSE_COMPILE_CACHE", str(tmp_path / "flat" / "below"))
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="cannot be"):
        assert skinny_choice.choose(SHAPE, 8) == CHOICE[8]


def test_a_file_that_cannot_be_replaced_leaves_nothing_beside_it(measured: list[tuple[Shape, int]]) -> None:
    file = skinny_choice.cache_file()
    file.mkdir(parents=True)  # a folder of that name
    with pytest.warns(UserWarning, match="cannot be written"):
        assert skinny_choice.choose(SHAPE, 8) == CHOICE[8]
    assert list(file.parent.iterdir()) == [file]


def test_no_memory_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shape: Shape, bucket: int, with_inductor: bool) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(skinny_choice, "measure", measure)
    assert skinny_choice.choose(SHAPE, 8) == skinny_choice.default_choice(SHAPE, 8)
    assert not skinny_choice.cache_file().exists()


def test_where_nothing_may_be_measured(
    measured: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skinny_choice, "_may_measure", lambda shape: False)
    assert skinny_choice.choose(SHAPE, 8) == skinny_choice.default_choice(SHAPE, 8)
    assert measured == []


def test_own_tiles_fit_where_the_library_would_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows get the wide tiles, where a multiprocessor has room for them."""
    weight = torch.empty(2048, 640, dtype=torch.bfloat16)
    shape = Shape(2048, 640, True, torch.bfloat16, CPU)
    few, many = (skinny_choice.own_tiles(rows, weight, True) for rows in (4, 64))
    assert few == skinny_choice.default_choice(shape, 8)
    assert many == skinny_choice.candidates(shape, 64)[-1] != skinny_choice.default_choice(shape, 64)
    monkeypatch.setattr(skinny_choice, "gpu_of", lambda device: Gpu(40, 64 << 10))
    assert skinny_choice.own_tiles(64, weight, True) == skinny_choice.default_choice(shape, 64)


# ---------------------------------------------------------------------- Inductor's own choice


class FakeBench:
    """Times of a machine on which tiles take `ours`, in the order of the candidates, the library 10 and Inductor
    `compiled`.
    """

    ours_us: tuple[float | None, ...] = (9.0, 8.0)
    compiled: dict[str, float | None] = {"inductor": 11.0}  # noqa: RUF012

    def __init__(self, shape: Shape) -> None:
        self.shape, self.left = shape, list(self.ours_us)

    def ours(self, rows: int, tiles: Tiles) -> float | None:
        return self.left.pop(0)

    def library(self, rows: int) -> float:
        return 10.0

    def inductor(self, rows: int) -> dict[str, float | None]:
        return self.compiled


REAL_MEASURE = skinny_choice.measure


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> type[FakeBench]:
    """A machine whose times are those of the fake that is returned."""

    class Own(FakeBench):
        pass

    monkeypatch.setattr(skinny_choice, "measure", REAL_MEASURE)
    monkeypatch.setattr(skinny_choice, "Bench", Own)
    return Own


def entry(shape: Shape, bucket: int) -> dict[str, Any]:
    content = json.loads(skinny_file.cache_file().read_text())
    assert content["format"] == skinny_file.FORMAT
    return content["entries"][f"{shape.key} | {bucket} rows"]  # type: ignore[no-any-return]


WINS: dict[str, tuple[tuple[float | None, ...], float | None, str, bool]] = {
    # times of the tiles, Inductor's time -> winner, whether our kernel runs
    "ours": ((9.0, 8.0), 8.5, "ours", True),
    "ours, the first tiles": ((8.0, 9.0), 8.5, "ours", True),
    "the library": ((10.5, 11.0), 10.2, "cublas", False),
    "Inductor, before ours": ((9.0, 8.0), 4.0, "inductor", True),
    "Inductor, before the library": ((11.0, 10.5), 4.0, "inductor", False),
    "no room for tiles": ((None, 9.5), 9.6, "ours", True),
    "no room for any tiles": ((None, None), 10.2, "cublas", False),
    "Inductor failed": ((9.0, 8.0), None, "ours", True),
}


@pytest.mark.parametrize("case", WINS)
@pytest.mark.filterwarnings("ignore:.*Inductor's own choice is the fastest")
def test_which_rival_won_is_kept_and_read_back(
    case: str, timed: type[FakeBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, inductor, winner, runs_ours = WINS[case]
    timed.ours_us, timed.compiled = ours, {"inductor": inductor}
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", "inductor")
    known = [us for us in ours if us is not None]
    least = min(known) if known else None
    tried = skinny_choice.candidates(SHAPE, 32)
    tiles = tried[ours.index(least)] if runs_ours else None
    assert skinny_choice.choose(SHAPE, 32) == tiles
    assert entry(SHAPE, 32) == {
        "tiles": None if tiles is None else asdict(tiles),
        "winner": winner,
        "us": {"ours": least, "cublas": 10.0, "inductor": inductor},
    }
    forget(monkeypatch)
    monkeypatch.setattr(skinny_choice, "measure", lambda *_: pytest.fail("it is in the file"))
    assert skinny_choice.choose(SHAPE, 32) == tiles


def test_inductor_takes_part_where_it_is_asked_to(
    timed: type[FakeBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by default; what was measured without it is measured again with it, and not the other way round."""
    monkeypatch.setattr(timed, "inductor", lambda *_: pytest.fail("nobody asked for it"))
    for value in (None, "", "1"):
        forget(monkeypatch)
        skinny_file.cache_file().unlink(missing_ok=True)
        if value is not None:
            monkeypatch.setenv("SPARSE_COMPILE_TUNE", value)
        skinny_choice.choose(SHAPE, 32)
        assert entry(SHAPE, 32)["us"] == {"ours": 8.0, "cublas": 10.0}
    monkeypatch.setattr(timed, "inductor", lambda *_: {"inductor": 11.0})
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", "inductor")
    for value in ("inductor", "1", "inductor"):
        monkeypatch.setenv("SPARSE_COMPILE_TUNE", value)
        forget(monkeypatch)
        skinny_choice.choose(SHAPE, 32)
        assert entry(SHAPE, 32)["us"] == {"ours": 8.0, "cublas": 10.0, "inductor": 11.0}
        monkeypatch.setattr(skinny_choice, "measure", lambda *_: pytest.fail("it is in the file"))


def test_what_is_faster_than_what_runs_is_told(
    timed: type[FakeBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", "inductor")
    timed.compiled = {"inductor": 4.0}
    with pytest.warns(
        UserWarning, match=r"fastest \(us: ours 8.00, cublas 10.00, inductor 4.00\).*it runs ours"
    ):
        skinny_choice.choose(SHAPE, 32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forget(monkeypatch)
        skinny_choice.choose(SHAPE, 32)  # from the file: told once
        timed.compiled = {"inductor": 7.99}  # may be chance
        skinny_choice.choose(SHAPE, 64)


def test_without_memory_for_inductor_it_is_tried_again(
    timed: type[FakeBench], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", "inductor")
    for compiled in ({}, {"inductor": 11.0}):
        timed.compiled = compiled
        forget(monkeypatch)
        assert skinny_choice.choose(SHAPE, 32) == skinny_choice.candidates(SHAPE, 32)[1]
        assert entry(SHAPE, 32)["us"] == {"ours": 8.0, "cublas": 10.0, **compiled}


def test_no_memory_to_measure_again_leaves_what_is_known(
    measured: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    skinny_choice.choose(SHAPE, 32)
    forget(monkeypatch)

    def measure(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(skinny_choice, "measure", measure)
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", "inductor")
    assert skinny_choice.choose(SHAPE, 32) is CHOICE[32] is None
    assert skinny_choice.default_choice(SHAPE, 32) is not None


@pytest.mark.parametrize(
    "broken",
    [
        7,
        None,
        [],
        {"tiles": None},
        {"tiles": None, "us": {}},
        {"tiles": None, "us": {"cublas": None}},
        {"tiles": None, "us": {"cublas": 9.0, "ours": "8"}},
        *(
            {"tiles": tiles, "us": {"ours": 8.0}}
            for tiles in ([], {"lines": 3}, {"x": 1}, {"stages": 2.5}, {"apart": "no"}, {"pdl": None})
        ),
    ],
)
def test_an_entry_that_cannot_be_read_is_measured_anew(
    broken: Any, measured: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    skinny_choice.choose(SHAPE, 8)
    content = json.loads(skinny_file.cache_file().read_text())
    content["entries"] = dict.fromkeys(content["entries"], broken)
    skinny_file.cache_file().write_text(json.dumps(content))
    forget(monkeypatch)
    with pytest.warns(UserWarning, match="cannot be read .* measured and written anew"):
        assert skinny_choice.choose(SHAPE, 8) == CHOICE[8]
    assert measured == [(SHAPE, 8)] * 2
    assert entry(SHAPE, 8)["winner"] == "ours"


@pytest.mark.parametrize("value", ["2", "Inductor", "off"])
def test_other_values_of_the_switch_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(skinny_choice, "_choices", {})
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", value)
    with pytest.raises(ValueError, match=f"SPARSE_COMPILE_TUNE='{value}' must be one of {', '.join(TUNING)}"):
        skinny_choice.choose(SHAPE, 8)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> skinny_bench.Bench:
    """Of a small product on the CPU, where a time is the number of calls that were timed."""

    def time_calls(calls: list[Callable[[], torch.Tensor]]) -> float:
        assert {tuple(call().shape) for call in calls} == {(8, 48)}
        return float(len(calls))

    monkeypatch.setattr(skinny_bench, "ROTATE_BYTES", 3 * 96 * 64 * 2)
    monkeypatch.setattr(skinny_bench, "time_calls", time_calls)
    return skinny_bench.Bench(Shape(96, 64, True, torch.bfloat16, CPU, "weighted norm"))


def test_a_compiler_that_fails_is_no_error_of_the_run(
    bench: skinny_bench.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(error: Exception) -> Callable[..., None]:
        def tuned(*_: object) -> None:
            raise error

        return tuned

    monkeypatch.setattr(skinny_bench, "tuned", fails(RuntimeError("no compiler\nand a long story")))
    with pytest.warns(
        UserWarning, match=r"8 rows Inductor cannot be measured \(RuntimeError: no compiler\);"
    ):
        assert bench.inductor(8) == {"inductor": None}
    monkeypatch.setattr(skinny_bench, "tuned", fails(torch.OutOfMemoryError("full")))
    with pytest.warns(UserWarning, match=r"cannot be measured \(OutOfMemoryError: full\)"):
        assert bench.inductor(8) == {}


def test_what_inductor_makes_is_the_same_product(bench: skinny_bench.Bench) -> None:
    """Compiled, timed over the same weights as the library, and without the user's random numbers."""
    state = torch.get_rng_state()
    assert bench.inductor(8) == {"inductor": bench.library(8)} == {"inductor": 3.0}
    assert torch.equal(torch.get_rng_state(), state)
    given = (bench.x[:8], bench.weights[0], True, bench.norm)
    run = skinny_bench.tuned(skinny_bench.plain, *given)
    torch.testing.assert_close(run(*given), skinny_bench.plain(*given), rtol=2e-2, atol=2e-2)


def test_inductor_compiles_within_a_compilation(bench: skinny_bench.Bench) -> None:
    """As the torch.compile backend measures, while Dynamo compiles the graph around the product."""
    times: list[dict[str, float | None]] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        times.append(bench.inductor(8))
        return graph

    x = torch.ones(4)
    run = torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)
    assert torch.equal(run(x), x + 1)
    assert torch.equal(run(x), x + 1)
    assert times == [{"inductor": 3.0}]


def test_without_a_compiler_nothing_is_called_inductors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    x = torch.ones(8, 64)
    with pytest.raises(RuntimeError, match="TORCH_COMPILE_DISABLE"):
        skinny_bench.tuned(skinny_bench.plain, x, x, False)


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["", "weighted norm"])
def test_inductors_choice_is_measured_on_a_gpu(
    norm: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From the op itself, whose result and random numbers stay what they are; then the op can be captured."""
    monkeypatch.undo()
    monkeypatch.setenv("SPARSE_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", "inductor")
    monkeypatch.setattr(skinny_choice, "_choices", {})
    weight, x = (torch.randn(n, 512, device="cuda").bfloat16() / 22 for n in (2048, 8))
    gain = torch.rand(512, device="cuda").bfloat16() if norm else None
    settings: dict[str, Any] = {"norm": gain, "eps": 1e-6} if norm else {}
    want = skinny.define(x, weight, gated=True, norm=skinny.Norm(1e-6, gain) if norm else None)
    state, op = torch.cuda.get_rng_state(), torch.ops.sparse_compile.skinny_gated
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*Inductor cannot be measured")
        warnings.filterwarnings("ignore", message=".*Inductor's own choice is the fastest")
        torch.testing.assert_close(op(x, weight, **settings), want, rtol=3e-2, atol=3e-2)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    (kept,) = json.loads(skinny_file.cache_file().read_text())["entries"].values()
    assert set(kept["us"]) == {"ours", "cublas", "inductor"}
    assert all(us > 0 for us in kept["us"].values())
    assert kept["winner"] == min(kept["us"], key=kept["us"].__getitem__)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = op(x, weight, **settings)
    graph.replay()
    torch.testing.assert_close(made, want, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
def test_inductors_choice_while_a_step_is_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As the torch.compile backend measures: within a compilation by Dynamo."""
    monkeypatch.undo()
    monkeypatch.setenv("SPARSE_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", "inductor")
    monkeypatch.setattr(skinny_choice, "_choices", {})
    shape = Shape(1024, 512, False, torch.bfloat16, torch.device("cuda", 0))

    def backend(graph: Any, inputs: Any) -> Any:
        skinny_choice.prepare(shape, 4)
        return graph

    x = torch.ones(4, device="cuda")
    assert torch.equal(torch.compile(lambda x: x + 1, backend=backend, fullgraph=True)(x), x + 1)
    assert entry(shape, 8)["us"]["inductor"] > 0


# ---------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
def test_rotated_heads_on_a_gpu_whatever_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """At every number of rows, in and out of CUDA graphs, also where the library has the faster product."""
    weight = torch.randn(24 * 64, 512, device="cuda").bfloat16() / 22
    for chosen in (skinny_choice.tiles_maybe, lambda *_: None):
        monkeypatch.setattr(skinny_choice, "tiles_maybe", chosen)
        for rows in (1, 8, 16, 33, 64, 65):
            x = torch.randn(rows, 512, device="cuda").bfloat16()
            cos, sin = (torch.rand(rows, 64, device="cuda").mul(7).cos().bfloat16() for _ in "cs")
            want = skinny.define(x, weight, rotary=skinny.Rotary(cos, sin, 16 * 64))
            op = torch.ops.sparse_compile.skinny_rotary
            torch.testing.assert_close(op(x, weight, cos, sin, rotated=16 * 64), want, rtol=3e-2, atol=3e-2)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made = op(x, weight, cos, sin, rotated=16 * 64)
            graph.replay()
            torch.testing.assert_close(made, want, rtol=3e-2, atol=3e-2)


@pytest.mark.gpu
def test_the_switch_and_graph_capture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("SPARSE_COMPILE_CACHE", str(tmp_path))
    shape = Shape(2048, 512, False, torch.bfloat16, torch.device("cuda", 0))
    assert skinny_choice._may_measure(shape)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")
        assert not skinny_choice._may_measure(shape)
    monkeypatch.setenv("SPARSE_COMPILE_TUNE", "0")
    assert not skinny_choice._may_measure(shape)


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [False, True])
def test_measured_tiles_give_right_results(
    gated: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What was chosen agrees with the definition at every number of rows, also from a CUDA graph."""
    monkeypatch.undo()
    monkeypatch.setenv("SPARSE_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(skinny_choice, "_choices", {})
    weight = torch.randn(4096, 1024, device="cuda").bfloat16() / 32
    op = torch.ops.sparse_compile.skinny_gated if gated else torch.ops.sparse_compile.skinny_linear
    state = torch.cuda.get_rng_state()
    for rows in (1, 8, 16, 33, 64):
        x = torch.randn(rows, 1024, device="cuda").bfloat16()
        state = torch.cuda.get_rng_state()
        want = skinny.define(x, weight, gated=gated)
        torch.testing.assert_close(op(x, weight), want, rtol=2e-2, atol=2e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = op(x, weight)
        graph.replay()
        torch.testing.assert_close(made, want, rtol=2e-2, atol=2e-2)
        assert torch.equal(torch.cuda.get_rng_state(), state), (
            "measuring takes no random numbers of the user's"
        )
    assert skinny_choice.cache_file().exists()
