"""From positions to pages, and the write of new keys and values."""

from __future__ import annotations

import torch
from torch import Tensor


def look_up_pages(
    block_table: Tensor, sequence: Tensor, page_number: Tensor, live: Tensor | None = None
) -> Tensor:
    """Page ids int64 of `page_number` in `sequence` (int64, broadcast together); entries that are not `live`
    give page 0.

    Table entries beyond a sequence's pages may hold anything, so they are replaced and never used as
    addresses. Raises IndexError on the CPU for a negative id among the live ones, which plain indexing would
    take as counted from the end.
    """
    page = block_table[sequence, page_number.clamp(max=block_table.shape[1] - 1)].long()
    if live is not None:
        page = torch.where(live, page, 0)
    if page.device.type == "cpu" and page.numel() and int(page.min()) < 0:
        raise IndexError(f"block_table holds page id {int(page.min())} in a used entry; page ids start at 0")
    return page


def write_rows(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    block_table: Tensor,
    row_seq: Tensor,
    row_position: Tensor,
    row_plane: Tensor,
) -> None:
    """Store k, v [T, Hkv, D] of all rows at their positions: pool[plane, page, :, position % page_size].

    Padding rows (sequence 0, position 0) land in page 0. Two active rows of one plane must not share a
    position.
    """
    page_size = k_pool.shape[3]
    position = row_position.long()
    page = look_up_pages(block_table, row_seq.long(), position // page_size)
    # Index tensors on both sides of the head slice put the row dimension first: the target is [T, Hkv, D], as
    # k and v are.
    k_pool[row_plane, page, :, position % page_size] = k
    v_pool[row_plane, page, :, position % page_size] = v
