"""The reference's arithmetic, vectorised in torch: the default on the CPU, and correct on CUDA.

Rows are grouped by the keys they share (`tiles`), so a prefill chunk gathers its sequence once and a decode
step pads rows of similar length together. Queries of one key/value head are stacked along the rows of one
matrix product, so grouped heads need no repeated keys. Everything runs in the compute dtype (float64 or
float32); only results are rounded. Masked entries are replaced, never multiplied by zero, since unused memory
may hold NaN.

Dense and capture call the same code on the same tiles: within one batch their outputs agree bit for bit. On
CUDA, `torch.backends` settings that allow TF32 for float32 products apply here as anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import tiles
from .arguments import CAPTURE, CONSUME, DENSE, Attention, Store
from .paging import look_up_pages
from .retention import Retention
from .tiles import Block, Tile

WRITES_KEYS = False  # the dispatch stores k and v before it calls these functions


def dense(
    attention: Attention, out: Tensor, rows: Sequence[int] | None = None, static: bool | None = None
) -> None:
    """Fill out [T, H, D] with softmax attention over all visible keys; inactive rows get zeros.

    `rows` limits the work to these rows and leaves the others of `out` alone. `static` plans without host
    reads (default: only while a CUDA graph is being captured) and takes no `rows`.
    """
    _clear(attention, out, rows)
    for attended in _attend_all(attention, rows, _static(attention, static)):
        out[attended.rows] = _gated(attention, attended.rows, attended.output).to(out.dtype)


def capture(
    attention: Attention,
    store: Store,
    retention: Retention,
    out: Tensor,
    rows: Sequence[int] | None = None,
    static: bool | None = None,
) -> None:
    """`dense`, and for each active row its kept keys, mass, O_ref and C_ref written to its slot."""
    _clear(attention, out, rows)
    for attended in _attend_all(attention, rows, _static(attention, static)):
        out[attended.rows] = _gated(attention, attended.rows, attended.output).to(out.dtype)
        _store_reference(attention, store, retention, attended, attended.output.to(out.dtype))


def consume(
    attention: Attention,
    store: Store,
    out: Tensor,
    rows: Sequence[int] | None = None,
    static: bool | None = None,
) -> None:
    """Fill out with O_ref + m * (T - C_ref), T over the captured keys only; inactive rows get zeros."""
    _clear(attention, out, rows)
    if attention.rows == 0 or (rows is not None and len(rows) == 0):
        return
    device = attention.q.device
    chosen = (
        torch.arange(attention.rows, device=device)
        if rows is None
        else torch.tensor(list(rows), device=device)
    )
    slot = store.row_slot[chosen].long()
    kept = store.capacity
    if not _static(attention, static):
        kept = min(kept, max(1, int(store.count[slot, store.site].max())))
    per_row = 2 * attention.heads * kept * attention.head_dim
    for part in chosen.split(max(1, tiles.GATHERED // per_row)):
        out[part] = _gated(attention, part, _consume_rows(attention, store, part, kept)).to(out.dtype)


def mixed(
    attention: Attention,
    row_mode: Tensor,
    store: Store,
    retention: Retention,
    out: Tensor,
    static: bool | None = None,
    captures: bool = True,
) -> None:
    """Each row by its mode: 0 inactive, 1 dense, 2 capture, 3 consume. `captures` saves nothing here."""
    if _static(attention, static):
        _mixed_static(attention, row_mode, store, retention, out)
        return
    modes = row_mode.tolist()
    by_mode = {mode: [row for row, m in enumerate(modes) if m == mode] for mode in (DENSE, CAPTURE, CONSUME)}
    out.zero_()
    dense(attention, out, by_mode[DENSE], static=False)
    capture(attention, store, retention, out, by_mode[CAPTURE], static=False)
    consume(attention, store, out, by_mode[CONSUME], static=False)


def _mixed_static(
    attention: Attention, row_mode: Tensor, store: Store, retention: Retention, out: Tensor
) -> None:
    """Both paths for all rows, then a choice per row; rows not captured write to slot 0, the dummy."""
    full = (row_mode == DENSE) | (row_mode == CAPTURE)
    reads_all = replace(attention, row_length=torch.where(full, attention.row_length, 0))
    capturing = replace(store, row_slot=torch.where(row_mode == CAPTURE, store.row_slot, 0))
    capture(reads_all, capturing, retention, out, static=True)
    reads_kept = replace(attention, row_length=torch.where(row_mode == CONSUME, attention.row_length, 0))
    corrected = torch.empty_like(out)
    consume(reads_kept, store, corrected, static=True)
    out.copy_(torch.where((row_mode == CONSUME)[:, None, None], corrected, out))


def _gated(attention: Attention, rows: Tensor, result: Tensor) -> Tensor:
    """sigmoid(gate) * result [..., H, D] of rows int64 [...], where there is a gate; inactive rows stay zero."""
    if attention.gate is None:
        return result
    # How a sigmoid is computed on the CPU may follow from where its operand lies in memory.
    share = torch.sigmoid(attention.gate[rows].to(result.dtype).contiguous())
    active = attention.row_length[rows] > 0
    return torch.where(active[..., None, None], share * result, result)


def _static(attention: Attention, static: bool | None) -> bool:
    if static is not None:
        return static
    return attention.q.is_cuda and torch.cuda.is_current_stream_capturing()


def _clear(attention: Attention, out: Tensor, rows: Sequence[int] | None) -> None:
    """Inactive rows belong to no tile, so zeros go in first."""
    if rows is None:
        out.zero_()
    elif len(rows):
        out[torch.tensor(list(rows), device=out.device)] = 0


@dataclass(frozen=True)
class _Keys:
    """A tile's keys: k, v [B, Hkv, N, D] in the compute dtype and their positions int64 [B, N]."""

    k: Tensor
    v: Tensor
    position: Tensor


@dataclass(frozen=True)
class _Attended:
    """The result for one block of rows, in the compute dtype.

    rows int64 [B, R]; scores, probabilities [B, Hkv, R * group, N]; v [B, Hkv, N, D] and position int64
    [B, N] of the keys; output [B, R, H, D].
    """

    rows: Tensor
    scores: Tensor
    probabilities: Tensor
    v: Tensor
    position: Tensor
    output: Tensor


def _attend_all(attention: Attention, rows: Sequence[int] | None, static: bool) -> Iterator[_Attended]:
    # The tiles do not depend on the op, or dense and capture of one batch could round differently.
    for tile in tiles.static_tiles(attention) if static else tiles.host_tiles(attention, rows):
        keys = _gather(attention, tile)
        for block in tile.blocks:
            yield _attend(attention, tile, keys, block)


def _gather(attention: Attention, tile: Tile) -> _Keys:
    """Copy each group's pages out of the pool, once for all its rows."""
    page_size, device = attention.page_size, attention.q.device
    lead = tile.rows[:, 0]
    ends = attention.row_length[tile.rows].long().amax(1)  # [B]
    firsts = attention.row_first[tile.rows].amin(1)  # [B]
    page_number = tile.first_page[:, None] + torch.arange(tile.pages, device=device)  # [B, P]
    live = page_number * page_size < ends[:, None]
    page = look_up_pages(attention.block_table, attention.row_seq[lead].long()[:, None], page_number, live)
    plane = attention.row_plane[lead][:, None, None]
    head = torch.arange(attention.kv_heads, device=device)[None, :, None]
    shape = (lead.shape[0], attention.kv_heads, tile.pages * page_size, attention.head_dim)
    k = attention.k_pool[plane, page[:, None, :], head].reshape(shape).to(attention.compute_dtype)
    v = attention.v_pool[plane, page[:, None, :], head].reshape(shape).to(attention.compute_dtype)
    offset = torch.arange(page_size, device=device)
    position = (page_number[:, :, None] * page_size + offset).flatten(1)  # [B, N]
    unseen = (position >= ends[:, None]) | (position < firsts[:, None])
    # Scores of unseen keys are replaced later; a NaN in v would survive its zero probability.
    return _Keys(k, v.masked_fill_(unseen[:, None, :, None], 0), position)


def _attend(attention: Attention, tile: Tile, keys: _Keys, block: Block) -> _Attended:
    rows = tile.rows[:, block.start : block.stop]
    b, r = rows.shape
    seen = slice(block.first, block.last)
    k, v, position = keys.k[:, :, seen], keys.v[:, :, seen], keys.position[:, seen]
    q = attention.q[rows].to(attention.compute_dtype)  # [B, R, H, D]
    q = q.reshape(b, r, attention.kv_heads, attention.group, attention.head_dim)
    q = q.transpose(1, 2).reshape(b, attention.kv_heads, r * attention.group, attention.head_dim)
    scores = _soft_cap(attention, (q @ k.transpose(2, 3)).mul_(attention.scale))
    if attention.bias is not None:
        scores += _stacked_bias(attention, attention.bias, rows, position)
    length, first = attention.row_length[rows].long(), attention.row_first[rows]  # [B, R]
    hidden = (position[:, None] >= length[..., None]) | (position[:, None] < first[..., None])  # [B, R, N]
    scores.masked_fill_(hidden[:, None].repeat_interleave(attention.group, 2), -torch.inf)
    probabilities = _probabilities(attention, scores, rows)
    output = _heads_last(attention, probabilities @ v, r)
    active = (first < length)[..., None, None]
    return _Attended(rows, scores, probabilities, v, position, torch.where(active, output, 0))


def _probabilities(attention: Attention, scores: Tensor, rows: Tensor) -> Tensor:
    """softmax over scores [B, Hkv, R * group, N] of rows [B, R] and the sink, whose part is left out."""
    if attention.sink is None:
        return torch.softmax(scores, dim=-1)
    sink = attention.sink[rows].to(scores.dtype)  # [B, R, H]
    sink = sink.unflatten(2, (attention.kv_heads, attention.group)).transpose(1, 2).flatten(2)
    return torch.softmax(torch.cat([scores, sink[..., None]], dim=-1), dim=-1)[..., :-1]


def _stacked_bias(attention: Attention, bias: Tensor, rows: Tensor, position: Tensor) -> Tensor:
    """The bias of rows [B, R] and keys [B, N], as scores are laid out: [B, Hkv, R * group, N]."""
    b, r = rows.shape
    at = position.clamp(max=bias.shape[2] - 1)[:, None, None]
    chosen = bias[rows].gather(3, at.expand(b, r, bias.shape[1], -1)).expand(b, r, attention.heads, -1)
    apart = chosen.reshape(b, r, attention.kv_heads, attention.group, -1)
    return apart.transpose(1, 2).flatten(2, 3)


def _heads_last(attention: Attention, stacked: Tensor, r: int) -> Tensor:
    """[B, Hkv, R * group, X] -> [B, R, H, X]."""
    b, _, _, x = stacked.shape
    apart = stacked.reshape(b, attention.kv_heads, r, attention.group, x)
    return apart.transpose(1, 2).reshape(b, r, attention.heads, x)


def _soft_cap(attention: Attention, scores: Tensor) -> Tensor:
    if not attention.softcap:
        return scores
    return scores.div_(attention.softcap).tanh_().mul_(attention.softcap)


def _store_reference(
    attention: Attention, store: Store, retention: Retention, attended: _Attended, output: Tensor
) -> None:
    rows = attended.rows
    b, r = rows.shape
    length = attention.row_length[rows].long()
    counts = retention.count(length)  # [B, R]
    slot = torch.where(length > 0, store.row_slot[rows].long(), 0).flatten()
    if rows.is_cuda:
        torch._assert_async(
            ((counts.flatten() <= store.capacity) | (slot == 0)).all(),
            "capture: a row retains more keys than the reference store's capacity; raise max_context",
        )
    scores = attended.scores
    if retention.first or retention.last:
        always = retention.always(attended.position[:, None], length[..., None])  # [B, R, N]
        scores = scores.masked_fill(always[:, None].repeat_interleave(attention.group, 2), torch.inf)
    kept = _select(scores, counts.repeat_interleave(attention.group, 1)[:, None], retention)
    share = torch.where(kept, attended.probabilities, 0)
    mass = _heads_last(attention, share.sum(-1, keepdim=True), r)  # [B, R, H, 1]
    c_ref = _heads_last(attention, share @ attended.v, r) / mass
    flat = (b * r, attention.heads)
    store.mass[slot, store.site] = mass.reshape(flat)
    store.c_ref[slot, store.site] = c_ref.reshape(*flat, -1)
    store.o_ref[slot, store.site] = output.reshape(*flat, -1)
    store.count[slot, store.site] = counts.flatten().to(store.count.dtype)
    old = store.index[slot, store.site]  # [B * R, H, C], kept where capture has nothing to say
    position = attended.position[:, None, None].expand(kept.shape)
    store.index[slot, store.site] = _compact(
        _heads_last(attention, kept, r).flatten(0, 1),
        _heads_last(attention, position, r).flatten(0, 1),
        counts.reshape(-1, 1, 1),
        old,
    )


def _select(scores: Tensor, counts: Tensor, retention: Retention) -> Tensor:
    """Mask of the `counts` highest scores along the last dimension; among equal scores the lowest positions.

    scores [B, Hkv, R * group, N], masked entries -inf; counts int64 [B, 1, R * group]. All scores above the
    count-th highest are kept, and of those equal to it as many as are missing, in order of position. That is
    a stable descending sort cut at count, without the sort.
    """
    most = retention.count(scores.shape[-1])
    ranked = scores.topk(most, dim=-1).values
    at = (counts - 1).clamp(0, most - 1).expand(scores.shape[:-1])
    threshold = ranked.gather(-1, at[..., None])
    above = scores > threshold
    equal = scores == threshold
    missing = counts[..., None] - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= missing))


def _compact(kept: Tensor, position: Tensor, counts: Tensor, old: Tensor) -> Tensor:
    """`old` [X, H, C] with the positions of kept [X, H, N], ascending, in its first counts [X, 1, 1]."""
    capacity = old.shape[-1]
    rank = kept.cumsum(-1, dtype=torch.int32).long() - 1
    spill = torch.where(kept, rank, capacity).clamp(max=capacity)  # one extra column takes what is not kept
    # Scores of NaN keep nothing; zeros then stand where stale entries would be taken for addresses.
    cleared = torch.where(torch.arange(capacity, device=old.device) < counts, 0, old)
    padded = torch.nn.functional.pad(cleared, (0, 1))
    return padded.scatter_(-1, spill, position.to(old.dtype))[..., :capacity]


def _consume_rows(attention: Attention, store: Store, rows: Tensor, kept: int) -> Tensor:
    """[X, H, D] in the compute dtype for rows int64 [X], reading the first `kept` index entries."""
    dtype, page_size, device = attention.compute_dtype, attention.page_size, attention.q.device
    slot, active = store.row_slot[rows].long(), attention.row_length[rows] > 0
    count = torch.where(active, store.count[slot, store.site], 0)  # [X]
    if rows.is_cuda:
        sound = ((count > 0) & (count <= store.capacity)) | ~active
        torch._assert_async(
            sound.all(), "consume before capture: a row reads an empty slot of the reference store"
        )
    valid = torch.arange(kept, device=device) < count[:, None, None]  # [X, 1, K]
    position = torch.where(valid, store.index[slot, store.site, :, :kept].long(), 0)  # [X, H, K]
    sequence = attention.row_seq[rows].long()[:, None, None]
    page = look_up_pages(attention.block_table, sequence, position // page_size, valid)
    plane = attention.row_plane[rows][:, None, None]
    head = (torch.arange(attention.heads, device=device) // attention.group)[None, :, None]
    k = attention.k_pool[plane, page, head, position % page_size].to(dtype)  # [X, H, K, D]
    v = attention.v_pool[plane, page, head, position % page_size].to(dtype)
    scores = (k @ attention.q[rows].to(dtype)[..., None]).squeeze(-1).mul_(attention.scale)
    scores = _soft_cap(attention, scores)
    if attention.bias is not None:
        scores += attention.bias[rows].expand(-1, attention.heads, -1).gather(2, position)
    scores.masked_fill_(~valid, -torch.inf)
    probabilities = torch.softmax(scores, dim=-1)
    over_kept = (probabilities[:, :, None] @ v.masked_fill_(~valid[..., None], 0)).squeeze(2)
    mass, o_ref, c_ref = (x[slot, store.site].to(dtype) for x in (store.mass, store.o_ref, store.c_ref))
    return torch.where(active[:, None, None], o_ref + mass[..., None] * (over_kept - c_ref), 0)
