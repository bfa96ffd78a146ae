"""The ops over caches `[B, Hkv, S, D]`: the paged reference's arithmetic on exactly the keys that a mask shows."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparse_compile.kernels import ops  # noqa: F401  registers the ops
from sparse_compile.kernels.retention import Retention

_ops = torch.ops.sparse_compile
SCALE = 0.3
needs_interpreter = pytest.mark.skipif(
    torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs in the CPU interpreter",
)
IMPLEMENTATIONS = ["reference", "batched", pytest.param("triton", marks=needs_interpreter)]


def inputs(
    rows: int, keys: int, heads: tuple[int, int], seed: int, dim: int = 8, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q [B, H, D], caches [B, Hkv, S, D], a mask bool [B, S] of any shape with one visible key per row at least."""
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, heads[0], dim, generator=make, dtype=dtype)
    k, v = (torch.randn(rows, heads[1], keys, dim, generator=make, dtype=dtype) for _ in range(2))
    visible = torch.rand(rows, keys, generator=make) < 0.6
    visible[:, int(torch.randint(keys, (1,), generator=make))] = True
    return q, k, v, visible


def run_all(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    retention: str,
    implementation: str,
    sink: Tensor | None = None,
) -> dict[str, Any]:
    """dense, capture with (k, v) and consume with (k + 1, v * 2), over what `visible` shows."""
    table, length, row, slot = _ops.visible_keys(visible)
    if bias is not None:
        bias = bias.gather(2, table.long()[:, None].expand(-1, bias.shape[1], -1))
    share = Retention.of(retention)
    how = {"scale": SCALE, "softcap": 0.0, "implementation": implementation}
    kept = {"retention_num": share.numerator, "retention_den": share.denominator}
    shared = (table, length, row, bias)
    dense = _ops.cached_dense(q, k, v, *shared, sink, **how)
    out, *held = _ops.cached_capture(q, k, v, *shared, sink, slot, **kept, **how)
    consumed = _ops.cached_consume(q, k + 1, v * 2, *shared, slot, *held, **how)
    return {"dense": dense, "capture": out, "held": held, "consume": consumed, "table": table}


def textbook(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    visible: Tensor,
    bias: Tensor | None,
    retention: str,
    sink: Tensor | None = None,
) -> dict[str, Any]:
    """The same by the formulas, in float64, head by head; `kept` holds cache positions."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    dense, consumed, kept = torch.zeros_like(q), torch.zeros_like(q), {}
    for b in range(q.shape[0]):
        at = visible[b].nonzero().flatten()
        for h in range(q.shape[1]):
            extra = 0 if bias is None else bias[b, h if bias.shape[1] > 1 else 0, at].double()
            keys, values = k[b, h // group, at], v[b, h // group, at]
            scores = keys @ q[b, h] * SCALE + extra
            extra_key = scores.new_empty(0) if sink is None else sink[b, h].double()[None]
            p = torch.cat([scores, extra_key]).softmax(0)[: len(at)]
            dense[b, h] = p @ values
            best = scores.sort(descending=True, stable=True).indices[: Retention.of(retention).count(len(at))]
            mass = p[best].sum()
            centre = (p[best] @ values[best]) / mass
            later = (keys[best] + 1) @ q[b, h] * SCALE + (extra if bias is None else extra[best])
            over_kept = later.softmax(0) @ (values[best] * 2)
            consumed[b, h] = dense[b, h] + mass * (over_kept - centre)
            kept[b, h] = at[best].sort().values
    return {"dense": dense, "consume": consumed, "kept": kept}


@pytest.mark.parametrize("implementation", ["reference", "batched"])
@pytest.mark.parametrize("biased", [0, 1, 6])
@given(
    rows=st.integers(1, 3),
    keys=st.integers(1, 40),
    retention=st.sampled_from(["0.05", "0.3", "1.0"]),
    seed=st.integers(0, 9999),
)
@settings(max_examples=6, deadline=None)
def test_equals_the_formulas(
    implementation: str, biased: int, rows: int, keys: int, retention: str, seed: int
) -> None:
    """biased: no bias, one for all heads, or one per head and a sink as well."""
    assert_equals_the_formulas(implementation, biased, rows, keys, retention, seed, biased == 6)


@pytest.mark.parametrize(
    ("biased", "sunk", "rows", "keys"),
    [(0, False, 2, 33), (1, False, 1, 1), (6, True, 2, 70), (0, True, 2, 70), (0, True, 1, 12)],
)
@needs_interpreter
def test_triton_equals_the_formulas(
    monkeypatch: pytest.MonkeyPatch, biased: int, sunk: bool, rows: int, keys: int
) -> None:
    """Small units, so that a row crosses them, and the sink joins what they are merged to. Without a bias there are
    guesses at the cut, which know no sink.
    """
    from sparse_compile.kernels import triton_backend
    from sparse_compile.kernels.triton_tuning import Tiles

    small = Tiles(block=16, kept_block=16, min_unit=16, max_units=4, min_kept=16, max_kept=2)
    monkeypatch.setattr(triton_backend, "tiles_for", lambda attention: small)
    assert_equals_the_formulas("triton", biased, rows, keys, "0.3", 3, sunk)


def assert_equals_the_formulas(
    implementation: str, biased: int, rows: int, keys: int, retention: str, seed: int, sunk: bool
) -> None:
    q, k, v, visible = inputs(rows, keys, (6, 2), seed)
    bias = torch.randn(rows, biased, keys) if biased else None
    sink = torch.randn(rows, 6) if sunk else None
    got = run_all(q, k, v, visible, bias, retention, implementation, sink)
    wanted = textbook(q, k, v, visible, bias, retention, sink)
    assert torch.equal(got["dense"], got["capture"])
    for name in ("dense", "consume"):
        # float32 sums of a few dozen terms of size below 20
        torch.testing.assert_close(got[name].double(), wanted[name], rtol=2e-5, atol=2e-5)
    index, count = got["held"][:2]
    for (b, h), kept in wanted["kept"].items():
        assert count[b + 1, 0] == len(kept)
        ranks = index[b + 1, 0, h, : len(kept)].long()
        assert torch.equal(got["table"][b, ranks].long(), kept)


@pytest.mark.parametrize("implementation", ["reference", "batched"])
def test_hidden_memory_may_hold_anything(implementation: str) -> None:
    q, k, v, visible = inputs(3, 20, (4, 4), 5)
    wanted = run_all(q, k, v, visible, None, "0.3", implementation)
    hidden = ~visible[:, None, :, None]
    poisoned = run_all(
        q,
        k.masked_fill(hidden, torch.nan),
        v.masked_fill(hidden, torch.nan),
        visible,
        None,
        "0.3",
        implementation,
    )
    for name in ("dense", "capture", "consume"):
        assert torch.equal(poisoned[name], wanted[name])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_fully_masked_row_gives_zeros_and_touches_no_other_row(implementation: str) -> None:
    q, k, v, visible = inputs(3, 20, (4, 4), 6)
    wanted = run_all(q, k, v, visible, None, "0.3", implementation)
    visible[1] = False
    got = run_all(q, k, v, visible, None, "0.3", implementation)
    for name in ("dense", "capture", "consume"):
        assert torch.equal(got[name][1], torch.zeros_like(q[1]))
        assert torch.equal(got[name][[0, 2]], wanted[name][[0, 2]])


def test_strided_caches_are_read_where_they_lie() -> None:
    """[B, S, Hkv, D] underneath, queries as a slice; and values with another layout than keys."""
    q, k, v, visible = inputs(2, 17, (4, 2), 7)
    wanted = run_all(q, k, v, visible, None, "0.3", "batched")
    wide = torch.cat([q, q], 2)[..., :8]
    turned = k.transpose(1, 2).contiguous().transpose(1, 2)
    for keys, values in ((turned, v.transpose(1, 2).contiguous().transpose(1, 2)), (turned, v)):
        got = run_all(wide, keys, values, visible, None, "0.3", "batched")
        assert torch.equal(got["consume"], wanted["consume"])


@pytest.mark.parametrize("op", ["cached_dense", "cached_capture", "cached_consume"])
@pytest.mark.parametrize("biased", [False, True])
def test_opcheck(op: str, biased: bool) -> None:
    q, k, v, visible = inputs(2, 9, (4, 2), 8)
    table, length, row, slot = _ops.visible_keys(visible)
    how: dict[str, Any] = {"scale": SCALE, "softcap": 0.0, "implementation": "batched"}
    args = [q, k, v, table, length, row, torch.randn(2, 1, 9) if biased else None]
    if op != "cached_consume":
        args.append(torch.randn(2, 4) if biased else None)
    if op != "cached_dense":
        args.append(slot)
    kept = {"retention_num": 3, "retention_den": 10}
    if op == "cached_consume":
        args += _ops.cached_capture(*args[:7], None, slot, **kept, **how)[1:]
    if op == "cached_capture":
        how |= kept
    torch.library.opcheck(getattr(_ops, op).default, args, how)


def test_visible_keys_lists_positions_in_order() -> None:
    visible = torch.tensor([[False, True, False, True], [True, True, True, False]])
    table, length, row, slot = _ops.visible_keys(visible)
    assert length.tolist() == [2, 3]
    assert table[0, :2].tolist() == [1, 3]
    assert table[1, :3].tolist() == [0, 1, 2]
    assert (row.tolist(), slot.tolist()) == ([0, 1], [1, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: torch.zeros(2, 3, 8)}, "no multiple"),
        ({1: torch.zeros(2, 2, 9, 4)}, "must both be"),
        ({3: torch.zeros(2, 5, dtype=torch.int32)}, r"table must be \[2, 9\]"),
        ({4: torch.zeros(2)}, "length must be int32|row_position must be int32"),
        ({4: torch.full((2,), 10, dtype=torch.int32)}, "outside 0 .. 9"),
        ({6: torch.zeros(2, 3, 9)}, "bias must be"),
        ({7: torch.zeros(2, 3)}, "sink must be"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[int, Tensor], message: str) -> None:
    q, k, v, visible = inputs(2, 9, (4, 2), 9)
    args = [q, k, v, *_ops.visible_keys(visible)[:3], None, None]
    for at, value in change.items():
        args[at] = value
    with pytest.raises(ValueError, match=message):
        _ops.cached_dense(*args, scale=SCALE, softcap=0.0, implementation="batched")


def test_a_consume_without_a_capture_is_refused() -> None:
    q, k, v, visible = inputs(2, 9, (4, 2), 10)
    table, length, row, slot = _ops.visible_keys(visible)
    how = {"scale": SCALE, "softcap": 0.0, "implementation": "batched"}
    _, *held = _ops.cached_capture(
        q, k, v, table, length, row, None, None, slot, retention_num=3, retention_den=10, **how
    )
    held[1].zero_()
    with pytest.raises(RuntimeError, match="consume before capture"):
        _ops.cached_consume(q, k, v, table, length, row, None, slot, *held, **how)


@pytest.mark.gpu
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_cuda(dtype: torch.dtype, biased: bool) -> None:
    """The compiled kernels over long caches, against the definition in float64 on the same values."""
    q, k, v, visible = inputs(3, 3000, (8, 4), 11, dim=128)
    sink, bias = torch.randn(3, 8), torch.randn(3, 8, 3000) if biased else None
    q, k, v = (x.to(dtype) for x in (q, k, v))
    wanted = textbook(q, k, v, visible, bias, "0.1", sink)
    on_device = [x if x is None else x.cuda() for x in (q, k, v, visible, bias)]
    got = run_all(*on_device, "0.1", "triton", sink.cuda())
    # bfloat16: probabilities and results are rounded, values stay below 8
    margin = 2e-5 if dtype == torch.float32 else 4e-2
    for name in ("dense", "capture", "consume"):
        target = wanted["dense" if name == "capture" else name]
        torch.testing.assert_close(got[name].double().cpu(), target, rtol=margin, atol=margin)
