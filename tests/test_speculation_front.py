"""Self-speculation as users ask for it: options, calls of generate, streams, the command line."""

from __future__ import annotations

import functools
import json
from io import StringIO
from typing import Any

import pytest
import torch
from cases_common import left_padded, new_tokens, prompts
from rich.console import Console
from shared_models import shared_model
from typer.testing import CliRunner

from sparse_compile import ArgumentError, SpeculationConfig, sparse_compile
from sparse_compile.cli import app

pytestmark = pytest.mark.usefixtures("shared_traces")

ROWS = prompts(5, 11, 2)


@functools.cache
def compiled(**options: Any) -> Any:
    return sparse_compile(
        shared_model("ouro", dtype=torch.float64), key_retention=0.3, validate=False, **options
    )


@functools.cache
def plain() -> list[list[int]]:
    return new_tokens(compiled(), ROWS, 8)


def test_as_an_option_and_in_a_call() -> None:
    asked = SpeculationConfig("block", draft_loops=2, num_draft_tokens=3)
    model = compiled(speculation=asked)
    assert new_tokens(model, ROWS, 8) == plain()
    assert model.engine.metrics().rounds > 0
    for mine in (False, SpeculationConfig(draft_loops=4), None):
        assert new_tokens(model, ROWS, 8, speculation=mine) == plain()
        assert (model.engine.metrics().rounds > 0) == (mine is not False)
    assert new_tokens(compiled(), ROWS, 8, speculation=asked) == plain()


def test_the_store_has_a_slot_for_each_row_of_a_block() -> None:
    asked = SpeculationConfig(num_draft_tokens=5)
    engine = compiled(speculation=asked).serve(3, 32)
    assert engine.store is not None
    assert engine.store.usable_slots == 15
    assert not engine.options.async_steps
    one, five = (
        compiled(max_context=32, max_batch=3, **options).report().budget["reference_store"]
        for options in ({}, {"speculation": asked})
    )
    assert five * 4 == one * 16  # 15 slots and the dummy, 3 and the dummy


@pytest.mark.parametrize("mode", ["block", "pipeline"])
def test_asynchronous_when_asked_and_the_report_says_for_whom(mode: str) -> None:
    asked = SpeculationConfig(mode, draft_loops=2, num_draft_tokens=3)
    for async_steps in (True, False):
        model = compiled(speculation=asked, async_steps=async_steps)
        assert new_tokens(model, ROWS, 8) == plain()
        assert model.engine.options.async_steps == async_steps
        said = model.report().to_dict()["speculation"]
        assert said == {
            "mode": mode,
            "draft_loops": 2,
            "rows": 3 if mode == "block" else 2,
            "asynchronous": async_steps,
            "synchronous_for": "requests with a logits processor" if async_steps else "all requests",
        }
        console = Console(width=200, file=StringIO())
        console.print(model.report().render())
        assert f"rounds are synchronous for {said['synchronous_for']}" in console.file.getvalue()  # type: ignore[attr-defined]
    assert compiled().report().to_dict()["speculation"] == {}


def test_streams_give_final_tokens_only() -> None:
    model, inputs = compiled(), left_padded(ROWS)
    asked = SpeculationConfig(draft_loops=1, num_draft_tokens=4)
    items = list(model.stream(**inputs, max_new_tokens=8, do_sample=False, speculation=asked))
    for row in range(3):
        mine = [item for item in items if item.row == row]
        assert [item.token_id for item in mine] == plain()[row]
        assert [item.finished for item in mine] == [False] * 7 + [True]


def test_scores_and_metrics_of_a_call() -> None:
    asked = SpeculationConfig(draft_loops=4, num_draft_tokens=4)
    inputs = left_padded(ROWS)
    settings: dict[str, Any] = {
        "max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, "output_scores": True,
    }  # fmt: skip
    ours = compiled().generate(**inputs, **settings, speculation=asked)
    want = compiled().generate(**inputs, **settings)
    for one, other in zip(ours.scores, want.scores, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)
    assert [metrics.rounds for metrics in ours.metrics] == [2, 2, 2]
    assert [metrics.mean_accepted_length for metrics in ours.metrics] == [3.5] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "tree"}, "mode='tree': must be one of 'block'"),
        ({"draft_loops": 0}, "draft_loops=0: must be an integer >= 1"),
        ({"num_draft_tokens": True}, "num_draft_tokens=True: must be an integer >= 1"),
        ({"num_draft_tokens": 100_000}, "num_draft_tokens=100000: must be at most 256; pass for example"),
        ({"adaptive": 1}, "adaptive=1: must be True or False"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        SpeculationConfig(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"speculation": "block"}, "speculation='block': must be a SpeculationConfig"),
        ({"speculation": SpeculationConfig(), "roll": False}, "needs a loop that is rolled.*rolling is off"),
        ({"speculation": SpeculationConfig(draft_loops=5)}, "draft_loops=5: the program has 4 loops"),
        (
            {"speculation": SpeculationConfig(), "loops_per_step": 1},
            "loops_per_step=1: cannot be combined.*compile with loops_per_step=None, or leave speculation out",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_combined_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        sparse_compile(shared_model("ouro"), validate=False, **options)


def test_a_call_that_cannot_be_drafted_is_refused_before_any_work() -> None:
    with pytest.raises(ArgumentError, match="draft_loops=9: the program has 4 loops"):
        compiled().generate(torch.tensor([[5]]), speculation=SpeculationConfig(draft_loops=9))
    with pytest.raises(ArgumentError, match="speculation=3: must be a SpeculationConfig"):
        compiled().stream(torch.tensor([[5]]), speculation=3)


def test_the_command_line() -> None:
    base = [
        "generate",
        "tiny:ouro",
        "--prompt-ids",
        "5,6,7",
        "--max-new-tokens",
        "6",
        "--no-validate",
        "--json",
    ]
    run = CliRunner().invoke
    want = json.loads(run(app, base).stdout)
    got = json.loads(
        run(app, [*base, "--speculate", "block", "--draft-loops", "2", "--draft-tokens", "3"]).stdout
    )
    assert got["ids"] == want["ids"]
    assert got["metrics"]["rounds"] > 0
    assert want["metrics"]["rounds"] == 0
    blocks = [*base, "--speculate", "block", "--draft-tokens", "5"]
    fixed, adaptive = (json.loads(run(app, [*blocks, *more]).stdout) for more in ([], ["--adaptive"]))
    assert fixed["ids"] == adaptive["ids"] == want["ids"]
    assert adaptive["metrics"]["drafted_tokens"] < fixed["metrics"]["drafted_tokens"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--draft-loops", "2"], "only with --speculate"),
        (["--adaptive"], "only with --speculate"),
        (["--speculate", "pipeline", "--draft-tokens", "5"], "--draft-tokens 5: only with --speculate block"),
        (["--speculate", "pipeline", "--adaptive"], "--adaptive: a pipeline has no blocks"),
    ],
    ids=str,
)
def test_options_of_the_command_line_that_would_do_nothing_are_refused(
    options: list[str], message: str
) -> None:
    base = ["generate", "tiny:ouro", "--prompt-ids", "5,6,7", "--no-validate", "--json"]
    refused = CliRunner().invoke(app, [*base, *options])
    assert refused.exit_code == 2
    assert message in json.loads(refused.stdout)["error"]["message"]


def test_false_means_no_speculation_for_the_option_as_for_a_call() -> None:
    model = compiled(speculation=False)
    assert model.sparse_config.speculation is None
    assert new_tokens(model, ROWS, 8) == plain()
    assert new_tokens(model, ROWS, 8, speculation=SpeculationConfig()) == plain()
