"""Attention of prompt chunks through PyTorch's scaled_dot_product_attention.

Prompts are compute-bound: many queries of one sequence read the same keys, which is what PyTorch's fast kernels are
made for. Their keys and values are written to the pool for the rows that follow; a chunk that does not begin its
sequence gathers what is in the pool before it.

Computes what the op `dense` computes of the same rows, in another order of additions. A gate is applied to what
PyTorch's kernel has rounded to the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import glu, scaled_dot_product_attention

_ops = torch.ops.sparse_compile

_LARGEST_HEAD = 256  # of PyTorch's fused kernels


class Chunk(NamedTuple):
    """Rows `row` to `row + rows - 1` of a plan: consecutive tokens of the sequence in line `seat` of the block table,
    from position `start`. The first `prefix_length` tokens of the sequence see each other, and lie in one chunk.
    """

    row: int
    rows: int
    seat: int
    start: int
    prefix_length: int = 0

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def causal(self) -> bool:
        """The chunk begins its sequence, and no row sees past itself."""
        return self.start == 0 and self.prefix_length <= 1


class Prompts(NamedTuple):
    """Where chunks lie: the row tensors int32 [T] of the ops, and the chunks as the host knows them."""

    block_table: Tensor
    row_seq: Tensor
    row_position: Tensor
    row_length: Tensor
    row_loop: Tensor
    chunks: Sequence[Chunk]


class Heads(NamedTuple):
    """The numbers of one attention: its plane of the pool, and how scores are made of products."""

    plane: int
    scale: float
    window: int = 0
    softcap: float = 0.0


def prefill_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    prompts: Prompts,
    heads: Heads,
    gate: Tensor | None = None,
) -> Tensor:
    """Write the rows' keys and values, then attend: [T, H, D] in q's dtype, zeros for rows of no chunk.

    q, gate [T, H, D]; k, v [T, Hkv, D]; pools [planes, pages, Hkv, page_size, D]. Soft caps and heads above 256, which
    PyTorch's kernels do not know, go through the op `dense`.
    """
    p, plane = prompts, {"plane": heads.plane, "plane_stride": 0}
    rows = (p.block_table, p.row_seq, p.row_position)
    if heads.softcap or q.shape[-1] > _LARGEST_HEAD:
        numbers = {"scale": heads.scale, "window": heads.window, "softcap": heads.softcap}
        return _ops.dense(
            q,
            k,
            v,
            k_pool,
            v_pool,
            *rows,
            p.row_length,
            p.row_loop,
            gate,
            **plane,
            **numbers,
            implementation="auto",
        )
    _ops.kv_write(k, v, k_pool, v_pool, *rows, p.row_loop, **plane)
    out, result = _room(q, gate)
    done = 0
    for row, count, alike in _batches(p.chunks):
        done = row + count * len(alike)
        if alike[0].causal:
            q_b, k_b, v_b = (x[row:done].unflatten(0, (len(alike), count)) for x in (q, k, v))
            out[row:done] = _attend(q_b, k_b, v_b, heads, alike[0]).flatten(0, 1)
        else:
            keys, values = (_gather(pool[heads.plane], p.block_table, alike[0]) for pool in (k_pool, v_pool))
            out[row:done] = _attend(q[None, row:done], keys[None], values[None], heads, alike[0])[0]
    if gate is not None:  # in the wide dtype, and rounded once
        result = glu(result, dim=-1)
    result[done:] = 0
    return result


def _room(q: Tensor, gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where attention goes [T, H, D], and what it is a part of: with a gate its first half, and the gate the second."""
    if gate is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        return out, out
    both = q.new_empty(*q.shape[:-1], 2 * q.shape[-1])
    out, second = both.chunk(2, dim=-1)
    second.copy_(gate)
    return out, both


def _batches(chunks: Sequence[Chunk]) -> Iterator[tuple[int, int, list[Chunk]]]:
    """(first row, rows of each, chunks): neighbours of one length that begin their sequences go together."""

    def kind(pair: tuple[int, Chunk]) -> tuple[int, int]:
        at, chunk = pair
        return (chunk.rows, -1) if chunk.causal else (chunk.rows, at)

    for _, pairs in groupby(enumerate(chunks), kind):
        alike = [chunk for _, chunk in pairs]
        yield alike[0].row, alike[0].rows, alike


def _gather(pool: Tensor, block_table: Tensor, chunk: Chunk) -> Tensor:
    """[end, Hkv, D]: the keys or values of a sequence up to the end of `chunk`."""
    pages = block_table[chunk.seat, : -(-chunk.end // pool.shape[2])]
    return pool[pages.long()].transpose(1, 2).flatten(0, 1)[: chunk.end]


def _attend(q: Tensor, k: Tensor, v: Tensor, heads: Heads, chunk: Chunk) -> Tensor:
    """q [B, n, H, D], k, v [B, N, Hkv, D], the last n of N keys being the rows' own -> [B, n, H, D]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    inside = max(
        0, min(chunk.prefix_length - chunk.start, chunk.rows)
    )  # rows of the prefix, which see all of it
    if heads.window:
        mask = _visible(chunk, heads.window, q.device)
        return _sdpa(q, k, v, heads.scale, attn_mask=mask).transpose(1, 2)
    if not inside:
        return _causal(q, k, v, heads.scale).transpose(1, 2)
    before = slice(chunk.prefix_length)
    first = _sdpa(q[:, :, :inside], k[:, :, before], v[:, :, before], heads.scale)
    if inside == chunk.rows:
        return first.transpose(1, 2)
    return torch.cat([first, _causal(q[:, :, inside:], k, v, heads.scale)], dim=2).transpose(1, 2)


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Each of n queries sees the N - n keys before them all, and those up to its own."""
    if q.shape[2] == k.shape[2]:
        return _sdpa(q, k, v, scale, is_causal=True)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in (k, v))
    mask = causal_lower_right(q.shape[2], k.shape[2])
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, **how: object) -> Tensor:
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=grouped, **how)  # type: ignore[arg-type]


def _visible(chunk: Chunk, window: int, device: torch.device) -> Tensor:
    """bool [rows, end]: which keys each row of a sliding window sees."""
    position = torch.arange(chunk.start, chunk.end, device=device)[:, None]
    key = torch.arange(chunk.end, device=device)
    length = torch.where(position < chunk.prefix_length, chunk.prefix_length, position + 1)
    return (key < length) & (key > position - window)
