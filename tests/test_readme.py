"""The documentation is true: its code runs, its commands exit as stated, its links lead somewhere, its map is
whole.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("shared_traces")

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "passes", "runtime", "sparse_compile")
README = ROOT / "README.md"
CODE_MAP = ROOT / "docs" / "code_map.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "passes" / "README.md")
EXIT_CODE = re.compile(r"#\s*exit code (\d+)\s*$")


def blocks(text: str, *languages: str) -> Iterator[tuple[int, str]]:
    """(line number, content) of the fenced blocks in one of the languages."""
    for found in re.finditer(r"^```(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if found[1] in languages:
            yield text.count("\n", 0, found.start(2)) + 1, found[2]


def commands(text: str) -> list[tuple[str, int]]:
    """(command, expected exit code) of every line of a console block that runs our command."""
    lines = [line for _, block in blocks(text, "console", "bash") for line in block.splitlines()]
    found = []
    for line in lines:
        if line.startswith("sparse-compile"):
            code = EXIT_CODE.search(line)
            found.append((EXIT_CODE.sub("", line).strip(), int(code[1]) if code else 0))
    return found


def test_python_blocks_run_in_order() -> None:
    namespace: dict[str, Any] = {"__name__": "readme"}
    found = list(blocks(README.read_text(), "python"))
    assert len(found) >= 3
    for line, block in found:
        # Blank lines put the line numbers of a traceback where the README has them.
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            exec(compile("\n" * (line - 1) + block, str(README), "exec"), namespace)


def test_the_refusal_that_is_shown_is_the_one_that_comes(capsys: pytest.CaptureFixture[str]) -> None:
    """The README says beside `print(refusal)` what is printed."""
    block = next(block for _, block in blocks(README.read_text(), "python") if "print(refusal)" in block)
    stated = re.search(r"print\(refusal\)  # (.+), \.\.\.$", block, re.MULTILINE)
    assert stated
    exec("from sparse_compile import sparse_compile\n" + block, {})
    assert capsys.readouterr().out.startswith(stated[1])


def test_blocks_that_need_a_network_parse() -> None:
    found = list(blocks(README.read_text(), "py"))
    assert found
    for line, block in found:
        compile("\n" * (line - 1) + block, str(README), "exec")


def test_options_in_the_readme_exist() -> None:
    """Every `name=value` in the tables of the README is an option of ours, a variable, or the model's own."""
    from dataclasses import fields

    from sparse_compile import SparseConfig

    known = {field.name for field in fields(SparseConfig)}
    known |= {"recurrent_kv_cache_mode", "SPARSE_COMPILE_DUMP", "SPARSE_COMPILE_TUNE"}
    rows = [line for line in README.read_text().splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`(\w+)=", row)}
    assert {"enabled", "key_retention", "validate", "roll", "implementation", "progress"} <= named <= known


@pytest.mark.parametrize(("command", "code"), commands(README.read_text()))
def test_commands_exit_as_stated(command: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    from sparse_compile.cli import run

    assert run(shlex.split(command)[1:]) == code
    out, err = capsys.readouterr()
    assert ("with random weights" in out) == command.startswith("sparse-compile demo")
    assert out if code == 0 else err.startswith("error: ")


def test_every_command_is_shown() -> None:
    from sparse_compile.cli import app

    names = {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]
    assert {shlex.split(command)[1] for command, _ in commands(README.read_text())} == names


def test_the_console_script_is_installed() -> None:
    script = Path(sys.executable).parent / "sparse-compile"
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (done.returncode, done.stdout.strip()) == (0, version)


# ---------------------------------------------------------------------- links and paths


def links(text: str) -> set[str]:
    """Targets of Markdown links and images that are no addresses of other hosts."""
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    return {target for target in targets if not re.match(r"[a-z]+:", target)}


def paths(text: str) -> set[str]:
    """What reads like a path from the top of the repository, in prose and in code."""
    tops = "|".join((*ROOMS, "tests", "docs", "benchmarks", r"\.ci"))
    nested = re.findall(rf"(?<![\w./-])((?:{tops})/[\w./-]*\w)", text)
    single = re.findall(r"`([\w-]+\.(?:md|toml|txt|py)|Makefile|LICENSE)`", text)
    return {*nested, *single}


def anchors(document: Path) -> set[str]:
    """Names of the headings, as they are linked to."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(document: Path) -> None:
    text = document.read_text()
    missing = [path for path in sorted(paths(text)) if not (ROOT / path).exists()]
    for link in links(text):
        file, _, anchor = link.partition("#")
        target = document.parent / file if file else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


def test_make_targets_exist() -> None:
    makefile = ROOT / "Makefile"
    named = {target for document in DOCUMENTS for target in re.findall(r"`make (\w+)`", document.read_text())}
    targets = set(re.findall(r"^([\w-]+):", makefile.read_text(), re.MULTILINE))
    assert named <= targets


# ---------------------------------------------------------------------- the map


def modules() -> set[str]:
    """Paths of all modules in the four rooms, from the top of the repository."""
    files = (file for room in ROOMS for file in (ROOT / room).rglob("*.py"))
    return {file.relative_to(ROOT).as_posix() for file in files}


def test_the_code_map_names_every_module() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", CODE_MAP.read_text()))
    ours = {path for path in named if path.split("/")[0] in ROOMS}
    assert modules() - named == set(), "modules without a line in docs/code_map.md"
    assert ours - modules() == set(), "modules that are gone"


def helpers() -> set[str]:
    """What tests and benchmarks are made of: modules that are no tests themselves, and folders."""
    found = {file for room in ("tests", "benchmarks") for file in (ROOT / room).iterdir()}
    named = {file for file in found if file.suffix == ".py" and file.name != "__init__.py"}
    named = {file for file in named if not file.name.startswith("test_")}
    folders = {file for file in found if file.is_dir() and not file.name.startswith(("__", "."))}
    return {file.relative_to(ROOT).as_posix() + "/" * file.is_dir() for file in named | folders}


def test_the_code_map_names_what_tests_and_benchmarks_are_made_of() -> None:
    named = set(re.findall(r"`((?:tests|benchmarks)/[\w/.-]+)`", CODE_MAP.read_text()))
    assert helpers() - named == set(), "without a line in docs/code_map.md"


def test_the_pass_table_is_the_pipeline() -> None:
    """passes/README.md lists the passes that run, in their order."""
    from sparse_compile.passes import cached
    from sparse_compile.passes.pipeline import PASSES

    text = (ROOT / "passes" / "README.md").read_text()
    assert len(text.splitlines()) < 60
    listed = re.findall(r"^\| \d+ \| `(\w+)`", text, re.MULTILINE)
    assert listed == ["trace", *(step.name for step in PASSES), *(step.name for step in cached.PASSES)]


def test_the_design_shows_the_schemas_of_the_ops() -> None:
    """Each op's tensor arguments and settings stand in docs/design.md in the order of its schema."""
    import torch

    from sparse_compile.kernels import ops, skinny

    text = (ROOT / "docs" / "design.md").read_text()
    listed = dict(re.findall(r"^(\w+)\((.*?)\)", text, re.MULTILINE | re.DOTALL))
    groups = dict(re.findall(r"^([A-Z]+) = (.+)$", text, re.MULTILINE))
    for name in (*ops.SCHEMAS, *skinny.SCHEMAS):
        shown = listed[name]
        for group, members in groups.items():
            shown = re.sub(rf"\b{group}\b", members, shown)
        schema = getattr(torch.ops.sparse_compile, name).default._schema
        wanted = [argument.name for argument in schema.arguments]
        assert [word.strip() for word in shown.replace("*,", "").split(",")] == wanted, name
