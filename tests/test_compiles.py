"""The Triton kernels compile for a GPU of generation 9, wherever the tests run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    """In a process of its own, where Triton compiles; tests interpret where there is no GPU."""
    script = Path(__file__).parent / "compile_for_hopper.py"
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=600, cwd=script.parent,
        env=environment(tmp_path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads(done.stdout)
    assert {name: error for name, error in made["failed"].items() if error} == {}
    assert made["kernels"] >= 36
    assert made["asking"] >= 5, "products ask for their weights while they wait"
    # What a loop carries decides whether Triton pipelines its loads; it says nothing where it does not.
    assert made["copying"] == made["attention"] >= 10, (
        "keys are copied while those of the step before are in use"
    )


def environment(cache: Path) -> dict[str, str]:
    """Without the interpreter, with a cache of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return kept | {"TRITON_CACHE_DIR": str(cache)}
