"""Randomness of sampling: every row owns a generator, so neighbours never change what a row draws.

Row 0 of a single seed uses the seed itself, row i > 0 the first 63 bits of
SHA-256("sparse_compile:<seed>:<i>"). The same seed, row and prompt give the same tokens, whatever else is in
the batch.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Sequence
from typing import Any

import torch

from sparse_compile.errors import ArgumentError

_SEED_LIMIT = 2**63
_LIMIT = "a seed is an integer from 0 to 2**63 - 1, or a list of them with one per row"


def derived_seed(seed: int, row: int) -> int:
    """The seed of row `row` of a call with one `seed`; row 0 keeps the seed."""
    if row == 0:
        return seed
    digest = hashlib.sha256(f"sparse_compile:{seed}:{row}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def row_seeds(seed: Any, prompts: int, copies: int) -> list[int]:
    """One seed for each of prompts * copies rows (copies of a prompt are neighbours).

    seed: None (drawn from torch's global generator, so that torch.manual_seed decides), one int, one per
    prompt (its copies are derived from it), or one per row.
    """
    rows = prompts * copies
    if seed is None:
        seed = int(torch.randint(_SEED_LIMIT - 1, (1,), device="cpu").item())
    if hasattr(seed, "tolist"):  # a tensor or a numpy array
        seed = seed.tolist()
    if not isinstance(seed, Sequence) or isinstance(seed, str | bytes):
        return [derived_seed(_checked(seed), row) for row in range(rows)]
    seeds = [_checked(one) for one in seed]
    if len(seeds) == rows:
        return seeds
    if len(seeds) == prompts:
        return [derived_seed(one, copy) for one in seeds for copy in range(copies)]
    raise ArgumentError(
        "seed", f"a list of {len(seeds)}", f"the call has {rows} rows", f"pass one seed or {rows}"
    )


def _checked(seed: Any) -> int:
    try:
        value = -1 if isinstance(seed, bool) else operator.index(seed)  # numpy integers come in too
    except TypeError:
        value = -1
    if not 0 <= value < _SEED_LIMIT:
        raise ArgumentError("seed", seed, _LIMIT, "pass for example seed=0")
    return value


def make_generator(seed: int, device: torch.device) -> torch.Generator:
    """A generator on `device`, where the scores are."""
    return torch.Generator(device).manual_seed(seed)
