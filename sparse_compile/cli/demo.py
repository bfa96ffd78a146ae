"""`sparse-compile demo`: the whole story on a small looped model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparse_compile.cli import common

if TYPE_CHECKING:
    from rich.table import Table

PROMPTS = (
    "A looped transformer runs the same layers again and again for every token.",
    "Its later loops look at the same keys as the earlier ones, more or less, so most of what they read can "
    "be left out: the capture loop notes which keys mattered, and the loops after it read only those.",
    "Short prompt.",
)


@dataclass(frozen=True)
class Run:
    """One generation of all prompts. agreement: share of the new tokens that equal the dense run's, by
    position.

    keys_read, keys_dense: keys that the decoding steps attended, per query head, and what dense ones would
    have.
    bytes_per_token: KV bytes that one decoding step reads at the full context, over all layers and loops, at
    most.
    """

    name: str
    retention: str
    identical: bool
    agreement: float
    keys_read: int
    keys_dense: int
    bytes_per_token: int


def demo(
    model: Annotated[str, typer.Option("--model", help="A model as for the other commands.")] = "tiny:ouro",
    retention: common.Retention = "0.25",
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens per prompt.")] = 48,
    device: common.Device = "cpu",
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Rewrite a small looped model, show what changed, and generate dense, at retention 1.0 and sparse.

    Exits with 1 unless retention 1.0 gives exactly the dense tokens, and both exactly those of transformers.
    """
    common.run_command(
        lambda: _demo(model, retention, max_new_tokens, device, as_json), as_json=as_json, debug=debug
    )


def _demo(name: str, retention: str, new_tokens: int, device: str, as_json: bool) -> int:
    from sparse_compile.config import SparseConfig

    SparseConfig.from_options(key_retention=retention)
    model = common.load(name, "float32", device)  # float32: identity of tokens is an exact claim
    inputs = _inputs(name, model)
    width = inputs["input_ids"].shape[1]
    settings = {**inputs, "max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    common.note("generating with transformers ...")
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
    runs = [_run(label, kept, compiled, settings, width, expected) for label, kept, compiled in kinds]
    identical = runs[0].identical and runs[1].identical
    if as_json:
        result = {"model": name, "identical": identical, "runs": [asdict(run) for run in runs]}
        common.print_json({**result, "report": report.to_dict()})
    else:
        _show(name, runs, identical, width + new_tokens)
    return common.OK if identical else common.DIFFERENCES


def _inputs(name: str, model: Any) -> dict[str, Any]:
    from sparse_compile.models import load_tokenizer

    with common.quiet_stdout():
        tokenizer = load_tokenizer(name)
    encoded = tokenizer(list(PROMPTS), padding=True, return_tensors="pt")
    return {key: encoded[key].to(model.device) for key in ("input_ids", "attention_mask")}


def _compiled(model: Any, **options: Any) -> Any:
    from sparse_compile.api import sparse_compile

    common.note(f"compiling with {', '.join(f'{key}={value}' for key, value in options.items())} ...")
    with common.quiet_stdout():
        return sparse_compile(model, **options)


def _run(
    name: str, retention: str, compiled: Any, settings: dict[str, Any], width: int, expected: Any
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
