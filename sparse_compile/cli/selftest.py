"""`sparse-compile selftest MODEL`: the same tokens in every way of decoding, in every batch, and twice?"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparse_compile.cli import common, notes

if TYPE_CHECKING:
    from sparse_compile.selftest import Outcome

_LONGEST = {"cuda": 2048}  # tokens of the longest prompt, by device
_LONGEST_ELSEWHERE = 48

Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Hub id, local folder, demo, tiny:ouro ..., or a preset (ouro-1.4b, ouro-2.6b) with random weights.",
    ),
]


def selftest(
    model: Source,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Prompts, of built-in text.")] = 16,
    batch: Annotated[int, typer.Option("--batch", min=2, help="The batch that is compared with 1.")] = 32,
    deterministic: common.Deterministic = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", min=1, help="Tokens per prompt.")] = 48,
    prompt_tokens: Annotated[
        int | None,
        typer.Option(
            "--prompt-tokens",
            min=1,
            help="Tokens of the longest prompt: 2048 on CUDA, else 48, if the model has as many positions.",
        ),
    ] = None,
    draft_loops: Annotated[int, typer.Option("--draft-loops", min=1, help="Loops of a draft.")] = 1,
    draft_tokens: Annotated[int, typer.Option("--draft-tokens", min=1, help="Rows of a block.")] = 4,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="How often everything is decoded.")] = 2,
    branch_scale: Annotated[
        float | None,
        typer.Option("--branch-scale", help="For presets: with such small branches drafts are often right."),
    ] = None,
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
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    no_validate: common.NoValidate = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Decode prompts ordinarily, in blocks and in pipelines, one by one and in batches, and compare the tokens.

    Prints PASS, or the first difference of each prompt with the margins of the two largest logits. Exits with 1 when
    anything differs. In bfloat16 it does, unless with --deterministic.
    """
    kept = common.kept_options(retention, calibration, target_mass, keep_first, keep_last)
    options = common.compile_options(
        kept, capture_loop, recapture_every, dense_below, dense, implementation, no_validate
    )
    options |= {"deterministic": deterministic, "max_batch": min(batch, prompts)}
    settings = {
        "prompts": prompts,
        "batches": list(dict.fromkeys((1, min(batch, prompts)))),
        "new_tokens": max_new_tokens,
        "repeats": repeats,
        "drafts": (draft_loops, draft_tokens),
        "longest": prompt_tokens,
        "branch_scale": branch_scale,
    }
    common.run_command(
        lambda: _selftest(model, dtype, device, options, settings, as_json),
        command=selftest,
        as_json=as_json,
        debug=debug,
        quiet=quiet,
    )


def _selftest(
    name: str, dtype: str, device: str, options: dict[str, Any], settings: dict[str, Any], as_json: bool
) -> int:
    _check_before_loading(name, options, settings)
    with common.quiet_stdout():
        from sparse_compile.api import sparse_compile
        from sparse_compile.selftest import SelfTest, make_prompts

        model, tokenizer = _load(name, dtype, device, settings["branch_scale"])
        longest = _longest(model, settings)
        prompts = make_prompts(tokenizer, settings["prompts"], longest)
        options["max_context"] = longest + settings["new_tokens"]
        notes.note(f"compiling {name} ...")
        compiled = sparse_compile(model, **options, progress=notes.bar_mode())
        modes = _modes(compiled, *settings["drafts"])
        _check(compiled, modes, settings["batches"][-1])
        test = SelfTest(
            compiled, prompts, modes, settings["batches"], settings["repeats"], settings["new_tokens"]
        )
        outcome = test.run(notes.note)
    _show(name, str(model.dtype), options["deterministic"], outcome, as_json)
    return common.OK if outcome.ok else common.DIFFERENCES


def _check_before_loading(name: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    """Raise ArgumentError for what the model's configuration says against the options."""
    from sparse_compile.limits import check_positions
    from sparse_compile.speculation import SpeculationConfig

    loops, rows = settings["drafts"]
    asked = SpeculationConfig("block", draft_loops=loops, num_draft_tokens=rows)
    seen = common.check_named(name, {**options, "speculation": asked})
    if seen is not None:
        check_positions(seen, settings["longest"] or 1, settings["new_tokens"])


def _load(name: str, dtype: str, device: str, branch_scale: float | None) -> tuple[Any, Any]:
    """The model and its tokenizer; random weights and bytes as tokens for a preset."""
    from sparse_compile.models import PRESETS, load_tokenizer, preset_config, random_model, tiny_tokenizer
    from sparse_compile.models.branches import Branches
    from sparse_compile.models.loading import resolve_dtype

    if name not in PRESETS:
        if branch_scale is not None:
            raise ValueError(
                f"--branch-scale {branch_scale}: it would change the weights of {name}, which is no preset; leave it "
                f"out, or pass one of {', '.join(PRESETS)}"
            )
        return common.load(name, dtype, device), load_tokenizer(name)
    import torch

    with torch.device(common.place(device)):
        model = random_model(preset_config(name), resolve_dtype(dtype) or torch.float32)
    if branch_scale is not None:
        Branches(model).scale(branch_scale)
    return model, tiny_tokenizer()


def _longest(model: Any, settings: dict[str, Any]) -> int:
    """Tokens of the longest prompt."""
    from sparse_compile.limits import check_positions, position_limit

    asked, new = settings["longest"], settings["new_tokens"]
    if asked is None:
        room = (position_limit(model) or 2**31) - new
        asked = max(1, min(_LONGEST.get(model.device.type, _LONGEST_ELSEWHERE), room))
    check_positions(model, asked, new)
    return int(asked)


def _modes(compiled: Any, loops: int, rows: int) -> dict[str, Any]:
    """How tokens are decoded, by name."""
    from sparse_compile.speculation import SpeculationConfig

    if compiled.program.roll is None:
        notes.note(
            f"no blocks and no pipelines: the model's loop is not rolled, {compiled.program.roll_reason}"
        )
        return {"ordinary": False}
    return {
        "ordinary": False,
        "block": SpeculationConfig("block", draft_loops=loops, num_draft_tokens=rows),
        "pipeline": SpeculationConfig("pipeline", draft_loops=loops),
    }


def _check(compiled: Any, modes: dict[str, Any], rows: int) -> None:
    """Raise ArgumentError for a mode that would be refused, before another one has run for minutes."""
    from sparse_compile.determinism import check_rows
    from sparse_compile.speculation import check_speculation

    for asked in filter(None, modes.values()):
        check_speculation(asked, compiled.program, loops_per_step=None)
        check_rows(compiled.sparse_config, rows, asked, compiled.program.roll.repeats)


def _show(name: str, dtype: str, deterministic: bool, outcome: Outcome, as_json: bool) -> None:
    prompts = len(outcome.runs[0].tokens)
    if as_json:
        common.print_json(
            {
                "model": name,
                "dtype": dtype.removeprefix("torch."),
                "deterministic": deterministic,
                "ok": outcome.ok,
                "prompts": prompts,
                "runs": [run.to_dict() for run in outcome.runs],
                "differences": [asdict(one) for one in outcome.differences],
            }
        )
        return
    for run in outcome.runs:
        drafts = f"; {run.accepted} of {run.drafted} drafts accepted" if run.drafted else ""
        speed = run.to_dict()["tokens_per_s"]
        print(f"{run}: {speed} tokens/s, prompts and preparation included{drafts}")
    for one in outcome.differences:
        print(one)
    if outcome.ok:
        print(f"PASS: {len(outcome.runs)} runs of {prompts} prompts give the same tokens")
    else:
        print(f"FAIL: the tokens of {len(outcome.differences)} of {prompts} prompts differ")
