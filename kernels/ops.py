"""Schemas and fakes of `torch.ops.sparse_compile.*`. Importing this module registers the ops, their real
implementations too.

    kv_write  store k, v of all rows in the pool
    dense     write k, v, then attend to all visible keys
    capture   dense, and the reference of each row written to its slot of the store
    consume   write k, v, then attend to the captured keys only, corrected to the reference
    mixed     each row by row_mode: 0 inactive, 1 dense, 2 capture, 3 consume
    site      a marker that stands for an attention call while a model is traced; it cannot run

Tensor arguments come in the field order of `arguments.Attention` and `arguments.Store`; shapes are described
there. A schema names what the op mutates; results are fresh contiguous memory of q's shape and dtype and
alias no input. Inputs may have any strides. All rows' k and v are written before any row attends, so the rows
of one prefill chunk see each other. `implementation` is one of `arguments.IMPLEMENTATIONS`. `query_rows` is what the
caller promises of the rows: 0 nothing, 1 that no two rows belong to one sequence, R > 1 that each R consecutive rows
belong to one. `captures=False` promises that no row of a mixed call has mode capture. The ops are for inference and
define no gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import dispatch
from .arguments import allocate_output

NAMESPACE = "sparse_compile"

_ROWS = (
    "Tensor q, Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor block_table, "
    "Tensor row_seq, Tensor row_position, Tensor row_length, Tensor row_loop"
)
_STORE_WRITTEN = (
    "Tensor row_slot, Tensor(c!) index, Tensor(d!) count, Tensor(e!) mass, Tensor(f!) o_ref, Tensor(g!) c_ref"
)
_STORE_READ = "Tensor row_slot, Tensor index, Tensor count, Tensor mass, Tensor o_ref, Tensor c_ref"
_PLANE = "int plane, int plane_stride"
_RETENTION = "int retention_num, int retention_den"
_HOW = "str implementation, int query_rows=0"

SCHEMAS = {
    "kv_write": (
        "(Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor block_table, "
        f"Tensor row_seq, Tensor row_position, Tensor row_loop, *, {_PLANE}) -> ()"
    ),
    "dense": f"({_ROWS}, *, {_PLANE}, float scale, int window, float softcap, {_HOW}) -> Tensor",
    "capture": (
        f"({_ROWS}, {_STORE_WRITTEN}, *, {_PLANE}, int site, float scale, float softcap, {_RETENTION}, "
        f"{_HOW}) -> Tensor"
    ),
    "consume": (
        f"({_ROWS}, {_STORE_READ}, *, {_PLANE}, int site, float scale, float softcap, {_HOW}) -> Tensor"
    ),
    "mixed": (
        f"({_ROWS}, {_STORE_WRITTEN.replace('row_slot,', 'row_slot, Tensor row_mode,')}, *, {_PLANE}, "
        f"int site, float scale, float softcap, {_RETENTION}, {_HOW}, bool captures=True) -> Tensor"
    ),
    "site": "(Tensor q, Tensor k, Tensor v, *, float scale, int window, float softcap) -> Tensor",
}
"""Op name -> schema without the name."""


def _fake_write(*_: Any, **__: Any) -> None:
    return None


def _fake_attention(q: Tensor, *_: Any, **__: Any) -> Tensor:
    return allocate_output(q)


def _register() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        for backend in ("CPU", "CUDA"):
            library.impl(name, getattr(dispatch, name), backend)
        fake = _fake_write if name == "kv_write" else _fake_attention
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return library


_LIBRARY = _register()  # the registration lives as long as this object
