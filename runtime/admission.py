"""What a request must satisfy before it is queued: one that can never be served is refused at once."""

from __future__ import annotations

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
        new = params.max_new_tokens
        total = len(prompt) + new
        if not prompt:
            raise ValueError("prompt_ids is empty; a request needs at least one token")
        if min(prompt) < 0:
            raise ValueError(f"prompt_ids holds {min(prompt)}; token ids are 0 or more, remove the padding")
        if new < 1:
            raise ValueError(f"max_new_tokens={new} must be at least 1")
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

    def _check_prefix(self, prompt: int, prefix: int) -> None:
        limit = self.options.max_prefill_tokens
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
                "in all; shorten the prompt or max_new_tokens, or raise max_batch or max_context"
            )
        if self.store is not None and self.options.retention is not None:
            self.store.spec.check_capacity(total, self.options.retention)


def to_list(ids: Sequence[int] | torch.Tensor) -> list[int]:
    """Token ids as plain integers; ValueError for a tensor that is not 1-D."""
    if isinstance(ids, torch.Tensor):
        if ids.dim() != 1:
            raise ValueError(f"prompt_ids has shape {tuple(ids.shape)}; one request takes a 1-D prompt")
        ids = ids.tolist()
    return [int(token) for token in ids]


def with_generator(params: SamplingParams, device: torch.device) -> SamplingParams:
    """The same with a generator of its own, seeded from torch's global one, so that neighbours cannot disturb
    it.
    """
    seed = int(torch.randint(2**63 - 1, (), device="cpu"))
    return replace(params, generator=torch.Generator(device).manual_seed(seed))
