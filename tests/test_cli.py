"""The command line: results on stdout, everything else on stderr, and exit codes that mean something."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from front_fakes import compiled_llama, tiny_llama
from shared_models import shared_model
from typer.testing import CliRunner

from sparse_compile import cli
from sparse_compile.cli import app, common
from sparse_compile.passes.errors import UnsupportedModel

pytestmark = pytest.mark.usefixtures("shared_traces")

Compiled = dict[str, Any]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """Loading gives a tiny Llama, compiling gives it with fake engines; `error` makes compiling fail."""
    state: Compiled = {"error": None, "configs": [], "model": tiny_llama()}

    def compile_model(model: Any, config: Any) -> Any:
        state["configs"].append(config)
        if state["error"] is not None:
            raise state["error"]
        return state.get("compiled") or compiled_llama(model)[0]

    monkeypatch.setitem(sys.modules, "sparse_compile.compile", SimpleNamespace(compile_model=compile_model))
    monkeypatch.setattr(common, "load", lambda name, dtype, device: state["model"])
    monkeypatch.setattr("sparse_compile.cli.outline.outline", lambda name: None)
    return state


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_inspect_prints_the_tables(fakes: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "inspect", "tiny:ouro", "--retention", "0.25", "--context", "64")
    assert code == 0
    assert "model.layers.0..1.self_attn" in out
    assert "64" in out
    assert "compiling tiny:ouro" in err
    assert fakes["configs"][0].key_retention == "0.25"


def test_inspect_json_and_options(fakes: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--retention", "1/8", "--capture-loop", "2", "--recapture-every", "3", "--dense-below", "9"]
    code, out, _ = run(
        capsys, "inspect", "tiny:ouro", "--json", *arguments, "--implementation", "batched", "--no-validate"
    )
    assert code == 0
    value = json.loads(out)
    assert value["source"] == "tiny:ouro"
    assert value["rolled"] is True
    assert value["layers"][1]["kinds"] == ["dense", "capture", "consume", "consume"]
    config = fakes["configs"][0]
    assert (config.key_retention, config.capture_loop, config.recapture_every) == ("1/8", 2, 3)
    assert (config.dense_below, config.implementation, config.validate) == (9, "batched", False)


def test_inspect_graph(fakes: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "inspect", "m", "--graph", "after")
    assert (code, out) == (0, "graph after\n")
    _, out, _ = run(capsys, "inspect", "m", "--graph", "body", "--json")
    assert json.loads(out)["graph"] == {"which": "body", "text": "graph body"}
    code, out, err = run(capsys, "inspect", "m", "--graph", "all")
    assert (code, out, err) == (2, "", "error: --graph all: must be one of before, after, body\n")


def test_inspect_of_the_torch_compile_front_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model as it is loaded, with its default use_cache=True; no wrapper around it."""
    model = shared_model("ouro", num_hidden_layers=1, total_ut_steps=3)
    monkeypatch.setattr(common, "load", lambda name, dtype, device: model)
    command = ("inspect", "tiny:ouro", "--frontend", "torch-compile")
    code, out, err = run(capsys, *command, "--json", "--graph", "after")
    assert code == 0
    found = json.loads(out)
    assert [graph["counts"] for graph in found["graphs"]] == [{"dense": 1, "capture": 1, "consume": 1}]
    assert "cached_consume" in found["graph"]["text"]
    assert "compiling a decode step" in err
    assert model.config.use_cache is True
    assert "_compiled_call" not in vars(model)
    code, out, err = run(capsys, *command, "--capture-loop", "3")
    assert (code, out) == (2, "")
    assert "--capture-loop 3: must be below 3" in err
    model.generation_config.disable_compile = True
    code, out, err = run(capsys, *command)
    assert (code, out) == (3, "")
    assert "compiled no decode step" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--frontend", "dynamo"), "must be one of runtime, torch-compile"),
        (("--frontend", "torch-compile", "--graph", "body"), "must be one of before, after"),
        (("--frontend", "torch-compile", "--retention", "2"), "--retention 2: must be"),
        (
            ("--frontend", "torch-compile", "--context", "64"),
            "--context [64]: is for --frontend runtime only",
        ),
        (
            ("--frontend", "torch-compile", "--dense-below", "4"),
            "--dense-below 4: is for --frontend runtime only",
        ),
    ],
)
def test_inspect_refuses_bad_front_ends(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, _, err = run(capsys, "inspect", "tiny:ouro", *arguments)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnsupportedModel("no attention is looped", module="model"), 3),
        (ValueError("a bad\nvalue"), 2),
        (OSError("no such model"), 2),
        (RuntimeError("disagrees"), 1),
    ],
)
def test_errors_are_one_line_with_an_exit_code(
    fakes: Compiled, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    fakes["error"] = error
    found, out, err = run(capsys, "inspect", "m", "--json")
    message = " ".join(str(error).split())
    assert found == code
    assert err.splitlines()[-1] == f"error: {message}"
    assert "Traceback" not in err
    details = json.loads(out)["error"]
    assert details["message"] == message
    assert details["exit_code"] == code
    found, out, err = run(capsys, "inspect", "m", "--debug")
    assert (found, out) == (code, "")
    assert "Traceback" in err


def test_an_argument_of_the_wrong_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    found, out, err = run(
        capsys, "plan", "tiny:ouro", "--gpu-memory", "1GiB", "--context", "8", "--batch", "x"
    )
    assert (found, out) == (2, "")
    assert "--batch" in err.splitlines()[-1]
    assert "'x'" in err or "integer" in err
    assert "--context" in run(capsys, "plan", "tiny:ouro", "--gpu-memory", "1GiB")[2]


def test_bad_values_are_refused_before_loading(
    fakes: Compiled, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(common, "load", lambda *_: pytest.fail("loaded"))
    code, out, err = run(capsys, "inspect", "m", "--retention", "1.5", "--json")
    assert code == 2
    assert err.startswith("error: --retention 1.5: must be")
    details = json.loads(out)["error"]
    assert (details["argument"], details["option"]) == ("key_retention", "--retention")
    assert details["remedy"] == "pass for example --retention 0.1"


@pytest.mark.parametrize(
    "arguments", [["inspect"], ["inspect", "m", "--nope"], ["nothing"], ["check", "m", "extra"]]
)
def test_usage_errors(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    code, out, err = run(capsys, *arguments, "--json")
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert json.loads(out)["error"]["exit_code"] == 2


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    import sparse_compile

    assert run(capsys, "--version") == (0, f"{sparse_compile.__version__}\n", "")
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in ("inspect", "generate", "check", "demo"))


def test_generate_ids(fakes: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "generate", "m", "--prompt-ids", "5,6,0", "--max-new-tokens", "4")
    assert code == 0
    ids = [int(one) for one in out.strip().split(",")]
    assert len(ids) == 4
    code, out, _ = run(capsys, "generate", "m", "--prompt-ids", "5,6,0", "--max-new-tokens", "4", "--json")
    value = json.loads(out)
    assert value["ids"] == ids
    assert value["prompt_ids"] == [5, 6, 0]
    assert value["finish_reason"] == "length"
    assert value["metrics"]["new_tokens"] == 4
    assert len(value["logprobs"]) == 4


def test_generate_text_streams_what_json_returns(fakes: Compiled, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("generate", "tiny:ouro", "--prompt", "hello", "--max-new-tokens", "9")
    sampling = ("--do-sample", "--temperature", "2", "--seed", "3")
    _, text, _ = run(capsys, *arguments, *sampling)
    _, out, _ = run(capsys, *arguments, *sampling, "--json")
    assert text == json.loads(out)["text"] + "\n"


def test_generate_from_a_file_and_from_stdin(
    fakes: Compiled, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The text to its last byte, line ends too."""
    text, arguments = "Zwei\r\nZeilen, \u20ac\n", ("generate", "tiny:ouro", "--max-new-tokens", "3", "--json")
    _, wanted, _ = run(capsys, *arguments, "--prompt", text)
    file = tmp_path / "prompt.txt"
    file.write_bytes(text.encode())
    assert run(capsys, *arguments, "--prompt-file", str(file))[:2] == (0, wanted)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert run(capsys, *arguments, "--prompt-file", "-")[:2] == (0, wanted)
    for data, words in (
        (b"a\xff", "is not UTF-8 at byte 1; pass the path of a text file"),
        (b"", "gives no token; pass some text"),
    ):
        file.write_bytes(data)
        code, out, err = run(capsys, *arguments[:-1], "--prompt-file", str(file))
        assert (code, out) == (2, "")
        assert words in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "either --prompt"),
        (["--prompt-file", "f", "--prompt-ids", "1"], "either --prompt"),
        (["--prompt-file", "none.txt"], "--prompt-file none.txt: cannot be read: No such file"),
        (["--prompt", "a", "--prompt-ids", "1"], "either --prompt"),
        (["--prompt-ids", "1,x"], "integers separated by commas"),
        (["--prompt-ids", "1,999"], "vocabulary"),
        (["--prompt", ""], "gives no token"),
        (["--prompt-ids", "1", "--temperature", "2"], "--temperature: only with --do-sample"),
        (["--prompt-ids", "1", "--max-new-tokens", "0"], "--max-new-tokens 0: must be"),
    ],
)
def test_generate_refusals(
    fakes: Compiled, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    code, out, err = run(capsys, "generate", "tiny:ouro", *arguments)
    assert code == 2
    assert out == ""
    assert words in err.splitlines()[-1]


@pytest.mark.parametrize("ok", [True, False])
def test_check(
    fakes: Compiled, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ok: bool
) -> None:
    class Checked:
        def __init__(self) -> None:
            self.ok = ok

        def to_dict(self) -> dict[str, Any]:
            return {"ok": ok, "compared": 3}

        def __str__(self) -> str:
            return "compared 3 tensors"

    monkeypatch.setattr("sparse_compile.models.checkpoint.check_checkpoint", lambda name, dtype: Checked())
    assert run(capsys, "check", "m")[:2] == (0 if ok else 1, "compared 3 tensors\n")
    code, out, _ = run(capsys, "check", "m", "--json")
    assert code == (0 if ok else 1)
    assert json.loads(out) == {"ok": ok, "compared": 3}


@pytest.mark.parametrize("error", [None, "the program disagrees"])
def test_check_program(
    fakes: Compiled, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    from sparse_compile.errors import ValidationError

    def validate(self: Any) -> float:
        if error is not None:
            raise ValidationError(error)
        return 1e-7

    checked = SimpleNamespace(ok=True, to_dict=lambda: {"ok": True})
    monkeypatch.setattr("sparse_compile.models.checkpoint.check_checkpoint", lambda name, dtype: checked)
    monkeypatch.setattr("sparse_compile.compiled.CompiledModel.validate", validate)
    code, out, _ = run(capsys, "check", "m", "--program", "--json")
    assert code == (0 if error is None else 1)
    value = json.loads(out)
    assert value["ok"] is value["program"]["ok"] is (error is None)


@pytest.fixture
def no_quality(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The fake engine has no pool to decode given text with, and drafts nothing."""
    found = {"dense_perplexity": 3.0, "sparse_perplexity": 3.25, "agreement": 0.875, "tokens": 254.0}
    module = sys.modules["sparse_compile.cli.demo"]  # its name in the package is the command
    monkeypatch.setattr(module, "_quality", lambda *_: found)
    drafts = {"draft_loops": 1, "num_draft_tokens": 4, "drafted": 8, "accepted": 6, "identical": True}
    monkeypatch.setattr(module, "_drafts", lambda *_: drafts)
    return found


def test_demo(fakes: Compiled, no_quality: dict[str, float], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "demo", "--model", "tiny:ouro", "--max-new-tokens", "3", "--json")
    assert code == 0
    value = json.loads(out)
    assert value["model"] == "tiny:ouro"
    assert value["quality"] == no_quality
    assert value["identical"] is True
    assert all(len(one["texts"]) == 3 for one in value["runs"])
    assert [one["name"] for one in value["runs"]] == ["dense", "retention 1.0", "retention 0.25"]
    assert "compiling with enabled=False" in err
    code, out, _ = run(capsys, "demo", "--model", "tiny:ouro", "--max-new-tokens", "2")
    assert code == 0
    assert "exactly the tokens of transformers: verified" in out
    assert "perplexity 3.000 dense, 3.250 at retention 0.25" in out
    assert "87.5%" in out
    assert (
        "drafts of 1 loop, 4 rows a block: the same tokens as without; 75.0% of the drafts were kept" in out
    )
    assert "---" not in out  # texts of a random model are noise
    assert "random weights" not in out  # the fake engine runs dense throughout


def test_demo_shows_what_the_trained_model_writes(
    fakes: Compiled, no_quality: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "demo", "--max-new-tokens", "4")
    assert code == 0, err
    assert out.count("--- dense") == out.count("--- retention 0.25") == 3
    assert "class Stack:" in out
    assert "?zk" in out


def test_demo_fails_when_tokens_differ(
    fakes: Compiled, no_quality: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    fakes["compiled"] = compiled_llama(tiny_llama(num_hidden_layers=2))[0]
    code, out, _ = run(capsys, "demo", "--model", "tiny:ouro", "--max-new-tokens", "3", "--json")
    assert code == 1
    assert json.loads(out)["identical"] is False


def test_no_arguments_print_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert "inspect" in out


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", "mps"])
def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture[str], device: str) -> None:
    code, out, err = run(capsys, "inspect", "tiny:ouro", "--device", device, "--json")
    assert code == 2
    message = err.splitlines()[-1]
    assert message.startswith(f"error: --device {device}: cannot be used here: ")
    assert message.endswith("; pass --device cpu")
    assert json.loads(out)["error"]["exit_code"] == 2


def test_real_refusals_have_fields_and_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "inspect", "tiny:ouro", "--capture-loop", "9", "--no-validate", "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"], error["argument"]) == (2, "ArgumentError", "capture_loop")
    assert "below 4" in error["limit"]
    assert "between 0 and 3" in error["remedy"]
    code, out, _ = run(
        capsys, "inspect", "tiny:ouro", "--implementation", "triton", "--dtype", "float64", "--json"
    )
    assert (code, json.loads(out)["error"]["argument"]) == (2, "implementation")

    tiny_llama().save_pretrained(tmp_path)
    for command in (("inspect",), ("generate", "--prompt-ids", "1,2"), ("check", "--program")):
        code, out, err = run(capsys, command[0], str(tmp_path), *command[1:], "--json")
        assert (code, json.loads(out)["error"]["type"]) == (3, "UnsupportedModel")
        assert "not a looped model" in err.splitlines()[-1]


def test_warnings_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "inspect", "tiny:ouro", "--capture-loop", "3", "--no-validate")
    assert (code, "nothing is sparse" in out) == (0, True)
    compiling, warning = err.splitlines()
    assert compiling == "compiling tiny:ouro ..."
    assert warning.startswith("warning: --capture-loop 3 is the last of 4 loops")


def test_an_implementation_that_cannot_run_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--implementation", "triton", "--dtype", "float64", "--no-validate")
    code, _, err = run(capsys, "inspect", "tiny:ouro", *options)
    message = err.splitlines()[-1]
    assert code == 2
    assert message.startswith("error: --implementation triton: cannot run here: ")
    assert message.endswith("; pass --implementation auto")
    assert message.count("implementation") == 2


def test_retention_is_taken_under_the_name_of_its_option(
    fakes: Compiled, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "inspect", "m", "--key-retention", "0.5")[0] == 0
    assert fakes["configs"][0].key_retention == "0.5"


def test_checking_a_tiny_model_shows_no_bars(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["check", "tiny:ouro"]) == 0
    out, err = capfd.readouterr()
    assert "identical to its files" in out
    assert err == ""


def test_damaged_files_are_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:

    shared_model("ouro").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:20] + b"\xff" + whole[21:], b""):
        weights.write_bytes(damaged)
        for command in ("inspect", "check"):
            code, out, err = run(capsys, command, str(tmp_path), "--json")
            assert code == 2
            assert json.loads(out)["error"]["type"] == "CheckpointError"
            assert str(tmp_path) in err.splitlines()[-1]
