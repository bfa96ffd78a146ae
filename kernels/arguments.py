"""The operands of an attention op, grouped by what they belong to. Field order is the order of the op's
schema.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

IMPLEMENTATIONS = ("reference", "batched", "triton", "auto")
"""Accepted values of the ops' `implementation` argument."""

INACTIVE, DENSE, CAPTURE, CONSUME = 0, 1, 2, 3
"""Values of `row_mode` in the mixed op."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of scores, mass and c_ref for a model of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def allocate_output(q: Tensor) -> Tensor:
    """The result of an attention op on q [T, H, D]: fresh, contiguous, uninitialised.

    Fake and real ops both allocate here.
    """
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@dataclass(frozen=True)
class Attention:
    """Queries, the paged pool they look at, and how.

    q [T, H, D]; k_pool, v_pool [planes, pages, Hkv, page_size, D]; block_table int32 [sequences, max_pages];
    the row tensors int32 [T].

    Row t reads keys 0 .. row_length[t] - 1 of sequence row_seq[t] in plane
    `plane + plane_stride * row_loop[t]`. Key j lies at
    pool[plane, block_table[row_seq, j // page_size], :, j % page_size]. A row of length 0 is padding.
    `window` W > 0 hides the keys before row_position - W + 1. `softcap` c > 0 turns a score s into
    c * tanh(s / c). k, v [T, Hkv, D] are the rows' fresh keys and values; an implementation that writes them itself
    reads them from here. `query_rows` as in `ops`. bias [T, H or 1, keys] is added to the capped score of each key.
    sink [T, H] is the score of one more key with a value of zero, which dense and capture count in the softmax and no
    consume keeps. gate [T, H, D]: the result is multiplied with sigmoid(gate); what a capture stores is not.
    """

    q: Tensor
    k_pool: Tensor
    v_pool: Tensor
    block_table: Tensor
    row_seq: Tensor
    row_position: Tensor
    row_length: Tensor
    row_loop: Tensor
    plane: int
    plane_stride: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    k: Tensor | None = None
    v: Tensor | None = None
    query_rows: int = 0
    bias: Tensor | None = None
    sink: Tensor | None = None
    gate: Tensor | None = None

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        return self.q.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.k_pool.shape[2]

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        return self.q.shape[2]

    @property
    def page_size(self) -> int:
        return self.k_pool.shape[3]

    @property
    def max_pages(self) -> int:
        return self.block_table.shape[1]

    @property
    def compute_dtype(self) -> torch.dtype:
        return compute_dtype(self.q.dtype)

    @property
    def row_plane(self) -> Tensor:
        """int64 [T]: the plane that each row reads and writes."""
        return self.plane + self.plane_stride * self.row_loop.long()

    @property
    def row_first(self) -> Tensor:
        """int64 [T]: the first visible key of each row, 0 without a window."""
        position = self.row_position.long()
        return (position - self.window + 1).clamp(min=0) if self.window else torch.zeros_like(position)


@dataclass(frozen=True)
class Store:
    """The reference store as seen by one op: what capture writes and consume reads, per (slot, site).

    row_slot int32 [T]; index int32 [slots, sites, H, C] (ascending key positions, the first `count` entries
    valid); count int32 [slots, sites]; mass [slots, sites, H] and c_ref [slots, sites, H, D] in the compute
    dtype; o_ref [slots, sites, H, D] in the model's dtype. C is the capacity.
    """

    row_slot: Tensor
    index: Tensor
    count: Tensor
    mass: Tensor
    o_ref: Tensor
    c_ref: Tensor
    site: int

    @property
    def capacity(self) -> int:
        return self.index.shape[3]
