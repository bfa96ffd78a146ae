"""`sparse-compile inspect MODEL`: what was rewritten, and what that saves."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sparse_compile.cli import common


def inspect(
    model: common.Model,
    retention: common.Retention = "0.1",
    capture_loop: common.CaptureLoop = 1,
    recapture_every: common.Recapture = None,
    dense_below: common.DenseBelow = None,
    dense: common.Dense = False,
    implementation: common.Implementation = "auto",
    context: Annotated[
        list[int] | None,
        typer.Option(
            "--context",
            help="Visible tokens to state reads for; may be repeated. Without it: 512, 2048, 8192, 32768.",
        ),
    ] = None,
    graph: Annotated[
        str | None, typer.Option("--graph", help="Print a graph instead: before | after | body.")
    ] = None,
    dtype: common.Dtype = "auto",
    device: common.Device = "cpu",
    no_validate: common.NoValidate = False,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Show what became dense, capture or consume per layer and loop, why, and what it reads."""
    options = common.compile_options(
        retention, capture_loop, recapture_every, dense_below, dense, implementation, no_validate
    )
    common.run_command(
        lambda: _inspect(model, dtype, device, options, context, graph, as_json), as_json=as_json, debug=debug
    )


def _inspect(
    model: str,
    dtype: str,
    device: str,
    options: dict[str, Any],
    contexts: list[int] | None,
    graph: str | None,
    as_json: bool,
) -> int:
    if graph not in (None, "before", "after", "body"):
        raise ValueError(f"--graph {graph}: must be one of before, after, body")
    if contexts and min(contexts) < 1:
        raise ValueError(f"--context {min(contexts)}: must be at least 1; pass for example --context 8192")
    compiled = common.compile_named(model, dtype, device, options)
    text = compiled.program.graph_text(graph) if graph is not None else None
    report = compiled.report(tuple(contexts)) if contexts else compiled.report()
    if as_json:
        result = {**report.to_dict(), "source": model}
        common.print_json(result if text is None else {**result, "graph": {"which": graph, "text": text}})
    elif text is not None:
        print(text)
    else:
        common.console().print(report.render())
    return common.OK
