"""Random inputs for the attention ops.

A `Case` holds what an op takes, and the keys and values of each sequence in plain [length, Hkv, D] tensors,
from which the oracles compute. Everything that no row may read is poisoned: pages with NaN, unused entries of
the block table and the store with absurd numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import sparse_compile.kernels.ops  # noqa: F401  (registers the ops)
from sparse_compile.kernels.arguments import Attention, Store, compute_dtype
from sparse_compile.kernels.retention import Retention

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
BOTH = ("reference", "batched")
GARBAGE = 2_000_000_000
"""Poison for integers: far outside every table."""

PLANE, PLANE_STRIDE, SITE, SITES = 1, 2, 1, 3
DUMMY_SEQ = DUMMY_PAGE = DUMMY_SLOT = 0
HEADS = [(4, 4), (3, 1), (10, 2), (7, 1), (8, 1), (16, 2), (1, 1)]
HEAD_DIMS = [8, 12, 72, 80, 96]


@dataclass(frozen=True)
class Shape:
    """What to build: `sequences` lists (length, rows); the last `rows` positions of each are the new rows."""

    sequences: tuple[tuple[int, int], ...]
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 8
    page_size: int = 4
    padding: int = 0
    loops: int = 1
    prefix: bool = False  # prefix-LM: every new row sees the whole sequence
    window: int = 0
    softcap: float = 0.0
    retention: str = "0.3"
    keep_first: int = 0
    keep_last: int = 0
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    seed: int = 0
    gated: bool = False
    integers: bool = False  # small integers: scores are exact in every dtype and tie often


@dataclass
class Case:
    shape: Shape
    q: Tensor
    k: Tensor
    v: Tensor
    pool: dict[str, Tensor]
    plan: dict[str, Tensor]
    store: dict[str, Tensor]
    row_mode: Tensor
    keys: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (plane, sequence) -> [length, Hkv, D]
    values: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    scale: float = 0.3
    gate: Tensor | None = None

    @property
    def ungated(self) -> Case:
        """The same inputs, in the same memory, without the gate."""
        return replace(self, gate=None)

    @property
    def retention(self) -> Retention:
        return Retention.of(self.shape.retention, first=self.shape.keep_first, last=self.shape.keep_last)

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def fresh(self) -> tuple[str, ...]:
        """Names of what each row brings along."""
        return ("q", "k", "v") if self.gate is None else ("q", "k", "v", "gate")

    def copy(self) -> Case:
        """The same inputs in memory of its own for everything that ops write."""
        pool, store = ({name: t.clone() for name, t in held.items()} for held in (self.pool, self.store))
        return replace(self, pool=pool, store=store)

    def select(self, rows: list[int]) -> Case:
        """Only these rows, over the same pool and store."""
        at = torch.tensor(rows, dtype=torch.int64, device=self.q.device)
        plan = {name: t if name == "block_table" else t[at] for name, t in self.plan.items()}
        store = self.store | {"row_slot": self.store["row_slot"][at]}
        qkv = {name: getattr(self, name)[at] for name in self.fresh}
        return replace(self, plan=plan, store=store, row_mode=self.row_mode[at], **qkv)

    def to(self, dtype: torch.dtype) -> Case:
        """Inputs and store converted; what is an integer stays."""

        def convert(t: Tensor) -> Tensor:
            return t.to(dtype) if t.is_floating_point() else t.clone()

        changed: dict[str, Any] = {name: convert(getattr(self, name)) for name in self.fresh}
        for name in ("pool", "store", "keys", "values"):
            changed[name] = {key: convert(t) for key, t in getattr(self, name).items()}
        return replace(self, shape=replace(self.shape, dtype=dtype), **changed)

    @property
    def attention(self) -> Attention:
        return Attention(
            q=self.q,
            **self.pool,
            **self.plan,
            plane=PLANE,
            plane_stride=PLANE_STRIDE,
            scale=self.scale,
            window=self.shape.window,
            softcap=self.shape.softcap,
            gate=self.gate,
        )

    @property
    def store_view(self) -> Store:
        return Store(**self.store, site=SITE)


def arguments(
    case: Case, op: str, implementation: str = "batched"
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments of `torch.ops.sparse_compile.<op>`."""
    planes = {"plane": PLANE, "plane_stride": PLANE_STRIDE}
    if op == "kv_write":
        rows = [case.plan[name] for name in ("block_table", "row_seq", "row_position", "row_loop")]
        return (case.k, case.v, *case.pool.values(), *rows), planes
    args = (case.q, case.k, case.v, *case.pool.values(), *case.plan.values())
    gate = () if case.gate is None else (case.gate,)
    kwargs = planes | {"scale": case.scale, "softcap": case.shape.softcap, "implementation": implementation}
    if op == "dense":
        return (*args, *gate), kwargs | {"window": case.shape.window}
    slot, *store = case.store.values()
    store = [slot, case.row_mode, *store] if op == "mixed" else [slot, *store]
    kwargs |= {"site": SITE}
    if op in ("capture", "mixed"):
        kwargs |= {"retention_num": case.retention.numerator, "retention_den": case.retention.denominator}
        kwargs |= {"keep_first": case.shape.keep_first, "keep_last": case.shape.keep_last}
    return (*args, *store, *gate), kwargs


def call(case: Case, op: str, implementation: str = "batched") -> Tensor:
    """Run an op on the case's own memory."""
    args, kwargs = arguments(case, op, implementation)
    return getattr(torch.ops.sparse_compile, op)(*args, **kwargs)


def build(shape: Shape) -> Case:
    generator = torch.Generator().manual_seed(shape.seed)
    heads, kv_heads = shape.heads
    planes = PLANE + PLANE_STRIDE * shape.loops

    def random(*size: int) -> Tensor:
        if shape.integers:
            return torch.randint(-1, 2, size, generator=generator).to(shape.dtype)
        return torch.randn(size, generator=generator, dtype=torch.float64).to(shape.dtype)

    block_table, pages = _block_table(shape, generator)
    pool_shape = (planes, pages, kv_heads, shape.page_size, shape.head_dim)
    pool = {name: torch.full(pool_shape, torch.nan, dtype=shape.dtype) for name in ("k_pool", "v_pool")}
    case = Case(
        shape=shape,
        q=torch.empty(0),
        k=torch.empty(0),
        v=torch.empty(0),
        pool=pool,
        plan=_rows(shape, block_table, generator),
        store={},
        row_mode=torch.empty(0),
        scale=0.5 if shape.integers else shape.head_dim**-0.5,
    )
    rows = case.plan["row_seq"].shape[0]
    case.q = random(rows, heads, shape.head_dim)
    case.k, case.v = random(rows, kv_heads, shape.head_dim), random(rows, kv_heads, shape.head_dim)
    for sequence, (length, _) in enumerate(shape.sequences, 1):
        for plane in range(planes):
            case.keys[plane, sequence] = random(length, kv_heads, shape.head_dim)
            case.values[plane, sequence] = random(length, kv_heads, shape.head_dim)
    _fill_history(case)
    case.store = _store(shape, case, generator)
    live = case.plan["row_length"] > 0
    case.row_mode = torch.where(live, torch.randint(0, 3, (rows,), generator=generator), 0).int()
    if shape.gated:
        case.gate = random(*case.q.shape)
        case.gate[~live] = torch.nan
    return _to_device(case, shape.device)


def _block_table(shape: Shape, generator: torch.Generator) -> tuple[Tensor, int]:
    """Scattered pages, a spare one that nobody owns, and garbage in the unused entries."""
    needed = [-(-length // shape.page_size) for length, _ in shape.sequences]
    pages = sum(needed) + 2
    free = (1 + torch.randperm(pages - 1, generator=generator)).tolist()
    table = torch.full((len(needed) + 1, max(needed) + 1), GARBAGE, dtype=torch.int32)
    table[DUMMY_SEQ] = DUMMY_PAGE
    for line, count in enumerate(needed, 1):
        table[line, :count] = torch.tensor([free.pop() for _ in range(count)])
    return table, pages


def _rows(shape: Shape, block_table: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Rows in shuffled order, padding among them."""
    rows = [(DUMMY_SEQ, 0, 0)] * shape.padding
    for line, (end, new) in enumerate(shape.sequences, 1):
        rows += [(line, p, end if shape.prefix else p + 1) for p in range(end - new, end)]
    order = torch.randperm(len(rows), generator=generator)
    sequence, position, length = torch.tensor(rows, dtype=torch.int32)[order].unbind(1)
    loop = torch.randint(0, shape.loops, (len(rows),), generator=generator, dtype=torch.int32)
    return {
        "block_table": block_table,
        "row_seq": sequence.contiguous(),
        "row_position": position.contiguous(),
        "row_length": length.contiguous(),
        "row_loop": torch.where(length > 0, loop, 0).int(),
    }


def _fill_history(case: Case) -> None:
    """Put each sequence's keys and values into its pages, then note the new rows' in the oracle's copy."""
    size, table = case.shape.page_size, case.plan["block_table"]
    for (plane, sequence), keys in case.keys.items():
        for j in range(keys.shape[0]):
            page = int(table[sequence, j // size])
            case.pool["k_pool"][plane, page, :, j % size] = keys[j]
            case.pool["v_pool"][plane, page, :, j % size] = case.values[plane, sequence][j]
    for row in range(case.rows):
        sequence, position = int(case.plan["row_seq"][row]), int(case.plan["row_position"][row])
        if sequence != DUMMY_SEQ:
            case.keys[plane_of(case, row), sequence][position] = case.k[row]
            case.values[plane_of(case, row), sequence][position] = case.v[row]


def _store(shape: Shape, case: Case, generator: torch.Generator) -> dict[str, Tensor]:
    slots, (heads, _) = case.rows + 2, shape.heads
    capacity = case.retention.count(max(length for length, _ in shape.sequences)) + 1
    slot = 1 + torch.randperm(slots - 1, generator=generator)[: case.rows]
    wide = compute_dtype(shape.dtype)
    return {
        "row_slot": torch.where(case.plan["row_length"] > 0, slot, DUMMY_SLOT).int(),
        "index": torch.full((slots, SITES, heads, capacity), GARBAGE, dtype=torch.int32),
        "count": torch.zeros(slots, SITES, dtype=torch.int32),
        "mass": torch.full((slots, SITES, heads), torch.nan, dtype=wide),
        "o_ref": torch.full((slots, SITES, heads, shape.head_dim), torch.nan, dtype=shape.dtype),
        "c_ref": torch.full((slots, SITES, heads, shape.head_dim), torch.nan, dtype=wide),
    }


def _to_device(case: Case, device: str) -> Case:
    moved: dict[str, Any] = {name: getattr(case, name).to(device) for name in (*case.fresh, "row_mode")}
    for name in ("pool", "plan", "store", "keys", "values"):
        moved[name] = {key: t.to(device) for key, t in getattr(case, name).items()}
    return replace(case, **moved)


def plane_of(case: Case, row: int) -> int:
    return PLANE + PLANE_STRIDE * int(case.plan["row_loop"][row])


def next_loop(case: Case, seed: int = 1) -> Case:
    """The same rows one loop later: new q, k, v and gate for the consume that follows a capture; history and store are
    kept.
    """
    later = case.copy()
    generator = torch.Generator().manual_seed(case.shape.seed + seed)
    for name in case.fresh:
        old = getattr(case, name)
        new = torch.randn(old.shape, generator=generator, dtype=torch.float64).to(old.dtype).to(old.device)
        setattr(later, name, new)
    later.keys = {key: t.clone() for key, t in case.keys.items()}
    later.values = {key: t.clone() for key, t in case.values.items()}
    for row in range(case.rows):
        sequence, position = int(case.plan["row_seq"][row]), int(case.plan["row_position"][row])
        if sequence != DUMMY_SEQ:
            later.keys[plane_of(case, row), sequence][position] = later.k[row]
            later.values[plane_of(case, row), sequence][position] = later.v[row]
    return later


def live_rows(case: Case) -> list[int]:
    return [row for row, length in enumerate(case.plan["row_length"].tolist()) if length > 0]


def bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that compare NaN with NaN: floats viewed as integers."""
    halves = {torch.bfloat16: torch.int16, torch.float16: torch.int16}
    views = {torch.float64: torch.int64, torch.float32: torch.int32, **halves}
    return {name: t.clone().view(views.get(t.dtype, t.dtype)) for name, t in tensors.items()}


@st.composite
def shapes(draw: st.DrawFn, **fixed: Any) -> Shape:
    """Ragged batches: decode rows and prefill chunks together, several loops, padding."""
    lengths = draw(st.lists(st.integers(1, 33), min_size=1, max_size=4))
    drawn: dict[str, Any] = {
        "sequences": tuple((n, draw(st.integers(1, min(n, 4)))) for n in lengths),
        "heads": draw(st.sampled_from(HEADS)),
        "head_dim": draw(st.sampled_from(HEAD_DIMS)),
        "page_size": draw(st.sampled_from([1, 4, 16])),
        "padding": draw(st.integers(0, 2)),
        "loops": draw(st.integers(1, 2)),
        "prefix": draw(st.booleans()),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5])),
        "retention": draw(st.sampled_from(["0.3", "0.1", "0.77", "1.0", "1/3"])),
        "keep_first": draw(st.sampled_from([0, 0, 1, 3])),
        "keep_last": draw(st.sampled_from([0, 0, 2, 40])),
        "gated": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }
    return Shape(**drawn | fixed)
