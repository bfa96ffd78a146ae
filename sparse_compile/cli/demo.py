"""`sparse-compile demo`: the whole story on the small trained model of this package, or another one."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparse_compile.cli import common, notes
from sparse_compile.limits import check_positions
from sparse_compile.sampling_limits import check_lengths

if TYPE_CHECKING:
    from rich.table import Table

PROMPTS = (
    "A looped transformer runs the same layers again and again for every token.",
    "Its later loops look at the same keys as the earlier ones, more or less, so most of what they read can "
    "be left out: the capture loop notes which keys mattered, and the loops after it read only those.",
    "Short prompt.",
)
# What the trained model knows: Python, its documentation, and pairs that are far back.
TRAINED_PROMPTS = (
    'class Stack:\n    """Last in, first out."""\n\n    def __init__(self):\n        self.items = []\n\n    def ',
    "The exception is raised when the ",
    "[recall]" + "".join(f"{key}{value};" for key, value in zip(
        ("qx", "ab", "zk", "mo", "te", "uv", "ya", "lp", "gi", "nd", "cw", "ro"), range(17, 99, 7), strict=True
    )) + "?zk",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One generation of all prompts. agreement: share of the new tokens that equal the dense run's, by
    position.

    keys_read, keys_dense: keys that the decoding steps attended, per query head, and what dense ones would
    have.
    bytes_per_token: KV bytes that one decoding step reads at the full context, over all layers and loops, at
    most.
    ids, texts: of the new tokens.
    """

    name: str
    retention: str
    identical: bool
    agreement: float
    keys_read: int
    keys_dense: int
    bytes_per_token: int
    ids: list[list[int]]
    texts: list[str]


def demo(
    model: Annotated[str, typer.Option("--model", help="A model as for the other commands.")] = "demo",
    retention: common.Retention = "0.25",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens per prompt.")] = 64,
    device: common.Device = "cpu",
    as_json: common.Json = False,
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Rewrite a small trained model, show what changed, generate dense, at retention 1.0 and sparse, and measure both.

    Exits with 1 unless retention 1.0 gives exactly the dense tokens, both exactly those of transformers, and the sparse
    run exactly its own with drafts.
    """
    common.run_command(
        lambda: _demo(model, retention, max_new_tokens, device, as_json),
        command=demo,
        as_json=as_json,
        debug=debug,
        quiet=quiet,
    )


def _demo(name: str, retention: str, new_tokens: int, device: str, as_json: bool) -> int:
    check_lengths({"max_new_tokens": new_tokens})
    seen = common.check_named(name, {"key_retention": retention})
    tokenizer, inputs = _inputs(name)
    width = inputs["input_ids"].shape[1]
    if seen is not None:
        check_positions(seen, width, new_tokens)
    import torch

    model = common.load(name, "float32", device)  # float32: identity of tokens is an exact claim
    if model.device.type == "cpu":
        torch.set_num_threads(1)  # three short rows: sharing them out costs more than it saves
    inputs = {key: value.to(model.device) for key, value in inputs.items()}
    settings = {**inputs, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    notes.note("generating with transformers ...")
    expected = model.generate(**settings)[:, width:]
    sparse = _compiled(model, key_retention=retention)
    report = sparse.report((width + new_tokens,))
    if not as_json:
        common.console().print(report.render())
    kinds = [
        ("dense", "off", _compiled(model, enabled=False)),
        ("retention 1.0", "1", _compiled(model, key_retention=1)),
        (f"retention {retention}", retention, sparse),
    ]
    runs = [
        _run(label, kept, compiled, settings, width, expected, tokenizer) for label, kept, compiled in kinds
    ]
    identical = runs[0].identical and runs[1].identical
    drafts = _drafts(sparse, settings, width, runs[-1])
    quality = _quality(kinds[0][2], sparse, tokenizer)
    if as_json:
        result = {"model": name, "identical": identical, "runs": [asdict(run) for run in runs]}
        common.print_json({**result, "drafts": drafts, "quality": quality, "report": report.to_dict()})
    else:
        if not name.startswith("tiny:"):
            _show_texts(tokenizer.batch_decode(inputs["input_ids"], skip_special_tokens=True), runs)
        _show(name, runs, identical, width + new_tokens)
        _show_drafts(drafts)
        _show_quality(retention, quality)
    return common.OK if identical and drafts["identical"] else common.DIFFERENCES


def _inputs(name: str) -> tuple[Any, dict[str, Any]]:
    from sparse_compile.models import DEMO, load_tokenizer

    with common.quiet_stdout():
        tokenizer = load_tokenizer(name)
    prompts = TRAINED_PROMPTS if name == DEMO else PROMPTS
    encoded = tokenizer(list(prompts), padding=True, return_tensors="pt")
    return tokenizer, {key: encoded[key] for key in ("input_ids", "attention_mask")}


def _compiled(model: Any, **options: Any) -> Any:
    from sparse_compile.api import sparse_compile

    notes.note(f"compiling with {', '.join(f'{key}={value}' for key, value in options.items())} ...")
    with common.quiet_stdout():
        return sparse_compile(model, progress=notes.bar_mode(), **options)


def _run(
    name: str,
    retention: str,
    compiled: Any,
    settings: dict[str, Any],
    width: int,
    expected: Any,
    tokenizer: Any,
) -> Run:
    output = compiled.generate(**settings, return_dict_in_generate=True)
    same = output.sequences[:, width:] == expected
    return Run(
        name=name,
        retention=retention,
        identical=bool(same.all()),
        agreement=float(same.double().mean()),
        keys_read=sum(one.decode_keys_read for one in output.metrics),
        keys_dense=sum(one.decode_keys_dense for one in output.metrics),
        bytes_per_token=compiled.report((output.sequences.shape[1],)).reads[0].sparse_bytes,
        ids=output.sequences[:, width:].tolist(),
        texts=tokenizer.batch_decode(output.sequences[:, width:]),
    )


def _drafts(sparse: Any, settings: dict[str, Any], width: int, plain: Run) -> dict[str, Any]:
    """The sparse run again, in blocks that the first loop drafts. identical: the tokens are those without drafts."""
    from sparse_compile.speculation import SpeculationConfig

    config = SpeculationConfig()
    output = sparse.generate(**settings, speculation=config, return_dict_in_generate=True)
    return {
        "draft_loops": config.draft_loops,
        "num_draft_tokens": config.num_draft_tokens,
        "drafted": sum(one.drafted_tokens for one in output.metrics),
        "accepted": sum(one.accepted_tokens for one in output.metrics),
        "identical": output.sequences[:, width:].tolist() == plain.ids,
    }


def _quality(dense: Any, sparse: Any, tokenizer: Any) -> dict[str, float]:
    """Perplexity of both on a little held-out text, and how often their most likely token is the same. Every token of
    it is decoded, behind a dense prompt."""
    import torch

    from sparse_compile.quality.measure import Meter, Settings
    from sparse_compile.quality.text import held_out_text

    text = held_out_text().decode()[:20_000]
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    notes.note("measuring on held-out text ...")
    few = Settings(windows=2, window=512, prompt=384, generate_prompts=0, texts=2, rows=256)
    meter = Meter(ids, few, tasks=False)
    known = meter.dense(dense)
    (found,) = meter.measure([sparse], known)
    return {
        "dense_perplexity": float(known.forced.loss.double().mean().exp()),
        "sparse_perplexity": found.perplexity,
        "agreement": found.agreement,
        "tokens": float(known.forced.best.numel()),
    }


def _show_texts(prompts: list[str], runs: list[Run]) -> None:
    """Each prompt with what the dense and the sparse run made of it."""
    from rich.text import Text

    console = common.console()
    for number, prompt in enumerate(prompts):
        console.print(Text(prompt, style="dim"))
        for run in (runs[0], runs[-1]):
            console.print(Text(f"--- {run.name}", style="bold"))
            console.print(Text(run.texts[number]))
        console.print()


def _show_drafts(drafts: dict[str, Any]) -> None:
    loops = f"{drafts['draft_loops']} loop" + "s" * (drafts["draft_loops"] != 1)
    share = drafts["accepted"] / max(1, drafts["drafted"])
    same = "the same tokens as without" if drafts["identical"] else "other tokens than without"
    rows = f"{drafts['num_draft_tokens']} rows a block"
    common.console().print(f"with drafts of {loops}, {rows}: {same}; {share:.1%} of the drafts were kept")


def _show_quality(retention: str, quality: dict[str, float]) -> None:
    common.console().print(
        f"quality on {quality['tokens']:.0f} tokens of held-out text: perplexity {quality['dense_perplexity']:.3f} "
        f"dense, {quality['sparse_perplexity']:.3f} at retention {retention}; the most likely token is the same in "
        f"{quality['agreement']:.1%}"
    )


def _show(name: str, runs: list[Run], identical: bool, context: int) -> None:
    console = common.console()
    console.print(_table(runs, context))
    if identical:
        console.print(
            "dense and retention 1.0 give exactly the tokens of transformers: verified", style="green"
        )
        if name.startswith("tiny:") and not runs[-1].identical:
            console.print(
                "The sparse run agrees in few tokens, as it should: with random weights the loops do not look "
                "at the same keys."
            )
    else:
        console.print("dense or retention 1.0 differs from the tokens of transformers", style="bold red")


def _table(runs: list[Run], context: int) -> Table:
    from rich.table import Table

    from sparse_compile.report import format_bytes

    table = Table(header_style="bold")
    table.add_column("run")
    columns = (
        "tokens as transformers",
        "identical",
        "keys read",
        "of dense",
        f"KV read per token, {context} visible",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for run in runs:
        table.add_row(
            run.name,
            f"{run.agreement:.1%}",
            "yes" if run.identical else "no",
            f"{run.keys_read:,}",
            f"{run.keys_read / max(run.keys_dense, 1):.1%}",
            format_bytes(run.bytes_per_token),
        )
    return table
