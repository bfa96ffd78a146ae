"""Teacher forcing in one run against decoding token by token: tokens, losses and masses."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from oracle import SparseOracle
from shared_models import shared_model

from sparse_compile import sparse_compile
from sparse_compile.models import tiny_model
from sparse_compile.quality.forced import Forced, Part, TeacherForcing

pytestmark = pytest.mark.usefixtures("shared_traces")

PROMPT, NEW = 9, 14


@functools.cache
def compiled(name: str, **options: Any) -> Any:
    settings = {"key_retention": 0.3, "page_size": 4, "validate": False, "progress": False, **options}
    return sparse_compile(shared_model(name, dtype=torch.float64), **settings)


def texts(count: int, width: int) -> torch.Tensor:
    return torch.randint(3, 60, (count, width), generator=torch.Generator().manual_seed(5))


def force(model: Any, ids: torch.Tensor, start: int, rows: int = 7, loops: int | None = None) -> Forced:
    runner = TeacherForcing(model, ids.shape[1], texts=2, rows=rows)
    (forced,) = runner.run(ids, [Part(start, loops)])
    runner.close()
    return forced


@pytest.mark.parametrize(("name", "capture_loop"), [("ouro", 0), ("dory", 1)])
def test_rows_in_one_run_are_what_decoding_computes(name: str, capture_loop: int) -> None:
    model = compiled(name, capture_loop=capture_loop)
    prompts = texts(3, PROMPT)
    out = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    forced = force(model, out.sequences, PROMPT)
    assert forced.best.tolist() == out.sequences[:, PROMPT + 1 :].tolist()
    assert bool(forced.right.all())
    want = (
        torch.stack(out.logits[1:], 1).log_softmax(-1).gather(2, out.sequences[:, PROMPT + 1 :, None])[..., 0]
    )
    torch.testing.assert_close(forced.loss, -want.float(), rtol=1e-6, atol=1e-6)


def test_rows_are_what_the_written_formula_computes() -> None:
    model, prompt = compiled("ouro"), texts(1, PROMPT)
    oracle = SparseOracle(model.model, 0.3)
    tokens = torch.tensor([prompt[0].tolist() + oracle.generate(prompt[0].tolist(), NEW)])
    forced = force(model, tokens, PROMPT)
    assert forced.best[0].tolist() == tokens[0, PROMPT + 1 :].tolist()
    assert forced.mass is not None
    last = torch.stack([mass for _, mass, *_ in oracle.kept.values()])  # of the last decode step
    torch.testing.assert_close(forced.mass[0, -1], last.float(), rtol=1e-6, atol=1e-6)


def test_runs_and_batches_change_nothing() -> None:
    model, ids = compiled("ouro"), texts(5, 21)
    one, many = force(model, ids, 4, rows=200), force(model, ids, 4, rows=3)
    assert torch.equal(one.best, many.best)
    torch.testing.assert_close(one.loss, many.loss, rtol=1e-6, atol=1e-6)
    alone = force(model, ids[3:4], 4)
    torch.testing.assert_close(one.mass[3:4], alone.mass, rtol=1e-6, atol=1e-6)  # type: ignore[index]


def test_sparse_differs_from_dense_and_short_rows_do_not() -> None:
    ids = texts(2, 21)
    dense, sparse = force(compiled("ouro", enabled=False), ids, 4), force(compiled("ouro"), ids, 4)
    assert dense.mass is None
    assert not torch.equal(dense.loss, sparse.loss)
    partly = force(compiled("ouro", dense_below=12), ids, 4)
    assert torch.equal(partly.loss[:, :7], dense.loss[:, :7])  # rows of up to 11 keys
    assert not torch.equal(partly.loss[:, 7:], dense.loss[:, 7:])


def test_all_loops_draft_the_model_itself() -> None:
    model, ids = compiled("ouro"), texts(2, 21)
    whole, loops = force(model, ids, 4), model.program.loops
    assert torch.equal(force(model, ids, 4, loops=loops).best, whole.best)
    assert not torch.equal(force(model, ids, 4, loops=1).loss, whole.loss)


def test_parts_do_not_see_each_other() -> None:
    """Whatever order they come in: each overwrites what lies behind its own prompt."""
    model, ids = compiled("ouro"), texts(3, 21)
    runner = TeacherForcing(model, 21, texts=2, rows=20)
    parts = [Part(9), Part(4), Part(12, dense_rows=2), Part(9, loops=2), Part(9)]
    together = runner.run(ids, parts)
    for part, found in zip(parts, together, strict=True):
        (alone,) = runner.run(ids, [part])
        assert torch.equal(found.best, alone.best)
        assert torch.equal(found.loss, alone.loss)
    runner.close()
    assert together[2].mass is not None
    assert bool((together[2].mass[:, :2] == 1).all())  # dense rows keep all
    assert bool((together[2].mass[:, 2:] < 1).any())


def test_a_start_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="start=20 of texts of 21 tokens"):
        force(compiled("ouro"), texts(1, 21), 20)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("keep", [0, 5])
def test_a_gpu_computes_the_same(keep: int) -> None:
    """The Triton kernels, prompts and decode rows of several texts in one run, in float32: a few near-ties may part."""
    ids, options = (
        texts(5, 300),
        {"key_retention": 0.2, "keep_first": keep, "keep_last": keep, "dense_below": 0},
    )
    found = []
    for device in ("cpu", "cuda"):
        model = tiny_model("ouro", dtype=torch.float32, max_position_embeddings=512).to(device)
        made = sparse_compile(model, **options, inductor=False, cuda_graphs=False, progress=False)
        found.append(force(made, ids, 60, rows=500))
    torch.testing.assert_close(found[1].loss.mean(), found[0].loss.mean(), rtol=5e-3, atol=0)
    assert float((found[1].best == found[0].best).float().mean()) > 0.97
    torch.testing.assert_close(found[1].mass.mean(), found[0].mass.mean(), rtol=1e-3, atol=0)  # type: ignore[union-attr]
