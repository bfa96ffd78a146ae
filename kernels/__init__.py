"""Attention over a paged KV pool, and products of a few rows: schemas, definitions and implementations of the ops.

    retention    how many keys a row keeps, in exact integer arithmetic
    arguments    the operands of an op as small dataclasses, and how an output is allocated
    checks       what a call must satisfy, with errors that name argument, value, limit and remedy
    paging       page look-up and the write of new keys and values
    reference    the definition: one row and one head at a time
    tiles        which rows are worked on together by the batched implementation
    batched      the same arithmetic, vectorised
    ops          op schemas and fakes; importing it registers `torch.ops.sparse_compile.*`
    dispatch     the real implementations behind the schemas
    skinny       products of a few rows with a large weight; importing it registers their ops
    greedy       the largest logit of each row and its log-probability, in one pass

This room imports torch and nothing else of this project. The submodules are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Retention": "retention",
    "retained_count": "retention",
    "compute_dtype": "arguments",
    "IMPLEMENTATIONS": "arguments",
}

__all__ = ["IMPLEMENTATIONS", "Retention", "compute_dtype", "retained_count"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_EXPORTS[name]}"), name)
