"""The definition of every attention op: one row and one head at a time, in plain torch.

For one query row and one head with N visible keys and scores s_j = scale * q.k_j (soft-capped if asked):

    dense     p = softmax(s);  O = sum_j p_j v_j
    capture   O, and beside it  S = the k largest scores (ties: the lowest position), k = ceil(N * retention), and
              of the first and the last keys as many as are asked for in any case,
              m = sum_S p_j,  C_ref = (sum_S p_j v_j) / m,  O_ref = O as rounded to the model's dtype
    consume   p' = softmax over S alone, with this loop's q, K, V;  T = sum_S p'_j v'_j,
              result = O_ref + m * (T - C_ref)
    gate      any of them times sigmoid(gate), where one is given; O_ref, C_ref and m are those without

The correction by m * (T - C_ref) is FlashLoop's (Yang & Liu 2026). S is taken by score, which orders the
probabilities without the ties that underflow would make. The arithmetic runs in `dtype`: by default float64
for float64 inputs and float32 otherwise; only the result is rounded to q's dtype. The functions fill `out`
[T, H, D]; rows of length 0 become zeros and touch nothing else.

Other implementations are compared with this file. It is meant to be read, not to be fast.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import CAPTURE, CONSUME, DENSE, Attention, Store
from .paging import look_up_pages
from .retention import Retention

WRITES_KEYS = False  # the dispatch stores k and v before it calls these functions


def dense(attention: Attention, out: Tensor, dtype: torch.dtype | None = None) -> None:
    """Softmax attention over all visible keys."""
    for row in range(attention.rows):
        out[row] = _gated(attention, row, _dense_row(attention, row, dtype))


def capture(
    attention: Attention, store: Store, retention: Retention, out: Tensor, dtype: torch.dtype | None = None
) -> None:
    """Dense, and the reference of each row written to its slot of the store."""
    for row in range(attention.rows):
        out[row] = _gated(attention, row, _capture_row(attention, store, retention, row, dtype))


def consume(attention: Attention, store: Store, out: Tensor, dtype: torch.dtype | None = None) -> None:
    """Attention over the captured keys only, corrected to the dense output of the capturing loop."""
    for row in range(attention.rows):
        out[row] = _gated(attention, row, _consume_row(attention, store, row, dtype))


def mixed(
    attention: Attention,
    row_mode: Tensor,
    store: Store,
    retention: Retention,
    out: Tensor,
    dtype: torch.dtype | None = None,
    captures: bool = True,
) -> None:
    """Each row by its mode: 0 inactive, 1 dense, 2 capture, 3 consume. `captures` saves nothing here."""
    for row, mode in enumerate(row_mode.tolist()):
        if mode == DENSE:
            out[row] = _gated(attention, row, _dense_row(attention, row, dtype))
        elif mode == CAPTURE:
            out[row] = _gated(attention, row, _capture_row(attention, store, retention, row, dtype))
        elif mode == CONSUME:
            out[row] = _gated(attention, row, _consume_row(attention, store, row, dtype))
        else:
            out[row] = 0


def _gated(attention: Attention, row: int, result: Tensor) -> Tensor:
    """sigmoid(gate) * result [H, D], in the dtype of the result, where there is a gate and the row sees a key."""
    if attention.gate is None or int(attention.row_length[row]) == 0:
        return result
    # How a sigmoid is computed on the CPU may follow from where its operand lies in memory.
    return torch.sigmoid(attention.gate[row].to(result.dtype).contiguous()) * result


def _dense_row(attention: Attention, row: int, dtype: torch.dtype | None) -> Tensor:
    """O [H, D] in the compute dtype."""
    first, length = _visible(attention, row)
    if length == 0:
        return torch.zeros_like(attention.q[row])
    positions = torch.arange(first, length, device=attention.q.device)
    heads = []
    for head in range(attention.heads):
        query, keys, values = _operands(attention, row, head, positions, dtype)
        scores = _scores(attention, row, head, query, keys, positions)
        probabilities = _probabilities(attention, row, head, scores)
        heads.append(probabilities @ values)
    return torch.stack(heads)


def _capture_row(
    attention: Attention, store: Store, retention: Retention, row: int, dtype: torch.dtype | None
) -> Tensor:
    """O [H, D] in the compute dtype; writes S, k, m, C_ref and, as rounded to the model's dtype, O_ref."""
    output = _dense_row(attention, row, dtype)
    _, length = _visible(attention, row)
    if length == 0:
        return output
    slot, site, count = int(store.row_slot[row]), store.site, retention.count(length)
    positions = torch.arange(length, device=attention.q.device)
    for head in range(attention.heads):
        query, keys, values = _operands(attention, row, head, positions, dtype)
        scores = _scores(attention, row, head, query, keys, positions)
        probabilities = _probabilities(attention, row, head, scores)
        wanted = scores.masked_fill(retention.always(positions, length), torch.inf)
        kept = torch.sort(wanted, descending=True, stable=True).indices[:count].sort().values
        mass = probabilities[kept].sum()
        store.index[slot, site, head, :count] = kept.to(store.index.dtype)
        store.mass[slot, site, head] = mass
        store.c_ref[slot, site, head] = (probabilities[kept] @ values[kept]) / mass
    store.count[slot, site] = count
    store.o_ref[slot, site] = output
    return output


def _consume_row(attention: Attention, store: Store, row: int, dtype: torch.dtype | None) -> Tensor:
    """O_ref + m * (T - C_ref) [H, D] in the compute dtype."""
    _, length = _visible(attention, row)
    if length == 0:
        return torch.zeros_like(attention.q[row])
    slot, site = int(store.row_slot[row]), store.site
    count = int(store.count[slot, site])
    heads = []
    for head in range(attention.heads):
        positions = store.index[slot, site, head, :count].long()
        query, keys, values = _operands(attention, row, head, positions, dtype)
        scores = _scores(attention, row, head, query, keys, positions)
        over_kept = torch.softmax(scores, dim=0) @ values
        mass, o_ref, c_ref = (
            x[slot, site, head].to(query.dtype) for x in (store.mass, store.o_ref, store.c_ref)
        )
        heads.append(o_ref + mass * (over_kept - c_ref))
    return torch.stack(heads)


def _visible(attention: Attention, row: int) -> tuple[int, int]:
    """(first visible key, row length) of a row."""
    length, position = int(attention.row_length[row]), int(attention.row_position[row])
    first = max(0, position - attention.window + 1) if attention.window else 0
    return first, length


def _operands(
    attention: Attention, row: int, head: int, positions: Tensor, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The query [D] and the keys and values [N, D] at `positions` of one row and query head, in the compute
    dtype.
    """
    dtype = dtype or attention.compute_dtype
    page_size = attention.page_size
    plane = attention.plane + attention.plane_stride * int(attention.row_loop[row])
    kv_head = head // attention.group
    pages = look_up_pages(attention.block_table, attention.row_seq[row].long(), positions // page_size)
    keys = attention.k_pool[plane, pages, kv_head, positions % page_size]
    values = attention.v_pool[plane, pages, kv_head, positions % page_size]
    return attention.q[row, head].to(dtype), keys.to(dtype), values.to(dtype)


def _probabilities(attention: Attention, row: int, head: int, scores: Tensor) -> Tensor:
    """softmax over all scores [N] and the sink, if there is one; what the sink takes is left out."""
    if attention.sink is None:
        return torch.softmax(scores, dim=0)
    sink = attention.sink[row, head].to(scores.dtype)
    return torch.softmax(torch.cat([scores, sink[None]]), dim=0)[:-1]


def _scores(
    attention: Attention, row: int, head: int, query: Tensor, keys: Tensor, positions: Tensor
) -> Tensor:
    """scale * q.k_j, soft-capped, with the bias of each key [N]."""
    scores = attention.scale * (keys @ query)
    if attention.softcap:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    if attention.bias is not None:
        scores = scores + attention.bias[row, head if attention.bias.shape[1] > 1 else 0, positions]
    return scores
