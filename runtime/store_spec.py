"""The shape of the reference store, and how much a slot can hold."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_compile.kernels.retention import Retention


@dataclass(frozen=True)
class StoreSpec:
    """Shape of one slot: `sites` captured sites of `heads` query heads, at most `capacity` retained keys per
    head.

    dtype is the model's; mass and c_ref are kept in the compute dtype, float64 for float64 models and float32
    otherwise.
    """

    sites: int
    heads: int
    head_dim: int
    capacity: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("sites", "heads", "head_dim", "capacity"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @staticmethod
    def capacity_for(max_context: int, retention: Retention, key_bucket: int = 1) -> int:
        """Retained keys of the longest row, rounded up to a multiple of `key_bucket`."""
        return -(-retention.count(max_context) // key_bucket) * key_bucket

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of all tensors of one slot."""
        per_head = 4 * self.capacity + self.compute_dtype.itemsize
        per_head += self.head_dim * (self.dtype.itemsize + self.compute_dtype.itemsize)
        return self.sites * (4 + self.heads * per_head) + 1  # + 4: count, + 1: valid

    def check_capacity(self, length: int, retention: Retention) -> None:
        """Raises ValueError when a row of `length` visible keys retains more keys than a slot can hold."""
        count = retention.count(length)
        if count > self.capacity:
            raise ValueError(
                f"a row of {length} visible keys retains {count} keys at retention {retention}, "
                f"the reference store holds {self.capacity}; "
                "raise max_context or lower key_retention"
            )
