"""Which rows the batched implementation works on together.

Rows that look at the same keys (same sequence, same plane) form a group, whose keys are gathered once: a
prefill chunk is one group of many rows, a decode step many groups of one. Groups with equally many rows and
similar lengths form a tile; the rows of a tile are worked on in blocks whose scores fit a budget, each block
reading only the keys that some row of it can see.

Planning reads lengths on the host. While a CUDA graph is being captured that is impossible, and
`static_tiles` takes every row for a group of its own that reaches to the end of its block table.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .arguments import Attention

GATHERED = 1 << 24
"""Most elements of keys and values gathered for one tile (64 MiB in float32), unless one group needs more."""

SCORES = 1 << 23
"""Most scores of one block (32 MiB in float32), unless one row has more; capture needs eight times that."""


@dataclass(frozen=True)
class Block:
    """Columns start .. stop-1 of a tile; outside the gathered keys first .. last-1 they see nothing."""

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True)
class Tile:
    """rows int64 [B, R]: R rows of each of B groups, shortest first; `pages` pages are gathered per group,
    from `first_page` int64 [B] on.
    """

    rows: Tensor
    first_page: Tensor
    pages: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class _Row:
    """One active row on the host: it sees keys first .. length-1."""

    row: int
    first: int
    length: int


@dataclass(frozen=True)
class _Group:
    rows: tuple[_Row, ...]
    first_page: int
    pages: int


def host_tiles(attention: Attention, rows: Sequence[int] | None = None) -> Iterator[Tile]:
    """Tiles over the active rows among `rows` (default all). One device-to-host copy on CUDA."""
    by_size: dict[int, list[_Group]] = defaultdict(list)
    for group in _groups(attention, rows):
        by_size[len(group.rows)].append(group)
    for groups in by_size.values():
        groups.sort(key=lambda g: g.pages)
        for members in _similar(attention, groups):
            yield _tile(attention, members)


def static_tiles(attention: Attention) -> Iterator[Tile]:
    """Tiles over all rows, inactive ones too, from shapes alone: nothing is read on the host."""
    pages, keys = attention.max_pages, attention.max_pages * attention.page_size
    gathered_per_row = 2 * keys * attention.kv_heads * attention.head_dim
    step = max(1, min(GATHERED // gathered_per_row, SCORES // (keys * attention.heads)))
    first_page = attention.row_first // attention.page_size
    for start in range(0, attention.rows, step):
        stop = min(start + step, attention.rows)
        rows = torch.arange(start, stop, device=attention.q.device)[:, None]
        yield Tile(rows, first_page[start:stop], pages, (Block(0, 1, 0, keys),))


def _groups(attention: Attention, rows: Sequence[int] | None) -> list[_Group]:
    columns = torch.stack(
        [attention.row_seq, attention.row_loop, attention.row_position, attention.row_length]
    )
    sequence, loop, position, length = columns.tolist()
    members: dict[tuple[int, int], list[_Row]] = defaultdict(list)
    for row in range(attention.rows) if rows is None else rows:
        first = max(0, position[row] - attention.window + 1) if attention.window else 0
        if first < length[row]:
            members[sequence[row], loop[row]].append(_Row(row, first, length[row]))
    groups = []
    for group in members.values():
        group.sort(key=lambda r: r.length)
        first_page = min(r.first for r in group) // attention.page_size
        end_page = -(-group[-1].length // attention.page_size)
        groups.append(_Group(tuple(group), first_page, end_page - first_page))
    return groups


def _similar(attention: Attention, groups: list[_Group]) -> Iterator[list[_Group]]:
    """Cut groups, sorted by pages, where padding would double the work or the keys exceed the budget."""
    elements_per_page = 2 * attention.kv_heads * attention.page_size * attention.head_dim
    tile: list[_Group] = []
    for group in groups:
        too_long = tile and group.pages > 2 * tile[0].pages
        if too_long or (len(tile) + 1) * group.pages * elements_per_page > GATHERED:
            if tile:
                yield tile
            tile = []
        tile.append(group)
    if tile:
        yield tile


def _tile(attention: Attention, groups: list[_Group]) -> Tile:
    device, page_size = attention.q.device, attention.page_size
    pages, columns = max(g.pages for g in groups), len(groups[0].rows)
    step = max(1, SCORES // (len(groups) * attention.heads * pages * page_size))
    blocks = []
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        seen = [(r, g.first_page * page_size) for g in groups for r in g.rows[start:stop]]
        first = min(r.first - origin for r, origin in seen)
        last = max(r.length - origin for r, origin in seen)
        blocks.append(Block(start, stop, first, last))
    return Tile(
        rows=torch.tensor([[r.row for r in g.rows] for g in groups], device=device),
        first_page=torch.tensor([g.first_page for g in groups], device=device),
        pages=pages,
        blocks=tuple(blocks),
    )
