"""`sparse-compile plan MODEL`: what fits on a GPU, from the configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparse_compile.cli import common, notes
from sparse_compile.cli.outline import asking

if TYPE_CHECKING:
    from sparse_compile.planning import MemoryPlan

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help="Preset (ouro-1.4b, ouro-2.6b), demo, tiny:ouro ..., local folder, or hub id."
    ),
]


def plan(
    model: Source,
    gpu_memory: Annotated[str, typer.Option("--gpu-memory", help="Memory of the GPU, such as 80GiB.")],
    context: Annotated[
        str, typer.Option("--context", help="Tokens of one sequence, prompt and answer; 32k is 32768.")
    ],
    batch: Annotated[int, typer.Option("--batch", help="Sequences at a time.")] = 1,
    retention: common.Retention = "0.1",
    calibration: common.CalibrationFile = None,
    target_mass: common.TargetMass = None,
    keep_first: common.KeepFirst = 0,
    keep_last: common.KeepLast = 0,
    capture_loop: common.CaptureLoop = 1,
    recapture_every: common.Recapture = None,
    dense: common.Dense = False,
    page_size: Annotated[int, typer.Option("--page-size", help="Tokens per page of the KV pool.")] = 16,
    prefill_chunk: Annotated[
        int, typer.Option("--prefill-chunk", help="Prompt tokens that one step may process.")
    ] = 8192,
    dtype: common.Dtype = "auto",
    as_json: common.Json = False,
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Say whether a batch fits into a GPU's memory, without the weights and without the GPU.

    Exits with 1 when it does not, and names the settings to change.
    """
    options = {
        **common.kept_options(retention, calibration, target_mass, keep_first, keep_last),
        "capture_loop": capture_loop,
        "recapture_every": recapture_every,
        "enabled": not dense,
        "page_size": page_size,
        "prefill_chunk": prefill_chunk,
    }
    common.run_command(
        lambda: _plan(model, gpu_memory, context, batch, dtype, options, as_json),
        command=plan,
        as_json=as_json,
        debug=debug,
        quiet=quiet,
    )


def _plan(
    model: str, gpu_memory: str, context: str, batch: int, dtype: str, options: dict[str, Any], as_json: bool
) -> int:
    with common.quiet_stdout():
        from sparse_compile.config import SparseConfig

        config = SparseConfig.from_options(**options)
        common.import_libraries()
        from sparse_compile.models.loading import resolve_dtype
        from sparse_compile.planning import make_plan, parse_size, parse_tokens

        size, tokens = (
            _named("--gpu-memory", parse_size, gpu_memory),
            _named("--context", parse_tokens, context),
        )
        with asking(model):
            found = make_plan(model, size, tokens, batch, config, resolve_dtype(dtype))
    if as_json:
        common.print_json(found.to_dict())
    else:
        _show(found)
    if found.fits:
        return common.OK
    what = f"{found.batch} x {found.context} tokens do not fit into {gpu_memory}"
    notes.say(f"error: {what}; choose {', or '.join(found.changes)}")
    return common.DIFFERENCES


def _named(option: str, parse: Any, text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def _show(found: MemoryPlan) -> None:
    from rich.table import Table

    from sparse_compile.runtime.memory import format_bytes

    budget, needs = found.budget, found.needs
    console = common.console()
    dtype = str(found.dtype).removeprefix("torch.")
    per_token = format_bytes(budget.pools.kv_spec().bytes_per_token)
    console.print(
        f"{found.model}: {found.parameters:,} parameters in {dtype} ({found.dtype_source}), "
        f"KV cache {per_token} per token, all layers and loops"
    )
    table = Table(header_style="bold", title_justify="left")
    table.add_column(f"{found.batch} x {found.context:,} tokens")
    table.add_column("memory", justify="right")
    for name, size in needs.items():
        table.add_row(f"{name} (estimate)" if name in _ESTIMATES else name, format_bytes(size))
    table.add_section()
    table.add_row("in all", format_bytes(sum(needs.values())))
    table.add_row("GPU", format_bytes(budget.gpu_bytes))
    reserve, pools = budget.reserve(found.batch), max(0, budget.pool_limit(found.batch))
    table.add_row("of it for KV pool and reference store, at most", format_bytes(pools))
    table.add_row("for activations, logits and allocator, at least", format_bytes(reserve))
    console.print(table)
    console.print(f"it fits: {'yes' if found.fits else 'no'}", style="bold")
    end = " (all positions of the model)" if found.max_context == found.positions else ""
    console.print(f"largest --context at --batch {found.batch}: {found.max_context or 'none'}{end}")
    console.print(f"largest --batch at --context {found.context}: {found.max_batch or 'none'}")


_ESTIMATES = ("CUDA and kernels", "activations", "logits")
