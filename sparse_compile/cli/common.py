"""What the commands share: options, loading, output, and errors as one line with an exit code."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparse_compile.cli import notes, outline
from sparse_compile.cli.options import describe, option_names, reworded
from sparse_compile.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from rich.console import Console

OK, DIFFERENCES, USAGE, UNSUPPORTED = 0, 1, 2, 3
INTERRUPTED, CLOSED_PIPE = 130, 141  # as shells count signals

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Hub id, local folder, demo, or tiny:ouro | tiny:dory | tiny:hrm-text."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet", "-q", help="No progress and no notes on stderr; warnings and errors are still shown."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Retention = Annotated[
    str,
    typer.Option(
        "--retention",
        "--key-retention",
        help="Part of the visible keys that consume loops read, 0 < r <= 1; several separated by commas, one for each "
        "layer; or auto, with --calibration.",
    ),
]
CalibrationFile = Annotated[
    str | None,
    typer.Option("--calibration", help="For --retention auto: a file of `sparse-compile calibrate`."),
]
TargetMass = Annotated[
    float | None,
    typer.Option(
        "--target-mass", help="For --retention auto: another attention mass than the calibration's own."
    ),
]
CaptureLoop = Annotated[int, typer.Option("--capture-loop", help="Loop, from 0, that selects the keys.")]
Recapture = Annotated[
    int | None,
    typer.Option("--recapture-every", help="Select anew every so many loops after the capture loop."),
]
DenseBelow = Annotated[
    int | None,
    typer.Option("--dense-below", help="Rows with fewer visible keys run dense (default: by device)."),
]
Dense = Annotated[bool, typer.Option("--dense", help="Run everything dense.")]
Implementation = Annotated[
    str, typer.Option("--implementation", help="Attention kernels: reference | batched | triton | auto.")
]
AsyncSteps = Annotated[
    bool | None,
    typer.Option(
        "--async-steps/--no-async-steps",
        help="Submit a step before the tokens of the last one are read; by default on CUDA.",
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic", help="Tokens that depend on nothing beside the request, in half precision too."
    ),
]
LoopsPerStep = Annotated[
    int | None,
    typer.Option("--loops-per-step", help="Loops of a token in one step; by default all of them."),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, ...; auto: the checkpoint's own.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, ...; auto: CUDA if there is one.")]
NoValidate = Annotated[
    bool, typer.Option("--no-validate", help="Skip the comparison with the model's own forward.")
]


def run_command(
    body: Callable[[], int],
    *,
    command: Callable[..., Any],
    as_json: bool,
    debug: bool,
    quiet: bool = False,
) -> None:
    """Run a command's body and leave with its exit code; an error or a warning becomes one line on stderr.

    command: whose options errors and warnings speak of.
    """
    names = option_names(command)
    try:
        with notes.quietly(quiet), warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _show_warning(message, names)
            code = body()
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:  # the reader of stdout has left; nothing more can be said there
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = CLOSED_PIPE
    except Exception as error:
        if debug:
            traceback.print_exc()
        code = report_error(error, as_json=as_json, code=exit_code(error), names=names)
    raise typer.Exit(code)


def _show_warning(message: Warning | str, names: Mapping[str, str]) -> None:
    notes.say(f"warning: {reworded(' '.join(str(message).split()), names)}")


def exit_code(error: Exception) -> int:
    """The exit code that tells what kind of error this is."""
    from sparse_compile.passes.errors import UnsupportedModel

    if isinstance(error, UnsupportedModel):
        return UNSUPPORTED
    return USAGE if isinstance(error, ValueError | TypeError | OSError) else DIFFERENCES


def report_error(
    error: Exception, *, as_json: bool, code: int, names: Mapping[str, str] | None = None
) -> int:
    """Print the error as one line on stderr, and with --json as an object on stdout. Returns the code.

    names: the options of a command by argument, for errors about arguments.
    """
    text, details = describe(error, names or {})
    message = " ".join(text.split()) or type(error).__name__
    notes.say(f"error: {message}")
    if as_json:
        kind = {"type": type(error).__name__, "message": message, "exit_code": code}
        print_json({"error": {**kind, **details}})
    return code


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def console() -> Console:
    """A console on stdout, wide enough for tables when it is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 140, soft_wrap=False)


@contextmanager
def quiet_stdout() -> Iterator[None]:
    """Anything that libraries print while loading goes to stderr: stdout is for results."""
    from contextlib import redirect_stdout

    with redirect_stdout(sys.stderr):
        yield


def import_libraries() -> None:
    """Import what takes seconds, and say so."""
    with quiet_stdout(), notes.waiting("importing torch and transformers"):
        import sparse_compile.models  # noqa: F401


def load(name: str, dtype: str, device: str) -> Any:
    """The model by name. device "auto" is CUDA if there is one."""
    import_libraries()
    with quiet_stdout():
        import torch

        from sparse_compile.models import DEMO, load_model
        from sparse_compile.models.loading import resolve_dtype

        resolve_dtype(dtype)
        where = place(device)
        tiny = name.startswith("tiny:")
        if where.type == "cpu" and (tiny or name == DEMO):
            torch.set_num_threads(1)  # operations this small are slower when they are shared out
        with notes.waiting(f"loading {name}"), notes.bars(not tiny):
            return load_model(name, dtype=dtype, device=where)


def place(device: str) -> torch.device:
    """The device of --device, CUDA for "auto" if there is one; ArgumentError for one that is not there."""
    import torch

    from sparse_compile.models.loading import usable_device

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return usable_device(device)


def read_file(argument: str, path: str, remedy: str) -> bytes:
    """The bytes of a file that an argument names. Raises ArgumentError for one that cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ArgumentError(argument, path, f"cannot be read: {error.strerror}", remedy) from None


KeepFirst = Annotated[int, typer.Option("--keep-first", help="First visible keys that are always kept.")]
KeepLast = Annotated[int, typer.Option("--keep-last", help="Last visible keys that are always kept.")]


def kept_options(
    retention: str, calibration: str | None, target_mass: float | None, keep_first: int, keep_last: int
) -> dict[str, Any]:
    """The options of `sparse_compile` that say how many keys are kept."""
    kept = [one.strip() for one in retention.split(",")]
    chosen: dict[str, Any] = {"key_retention": kept if len(kept) > 1 else retention}
    chosen |= {"keep_first": keep_first, "keep_last": keep_last}
    given = {"calibration": calibration, "target_mass": target_mass}
    return chosen | {name: value for name, value in given.items() if value is not None}


def compile_options(
    kept: dict[str, Any],
    capture_loop: int,
    recapture_every: int | None,
    dense_below: int | None,
    dense: bool,
    implementation: str,
    no_validate: bool,
) -> dict[str, Any]:
    """Options of `sparse_compile` from those of the command line."""
    return {
        **kept,
        "capture_loop": capture_loop,
        "recapture_every": recapture_every,
        "dense_below": dense_below,
        "enabled": not dense,
        "implementation": implementation,
        "validate": not no_validate,
    }


def check_named(name: str, *settings: Mapping[str, Any]) -> Any:
    """Check options of `sparse_compile` alone, then against the model's configuration, before weights are loaded.

    Returns the outline of the model, or None where the configuration alone does not give one.
    """
    from sparse_compile.config import SparseConfig

    configs = [SparseConfig.from_options(**one) for one in settings]
    import_libraries()
    with quiet_stdout():
        seen = outline.outline(name)
        if seen is not None:
            outline.check_options(seen, configs)
    return seen


def compile_named(name: str, dtype: str, device: str, options: dict[str, Any]) -> Any:
    """Load and compile, with options that `check_named` has looked at."""
    model = load(name, dtype, device)
    with quiet_stdout():
        from sparse_compile.api import sparse_compile

        notes.note(f"compiling {name} ...")
        return sparse_compile(model, progress=notes.bar_mode(), **options)
