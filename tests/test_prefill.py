"""Prompt chunks through PyTorch's attention, against the op `dense` on the same rows."""

from __future__ import annotations

import pytest
import torch

from sparse_compile.kernels import ops  # noqa: F401
from sparse_compile.kernels.prefill import Chunk, Heads, Prompts, prefill_attention

PAGE, PAGES = 4, 24
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def prompts(chunks: list[Chunk], device: str, padding: int = 0) -> Prompts:
    """The plan tensors of `chunks`; pages are dealt out in a scattered order."""
    order = (torch.randperm(PAGES - 1, generator=torch.Generator().manual_seed(3)) + 1).int()
    table = torch.zeros(4, 7, dtype=torch.int32)
    for seat in (1, 2, 3):
        table[seat] = order[7 * (seat - 1) : 7 * seat]
    rows = [(c.seat, at, max(at + 1, c.prefix_length if at < c.prefix_length else 0)) for c in chunks
            for at in range(c.start, c.end)]  # fmt: skip
    columns = torch.tensor([*rows, *[(0, 0, 0)] * padding], dtype=torch.int32).t().contiguous().to(device)
    return Prompts(table.to(device), *columns, torch.zeros_like(columns[0]), chunks)


CASES = {
    "whole": [Chunk(0, 9, 1, 0)],
    "two of one length and one other": [Chunk(0, 5, 1, 0), Chunk(5, 5, 2, 0), Chunk(10, 3, 3, 0)],
    "later chunks": [Chunk(0, 6, 1, 9), Chunk(6, 1, 2, 4), Chunk(7, 8, 3, 0)],
    "prefix": [Chunk(0, 9, 1, 0, 4), Chunk(9, 5, 2, 0, 5), Chunk(14, 3, 3, 7, 6)],
    "one token": [Chunk(0, 1, 1, 0), Chunk(1, 1, 2, 0, 1)],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "heads", [Heads(1, 0.3), Heads(1, 0.3, 3), Heads(0, 0.3, 0, 5.0)], ids=["plain", "window", "cap"]
)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_equals_the_dense_op(case: str, gated: bool, kv_heads: int, heads: Heads, device: str) -> None:
    chunks = CASES[case]
    p = prompts(chunks, device, padding=2)
    rows = p.row_seq.shape[0]
    make = torch.Generator().manual_seed(5)
    dtype = torch.float32 if device == "cuda" else torch.float64
    q, k, v = (
        torch.randn(rows, h, 8, generator=make, dtype=dtype).to(device) for h in (4, kv_heads, kv_heads)
    )
    wide = torch.randn(rows, 3 * 4 * 8, generator=make, dtype=dtype).to(device)
    gate = wide[:, 32:64].unflatten(1, (4, 8)) if gated else None  # columns of a product
    if gate is not None:
        gate[-2:] = torch.nan  # of padding
    history = torch.randn(2, 2, PAGES, kv_heads, PAGE, 8, generator=make, dtype=dtype).to(device)
    k_pool, v_pool = history[0].clone(), history[1].clone()
    ours = prefill_attention(q, k, v, k_pool, v_pool, p, heads, gate)
    pools = history[0].clone(), history[1].clone()
    want = torch.ops.sparse_compile.dense(
        q, k, v, *pools, p.block_table, p.row_seq, p.row_position, p.row_length, p.row_loop,
        gate, plane=heads.plane, plane_stride=0, scale=heads.scale, window=heads.window, softcap=heads.softcap,
        implementation="batched",
    )  # fmt: skip
    assert ours.shape == want.shape
    assert ours.is_contiguous()
    torch.testing.assert_close(ours, want, rtol=0, atol=1e-5 if device == "cuda" else 1e-12)
    assert torch.equal(k_pool[:, 1:], pools[0][:, 1:])
    assert torch.equal(v_pool[:, 1:], pools[1][:, 1:])
    assert not ours[-2:].any()


@pytest.mark.parametrize("device", DEVICES)
def test_a_gate_of_prompts_is_rounded_once(device: str) -> None:
    """In half precision: sigmoid(gate) times what comes without a gate, in float32."""
    p = prompts([Chunk(0, 9, 1, 0), Chunk(9, 4, 2, 3)], device)
    make = torch.Generator().manual_seed(5)
    q, k, v, gate = (torch.randn(13, 4, 8, generator=make).bfloat16().to(device) for _ in range(4))
    pool = torch.zeros(1, PAGES, 4, PAGE, 8, dtype=torch.bfloat16, device=device)
    plain, got = (
        prefill_attention(q, k, v, pool.clone(), pool.clone(), p, Heads(0, 1.0), given)
        for given in (None, gate)
    )
    want = plain.double() * gate.double().sigmoid()
    assert ((got.double() - want).abs() <= want.abs() * 2**-8 * 1.001).all()  # half an ulp of bfloat16


def test_what_lies_behind_the_sequence_is_never_read() -> None:
    p = prompts([Chunk(0, 3, 1, 6)], "cpu")
    pool = torch.full((1, PAGES, 2, PAGE, 8), torch.nan)
    for at in range(6):
        pool[0, p.block_table[1, at // PAGE], :, at % PAGE] = 1.0
    q, k, v = (torch.ones(3, h, 8) for h in (4, 2, 2))
    assert torch.equal(
        prefill_attention(q, k, v, pool.clone(), pool.clone(), p, Heads(0, 1.0)), torch.ones(3, 4, 8)
    )
