"""Text that the demo model learns from, and text that it never saw.

Both are Python sources and their documentation. What is held out is decided by the name of a file alone, so that the
split is the same under every version of Python and of the packages. The held-out text that figures are made on comes
with this package (``held_out.txt``, from CPython 3.11), and is the same everywhere.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HELD_OUT = Path(__file__).with_name("held_out.txt")
PACKAGES = {  # beside Python itself (PSF-2.0): what we depend on, and what that depends on
    "torch": "BSD-3-Clause",
    "transformers": "Apache-2.0",
    "numpy": "BSD-3-Clause",
    "networkx": "BSD-3-Clause",
    "sympy": "BSD-3-Clause",
}
HELD_OUT_ONE_IN = 24
SEPARATOR = b"\0"  # between files
_SKIPPED = {
    *("test", "tests", "__pycache__", "site-packages", "dist-packages"),
    *(
        "encodings",
        "lib2to3",
        "distutils",
        "idlelib",
        "turtledemo",
        "ensurepip",
        "pydoc_data",
    ),  # tables, or not in every Python
}


@dataclass(frozen=True)
class Source:
    """A file, or a topic of Python's documentation. name: "stdlib/json/decoder.py", "topics/assert", ..."""

    name: str
    text: bytes

    @property
    def origin(self) -> str:
        return self.name.split("/", 1)[0]


def held_out_text() -> bytes:
    """The held-out text of this package: UTF-8, files parted by ``SEPARATOR``."""
    return HELD_OUT.read_bytes()


def is_held_out(name: str) -> bool:
    """Whether the file of this name is kept from training: one in 24, by the hash of its name. No topics of the
    documentation: they repeat one another."""
    if name.startswith("topics/"):
        return False
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_ONE_IN == 0


def installed_sources() -> Iterator[Source]:
    """Every text that is used: Python's library, its documentation topics, and ``PACKAGES``, sorted by name."""
    yield from _files("stdlib", Path(sysconfig.get_path("stdlib")))
    yield from _topics()
    for package in PACKAGES:
        found = find_spec(package)
        if found is not None and found.submodule_search_locations:
            yield from _files(package, Path(next(iter(found.submodule_search_locations))))


def training_text() -> dict[str, NDArray[np.uint8]]:
    """What training draws from: origin -> the texts of all its files that are not held out, uint8."""
    parts: dict[str, list[bytes]] = {}
    for source in installed_sources():
        if not is_held_out(source.name):
            parts.setdefault(source.origin, []).append(source.text)
    return {
        origin: np.frombuffer(SEPARATOR.join(texts) + SEPARATOR, np.uint8) for origin, texts in parts.items()
    }


def write_held_out(path: Path = HELD_OUT, most: int = 280_000, longest: int = 24_000) -> list[str]:
    """Write the held-out text from the Python that runs: the beginnings of modules of the standard library, each up to
    ``longest`` bytes, until there are ``most``. Returns the names that went in."""
    names, texts, size = [], [], 0
    for source in installed_sources():
        if source.origin != "stdlib" or not is_held_out(source.name):
            continue
        text = source.text[:longest].decode(errors="ignore").encode()  # no character is cut in two
        if len(text) < 2_000 or size + len(text) > most:
            continue
        names.append(source.name)
        texts.append(text)
        size += len(text) + 1
    path.write_bytes(SEPARATOR.join(texts) + SEPARATOR)
    return names


def _files(origin: str, root: Path) -> Iterator[Source]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(set(folders) - _SKIPPED)
        for file in sorted(name for name in files if name.endswith(".py")):
            path = Path(folder, file)
            text = _clean(path.read_bytes())
            if text:
                yield Source(f"{origin}/{path.relative_to(root).as_posix()}", text)


def _topics() -> Iterator[Source]:
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:  # some distributions package it apart
        return
    for name, text in sorted(topics.items()):
        if cleaned := _clean(text.encode()):
            yield Source(f"topics/{name}", cleaned)


def _clean(text: bytes) -> bytes:
    """Without carriage returns; empty for what is no UTF-8 text."""
    text = text.replace(b"\r\n", b"\n")
    return b"" if SEPARATOR in text or text != text.decode(errors="ignore").encode() else text
