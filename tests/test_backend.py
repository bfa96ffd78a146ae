"""torch.compile(model, backend="sparse_compile"): transformers' own generate with a static cache.

Most tests compile the decode step alone, as transformers does with a `CompileConfig`, and run the rewritten graph
without Inductor (`inductor=False`), which changes no meaning and compiles in a second; `test_backend_inductor` has the
rest.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from looped_models import CachePositions, LoopedConfig, LoopedModel, RotaryInside
from torch import Tensor
from transformers import CompileConfig, StaticCache

import sparse_compile.backend as backend
from sparse_compile import sparse_compile
from sparse_compile.models.presets import tiny_model

pytestmark = pytest.mark.usefixtures("fresh_compiler")

NAMES = ("ouro", "dory", "hrm-text")
SIZES: dict[str, dict[str, int]] = {"ouro": {}, "dory": {}, "hrm-text": {"num_hidden_layers": 1}}
REWRITTEN = {"ouro": (8, 8), "dory": (4, 8), "hrm-text": (9, 9)}
LENGTHS = (13, 5, 9, 2)


def decode_config(**options: Any) -> CompileConfig:
    """What a user passes to generate; on CUDA transformers needs no private switch."""
    config = CompileConfig(backend="sparse_compile", mode=None, options={"inductor": False, **options})
    config._compile_all_devices = True
    return config


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, new: int = 24, **arguments: Any) -> Tensor:
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids) if mask is None else mask,
        max_new_tokens=new,
        do_sample=False,
        cache_implementation="static",
        **arguments,
    )


def padded_batch(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 60, (len(lengths), max(lengths)), generator=make)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, -length:] = 1
    return ids * mask, mask


def decode_report() -> backend.GraphReport:
    report = backend.last_report()
    assert report is not None
    return report


@pytest.mark.parametrize(("name", "attention"), [(name, "sdpa") for name in NAMES] + [("dory", "eager")])
def test_full_retention_gives_the_plain_models_tokens(name: str, attention: str) -> None:
    """Left-padded prompts of four lengths; 24 tokens, so that Dory's window of 8 is left behind."""
    model = tiny_model(name, **SIZES[name])
    model.set_attn_implementation(attention)
    ids, mask = padded_batch()
    wanted = generate(model, ids, mask)
    got = generate(model, ids, mask, compile_config=decode_config(key_retention=1.0))
    assert torch.equal(got, wanted)
    report = decode_report()
    assert (len(report.rewritten), report.total) == REWRITTEN[name]
    assert report.counts["dense"] == len(report.rewritten)


def test_a_compiled_forward_serves_prefill_and_decode() -> None:
    """`model.forward = torch.compile(model.forward, ...)`: the prefill's graph is left dense."""
    model = tiny_model("ouro", num_hidden_layers=1, total_ut_steps=3)
    ids, mask = padded_batch()
    wanted = generate(model, ids, mask, 8)
    model.forward = torch.compile(
        model.forward, backend="sparse_compile", options={"inductor": False, "key_retention": 1}
    )
    assert torch.equal(generate(model, ids, mask, 8), wanted)
    prefill = backend.last_report("prefill")
    assert prefill is not None
    assert not prefill.rewritten
    assert len(decode_report().rewritten) == 3


@pytest.mark.parametrize("name", NAMES)
def test_sparse_tokens_are_those_of_the_runtime(name: str) -> None:
    """float64, where no near-tie decides; two prompts, one at a time, as the runtime has no padding.

    Their caches have one size, so that only a window that is not full yet compiles again.
    """
    model = tiny_model(name, torch.float64, **({} if name == "dory" else {"num_hidden_layers": 1}))
    runtime = sparse_compile(model, key_retention=0.3, progress=False, validate=False)
    config = decode_config(key_retention=0.3)
    for length, new in ((13, 24), (5, 32)):
        ids, _ = padded_batch((length,), length)
        wanted = torch.as_tensor(runtime.generate(ids, max_new_tokens=new))
        got = generate(model, ids, None, new, compile_config=config)
        assert torch.equal(got, wanted)
        assert not torch.equal(got, generate(model, ids, None, new)), "the test cannot tell sparse from dense"


def test_padding_changes_no_sparse_token() -> None:
    """Padding keys are never selected and not counted: a row in a padded batch equals the row alone."""
    model = tiny_model("ouro", torch.float64, num_hidden_layers=1)
    ids, mask = padded_batch()
    config = decode_config(key_retention=0.3)
    together = generate(model, ids, mask, 12, compile_config=config)
    for row in (1, 3):
        alone = generate(model, ids[row : row + 1, -LENGTHS[row] :], None, 12, compile_config=config)
        assert torch.equal(together[row, 13:], alone[0, LENGTHS[row] :])


@pytest.mark.parametrize("loops", [2, 4, 12])
def test_no_compilation_after_the_second_token(loops: int) -> None:
    """As many graphs after 8 tokens as after 64, far from the recompile limit."""
    model = tiny_model("ouro", num_hidden_layers=1, total_ut_steps=loops)
    seen: list[int] = []

    def count(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(len(backend.reports()))
        return scores

    ids, mask = padded_batch((5, 3))
    config = decode_config(key_retention=0.3, capture_loop=0 if loops == 2 else 1)
    generate(model, ids, mask, 64, compile_config=config, logits_processor=[count])
    assert seen[1] == seen[7] == seen[63]
    assert decode_report().counts["consume"] == (1 if loops == 2 else loops - 2)


def test_rows_that_end_cause_no_compilation() -> None:
    """3, then 2, then 1 live rows: the end tokens are chosen from the model's own greedy text."""
    model = tiny_model("ouro", num_hidden_layers=1)
    ids, mask = padded_batch((5, 4, 3))
    config = decode_config(key_retention=1)
    free = generate(model, ids, mask, 12, compile_config=config)[:, 5:]
    graphs = len(backend.reports())
    ends = [int(free[0, 3]), int(free[1, 6])]
    got = generate(model, ids, mask, 12, compile_config=config, eos_token_id=ends)[:, 5:]
    lengths = [int((row != 0).sum()) for row in got]
    assert len(set(lengths)) > 1, "the rows end at one step; the test shows nothing"
    assert len(backend.reports()) == graphs
    for row, length in enumerate(lengths):
        assert torch.equal(got[row, :length], free[row, :length])


def test_a_prompt_of_one_token() -> None:
    """Key length 1: the first step sees one key, the next two."""
    model = tiny_model("ouro", num_hidden_layers=1)
    ids = torch.tensor([[7]])
    got = generate(model, ids, None, 6, compile_config=decode_config(key_retention=1))
    assert torch.equal(got, generate(model, ids, None, 6))


def test_calls_of_other_sizes() -> None:
    """A11: (4 rows, 8 tokens), (2 rows, 20 tokens), (6 rows, 8 tokens) on one compiled model."""
    model = tiny_model("ouro", num_hidden_layers=1)
    config = decode_config(key_retention=1)
    for rows, new in ((4, 8), (2, 20), (6, 8)):
        ids, mask = padded_batch(tuple(range(2, 2 + rows)), rows)
        assert torch.equal(
            generate(model, ids, mask, new, compile_config=config), generate(model, ids, mask, new)
        )


class Decode:
    """A decode loop of the user's own over a static cache, for one step after a prefill."""

    def __init__(self, model: LoopedModel, mask: Tensor, ids: Tensor, length: int = 16) -> None:
        self.model, self.ids = model, ids
        self.cache = StaticCache(config=model.config, max_cache_len=length)
        self.positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            model(ids, attention_mask=mask, position_ids=self.positions, cache=self.cache)

    def step(self, forward: Any, token: Tensor, mask: Any) -> Tensor:
        with torch.no_grad():
            position = self.positions[:, -1:] + 1
            return forward(token, attention_mask=mask, position_ids=position, cache=self.cache).logits


def compiled_forward(model: Any, **options: Any) -> Any:
    settings = {"inductor": False, "key_retention": 0.3, **options}
    return torch.compile(model.forward, backend="sparse_compile", options=settings)


def test_masks_of_every_type_are_one_mask() -> None:
    """A6: int64, bool, additive, and bool of four dimensions, with left padding."""
    torch.manual_seed(0)
    model = RotaryInside(LoopedConfig(num_hidden_layers=1)).eval().double()
    ids, mask = padded_batch((6, 3))
    token, wider = torch.tensor([[5], [9]]), torch.nn.functional.pad(mask, (0, 1), value=1)
    visible = torch.nn.functional.pad(wider, (0, 16 - 7)).bool()[:, None, None]
    additive = torch.where(visible, 0.0, torch.finfo(torch.float32).min).double()
    results = []
    for given in (wider, wider.bool(), additive, visible):
        torch._dynamo.reset()
        backend.clear_reports()
        results.append(Decode(model, mask, ids).step(compiled_forward(model), token, given))
        assert decode_report().counts == {"dense": 1, "capture": 1, "consume": 2}
    for other in results[1:]:
        torch.testing.assert_close(other, results[0])
    alone = Decode(model, mask[1:, 3:], ids[1:, 3:]).step(compiled_forward(model), token[1:], wider[1:, 3:])
    torch.testing.assert_close(results[0][1:], alone)


def test_position_ids_and_cache_positions_are_rewritten_alike() -> None:
    """A4: attention that takes position ids only, and one that takes cache positions."""
    torch.manual_seed(0)
    config = LoopedConfig(num_hidden_layers=1)
    one, other = RotaryInside(config).eval().double(), CachePositions(config).eval().double()
    other.load_state_dict(one.state_dict())
    ids, mask = padded_batch((6, 6))
    token, wider = torch.tensor([[5], [9]]), torch.nn.functional.pad(mask, (0, 1), value=1)
    results = []
    for model in (one, other):
        results.append(Decode(model, mask, ids).step(compiled_forward(model), token, wider))
        assert decode_report().counts == {"dense": 1, "capture": 1, "consume": 2}
    torch.testing.assert_close(results[0], results[1])


def test_logits_of_a_step_outlive_the_next() -> None:
    """A16: results belong to the caller."""
    model = RotaryInside(LoopedConfig(num_hidden_layers=1)).eval()
    ids, mask = padded_batch((6, 3))
    decode, forward = Decode(model, mask, ids), compiled_forward(model)
    first = decode.step(forward, torch.tensor([[5], [9]]), torch.nn.functional.pad(mask, (0, 1), value=1))
    kept = first.clone()
    decode.step(forward, torch.tensor([[6], [4]]), torch.nn.functional.pad(mask, (0, 2), value=1))
    assert torch.equal(first, kept)


def test_a_mask_with_zeros_and_a_break_in_the_report() -> None:
    """A13: the report shows the graphs, the break with its source line, and how many calls were rewritten."""

    class Breaks(RotaryInside):
        def mask(self, *arguments: Any) -> Tensor | None:
            torch._dynamo.graph_break()
            return super().mask(*arguments)

    model = Breaks(LoopedConfig(num_hidden_layers=2)).eval()
    ids, mask = padded_batch((6, 3))
    wider = torch.nn.functional.pad(mask, (0, 1), value=1)
    Decode(model, mask, ids).step(compiled_forward(model), torch.tensor([[5], [9]]), wider)
    text = "\n".join(map(str, backend.reports()))
    assert "rewrote 8 of 8 attention calls (2 layers, up to 4 loops)" in text
    assert "graph break: " in text
    assert "test_backend.py" in text
    assert "graph_break()" in text


def test_a_sliding_window_longer_than_the_cache_stays_dense() -> None:
    """Nothing in the graph shows the window then; the attention module does."""
    model = tiny_model("dory", sliding_window=64)
    ids, mask = padded_batch((5, 3))
    generate(model, ids, mask, 2, compile_config=decode_config(key_retention=0.3))
    kinds = {site.layer: site.window for site in decode_report().sites}
    assert kinds["model.layers.1.self_attn"] == 64
    assert kinds["model.layers.2.self_attn"] == 0
    assert len(decode_report().rewritten) == 4


def test_the_plain_model_is_unchanged() -> None:
    model = tiny_model("ouro", num_hidden_layers=1)
    ids, mask = padded_batch((5, 3))
    with torch.no_grad():
        before = model(ids, attention_mask=mask).logits
        twin = copy.copy(model)
        twin.forward = compiled_forward(model)
        generate(model, ids, mask, 4, compile_config=decode_config(key_retention=0.3))
        assert torch.equal(model(ids, attention_mask=mask).logits, before)
