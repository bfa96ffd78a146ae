"""What a request must satisfy before it is queued: one that can never be served is refused at once."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace

import torch

from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.options import EngineOptions
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import SamplingParams


class Admission:
    """Checks requests against the limits of one engine. Every refusal is a ValueError that names the argument, its
    value, the limit and the remedy.
    """

    def __init__(self, pool: KVPool, store: ReferenceStore | None, options: EngineOptions) -> None:
        self.pool, self.store, self.options = pool, store, options

    def check(self, prompt: list[int], params: SamplingParams) -> None:
        _check_params(params)
        self._check_tokens(prompt)
        new = params.max_new_tokens
        total = len(prompt) + new
        if params.generator is not None and params.generator.device.type != self.pool.device.type:
            raise ValueError(
                f"generator lives on {params.generator.device}, the model on {self.pool.device}; "
                "make the generator on the model's device"
            )
        if total > self.options.max_context:
            raise ValueError(
                f"{len(prompt)} prompt tokens + max_new_tokens={new} = {total} exceed "
                f"max_context={self.options.max_context}; shorten them or compile with a larger max_context"
            )
        self._check_prefix(len(prompt), params.prefix_length)
        self._check_memory(total)

    def _check_tokens(self, prompt: list[int]) -> None:
        """An id that the embedding does not have would end every request on a GPU, not this one alone."""
        vocabulary = self.options.vocabulary
        if not prompt:
            raise ValueError("prompt_ids is empty; a request needs at least one token")
        if min(prompt) < 0:
            raise ValueError(f"prompt_ids holds {min(prompt)}; token ids are 0 or more, remove the padding")
        if vocabulary is not None and max(prompt) >= vocabulary:
            raise ValueError(
                f"prompt_ids holds {max(prompt)}; the model knows ids up to {vocabulary - 1}, check the tokenizer"
            )

    def _check_prefix(self, prompt: int, prefix: int) -> None:
        limit = self.options.max_prefill_tokens
        if prefix and not self.options.prefix_lm:
            raise ValueError(
                f"prefix_length={prefix}: the model is no prefix-LM (config.prefix_lm is not true), its prompts are "
                "causal; pass prefix_length=0"
            )
        if not 0 <= prefix <= prompt:
            raise ValueError(f"prefix_length={prefix} must lie between 0 and the prompt's {prompt} tokens")
        if prefix > limit:
            raise ValueError(
                f"prefix_length={prefix} tokens must be prefilled in one step, which has at most "
                f"max_prefill_tokens={limit} rows of prompts; raise prefill_chunk or shorten the prefix"
            )

    def _check_memory(self, total: int) -> None:
        needed, usable = self.pool.spec.pages_for(total), self.pool.usable_pages
        if needed > usable:
            raise ValueError(
                f"{total} tokens need {needed} pages of {self.pool.spec.page_size}, the pool has {usable} "
                "in all; shorten the prompt or max_new_tokens, or make the engine with more pool_tokens"
            )
        if self.store is not None and self.options.retention is not None:
            self.store.spec.check_capacity(total, self.options.retention)


def to_list(ids: Sequence[int] | torch.Tensor) -> list[int]:
    """Token ids as plain integers; ValueError for anything but a 1-D tensor, array or sequence of integers."""
    shape, tolist = getattr(ids, "shape", None), getattr(ids, "tolist", None)
    if shape is not None and len(shape) != 1:
        raise ValueError(f"prompt_ids has shape {tuple(shape)}; one request takes a 1-D prompt")
    try:
        if isinstance(ids, str | bytes | set | frozenset | dict):
            raise TypeError
        return [_whole(token) for token in (ids if tolist is None else tolist())]
    except TypeError:
        raise ValueError(
            f"prompt_ids={ids!r:.60} must be a 1-D tensor or a sequence of integer token ids; pass what a tokenizer "
            "gives for one text"
        ) from None


def check_order(request_id: object, priority: object) -> None:
    """ValueError unless requests can be told apart and ordered by these."""
    if not isinstance(request_id, str):
        raise ValueError(f"request_id={request_id!r} must be a string, or None for one that is made up")
    if not _is_whole(priority):
        raise ValueError(f"priority={priority!r} must be an integer, a higher one for requests that go first")


def _check_params(params: SamplingParams) -> None:
    """ValueError for values that would fail in the middle of the request, or mean something else than they say."""
    if not isinstance(params, SamplingParams):
        raise ValueError(
            f"params={params!r:.60} must be SamplingParams; pass SamplingParams(max_new_tokens=16)"
        )
    if not _is_whole(params.max_new_tokens) or params.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={params.max_new_tokens!r} must be at least 1, an integer")
    if not _is_whole(params.prefix_length):
        raise ValueError(f"prefix_length={params.prefix_length!r} must be an integer, 0 for none")
    ends = params.eos_token_ids
    if not isinstance(ends, tuple | list | set | frozenset) or not all(map(_is_whole, ends)):
        raise ValueError(f"eos_token_ids={ends!r:.60} must be a tuple of token ids; pass for example (2,)")
    for name in ("do_sample", "want_logits"):
        if not isinstance(getattr(params, name), bool):
            raise ValueError(f"{name}={getattr(params, name)!r} must be True or False")
    if not isinstance(params.generator, torch.Generator | None):
        raise ValueError(f"generator={params.generator!r:.60} must be a torch.Generator, or None")
    for name in ("processor", "stop"):
        if getattr(params, name) is not None and not callable(getattr(params, name)):
            raise ValueError(f"{name}={getattr(params, name)!r:.60} must be callable, or None")


def _whole(value: object) -> int:
    """An integer as a plain int. TypeError for all else: `int` would cut a float, and True is no token."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]


def _is_whole(value: object) -> bool:
    try:
        _whole(value)
    except TypeError:
        return False
    return True


def with_generator(params: SamplingParams, device: torch.device) -> SamplingParams:
    """The same with a generator of its own, seeded from torch's global one, so that neighbours cannot disturb
    it.
    """
    seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    return replace(params, generator=torch.Generator(device).manual_seed(seed))
