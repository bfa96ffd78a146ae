"""The laws that every compiled model keeps, over random shapes of models and random options of the runtime.

Numbers are float64, where batches, chunks and padding change the last bits alone, and the oracle shares no code with
the passes, the kernels or the runtime. A model is compiled once per shape; what hypothesis varies are the prompts and
the options that need no new program. SPARSE_COMPILE_LAW_SHAPES=40 tries more shapes than the few of every day.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from oracle import SparseOracle

from sparse_compile import sparse_compile
from sparse_compile.compile import EngineFactory
from sparse_compile.compiled import CompiledModel
from sparse_compile.config import SparseConfig
from sparse_compile.models import tiny_model

pytestmark = pytest.mark.usefixtures("shared_traces")

SHAPES = int(os.environ.get("SPARSE_COMPILE_LAW_SHAPES", 6))
HEADS = ((2, 2), (4, 4), (3, 1), (4, 2), (5, 1), (6, 2))  # (query heads, KV heads)
CLOSE = {"rtol": 1e-9, "atol": 1e-9}
CLOSE_TO_TRANSFORMERS = {"rtol": 1e-6, "atol": 1e-6}  # its generate rounds logits to float32


@dataclass(frozen=True)
class Shape:
    """One random model and the options that are compiled in."""

    name: str
    model: dict[str, Any]
    options: dict[str, Any]

    @staticmethod
    def draw(number: int) -> Shape:
        """Reproducible: the number says it all. Even ones are Ouro, odd ones Dory."""
        chance = random.Random(number)
        heads, kv_heads = chance.choice(HEADS)
        model: dict[str, Any] = {
            "hidden_size": chance.choice((16, 24, 32)),
            "head_dim": chance.choice((4, 6, 8, 12)),
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
        }
        loops = chance.randint(2, 5)
        name = ("ouro", "dory")[number % 2]
        model |= {"ouro": _ouro_layers, "dory": _dory_layers}[name](chance, loops)
        options = {
            "key_retention": chance.choice((0.05, 0.1, 0.3, 0.5, 0.77)),
            "capture_loop": chance.randint(0, loops - 2),
            "recapture_every": chance.choice((None, None, 2, 3)),
            "implementation": "reference" if number % 3 == 2 else "batched",
            "roll": number % 4 != 3,
        }
        return Shape(name, model, options)


def _ouro_layers(chance: random.Random, loops: int) -> dict[str, Any]:
    return {"num_hidden_layers": chance.randint(1, 3), "total_ut_steps": loops}


def _dory_layers(chance: random.Random, loops: int) -> dict[str, Any]:
    """Layers before, inside and after the loop, sliding or full, with one full one inside at least."""
    before, inside, after = chance.randint(0, 1), chance.randint(1, 3), chance.randint(0, 1)
    kinds = [chance.choice(("sliding_attention", "full_attention")) for _ in range(before + inside + after)]
    kinds[before + chance.randrange(inside)] = "full_attention"
    return {
        "num_hidden_layers": len(kinds),
        "n_input_layers": before,
        "n_recurrent_layers": inside,
        "n_output_layers": after,
        "n_recurrent_loops": loops,
        "layer_types": kinds,
        "sliding_window": chance.randint(1, 9),
    }


@dataclass
class Looped:
    """A model, its program, and its own forward as it was before anything was compiled."""

    shape: Shape
    model: Any
    compiled: Any
    probe: torch.Tensor
    forward: torch.Tensor

    def __repr__(self) -> str:
        return repr(self.shape)

    def with_runtime(self, **runtime: Any) -> CompiledModel:
        """The same program under other options of the runtime."""
        config = SparseConfig.from_options(**self.shape.options, **runtime, progress=False)
        program = self.compiled.program
        return CompiledModel(self.model, config, program, EngineFactory(self.model, config, program))

    def oracle(self, prompt: list[int], new: int) -> tuple[list[list[int]], torch.Tensor]:
        options = self.shape.options
        oracle = SparseOracle(
            self.model, options["key_retention"], options["capture_loop"], options["recapture_every"]
        )
        tokens = oracle.generate(prompt, new)
        return [tokens], torch.stack(oracle.logits)[None]


@pytest.fixture(scope="module", params=range(SHAPES), ids=lambda number: f"shape {number}")
def looped(request: pytest.FixtureRequest) -> Looped:
    shape = Shape.draw(request.param)
    model = tiny_model(shape.name, dtype=torch.float64, seed=request.param, **shape.model)
    probe = torch.randint(3, 270, (2, 9), generator=torch.Generator().manual_seed(request.param))
    with torch.no_grad():
        forward = model(probe).logits
    return Looped(shape, model, sparse_compile(model, **shape.options), probe, forward)


runtimes = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from((1, 2, 3, 5, 16)),
        "prefill_chunk": st.sampled_from((1, 2, 3, 7, 64)),
        "key_bucket": st.sampled_from((1, 3, 64)),
    }
)
prompts = st.lists(st.integers(3, 269), min_size=1, max_size=14)
batches = st.lists(prompts, min_size=2, max_size=4)
lengths = st.integers(1, 7)
few = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # no shrinking: a shape is small already
    suppress_health_check=list(HealthCheck),
)


def padded(rows: list[list[int]], side: str = "left", filler: int = 0) -> dict[str, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids, mask = [], []
    for row in rows:
        gap, ones = [filler] * (width - len(row)), [1] * len(row)
        ids.append(gap + row if side == "left" else row + gap)
        mask.append([0] * len(gap) + ones if side == "left" else ones + [0] * len(gap))
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def run(compiled: Any, inputs: dict[str, torch.Tensor], new: int) -> tuple[list[list[int]], torch.Tensor]:
    """(new tokens, logits [B, new, vocab]). Afterwards the engine must be whole and empty."""
    out = compiled.generate(
        **inputs, max_new_tokens=new, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    if isinstance(compiled, CompiledModel):
        compiled.engine.check_integrity()
        assert compiled.engine.pool.held_pages == 0
    return out.sequences[:, inputs["input_ids"].shape[1] :].tolist(), torch.stack(out.logits, dim=1)


def assert_same(
    ours: tuple[list[list[int]], torch.Tensor], theirs: tuple[list[list[int]], torch.Tensor]
) -> None:
    close = CLOSE if theirs[1].dtype == torch.float64 else CLOSE_TO_TRANSFORMERS
    torch.testing.assert_close(ours[1].to(theirs[1].dtype), theirs[1], **close)
    assert ours[0] == theirs[0]


@few
@given(rows=batches, new=lengths, runtime=runtimes)
def test_sparse_is_the_written_arithmetic(
    looped: Looped, rows: list[list[int]], new: int, runtime: dict[str, Any]
) -> None:
    tokens, logits = run(looped.with_runtime(**runtime), padded(rows), new)
    for place, row in enumerate(rows):
        assert_same(([tokens[place]], logits[place : place + 1]), looped.oracle(row, new))


@few
@given(rows=batches, new=lengths, runtime=runtimes)
def test_a_row_alone_is_the_row_in_a_batch(
    looped: Looped, rows: list[list[int]], new: int, runtime: dict[str, Any]
) -> None:
    compiled = looped.with_runtime(**runtime)
    tokens, logits = run(compiled, padded(rows), new)
    for place, row in enumerate(rows):
        alone = run(compiled, padded([row]), new)
        assert_same(([tokens[place]], logits[place : place + 1]), alone)


@few
@given(rows=batches, new=lengths, chunk=st.integers(1, 9), page_size=st.integers(1, 9))
def test_one_chunk_is_many(
    looped: Looped, rows: list[list[int]], new: int, chunk: int, page_size: int
) -> None:
    """And one page size is another."""
    whole = run(looped.with_runtime(), padded(rows), new)
    cut = run(looped.with_runtime(prefill_chunk=chunk, page_size=page_size), padded(rows), new)
    assert_same(cut, whole)


@few
@given(rows=batches, new=lengths, runtime=runtimes, filler=st.integers(0, 269), extra=st.integers(1, 5))
def test_padded_is_unpadded(
    looped: Looped, rows: list[list[int]], new: int, runtime: dict[str, Any], filler: int, extra: int
) -> None:
    """Left, right, and as holes in the middle; whatever token stands there."""
    compiled = looped.with_runtime(**runtime)
    longest = max(rows, key=len)
    rows = [row for row in rows if row is not longest] + [longest]
    left = run(compiled, padded(rows, "left", filler), new)
    assert_same(run(compiled, padded(rows, "right", filler), new), left)
    inputs = padded(rows, "left", filler)
    at = inputs["input_ids"].shape[1] - 1
    gap = torch.full((len(rows), extra), filler)
    holes = {
        "input_ids": torch.cat((inputs["input_ids"][:, :at], gap, inputs["input_ids"][:, at:]), dim=1),
        "attention_mask": torch.cat(
            (inputs["attention_mask"][:, :at], gap * 0, inputs["attention_mask"][:, at:]), dim=1
        ),
    }
    assert_same(run(compiled, holes, new), left)


@few
@given(row=prompts, new=lengths, runtime=runtimes)
def test_short_rows_run_dense_as_transformers(
    looped: Looped, row: list[int], new: int, runtime: dict[str, Any]
) -> None:
    """The dense half of a sparse program, forced by `dense_below`."""
    dense = looped.with_runtime(**runtime, dense_below=1000)
    assert_same(run(dense, padded([row]), new), run(looped.model, padded([row]), new))


def test_full_retention_is_dense(looped: Looped) -> None:
    full = sparse_compile(looped.model, **(looped.shape.options | {"key_retention": 1.0}), prefill_chunk=3)
    dense = looped.with_runtime(dense_below=1000, prefill_chunk=3)
    rows = [looped.probe[0, :4].tolist(), looped.probe[1].tolist(), looped.probe[0, :1].tolist()]
    ours = run(full, padded(rows), 7)
    assert {site.kind for site in full.program.sites} == {"dense"}
    assert_same(ours, run(dense, padded(rows), 7))
    for place, row in enumerate(rows):
        own = run(looped.model, padded([row]), 7)
        assert_same(([ours[0][place]], ours[1][place : place + 1]), own)


def test_the_schedule_is_that_of_the_oracle(looped: Looped) -> None:
    oracle = SparseOracle(
        looped.model,
        looped.shape.options["key_retention"],
        looped.shape.options["capture_loop"],
        looped.shape.options["recapture_every"],
    )
    oracle.generate([5, 6, 7], 2)
    kinds = [(site.layer, site.loop, site.kind) for site in looped.compiled.program.sites]
    assert kinds == oracle.calls


def test_the_plain_forward_is_unchanged(looped: Looped) -> None:
    """Bit for bit, after all that the tests above have done with the model."""
    looped.with_runtime(prefill_chunk=2).generate(looped.probe, max_new_tokens=3)
    with torch.no_grad():
        assert torch.equal(looped.model(looped.probe).logits, looped.forward)
        assert torch.equal(looped.compiled(looped.probe).logits, looped.forward)
    assert not looped.model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in looped.model.modules())
