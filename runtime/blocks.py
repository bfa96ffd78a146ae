"""Rounds of self-speculation on the device: drafting, verification and acceptance without the host.

The host knows where a block of rows may begin, not where it does: that depends on how many tokens of the round before
it counted, which nobody has read. So a plan gives each block a line of facts that the host is sure of, and the rows are
made of them on the device, from what the last round has left there (`SeatTable.reached`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from sparse_compile.runtime.leases import Lease
from sparse_compile.runtime.plan import CONSUME, DENSE, FROM_DEVICE, ProgramKind, RowPlan
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.sampler import Drawn, largest
from sparse_compile.runtime.seats import REACHED, SeatTable, to_device

# Rows of `RowPlan.packed` that are written here by name.
POSITION, LENGTH, LOOP, SLOT, TOKEN = 1, 2, 3, 4, 7


@dataclass(frozen=True)
class BlockFacts:
    """What the host knows of one block.

    start: position of the first row; FROM_DEVICE where a round before it is not read, and then `token` is too.
    token: of the first row; FROM_DEVICE with a known start: the newest one of the seat.
    """

    seat: int
    start: int
    token: int
    rows: int
    end: int  # positions from here on have no row: their token would be one too many
    sparse_from: int  # rows with fewer visible keys are dense
    turn: int  # 0 and 1 in turn: where `SeatTable.reached` is read; the other one is written
    slots: tuple[int, ...] = ()  # of the reference store, one per row

    def column(self, width: int) -> tuple[int, ...]:
        slots = (*self.slots, *(0,) * (width - len(self.slots)))
        return self.seat, self.start, self.token, self.rows, self.end, self.sparse_from, self.turn, *slots


FACTS = 7  # of a block, before its slots


@dataclass(frozen=True)
class DevicePlan:
    """Up to `width` rows of each of some requests. One of no rows is padding."""

    seats: SeatTable
    store: ReferenceStore | None
    block_table: torch.Tensor  # that of the seats, or its first pages
    table: torch.Tensor  # int32 [FACTS + width, B]: columns of BlockFacts
    width: int
    loops: int  # bodies of a draft
    kind: ProgramKind
    max_length: int  # visible keys of the longest row, at most
    leases: tuple[tuple[Lease, ...], ...] = ()  # of each request's rows that may be sparse

    @property
    def blocks(self) -> int:
        """B"""
        return self.table.shape[1]

    def fill(self, other: DevicePlan) -> None:
        """Takes over the requests of `other`; the rest is padding."""
        self.table[:, other.blocks :].zero_()
        self.table[:, : other.blocks].copy_(other.table, non_blocking=True)

    def begin(self, rows: torch.Tensor, beginning: torch.Tensor) -> None:
        """Slots of rows that begin hold nothing yet. rows: int32 [8, B, width]; beginning: bool [B, width]."""
        if self.store is not None:
            self.store.begin_rows(rows[SLOT].long().flatten(), beginning.flatten())

    def run(
        self,
        packed: torch.Tensor,
        logit_rows: torch.Tensor,
        loops: int,
        depths: frozenset[int],
        leases: Iterable[Lease],
    ) -> RowPlan:
        """A run of `loops` bodies. packed: int32 [8, T]."""
        return RowPlan(
            block_table=self.block_table,
            packed=packed,
            logit_rows=logit_rows,
            kind=self.kind,
            max_length=self.max_length,
            leases=tuple(leases),
            loops=loops,
            depths=depths,
            carry_lines=self.seats.carry_lines,
        )


Plan = TypeVar("Plan", bound=DevicePlan)


def build(
    plan: type[Plan],
    seats: SeatTable,
    store: ReferenceStore | None,
    facts: Sequence[BlockFacts],
    loops: int,
    kind: ProgramKind,
    max_length: int,
    leases: Sequence[Sequence[Lease]],
) -> Plan:
    """As wide as the longest of the blocks."""
    width = max(block.rows for block in facts)
    columns = torch.tensor([block.column(width) for block in facts], dtype=torch.int32, device="cpu")
    table = to_device(columns.t().contiguous(), seats.device)
    own = tuple(tuple(block) for block in leases)
    return plan(seats, store, seats.block_table, table, width, loops, kind, max_length, own)


def padding(
    plan: type[Plan],
    seats: SeatTable,
    store: ReferenceStore | None,
    pages: int,
    shape: tuple[int, int],
    loops: int,
    kind: ProgramKind,
    max_length: int,
) -> Plan:
    """To capture over, with the first `pages` of the block table. shape: (B, width)."""
    count, width = shape
    table = torch.zeros(FACTS + width, count, dtype=torch.int32, device=seats.device)
    return plan(seats, store, seats.block_table[:, :pages], table, width, loops, kind, max_length)


@dataclass(frozen=True)
class BlockPlan(DevicePlan):
    """Blocks of rows that follow each other, one of each request."""

    def rows(self) -> torch.Tensor:
        """int32 [8, B, width]: the columns of `RowPlan.packed`, all 0 for rows that there is nothing to run for. Tokens
        of all rows but the first are still to come.
        """
        facts = self.table.long()
        seat, start, token, rows, end, sparse_from, turn = (row[:, None] for row in facts[:FACTS])
        unread = start == FROM_DEVICE
        newest = torch.where(token == FROM_DEVICE, self.seats.last_token[seat], token)
        start = torch.where(unread, self.seats.reached[turn, 0, seat], start)
        newest = torch.where(unread, self.seats.reached[turn, REACHED, seat], newest)
        line = torch.arange(self.width, device=self.table.device)
        position = start + line
        active = (line < rows) & (position < end)
        sparse = position + 1 >= sparse_from
        columns = (
            seat,
            position,
            position + 1,
            torch.zeros_like(seat),
            facts[FACTS:].t() * sparse,
            DENSE + sparse * (CONSUME - DENSE),
            self.seats.carry_line(seat, line),
            newest * (line == 0),
        )
        return torch.stack([column.expand_as(active) for column in columns]).int() * active

    def line(self, rows: torch.Tensor, number: int) -> RowPlan:
        """The `number`-th row of each block through the first bodies; logits of all, but for the last row."""
        heads = torch.arange(self.blocks if number + 1 < self.width else 0, device=rows.device)
        leases = (lease for block in self.leases for lease in block[number : number + 1])
        return self.run(rows[:, :, number].contiguous(), heads, self.loops, frozenset({0}), leases)

    def whole(self, rows: torch.Tensor, loops: int) -> RowPlan:
        """All rows through the last `loops` bodies."""
        rows = rows.clone()
        rows[LOOP] = torch.where(rows[LENGTH] > 0, self.loops, 0)
        heads = torch.arange(rows[0].numel(), device=rows.device)
        leases = (lease for block in self.leases for lease in block)
        return self.run(rows.flatten(1), heads, loops, frozenset({self.loops}), leases)


class Chooser(Protocol):
    """Picks the tokens of a round. rows: what `BlockPlan.rows` gave; rows that are set to 0 are given up."""

    def propose(self, logits: torch.Tensor, rows: torch.Tensor, line: int) -> torch.Tensor:
        """int64 [B]: the tokens drafted behind the `line`-th row of each block. logits: [B, vocab]."""
        ...

    def decide(self, logits: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor) -> Drawn:
        """The choice of the whole model behind every row. logits: [B * width, vocab]; drafts: int64 [B, width - 1]."""
        ...


class Largest:
    """The largest scores, as they are."""

    def propose(self, logits: torch.Tensor, rows: torch.Tensor, line: int) -> torch.Tensor:
        return largest(logits).tokens

    def decide(self, logits: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor) -> Drawn:
        return largest(logits)


class Drafter(Protocol):
    """As much of an executor as a round needs."""

    @property
    def loops(self) -> int: ...
    def draft(self, plan: RowPlan) -> torch.Tensor: ...
    def verify(self, plan: RowPlan) -> torch.Tensor: ...


def run_round(
    executor: Drafter,
    plan: BlockPlan,
    chooser: Chooser | None = None,
    check: Callable[[RowPlan], None] | None = None,
) -> Drawn:
    """Submits a round; nothing is read. The tokens behind all rows, those of a block side by side; flags: which count.

    Until its very end a round changes nothing that it reads, so that it can be repeated.
    """
    chooser = chooser or Largest()
    rows, drafts = plan.rows(), []
    plan.begin(rows, rows[LENGTH] > 0)
    for line in range(plan.width):
        logits = submit(executor.draft, plan.line(rows, line), check)
        if line + 1 < plan.width:
            drafts.append(chooser.propose(logits, rows, line))
            rows[TOKEN, :, line + 1] = drafts[-1] * (rows[LENGTH, :, line + 1] > 0)
    logits = submit(executor.verify, plan.whole(rows, executor.loops - plan.loops), check)
    drafted = torch.stack(drafts, dim=1) if drafts else rows.new_zeros(plan.blocks, 0)
    drawn = chooser.decide(logits, rows, drafted)
    accept(plan, rows, drawn, drafted)
    return drawn


def submit(
    run: Callable[[RowPlan], torch.Tensor], plan: RowPlan, check: Callable[[RowPlan], None] | None
) -> torch.Tensor:
    if check is not None:
        check(plan)
    logits = run(plan)
    check_logits(logits, plan)
    return logits


def check_logits(logits: torch.Tensor, plan: RowPlan) -> None:
    """Raises RuntimeError unless an executor gave a row of logits for each that was asked for."""
    if logits.dim() != 2 or logits.shape[0] != plan.logit_rows.shape[0]:
        raise RuntimeError(
            f"the executor gave logits {tuple(logits.shape)} for {plan.logit_rows.shape[0]} rows"
        )


def accept(plan: BlockPlan, rows: torch.Tensor, drawn: Drawn, drafts: torch.Tensor) -> None:
    """Which tokens count, what is invalid now, and where the next round of each request begins."""
    tokens, active = drawn.tokens.view(plan.blocks, plan.width), rows[LENGTH] > 0
    foreseen = (tokens[:, :-1] == drafts) & active[:, 1:]
    counts = torch.cat((torch.ones_like(tokens[:, :1]), foreseen.long().cumprod(dim=1)), dim=1)
    drawn.flags = counts.flatten()
    if plan.store is not None:
        plan.store.clear_rejected(rows[SLOT].long(), counts == 0)
    total = counts.sum(dim=1, keepdim=True)
    newest = tokens.gather(1, total - 1)[:, 0]
    seat, turn = plan.table[0].long(), plan.table[FACTS - 1].long()
    plan.seats.reached[1 - turn, 0, seat] = rows[POSITION, :, 0] + total[:, 0]
    plan.seats.reached[1 - turn, REACHED, seat] = newest
