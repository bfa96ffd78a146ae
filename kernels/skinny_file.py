"""The file that holds what was measured for products of a few rows: `$SPARSE_COMPILE_CACHE/skinny.json`.

    {"format": 6, "entries": {
      "NVIDIA H200 | triton 3.6.0 | linear 6144x2048 torch.bfloat16 | 8 rows": {
        "tiles": {"lines": 16, ...},    null where the library serves the product
        "winner": "ours",               or "cublas" or "inductor": the fastest of all that were measured
        "us": {"ours": 9.0, "cublas": 9.6, "inductor": 9.5}}}}

Times are microseconds per product. One is null where it could not be measured, and missing where nobody asked for it.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .skinny_tuning import Tiles

FORMAT = 6  # of the file, and of the kernel and the tiles whose times it holds


@dataclass(frozen=True)
class Choice:
    """What was measured of one product. tiles: of our kernel, or None where the library serves it. us: microseconds by
    rival, "ours" those of the fastest tiles; None of a rival that could not be measured.
    """

    tiles: Tiles | None
    us: dict[str, float | None]

    @property
    def winner(self) -> str:
        """The fastest rival, of equals the first; the one that serves the product where it is not "inductor"."""
        known = {name: us for name, us in self.us.items() if us is not None}
        return min(known, key=known.__getitem__)

    def to_entry(self) -> dict[str, Any]:
        tiles = None if self.tiles is None else asdict(self.tiles)
        return {"tiles": tiles, "winner": self.winner, "us": self.us}

    @classmethod
    def of_entry(cls, entry: Any) -> Choice:
        """The inverse of `to_entry`. KeyError, TypeError or ValueError of what it does not make."""
        tiles, us = entry["tiles"], dict(entry["us"])
        if not any(_is_time(time) for time in us.values()):
            raise ValueError(f"us={us!r} holds no time")
        if not all(time is None or _is_time(time) for time in us.values()):
            raise TypeError(f"us={us!r} must hold microseconds or null")
        return cls(None if tiles is None else _tiles_of(tiles), us)


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _tiles_of(values: dict[str, Any]) -> Tiles:
    """Tiles whose values have the types that they have by default. Raises TypeError or ValueError."""
    made = Tiles(**values)
    for field in fields(Tiles):
        value = getattr(made, field.name)
        if type(value) is not type(field.default):
            raise TypeError(f"{field.name}={value!r} must be {type(field.default).__name__}")
    return made


def cache_file() -> Path:
    folder = os.environ.get("SPARSE_COMPILE_CACHE") or Path.home() / ".cache" / "sparse_compile"
    return Path(folder) / "skinny.json"


def recall(key: str) -> Choice | None:
    """What the file holds for a key; None, with a warning, of an entry that is none."""
    entries = _read()
    try:
        return Choice.of_entry(entries[key]) if key in entries else None
    except (KeyError, TypeError, ValueError) as error:
        warnings.warn(
            f"{cache_file()}: the entry {key!r} cannot be read ({error!r}); it is measured and written anew",
            stacklevel=2,
        )
        return None


def remember(key: str, choice: Choice) -> None:
    """Adds an entry; readers see the old file or the new one, never a part. A warning where it cannot be written."""
    entries = {**_read(), key: choice.to_entry()}
    try:
        _write({"format": FORMAT, "entries": entries})
    except OSError as error:
        warnings.warn(
            f"{cache_file()} cannot be written ({error}); it is measured again next time", stacklevel=2
        )


def _write(content: dict[str, Any]) -> None:
    """Raises OSError, and leaves nothing beside the file then."""
    cache_file().parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=cache_file().parent)
    try:
        with open(handle, "w") as file:
            json.dump(content, file, indent=1)
        os.replace(name, cache_file())
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _read() -> dict[str, Any]:
    """Entries of the file; none where there is no file, or one of another format, and, with a warning, where it holds
    something else.
    """
    try:
        return _entries(json.loads(cache_file().read_text()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(
            f"{cache_file()} cannot be read ({error}); it is measured and written anew", stacklevel=2
        )
        return {}


def _entries(content: Any) -> dict[str, Any]:
    """Those of a file's content. ValueError of what is no such content."""
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    if content.get("format") != FORMAT:
        return {}
    found = content.get("entries")
    if not isinstance(found, dict):
        raise ValueError('"entries" is no object')
    return found
