"""Prompts, and one compiled model, for the tests of cases from the field."""

from __future__ import annotations

import functools
from typing import Any

import torch
from shared_models import shared_model, traced_once

from sparse_compile import sparse_compile


def prompts(*lengths: int, seed: int = 1, vocabulary: int = 270) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocabulary, (length,), generator=generator).tolist() for length in lengths]


def left_padded(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def new_tokens(model: Any, rows: list[list[int]], new: int, **options: Any) -> list[list[int]]:
    inputs = left_padded(rows)
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False, **options)
    return out[:, inputs["input_ids"].shape[1] :].tolist()


@functools.cache
def compiled_ouro() -> Any:
    """A tiny Ouro in float64 with retention 0.3; tests look at what it gives, not at how often it was used."""
    with traced_once():
        return sparse_compile(shared_model("ouro", torch.float64), key_retention=0.3, prefill_chunk=4)
