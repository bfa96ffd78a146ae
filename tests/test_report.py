"""The report: its numbers by hand, its JSON, and its tables."""

from __future__ import annotations

import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from front_fakes import compiled_llama, fake_program, fake_site, left_padded
from rich.console import Console

from sparse_compile.compiled import CompiledModel
from sparse_compile.config import SparseConfig
from sparse_compile.report import Report, format_bytes


def report_of(program: Any, contexts: tuple[int, ...] = (100,), **options: Any) -> Report:
    model, _ = compiled_llama()
    config = SparseConfig.from_options(**{"key_retention": 0.25, **options})
    return CompiledModel(model.model, config, program, None).report(contexts)  # type: ignore[arg-type]


def text_of(report: Report) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(report.render())
    return out.getvalue()


def test_numbers_by_hand() -> None:
    report = report_of(fake_program(), (10, 1000))
    # 8 sites, each 2 KV heads x 8 numbers x 4 bytes, keys and values
    assert report.kv_bytes_per_token == 8 * 2 * 2 * 8 * 4
    assert report.counts == {"dense": 2, "capture": 2, "consume": 4}
    one = 2 * 2 * 8 * 4
    short, long = report.reads
    assert short.dense_bytes == 8 * 10 * one
    # 3 of 10 keys by each of 4 query heads: 12 rows of KV, against 20 rows dense
    assert short.sparse_bytes == 4 * 10 * one + 4 * 3 * 4 * 2 * 8 * 4
    assert long.sparse_bytes == 4 * 1000 * one + 4 * 250 * 4 * 2 * 8 * 4
    assert long.ratio == pytest.approx(0.75)


def test_sparse_reads_never_exceed_dense_and_windows_count() -> None:
    sites = [
        fake_site("a", 0, 2, "dense", window=8),
        fake_site("a", 1, 2, "consume", heads=16, kv_heads=1),
    ]
    report = report_of(fake_program(sites), (100,))
    assert report.reads[0].dense_bytes == 8 * 2 * 2 * 8 * 4 + 100 * 2 * 1 * 8 * 4
    assert report.reads[0].sparse_bytes == report.reads[0].dense_bytes
    assert report.layers[0].window == 8


def test_dense_below_reads_dense() -> None:
    below, above = report_of(fake_program(), (100, 200), dense_below=150).reads
    assert below.ratio == 1.0
    assert above.ratio < 1.0


def test_json_shape() -> None:
    report = report_of(fake_program(rolled=False, roll_reason="bodies differ"))
    value = json.loads(json.dumps(report.to_dict()))
    assert value["model"] == "LlamaForCausalLM"
    assert value["loops"] == 4
    assert value["rolled"] is False
    assert value["roll_reason"] == "bodies differ"
    assert value["layers"][0] == {
        "layer": "model.layers.0.self_attn",
        "looped": True,
        "loops": 4,
        "kinds": ["dense", "capture", "consume", "consume"],
        "reasons": ["because of dense", "because of capture", "because of consume", "because of consume"],
        "window": 0,
        "key_retention": 0.25,
        "fraction": "1/4",
        "gated": False,
    }
    assert value["counts"] == {"dense": 2, "capture": 2, "consume": 4}
    assert set(value["reads"][0]) == {"context", "dense_bytes", "sparse_bytes", "ratio"}
    assert value["passes"] == [{"name": "trace", "seconds": 0.5, "counters": {"nodes": 3}}]
    assert value["retention"]["fraction"] == "1/4"
    assert value["implementation"] == "batched"
    assert value["implementation_option"] == "auto"
    assert value["memory"] == {}


def test_tables_join_layers_that_are_alike() -> None:
    sites = [fake_site("model.input.0.attn", 0, 1, "dense", reason="layer is not looped")]
    sites += [
        fake_site(f"model.layers.{layer}.attn", loop, 3, kind)
        for loop, kind in enumerate(("dense", "capture", "consume"))
        for layer in range(4)
    ]
    text = text_of(report_of(fake_program(sites)))
    assert "model.layers.0..3.attn" in text
    assert "layer is not looped" in text
    assert "0: because of dense; 1: because of capture; 2: because of consume" in text
    assert "13 attention calls per token: 5 dense, 4 capture, 4 consume" in text
    assert "rolled into one body" in text
    assert "trace 500 ms" in text
    assert "0: because of dense; 1: because of capture; 2-3: because of consume" in text_of(
        report_of(fake_program())
    )


def test_tables_say_what_is_missing() -> None:
    sites = [fake_site("a.0.b", loop, 2, "dense") for loop in range(2)]
    sites += [fake_site("c.d", loop, 2, "dense") for loop in range(2)]
    text = text_of(report_of(fake_program(sites, rolled=False, roll_reason="bodies differ"), ()))
    assert "(nothing is sparse)" in text
    assert "not rolled, bodies differ" in text
    assert "a.0.b .. c.d (2 layers)" in text
    assert "sparse off" in text_of(report_of(fake_program(sites), (), enabled=False))


def test_merged_layers_and_those_left_alone() -> None:
    merged = (
        SimpleNamespace(parts=("a.q.weight", "a.k.weight"), held_twice=0),
        SimpleNamespace(parts=("b.q.weight",) * 3, held_twice=2 << 20),
    )
    left = tuple(
        SimpleNamespace(weights=(f"{name}.q.weight",), reason="they differ in dtype") for name in "cd"
    )
    report = report_of(fake_program(merged=merged, left_alone=left))
    text = text_of(report)
    assert "linear layers: merged 5 into 2, 2.0 MiB of them held twice" in text
    assert "linear layers left alone: c.q.weight and 1 more: they differ in dtype" in text
    value = json.loads(json.dumps(report.to_dict()))
    assert value["merged_linears"][0] == ["a.q.weight", "a.k.weight"]
    assert value["merged_held_twice"] == 2 << 20
    assert value["left_alone_linears"][1] == {"weights": ["d.q.weight"], "reason": "they differ in dtype"}
    assert "linear layers" not in text_of(report_of(fake_program()))


def test_layers_that_take_their_gate_along() -> None:
    sites = [
        fake_site(f"model.layers.{layer}.attn", loop, 2, "dense", gated=layer < 2)
        for loop in range(2)
        for layer in range(4)
    ]
    left = tuple(SimpleNamespace(layer=f"model.layers.{at}.attn", reason="it is late") for at in (2, 3))
    report = report_of(fake_program(sites, gates_left_alone=left))
    value = json.loads(json.dumps(report.to_dict()))
    assert [row["gated"] for row in value["layers"]] == [True, True, False, False]
    assert value["gated_attention"] == 4
    lines = text_of(report).splitlines()
    rows = [next(line for line in lines if f"model.layers.{run}.attn" in line) for run in ("0..1", "2..3")]
    assert [[cell.strip() for cell in row.split("│")[4:5]] for row in rows] == [["yes"], ["no"]]
    assert "gates: 4 attention calls apply the gate of their output" in lines
    assert "gates left alone: model.layers.2.attn and 1 more: it is late" in lines
    assert "gated" not in text_of(report_of(fake_program()))


def test_memory_of_the_engine() -> None:
    compiled, engines = compiled_llama()
    compiled.generate(left_padded([4])["input_ids"], max_new_tokens=1)
    engines[0].store = SimpleNamespace(bytes=2048)  # type: ignore[assignment]
    report = compiled.report()
    assert report.memory == {"kv_pool": 1024, "reference_store": 2048}
    assert "kv pool 1.0 KiB, reference store 2.0 KiB" in text_of(report)


def test_the_budget_follows_the_settings_and_then_the_engine() -> None:
    assert report_of(fake_program()).budget == {}
    report = report_of(fake_program(), max_context=64, max_batch=3)
    kv = (1 + 3 * 4) * 16 * 8 * 2 * 2 * 8 * 4  # pages x page size x sites x k and v x heads x size x bytes
    store = 4 * (
        4 + 4 * (4 * 64 + 4 + 8 * (4 + 4)) + 1
    )  # slots x (count, 4 heads x (index, mass, o, c), valid)
    weights = report.budget["weights"]
    assert weights > 0
    assert report.budget == {
        "batch": 3,
        "context": 64,
        "weights": weights,
        "kv_pool": kv,
        "reference_store": store,
        "total": weights + kv + store,
    }
    assert "memory for 3 x 64 tokens: weights" in text_of(report)
    compiled, _ = compiled_llama()
    compiled.generate(left_padded([4])["input_ids"], max_new_tokens=1)
    assert compiled.report().budget["context"] == 16


def test_bytes_for_people() -> None:
    assert [format_bytes(size) for size in (0, 1023, 1024, 786432, 3 * 1024**3, 2 * 1024**4)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "768.0 KiB",
        "3.0 GiB",
        "2.0 TiB",
    ]


def test_loops_share_lines_where_columns_do_not_fit() -> None:
    """Whatever the width, every treatment with its reason; on a narrow terminal no word of them is cut."""
    report = report_of(fake_program(), (100,))
    for width, columns in ((160, True), (80, False), (40, False)):
        out = io.StringIO()
        Console(file=out, width=width).print(report.render())
        text = out.getvalue()
        assert ("loop 0" in text) == columns
        assert max(map(len, text.splitlines())) <= width
        if not columns:
            lines = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
            kinds = [
                (line[2], line[3])
                for line in lines
                if len(line) > 3 and line[3] in ("dense", "capture", "consume")
            ]
            assert kinds[:3] == [("0", "dense"), ("1", "capture"), ("2-3", "consume")]
