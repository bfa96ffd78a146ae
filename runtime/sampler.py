"""Logits in, tokens out, each request on its own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparse_compile.runtime.request import FinishReason, Request


@dataclass(frozen=True)
class Sample:
    """A chosen token, its log-probability under the processed scores, and these: [vocab], borrowed."""

    token: int
    logprob: float
    scores: torch.Tensor | None = None


def sample(logits: torch.Tensor, requests: Sequence[Request]) -> list[Sample | Exception]:
    """One token per request. logits: [len(requests), vocab], raw. What fails for one request is its result.

    Scores are float32, float64 for float64 logits. Greedy requests without a processor are done in one batch.
    """
    results: list[Sample | Exception] = [RuntimeError("not sampled")] * len(requests)
    plain = [row for row, request in enumerate(requests) if _is_plain(request)]
    if plain:
        chosen = logits if len(plain) == len(requests) else logits[plain]
        for row, result in zip(plain, _greedy_batch(_to_scores(chosen)), strict=True):
            results[row] = result
    for row, request in enumerate(requests):
        if not _is_plain(request):
            results[row] = _sample_one(_to_scores(logits[row : row + 1]), request)
    return results


def finish_reason(request: Request, scores: torch.Tensor | None) -> FinishReason | None:
    """Why the request ends with its newest token, if it does: "eos" before "stop" before "length".

    scores: the processed scores of that token, [1, vocab]. Exceptions of the stop rule pass through.
    """
    if request.tokens[-1] in request.params.eos_token_ids:
        return "eos"
    stop = request.params.stop
    if stop is not None and bool(stop(request.ids(_device_of(scores)), scores)):
        return "stop"
    return "length" if len(request.tokens) >= request.max_length else None


def _is_plain(request: Request) -> bool:
    params = request.params
    return not (params.do_sample or params.processor or params.stop or params.want_logits)


def _to_scores(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32)


def _greedy_batch(scores: torch.Tensor) -> list[Sample | Exception]:
    best, tokens = scores.max(dim=-1)
    logprobs = (best - scores.logsumexp(dim=-1)).tolist()
    return [_checked(token, logprob) for token, logprob in zip(tokens.tolist(), logprobs, strict=True)]


def _sample_one(scores: torch.Tensor, request: Request) -> Sample | Exception:
    try:
        params = request.params
        if params.processor is not None:
            # A processor may write in place, and the raw logits may still be wanted.
            scores = _checked_scores(params.processor(request.ids(scores.device), scores.clone()), scores)
        logs = scores.log_softmax(dim=-1)
        if params.do_sample:
            if bool(logs.isnan().any()):
                return _not_a_number()
            token = int(torch.multinomial(logs.exp(), 1, generator=params.generator))
        else:
            token = int(scores.argmax(dim=-1))
        return _checked(token, float(logs[0, token]), scores[0])
    except Exception as error:
        return error


def _checked_scores(processed: object, scores: torch.Tensor) -> torch.Tensor:
    """What a processor returned, if it is scores: TypeError unless floating point of the shape it was given."""
    if (
        isinstance(processed, torch.Tensor)
        and processed.is_floating_point()
        and processed.shape == scores.shape
    ):
        return processed
    found = (
        f"{processed.dtype} {tuple(processed.shape)}"
        if isinstance(processed, torch.Tensor)
        else type(processed).__name__
    )
    raise TypeError(
        f"a logits processor returned {found}; it must return scores of shape {tuple(scores.shape)}"
    )


def _checked(token: int, logprob: float, scores: torch.Tensor | None = None) -> Sample | Exception:
    return _not_a_number() if math.isnan(logprob) else Sample(token, logprob, scores)


def _not_a_number() -> ValueError:
    return ValueError("the scores of this request contain NaN or +inf, or are -inf for every token")


def _device_of(scores: torch.Tensor | None) -> torch.device:
    return torch.device("cpu") if scores is None else scores.device
