"""The command `sparse-compile`.

Exit codes: 0 done, 1 a check found a difference, a self-test failed or a plan does not fit, 2 bad usage or a bad
value, 3 the model is not supported. The bare command prints its help and is done: 0, where click would say 2. Results
go to stdout (with --json: one JSON object and nothing else), progress and errors to stderr.
"""

from __future__ import annotations

import sys

import typer

from sparse_compile.cli.check import check
from sparse_compile.cli.common import OK, USAGE, report_error
from sparse_compile.cli.demo import demo
from sparse_compile.cli.generate import generate
from sparse_compile.cli.inspect import inspect
from sparse_compile.cli.plan import plan
from sparse_compile.cli.quality import calibrate, quality
from sparse_compile.cli.selftest import selftest

app = typer.Typer(
    name="sparse-compile",
    help="Compile a looped Hugging Face model for sparse decoding, look at what was rewritten, and run it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for command in (inspect, generate, check, plan, selftest, quality, calibrate, demo):
    app.command()(command)


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if show:
        import sparse_compile

        typer.echo(sparse_compile.__version__)
        raise typer.Exit


# typer carries its own copy of click, or uses the installed one, by version; its base class leads to the
# right one.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def run(arguments: list[str] | None = None) -> int:
    """Run one command line (default: sys.argv[1:]) and return its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = typer.main.get_command(app).main(arguments, prog_name="sparse-compile", standalone_mode=False)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # the help is out already
            return OK
        error.message = error.format_message()  # type: ignore[attr-defined]  # with the name of the option
        return report_error(error, as_json="--json" in arguments, code=USAGE)
    except (typer.Abort, KeyboardInterrupt):
        return 130
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())
