"""Run both front ends on every kind of looped model and write down what came of it: `docs/models.md`.

    make models        regenerate docs/models.md
    make test TESTS=tests/test_model_matrix.py      check it

Everything in the table is found by running: nothing is looked up. Retention 1.0 is exact if the tokens are those of the
model's own generation, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from looped_models import LoopedConfig, RotaryInside
from matrix_models import Huginn, RemoteOuro
from torch import Tensor, nn
from transformers import Inkling2LoopForCausalLM, Inkling2LoopTextConfig

import sparse_compile.backend as backend
from sparse_compile import UnsupportedModel, sparse_compile
from sparse_compile.models.presets import tiny_model

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
PROMPTS, STEPS = ((7, 21, 9), (5, 30, 11)), 3

HEAD = """# Models

What each front end makes of each kind of looped model, found by running it: small random models in float64, retention
0.3, the default schedule unless stated. `make models` regenerates this page; a test fails when it is not what a run
finds.

- **traced**: one graph of the whole model (the runtime), or a decode graph of torch.compile.
- **rolled**: the loop was proved and folded into one body.
- **rewritten**: attention calls over the cache that became ops of ours, of those that there are; then how many are
  dense, capture and consume. Sliding-window calls are kept as they are by the backend, and are dense in the runtime.
- **exact**: at retention 1.0 the tokens are those of the model's own generation.

"""


def looped(kind: type, **overrides: Any) -> nn.Module:
    torch.manual_seed(0)
    return kind(LoopedConfig(**overrides)).eval().double()


def inkling() -> nn.Module:
    config = Inkling2LoopTextConfig(
        vocab_size=64,
        unpadded_vocab_size=64,
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=2,
        swa_head_dim=8,
        sliding_window_size=8,
        d_rel=4,
        rel_extent=16,
        moe_intermediate_size=16,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_layers_per_attn_res_block=1,
        loop_layer_index_start=1,
        loop_layer_index_end=3,
        loop_gate_rank=4,
        eos_token_id=None,
        max_position_embeddings=128,
        layer_types=["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
    )
    torch.manual_seed(0)
    return Inkling2LoopForCausalLM(config).eval()


@dataclass(frozen=True)
class Entry:
    """A model of the table. cache: "static" for transformers' generate with a static cache, "own" where the model or
    transformers has no static one for it.
    """

    name: str
    make: Callable[[], Any]
    cache: str = "static"
    capture_loop: int = 1


ENTRIES = (
    Entry("Ouro", lambda: tiny_model("ouro", torch.float64, num_hidden_layers=1)),
    Entry("Ouro, shape of the remote code", lambda: looped(RemoteOuro, num_hidden_layers=1), "own"),
    Entry("Dory, `per_loop`", lambda: tiny_model("dory", torch.float64)),
    Entry(
        "Dory, `last_loop`",
        lambda: tiny_model("dory", torch.float64, recurrent_kv_cache_mode="last_loop"),
        "own",
    ),
    Entry("HRM-Text", lambda: tiny_model("hrm-text", torch.float64, num_hidden_layers=1)),
    Entry("Inkling-2-loop", inkling, "own"),
    Entry("Huginn shape", lambda: looped(Huginn, num_hidden_layers=3)),
    Entry("Two loops", lambda: looped(RotaryInside, num_hidden_layers=1, loops=2)),
    Entry(
        "Two loops, `capture_loop=0`",
        lambda: looped(RotaryInside, num_hidden_layers=1, loops=2),
        capture_loop=0,
    ),
)


@dataclass(frozen=True)
class Row:
    model: str
    front: str
    traced: str
    rolled: str
    rewritten: str
    exact: str
    note: str

    def line(self) -> str:
        cells = (self.model, self.front, self.traced, self.rolled, self.rewritten, self.exact, self.note)
        return f"| {' | '.join(cells)} |"


def by_generate(model: Any, steps: int, **arguments: Any) -> Tensor:
    """Greedy tokens of transformers' generate with a static cache: the prefill's, and one for each decode step."""
    ids = torch.tensor(PROMPTS)
    return model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps + 1,
        do_sample=False,
        cache_implementation="static",
        **arguments,
    )


def by_hand(model: Any, steps: int, forward: Any) -> Tensor:
    """The same for a model with a cache of its own; `forward` runs the decode steps."""
    name = "past_key_values" if isinstance(model, RemoteOuro) else "cache"
    ids = torch.tensor(PROMPTS)
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=True)
        for step in range(steps + 1):
            token = out.logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, token], dim=1)
            if step < steps:
                position = torch.full_like(token, ids.shape[1] - 1)
                cache = {name: getattr(out, name)}
                out = forward(input_ids=token, position_ids=position, use_cache=True, **cache)
    return ids


def own_tokens(model: Any, entry: Entry) -> Tensor:
    torch.manual_seed(1)  # for a model that draws its initial state
    if entry.cache == "own":
        return by_hand(model, STEPS, model.forward)
    return by_generate(model, STEPS)


def with_backend(model: Any, entry: Entry, retention: float, steps: int) -> Tensor:
    """Tokens with the decode step compiled by the backend, without Inductor."""
    from transformers import CompileConfig

    options = {"key_retention": retention, "capture_loop": entry.capture_loop}
    options |= {"inductor": False, "on_unmatched": "ignore"}
    torch._dynamo.reset()
    backend.clear_reports()
    torch.manual_seed(1)
    if entry.cache == "own":
        # A cache that grows has symbolic sizes from the second step on anyway.
        forward = torch.compile(model.forward, backend="sparse_compile", options=options, dynamic=steps > 1)
        return by_hand(model, steps, forward)
    config = CompileConfig(backend="sparse_compile", mode=None, options=options)
    config._compile_all_devices = True
    return by_generate(model, steps, compile_config=config)


def counts_text(rewritten: int, total: int, counts: dict[str, int]) -> str:
    kinds = " / ".join(str(counts[kind]) for kind in ("dense", "capture", "consume"))
    return f"{rewritten} of {total}: {kinds}"


def backend_row(entry: Entry) -> Row:
    model = entry.make()
    exact = torch.equal(with_backend(model, entry, 1.0, STEPS), own_tokens(model, entry))
    with_backend(model, entry, 0.3, 1)
    report = backend.last_report()
    if report is None:
        return Row(entry.name, "torch.compile", "no", "-", "-", "-", "no decode graph")
    over_cache = [
        one for one in report.left if "from a cache" not in one.reason and "queries" not in one.reason
    ]
    reasons = {one.reason for one in over_cache}
    windows = [site for site in report.sites if site.window]
    if windows:
        reasons.add(f"{len(windows)} calls with a sliding window are kept")
    if len(report.left) > len(over_cache):
        reasons.add(
            f"{len(report.left) - len(over_cache)} calls over the depth of one token are none over the cache"
        )
    if not report.counts["consume"]:
        reasons |= {f"nothing is sparse: {site.reason}" for site in report.rewritten if site.loop == 1}
    if entry.cache == "own":
        reasons.add("with its own growing cache")
    total = len(report.sites) + len(over_cache)
    text = counts_text(len(report.rewritten), total, report.counts)
    return Row(entry.name, "torch.compile", "yes", "-", text, yes(exact), "; ".join(sorted(reasons)))


def runtime_row(entry: Entry) -> Row:
    model = entry.make()
    options = {"capture_loop": entry.capture_loop, "progress": False}
    try:
        exact = sparse_compile(model, key_retention=1.0, validate=False, **options)
    except UnsupportedModel as error:
        return Row(entry.name, "runtime", "no", "-", "-", "-", f"refused: {error}".rstrip("."))
    ids = torch.tensor(PROMPTS)
    same = torch.equal(
        torch.as_tensor(exact.generate(ids, max_new_tokens=STEPS + 1)), own_tokens(model, entry)
    )
    report = sparse_compile(model, key_retention=0.3, validate=False, **options).report()
    total = sum(report.counts.values())
    note = "" if report.counts["consume"] else "nothing is sparse"
    text = counts_text(total, total, report.counts)
    return Row(entry.name, "runtime", "yes", yes(report.rolled), text, yes(same), note)


def yes(value: bool) -> str:
    return "yes" if value else "no"


def rows(entry: Entry) -> str:
    """The two lines of one model."""
    return f"{runtime_row(entry).line()}\n{backend_row(entry).line()}\n"


def page() -> str:
    names = (
        "model",
        "front end",
        "traced",
        "rolled",
        "rewritten: dense / capture / consume",
        "exact",
        "remarks",
    )
    table = f"| {' | '.join(names)} |\n|{'---|' * len(names)}\n"
    return HEAD + table + "".join(map(rows, ENTRIES))


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE.write_text(page())
    print(f"wrote {PAGE}")
