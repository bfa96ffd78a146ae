"""Schemas and fakes of `torch.ops.sparse_compile.*`. Importing this module registers the ops, their real
implementations too.

    kv_write  store k, v of all rows in the pool
    dense     write k, v, then attend to all visible keys
    capture   dense, and the reference of each row written to its slot of the store
    consume   write k, v, then attend to the captured keys only, corrected to the reference
    mixed     each row by row_mode: 0 inactive, 1 dense, 2 capture, 3 consume
    site      a marker that stands for an attention call while a model is traced; it cannot run

For one decode step over caches `[B, Hkv, S, D]` that already hold the step's own keys (`cached`):

    visible_keys    a mask as a list of visible positions per row
    cached_dense    attend to all visible keys
    cached_capture  the same, and the reference of each row as fresh tensors
    cached_consume  attend to the captured keys only, corrected to the reference

Tensor arguments come in the field order of `arguments.Attention` and `arguments.Store`; shapes are described
there. A schema names what the op mutates; results are fresh contiguous memory of q's shape and dtype and
alias no input. Inputs may have any strides. All rows' k and v are written before any row attends, so the rows
of one prefill chunk see each other. `implementation` is one of `arguments.IMPLEMENTATIONS`. `query_rows` is what the
caller promises of the rows: 0 nothing, 1 that none reads a key that another one writes (rows of different sequences, or
at different loops), R > 1 that each R consecutive rows belong to one sequence and loop. `captures=False` promises that
no row of a mixed call has mode capture. `keep_first` and `keep_last`: so many of the first and last visible keys are
retained whatever their scores (`retention.Retention`). With `gate` [T, H, D], of q's dtype, dense, capture, consume and
mixed return sigmoid(gate) times their result, computed before the one rounding; O_ref, C_ref and mass in the store are
those without a gate. The ops are for inference and define no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import cached, dispatch
from .arguments import allocate_output
from .retention import Retention

NAMESPACE = "sparse_compile"

_ROWS = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor block_table, "
    "Tensor row_seq, Tensor row_position, Tensor row_length, Tensor row_loop"
)
_STORE_WRITTEN = (
    "Tensor row_slot, Tensor(c!) index, Tensor(d!) count, Tensor(e!) mass, Tensor(f!) o_ref, Tensor(g!) c_ref"
)
_STORE_READ = "Tensor row_slot, Tensor index, Tensor count, Tensor mass, Tensor o_ref, Tensor c_ref"
_GATE = "Tensor? gate=None"
_PLANE = "int plane, int plane_stride"
_RETENTION = "int retention_num, int retention_den"
_HOW = "str implementation, int query_rows=0"
_ALWAYS = "int keep_first=0, int keep_last=0"
_CACHED = "Tensor q, Tensor k_cache, Tensor v_cache, Tensor table, Tensor length, Tensor row, Tensor? bias"
_CACHED_HOW = "float scale, float softcap, str implementation"
_HELD = "Tensor index, Tensor count, Tensor mass, Tensor o_ref, Tensor c_ref"

SCHEMAS = {
    "kv_write": (
        "(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor block_table, "
        f"Tensor row_seq, Tensor row_position, Tensor row_loop, *, {_PLANE}) -> ()"
    ),
    "dense": f"({_ROWS}, {_GATE}, *, {_PLANE}, float scale, int window, float softcap, {_HOW}) -> Tensor",
    "capture": (
        f"({_ROWS}, {_STORE_WRITTEN}, {_GATE}, *, {_PLANE}, int site, float scale, float softcap, {_RETENTION}, "
        f"{_HOW}, {_ALWAYS}) -> Tensor"
    ),
    "consume": (
        f"({_ROWS}, {_STORE_READ}, {_GATE}, *, {_PLANE}, int site, float scale, float softcap, {_HOW}) -> Tensor"
    ),
    "mixed": (
        f"({_ROWS}, {_STORE_WRITTEN.replace('row_slot,', 'row_slot, Tensor row_mode,')}, {_GATE}, *, {_PLANE}, "
        f"int site, float scale, float softcap, {_RETENTION}, {_HOW}, bool captures=True, {_ALWAYS}) -> Tensor"
    ),
    "site": f"(Tensor q, Tensor k, Tensor v, {_GATE}, *, float scale, int window, float softcap) -> Tensor",
    "cached_dense": f"({_CACHED}, Tensor? sink, *, {_CACHED_HOW}) -> Tensor",
    "cached_capture": (
        f"({_CACHED}, Tensor? sink, Tensor slot, *, {_RETENTION}, {_CACHED_HOW}, {_ALWAYS}) -> "
        "(Tensor out, Tensor index, Tensor count, Tensor mass, Tensor o_ref, Tensor c_ref)"
    ),
    "cached_consume": f"({_CACHED}, Tensor slot, {_HELD}, *, {_CACHED_HOW}) -> Tensor",
}
"""Op name -> schema without the name."""


def _fake_write(*_: Any, **__: Any) -> None:
    return None


def _fake_attention(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return allocate_output(q)


def _fake_cached_capture(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    *_: Any,
    retention_num: int,
    retention_den: int,
    keep_first: int = 0,
    keep_last: int = 0,
    **__: Any,
) -> tuple[Tensor, ...]:
    retention = Retention(retention_num, retention_den, keep_first, keep_last)
    return allocate_output(q), *cached.allocate_store(q, table, retention)


_FAKES = {"kv_write": _fake_write, "cached_capture": _fake_cached_capture}
_REAL = {"cached_dense": cached.dense, "cached_capture": cached.capture, "cached_consume": cached.consume}


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for backend in ("CPU", "CUDA"):
            library.impl(name, _REAL.get(name) or getattr(dispatch, name), backend)
        torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES.get(name, _fake_attention), lib=library)
    library.define("visible_keys(Tensor visible) -> (Tensor table, Tensor length, Tensor row, Tensor slot)")
    library.impl("visible_keys", cached.visible_keys, "CompositeImplicitAutograd")
    return library


_LIBRARY = _register()  # the registration lives as long as this object
