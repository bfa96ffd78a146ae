"""Logits in, tokens out, each request on its own, and all of it on the device: the host reads tokens later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sparse_compile.kernels.arguments import compute_dtype
from sparse_compile.kernels.greedy import greedy
from sparse_compile.runtime.request import FinishReason, Request


@dataclass
class Drawn:
    """Chosen tokens, int64 [n], and their log-probabilities under the processed scores, [n], on the device.

    A logprob of NaN says that the scores were no numbers, and that the token means nothing. errors: what a processor
    raised, by row.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)  # see `choose`
    errors: dict[int, Exception] = field(default_factory=dict)
    flags: torch.Tensor | None = None  # [n] whole numbers for the reader; speculation says what they mean

    def put(self, row: int, token: torch.Tensor, logs: torch.Tensor) -> None:
        """Replaces the choice of a row. token: int64 [1]; logs: its log-probabilities, [1, vocab]."""
        self.tokens[row : row + 1].copy_(token)
        self.logprobs[row : row + 1].copy_(logs.gather(1, token[None])[0])


def largest(logits: torch.Tensor) -> Drawn:
    """The token of the largest score of each row, in one batch, without a copy of the logits as scores."""
    return Drawn(*greedy(logits))


def choose(drawn: Drawn, logits: torch.Tensor, requests: Sequence[Request]) -> None:
    """Lets requests with a processor, and those that draw, choose again. logits: [len(requests), vocab], raw. Only
    their rows, and those of requests that want scores, are copied as scores.

    Copies of the raw logits and of the processed scores, [vocab] each, are kept for requests that want them. What
    fails for one request is its own error.
    """
    for row, request in enumerate(requests):
        params = request.params
        if not params.own_choice and not params.keeps_scores:
            continue
        try:
            scores = processed(request, logits[row : row + 1], request.length)
            if params.own_choice:
                logs = scores.log_softmax(dim=-1)
                token = draw(logs.exp(), params.generator) if params.do_sample else best(logs)
                drawn.put(row, token[0], logs)
            if params.keeps_scores:
                drawn.kept[row] = logits[row].clone(), scores[0].clone()
        except Exception as error:
            drawn.errors[row] = error


def processed(request: Request, logits: torch.Tensor, length: int) -> torch.Tensor:
    """The scores of one row, [1, vocab], behind the first `length` ids of its request."""
    scores, params = _to_scores(logits), request.params
    if params.needs_ids:
        request.ids(scores.device, length)
    if params.processor is None:
        return scores
    # A processor may write in place, and the raw logits may still be wanted.
    return _checked_scores(params.processor(request.ids(scores.device, length), scores.clone()), scores)


def best(scores: torch.Tensor) -> torch.Tensor:
    """int64 [n, 1]: the largest of each row."""
    return scores.argmax(dim=-1, keepdim=True)


def _to_scores(logits: torch.Tensor) -> torch.Tensor:
    """Scores are float32, float64 for float64 logits."""
    return logits.to(compute_dtype(logits.dtype))


def draw(probs: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """int64 [n, 1], drawn from probs [n, vocab]: what torch.multinomial gives, without its checks on the host.

    The largest of p / q with exponential q is distributed as p: an exponential race.
    """
    return race(probs, torch.empty_like(probs).exponential_(1, generator=generator))


def race(probs: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """int64 [n, 1]: as `draw`, with the exponential noise [n, vocab] at hand."""
    return torch.div(probs, noise).argmax(dim=-1, keepdim=True)


def finish_reason(request: Request, scores: torch.Tensor | None) -> FinishReason | None:
    """Why the request ends with its newest token, if it does: "eos" before "stop" before "length".

    scores: the processed scores of that token, [vocab]. Exceptions of the stop rule pass through.
    """
    if request.tokens[-1] in request.params.eos_token_ids:
        return "eos"
    stop = request.params.stop
    if stop is not None:
        assert scores is not None
        if bool(stop(request.ids(scores.device, len(request.tokens)), scores[None])):
            return "stop"
    return "length" if len(request.tokens) >= request.max_length else None


def not_a_number() -> ValueError:
    return ValueError("the scores of this request contain NaN or +inf, or are -inf for every token")


def _checked_scores(processed: object, scores: torch.Tensor) -> torch.Tensor:
    """What a processor returned, if it is scores: TypeError unless floating point of the shape it was given."""
    if (
        isinstance(processed, torch.Tensor)
        and processed.is_floating_point()
        and processed.shape == scores.shape
    ):
        return processed.detach()
    found = (
        f"{processed.dtype} {tuple(processed.shape)}"
        if isinstance(processed, torch.Tensor)
        else type(processed).__name__
    )
    raise TypeError(
        f"a logits processor returned {found}; it must return scores of shape {tuple(scores.shape)}"
    )
