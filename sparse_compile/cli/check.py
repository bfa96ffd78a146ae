"""`sparse-compile check MODEL`: is the loaded model the one in its files, and the program the model?"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

import typer

from sparse_compile.cli import common


def check(
    model: common.Model,
    program: Annotated[
        bool,
        typer.Option("--program", help="Also compile it and compare the program with the model's forward."),
    ] = False,
    dtype: common.Dtype = "auto",
    device: common.Device = "cpu",
    as_json: common.Json = False,
    debug: common.Debug = False,
) -> None:
    """Compare a model with its safetensors files tensor by tensor, and its rotary tables with their formula.

    Exits with 1 when anything differs.
    """
    common.run_command(lambda: _check(model, program, dtype, device, as_json), as_json=as_json, debug=debug)


def _check(model: str, program: bool, dtype: str, device: str, as_json: bool) -> int:
    with common.quiet_stdout():
        from sparse_compile.models.checkpoint import check_checkpoint

        # Nothing worth a bar, or nobody who sees one.
        with _no_bars() if model.startswith("tiny:") or not sys.stderr.isatty() else nullcontext():
            report = check_checkpoint(model, dtype=dtype)
    result = report.to_dict()
    lines = [str(report)]
    ok = report.ok
    if program:
        result["program"] = found = _check_program(model, dtype, device)
        ok = ok and found["ok"]
        lines.append(found["message"])
    if as_json:
        common.print_json({**result, "ok": ok})
    else:
        print("\n".join(lines))
    return common.OK if ok else common.DIFFERENCES


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the progress bars of transformers."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _check_program(model: str, dtype: str, device: str) -> dict[str, Any]:
    """Compile at full retention, where every decoding step must be the model's own, and compare."""
    from sparse_compile.errors import ValidationError

    options = {"key_retention": 1, "validate": False, "progress": None}
    compiled = common.compile_named(model, dtype, device, options)
    try:
        with common.quiet_stdout():
            error = compiled.validate()
    except ValidationError as failure:
        return {"ok": False, "message": str(failure)}
    message = f"program: agrees with the model's own generation (relative error of the logits {error:.2g})"
    return {"ok": True, "relative_error": error, "message": message}
