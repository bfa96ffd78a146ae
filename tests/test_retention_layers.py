"""Retention by layer: sequences, calibrations, and what every part of the program makes of them."""

from __future__ import annotations

import functools
import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import SparseOracle
from shared_models import shared_model

from sparse_compile import ArgumentError, SparseConfig, sparse_compile
from sparse_compile.backend import BackendOptions
from sparse_compile.backend.inspection import inspect_model
from sparse_compile.calibration import Calibration, LayerCalibration
from sparse_compile.kernels.retention import Retention
from sparse_compile.passes.base import Options
from sparse_compile.passes.errors import OptionError
from sparse_compile.passes.schedule import give_retention
from sparse_compile.quality.calibrate import calibrate
from sparse_compile.quality.forced import Part, TeacherForcing

pytestmark = pytest.mark.usefixtures("shared_traces")

LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
PROMPT = [3, 9, 4, 12, 7, 30, 31, 5, 44, 2, 17]


def calibration(*shares: str, layers: tuple[str, ...] = LAYERS, **changes: Any) -> Calibration:
    curve = (("0.1", 0.6), ("0.3", 0.8), ("0.5", 0.95))
    made = tuple(
        LayerCalibration(name, share, 0.9, curve) for name, share in zip(layers, shares, strict=True)
    )
    return Calibration(
        **{
            "model": "OuroForCausalLM",
            "capture_loop": 1,
            "target_mass": 0.9,
            "tokens": 9,
            "layers": made,
            **changes,
        }
    )


@functools.cache
def ouro() -> Any:
    return shared_model("ouro", dtype=torch.float64)


@functools.cache
def compiled(retention: Any, **options: Any) -> Any:
    settings = {"validate": False, "progress": False, "page_size": 4, **options}
    return sparse_compile(ouro(), key_retention=retention, **settings)


def tokens_of(model: Any, new: int = 10) -> list[int]:
    prompt = torch.tensor([PROMPT])
    out = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=new,
        min_new_tokens=new,
        do_sample=False,
    )
    return out[0, len(PROMPT) :].tolist()


# ---------------------------------------------------------------------- options


def test_a_sequence_is_kept_as_a_tuple_of_decimals() -> None:
    config = SparseConfig(key_retention=[0.1, "1/8", 1])
    assert config.key_retention == (0.1, "1/8", 1)
    assert config.retention == (Fraction(1, 10), Fraction(1, 8), Fraction(1))
    assert (config.retention_text, hash(config) == hash(SparseConfig(key_retention=(0.1, "1/8", 1)))) == (
        "1/10 to 1, by layer", True,
    )  # fmt: skip
    assert SparseConfig(key_retention=0.1).retention_text == "1/10"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_retention": []}, r"key_retention=\(\): must have a number for each"),
        ({"key_retention": [0.1, 2]}, "key_retention=2: must be a number greater than 0"),
        ({"key_retention": "auto"}, "calibration=None: is needed .* sparse-compile calibrate"),
        ({"key_retention": "r.json"}, r"pass key_retention='auto', calibration='r.json'"),
        ({"calibration": "r.json"}, "is for key_retention='auto' only"),
        ({"target_mass": 0.9}, "is for key_retention='auto' only"),
        ({"key_retention": "auto", "calibration": 3}, "must be the path of a file"),
        ({"key_retention": "auto", "calibration": "/no/such.json"}, "cannot be read: No such file"),
        (
            {"key_retention": "auto", "calibration": calibration("0.1", "0.3"), "capture_loop": 2},
            "measured with capture_loop=1, and it is 2; pass capture_loop=1",
        ),
        (
            {"key_retention": "auto", "calibration": calibration("0.1", "0.3", keep_last=2)},
            "measured with keep_last=2, and it is 0; pass keep_last=2",
        ),
        ({"keep_first": -1}, "keep_first=-1: must be an integer >= 0"),
        ({"keep_last": 2**31}, "keep_last=2147483648: must be at most 2,147,483,647"),
        (
            {"key_retention": "auto", "calibration": calibration("0.1", "0.3"), "target_mass": 1.5},
            "target_mass=1.5: must be a number greater than 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    for front in (SparseConfig, BackendOptions):
        with pytest.raises(ArgumentError, match=message):
            front(**options)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"format": 2}', json.dumps({**calibration("0.1", "0.3").to_dict(), "layers": []}),
     json.dumps(calibration("0.1", "3").to_dict())],
)  # fmt: skip
def test_a_file_that_is_no_calibration_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "retention.json"
    path.write_text(text)
    with pytest.raises(ArgumentError, match="is no calibration of format 1"):
        SparseConfig(key_retention="auto", calibration=path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capture_loop": 1.7}, "capture_loop is 1.7, not an integer"),
        ({"keep_first": -2}, "keep_first is -2, not an integer >= 0"),
        ({"target_mass": float("nan")}, r"target_mass is nan, not in \[0, 1\]"),
        ({"layers": calibration("0.1", "0.3", layers=(LAYERS[0], LAYERS[0])).to_dict()["layers"]}, "each once"),
    ],
)  # fmt: skip
def test_a_calibration_with_a_wrong_number_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = tmp_path / "retention.json"
    path.write_text(json.dumps({**calibration("0.1", "0.3").to_dict(), **changes}))
    with pytest.raises(ArgumentError, match=f"no calibration of format 1: ValueError: .*{message}"):
        SparseConfig(key_retention="auto", calibration=path)


def test_a_mass_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path, found = tmp_path / "retention.json", calibration("0.1", "0.3").to_dict()
    found["layers"][1]["curve"][0][1] = float("nan")
    path.write_text(json.dumps(found))
    with pytest.raises(ArgumentError, match=r"a mass of model\.layers\.1\.self_attn is nan"):
        SparseConfig(key_retention="auto", calibration=path)


def test_a_calibration_of_another_kind_of_model_is_refused() -> None:
    with pytest.raises(ArgumentError, match="calibration='DoryForCausalLM': was measured on another kind"):
        compiled("auto", calibration=calibration("0.1", "0.3", model="DoryForCausalLM"))


def test_a_calibration_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "retention.json"
    given = calibration("0.1", "0.3")
    given.save(path)
    config = SparseConfig(key_retention="auto", calibration=path)
    path.unlink()
    assert config.calibration == given
    assert config.retention == dict(zip(LAYERS, (Fraction(1, 10), Fraction(3, 10)), strict=True))
    assert config.for_device("cpu").calibration == given
    again = SparseConfig(key_retention="auto", calibration=given, target_mass=0.7)
    assert set(again.shares) == {Fraction(3, 10)}
    assert set(SparseConfig(key_retention="auto", calibration=given, target_mass=0.99).shares) == {
        Fraction(1)
    }


@given(
    masses=st.lists(st.floats(0.01, 1), min_size=1, max_size=8),
    target=st.floats(0.01, 1),
)
def test_the_choice_is_the_smallest_from_which_on_all_reach_the_target(
    masses: list[float], target: float
) -> None:
    curve = tuple((f"0.{place + 1}", mass) for place, mass in enumerate(masses))
    chosen = LayerCalibration.choose("x", curve, target)
    above = [share for share, mass in curve if mass >= target]
    reached = [
        share for place, (share, _) in enumerate(curve) if all(mass >= target for _, mass in curve[place:])
    ]
    assert chosen.retention == (reached[0] if reached else "1")
    assert chosen.retention in [*above, "1"]


# ---------------------------------------------------------------------- programs


@pytest.mark.parametrize("shares", [(0.1, 0.6), (1, 0.3)])
def test_each_layer_keeps_its_own_share(shares: tuple[float, ...]) -> None:
    model = compiled(shares)
    assert tokens_of(model) == SparseOracle(ouro(), list(shares)).generate(PROMPT, 10)
    kinds = [row.kinds for row in model.report().layers]
    sparse, dense = ("dense", "capture", "consume", "consume"), ("dense",) * 4
    assert kinds == [dense if share == 1 else sparse for share in shares]


@pytest.mark.parametrize("name", ["ouro", "dory"])
def test_the_first_and_last_keys_are_kept(name: str) -> None:
    model = ouro() if name == "ouro" else shared_model(name, dtype=torch.float64)
    options = {"keep_first": 2, "keep_last": 3}
    made = sparse_compile(model, key_retention=0.3, page_size=4, validate=False, progress=False, **options)
    expected = SparseOracle(model, 0.3, **options).generate(PROMPT, 10)
    assert tokens_of(made) == expected
    if name == "ouro":
        assert expected != tokens_of(compiled(0.3))
    report = made.report().to_dict()["retention"]
    assert (report["keep_first"], report["keep_last"], report["fraction"]) == (
        2,
        3,
        "3/10, the first 2 and the last 3",
    )


def test_a_calibration_is_the_sequence_of_its_shares() -> None:
    auto = compiled("auto", calibration=calibration("0.1", "0.6"))
    assert tokens_of(auto) == tokens_of(compiled((0.1, 0.6)))


def test_unrolled_and_mixed_programs_keep_the_same() -> None:
    assert tokens_of(compiled((0.1, 0.6), roll=False)) == tokens_of(compiled((0.1, 0.6)))
    assert tokens_of(compiled((0.1, 0.6), loops_per_step=1)) == tokens_of(compiled((0.1, 0.6)))


def test_memory_and_accounting_follow_the_layers() -> None:
    model = compiled((0.1, 0.5), key_bucket=1)
    engine = model.serve(1, 40)
    assert engine.store.spec.capacity == 20
    prompt = torch.tensor([PROMPT])
    (metrics,) = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=3,
        do_sample=False,
        return_dict_in_generate=True,
    ).metrics
    heads, lengths = ouro().config.num_attention_heads, (len(PROMPT) + 1, len(PROMPT) + 2)
    kept = sum(-(-length // 10) + -(-length // 2) for length in lengths)
    assert metrics.decode_keys_read == heads * (2 * kept + 4 * sum(lengths))


def test_the_report_names_each_layer() -> None:
    report = compiled((0.1, 0.5)).report()
    value = report.to_dict()
    assert {one["layer"]: one["fraction"] for one in value["layers"]} == dict(
        zip(LAYERS, ("1/10", "1/2"), strict=True)
    )
    assert value["retention"]["by_layer"]
    assert value["retention"]["fraction"] == "1/10 to 1/2, by layer"
    assert [row.retention.share for row in report.layers] == [Fraction(1, 10), Fraction(1, 2)]


def test_a_model_of_other_layers_is_refused() -> None:
    sites = compiled((0.1, 0.6)).program.sites
    three = tuple(map(Retention.of, (0.1, 0.2, 0.3)))
    with pytest.raises(OptionError, match="must have one number for each of the 2 attention layers"):
        give_retention(sites, Options(three))
    names = (LAYERS[0], "model.layers.7.self_attn")
    for layers, missing in (((*LAYERS, names[1]), "the model has no"), (names[:1], "the calibration has no")):
        with pytest.raises(OptionError, match=f"is a layer of one side only: {missing} such layer"):
            give_retention(sites, Options(dict.fromkeys(layers, Retention.of(0.1))))


def test_the_backend_keeps_the_same_by_layer() -> None:
    decode = inspect_model(ouro(), {"key_retention": [0.1, 0.5]}).decode
    assert decode is not None
    assert [(site.layer, str(site.retention)) for site in decode.sites if site.kind == "capture"] == [
        (LAYERS[0], "1/10"), (LAYERS[1], "1/2"),
    ]  # fmt: skip
    text = inspect_model(
        ouro(), {"key_retention": "auto", "calibration": calibration("0.1", "0.3")}
    ).graph_text("after")
    assert "retention_den = 10" in text
    assert "retention_num = 3" in text
    with pytest.raises(OptionError, match="one number for each of the 2 attention layers"):
        inspect_model(ouro(), {"key_retention": [0.1, 0.2, 0.3]})
    assert "keep_first = 2, keep_last = 3" in inspect_model(
        ouro(), {"keep_first": 2, "keep_last": 3}
    ).graph_text("after")


# ---------------------------------------------------------------------- calibration of a model


def test_a_curve_is_what_runs_at_each_retention_have() -> None:
    text = torch.randint(3, 60, (90,), generator=torch.Generator().manual_seed(1))
    grid = ("0.1", "0.3", "0.6")
    seen: list[tuple[int, int]] = []
    found = calibrate(
        ouro(), text, 0.75, windows=2, window=40, prompt=10, grid=grid, progress=lambda *now: seen.append(now)
    )
    assert seen == [(2, 6), (4, 6), (6, 6)]
    assert [one.layer for one in found.layers] == list(LAYERS)
    runner = TeacherForcing(compiled(0.3), 40)
    (forced,) = runner.run(torch.stack((text[:40], text[45:85])), [Part(10)])
    mass = forced.mass
    runner.close()
    assert mass is not None
    for place, layer in enumerate(found.layers):
        assert layer.curve[1][1] == pytest.approx(float(mass[:, :, place].mean()), abs=2e-6)
        assert layer.mass >= 0.75
        assert [share for share, _ in layer.curve] == list(grid)
    assert Calibration.of_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_nothing_to_calibrate_is_refused() -> None:
    text = torch.arange(3, 60)
    with pytest.raises(ArgumentError, match="target_mass=0"):
        calibrate(ouro(), text, 0)
    with (
        pytest.raises(ArgumentError, match="no loop captures"),
        pytest.warns(UserWarning, match="last of 4 loops"),
    ):
        calibrate(ouro(), text, windows=1, window=40, prompt=10, capture_loop=3)
    with pytest.raises(ValueError, match=r"windows=2: of 40 tokens each need 80, .* pass .* windows=1$"):
        calibrate(ouro(), text, windows=2, window=40)
