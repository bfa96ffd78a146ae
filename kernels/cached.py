"""Attention of one decode step over caches `[B, Hkv, S, D]`: the real implementations of the `cached_*` ops.

A cache is read as a paged pool without a copy: sequence b is plane b, every position is a page of one token, and the
block table of a sequence lists its visible positions in ascending order. Padding keys, future keys and the empty end
of a static cache are simply not in the table, for a mask of any shape. So the kernels of the paged ops serve here as
they are, and N, the number of visible keys, is what retention counts.

Nothing is written but results. What capture leaves for consume are fresh tensors in the layout of the reference store
with one site, row b in slot b + 1, slot 0 a dummy: values of the graph, not state.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .arguments import Attention, Store, allocate_output, compute_dtype
from .dispatch import choose
from .retention import Retention

STORE = ("index", "count", "mass", "o_ref", "c_ref")
"""What capture returns behind its output, and consume takes, in this order."""


def visible_keys(visible: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From a mask to what the ops read. A composite of torch operators, so a compiler sees through it.

    Args:
        visible: bool [B, S], True where the row may attend.

    Returns:
        table: int32 [B, S], the positions of the visible keys in ascending order; what follows them is 0.
        length: int32 [B], how many there are.
        row, slot: int32 [B], 0 .. B-1 and 1 .. B.
    """
    rows, keys = visible.shape
    device = visible.device
    rank = visible.cumsum(-1)
    position = torch.arange(keys, dtype=torch.int32, device=device).expand(rows, keys)
    table = torch.zeros(rows, keys + 1, dtype=torch.int32, device=device)
    # Hidden keys go to one column too many, which is cut off.
    table = table.scatter(1, torch.where(visible, rank - 1, keys), position)[:, :keys]
    row = torch.arange(rows, dtype=torch.int32, device=device)
    return table, rank[:, -1].to(torch.int32), row, row + 1


def dense(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    length: Tensor,
    row: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    *,
    implementation: str,
    **settings: Any,
) -> Tensor:
    attention = _attention(q, k_cache, v_cache, table, length, row, bias, settings, sink)
    out = allocate_output(q)
    choose(implementation, attention).dense(attention, out)
    return out


def capture(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    length: Tensor,
    row: Tensor,
    bias: Tensor | None,
    sink: Tensor | None,
    slot: Tensor,
    *,
    retention_num: int,
    retention_den: int,
    implementation: str,
    keep_first: int = 0,
    keep_last: int = 0,
    **settings: Any,
) -> tuple[Tensor, ...]:
    attention = _attention(q, k_cache, v_cache, table, length, row, bias, settings, sink)
    retention = Retention(retention_num, retention_den, keep_first, keep_last)
    held = allocate_store(q, table, retention)
    store = Store(slot, **dict(zip(STORE, held, strict=True)), site=0)
    checks.check_store(attention, store)
    out = allocate_output(q)
    choose(implementation, attention).capture(attention, store, retention, out)
    return out, *held


def consume(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    length: Tensor,
    row: Tensor,
    bias: Tensor | None,
    slot: Tensor,
    *held: Tensor,
    implementation: str,
    **settings: Any,
) -> Tensor:
    attention = _attention(q, k_cache, v_cache, table, length, row, bias, settings)
    store = Store(slot, **dict(zip(STORE, held, strict=True)), site=0)
    checks.check_store(attention, store)
    if q.device.type == "cpu":
        checks.check_consume(attention, store, range(attention.rows))
    out = allocate_output(q)
    choose(implementation, attention).consume(attention, store, out)
    return out


def allocate_store(q: Tensor, table: Tensor, retention: Retention) -> tuple[Tensor, ...]:
    """index, count, mass, o_ref and c_ref for the rows of q; fake and real ops both allocate here.

    On the CPU the memory is zeros, so that two runs can be compared bit for bit; elsewhere only what is read has been
    written before.
    """
    rows, heads, head_dim = q.shape
    slots, wide = rows + 1, compute_dtype(q.dtype)
    make = torch.zeros if q.device.type == "cpu" else torch.empty
    return (
        make(slots, 1, heads, retention.count(table.shape[1]), dtype=torch.int32, device=q.device),
        torch.zeros(slots, 1, dtype=torch.int32, device=q.device),
        make(slots, 1, heads, dtype=wide, device=q.device),
        make(slots, 1, heads, head_dim, dtype=q.dtype, device=q.device),
        make(slots, 1, heads, head_dim, dtype=wide, device=q.device),
    )


def _attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    length: Tensor,
    row: Tensor,
    bias: Tensor | None,
    settings: dict[str, Any],
    sink: Tensor | None = None,
) -> Attention:
    """The call as one over a pool [B, S, Hkv, 1, D] of one-token pages."""
    if k_cache.dim() == 4 and (k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1):
        k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()  # the kernels know one layout for both
    checks.check_cached(q, k_cache, v_cache, table, bias, sink)
    k_pool, v_pool = (cache.transpose(1, 2).unsqueeze(3) for cache in (k_cache, v_cache))
    attention = Attention(
        q=q,
        k_pool=k_pool,
        v_pool=v_pool,
        block_table=table,
        row_seq=row,
        row_position=length,  # only a window would read it
        row_length=length,
        row_loop=row,
        plane=0,
        plane_stride=1,
        bias=bias,
        sink=sink,
        **settings,
    )
    checks.check_rows(attention)
    return attention
