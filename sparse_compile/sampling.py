"""From transformers' generation arguments to the engine's SamplingParams, one per row.

Defaults, logits processors and stopping criteria come from transformers itself, so they mean here what they
mean there. transformers' own processors see a row's real tokens only. What the user passes
(`logits_processor`, `stopping_criteria`, `prefix_allowed_tokens_fn`) is called once per row and step with ids
[1, N + new], the row as the caller padded it: lengths that the caller measured on its own input stay right.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, GenerationMixin, StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from sparse_compile.errors import ArgumentError
from sparse_compile.runtime.request import SamplingParams
from sparse_compile.sampling_limits import check_lengths, check_sampling
from sparse_compile.seeds import make_generator, row_seeds

if TYPE_CHECKING:
    from sparse_compile.inputs import Prompts


@dataclass(frozen=True)
class Callbacks:
    """What the user hands over to steer generation, in transformers' own types."""

    logits_processor: Sequence[Callable[..., Any]] = ()
    stopping_criteria: Sequence[Callable[..., Any]] = ()
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], list[int]] | None = None
    tokenizer: Any = None


@dataclass(frozen=True)
class Resolved:
    """A GenerationConfig with every default filled in.

    settings: the config; given_max_length, given_min_length: whether anybody set them (transformers treats
    its own default as a number of new tokens). eos_token_ids and pad_token_id follow transformers' rules.
    rest: arguments that are no generation settings.
    """

    settings: Any
    given_max_length: bool
    given_min_length: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    rest: dict[str, Any]


def resolve(model: Any, generation_config: Any, kwargs: dict[str, Any]) -> Resolved:
    """Fill in defaults as transformers does: call, `generation_config`, the model's, the global ones."""
    if not isinstance(model, GenerationMixin):
        raise TypeError(
            f"generate needs a model with transformers' GenerationMixin; {type(model).__name__} has none"
        )
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        kind = type(generation_config).__name__
        raise ArgumentError(
            "generation_config", kind, "must be a GenerationConfig", "pass GenerationConfig(...)"
        )
    check_lengths(kwargs)  # transformers compares them with numbers while it fills in defaults
    sources = (generation_config, model.generation_config)
    given = {
        name: kwargs.get(name) is not None
        or any(getattr(source, name, None) is not None for source in sources)
        for name in ("max_length", "min_length")
    }
    settings, rest = model._prepare_generation_config(generation_config, **kwargs)
    check_lengths(vars(settings))
    check_sampling(vars(settings))
    eos = _as_ids(settings.eos_token_id)
    pad = _as_ids(settings.pad_token_id)
    return Resolved(
        settings=settings,
        given_max_length=given["max_length"],
        given_min_length=given["min_length"],
        eos_token_ids=eos,
        pad_token_id=pad[0] if pad else eos[0] if eos else None,
        rest=rest,
    )


def _as_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    return tuple(int(one) for one in value) if isinstance(value, list | tuple) else (int(value),)


def plan_lengths(model: Any, resolved: Resolved, prompts: Prompts) -> int:
    """Number of new tokens; fills in the settings' lengths, which count padding as in transformers."""
    settings, width = resolved.settings, prompts.width
    model._prepare_generated_length(
        generation_config=settings,
        has_default_max_length=not resolved.given_max_length,
        has_default_min_length=not resolved.given_min_length,
        model_input_name="input_ids",
        input_ids_length=width,
        inputs_tensor=prompts.input_ids,
    )
    model._validate_generated_length(settings, width, not resolved.given_max_length)
    return int(settings.max_length) - width


def build_params(
    model: Any,
    resolved: Resolved,
    prompts: Prompts,
    callbacks: Callbacks,
    *,
    new_tokens: int,
    seed: Any,
    copies: int,
    device: torch.device,
) -> list[SamplingParams]:
    """SamplingParams of every row of `prompts`, repeated already. device: where the scores are."""
    settings = resolved.settings
    model._prepare_special_tokens(settings, True, device=device, batch_size=len(prompts.tokens))
    rows = len(prompts.tokens)
    seeds = row_seeds(seed, rows // copies, copies) if settings.do_sample or seed is not None else [0] * rows
    collect = bool(settings.return_dict_in_generate and (settings.output_scores or settings.output_logits))
    shared = _shared_criteria(model, settings, callbacks)
    return [
        SamplingParams(
            max_new_tokens=new_tokens,
            eos_token_ids=resolved.eos_token_ids,
            do_sample=bool(settings.do_sample),
            processor=_processors(model, settings, callbacks, prompts, row, row // copies, device),
            stop=_stop_rule(settings, shared, callbacks, _padded_view(prompts, row)),
            generator=make_generator(seeds[row], device) if settings.do_sample else None,
            prefix_length=prompts.prefix_lengths[row],
            want_logits=collect,
        )
        for row in range(rows)
    ]


def _padded_view(prompts: Prompts, row: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Maps a row's real ids [1, n] to [1, N + new] as the caller padded them."""
    length, original = len(prompts.tokens[row]), prompts.input_ids[row : row + 1]
    if length == prompts.width:
        return lambda ids: ids
    return lambda ids: torch.cat([original.to(ids.device), ids[:, length:]], dim=1)


def _processors(
    model: Any,
    settings: Any,
    callbacks: Callbacks,
    prompts: Prompts,
    row: int,
    prompt: int,
    device: torch.device,
) -> Any:
    """transformers' processors for one row, or None when there is nothing to do."""
    length, view = len(prompts.tokens[row]), _padded_view(prompts, row)
    allowed = callbacks.prefix_allowed_tokens_fn
    own = copy.copy(settings)
    own.num_return_sequences = 1
    own.max_length = settings.max_length - prompts.width + length
    own.min_length = max(0, (settings.min_length or 0) - prompts.width + length)
    processors = model._get_logits_processor(
        generation_config=own,
        input_ids_seq_length=length,
        prefix_allowed_tokens_fn=None
        if allowed is None
        else lambda _, ids: allowed(prompt, view(ids[None])[0]),
        logits_processor=list(callbacks.logits_processor),
        device=device,
        model_kwargs={},
    )
    for place, processor in enumerate(processors):
        if any(processor is given for given in callbacks.logits_processor):
            processors[place] = _seeing(processor, view)
    return processors or None


def _seeing(
    processor: Callable[..., Any], view: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor], Any]:
    # A function of exactly these two arguments: LogitsProcessorList looks at the signature.
    def padded(input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        return processor(view(input_ids), scores)

    return padded


def _shared_criteria(model: Any, settings: Any, callbacks: Callbacks) -> list[Any]:
    """transformers' own criteria that all rows share: time and stop strings. Length and eos are the
    engine's."""
    criteria = model._get_stopping_criteria(settings, StoppingCriteriaList(), tokenizer=callbacks.tokenizer)
    return [one for one in criteria if not isinstance(one, MaxLengthCriteria | EosTokenCriteria)]


def _stop_rule(
    settings: Any, shared: list[Any], callbacks: Callbacks, view: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor, torch.Tensor | None], bool] | None:
    if not shared and not callbacks.stopping_criteria:
        return None
    history: list[torch.Tensor] | None = (
        [] if settings.return_dict_in_generate and settings.output_scores else None
    )

    def stop(ids: torch.Tensor, scores: torch.Tensor | None) -> bool:
        if history is not None and scores is not None:
            history.append(scores)
        seen = (
            tuple(history) if history is not None else None
        )  # as in transformers: None unless scores are kept
        answers = [one(ids, seen) for one in shared]
        if callbacks.stopping_criteria:
            answers += [one(view(ids), seen) for one in callbacks.stopping_criteria]
        return any(bool(torch.as_tensor(answer).any()) for answer in answers)

    return stop
