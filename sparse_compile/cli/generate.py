"""`sparse-compile generate MODEL --prompt TEXT`, or `--prompt-file FILE`: text as it comes."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparse_compile.cli import common
from sparse_compile.cli.outline import check_tokens
from sparse_compile.errors import ArgumentError
from sparse_compile.limits import check_positions
from sparse_compile.sampling_limits import check_lengths, check_sampling
from sparse_compile.speculation import SpeculationConfig

if TYPE_CHECKING:
    import torch

_SAMPLING = ("temperature", "top_k", "top_p", "seed")  # options that need --do-sample


def generate(
    model: common.Model,
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", help="Token ids to continue, as 1,2,3; prints ids.")
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", help="File of text to continue, to its last byte; - is stdin."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", help="Tokens to generate at most.")] = 64,
    do_sample: Annotated[
        bool, typer.Option("--do-sample", help="Sample instead of taking the best token.")
    ] = False,
    temperature: Annotated[float | None, typer.Option("--temperature", help="With --do-sample.")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="With --do-sample.")] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", help="With --do-sample.")] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="With --do-sample: same seed, same text.")
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
    async_steps: common.AsyncSteps = None,
    loops_per_step: common.LoopsPerStep = None,
    deterministic: common.Deterministic = False,
    speculate: Annotated[
        str | None, typer.Option("--speculate", help="Let the model draft for itself: block | pipeline.")
    ] = None,
    draft_loops: Annotated[
        int | None, typer.Option("--draft-loops", help="With --speculate: loops of a draft (default 1).")
    ] = None,
    draft_tokens: Annotated[
        int | None,
        typer.Option("--draft-tokens", help="With --speculate block: rows of a block (default 4)."),
    ] = None,
    adaptive: Annotated[
        bool,
        typer.Option("--adaptive", help="With --speculate block: shorter blocks where drafts are rejected."),
    ] = False,
    dtype: common.Dtype = "auto",
    device: common.Device = "auto",
    no_validate: common.NoValidate = False,
    as_json: common.Json = False,
    quiet: common.Quiet = False,
    debug: common.Debug = False,
) -> None:
    """Continue a prompt with the compiled model."""
    kept = common.kept_options(retention, calibration, target_mass, keep_first, keep_last)
    options = common.compile_options(
        kept, capture_loop, recapture_every, dense_below, dense, implementation, no_validate
    )
    options |= {
        "async_steps": async_steps,
        "loops_per_step": loops_per_step,
        "deterministic": deterministic,
    }
    sampling = dict(zip(_SAMPLING, (temperature, top_k, top_p, seed), strict=True))
    settings: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
    settings |= {"max_new_tokens": max_new_tokens, "do_sample": do_sample}

    def body() -> int:
        ids = _parse_ids(prompt, prompt_ids, prompt_file)
        _check_settings(settings)
        options["speculation"] = _speculation(speculate, draft_loops, draft_tokens, adaptive)
        seen = common.check_named(model, options)
        tokenizer = None
        if ids is None:
            tokenizer, ids = _tokens(model, prompt, prompt_file)
        if seen is not None:
            check_tokens(seen, "prompt_ids" if tokenizer is None else "prompt", ids)
            check_positions(seen, len(ids), max_new_tokens)
        compiled = common.compile_named(model, dtype, device, options)
        return _generate(model, compiled, tokenizer, ids, settings, as_json)

    common.run_command(body, command=generate, as_json=as_json, debug=debug, quiet=quiet)


def _check_settings(settings: dict[str, Any]) -> None:
    if settings.keys() & _SAMPLING and not settings["do_sample"]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in settings if name in _SAMPLING)
        raise ValueError(f"{names}: only with --do-sample; add --do-sample or remove it")
    check_lengths(settings)
    check_sampling(settings)


def _tokens(name: str, prompt: str | None, prompt_file: str | None) -> tuple[Any, list[int]]:
    """The tokenizer of a model, and the ids of the prompt that was given."""
    text = prompt if prompt_file is None else _read(prompt_file)
    with common.quiet_stdout():
        from sparse_compile.models import load_tokenizer

        tokenizer = load_tokenizer(name)
    ids = tokenizer(text)["input_ids"]
    if not ids:
        given = f"--prompt {prompt!r}" if prompt_file is None else f"--prompt-file {prompt_file}"
        raise ValueError(f"{given}: gives no token; pass some text")
    return tokenizer, ids


def _read(path: str) -> str:
    """The text of a file, or of stdin. Raises ArgumentError for one that cannot be read or is no text."""
    remedy = "pass the path of a text file, or - and the text on stdin"
    data = sys.stdin.buffer.read() if path == "-" else common.read_file("prompt_file", path, remedy)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        limit = f"is not UTF-8 at byte {error.start:,}"
        raise ArgumentError("prompt_file", path, limit, remedy) from None


def _speculation(
    mode: str | None, loops: int | None, tokens: int | None, adaptive: bool
) -> SpeculationConfig | None:
    if mode is None:
        if loops is not None or tokens is not None or adaptive:
            raise ValueError(
                "--draft-loops, --draft-tokens, --adaptive: only with --speculate; add --speculate block"
            )
        return None
    if mode == "pipeline" and tokens is not None:
        raise ValueError(
            f"--draft-tokens {tokens}: only with --speculate block, for a pipeline has as many rows as a token takes "
            "steps; remove it, or pass --speculate block"
        )
    default = SpeculationConfig()
    return SpeculationConfig(
        mode,
        draft_loops=default.draft_loops if loops is None else loops,
        num_draft_tokens=default.num_draft_tokens if tokens is None else tokens,
        adaptive=adaptive,
    )


def _parse_ids(prompt: str | None, prompt_ids: str | None, prompt_file: str | None) -> list[int] | None:
    if sum(one is not None for one in (prompt, prompt_ids, prompt_file)) != 1:
        raise ValueError("pass either --prompt TEXT, --prompt-file FILE or --prompt-ids 1,2,3")
    if prompt_ids is None:
        return None
    try:
        return [int(one) for one in prompt_ids.split(",")]
    except ValueError:
        raise ValueError(
            f"--prompt-ids {prompt_ids}: must be integers separated by commas, such as 1,2,3"
        ) from None


def _generate(
    name: str,
    compiled: Any,
    tokenizer: Any,
    ids: list[int],
    settings: dict[str, Any],
    as_json: bool,
) -> int:
    import torch

    # An explicit mask: a given id that happens to be the pad token is part of the prompt.
    inputs = torch.tensor([ids], device=compiled.device)
    arguments = {"attention_mask": torch.ones_like(inputs), **settings}
    if as_json:
        common.print_json(_as_json(name, compiled, inputs, arguments, tokenizer))
        return common.OK
    for place, item in enumerate(compiled.stream(inputs, tokenizer=tokenizer, **arguments)):
        piece = item.text if tokenizer is not None else f"{',' if place else ''}{item.token_id}"
        print(piece, end="", flush=True)
    print()
    return common.OK


def _as_json(
    name: str, compiled: Any, inputs: torch.Tensor, arguments: dict[str, Any], tokenizer: Any
) -> Any:
    output = compiled.generate(inputs, return_dict_in_generate=True, **arguments)
    new = output.sequences[0, inputs.shape[1] :].tolist()
    return {
        "model": name,
        "prompt_ids": inputs[0].tolist(),
        "ids": new,
        "text": None if tokenizer is None else tokenizer.decode(new, skip_special_tokens=True),
        "logprobs": output.logprobs[0],
        "finish_reason": output.finish_reasons[0],
        "metrics": asdict(output.metrics[0]),
    }
