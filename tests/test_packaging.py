"""What is in the repository is what installs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("kernels", "passes", "runtime", "sparse_compile")


@pytest.fixture(scope="module")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def packages_on_disk() -> set[str]:
    """Package names of all folders with an __init__.py: kernels/sub -> sparse_compile.kernels.sub."""
    folders = [file.parent.relative_to(ROOT) for room in ROOMS for file in (ROOT / room).rglob("__init__.py")]
    names = (".".join(folder.parts) for folder in folders)
    return {name if name.startswith("sparse_compile") else f"sparse_compile.{name}" for name in names}


def test_every_package_is_listed(pyproject: dict) -> None:
    assert set(pyproject["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_the_backend_is_an_entry_point(pyproject: dict) -> None:
    from importlib.metadata import EntryPoint

    ((name, value),) = pyproject["project"]["entry-points"]["torch_dynamo_backends"].items()
    found = EntryPoint(name, value, "torch_dynamo_backends").load()
    assert name == "sparse_compile"
    assert callable(found)


def test_every_folder_with_code_is_a_package() -> None:
    bare = {
        str(file.parent.relative_to(ROOT))
        for room in ROOMS
        for file in (ROOT / room).rglob("*.py")
        if not (file.parent / "__init__.py").exists()
    }
    assert not bare


def test_the_pinned_set_meets_the_declared_requirements(pyproject: dict) -> None:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    versions = {}
    for pin in pins:
        (only,) = pin.specifier
        assert only.operator == "==", f"{pin} is no exact version"
        versions[canonicalize_name(pin.name)] = only.version
    declared = pyproject["project"]["dependencies"] + pyproject["project"]["optional-dependencies"]["dev"]
    for text in declared:
        requirement = Requirement(text)
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), text


def test_the_wheel_holds_every_module_and_the_type_marker(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for room in ROOMS:
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('../wheel'))"
    (tmp_path / "wheel").mkdir()
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for room in ROOMS:
        inside = Path("sparse_compile") if room == "sparse_compile" else Path("sparse_compile") / room
        for file in (ROOT / room).rglob("*.py"):
            assert (inside / file.relative_to(ROOT / room)).as_posix() in names
    assert "sparse_compile/py.typed" in names
    demo = ROOT / "sparse_compile" / "models" / "demo"
    assert {f"sparse_compile/models/demo/{file.name}" for file in demo.iterdir()} <= names
    assert (demo / "model.safetensors").stat().st_size <= 16_000_000
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    assert any(name.endswith("dist-info/entry_points.txt") for name in names)
    assert all(name.startswith(("sparse_compile/", "sparse_compile-")) for name in names), "stray files"
