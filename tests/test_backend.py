"""torch.compile(model, backend="sparse_compile"): transformers' own generate with a static cache, on compiled models.

Graphs run without Inductor here (`inductor=False`), which changes no meaning and compiles in a second;
`test_backend_inductor` has the same through Inductor.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sparse_compile.backend as backend
from sparse_compile import sparse_compile
from sparse_compile.models.presets import tiny_model

NAMES = ("ouro", "dory", "hrm-text")
REWRITTEN = {"ouro": (8, 8), "dory": (4, 8), "hrm-text": (18, 18)}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    backend.clear_reports()
    yield
    torch._dynamo.reset()


def compiled(model: Any, **options: Any) -> Any:
    """A copy of the model with a compiled forward; the parameters are shared."""
    twin = copy.copy(model)
    twin.forward = torch.compile(
        type(model).forward.__get__(twin), backend="sparse_compile", options={"inductor": False, **options}
    )
    return twin


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, new: int = 24, **arguments: Any) -> Tensor:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        cache_implementation="static",
        **arguments,
    )


def padded_batch(lengths: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 272, (len(lengths), max(lengths)), generator=make)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    return ids * mask, mask


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", NAMES)
def test_full_retention_gives_the_plain_models_tokens(name: str, attention: str) -> None:
    """Left-padded prompts of four lengths; 24 tokens, so that Dory's window of 8 is left behind."""
    model = tiny_model(name)
    model.set_attn_implementation(attention)
    ids, mask = padded_batch((13, 5, 9, 2))
    wanted = generate(model, ids, mask)
    assert torch.equal(generate(compiled(model, key_retention=1.0), ids, mask), wanted)
    report = backend.last_report()
    assert report is not None
    assert (len(report.rewritten), report.total) == REWRITTEN[name]
    assert report.counts["dense"] == len(report.rewritten)


@pytest.mark.parametrize("name", NAMES)
def test_sparse_tokens_are_those_of_the_runtime(name: str) -> None:
    """float64, where no near-tie decides; two prompts, one at a time, as the runtime has no padding."""
    model = tiny_model(name, torch.float64)
    runtime = sparse_compile(tiny_model(name, torch.float64), key_retention=0.3, progress=False)
    mine = compiled(model, key_retention=0.3)
    for length, seed in ((13, 1), (5, 2)):
        ids, _ = padded_batch((length,), seed)
        wanted = torch.as_tensor(runtime.generate(ids, max_new_tokens=24))
        got = generate(mine, ids)
        assert torch.equal(got, wanted)
        assert not torch.equal(got, generate(model, ids)), "the test cannot tell sparse from dense"


def test_padding_changes_no_sparse_token() -> None:
    """Padding keys are never selected and not counted: a row in a padded batch equals the row alone."""
    model = tiny_model("ouro", torch.float64)
    mine = compiled(model, key_retention=0.3)
    ids, mask = padded_batch((13, 5, 9, 2))
    together = generate(mine, ids, mask)
    for row, length in enumerate((13, 5, 9, 2)):
        alone = generate(mine, ids[row : row + 1, -length:])
        assert torch.equal(together[row, 13:], alone[0, length:])
