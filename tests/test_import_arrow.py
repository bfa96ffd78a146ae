"""Imports point one way: kernels <- passes <- runtime <- sparse_compile."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ["kernels", "passes", "runtime", "sparse_compile"]  # each may import itself and what stands before it
FOREIGN = {
    "kernels": {"transformers"},
    "passes": {"triton"},
    "runtime": {"transformers"},
}  # not to be imported
LOWER_ROOMS = ORDER[:-1]


def room_of(module: str) -> str | None:
    """The room of an absolute module name; None for other projects."""
    parts = module.split(".")
    if parts[0] != "sparse_compile":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LOWER_ROOMS else "sparse_compile"


def module_name(path: Path) -> str:
    """The name under which a file is installed: kernels/ops.py -> sparse_compile.kernels.ops."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] != "sparse_compile":
        parts.insert(0, "sparse_compile")
    return ".".join(parts)


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Absolute names of all that a file imports, at any depth; import_module("...") included."""
    package = module.removesuffix(".__init__").split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.args[0].value


def wrong_imports(source: str, module: str, is_package: bool = False) -> list[str]:
    room = room_of(module)
    assert room is not None
    allowed = ORDER[: ORDER.index(room) + 1]
    found = set(imported(ast.parse(source), module, is_package))
    wrong = {name for name in found if (target := room_of(name)) is not None and target not in allowed}
    return sorted(wrong | {name for name in found if name.split(".")[0] in FOREIGN.get(room, ())})


@pytest.mark.parametrize("room", ORDER)
def test_source_imports_only_what_stands_before(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    wrong = {}
    for path in files:
        found = wrong_imports(path.read_text(), module_name(path), path.name == "__init__.py")
        if found:
            wrong[str(path.relative_to(ROOT))] = found
    assert not wrong


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("sparse_compile.kernels.ops", "from ..passes import roll", ["sparse_compile.passes.roll"]),
        ("sparse_compile.kernels.ops", "from sparse_compile import config", ["sparse_compile.config"]),
        (
            "sparse_compile.kernels.ops",
            "def f():\n    import sparse_compile.runtime",
            ["sparse_compile.runtime"],
        ),
        ("sparse_compile.passes.roll", "import_module('sparse_compile.cli')", ["sparse_compile.cli"]),
        ("sparse_compile.runtime.engine", "import transformers.cache_utils", ["transformers.cache_utils"]),
        ("sparse_compile.runtime.engine", "from ..kernels import ops\nfrom . import plan", []),
        ("sparse_compile.cli", "from .runtime.engine import Engine\nimport transformers", []),
    ],
)
def test_the_scan_itself(module: str, source: str, wrong: list[str]) -> None:
    assert wrong_imports(source, module) == wrong


def run_fresh(code: str) -> dict:
    """Runs code in a new process without CUDA and without Triton; it prints one JSON line last."""
    block = (
        "import sys\n"
        "class NoTriton:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'triton':\n"
        "            raise ModuleNotFoundError('No module named ' + repr(name), name=name)\n"
        "sys.meta_path.insert(0, NoTriton())\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", block + code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT / "tests")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


IMPORT_ALL = """
import importlib, json, pkgutil
room = importlib.import_module({name!r})
for found in pkgutil.walk_packages(room.__path__, room.__name__ + "."):
    try:
        importlib.import_module(found.name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "triton":
            raise
print(json.dumps(sorted(name for name in sys.modules if name.split(".")[0] == "sparse_compile")))
"""


@pytest.mark.parametrize("room", LOWER_ROOMS)
def test_a_fresh_process_loads_only_what_stands_before(room: str) -> None:
    loaded = run_fresh(IMPORT_ALL.format(name=f"sparse_compile.{room}"))
    assert f"sparse_compile.{room}" in loaded
    allowed = ORDER[: ORDER.index(room) + 1]
    # Python imports the parent package first; it must stay empty of imports.
    wrong = [name for name in loaded if name != "sparse_compile" and room_of(name) not in allowed]
    assert not wrong


def test_import_is_quick_and_needs_neither_cuda_nor_triton() -> None:
    code = """
import json, time
start = time.perf_counter()
import sparse_compile
print(json.dumps({"seconds": time.perf_counter() - start, "torch": "torch" in sys.modules}))
"""
    assert run_fresh(code)["seconds"] < 3


def test_models_import_without_triton() -> None:
    """The lower rooms do too: they are loaded without it above."""
    code = "import json, sparse_compile.models as models; print(json.dumps({'name': models.__name__}))"
    assert run_fresh(code) == {"name": "sparse_compile.models"}
