"""`sparse-compile quality MODEL`: what sparse attention costs; `sparse-compile calibrate MODEL`: how much to keep."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparse_compile.cli import common

if TYPE_CHECKING:
    from torch import Tensor

Text = Annotated[
    str | None,
    typer.Option("--text", help="File of text to measure on; without it the packaged held-out text."),
]


def quality(
    model: common.Model,
    retentions: Annotated[
        str | None, typer.Option("--retentions", help="Parts of the keys, separated by commas.")
    ] = None,
    capture_loops: Annotated[
        str | None, typer.Option("--capture-loops", help="Capture loops, separated by commas.")
    ] = None,
    text: Text = None,
    windows: Annotated[int | None, typer.Option("--windows", help="Texts to decode.")] = None,
    window: Annotated[int | None, typer.Option("--window", help="Tokens of each text.")] = None,
    samples: Annotated[int | None, typer.Option("--samples", help="Of each task at each context.")] = None,
    subset: Annotated[bool, typer.Option("--subset", help="What a CPU measures in a minute.")] = False,
    recapture_every: common.Recapture = None,
    calibration: common.CalibrationFile = None,
    target_mass: common.TargetMass = None,
    keep_first: common.KeepFirst = 0,
    keep_last: common.KeepLast = 0,
    implementation: common.Implementation = "auto",
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON here too.")] = None,
    plots: Annotated[Path | None, typer.Option("--plots", help="Write plots to this folder.")] = None,
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Measure perplexity, tasks, agreement with dense, retained mass and drafts over retention and capture loop.

    Exits with 1 when retention 1.0 is not exactly the dense model.
    """
    changes = {"windows": windows, "window": window, "task_samples": samples}
    options: dict[str, Any] = {"recapture_every": recapture_every, "implementation": implementation}
    options |= {"keep_first": keep_first, "keep_last": keep_last}
    chosen = {"calibration": calibration, "target_mass": target_mass}
    options |= {name: value for name, value in chosen.items() if value is not None}

    def body() -> int:
        from sparse_compile.quality.measure import SUBSET, Settings
        from sparse_compile.quality.sweep import SUBSET_SWEEP, Sweep

        settings = SUBSET if subset else Settings()
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not None}
        if window is not None:
            given["prompt"] = min(settings.prompt, max(1, window // 4))
            given["generate_prompt"] = min(settings.generate_prompt, max(1, window))
        least = SUBSET_SWEEP if subset else Sweep()
        sweep = Sweep(
            tuple(_list(retentions)) or least.retentions,
            tuple(_loops(capture_loops)) or least.capture_loops,
            tuple(options.items()),
        )
        check_outputs(out, plots)
        result = run_quality(model, text, replace(settings, **given), sweep, dtype, device)
        return show_quality(result, out, plots, as_json)

    common.run_command(body, as_json=as_json, debug=debug)


def run_quality(
    name: str,
    text: str | None,
    settings: Any,
    sweep: Any,
    dtype: str,
    device: str,
    program: str = "sparse-compile",
) -> dict[str, Any]:
    """Load, compile and measure, with progress on stderr. program: what the command line begins with."""
    from sparse_compile.quality.sweep import check_sweep, measure_all

    check_sweep(sweep)
    loaded = common.load(name, dtype, device)
    ids, is_bytes = _ids(name, text)
    if not is_bytes:
        common.note("the tasks are left out: they are made of bytes, and this model does not read bytes")
    with common.quiet_stdout(), _progress("measuring") as progress:
        result = measure_all(loaded, ids, settings, sweep, is_bytes, progress)
    return {
        "source": name,
        "text": text or "held-out text of sparse_compile",
        **result,
        "command": " ".join([program, *sys.argv[1:]]),
    }


def check_outputs(out: Path | None, plots: Path | None) -> None:
    """Make the folders of what will be written. Raises before anything is measured: ArgumentError where there can be no
    such file or no plots, OSError where there can be no such folder.
    """
    from sparse_compile.errors import ArgumentError
    from sparse_compile.quality.view import check_plots

    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.is_dir() or not os.access(out if out.exists() else out.parent, os.W_OK):
            limit = "is a folder" if out.is_dir() else "cannot be written"
            raise ArgumentError("out", str(out), limit, "pass the path of a file, such as --out result.json")
    if plots is not None:
        check_plots(plots)


def show_quality(result: dict[str, Any], out: Path | None, plots: Path | None, as_json: bool) -> int:
    from sparse_compile.quality.sweep import full_retention_is_dense
    from sparse_compile.quality.view import plot, render

    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for path in plot(result, plots) if plots is not None else ():
        common.note(f"wrote {path}")
    if as_json:
        common.print_json(result)
    else:
        common.console().print(render(result))
    if full_retention_is_dense(result):
        return common.OK
    common.note("error: retention 1.0 is not exactly the dense model")
    return common.DIFFERENCES


def calibrate(
    model: common.Model,
    out: Annotated[Path, typer.Option("--out", help="File to write, such as retention.json.")],
    target_mass: Annotated[
        float, typer.Option("--target-mass", help="Attention mass that the kept keys should have.")
    ] = 0.95,
    text: Text = None,
    windows: Annotated[int, typer.Option("--windows", help="Texts to decode.")] = 8,
    window: Annotated[int, typer.Option("--window", help="Tokens of each text.")] = 2048,
    capture_loop: common.CaptureLoop = 1,
    keep_first: common.KeepFirst = 0,
    keep_last: common.KeepLast = 0,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Find the smallest retention of each layer that keeps the target mass on a text, for key_retention="auto"."""

    def body() -> int:
        from sparse_compile.quality.calibrate import calibrate as run

        check_outputs(out, None)
        loaded = common.load(model, dtype, device)
        ids, _ = _ids(model, text)
        with common.quiet_stdout(), _progress("calibrating") as progress:
            found = run(
                loaded, ids, target_mass, windows=windows, window=window, prompt=max(1, window // 4),
                progress=progress, capture_loop=capture_loop, keep_first=keep_first, keep_last=keep_last,
            )  # fmt: skip
        found.save(out)
        if as_json:
            common.print_json(found.to_dict())
        else:
            _show_calibration(found, out)
        return common.OK

    common.run_command(body, as_json=as_json, debug=debug)


def _show_calibration(found: Any, out: Path) -> None:
    from rich.table import Table

    table = Table(header_style="bold")
    table.add_column("layer")
    for head in ("keys kept", "mass"):
        table.add_column(head, justify="right")
    for layer in found.layers:
        table.add_row(layer.layer, layer.retention, f"{layer.mass:.4f}")
    console = common.console()
    console.print(table)
    console.print(f"wrote {out}; use it: sparse_compile(model, key_retention='auto', calibration='{out}')")


def _ids(name: str, text: str | None) -> tuple[Tensor, bool]:
    """Token ids of the text, and whether they are its bytes as the synthetic tasks have them."""
    import torch

    from sparse_compile.models import load_tokenizer
    from sparse_compile.quality.tasks import to_ids
    from sparse_compile.quality.text import held_out_text

    with common.quiet_stdout():
        tokenizer = load_tokenizer(name)
    data = held_out_text() if text is None else Path(text).read_bytes()
    probe = "ab=42;"
    if tokenizer(probe)["input_ids"] == to_ids(probe.encode()).tolist():
        return to_ids(data), True
    ids = tokenizer(data.decode("utf-8", errors="replace"), add_special_tokens=False)["input_ids"]
    return torch.tensor(ids), False


def _list(text: str | None) -> list[str]:
    return [] if text is None else [one.strip() for one in text.split(",")]


def _loops(text: str | None) -> list[int]:
    try:
        return [int(one) for one in _list(text)]
    except ValueError:
        raise ValueError(
            f"--capture-loops {text}: must be integers separated by commas, such as 0,1"
        ) from None


@contextmanager
def _progress(verb: str) -> Iterator[Callable[[int, int], None]]:
    """A callback for (done, total) that shows a bar on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(verb), BarColumn(), TextColumn("{task.percentage:3.0f} %"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=False) as bar:
        task = bar.add_task(verb)

        def advance(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield advance
