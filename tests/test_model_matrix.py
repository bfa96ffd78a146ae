"""docs/models.md is what a run finds; `make models` writes it."""

from __future__ import annotations

import warnings

import pytest
from model_matrix import ENTRIES, HEAD, PAGE, Entry, rows

pytestmark = pytest.mark.usefixtures("shared_traces")


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_page_says_what_a_run_finds(entry: Entry) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rows(entry)
    assert found in PAGE.read_text(), "run `make models`"


def test_the_page_holds_nothing_else() -> None:
    text = PAGE.read_text()
    assert text.startswith(HEAD)
    lines = text[len(HEAD) :].splitlines()
    assert len(lines) == 2 + 2 * len(ENTRIES)
    assert {line.split(" | ")[0].removeprefix("| ") for line in lines[2:]} == {
        entry.name for entry in ENTRIES
    }
