"""`sparse-compile inspect MODEL`: what was rewritten, and what that saves."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sparse_compile.cli import common, notes


def inspect(
    model: common.Model,
    retention: common.Retention = "0.1",
    calibration: common.CalibrationFile = None,
    target_mass: common.TargetMass = None,
    keep_first: common.KeepFirst = 0,
    keep_last: common.KeepLast = 0,
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
    frontend: Annotated[
        str,
        typer.Option(
            "--frontend",
            help="runtime: what `generate` of the compiled model runs; torch-compile: the graphs of the backend "
            "sparse_compile in the model's own generate.",
        ),
    ] = "runtime",
    no_validate: common.NoValidate = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Show what became dense, capture or consume per layer and loop, why, and what it reads."""
    kept = common.kept_options(retention, calibration, target_mass, keep_first, keep_last)
    if frontend == "torch-compile":
        runtime_only = {"--context": context, "--dense-below": dense_below}
        given = {**kept, "capture_loop": capture_loop, "recapture_every": recapture_every}
        given |= {"enabled": not dense, "implementation": implementation}
        common.run_command(
            lambda: _inspect_backend(model, dtype, device, given, runtime_only, graph, as_json),
            command=inspect,
            as_json=as_json,
            debug=debug,
            quiet=quiet,
        )
    options = common.compile_options(
        kept, capture_loop, recapture_every, dense_below, dense, implementation, no_validate
    )
    common.run_command(
        lambda: _inspect(model, dtype, device, frontend, options, context, graph, as_json),
        command=inspect,
        as_json=as_json,
        debug=debug,
        quiet=quiet,
    )


def _inspect_backend(
    model: str,
    dtype: str,
    device: str,
    options: dict[str, Any],
    runtime_only: dict[str, Any],
    graph: str | None,
    as_json: bool,
) -> int:
    for name, value in runtime_only.items():
        if value is not None:
            raise ValueError(f"{name} {value}: is for --frontend runtime only; leave it out")
    if graph not in (None, "before", "after"):
        raise ValueError(f"--graph {graph}: must be one of before, after with --frontend torch-compile")
    common.check_named(model, options)
    from sparse_compile.backend import BackendOptions
    from sparse_compile.backend.inspection import inspect_model

    BackendOptions.of(options)
    loaded = common.load(model, dtype, device)
    with common.quiet_stdout():
        notes.note(f"compiling a decode step of {model} ...")
        seen = inspect_model(loaded, options)
    text = seen.graph_text(graph) if graph is not None else None
    if as_json:
        result: dict[str, Any] = {"source": model, "frontend": "torch-compile"}
        result["graphs"] = [report.to_dict() for report in seen.reports]
        common.print_json(result if text is None else {**result, "graph": {"which": graph, "text": text}})
    else:
        print(text if text is not None else seen.text())
    return common.OK


def _inspect(
    model: str,
    dtype: str,
    device: str,
    frontend: str,
    options: dict[str, Any],
    contexts: list[int] | None,
    graph: str | None,
    as_json: bool,
) -> int:
    if frontend != "runtime":
        raise ValueError(f"--frontend {frontend}: must be one of runtime, torch-compile")
    if graph not in (None, "before", "after", "body"):
        raise ValueError(f"--graph {graph}: must be one of before, after, body")
    if contexts and min(contexts) < 1:
        raise ValueError(f"--context {min(contexts)}: must be at least 1; pass for example --context 8192")
    common.check_named(model, options)
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
