"""From a finished run to what is shipped: weights, configuration, tokenizer and a model card with measured figures."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.demo.checkpoint import State, read_state
from benchmarks.demo.data import ORIGIN_SHARES, TASK_SHARES
from sparse_compile.models import load_ouro, tiny_tokenizer
from sparse_compile.models.presets import DEMO_FOLDER
from sparse_compile.quality.text import PACKAGES

PACKAGED = DEMO_FOLDER
LICENCES = {"stdlib": "PSF-2.0", "topics": "PSF-2.0", **PACKAGES}
WHAT = {
    "stdlib": "modules of CPython's standard library",
    "topics": "topics of CPython's documentation (`pydoc_data`)",
    **{package: f"Python sources of {package}" for package in PACKAGES},
}

CARD = """\
---
license: apache-2.0
library_name: transformers
tags: [looped-transformer, byte-level]
---

# The demo model of sparse_compile

A small looped language model (Ouro architecture) for examples, tests and quality figures: {layers} layers that run
{loops} times per token, {heads} heads of {head_dim}, hidden size {hidden}, {parameters:,} parameters, {context:,}
positions; tokens are UTF-8 bytes. It continues Python sources and their documentation, and answers some kinds of
synthetic questions whose answer is far back (see the figures). It knows nothing else: it is no assistant, and what it
writes about the world is noise.

```python
from sparse_compile import sparse_compile
from sparse_compile.models import load_model, load_tokenizer

model = sparse_compile(load_model("demo"), key_retention=0.1)
tokenizer = load_tokenizer("demo")
```

## Training

{steps:,} steps of {tokens_per_step:,} tokens in {minutes:.1f} minutes on {gpu}, from scratch, seed {seed}:

    {command}

Matrices of the layers with Muon, the rest with Adam, bfloat16 arithmetic over float32 parameters. The loss is the cross
entropy after every loop, weighted {loop_weights}, so that the early loops draft well. The exit gate is not trained (it
is zero, and no loop is left early). Versions: {versions}. Code: commit {commit};
`--steps {steps}` repeats the run (on a GPU not bit for bit). Losses over steps: `benchmarks/results/train-demo.jsonl`
of the repository.

| data | licence | bytes | share of the text |
|---|---|---|---|
{data}

Files are held out by the hash of their names; the text of the figures below comes with the package
(`sparse_compile/quality/held_out.txt`, from CPython 3.11). Half of each step's tokens at first, a quarter later, are
synthetic tasks (`sparse_compile/quality/tasks.py`): {tasks}.

## Figures

Dense, in bfloat16, as the training run measured them at its end. What sparse attention costs the model is in
`benchmarks/results/quality-demo.json` of the repository, and in its README.

| after loop | bits per byte of held-out text | agrees with the last loop |
|---|---|---|
{loops_table}

The last column is how often a draft of so many loops is right when all before it is.

| exact answers | {contexts} |
|---|{rule}
{tasks_table}

{unlearned}
"""

LEARNED = 0.1  # a task with fewer exact answers than this, at every length, has not been learned


def export(run: Path, into: Path = PACKAGED, results: Path | None = None) -> str:
    """Write the model of a finished run into ``into``, and its log and plot into ``results``. Returns what was done.

    Raises:
        ValueError: for a run that did not end.
    """
    state = read_state(run)
    if not state.figures.get("complete"):
        raise ValueError(
            f"the run in {run} is at step {state.step} of {state.recipe.steps}: go on with --resume {run}"
        )
    model = load_ouro(run)
    model.save_pretrained(into)
    tiny_tokenizer().save_pretrained(into)
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    (into / "README.md").write_text(card(state, log, sum(p.numel() for p in model.parameters())))
    if results is not None:
        for name, kept in (("log.jsonl", "train-demo.jsonl"), ("loss.png", "train-demo.png")):
            if (run / name).exists():
                shutil.copyfile(run / name, results / kept)
    size = (into / "model.safetensors").stat().st_size
    return f"{into}: {size:,} bytes of weights, step {state.step:,}"


def card(state: State, log: list[dict[str, Any]], parameters: int) -> str:
    """The model card, from the state and the log of a run."""
    recipe, config = state.recipe, state.recipe.config
    runs = [entry for entry in log if entry.get("event") == "conditions"]
    text = next(entry["text_bytes"] for entry in log if entry.get("event") == "start")
    shares = {origin: ORIGIN_SHARES[origin] for origin in text}
    contexts = sorted({int(name.split("@")[1]) for name in state.figures["tasks"]})
    return CARD.format(
        layers=config.num_hidden_layers,
        loops=config.total_ut_steps,
        heads=config.num_attention_heads,
        head_dim=config.head_dim,
        hidden=config.hidden_size,
        parameters=parameters,
        context=config.max_position_embeddings,
        steps=recipe.steps,
        tokens_per_step=recipe.tokens_per_step,
        minutes=state.minutes,
        gpu=f"one {runs[-1]['gpu']}",
        seed=recipe.seed,
        command="\n    ".join(entry["command"] for entry in runs),
        loop_weights=", ".join(map(str, recipe.loop_weights)),
        versions=", ".join(
            f"{name} {runs[-1][name]}" for name in ("python", "torch", "triton", "transformers")
        ),
        commit=runs[-1]["commit"],
        data="\n".join(
            f"| {WHAT[origin]} | {LICENCES[origin]} | {size:,} | {shares[origin] / sum(shares.values()):.0%} |"
            for origin, size in text.items()
        ),
        tasks=", ".join(f"{name} {share:.1%}" for name, share in TASK_SHARES.items()),
        loops_table=_loops_table(state.figures),
        contexts=" | ".join(f"{context:,} bytes" for context in contexts),
        rule="---|" * len(contexts),
        tasks_table=_tasks_table(state.figures["tasks"], contexts),
        unlearned=_unlearned(state.figures["tasks"], contexts),
    )


def _loops_table(figures: dict[str, Any]) -> str:
    rows = zip(figures["bits_per_byte"], figures["agreement_with_last_loop"], strict=True)
    return "\n".join(f"| {loop} | {bits:.3f} | {same:.1%} |" for loop, (bits, same) in enumerate(rows, 1))


def _tasks_table(accuracies: dict[str, float], contexts: list[int]) -> str:
    cells = {name: [f"{accuracies[f'{name}@{c}']:.1%}" for c in contexts] for name in TASK_SHARES}
    return "\n".join(f"| {name} | {' | '.join(values)} |" for name, values in cells.items())


def _unlearned(accuracies: dict[str, float], contexts: list[int]) -> str:
    """A sentence about the tasks that the model cannot do."""
    best = {name: max(accuracies[f"{name}@{c}"] for c in contexts) for name in TASK_SHARES}
    failed = [name for name, share in best.items() if share < LEARNED]
    if not failed:
        return "All tasks have been learned."
    return f"Not learned in this run: {', '.join(failed)}. The answers there are guesses."
