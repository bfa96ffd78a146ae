"""What users ask for most, end to end on a real program: streams, progress, metrics, seeds, logprobs, JSON."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cases_common import compiled_ouro, left_padded, new_tokens, prompts
from oracle import SparseOracle
from shared_models import shared_model
from transformers.generation.streamers import BaseStreamer

from sparse_compile import cli, sparse_compile
from sparse_compile.models import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.fixture(scope="module")
def ouro() -> Any:
    return compiled_ouro()


# Asked for most


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def test_streaming_without_a_server(ouro: Any) -> None:
    (row,) = prompts(6)
    tokens = new_tokens(ouro, [row], 10)[0]
    items = list(ouro.stream([row], max_new_tokens=10, tokenizer=tiny_tokenizer()))
    assert [item.token_id for item in items] == tokens
    assert "".join(item.text for item in items) == tiny_tokenizer().decode(tokens, skip_special_tokens=True)
    recorder = Recorder()
    ouro.generate([row], streamer=recorder, max_new_tokens=10)
    assert recorder.tokens == [*row, *tokens, -1]


def test_progress_is_switched_off_or_replaced(ouro: Any, capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, int]] = []
    rows = left_padded(prompts(3, 5))
    for progress in (False, None, lambda done, total: seen.append((done, total))):
        ouro.generate(**rows, max_new_tokens=4, progress=progress)
    assert seen == [(done, 8) for done in range(1, 9)]
    assert capfd.readouterr() == ("", "")


def keys_read(compiled: Any, prompt: int, new: int, kept: Callable[[int], int]) -> tuple[int, int]:
    """(keys attended, keys that dense would attend), counted row by row and site by site."""
    read = dense = 0
    for row in range(prompt + new - 1):
        for site in compiled.program.sites:
            visible = min(row + 1, site.window or row + 1)
            dense += site.heads * visible
            sparse = site.kind == "consume" and row >= prompt
            read += site.heads * (kept(row + 1) if sparse else visible)
    return read, dense


def test_metrics_per_request() -> None:
    compiled = sparse_compile(shared_model("dory"), key_retention=0.25)
    lengths, new = (3, 12), 7
    out = compiled.generate(
        **left_padded(prompts(*lengths)), max_new_tokens=new, return_dict_in_generate=True
    )
    for length, metrics in zip(lengths, out.metrics, strict=True):
        assert (metrics.prompt_tokens, metrics.new_tokens) == (length, new)
        assert 0 < metrics.time_to_first_token_s < 60
        assert 0 < metrics.time_per_token_s < 60
        assert metrics.loops_run == compiled.program.loops * (length + new - 1)
        wanted = keys_read(compiled, length, new, lambda visible: -(-visible // 4))
        assert (metrics.keys_read, metrics.keys_dense) == wanted
        assert metrics.decode_keys_read < metrics.decode_keys_dense
        json.dumps(asdict(metrics))


def test_seeds_per_request(ouro: Any) -> None:
    settings = {"do_sample": True, "temperature": 2.0, "top_k": 0, "max_new_tokens": 8}
    rows = prompts(4, 9, 6)

    def sampled(rows: list[list[int]], seed: Any) -> list[list[int]]:
        out = ouro.generate(**left_padded(rows), **settings, seed=seed)
        return out[:, max(len(row) for row in rows) :].tolist()

    batch = sampled(rows, [11, 12, 13])
    assert [sampled([row], seed)[0] for row, seed in zip(rows, (11, 12, 13), strict=True)] == batch
    assert sampled(rows[::-1], [13, 12, 11]) == batch[::-1]
    other = sampled(rows, [11, 99, 13])
    assert [a == b for a, b in zip(batch, other, strict=True)] == [True, False, True]


@pytest.mark.parametrize("sample", [False, True])
def test_logprobs_belong_to_the_emitted_ids(ouro: Any, sample: bool) -> None:
    rows = prompts(4, 9)
    first = new_tokens(ouro, rows, 10)
    settings: dict[str, Any] = {"max_new_tokens": 10, "eos_token_id": first[1][3], "repetition_penalty": 1.2}
    if sample:
        settings |= {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "seed": 3}
    out = ouro.generate(
        **left_padded(rows), **settings, output_scores=True, output_logits=True, return_dict_in_generate=True
    )
    streamed = list(ouro.stream(**left_padded(rows), **settings))
    for row, logprobs in enumerate(out.logprobs):
        emitted = out.sequences[row, 9 : 9 + len(logprobs)].tolist()
        assert out.metrics[row].new_tokens == len(logprobs)
        assert [item.token_id for item in streamed if item.row == row] == emitted
        assert [item.logprob for item in streamed if item.row == row] == logprobs
        for step, token in enumerate(emitted):
            assert logprobs[step] == pytest.approx(float(out.scores[step][row].log_softmax(-1)[token]))


def test_a_local_path_needs_no_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the command line, with the hub switched on and every way to it barred."""
    shared_model("ouro").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    calls: list[object] = []

    def refuse(*args: object, **kwargs: object) -> None:
        calls.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    for command in (
        ["check", str(tmp_path), "--json"],
        ["inspect", str(tmp_path), "--json", "--no-validate"],
        ["generate", str(tmp_path), "--prompt", "loops", "--max-new-tokens", "4", "--json", "--no-validate"],
    ):
        assert cli.run(command) == 0
        assert json.loads(capsys.readouterr().out)
    assert calls == []
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # between the hub's own retries
    assert cli.run(["check", "nobody/nothing"]) != 0  # a hub id does ask, so the bar holds
    assert calls


def test_json_from_the_command_line(ouro: Any, capsys: pytest.CaptureFixture[str]) -> None:
    row = prompts(5)[0]
    command = ["generate", "tiny:ouro", "--prompt-ids", ",".join(map(str, row)), "--max-new-tokens", "6"]
    assert cli.run([*command, "--dtype", "float64", "--retention", "0.3", "--json"]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert result["ids"] == SparseOracle(ouro.model, 0.3).generate(row, 6)
    assert len(result["logprobs"]) == 6
    assert result["metrics"]["new_tokens"] == 6
    assert result["finish_reason"] == "length"
    assert cli.run([*command, "--retention", "2", "--json"]) != 0
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["argument"], error["type"]) == ("key_retention", "ArgumentError")
