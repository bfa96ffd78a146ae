"""Whole models through the public interface, against transformers' own generate and an independent oracle."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from oracle import SparseOracle
from shared_models import shared_model

from sparse_compile import sparse_compile
from sparse_compile.models import tiny_model

pytestmark = pytest.mark.usefixtures("shared_traces")

NAMES = ("ouro", "dory", "hrm-text")
LENGTHS = (3, 7, 12, 40)
NEW = 24


def prompts(seed: int = 1, lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 270, (length,), generator=generator) for length in lengths]


def pad(rows: list[torch.Tensor], side: str = "left") -> dict[str, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        where = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, where], mask[i, where] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def new_tokens(model: object, rows: list[torch.Tensor], new: int = NEW) -> torch.Tensor:
    inputs = pad(rows)
    out = model.generate(**inputs, max_new_tokens=new, do_sample=False)  # type: ignore[attr-defined]
    return out[:, inputs["input_ids"].shape[1] :]


@functools.cache
def compiled_tiny(name: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model that tests share which only generate with it."""
    return sparse_compile(shared_model(name, dtype), **options)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def check_margins(model: object, rows: list[torch.Tensor]) -> torch.Tensor:
    """What transformers generates from these rows. Token equality in float32 means something only if no two best logits
    are nearly tied.
    """
    inputs = pad(rows)
    out = model.generate(  # type: ignore[attr-defined]
        **inputs, max_new_tokens=NEW, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    best = torch.stack(out.logits).topk(2).values
    assert float((best[..., 0] - best[..., 1]).min()) > 1e-4
    return out.sequences[:, inputs["input_ids"].shape[1] :]


@functools.cache
def plain_tokens(name: str) -> torch.Tensor:
    """What transformers generates from the prompts."""
    return check_margins(shared_model(name), prompts())


@functools.cache
def oracle(name: str, capture_loop: int, recapture_every: int | None) -> tuple[SparseOracle, torch.Tensor]:
    """An oracle that has continued the prompts, and its tokens."""
    model = shared_model(name, torch.float64)
    made = SparseOracle(model, 0.3, capture_loop=capture_loop, recapture_every=recapture_every)
    return made, torch.tensor([made.generate(prompt.tolist(), NEW) for prompt in prompts()])


@pytest.mark.parametrize("roll", [True, False], ids=["rolled", "unrolled"])
@pytest.mark.parametrize(
    "options", [{"key_retention": 1.0}, {"enabled": False}], ids=["retention 1.0", "off"]
)
def test_dense_equals_transformers(name: str, options: dict[str, object], roll: bool) -> None:
    compiled, own = compiled_tiny(name, roll=roll, **options), plain_tokens(name)
    assert compiled.program.rolled is roll
    assert torch.equal(new_tokens(compiled, prompts()), own)
    for row, prompt in enumerate(prompts()):
        assert torch.equal(new_tokens(compiled, [prompt], 10)[0], own[row, :10])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"capture_loop": 0},
        {"recapture_every": 2},
        {"roll": False},
        {"prefill_chunk": 4},
        {"implementation": "reference"},
    ],
    ids=lambda options: ",".join(options) or "default",
)
def test_sparse_equals_the_oracle(name: str, options: dict[str, object]) -> None:
    compiled = compiled_tiny(name, torch.float64, key_retention=0.3, **options)
    capture_loop, recapture_every = options.get("capture_loop", 1), options.get("recapture_every")
    made, want = oracle(name, capture_loop, recapture_every)  # type: ignore[arg-type]
    assert torch.equal(new_tokens(compiled, prompts()), want)
    kinds = {(site.layer, site.loop): site.kind for site in compiled.program.sites}
    assert {(layer, loop): kind for layer, loop, kind in made.calls} == kinds
    compiled.engine.check_integrity()


def test_sparse_differs_from_dense(name: str) -> None:
    sparse, dense = compiled_tiny(name, key_retention=0.1), compiled_tiny(name, roll=True, key_retention=1.0)
    assert not torch.equal(new_tokens(sparse, prompts()), new_tokens(dense, prompts()))


def test_rows_do_not_depend_on_batch_padding_or_order(name: str) -> None:
    compiled = compiled_tiny(name, torch.float64, key_retention=0.3)
    batch = new_tokens(compiled, prompts())
    for row, prompt in enumerate(prompts()):
        assert torch.equal(new_tokens(compiled, [prompt])[0], batch[row])
    assert torch.equal(new_tokens(compiled, prompts()[::-1]).flip(0), batch)
    right = pad(prompts(), side="right")
    out = compiled.generate(**right, max_new_tokens=NEW)
    assert torch.equal(out[:, right["input_ids"].shape[1] :], batch)


def test_dense_below_switches_row_by_row() -> None:
    ways = ({"enabled": False}, {"key_retention": 0.3}, {"key_retention": 0.3, "dense_below": 37})
    made = (compiled_tiny("ouro", torch.float64, **options) for options in ways)
    dense, sparse, mixed = (new_tokens(compiled, prompts()) for compiled in made)
    assert torch.equal(mixed[:3], dense[:3])  # 12 + 24 tokens never reach 37
    assert torch.equal(mixed[3], sparse[3])


def test_wrapping_changes_nothing(name: str) -> None:
    model = shared_model(name)
    inputs = pad(prompts())
    before = model(**inputs).logits
    own = new_tokens(model, prompts())
    state = {key: value.clone() for key, value in model.state_dict().items()}
    compiled = sparse_compile(model, key_retention=0.3)
    first = new_tokens(compiled, prompts(seed=2))
    second = new_tokens(compiled, prompts(seed=3))
    assert torch.equal(model(**inputs).logits, before)
    assert torch.equal(compiled(**inputs).logits, before)
    assert torch.equal(new_tokens(model, prompts()), own)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(new_tokens(compiled, prompts(seed=2)), first)
    assert torch.equal(new_tokens(compiled, prompts(seed=3)), second)


def test_growing_batches_and_contexts() -> None:
    compiled = compiled_tiny("ouro", torch.float64, key_retention=0.3)
    for batch, new in ((4, 8), (2, 64), (8, 8)):
        rows = prompts(lengths=(5,) * batch)
        out = compiled.generate(**pad(rows), max_new_tokens=new)
        assert out.shape == (batch, 5 + new)
        alone = compiled.generate(rows[-1][None], max_new_tokens=new)
        assert torch.equal(out[-1], alone[0])
        compiled.engine.check_integrity()


def test_poisoned_pools_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = compiled_tiny("dory", torch.float64, key_retention=0.3)
    want = new_tokens(compiled, prompts())
    empty = torch.empty

    def poisoned(*args: object, **kwargs: object) -> torch.Tensor:
        made = empty(*args, **kwargs)  # type: ignore[call-overload]
        return made.fill_(float("nan")) if made.is_floating_point() else made.fill_(-7)

    monkeypatch.setattr(torch, "empty", poisoned)
    assert torch.equal(new_tokens(sparse_compile(compiled.model, key_retention=0.3), prompts()), want)


@pytest.mark.parametrize("new", [1, 2])
def test_one_and_two_tokens(name: str, new: int) -> None:
    compiled = compiled_tiny(name, roll=True, key_retention=1.0)
    one = prompts(lengths=(1,))[0][None]
    own = compiled.model.generate(one, max_new_tokens=new, do_sample=False)
    assert torch.equal(compiled.generate(one, max_new_tokens=new), own)


def prefix_inputs() -> dict[str, torch.Tensor]:
    inputs = pad(prompts())
    types = torch.zeros_like(inputs["input_ids"])
    for row, (length, prefix) in enumerate(zip(LENGTHS, (3, 4, 0, 30), strict=True)):
        start = types.shape[1] - length
        types[row, start : start + prefix] = 1
    return inputs | {"token_type_ids": types}


def test_prefix_lm_is_honoured() -> None:
    model = shared_model("hrm-text")
    inputs = prefix_inputs()
    own = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    causal = model.generate(**pad(prompts()), max_new_tokens=NEW, do_sample=False)
    assert not torch.equal(own, causal)
    for chunk in (512, 8):
        compiled = sparse_compile(model, key_retention=1.0, prefill_chunk=chunk)
        if chunk >= 30:
            assert torch.equal(compiled.generate(**inputs, max_new_tokens=NEW), own)
        else:
            with pytest.raises(ValueError, match="prefill_chunk"):
                compiled.generate(**inputs, max_new_tokens=NEW)
            compiled.engine.check_integrity()


def test_prefix_lm_inputs_are_refused_where_they_mean_nothing() -> None:
    compiled = compiled_tiny("ouro", roll=True, key_retention=1.0)
    with pytest.raises(ValueError, match="token_type_ids"):
        compiled.generate(**prefix_inputs(), max_new_tokens=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_and_validates(name: str, dtype: torch.dtype) -> None:
    compiled = sparse_compile(tiny_model(name, dtype=dtype), key_retention=0.3)
    assert 0 <= compiled.validate() < 0.3
    assert new_tokens(compiled, prompts()).shape == (4, NEW)


def test_a_program_that_disagrees_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from sparse_compile.errors import ValidationError
    from sparse_compile.passes import sites as sites_pass
    from sparse_compile.passes.program import Site

    def wrong(**fields: object) -> Site:
        return Site(**{**fields, "scale": 2.0 * float(fields["scale"])})  # type: ignore[arg-type]

    monkeypatch.setattr(sites_pass, "Site", wrong)
    model = shared_model("ouro")
    with pytest.raises(ValidationError, match="disagrees with OuroForCausalLM"):
        sparse_compile(model)
    assert sparse_compile(model, validate=False).program.rolled


def test_bad_values_are_refused_by_name() -> None:
    model = shared_model("ouro")
    for options, words in (
        ({"key_retention": 0}, "key_retention=0"),
        ({"key_retention": 1.5}, "key_retention=1.5"),
        ({"key_retention": float("nan")}, "key_retention=nan"),
        ({"capture_loop": 9}, "capture_loop=9"),
        ({"key_retentoin": 0.1}, "key_retentoin"),
        ({"max_context": 513}, "max_context=513"),
    ):
        with pytest.raises(ValueError, match=words):
            sparse_compile(model, **options)
    compiled = sparse_compile(model, max_context=32)
    with pytest.raises(ValueError, match=r"max_context=32.*40 tokens"):
        compiled.generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=32)
    huge = tiny_model("ouro", max_position_embeddings=2**31 - 1)
    with pytest.raises(ValueError, match=r"max_context=2000000000"):
        sparse_compile(huge, max_context=2_000_000_000)
    with pytest.raises(ValueError, match="the pools need"):
        sparse_compile(huge).generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=2_000_000_000)
    with pytest.raises(ValueError, match="positions"):
        sparse_compile(model).generate(torch.ones(1, 8, dtype=torch.long), max_new_tokens=600)
