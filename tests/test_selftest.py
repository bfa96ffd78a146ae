"""`sparse-compile selftest`: PASS, or where tokens differ and by which margins."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparse_compile import cli
from sparse_compile.models import tiny_tokenizer
from sparse_compile.selftest import Difference, SelfTest, make_prompts

SMALL = ["--prompts", "2", "--max-new-tokens", "3", "--prompt-tokens", "6"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(["selftest", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


class Unsteady:
    """Counts up from a prompt's last id. In batches the prompt 20 goes wrong at its third token, and with "early" the
    prompt 10 ends after two.
    """

    device = "cpu"

    def __init__(self) -> None:
        self.calls: list[tuple[int, Any]] = []

    def generate(
        self, ids: torch.Tensor, max_new_tokens: int, speculation: Any, output_logits: bool, **_: Any
    ) -> Any:
        self.calls.append((ids.shape[0], speculation))
        rows = [[last + 1 + at for at in range(max_new_tokens)] for last in ids[:, -1].tolist()]
        lengths = [max_new_tokens] * len(rows)
        for row, last in enumerate(ids[:, -1].tolist()):
            if last == 20 and len(rows) > 1:
                rows[row][2] = 7
            if last == 10 and speculation == "early":
                lengths[row] = 2
        new = torch.tensor(rows)
        logits = None
        if output_logits:
            best = torch.nn.functional.one_hot(new, 64).float()
            best[:, :, 1] = 0.75
            logits = tuple(best.unbind(1))
        return SimpleNamespace(
            sequences=torch.cat((ids, new), 1),
            logprobs=[[0.0] * n for n in lengths],
            logits=logits,
            metrics=[SimpleNamespace(drafted_tokens=3, accepted_tokens=1)] * len(rows),
        )


def selftest(batches: tuple[int, ...], **modes: Any) -> SelfTest:
    rows = [[5, 10], [3, 4, 20], [30]]
    return SelfTest(Unsteady(), rows, {"ordinary": False, **modes}, batches, new_tokens=4)  # type: ignore[arg-type]


def test_the_first_difference_of_each_prompt() -> None:
    notes: list[str] = []
    test = selftest((1, 2), other="early")
    outcome = test.run(notes.append)
    assert not outcome.ok
    assert outcome.differences == (
        Difference(0, "other, batch 1, run 1", 2, (13, None), (0.25, None)),
        Difference(1, "ordinary, batch 2, run 1", 2, (23, 7), (0.25, 0.25)),
    )
    assert [len(one.tokens) for one in outcome.runs] == [3] * 8
    assert [(one.drafted, one.accepted) for one in outcome.runs] == [(9, 3)] * 8
    assert notes[0] == "ordinary, batch 1, run 1: 3 of 3 prompts equal"
    assert notes[-1] == "other, batch 2, run 2: 1 of 3 prompts equal"
    text = str(outcome.differences[0])
    assert text == (
        "prompt 0: other, batch 1, run 1: token 2 is its end (margin ?), and 13 (margin 0.25) in the first run"
    )
    # Three prompts one by one, then two and one, each twice and in both modes; then four for margins.
    assert [rows for rows, _ in test.compiled.calls[:10]] == [1] * 6 + [2, 1] * 2  # type: ignore[attr-defined]


def test_equal_tokens_pass() -> None:
    outcome = selftest((1,), other=None).run()
    assert outcome.ok
    assert [str(run) for run in outcome.runs] == [
        "ordinary, batch 1, run 1",
        "ordinary, batch 1, run 2",
        "other, batch 1, run 1",
        "other, batch 1, run 2",
    ]


def test_prompts_are_varied() -> None:
    tokenizer = tiny_tokenizer()
    prompts = make_prompts(tokenizer, 64, 2000)
    lengths = [len(prompt) for prompt in prompts]
    assert lengths[0] == max(lengths) == 2000
    assert min(lengths) < 8
    assert sum(100 < length < 1000 for length in lengths) > 10
    assert len({tuple(prompt[:3]) for prompt in prompts}) >= 15
    assert make_prompts(tokenizer, 3, 1) == [prompt[:1] for prompt in prompts[:3]]


def test_the_command_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "tiny:ouro", *SMALL, "--deterministic", "--dtype", "bfloat16", "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["differences"]) == (0, True, [])
    assert (found["deterministic"], found["dtype"], found["prompts"]) == (True, "bfloat16", 2)
    ways = [(run["mode"], run["batch"], run["repeat"]) for run in found["runs"]]
    assert ways == [(m, b, r) for m in ("ordinary", "block", "pipeline") for b in (1, 2) for r in (1, 2)]
    assert all(run["tokens"] == 6 and run["tokens_per_s"] > 0 for run in found["runs"])
    assert "pipeline, batch 2, run 2: 2 of 2 prompts equal" in err


def test_the_command_fails_where_tokens_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = SelfTest._generate

    def broken(self: SelfTest, prompts: Any, mode: str, logits: bool = False) -> Any:
        rows, values = decode(self, prompts, mode, logits)
        if mode == "pipeline" and len(rows) > 1:
            rows[1] = (*rows[1][:2], 2)
        return rows, values

    monkeypatch.setattr(SelfTest, "_generate", broken)
    code, out, _ = run(capsys, "tiny:ouro", *SMALL, "--repeats", "1")
    lines = out.splitlines()
    assert code == 1
    assert lines[-1] == "FAIL: the tokens of 1 of 2 prompts differ"
    assert lines[-2].startswith("prompt 1: pipeline, batch 2, run 1: token 2 is 2 (margin ")


def test_bad_options(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "tiny:ouro", *SMALL, "--draft-loops", "9")
    assert (code, "--draft-loops 9: the model has 4 loops" in err) == (2, True)
    code, _, err = run(capsys, "tiny:ouro", "--prompt-tokens", "512")
    assert (code, "the model has 512 positions" in err) == (2, True)
    assert run(capsys, "tiny:ouro", "--batch", "1")[0] == 2
    code, _, err = run(capsys, "tiny:ouro", *SMALL, "--branch-scale", "0.1")
    assert (code, "which is no preset" in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft-loops", "5"], "--draft-loops 5: the model has 4 loops; pass --draft-loops 4 or less"),
        (["--draft-tokens", "257", "--deterministic"], "--draft-tokens 257: must be at most 256"),
        (["--draft-tokens", "129", "--deterministic"], "--batch 2: .*pass --batch 1 or less"),
    ],
    ids=str,
)
def test_drafts_that_cannot_be_are_refused_before_anything_is_decoded(
    capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    code, out, err = run(capsys, "tiny:ouro", "--no-validate", *SMALL, *options)
    assert (code, out) == (2, "")
    assert re.search(message, err)
    assert "prompts equal" not in err


def test_presets_have_random_weights_and_often_right_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "ouro-tiny",
        "--prompts",
        "1",
        "--max-new-tokens",
        "8",
        "--repeats",
        "1",
        "--draft-loops",
        "2",
    ]
    code, out, _ = run(capsys, *arguments, "--prompt-tokens", "4", "--branch-scale", "0.0001", "--json")
    found = json.loads(out)
    assert (code, found["model"]) == (0, "ouro-tiny")
    for one in found["runs"][1:]:
        assert 0.5 * one["drafted"] < one["accepted"] <= one["drafted"]
