"""One call of `generate` or `stream`: arguments in, requests to the engine, tokens out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GenerationConfig

from sparse_compile.arguments import refuse_arguments, refuse_settings, refuse_unknown
from sparse_compile.errors import ArgumentError
from sparse_compile.inputs import Prompts, read_prompts
from sparse_compile.outputs import GenerateOutput, RowResult, join_sequences, stack_steps
from sparse_compile.progress import ProgressCallback, WorkProgress
from sparse_compile.runtime.request import StepOutput
from sparse_compile.sampling import Callbacks, Resolved, build_params, plan_lengths, resolve
from sparse_compile.session import EngineRequest, SessionKeeper
from sparse_compile.speculation import Speculation
from sparse_compile.streaming import IncrementalText, Streamer, StreamItem, check_streamer

INPUT_NAMES = ("input_ids", "attention_mask", "token_type_ids")


@dataclass(frozen=True)
class Call:
    """A checked call: everything that can be refused without running the model has been."""

    prompts: Prompts
    requests: list[EngineRequest]
    settings: Any
    pad_token_id: int | None
    tokenizer: Any = field(default=None, repr=False)
    speculation: Speculation = None

    @property
    def keep_scores(self) -> bool:
        return bool(self.settings.return_dict_in_generate and self.settings.output_scores)

    @property
    def keep_logits(self) -> bool:
        return bool(self.settings.return_dict_in_generate and self.settings.output_logits)

    @property
    def rows(self) -> int:
        return len(self.requests)

    @property
    def longest_prompt(self) -> int:
        return max(len(one.prompt) for one in self.requests)

    @property
    def new_tokens(self) -> int:
        """The most new tokens of a row; all rows have the same limit."""
        return max(one.params.max_new_tokens for one in self.requests)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence that the call may reach."""
        return self.longest_prompt + self.new_tokens

    @property
    def most_tokens(self) -> int:
        return sum(one.params.max_new_tokens for one in self.requests)


def prepare_call(
    model: Any,
    inputs: Any = None,
    generation_config: Any = None,
    logits_processor: Any = None,
    stopping_criteria: Any = None,
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None,
    *,
    tokenizer: Any = None,
    seed: Any = None,
    speculation: Any = None,
    **kwargs: Any,
) -> Call:
    """Check the arguments of one call and turn its rows into engine requests. Arguments as in
    `CompiledModel.generate`."""
    refuse_arguments(kwargs)
    resolved = resolve(model, generation_config, kwargs)
    refuse_settings(resolved.settings)
    given = {name: resolved.rest.pop(name, None) for name in INPUT_NAMES}
    refuse_unknown(resolved.rest, _known_arguments())
    copies = _copies(resolved)
    prompts = _prompts(model, inputs, given, resolved).repeated(copies)
    callbacks = Callbacks(
        _as_list("logits_processor", logits_processor),
        _as_list("stopping_criteria", stopping_criteria),
        prefix_allowed_tokens_fn,
        tokenizer,
    )
    new_tokens = plan_lengths(model, resolved, prompts)
    params = build_params(
        model,
        resolved,
        prompts,
        callbacks,
        new_tokens=new_tokens,
        seed=seed,
        copies=copies,
        device=model.device,
    )
    _check_padding(resolved, callbacks, len(params))
    requests = [EngineRequest(tokens, one) for tokens, one in zip(prompts.tokens, params, strict=True)]
    return Call(prompts, requests, resolved.settings, resolved.pad_token_id, tokenizer, speculation)


def run_generate(
    keeper: SessionKeeper, call: Call, streamer: Streamer | None, progress: bool | ProgressCallback | None
) -> torch.LongTensor | GenerateOutput:
    """Run a checked call to its end."""
    if streamer is not None:
        check_streamer(streamer, call.rows)
    rows = _collect(keeper, call, streamer, progress)
    sequences = join_sequences(call.prompts, rows, call.pad_token_id)
    if not call.settings.return_dict_in_generate:
        return sequences
    return GenerateOutput(
        sequences=sequences,
        logprobs=[row.logprobs for row in rows],
        scores=stack_steps([row.scores for row in rows]) if call.keep_scores else None,
        logits=stack_steps([row.logits for row in rows]) if call.keep_logits else None,
        finish_reasons=[row.finish_reason for row in rows],
        metrics=[row.metrics for row in rows if row.metrics is not None],
    )


def run_stream(keeper: SessionKeeper, call: Call) -> Iterator[StreamItem]:
    """Yield the tokens of a checked call; closing the iterator ends its requests."""
    texts = [IncrementalText(call.tokenizer) for _ in call.requests] if call.tokenizer is not None else None
    outputs = keeper.session(call.rows, call.context, call.speculation).run(call.requests)
    try:
        for row, output in outputs:
            text = texts[row].push(output.token, output.finished) if texts is not None else None
            yield StreamItem(output.token, output.logprob, text, output.finished, output.finish_reason, row)
    finally:
        outputs.close()  # type: ignore[attr-defined]


def _collect(
    keeper: SessionKeeper, call: Call, streamer: Streamer | None, progress: bool | ProgressCallback | None
) -> list[RowResult]:
    rows = [RowResult() for _ in call.requests]
    outputs = keeper.session(call.rows, call.context, call.speculation).run(call.requests)
    try:
        if streamer is not None:
            streamer.put(call.prompts.input_ids.cpu())
        with WorkProgress(call.most_tokens, progress) as bar:
            for row, output in outputs:
                rows[row].add(output, call.keep_scores, call.keep_logits)
                if streamer is not None:
                    streamer.put(torch.tensor([output.token], device="cpu"))
                bar.advance(_not_coming(call, row, rows[row], output))
    finally:
        outputs.close()  # type: ignore[attr-defined]
        if streamer is not None:
            streamer.end()  # also after an error: a reader in another thread must not wait for ever
    return rows


def _not_coming(call: Call, row: int, result: RowResult, output: StepOutput) -> int:
    return call.requests[row].params.max_new_tokens - len(result.tokens) if output.finished else 0


def _prompts(model: Any, inputs: Any, given: dict[str, Any], resolved: Resolved) -> Prompts:
    if inputs is not None and given["input_ids"] is not None:
        raise ArgumentError(
            "inputs", "...", "is the same as input_ids, and both were given", "pass one of them"
        )
    return read_prompts(
        inputs if inputs is not None else given["input_ids"],
        given["attention_mask"],
        given["token_type_ids"],
        vocab_size=int(model.config.get_text_config().vocab_size),
        prefix_lm=getattr(model.config, "prefix_lm", False) is True,
        pad_token_id=resolved.pad_token_id,
        eos_token_ids=resolved.eos_token_ids,
    )


def _copies(resolved: Resolved) -> int:
    copies = resolved.settings.num_return_sequences or 1
    if copies > 1 and not resolved.settings.do_sample:
        limit = "greedy decoding gives the same sequence each time"
        raise ArgumentError(
            "num_return_sequences", copies, limit, "pass do_sample=True or num_return_sequences=1"
        )
    return int(copies)


def _check_padding(resolved: Resolved, callbacks: Callbacks, rows: int) -> None:
    """Without any pad token, rows must not be able to end at different lengths."""
    settings = resolved.settings
    may_stop = (
        bool(callbacks.stopping_criteria)
        or settings.stop_strings is not None
        or settings.max_time is not None
    )
    if rows > 1 and may_stop and resolved.pad_token_id is None:
        limit = "rows may stop at different lengths, and neither a pad nor an eos token is known to fill them"
        raise ArgumentError("pad_token_id", None, limit, "pass pad_token_id=0")


def _as_list(name: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(callable(one) for one in value):
        kind = type(value).__name__
        raise ArgumentError(name, kind, "must be a list of callables", f"pass {name}=[...]")
    return list(value)


def _known_arguments() -> list[str]:
    own = [name for name in inspect.signature(prepare_call).parameters if name not in ("model", "kwargs")]
    settings = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    return [*INPUT_NAMES, *own, "streamer", "progress", *settings]
