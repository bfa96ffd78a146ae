"""The command line speaks of the options that were typed, before it loads, and says what it waits for."""

from __future__ import annotations

import inspect as python_inspect
import json
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from sparse_compile import cli
from sparse_compile.calibration import Calibration, LayerCalibration
from sparse_compile.cli import common, notes
from sparse_compile.cli.options import ALIASES, describe, option_names, reworded
from sparse_compile.config import SparseConfig
from sparse_compile.errors import ArgumentError
from sparse_compile.progress import WorkProgress
from sparse_compile.speculation import SpeculationConfig

pytestmark = pytest.mark.usefixtures("shared_traces")

COMMANDS = [command.callback for command in cli.app.registered_commands]
ARGUMENTS = {one.name for config in (SparseConfig, SpeculationConfig) for one in fields(config)}

# Parameters of commands that set neither config.
OTHERS = {
    "as_json", "batch", "branch_scale", "context", "debug", "device", "do_sample", "dtype", "frontend", "gpu_memory",
    "graph", "max_new_tokens", "out", "plots", "program", "prompt", "prompt_file", "prompt_ids", "prompt_tokens",
    "prompts", "quiet", "repeats", "samples", "seed", "subset", "temperature", "text", "top_k", "top_p", "window",
    "windows",
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.__name__)
def test_every_option_that_sets_a_config_is_in_the_map(command: Callable[..., Any]) -> None:
    """A new option of a command is either named like its field, or has an alias, or is of the command alone."""
    names = option_names(command)
    own = set(python_inspect.signature(command).parameters) - {"model"}
    set_by_aliases = {one for argument in ALIASES for one in ALIASES[argument] if argument in ARGUMENTS}
    assert own - OTHERS <= ARGUMENTS | set_by_aliases
    assert OTHERS.isdisjoint(ARGUMENTS)
    for argument in ARGUMENTS:
        if argument in own or own.intersection(ALIASES.get(argument, ())):
            assert names[argument].startswith("--")
    assert names["as_json"] == "--json"


def test_aliases_are_of_arguments_that_there_are() -> None:
    assert ALIASES.keys() - ARGUMENTS == {"task_samples"}  # of quality's Settings


LOADING = [  # options, and what is said before anything is loaded
    ("inspect", "--retention 1.5", "--retention 1.5: must be a number greater than 0 and at most 1"),
    ("inspect", "--capture-loop 9", "--capture-loop 9: must be below 4, the model's number of loops; choose --cap"),
    ("inspect", "--capture-loop -1", "--capture-loop -1: must be an integer >= 0; pass for example --capture-loop 1"),
    ("inspect", "--retention 0.1,0.2,0.3", "--retention 0.1,0.2,0.3: must have one number for each of the 2 att"),
    ("inspect", "--retention auto", "--calibration: is needed for --retention auto; make one: sparse-compile calib"),
    ("inspect", "--target-mass 0.5", "--target-mass 0.5: is for --retention auto only, and it is '0.1'; pass --ret"),
    ("inspect", "--recapture-every 0", "--recapture-every 0: must be an integer >= 1; pass for example --recapture"),
    ("inspect", "--implementation x", "--implementation x: must be one of 'reference', 'batched', 'triton', 'auto'"),
    ("inspect", "--frontend torch-compile --capture-loop 9", "--capture-loop 9: must be below 4"),
    ("generate", "--prompt a --speculate foo", "--speculate foo: must be one of 'block', 'pipeline'; pass --speculate"),
    ("generate", "--prompt a --speculate block --draft-tokens 0", "--draft-tokens 0: must be an integer >= 1"),
    ("generate", "--prompt a --speculate block --draft-loops 9", "--draft-loops 9: the model has 4 loops; pass --dra"),
    ("generate", "--prompt a --speculate pipeline --adaptive", "--adaptive: a pipeline has no blocks whose length"),
    ("generate", "--prompt a --loops-per-step 5", "--loops-per-step 5: the model has 4 loops; pass --loops-per-step 4"),
    ("generate", "--prompt a --do-sample --temperature 0", "--temperature 0.0: must be a float greater than 0"),
    ("generate", "--prompt a --do-sample --top-k -2", "--top-k -2: must be an integer >= 1, or 0 for all tokens"),
    ("generate", "--prompt a --do-sample --top-p 1.5", "--top-p 1.5: must be a number from 0 to 1; pass for example"),
    ("generate", "--prompt a --max-new-tokens 0", "--max-new-tokens 0: must be an integer >= 1"),
    ("generate", "--prompt a --max-new-tokens 512", "--max-new-tokens 512: with 1 prompt tokens that makes 513, and"),
    ("generate", "--prompt-ids 1,272", "--prompt-ids 272: must lie in 0 .. 271, the vocabulary"),
    ("generate", "--prompt=", "--prompt '': gives no token; pass some text"),
    ("plan", "--gpu-memory 1GiB --context 8 --batch 0", "--batch 0: must be at least 1; pass for example --batch 8"),
    ("plan", "--gpu-memory 1GiB --context 8 --page-size 0", "--page-size 0: must be an integer >= 1"),
    ("selftest", "--draft-loops 9", "--draft-loops 9: the model has 4 loops; pass --draft-loops 4 or less"),
    ("selftest", "--prompt-tokens 512", "--max-new-tokens 48: with 512 prompt tokens that makes 560"),
    ("quality", "--samples 0", "--samples 0: must be positive; pass for example --samples 16"),
    ("quality", "--window 2", "--window 2: must be at least 3 tokens"),
    ("quality", "--text /nonexist", "--text /nonexist: cannot be read: No such file or directory; pass the path of"),
    ("quality", "--subset --capture-loops 1,9", "--capture-loops 9: must be below 4"),
    ("quality", "--subset --window 600", "--window 600: is so many tokens, and the model has 512 positions"),
    ("quality", "", "--window 2048: is so many tokens, and the model has 512 positions"),
    ("calibrate", "--window 1", "--window 1: must be at least 3 tokens"),
    ("calibrate", "--target-mass 2", "--target-mass 2.0: must be a number greater than 0 and at most 1; pass for"),
    ("calibrate", "--window 64 --capture-loop 9", "--capture-loop 9: must be below 4"),
    ("calibrate", "--window 64 --text /nonexist", "--text /nonexist: cannot be read"),
    ("demo", "--max-new-tokens 0", "--max-new-tokens 0: must be an integer >= 1"),
    ("demo", "--max-new-tokens 600", "--max-new-tokens 600: with 199 prompt tokens that makes 799, and the model has"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "options", "message"), LOADING, ids=lambda value: str(value)[:40])
def test_bad_values_are_named_as_typed_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    options: str,
    message: str,
) -> None:
    monkeypatch.setattr(common, "load", lambda *_: pytest.fail("loaded"))
    model = ["--model", "tiny:ouro"] if command == "demo" else ["tiny:ouro"]
    out = ["--out", str(tmp_path / "x.json")] if command == "calibrate" else []
    code, _, err = run(capsys, command, *model, *out, *options.split())
    assert code == 2
    assert err.splitlines()[-1].startswith(f"error: {message}")
    assert "compiling" not in err
    assert "=" not in err.replace(">=", "")  # of an argument in Python


def test_a_calibration_of_another_model_is_refused_before_loading(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(common, "load", lambda *_: pytest.fail("loaded"))
    layers = (LayerCalibration("other.layer", "0.1", 1.0, ()),)
    Calibration("Other", capture_loop=1, target_mass=0.9, tokens=1, layers=layers).save(tmp_path / "c.json")
    options = ("--retention", "auto", "--calibration", str(tmp_path / "c.json"))
    code, _, err = run(capsys, "inspect", "tiny:ouro", *options)
    assert (code, "error: --calibration Other: was measured on another kind of model" in err) == (2, True)
    code, _, err = run(capsys, "inspect", "tiny:ouro", *options, "--capture-loop", "2")
    assert (
        code,
        err.endswith("was measured with --capture-loop 1, and it is 2; pass --capture-loop 1\n"),
    ) == (2, True)


def test_values_and_texts() -> None:
    names = {"key_retention": "--retention", "draft_loops": "--draft-loops", "async_steps": "--async-steps"}
    names |= {"enabled": "--dense", "speculation": "--speculate", "deterministic": "--deterministic"}
    assert reworded("pass draft_loops=2 or less, or key_retention='auto'", names) == (
        "pass --draft-loops 2 or less, or --retention auto"
    )
    assert reworded("must be an integer >= 1, or None", names) == "must be an integer >= 1"
    assert reworded("pass enabled=False or async_steps=True", names) == "pass --dense or --async-steps"
    assert (
        reworded("pass async_steps=None, draft_loops=None", names)
        == "pass no --async-steps, no --draft-loops"
    )
    assert (
        reworded("leave speculation out of this speculation", names)
        == "leave --speculate out of this speculation"
    )
    assert reworded("config.draft_loops stays", names) == "config.draft_loops stays"
    assert reworded("lower draft_loops", {}) == "lower draft_loops"
    for value, text in (
        (SpeculationConfig("pipeline"), "--speculate pipeline: no; leave --speculate out"),
        ((0.1, 0.2), "--speculate 0.1,0.2: no; leave --speculate out"),
        (True, "--speculate: no; leave --speculate out"),
        ("", "--speculate '': no; leave --speculate out"),
    ):
        error = ArgumentError("speculation", value, "no", "leave speculation out")
        assert describe(error, names)[0] == text
    unknown = ArgumentError("page_size", 0, "too small for draft_loops=2", "pass page_size=1")
    assert describe(unknown, names)[0] == "page_size=0: too small for --draft-loops 2; pass page_size=1"
    assert describe(OSError("no"), names) == ("no", {})


def test_json_has_the_argument_and_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(run(capsys, "inspect", "tiny:ouro", "--keep-first", "-1", "--json")[1])["error"]
    assert (found["argument"], found["option"], found["type"]) == (
        "keep_first",
        "--keep-first",
        "ArgumentError",
    )
    assert found["remedy"] == "pass for example --keep-first 1"


def test_a_wait_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    def wait(seconds: float, quiet: bool) -> str:
        with notes.quietly(quiet), notes.waiting("reading", patience=0.05):
            time.sleep(seconds)
        return capsys.readouterr().err

    assert wait(0.5, quiet=False) == "reading ...\n"
    assert wait(0.5, quiet=True) == ""
    assert wait(0.0, quiet=False) == ""
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
    assert notes.progress_mode() is True


def test_looking_for_a_name_on_the_hub_is_a_wait_that_is_explained(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def model_info(self: Any, name: str, **options: Any) -> None:
        time.sleep(1.4)
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.chdir(tmp_path)
    for command in (("inspect", "ouro-9b"), ("plan", "ouro-9b", "--gpu-memory", "1GiB", "--context", "8")):
        code, _, err = run(capsys, *command)
        assert (code, err.splitlines()[0]) == (2, "asking the Hugging Face hub for ouro-9b ...")


@pytest.fixture
def slow_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is shown from the first step on."""
    before = WorkProgress.__init__.__defaults__
    assert before is not None
    monkeypatch.setattr(WorkProgress.__init__, "__defaults__", (0.0, *before[1:]))


def test_work_progress_takes_totals(slow_steps: None, capsys: pytest.CaptureFixture[str]) -> None:
    with WorkProgress(0, True, verb="measuring", unit="steps") as bar:
        bar.update(3, 40)
    assert (bar.done, bar.total) == (3, 40)
    assert capsys.readouterr().err == "measuring: 3 of at most 40 steps\n"


@pytest.mark.parametrize("quiet", [(), ("--quiet",), ("-q",)])
def test_calibrate_tells_how_far_it_is(
    slow_steps: None, capsys: pytest.CaptureFixture[str], tmp_path: Path, quiet: tuple[str, ...]
) -> None:
    out = str(tmp_path / "x.json")
    options = ("--windows", "1", "--window", "8", "--out", out, *quiet)
    code, _, err = run(capsys, "calibrate", "tiny:ouro", *options)
    lines = [] if quiet else ["calibrating tiny:ouro ...", "calibrating: 1 of at most 19 steps"]
    assert (code, err.splitlines()) == (0, lines)


def test_every_command_can_be_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        assert option_names(command)["quiet"] == "--quiet"
    code, out, err = run(capsys, "inspect", "tiny:ouro", "--no-validate", "-q", "--capture-loop", "3")
    assert (code, "nothing is sparse" in out) == (0, True)
    assert err.startswith("warning: --capture-loop 3 is the last of 4 loops")  # warnings are not silenced
    assert len(err.splitlines()) == 1
    code, out, err = run(capsys, "inspect", "tiny:ouro", "-q", "--retention", "2")
    assert (code, out, err.startswith("error: --retention 2: ")) == (2, "", True)
    options = ("--gpu-memory", "1MiB", "--context", "64", "--quiet")
    code, out, err = run(capsys, "plan", "tiny:ouro", *options)
    assert (code, err.startswith("error: 1 x 64 tokens do not fit")) == (1, True)


def test_a_text_is_a_file_that_can_be_read() -> None:
    read_text = sys.modules["sparse_compile.cli.quality"].read_text  # its name in the package is the command
    assert len(read_text(None)) > 100_000
    assert read_text(__file__) == Path(__file__).read_bytes()
    with pytest.raises(ArgumentError, match="text='/': cannot be read: Is a directory"):
        read_text("/")
