"""The real implementations behind the op schemas: check, write the new keys and values, then attend.

Checks come before the first write, so a refused call changes nothing. The functions take the tensors in
schema order.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from . import batched, checks, reference
from .arguments import CAPTURE, CONSUME, IMPLEMENTATIONS, Attention, Store, allocate_output
from .paging import write_rows
from .retention import Retention

_PLAN = ("k_pool", "v_pool", "block_table", "row_seq", "row_position", "row_length", "row_loop")
_STORE = ("row_slot", "index", "count", "mass", "o_ref", "c_ref")
"""Tensor arguments after q, k, v, in schema order; the mixed op has row_mode behind row_slot."""


class Implementation(Protocol):
    """What a module must offer to serve the ops. Each function fills `out` and leaves the pool alone."""

    def dense(self, attention: Attention, out: Tensor) -> None: ...

    def capture(self, attention: Attention, store: Store, retention: Retention, out: Tensor) -> None: ...

    def consume(self, attention: Attention, store: Store, out: Tensor) -> None: ...

    def mixed(
        self, attention: Attention, row_mode: Tensor, store: Store, retention: Retention, out: Tensor
    ) -> None: ...


def resolve(name: str) -> str:
    """The name of the implementation that runs for `name`: "auto" is "batched". Raises as `choose` does."""
    choose(name)
    return "batched" if name == "auto" else name


def choose(name: str) -> Implementation:
    """The implementation called `name`; "auto" is "batched".

    Raises ValueError for an unknown name and NotImplementedError for "triton", whose kernels do not exist
    yet.
    """
    if name == "reference":
        return reference
    if name in ("batched", "auto"):
        return batched
    if name == "triton":
        raise NotImplementedError('implementation="triton" has no kernels yet; use implementation="batched"')
    raise ValueError(
        f"implementation={name!r} is unknown; choose one of {', '.join(map(repr, IMPLEMENTATIONS))}"
    )


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
    chosen = choose(implementation)
    attention = Attention(q=q, **_named(_PLAN, tensors), **settings)
    _check(attention, k, v)
    _write(attention, k, v)
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
    **settings: Any,
) -> Tensor:
    chosen = choose(implementation)
    attention, store = _operands(q, tensors, site, settings)
    retention = Retention(retention_num, retention_den)
    _check(attention, k, v, store)
    if q.device.type == "cpu":
        checks.check_capture(attention, store, retention, range(attention.rows))
    _write(attention, k, v)
    out = allocate_output(q)
    chosen.capture(attention, store, retention, out)
    return out


def consume(
    q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor, site: int, implementation: str, **settings: Any
) -> Tensor:
    chosen = choose(implementation)
    attention, store = _operands(q, tensors, site, settings)
    _check(attention, k, v, store)
    if q.device.type == "cpu":
        checks.check_consume(attention, store, range(attention.rows))
    _write(attention, k, v)
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
    **settings: Any,
) -> Tensor:
    chosen = choose(implementation)
    mode_at = len(_PLAN) + 1
    row_mode = tensors[mode_at]
    attention, store = _operands(q, tensors[:mode_at] + tensors[mode_at + 1 :], site, settings)
    retention = Retention(retention_num, retention_den)
    _check(attention, k, v, store)
    checks.check_row_mode(attention, row_mode)
    if q.device.type == "cpu":
        modes = row_mode.tolist()
        checks.check_capture(
            attention, store, retention, [row for row, m in enumerate(modes) if m == CAPTURE]
        )
        checks.check_consume(attention, store, [row for row, m in enumerate(modes) if m == CONSUME])
    _write(attention, k, v)
    out = allocate_output(q)
    chosen.mixed(attention, row_mode, store, retention, out)
    return out


def site(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int, softcap: float) -> Tensor:
    raise RuntimeError(
        "sparse_compile::site was executed: it only marks an attention call while a model is traced, and "
        "this graph was never "
        "rewritten; run the passes that replace markers by attention ops before running the graph"
    )


def _operands(
    q: Tensor, tensors: tuple[Tensor, ...], site: int, settings: dict[str, Any]
) -> tuple[Attention, Store]:
    named = _named(_PLAN + _STORE, tensors)
    store = Store(site=site, **{name: named.pop(name) for name in _STORE})
    return Attention(q=q, **named, **settings), store


def _named(names: tuple[str, ...], tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    return dict(zip(names, tensors, strict=True))


def _check(attention: Attention, k: Tensor, v: Tensor, store: Store | None = None) -> None:
    checks.check_attention(attention, k, v)
    if store is not None:
        checks.check_store(attention, store)
    if attention.q.device.type == "cpu":
        checks.check_values(attention)


def _write(attention: Attention, k: Tensor, v: Tensor) -> None:
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
