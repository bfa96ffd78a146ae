"""The benchmarks run, on a tiny model on the CPU, and count and sort as they say."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared_models import fresh_model

from benchmarks import breakdown, decode, models, serving, speculation
from benchmarks.continuous import IS_SUPPORTED, batching_config, looped_paged_cache
from benchmarks.systems import Ours, Point, TransformersEager, TransformersStatic
from sparse_compile.models import tiny_model
from sparse_compile.models.branches import Branches
from sparse_compile.runtime.graphs import GraphExecutor
from sparse_compile.runtime.sampler import Drawn

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module", autouse=True)
def _short() -> Iterator[None]:
    """Models of one kind are exported once, and one step is enough to see where its time goes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("benchmarks.models.tiny_model", fresh_model)
        patch.setattr(breakdown, "kernel_classes", partial(breakdown.kernel_classes, steps=1))
        yield


@pytest.fixture(scope="module")
def setup() -> decode.Setup:
    return decode.setup_of(decode.parse(["--tiny"]), "ouro-1.4b")


def test_decode_measures_every_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "decode.json"
    decode.main(
        ["--tiny", "--points", "2x40", "--breakdown", "--extras", "host,first-token", "--out", str(out)]
    )
    report = json.loads(out.read_text())
    assert {"gpu", "torch", "triton", "transformers", "commit", "command"} <= set(report)
    assert [row["system"] for row in report["rows"]] == list(decode.SYSTEMS)
    for row in report["rows"]:
        if row["system"] == "transformers-cb" and not IS_SUPPORTED:
            continue
        assert "error" not in row, row
        assert (row["model"], row["batch"], row["context"]) == ("tiny:ouro", 2, 40)  # no published shape
        assert row["step_ms"] > 0
        assert row["floor_ms"] == pytest.approx(
            sum(row["bytes"].values()) / decode.BANDWIDTH * 1000, abs=1e-3
        )
        attention = row["breakdown"].get("attention", 0)
        assert row["other_ms"] == pytest.approx(sum(row["breakdown"].values()) - attention, abs=2e-3)
    assert report["host"]["wall_ms"] > 0
    assert report["first_token"][0]["ratio"] > 0
    shown = capsys.readouterr().out.splitlines()
    assert json.loads(shown[0])["gpu"] == report["gpu"]  # conditions first, then the gate
    assert shown[1].startswith("gate: relative error")


def test_a_system_that_fails_is_a_row_with_the_reason(
    setup: decode.Setup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setitem(decode.SYSTEMS, "dense", broken)
    row = decode.measure("dense", setup, Point(1, 32), decode.parse(["--tiny"]))
    assert row["error"] == "RuntimeError: no such kernel"
    assert "step_ms" not in row


def test_steps_with_gates_in_attention_and_without_stand_side_by_side(tmp_path: Path) -> None:
    out = tmp_path / "decode.json"
    decode.main(["--tiny", "--model", "hrm-text", "--gates-apart", "--systems", "sparse", "--points", "1x40",
                 "--out", str(out)])  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in rows] == ["sparse", "sparse-gates-apart"]
    assert all(row["step_ms"] > 0 for row in rows)


def test_one_command_measures_several_models(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "decode.json", tmp_path / "steps.png"
    models = ["dory", "hrm-text"]
    arguments = ["--model", ",".join(models), "--points", "2x40", "--breakdown", "--out", str(out)]
    decode.main(["--tiny", *arguments, "--plot", str(picture)])
    rows = json.loads(out.read_text())["rows"]
    expected = [(f"tiny:{model}", system) for model in models for system in decode.OURS]
    assert [(row["model"], row["system"]) for row in rows] == expected
    for row in rows:
        assert "error" not in row, row
        assert row["other_ms"] == pytest.approx(
            sum(row["breakdown"].values()), abs=2e-3
        )  # no kernels of attention
    assert picture.stat().st_size > 1000


MLP = 3 * 64 * 32


@pytest.mark.parametrize(
    ("model", "layers", "once"),
    [
        # Layers in the loop once per loop; norms of a layer 4 x 32, and the last one in every loop; head; frequencies.
        ("ouro-1.4b", 2 * 4 * (4 * 32 * 32 + MLP + 4 * 32) + 4 * 32, 272 * 32 + 4),
        # 1 layer, 2 of them 3 times, 1 layer; k and v of 2 heads; scales; the head and its scale; frequencies.
        ("dory", (1 + 2 * 3 + 1) * (3 * 32 * 32 + 2 * 16 * 32 + MLP + 4 * 32 + 2 * 64), 272 * 33 + 2 * 4),
        # 2 layers of the stack L twice and 2 of H once, in each of 3 cycles; the state that L begins with.
        ("hrm-text", 3 * (2 * 2 + 2) * (5 * 32 * 32 + MLP), 272 * 32 + 32 + 4),
    ],
)
def test_weights_that_a_step_reads_by_hand(model: str, layers: int, once: int) -> None:
    """Of the embedding, one line of 32 numbers per row."""
    setup = decode.setup_of(decode.parse(["--tiny"]), model)
    for rows in (1, 3):
        assert setup.weight_bytes(Point(rows, 100)) == 4 * (layers + once + rows * 32)


def test_keys_of_sliding_windows_by_hand() -> None:
    """Windows of 8 in the first layer and in one of the loop; the full layer of the loop captures in the first loop."""
    setup = decode.setup_of(decode.parse(["--tiny"]), "dory")
    one = 2 * 2 * 8 * 4  # k and v of 2 heads of 8 numbers of 4 bytes
    windows, full, kept = (1 + 3) * 8, 100, 2 * 10  # 2 query heads may keep different keys of a KV head
    assert setup.kv_bytes(Point(3, 100), sparse=False) == 3 * one * (windows + (3 + 1) * full)
    assert setup.kv_bytes(Point(3, 100), sparse=True) == 3 * one * (windows + full + 2 * kept + full)


def test_published_sizes_can_be_sparse() -> None:
    """Where a model has two loops, the first one must capture."""
    assert set(decode.MODELS) >= {"ouro-1.4b", "dory", "hrm-text"}
    for shape in decode.MODELS.values():
        config = shape.config()
        runs = getattr(config, "total_ut_steps", 0) or getattr(config, "n_recurrent_loops", 0)
        assert (runs or config.H_cycles * config.L_cycles) > shape.capture_loop + 1


def test_keys_of_full_attention_by_hand(setup: decode.Setup) -> None:
    one = 2 * 4 * 8 * 4  # k and v of 4 heads of 8 numbers of 4 bytes
    assert setup.kv_bytes(Point(3, 100), sparse=False) == 3 * 8 * 100 * one
    assert setup.kv_bytes(Point(3, 100), sparse=True) == 3 * (4 * 100 + 4 * 10) * one


def test_our_system_decodes_over_the_random_pool(setup: decode.Setup) -> None:
    system = Ours(setup, Point(2, 48), sparse=True)
    before = system.engine.metrics("row-0").new_tokens
    for _ in range(3):
        system.step()
    metrics = system.engine.metrics("row-0")
    assert metrics.new_tokens == before + 3
    assert 0 < metrics.decode_keys_read < metrics.decode_keys_dense
    system.close()


def test_eager_and_static_decode_alike_over_one_cache(setup: decode.Setup) -> None:
    point = Point(2, 20)
    eager, static = TransformersEager(setup, point), TransformersStatic(setup, point)
    static.tokens.copy_(eager.tokens)
    for ours, theirs in zip(static.cache.layers, eager.cache.layers, strict=True):
        ours.keys[:, :, :20], ours.values[:, :, :20] = theirs.keys, theirs.values
    for _ in range(4):
        eager.step()
        static.step()
        assert torch.equal(eager.tokens, static.tokens)
    eager.close()
    static.close()


@pytest.mark.skipif(not IS_SUPPORTED, reason="needs a later transformers")
def test_continuous_batching_of_a_looped_model_gives_its_own_tokens() -> None:
    from transformers import GenerationConfig

    model = tiny_model("ouro")
    prompts = [[5, 77, 130, 9, 33], [8, 9, 10]]
    own = [
        model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    generation = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    with looped_paged_cache(model):
        found = model.generate_batch(
            prompts, generation_config=generation, continuous_batching_config=batching_config(64, 2)
        )
    assert [found[f"req_{row}"].generated_tokens for row in range(2)] == own


def test_serving_serves_everyone(tmp_path: Path) -> None:
    out = tmp_path / "serving.json"
    serving.main(["--tiny", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in rows] == list(serving.SYSTEMS)
    for row in rows:
        if row["system"] == "transformers-cb" and not IS_SUPPORTED:
            continue
        assert "error" not in row, row
        assert row["tokens"] == 5 * 4
        assert 0 < row["first_token_ms_p50"] <= row["first_token_ms_p99"]


def test_arrivals_are_the_same_for_every_system() -> None:
    options = serving.parse(["--tiny"])
    first, second = (serving.make_arrivals(options, 272) for _ in range(2))
    assert first == second
    assert all(8 <= len(one.prompt) <= 24 and min(one.prompt) >= 3 for one in first)
    assert [one.at for one in first] == sorted(one.at for one in first)


def test_times_of_a_request_by_hand() -> None:
    arrivals = [
        serving.Arrival(1.0, [5], 3, [1.5, 1.7, 1.9]),
        serving.Arrival(2.0, [5], 2, [2.1, 2.5]),
    ]
    found = serving.summary(arrivals)
    assert found["tokens"] == 5
    assert found["tokens_per_s"] == pytest.approx(5 / 1.5, abs=0.06)
    assert found["first_token_ms_p50"] == pytest.approx(300)
    assert found["per_token_ms_p99"] == pytest.approx(400)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_red_fused_add_mul_pow_rsqrt_3", "pointwise and norms"),
        ("triton_tem_fused_mm_7", "products"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "products"),
        ("void pytorch_flash::flash_fwd_splitkv_kernel<...>", "attention"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "attention"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps<float>>", "sampling"),
        ("void at::native::vectorized_elementwise_kernel<4, AddFunctor>", "pointwise and norms"),
        ("ncclDevKernel", "other"),
    ],
)
def test_kernel_classes(name: str, kind: str) -> None:
    assert breakdown.classify(name) == kind


def test_our_kernels_are_attention() -> None:
    ours = breakdown.our_kernels()
    assert ours
    assert all(breakdown.classify(name, ours) == "attention" for name in ours)
    assert breakdown.classify("skinny_kernel", ours) == "products"
    assert breakdown.classify("greedy_kernel", ours) == "sampling"


def test_kernels_count_from_where_the_one_ahead_has_ended() -> None:
    """The second kernel starts early and waits; the selection runs beside both, and makes nobody wait."""
    events = [
        breakdown.Event("product", 1.0, 14.0, 13.0),
        breakdown.Event("attention_kernel", 0.0, 10.0, 10.0),
        breakdown.Event("select_kernel", 10.0, 18.0, 8.0),
        breakdown.Event("product", 20.0, 21.0, 1.0),
        breakdown.Event("attention_kernel", 13.0, 19.0, 6.0),
    ]
    found = breakdown.in_turn(events, {"select_kernel"})
    assert [(event.name, event.begin, event.end, event.spent) for event in found] == [
        ("attention_kernel", 0.0, 10.0, 10.0),
        ("product", 10.0, 14.0, 4.0),
        ("select_kernel", 10.0, 18.0, 8.0),
        ("attention_kernel", 14.0, 19.0, 5.0),
        ("product", 20.0, 21.0, 1.0),
    ]
    selections = breakdown.kernels_of(breakdown.SELECTIONS)
    assert {"select_kernel", "narrow_kernel", "retain_kernel"} <= selections <= breakdown.our_kernels()
    assert "attention_kernel" not in selections


def test_moments_count_once() -> None:
    assert breakdown.covered([(4.0, 6.0), (0.0, 2.0), (1.0, 1.5), (1.0, 3.0)]) == 5.0
    assert breakdown.covered([]) == 0.0


def test_table_and_plot(tmp_path: Path) -> None:
    times = {"attention": 3.0, "products": 1.0}
    text = breakdown.table("2x64 sparse", times, {"attention": 4_350_000_000}, 4.35e12)
    assert "4.000 ms of kernels per step" in text
    assert "75.0 %" in text
    assert "floor   1.000 ms   33.3 % of it" in text
    pytest.importorskip("matplotlib")
    row = {"batch": 2, "context": 64, "system": "sparse", "breakdown": times, "floor_ms": 2.0}
    breakdown.plot([row, {"system": "dense"}], tmp_path / "steps.png")
    assert (tmp_path / "steps.png").stat().st_size > 1000


def test_bad_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for parse, arguments in (
        (decode.parse, ["--systems", "sparse,spare"]),
        (decode.parse, ["--extras", "hosts"]),
        (decode.parse, ["--model", "ouro-1.4b,huginn"]),
        (serving.parse, ["--systems", "vllm"]),
        (speculation.parse, ["--modes", "ordinary,block:3"]),
    ):
        with pytest.raises(SystemExit):
            parse(arguments)
        assert "known:" in capsys.readouterr().err


def test_systems_of_transformers_are_for_ouro_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.parse(["--model", "dory", "--systems", "sparse,transformers-static"])
    assert "transformers-static runs Ouro's shapes alone" in capsys.readouterr().err
    assert list(decode.parse(["--model", "dory"]).models["dory"]) == list(decode.OURS)
    assert list(decode.parse([]).models["ouro-1.4b"]) == list(decode.SYSTEMS)
    both = decode.parse(["--model", "ouro-1.4b,dory", "--systems", "dense,transformers-static"]).models
    assert {name: list(systems) for name, systems in both.items()} == {
        "ouro-1.4b": ["dense", "transformers-static"],
        "dory": ["dense"],
    }


def test_rows_are_added_to_a_file_of_the_same_conditions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "decode.json"
    arguments = ["--tiny", "--systems", "dense", "--out", str(out), "--points"]
    with pytest.raises(SystemExit):
        decode.parse([*arguments, "1x8", "--add"])
    assert "there is no file" in capsys.readouterr().err
    first = decode.main([*arguments, "1x8"])
    added = decode.main([*arguments, "1x9", "--add"])
    kept = json.loads(out.read_text())
    assert [row["context"] for row in kept["rows"]] == [8, 9]
    assert kept["rows"][0] == first["rows"][0]
    assert kept["command"] == added["command"] == f"{first['command']} && {first['command']}"
    out.write_text(json.dumps(kept | {"commit": "another"}))
    with pytest.raises(SystemExit, match="has commit 'another' and not"):
        decode.main([*arguments, "1x9", "--add"])


@pytest.mark.parametrize("content", ['{"rows": [', "[]", "null", '{"command": "x"}', '{"rows": []}'])
def test_rows_are_added_to_reports_alone(content: str, tmp_path: Path) -> None:
    (tmp_path / "decode.json").write_text(content)
    with pytest.raises(SystemExit, match=r"--add: .*decode\.json (cannot be read|is no report)"):
        decode.added_to(tmp_path / "decode.json", {"command": "y"}, [])


def test_extras_of_a_file_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "decode.json").write_text('{"command": "x", "rows": [], "first_token": []}')
    with pytest.raises(SystemExit, match="has first-token already"):
        decode.added_to(tmp_path / "decode.json", {"command": "y"}, ["host", "first-token"])
    assert decode.added_to(tmp_path / "decode.json", {"command": "y"}, ["host"])["command"] == "x && y"


def test_dory_has_the_weights_that_are_made_smaller() -> None:
    model = models.tiny_model("dory")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    name, factor = models.MODELS["dory"].smaller
    models.make_smaller(model, name, factor)
    changed = {path for path, weight in model.named_parameters() if not torch.equal(weight, before[path])}
    assert changed == {path for path in before if path.rpartition(".")[2].startswith("lambda")}
    for path in changed:
        assert torch.equal(dict(model.named_parameters())[path], before[path] * factor)
    with pytest.raises(ValueError, match="'lambada' begins no name"):
        models.make_smaller(model, "lambada", factor)
    assert models.make_smaller(model, *models.MODELS["ouro-1.4b"].smaller) is model


def test_no_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.parse(["--model", ","])
    assert "names no model" in capsys.readouterr().err


def test_a_name_that_comes_twice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--model", "dory@1x8,dory"], ["--systems", "dense,sparse@1x8,sparse@2x8"]):
        with pytest.raises(SystemExit):
            decode.parse(arguments)
        assert "is named twice in" in capsys.readouterr().err


@pytest.mark.parametrize("points", ["2y5", "2x3x4", "0x4", "4x0", "2x"])
def test_what_is_no_point_is_refused(points: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--points", points], ["--systems", f"sparse@{points}"]):
        with pytest.raises(SystemExit):
            decode.parse(arguments)
        assert f"--points: {points!r} is no point" in capsys.readouterr().err


def test_points() -> None:
    assert decode.parse_points("2x32768,1x1024") == [Point(2, 32768), Point(1, 1024)]
    assert isinstance(decode.parse([]), argparse.Namespace)
    assert str(decode.parse([]).models["ouro-1.4b"]["sparse"][0]) == "2x32768"
    options = decode.parse(
        ["--model", "ouro-1.4b,dory@4x8", "--systems", "dense,sparse@1x5+2x6", "--points", "3x7"]
    )
    assert options.models == {
        "ouro-1.4b": {"dense": [Point(3, 7)], "sparse": [Point(1, 5), Point(2, 6)]},
        "dory": {"dense": [Point(4, 8)], "sparse": [Point(1, 5), Point(2, 6)]},
    }


def test_speculation_measures_every_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speculation.json"
    speculation.main(["--tiny", "--scale", "0.001", "--out", str(out)])
    report = json.loads(out.read_text())
    assert {"gpu", "torch", "triton", "commit", "command"} <= set(report)
    assert report["left_out"] == []
    found = [
        (
            row["batch"],
            row["context"],
            row["attention"],
            row["mode"],
            row["draft_loops"],
            row["num_draft_tokens"],
        )
        for row in report["rows"]
    ]
    modes = [("ordinary", 0, 0), ("pipeline", 2, 0), ("pipeline", 1, 0), ("block", 2, 3)]
    places = [(1, 32, "dense"), (2, 48, "sparse")]
    assert found == [(*place, *mode) for place in places for mode in modes]
    for row in report["rows"]:
        assert row["tokens_per_s"] > 0
        assert row["acceptance"] is None if row["mode"] == "ordinary" else 0.5 < row["acceptance"] <= 1
        most = row["num_draft_tokens"] or 1
        assert 0.5 * most < row["tokens_per_step"] <= most
    ordinary, pipeline = report["rows"][:2]
    assert ordinary["over_ordinary"] == 1
    assert pipeline["over_ordinary"] == pytest.approx(
        pipeline["tokens_per_s"] / ordinary["tokens_per_s"], abs=1e-3
    )
    assert json.loads(capsys.readouterr().out.splitlines()[0])["gpu"] == report["gpu"]


def test_a_scale_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    options = speculation.parse(["--tiny", "--least-acceptance", "0.9"])
    setup = speculation.setup_of(options)
    branches = Branches(setup.model)
    monkeypatch.setattr(
        speculation, "SCALES", (1.0, 0.0)
    )  # without branches every loop leaves the state as it is
    assert speculation.search(setup, branches, options.places[0], options) == 0
    monkeypatch.setattr(speculation, "SCALES", (1.0,))
    with pytest.raises(RuntimeError, match="pass a lower --least-acceptance"):
        speculation.search(setup, branches, options.places[0], options)


def test_a_window_with_captures_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    options = speculation.parse(["--tiny"])
    windows = [speculation.Window(4, 1.0, 4, 0, 0, captured) for captured in (1, 2, 1, 0)]
    taken = iter(windows)

    class Fake:
        tokens = (1, 2, 2, 3)

        def window(self, steps: int) -> speculation.Window:
            return next(taken)

        def close(self) -> None: ...

    monkeypatch.setattr(speculation, "Decoder", lambda *_: Fake())
    row = speculation.measure(None, options.places[0], speculation.Mode("ordinary"), options)
    assert (row["tokens_per_s"], row["distinct"]) == (4, 0.75)
    assert list(taken) == []
    monkeypatch.setattr(Fake, "window", lambda *_: windows[0])
    with pytest.raises(RuntimeError, match="captured in each of"):
        speculation.measure(None, options.places[0], speculation.Mode("ordinary"), options)


@pytest.mark.parametrize("mode", ["ordinary", "pipeline:2", "block:3:2"])
def test_graphs_of_whole_rounds_and_steps_are_captures_too(
    monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    class Again:
        """Stands in for a CUDA graph: whose replay runs the same again, over the same plan."""

        def __init__(self, run: Any, made: Any) -> None:
            self.run, self.made = run, made

        def replay(self) -> None:
            made = self.run()
            pairs = [(made, self.made)]
            if isinstance(made, Drawn):
                pairs = [
                    (getattr(made, one), getattr(self.made, one)) for one in ("tokens", "logprobs", "flags")
                ]
            for new, old in pairs:
                old.copy_(new)

    def captured(self: GraphExecutor, run: Any, device: Any) -> tuple[Again, Any]:
        made = run()
        return Again(run, made), made

    monkeypatch.setattr(GraphExecutor, "_captured", captured)
    options = speculation.parse(["--tiny", "--modes", mode])
    system = speculation.Decoder(speculation.setup_of(options), *options.places[0], options.modes[0])
    engine, rounds = system.engine, system.engine._runner.rounds
    executor: Any = GraphExecutor(engine.executor, engine.pool.spec.page_size)  # type: ignore[arg-type]
    engine.executor = engine._runner.executor = executor
    if rounds is not None:
        rounds.executor = executor
    assert system.window(4).captured > 0
    assert system.window(4).captured == 0
    system.close()


def test_acceptance_of_a_window_by_hand() -> None:
    window = speculation.Window(steps=10, seconds=1.0, tokens=16, drafted=20, accepted=6, captured=0)
    assert window.acceptance(speculation.Mode("ordinary")) is None
    assert window.acceptance(speculation.Mode("pipeline", 1)) == 6 / 16
    assert window.acceptance(speculation.Mode("block", 1, 3)) == 6 / 20


def test_points_beyond_the_budget_are_left_out() -> None:
    report = speculation.main(["--tiny", "--scale", "0.001", "--budget", "0", "--modes", "ordinary"])
    assert report["rows"] == []
    assert [one["what"] for one in report["left_out"]] == ["1x32:dense ordinary", "2x48:sparse ordinary"]


def test_attention_points_table_and_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("matplotlib")
    from benchmarks import attention

    assert attention.parse_point("8x4096:huginn:0.05:32") == attention.Point(8, 4096, 55, 55, 96, "0.05", 32)
    assert len(attention.parse([]).points) == len(set(attention.parse([]).points)) == len(attention.POINTS)
    with pytest.raises(SystemExit):
        attention.parse(["--points", "8x4096:round"])
    assert "the shape 'round' must be one of mha, dory, huginn" in capsys.readouterr().err
    sizes = {"heads": 16, "kv_heads": 16, "head_dim": 128, "retention": 0.1, "loops": 4}
    times = {
        "dense_us": 100.0,
        "dense_gbps": 4000.0,
        "capture_us": 120.0,
        "consume_us": 13.0,
        "best_dense_us": 98.0,
    }
    rows = [
        {"rows": count, "context": context, "loops_ratio": ratio, **sizes, **times}
        for count in (1, 32)
        for context, ratio in ((512, 1.1), (8192, 0.7))
    ]
    result = tmp_path / "attention.json"
    result.write_text(json.dumps({"rows": rows}))
    attention.main(["--plot-of", str(result)])
    assert "32 x 8,192" in capsys.readouterr().out
    assert result.with_suffix(".png").stat().st_size > 5000


# ---------------------------------------------------------------------- products as Inductor chooses them


@pytest.fixture
def products_benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark of products with a compiler that returns what it is given, and one second between two looks at the
    clock; our kernel always takes 7 us.
    """
    pytest.importorskip("triton")
    from benchmarks import inductor_products, products

    seconds = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: float(next(seconds)))
    monkeypatch.setattr(inductor_products, "time", clock)
    monkeypatch.setattr(inductor_products, "tuned", lambda function, *given: function)
    monkeypatch.setattr(products, "time_tiles", lambda *_: 7.0)
    monkeypatch.setattr(products.Bench, "time", lambda self, calls: float(len([call() for call in calls])))
    return products


def test_products_as_inductor_chooses_them(
    products_benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """That part alone, on request; a compiler that fails, or is wrong, is a row with the reason."""
    from benchmarks import inductor_products

    def tuned(function: Any, x: torch.Tensor, weight: torch.Tensor, gated: bool) -> Any:
        if weight.shape == (64, 96):  # down
            raise RuntimeError("no compiler\nand a long story")
        if weight.shape == (160, 64):  # head
            return lambda *given: function(*given) + 1
        return function

    monkeypatch.setattr(inductor_products, "tuned", tuned)
    out = tmp_path / "products.json"
    arguments = ["products", "--tiny", "--no-products", "--no-chain", "--out", str(out)]
    monkeypatch.setattr("sys.argv", arguments)
    products_benchmark.main()
    assert set(json.loads(out.read_text())) == {"model"}
    monkeypatch.setattr("sys.argv", [*arguments, "--inductor"])
    products_benchmark.main()
    found = json.loads(out.read_text())
    names = ["qkv", "o", "gate_up", "down", "gate", "head"]
    assert set(found) == {"model", "inductor"}
    assert [(row["rows"], row["product"]) for row in found["inductor"]] == [
        (m, n) for m in (1, 4) for n in names
    ]
    for row in found["inductor"]:
        failed = row["product"] in ("down", "head")
        assert (row["cublas_us"], row["inductor_us"], row["ours_us"]) == (1.0, None if failed else 1.0, 7.0)
        assert ("inductor_error" in row) == failed
        assert row["floor_us"] > 0
    down, _, head = found["inductor"][3:6]
    assert down["inductor_error"] == "RuntimeError: no compiler"
    assert head["inductor_error"].startswith("wrong result: error ")
    table = capsys.readouterr().out.splitlines()
    assert next(line for line in table if line.startswith("down")).split()[3:6] == ["1.00", "-", "7.00"]


def test_inductor_compiles_no_product_out_of_time(
    products_benchmark: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The clock is read once at first, once before a product, and twice in it."""
    out = tmp_path / "products.json"
    arguments = ["products", "--tiny", "--no-products", "--no-chain", "--inductor", "--inductor-seconds", "4"]
    monkeypatch.setattr("sys.argv", [*arguments, "--out", str(out)])
    products_benchmark.main()
    assert [row["product"] for row in json.loads(out.read_text())["inductor"]] == ["qkv", "o"]
    assert capsys.readouterr().out.count("out of time") == 2 * 6 - 2
