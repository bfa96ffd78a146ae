"""`sparse-compile quality MODEL`: what sparse attention costs; `sparse-compile calibrate MODEL`: how much to keep."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparse_compile.cli import common, notes
from sparse_compile.config import SparseConfig
from sparse_compile.errors import ArgumentError
from sparse_compile.progress import WorkProgress

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
    quiet: common.Quiet = False,
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
        common.import_libraries()
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
        result = run_quality(model, text, replace(settings, **given), sweep, dtype, device, out)
        return show_quality(result, out, plots, as_json)

    common.run_command(body, command=quality, as_json=as_json, debug=debug, quiet=quiet)


def run_quality(
    name: str,
    text: str | None,
    settings: Any,
    sweep: Any,
    dtype: str,
    device: str,
    out: Path | None = None,
    *,
    program: str = "sparse-compile",
    known: dict[str, Any] | None = None,
    jobs: int = 1,
    more: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Load, compile and measure, with progress on stderr.

    out: written whenever rows have come in. program: what the command line begins with. known: an earlier result to go
    on with. jobs: processes that measure at once. more: what stands in the result beside the figures.
    """
    data = read_text(text)
    common.import_libraries()
    from sparse_compile.quality.jobs import Jobs
    from sparse_compile.quality.measure import check_lengths, windows_of
    from sparse_compile.quality.sweep import measure_all

    seen = common.check_named(name, *(point.compile_options() for point in sweep.points))
    ids, is_bytes = _ids(name, data)
    windows_of(ids, settings.windows, settings.window)
    if seen is not None:
        check_lengths(seen, settings.window, settings.task_contexts if is_bytes else ())
    if not is_bytes:
        notes.note("the tasks are left out: they are made of bytes, and this model does not read bytes")
    head = {"source": name, "text": text or "held-out text of sparse_compile"}
    tail = {"command": " ".join([program, *sys.argv[1:]]), **(more or {})}

    def save(result: dict[str, Any]) -> None:
        if out is not None:
            _write({**head, **result, **tail}, out)

    load = partial(_load_quietly, name, dtype, device, ids, is_bytes)
    with Jobs(jobs, load, settings) if jobs > 1 else nullcontext() as others:
        loaded = common.load(name, dtype, device)
        notes.note(f"measuring {name} ...")
        with common.quiet_stdout(), _progress("measuring") as bar:
            result = measure_all(
                loaded, ids, settings, sweep, is_bytes, bar.update, known=known, save=save,
                measure=None if others is None else others.measure,
            )  # fmt: skip
    return {**head, **result, **tail}


def _load_quietly(
    name: str, dtype: str, device: str, ids: Tensor, is_bytes: bool
) -> tuple[Any, Tensor, bool]:
    """What a process that measures needs; it has nothing to say while it loads."""
    with notes.quietly(True):
        return common.load(name, dtype, device), ids, is_bytes


def _write(result: dict[str, Any], out: Path) -> None:
    """In one piece: who stops in the middle of it leaves the file as it was."""
    partial_file = out.with_name(out.name + ".part")
    partial_file.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial_file.replace(out)


def check_outputs(out: Path | None, plots: Path | None) -> None:
    """Make the folders of what will be written. Raises before anything is measured: ArgumentError where there can be no
    such file or no plots, OSError where there can be no such folder.
    """
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
        _write(result, out)
    for path in plot(result, plots) if plots is not None else ():
        notes.note(f"wrote {path}")
    if as_json:
        common.print_json(result)
    else:
        common.console().print(render(result))
    if full_retention_is_dense(result):
        return common.OK
    notes.say("error: retention 1.0 is not exactly the dense model")
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
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Find the smallest retention of each layer that keeps the target mass on a text, for key_retention="auto"."""

    def body() -> int:
        check_outputs(out, None)
        data = read_text(text)
        chosen: dict[str, Any] = {
            "capture_loop": capture_loop,
            "keep_first": keep_first,
            "keep_last": keep_last,
        }
        SparseConfig.from_options(**chosen)
        common.import_libraries()
        from sparse_compile.quality.calibrate import calibrate as run
        from sparse_compile.quality.calibrate import check_settings
        from sparse_compile.quality.measure import check_lengths, windows_of

        check_settings(target_mass, window)
        seen = common.check_named(model, chosen)
        ids, _ = _ids(model, data)
        windows_of(ids, windows, window)
        if seen is not None:
            check_lengths(seen, window)
        loaded = common.load(model, dtype, device)
        notes.note(f"calibrating {model} ...")
        with common.quiet_stdout(), _progress("calibrating") as bar:
            found = run(
                loaded, ids, target_mass, windows=windows, window=window, prompt=max(1, window // 4),
                progress=bar.update, **chosen,
            )  # fmt: skip
        found.save(out)
        if as_json:
            common.print_json(found.to_dict())
        else:
            _show_calibration(found, out)
        return common.OK

    common.run_command(body, command=calibrate, as_json=as_json, debug=debug, quiet=quiet)


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


def read_text(path: str | None) -> bytes:
    """The bytes of a file, or the packaged held-out text. Raises ArgumentError for a file that cannot be read."""
    from sparse_compile.quality.text import held_out_text

    if path is None:
        return held_out_text()
    remedy = "pass the path of a text file, or leave text out for the packaged text"
    return common.read_file("text", path, remedy)


def _ids(name: str, data: bytes) -> tuple[Tensor, bool]:
    """Token ids of a text, and whether they are its bytes as the synthetic tasks have them."""
    import torch

    from sparse_compile.models import load_tokenizer
    from sparse_compile.quality.tasks import to_ids

    with common.quiet_stdout():
        tokenizer = load_tokenizer(name)
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


def _progress(verb: str) -> WorkProgress:
    return WorkProgress(0, notes.progress_mode(), verb=verb, unit="steps")
