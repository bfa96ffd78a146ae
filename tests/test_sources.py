"""Where a model of a name comes from, and what is said where it comes from nowhere. Needs no network."""

from __future__ import annotations

import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import errors

from sparse_compile import ArgumentError, cli
from sparse_compile.models import UnknownModelError, load_config, load_model, load_tokenizer, tiny_model
from sparse_compile.models.sources import is_hub_name, naming, source_options


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """A hub that answers each question with `error`, and counts them in `asked`; the folder here is empty."""
    state: dict[str, Any] = {"error": OSError(-2, "Name or service not known"), "asked": []}

    def model_info(self: Any, name: str, **options: Any) -> None:
        state["asked"].append((name, options))
        if state["error"] is not None:
            raise state["error"]

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    return state


@pytest.mark.parametrize("load", [load_config, load_model, load_tokenizer, source_options])
def test_a_name_that_is_nowhere(hub: dict[str, Any], load: Any) -> None:
    start = time.monotonic()
    with pytest.raises(UnknownModelError) as caught:
        load("ouro-9b")
    assert time.monotonic() - start < 2  # transformers alone asks for half a minute
    assert str(caught.value) == (
        "MODEL 'ouro-9b': no preset (ouro-2.6b, ouro-1.4b, demo, ouro-tiny, tiny:ouro, tiny:dory, tiny:hrm-text), "
        "no folder, and the hub cannot be reached: Name or service not known; did you mean ouro-2.6b?"
    )
    assert [name for name, _ in hub["asked"]] == ["ouro-9b"]
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    "command",
    [
        ("plan", "owner/none", "--gpu-memory", "80GiB", "--context", "32k"),
        ("inspect", "owner/none"),
        ("generate", "owner/none", "--prompt", "a"),
        ("check", "owner/none"),
        ("selftest", "owner/none"),
        ("quality", "owner/none"),
        ("calibrate", "owner/none", "--out", "x.json"),
        ("demo", "--model", "owner/none"),
    ],
)
def test_every_command_says_so(
    hub: dict[str, Any], capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    assert cli.run(list(command)) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(
        "error: MODEL 'owner/none': no folder, and the hub cannot be reached: Name or ser"
    )
    assert "preset" not in message  # none has a slash


def response(kind: type[Exception]) -> Exception:
    """An error of the hub as if made from a response, whose library differs by version."""
    error = kind.__new__(kind)
    Exception.__init__(error, "404 Client Error")
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (
            errors.HFValidationError("Repo id must be in the form"),
            "it is no hub id, which is written owner/name",
        ),
        (response(errors.RepositoryNotFoundError), "the hub has no such model"),
        (response(errors.GatedRepoError), "the hub gives it only to accounts that asked for it"),
        (response(errors.RevisionNotFoundError), "the hub has no revision 'v9' of it"),
        (
            errors.OfflineModeIsEnabled("offline mode is enabled"),
            "cannot be reached: offline mode is enabled",
        ),
    ],
)
def test_what_the_hub_says(hub: dict[str, Any], error: Exception, words: str) -> None:
    hub["error"] = error
    with pytest.raises(UnknownModelError, match="MODEL 'a/b': no folder, and ") as caught:
        source_options("a/b", revision="v9", token="t")
    assert words in str(caught.value)
    assert hub["asked"][0][1] == {"revision": "v9", "token": "t", "timeout": 10.0}


def test_what_the_hub_has_goes_on(hub: dict[str, Any]) -> None:
    hub["error"] = None
    assert source_options("owner/name") == ("owner/name", {})
    assert source_options("name", local_files_only=True) == ("name", {})
    assert len(hub["asked"]) == 1
    with (
        pytest.raises(UnknownModelError, match="cannot be had from the hub: Connection reset"),
        naming("a/b"),
    ):
        raise OSError("We couldn't connect to the hub") from OSError(104, "Connection reset by peer")


def test_names_of_this_package_and_folders_are_not_looked_up(hub: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UnknownModelError, match=r"'ouro-1\.4b': is a preset, a shape without weights"):
        load_model("ouro-1.4b")
    tiny_model("ouro").config.save_pretrained(tmp_path / "ouro-1.4b")
    assert source_options("ouro-1.4b") == ("ouro-1.4b", {"local_files_only": True})
    assert load_config("ouro-1.4b").num_hidden_layers == 2
    assert load_config("ouro-2.6b").num_hidden_layers == 48
    for known in ("ouro-1.4b", "demo", "tiny:ouro", "./x", "/x", "~/x", Path("x"), str(tmp_path)):
        assert not is_hub_name(known)
    assert hub["asked"] == []
    with pytest.raises(OSError, match="damaged"), naming("./x"):
        raise OSError("damaged")


def test_a_folder_called_demo_is_spoken_of_where_it_is(
    hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sparse_compile.models.presets.DEMO_FOLDER", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError) as caught:
        load_model("demo")
    assert "./demo" not in str(caught.value)
    (tmp_path / "demo").mkdir()
    with pytest.raises(FileNotFoundError, match=r"for the folder of this name here write \./demo$"):
        load_model("demo")


def test_a_device_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"device='cuda:77': cannot be used here: .*pass device='cpu'"):
        load_model(tmp_path / "nothing", device="cuda:77")
