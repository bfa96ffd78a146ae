"""What a model, a context and a batch need of a GPU's memory, in plain arithmetic: nothing is allocated or measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sparse_compile.kernels.retention import Retention
from sparse_compile.runtime.kv_pool import KVSpec
from sparse_compile.runtime.memory import (
    USABLE_SHARE,
    kv_pool_bytes,
    pool_pages,
    reference_store_bytes,
    store_slots,
)
from sparse_compile.runtime.store_spec import StoreSpec

CONTEXT_BYTES = 600 * 2**20  # what CUDA, its libraries and compiled kernels take before the first tensor


class SiteSizes(Protocol):
    """What the sizes of a program's pools depend on."""

    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def store_site(self) -> int | None: ...
    @property
    def retention(self) -> Retention: ...


@dataclass(frozen=True)
class PoolSizes:
    """Shapes of pool and store for any batch and context. rows: of one sequence that may be under way at once."""

    sites: Sequence[SiteSizes]
    key_bucket: int
    page_size: int
    dtype: torch.dtype
    rows: int = 1

    def slots(self, batch: int) -> int:
        """Slots of the store for `batch` sequences."""
        return store_slots(batch, self.rows)

    def kv_spec(self) -> KVSpec:
        first = self.sites[0]
        return KVSpec(len(self.sites), first.kv_heads, first.head_dim, self.page_size, self.dtype)

    def store_spec(self, context: int) -> StoreSpec | None:
        """Shape of a slot for rows of up to `context` keys; None when nothing captures."""
        lines = {site.store_site: site.retention for site in self.sites if site.store_site is not None}
        if not lines:
            return None
        first = self.sites[0]
        capacity = max(StoreSpec.capacity_for(context, one, self.key_bucket) for one in lines.values())
        return StoreSpec(len(lines), first.heads, first.head_dim, capacity, self.dtype)

    def pages(self, batch: int, context: int, pool_tokens: int | None = None) -> int:
        """Pages of the pool for `batch` sequences of `context` tokens, or of `pool_tokens` in all."""
        spec = self.kv_spec()
        return pool_pages(spec, context, batch) if pool_tokens is None else pool_pages(spec, pool_tokens, 1)

    def needs(self, batch: int, context: int, pool_tokens: int | None = None) -> dict[str, int]:
        """Bytes of pool and store for `batch` sequences of `context` tokens, or of `pool_tokens` in all, by name."""
        needs = {"KV pool": kv_pool_bytes(self.kv_spec(), self.pages(batch, context, pool_tokens))}
        store = self.store_spec(context)
        if store is not None:
            needs["reference store"] = reference_store_bytes(store, self.slots(batch))
        return needs


@dataclass(frozen=True)
class Budget:
    """A GPU and a model on it.

    Attributes:
        gpu_bytes: memory of the GPU.
        weight_bytes: of the model.
        pools: shapes of pool and store.
        row_bytes: what one row makes in one layer; an estimate from above, for nothing is freed in it.
        prefill_chunk: rows of a prompt in one step.
        vocabulary: logits per row that samples.
    """

    gpu_bytes: int
    weight_bytes: int
    pools: PoolSizes
    row_bytes: int
    prefill_chunk: int
    vocabulary: int

    def activation_bytes(self, batch: int) -> int:
        """The largest step's values of one layer."""
        return max(self.prefill_chunk, batch) * self.row_bytes

    def logit_bytes(self, batch: int) -> int:
        """Logits of every sequence in the model's dtype, as scores in float32, and once more as probabilities."""
        return batch * self.vocabulary * (self.pools.dtype.itemsize + 8)

    def needs(self, batch: int, context: int) -> dict[str, int]:
        """Bytes by name, in the order in which they are taken."""
        return {
            "weights": self.weight_bytes,
            "CUDA and kernels": CONTEXT_BYTES,
            **self.pools.needs(batch, context),
            "activations": self.activation_bytes(batch),
            "logits": self.logit_bytes(batch),
        }

    @property
    def _free_bytes(self) -> int:
        """What the model and CUDA leave; below 0 where they do not fit."""
        return self.gpu_bytes - self.weight_bytes - CONTEXT_BYTES

    def pool_limit(self, batch: int) -> int:
        """Bytes that pool and store may take: the share of the free memory that the engine takes at most, and never
        what activations and logits need.
        """
        free = self._free_bytes
        return min(int(free * USABLE_SHARE), free - self.activation_bytes(batch) - self.logit_bytes(batch))

    def reserve(self, batch: int) -> int:
        """Bytes that weights, CUDA and the largest pools leave to activations, logits and the allocator."""
        return self._free_bytes - self.pool_limit(batch)

    def fits(self, batch: int, context: int) -> bool:
        return sum(self.pools.needs(batch, context).values()) <= self.pool_limit(batch)

    def max_context(self, batch: int, limit: int) -> int:
        """The longest context that `batch` sequences can have, at most `limit`; 0 when not even one token fits."""
        return _largest(lambda context: self.fits(batch, context), limit)

    def max_batch(self, context: int) -> int:
        """The most sequences of `context` tokens, 0 when not even one fits."""
        each = self.pools.kv_spec().bytes_per_token * context
        return _largest(lambda batch: self.fits(batch, context), max(1, self.gpu_bytes // each))

    def least_gpu_bytes(self, batch: int, context: int) -> int:
        """The memory of the smallest GPU on which `batch` sequences of `context` tokens fit."""
        pools = sum(self.pools.needs(batch, context).values())
        beside = self.activation_bytes(batch) + self.logit_bytes(batch)
        free = max(-(-pools * 10**6 // int(USABLE_SHARE * 10**6)), pools + beside)
        return self.weight_bytes + CONTEXT_BYTES + free + 1


def _largest(holds: Callable[[int], bool], limit: int) -> int:
    """The largest number up to `limit` that `holds`, given that it holds for all below it; 0 if for none."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low
