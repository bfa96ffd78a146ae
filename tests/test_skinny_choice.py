"""Which tiles a shape runs with: measured once, remembered in a file, never silently wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from sparse_compile.kernels import skinny, skinny_choice
from sparse_compile.kernels.skinny_choice import BUCKETS, Shape
from sparse_compile.kernels.skinny_tuning import Gpu, Tiles

CPU = torch.device("cpu")
SHAPE = Shape(2048, 512, False, torch.bfloat16, CPU)
CHOICE: dict[int, Tiles | None] = {8: Tiles(lines=32, columns=256), 16: Tiles(), 32: None, 64: None}


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[Shape, int]]:
    """Every test has a folder of its own, and a machine that can measure; the list has what was measured."""
    found: list[tuple[Shape, int]] = []

    def measure(shape: Shape, bucket: int) -> Tiles | None:
        found.append((shape, bucket))
        return CHOICE[bucket]

    monkeypatch.setenv("SPARSE_COMPILE_CACHE", str(tmp_path / "cache"))
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


def test_a_file_that_cannot_be_read_is_measured_anew(
    measured: list[tuple[Shape, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = skinny_choice.cache_file()
    file.parent.mkdir(parents=True)
    file.write_text('{"format": 1, "entr')
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


def test_no_memory_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shape: Shape, bucket: int) -> None:
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
