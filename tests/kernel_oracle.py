"""Textbook formulas for the ops, row by row over plain tensors; they share no code with the ops."""

from __future__ import annotations

import torch
from kernel_cases import SITE, Case, live_rows, plane_of
from torch import Tensor


def row_operands(case: Case, row: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """q [H, D]; all keys and values [N, H, D] that the row's length covers, heads repeated; the first key of
    its window.
    """
    length, position = int(case.plan["row_length"][row]), int(case.plan["row_position"][row])
    first = max(0, position - case.shape.window + 1) if case.shape.window else 0
    at = plane_of(case, row), int(case.plan["row_seq"][row])
    group = case.shape.heads[0] // case.shape.heads[1]
    k, v = (x[at][:length].repeat_interleave(group, dim=1) for x in (case.keys, case.values))
    return case.q[row], k, v, first


def naive_probabilities(case: Case, row: int) -> Tensor:
    """p [N, H] in the case's own dtype, by the textbook formula."""
    q, k, _, first = row_operands(case, row)
    scores = (k * q).sum(-1) * case.scale
    if case.shape.softcap:
        scores = case.shape.softcap * torch.tanh(scores / case.shape.softcap)
    scores[:first] = -torch.inf
    weights = (scores - scores.max(0).values).exp()
    return weights / weights.sum(0)


def naive_gate(case: Case, out: Tensor) -> Tensor:
    """sigmoid(gate) * out for the rows that see a key, in the case's own dtype."""
    if case.gate is None:
        return out
    out = out.clone()
    for row in live_rows(case):
        out[row] *= 1 / (1 + (-case.gate[row]).exp())
    return out


def naive_dense(case: Case) -> Tensor:
    """O [T, H, D] in the case's own dtype: what eager code of that dtype computes."""
    out = torch.zeros_like(case.q)
    for row in live_rows(case):
        out[row] = (naive_probabilities(case, row)[..., None] * row_operands(case, row)[2]).sum(0)
    return naive_gate(case, out)


def naive_consume(case: Case) -> Tensor:
    """O_ref + m * (T - C_ref) [T, H, D] in the case's own dtype, from the store as it stands."""
    out = torch.zeros_like(case.q)
    for row in live_rows(case):
        slot = int(case.store["row_slot"][row])
        _, _, v, _ = row_operands(case, row)
        p = naive_probabilities(case, row)
        kept = torch.zeros_like(p, dtype=torch.bool)
        for head in range(p.shape[1]):
            kept[kept_keys(case, row, head), head] = True
        p = torch.where(kept, p, 0)
        p = p / p.sum(0)
        over_kept = (p[..., None] * v).sum(0)
        o_ref, c_ref, mass = (case.store[x][slot, SITE].to(p.dtype) for x in ("o_ref", "c_ref", "mass"))
        out[row] = o_ref + mass[:, None] * (over_kept - c_ref)
    return naive_gate(case, out)


def kept_keys(case: Case, row: int, head: int) -> Tensor:
    slot = int(case.store["row_slot"][row])
    return case.store["index"][slot, SITE, head, : int(case.store["count"][slot, SITE])].long()
