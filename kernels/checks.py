"""What a call must satisfy. Shapes, dtypes and devices are checked on every device; values only on the CPU.

Reading a length or a count on the host would make every CUDA step wait for the device, so on CUDA the checks
of values (`check_values`, `check_capture`, `check_consume`) are not made here. The batched implementation
asserts the two that guard the store on the device; the runtime admits only requests for which the others
hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .arguments import CONSUME, Attention, Store, compute_dtype
from .retention import Retention


def check_attention(attention: Attention, k: Tensor, v: Tensor) -> None:
    """Raise ValueError unless q, k, v, the pool and the row tensors fit together."""
    q = attention.q
    _expect(q.dim() == 3, f"q must be [rows, heads, head_dim], got shape {tuple(q.shape)}")
    check_write(
        k,
        v,
        attention.k_pool,
        attention.v_pool,
        attention.block_table,
        _row_tensors(attention),
        rows=q.shape[0],
    )
    _expect(q.shape[2] == k.shape[2], f"q has head_dim {q.shape[2]} but k has {k.shape[2]}")
    _expect(
        q.shape[1] % k.shape[1] == 0,
        f"q has {q.shape[1]} heads, which is no multiple of the {k.shape[1]} key/value heads of k",
    )
    _expect(
        q.dtype == k.dtype, f"q is {q.dtype} but k and the pool are {k.dtype}; convert q to the pool's dtype"
    )
    _expect(q.device == k.device, f"q is on {q.device} but k is on {k.device}")
    _check_gate(attention)
    _expect(attention.window >= 0, f"window={attention.window} must be 0 (none) or a number of keys")
    _expect(attention.softcap >= 0, f"softcap={attention.softcap} must be 0 (none) or positive")


def _check_gate(attention: Attention) -> None:
    q, gate = attention.q, attention.gate
    if gate is None:
        return
    _expect(
        gate.shape == q.shape,
        f"gate must be {list(q.shape)}, as q, got {list(gate.shape)}; expand it to q's shape",
    )
    _expect(gate.dtype == q.dtype, f"gate is {gate.dtype} but q is {q.dtype}; pass gate.to(q.dtype)")
    _expect(
        gate.device == q.device, f"gate is on {gate.device} but q is on {q.device}; move it to q's device"
    )


def check_write(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    row_tensors: dict[str, Tensor],
    rows: int,
) -> None:
    """Raise ValueError unless k, v [rows, Hkv, D] can be written to the pool through these tables."""
    _expect(
        k.dim() == 3 and k.shape == v.shape and k.shape[0] == rows,
        f"k and v must both be [{rows}, kv_heads, head_dim], got {tuple(k.shape)} and {tuple(v.shape)}",
    )
    _expect(
        k_pool.dim() == 5 and k_pool.shape == v_pool.shape,
        "k_pool and v_pool must both be [planes, pages, kv_heads, page_size, head_dim], "
        f"got {tuple(k_pool.shape)} and {tuple(v_pool.shape)}",
    )
    _expect(
        (k_pool.shape[2], k_pool.shape[4]) == tuple(k.shape[1:]),
        f"k has {k.shape[1]} heads of {k.shape[2]}, but the pool holds {k_pool.shape[2]} heads of "
        f"{k_pool.shape[4]}",
    )
    _expect(
        k_pool.data_ptr() != v_pool.data_ptr() or k_pool.numel() == 0, "k_pool and v_pool are the same memory"
    )
    for name, tensor in (("v", v), ("k_pool", k_pool), ("v_pool", v_pool)):
        _expect(tensor.dtype == k.dtype, f"{name} is {tensor.dtype} but k is {k.dtype}; they must agree")
    _expect(
        block_table.dim() == 2, f"block_table must be [sequences, max_pages], got {tuple(block_table.shape)}"
    )
    for name, tensor in row_tensors.items():
        _expect(tuple(tensor.shape) == (rows,), f"{name} must be [{rows}], got {tuple(tensor.shape)}")
    for name, tensor in {"block_table": block_table, **row_tensors}.items():
        _expect(tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}")
        _expect(tensor.device == k.device, f"{name} is on {tensor.device} but k is on {k.device}")
    _expect(k_pool.device == k.device, f"k_pool is on {k_pool.device} but k is on {k.device}")


def check_cached(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, table: Tensor, bias: Tensor | None, sink: Tensor | None
) -> None:
    """Raise ValueError unless q [B, H, D], caches [B, Hkv, S, D], table [B, S], bias [B, H or 1, S] and sink [B, H] fit
    together.
    """
    _expect(q.dim() == 3, f"q must be [rows, heads, head_dim], got shape {tuple(q.shape)}")
    _expect(
        k_cache.dim() == 4 and k_cache.shape == v_cache.shape,
        "k_cache and v_cache must both be [rows, kv_heads, keys, head_dim], "
        f"got {tuple(k_cache.shape)} and {tuple(v_cache.shape)}",
    )
    rows, heads, head_dim = q.shape
    _expect(
        k_cache.shape[0] == rows and k_cache.shape[3] == head_dim,
        f"q is {tuple(q.shape)}, but the caches hold {k_cache.shape[0]} rows of head_dim {k_cache.shape[3]}",
    )
    _expect(
        heads % k_cache.shape[1] == 0,
        f"q has {heads} heads, which is no multiple of the {k_cache.shape[1]} key/value heads of the caches",
    )
    _expect(
        tuple(table.shape) == (rows, k_cache.shape[2]),
        f"table must be [{rows}, {k_cache.shape[2]}], got {tuple(table.shape)}",
    )
    if bias is not None:
        _expect(
            bias.shape in ((rows, 1, table.shape[1]), (rows, heads, table.shape[1])),
            f"bias must be [{rows}, 1 or {heads}, {table.shape[1]}], got {tuple(bias.shape)}",
        )
        _expect(bias.device == q.device, f"bias is on {bias.device} but q is on {q.device}")
    if sink is not None:
        _expect(sink.shape == (rows, heads), f"sink must be [{rows}, {heads}], got {tuple(sink.shape)}")
        _expect(sink.device == q.device, f"sink is on {sink.device} but q is on {q.device}")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        _expect(cache.dtype == q.dtype, f"{name} is {cache.dtype} but q is {q.dtype}; they must agree")
        _expect(cache.device == q.device, f"{name} is on {cache.device} but q is on {q.device}")


def check_rows(attention: Attention) -> None:
    """Raise ValueError unless the table and the row tensors are int32 [T] on q's device; values on the CPU only."""
    for name, tensor in _row_tensors(attention).items():
        _expect(
            tuple(tensor.shape) == (attention.rows,),
            f"{name} must be [{attention.rows}], got {tuple(tensor.shape)}",
        )
    for name, tensor in {"block_table": attention.block_table, **_row_tensors(attention)}.items():
        _expect(tensor.dtype == torch.int32, f"{name} must be int32, got {tensor.dtype}")
        _expect(
            tensor.device == attention.q.device, f"{name} is on {tensor.device}, q on {attention.q.device}"
        )
    if attention.q.device.type == "cpu":
        keys = _table_keys(attention.k_pool, attention.block_table)
        _in_range("length", attention.row_length, 0, keys + 1, "the keys of the cache")
        _in_range("table", attention.block_table, 0, attention.k_pool.shape[1], "the positions of the cache")


def check_store(attention: Attention, store: Store) -> None:
    """Raise ValueError unless the store's tensors fit q and each other."""
    slots, sites = store.count.shape[:2]
    heads, head_dim, capacity = attention.heads, attention.head_dim, store.index.shape[-1]
    wide, model = compute_dtype(attention.q.dtype), attention.q.dtype
    expected: dict[str, tuple[Tensor, tuple[int, ...], torch.dtype]] = {
        "row_slot": (store.row_slot, (attention.rows,), torch.int32),
        "index": (store.index, (slots, sites, heads, capacity), torch.int32),
        "count": (store.count, (slots, sites), torch.int32),
        "mass": (store.mass, (slots, sites, heads), wide),
        "o_ref": (store.o_ref, (slots, sites, heads, head_dim), model),
        "c_ref": (store.c_ref, (slots, sites, heads, head_dim), wide),
    }
    for name, (tensor, shape, dtype) in expected.items():
        _expect(tuple(tensor.shape) == shape, f"{name} must be {list(shape)}, got {list(tensor.shape)}")
        _expect(tensor.dtype == dtype, f"{name} must be {dtype} for {model} queries, got {tensor.dtype}")
        _expect(
            tensor.device == attention.q.device, f"{name} is on {tensor.device}, q on {attention.q.device}"
        )
    _expect(0 <= store.site < sites, f"site={store.site} is not one of the store's {sites} sites")
    _expect(
        attention.window == 0, "a sliding window is for dense sites only; capture and consume see every key"
    )


def check_addresses(
    k_pool: Tensor, block_table: Tensor, row_seq: Tensor, row_position: Tensor, row_plane: Tensor
) -> None:
    """CPU only. Raise ValueError for a row whose plane, sequence or position lies outside its table."""
    _in_range("row_loop (as a plane of the pool)", row_plane, 0, k_pool.shape[0], "the planes of the pool")
    _in_range("row_seq", row_seq, 0, block_table.shape[0], "the lines of block_table")
    _in_range(
        "row_position",
        row_position,
        0,
        _table_keys(k_pool, block_table),
        "the keys that block_table holds per sequence; give it more pages",
    )


def check_values(attention: Attention) -> None:
    """CPU only. `check_addresses`, and every visible length within the block table."""
    check_addresses(
        attention.k_pool,
        attention.block_table,
        attention.row_seq,
        attention.row_position,
        attention.row_plane,
    )
    keys = _table_keys(attention.k_pool, attention.block_table)
    _in_range(
        "row_length",
        attention.row_length,
        0,
        keys + 1,
        f"the block table holds {keys} keys per sequence; give it more pages",
    )


def check_row_mode(attention: Attention, row_mode: Tensor) -> None:
    """Raise ValueError unless row_mode is int32 [T]; on the CPU also for a value other than 0 .. 3."""
    shape = (attention.rows,)
    _expect(
        tuple(row_mode.shape) == shape, f"row_mode must be [{attention.rows}], got {tuple(row_mode.shape)}"
    )
    _expect(row_mode.dtype == torch.int32, f"row_mode must be int32, got {row_mode.dtype}")
    _expect(
        row_mode.device == attention.q.device, f"row_mode is on {row_mode.device}, q on {attention.q.device}"
    )
    if row_mode.device.type == "cpu":
        _in_range("row_mode", row_mode, 0, CONSUME + 1, "inactive, dense, capture, consume")


def check_capture(attention: Attention, store: Store, retention: Retention, rows: Sequence[int]) -> None:
    """CPU only. Raise if an active row of `rows` retains more keys than the store holds, or two share a slot.

    RuntimeError for the count, ValueError for the slots. Slot 0 is the dummy, which anyone may share.
    """
    lengths = attention.row_length.tolist()
    active = [row for row in rows if lengths[row] > 0]
    for row in active:
        count = retention.count(lengths[row])
        if count > store.capacity:
            raise RuntimeError(
                f"capture: row {row} with {lengths[row]} visible keys retains {count} keys per head, but the "
                f"reference store has room for {store.capacity}; raise max_context, which the store's "
                "capacity follows, or lower key_retention"
            )
    slots = [slot for slot in _active_slots(store, active) if slot != 0]
    if len(set(slots)) < len(slots):
        raise ValueError(
            f"capture: active rows share a reference store slot (row_slot {slots}); each needs its own"
        )


def check_consume(attention: Attention, store: Store, rows: Sequence[int]) -> None:
    """CPU only. Raise RuntimeError if an active row of `rows` reads a slot without a capture of this site."""
    lengths = attention.row_length.tolist()
    active = [row for row in rows if lengths[row] > 0]
    slots = _active_slots(store, active)
    counts = store.count[:, store.site].tolist()
    for row, slot in zip(active, slots, strict=True):
        if counts[slot] == 0:
            raise RuntimeError(
                f"consume before capture: row {row} reads slot {slot}, site {store.site}, which holds no "
                "reference; run the capture op of this site first"
            )
        if not 0 < counts[slot] <= store.capacity:
            raise RuntimeError(
                f"consume: slot {slot}, site {store.site} has count {counts[slot]}, outside 1 .. capacity "
                f"{store.capacity}; the reference store is corrupt"
            )


def _active_slots(store: Store, active: Sequence[int]) -> list[int]:
    slots = store.row_slot.tolist()
    for row in active:
        if not 0 <= slots[row] < store.count.shape[0]:
            raise ValueError(
                f"row_slot[{row}]={slots[row]} is not one of the store's {store.count.shape[0]} slots"
            )
    return [slots[row] for row in active]


def _row_tensors(attention: Attention) -> dict[str, Tensor]:
    names = ("row_seq", "row_position", "row_length", "row_loop")
    return {name: getattr(attention, name) for name in names}


def _table_keys(k_pool: Tensor, block_table: Tensor) -> int:
    return block_table.shape[1] * k_pool.shape[3]


def _in_range(name: str, tensor: Tensor, low: int, high: int, unit: str) -> None:
    if tensor.numel() == 0:
        return
    least, most = (int(x) for x in tensor.aminmax())
    if least < low or most >= high:
        raise ValueError(f"{name} has values {least} .. {most}, outside {low} .. {high - 1}: {unit}")


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
