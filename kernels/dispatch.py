"""The real implementations behind the op schemas: check, write the new keys and values, then attend.

Checks come before the first write, so a refused call changes nothing. The functions take the tensors in
schema order.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
from typing import Any, Protocol

import torch
from torch import Tensor

from . import batched, checks, reference
from .arguments import CAPTURE, CONSUME, IMPLEMENTATIONS, Attention, Store, allocate_output
from .paging import write_rows
from .retention import Retention

_PLAN = ("k_pool", "v_pool", "block_table", "row_seq", "row_position", "row_length", "row_loop")
_STORE = ("row_slot", "index", "count", "mass", "o_ref", "c_ref")
"""Tensor arguments after q, k, v, in schema order; the mixed op has row_mode behind row_slot. A gate may follow."""


@functools.cache
def triton_obstacle(device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """Why the Triton kernels cannot run such a call; "" where they can.

    On the CPU they run in Triton's interpreter only, which TRITON_INTERPRET=1 switches on for the whole process.
    """
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "its kernels need a CUDA device, or TRITON_INTERPRET=1 to be interpreted"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"there are no kernels for {dtype}"
    if head_dim > 256:
        return f"head_dim {head_dim} is above 256"
    return ""


class Implementation(Protocol):
    """What a module must offer to serve the ops. Each function fills `out`; it leaves the pool alone, unless
    `WRITES_KEYS` says that it stores the rows' k and v itself.
    """

    WRITES_KEYS: bool

    def dense(self, attention: Attention, out: Tensor) -> None: ...

    def capture(self, attention: Attention, store: Store, retention: Retention, out: Tensor) -> None: ...

    def consume(self, attention: Attention, store: Store, out: Tensor) -> None: ...

    def mixed(
        self,
        attention: Attention,
        row_mode: Tensor,
        store: Store,
        retention: Retention,
        out: Tensor,
        *,
        captures: bool,
    ) -> None: ...


def resolve(name: str, device_type: str, dtype: torch.dtype, head_dim: int) -> str:
    """The implementation that runs for `name`: "reference", "batched" or "triton".

    "auto" is Triton on other devices than the CPU where its kernels can run such a call, else "batched". Raises
    ValueError for an unknown name, and for "triton" where it cannot run; the message says why.
    """
    if name not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"implementation={name!r} is unknown; choose one of {known}")
    if name in ("reference", "batched") or (name == "auto" and device_type == "cpu"):
        return "batched" if name == "auto" else name
    obstacle = triton_obstacle(device_type, dtype, head_dim)
    if obstacle and name == "triton":
        raise ValueError(f'implementation="triton" cannot run here: {obstacle}; use implementation="batched"')
    return "batched" if obstacle else "triton"


def choose(name: str, attention: Attention) -> Implementation:
    """The implementation that serves a call, by `resolve`."""
    chosen = resolve(name, attention.q.device.type, attention.q.dtype, attention.head_dim)
    if chosen == "triton":
        return importlib.import_module(".triton_backend", __package__)
    return reference if chosen == "reference" else batched


def kv_write(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    row_seq: Tensor,
    row_position: Tensor,
    row_loop: Tensor,
    *,
    plane: int,
    plane_stride: int,
) -> None:
    rows = {"row_seq": row_seq, "row_position": row_position, "row_loop": row_loop}
    checks.check_write(k, v, k_pool, v_pool, block_table, rows, rows=k.shape[0])
    row_plane = plane + plane_stride * row_loop.long()
    if k.device.type == "cpu":
        checks.check_addresses(k_pool, block_table, row_seq, row_position, row_plane)
    write_rows(k, v, k_pool, v_pool, block_table, row_seq, row_position, row_plane)


def dense(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor, implementation: str, **settings: Any) -> Tensor:
    attention = Attention(q=q, k=k, v=v, **_named(_PLAN, tensors), **settings)
    chosen = choose(implementation, attention)
    _check(attention, k, v)
    _write(chosen, attention, k, v)
    out = allocate_output(q)
    chosen.dense(attention, out)
    return out


def capture(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *tensors: Tensor,
    site: int,
    retention_num: int,
    retention_den: int,
    implementation: str,
    keep_first: int = 0,
    keep_last: int = 0,
    **settings: Any,
) -> Tensor:
    attention, store = _operands(q, k, v, tensors, site, settings)
    chosen = choose(implementation, attention)
    retention = Retention(retention_num, retention_den, keep_first, keep_last)
    _check(attention, k, v, store)
    if q.device.type == "cpu":
        checks.check_capture(attention, store, retention, range(attention.rows))
    _write(chosen, attention, k, v)
    out = allocate_output(q)
    chosen.capture(attention, store, retention, out)
    return out


def consume(
    q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor, site: int, implementation: str, **settings: Any
) -> Tensor:
    attention, store = _operands(q, k, v, tensors, site, settings)
    chosen = choose(implementation, attention)
    _check(attention, k, v, store)
    if q.device.type == "cpu":
        checks.check_consume(attention, store, range(attention.rows))
    _write(chosen, attention, k, v)
    out = allocate_output(q)
    chosen.consume(attention, store, out)
    return out


def mixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *tensors: Tensor,
    site: int,
    retention_num: int,
    retention_den: int,
    implementation: str,
    captures: bool = True,
    keep_first: int = 0,
    keep_last: int = 0,
    **settings: Any,
) -> Tensor:
    mode_at = len(_PLAN) + 1
    row_mode = tensors[mode_at]
    attention, store = _operands(q, k, v, tensors[:mode_at] + tensors[mode_at + 1 :], site, settings)
    chosen = choose(implementation, attention)
    retention = Retention(retention_num, retention_den, keep_first, keep_last)
    _check(attention, k, v, store)
    checks.check_row_mode(attention, row_mode)
    if q.device.type == "cpu":
        modes = row_mode.tolist()
        checks.check_capture(
            attention, store, retention, [row for row, m in enumerate(modes) if m == CAPTURE]
        )
        checks.check_consume(attention, store, [row for row, m in enumerate(modes) if m == CONSUME])
    _write(chosen, attention, k, v)
    out = allocate_output(q)
    chosen.mixed(attention, row_mode, store, retention, out, captures=captures)
    return out


def site(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None = None, *, scale: float, window: int, softcap: float
) -> Tensor:
    raise RuntimeError(
        "sparse_compile::site was executed: it only marks an attention call while a model is traced, and "
        "this graph was never "
        "rewritten; run the passes that replace markers by attention ops before running the graph"
    )


def _operands(
    q: Tensor, k: Tensor, v: Tensor, tensors: tuple[Tensor, ...], site: int, settings: dict[str, Any]
) -> tuple[Attention, Store]:
    named = _named(_PLAN + _STORE, tensors)
    store = Store(site=site, **{name: named.pop(name) for name in _STORE})
    return Attention(q=q, k=k, v=v, **named, **settings), store


def _named(names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """The tensors by name; behind those of `names` there may be a gate."""
    if len(tensors) > len(names):
        names = (*names, "gate")
    return dict(zip(names, tensors, strict=True))


def _check(attention: Attention, k: Tensor, v: Tensor, store: Store | None = None) -> None:
    checks.check_attention(attention, k, v)
    if store is not None:
        checks.check_store(attention, store)
    if attention.q.device.type == "cpu":
        checks.check_values(attention)


def _write(chosen: Implementation, attention: Attention, k: Tensor, v: Tensor) -> None:
    if chosen.WRITES_KEYS:
        return
    write_rows(
        k,
        v,
        attention.k_pool,
        attention.v_pool,
        attention.block_table,
        attention.row_seq,
        attention.row_position,
        attention.row_plane,
    )
