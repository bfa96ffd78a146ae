"""Steps of token pipelines on the device: rows advance, the oldest ends, the youngest drafts, without the host.

The rows of a request are at depths that differ by one step each, the oldest first. So what is under way is said by the
position of the oldest row, the number of rows, how many steps the oldest has behind it, and the tokens; a step reads
that from `SeatTable.reached` and leaves it there as it is afterwards. Row p of a request has line p modulo the number
of lines, for what it carries and for its slot, so rows move on while lines and slots stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from sparse_compile.runtime.blocks import FACTS, LENGTH, LOOP, SLOT, DevicePlan, submit
from sparse_compile.runtime.plan import CONSUME, DENSE, FROM_DEVICE, RowPlan
from sparse_compile.runtime.sampler import Drawn, largest
from sparse_compile.runtime.seats import REACHED


class Flight(NamedTuple):
    """What is under way, of B requests: int64 [B], and tokens int64 [B, width]; those beyond `size` mean nothing."""

    position: torch.Tensor  # of the oldest row
    size: torch.Tensor  # how many rows
    age: torch.Tensor  # steps that the oldest row has behind it; one less for each row after it
    tokens: torch.Tensor


# A function of tensors, and the width that it is for -> the same with fewer kernels.
Fuse = Callable[[Any, int], Any]


@dataclass(frozen=True)
class FlightPlan(DevicePlan):
    """A step of the rows under way of each request; `start` and `token` of those that take off."""

    def look(self, fuse: Fuse) -> tuple[Flight, torch.Tensor]:
        """What is under way, and its rows: int32 [8, B, width], columns of `RowPlan.packed`, 0 where there is none."""
        seats = self.seats
        flight = fuse(_flight, self.width)(self.table, seats.last_token, seats.reached)
        return flight, fuse(_rows, self.width)(self.table, flight, self.loops, 1 + seats.seats)

    def step(self, rows: torch.Tensor, flight: Flight) -> RowPlan:
        """All rows; logits of the oldest of each request, then, of pipelines of several rows, of the youngest."""
        first = torch.arange(self.blocks, device=rows.device) * self.width
        heads = first if self.width == 1 else torch.cat((first, first + flight.size.clamp(min=1) - 1))
        return self._of_all(rows, heads)

    def again(self, rows: torch.Tensor, step: int) -> RowPlan:
        """The rows that have more than `step` steps behind them, through the loops of that step; no logits."""
        rows = rows * (rows[LOOP] > step * self.loops)
        rows[LOOP] = torch.where(rows[LENGTH] > 0, step * self.loops, 0)
        return self._of_all(rows, torch.arange(0, device=rows.device))

    def _of_all(self, rows: torch.Tensor, heads: torch.Tensor) -> RowPlan:
        depths = frozenset(range(0, self.width * self.loops, self.loops))
        leases = (lease for block in self.leases for lease in block)
        return self.run(rows.flatten(1), heads, self.loops, depths, leases)


def _flight(table: torch.Tensor, last_token: torch.Tensor, reached: torch.Tensor) -> Flight:
    seat, start, token, _, _, _, turn = table[:FACTS].long()
    aloft = start == FROM_DEVICE
    newest = torch.where(token == FROM_DEVICE, last_token[seat], token)
    left = reached[turn, :, seat]  # [B, REACHED + width]
    tokens = left[:, REACHED:]
    first = torch.arange(tokens.shape[1], device=seat.device) == 0
    return Flight(
        torch.where(aloft, left[:, 0], start),
        torch.where(aloft, left[:, 1], 1),
        torch.where(aloft, left[:, 2], 0),
        torch.where(aloft[:, None], tokens, newest[:, None] * first),
    )


def _rows(table: torch.Tensor, flight: Flight, loops: int, lines: int) -> torch.Tensor:
    """lines: from one carry line of a seat to its next, see `SeatTable.carry_line`."""
    width = flight.tokens.shape[1]
    facts = table.long()
    seat, end, sparse_from = (facts[n][:, None] for n in (0, 4, 5))
    number = torch.arange(width, device=table.device)
    position = flight.position[:, None] + number
    active = (number < flight.size[:, None]) & (position < end)  # padding ends at 0
    line, sparse = position % width, position + 1 >= sparse_from
    columns = (
        seat,
        position,
        position + 1,
        (flight.age[:, None] - number) * loops,
        facts[FACTS:].t().gather(1, line) * sparse,
        DENSE + sparse * (CONSUME - DENSE),
        seat + line * lines,
        flight.tokens,
    )
    return torch.stack([column.expand_as(active) for column in columns]).int() * active


class FlightChooser(Protocol):
    """Picks the tokens of a step."""

    def decide(self, logits: torch.Tensor, flight: Flight) -> Drawn:
        """The choice of the whole model behind the oldest rows, as far as they end. logits: [B, vocab]."""
        ...

    def propose(self, logits: torch.Tensor, flight: Flight, may_draft: torch.Tensor) -> torch.Tensor:
        """int64 [B]: tokens drafted behind the youngest rows, as far as they begin. may_draft: bool [B], where False is
        to be put for those that have none.
        """
        ...


class LargestOfAll:
    """The largest scores, as they are."""

    def decide(self, logits: torch.Tensor, flight: Flight) -> Drawn:
        return largest(logits)

    def propose(self, logits: torch.Tensor, flight: Flight, may_draft: torch.Tensor) -> torch.Tensor:
        return largest(logits).tokens


class Pilot(Protocol):
    """As much of an executor as a step needs."""

    def advance(self, plan: RowPlan) -> torch.Tensor: ...


# What a step says of each request (`Drawn.flags`): bits, and above them the number of rows that were under way.
ENDED, FORESEEN, DRAFTED, BEGUN, ROWS = 1, 2, 4, 8, 16


def _as_it_is(function: Any, width: int) -> Any:
    return function


def run_step(
    executor: Pilot,
    plan: FlightPlan,
    chooser: FlightChooser | None = None,
    check: Callable[[RowPlan], None] | None = None,
    fuse: Fuse = _as_it_is,
) -> Drawn:
    """Submits a step; nothing is read. The tokens behind the oldest row of each request; flags: see above.

    What it reads of the requests it does not change, but what rows carry it does: a step that failed can be repeated
    after `run_again`.
    """
    chooser = chooser or LargestOfAll()
    flight, rows = plan.look(fuse)
    plan.begin(rows, (rows[LENGTH] > 0) & (rows[LOOP] == 0))
    logits = submit(executor.advance, plan.step(rows, flight), check)
    drawn = chooser.decide(logits[: plan.blocks], flight)
    may_draft = torch.full_like(flight.size, plan.width > 1, dtype=torch.bool)
    drafts = chooser.propose(logits[-plan.blocks :], flight, may_draft)
    drafts = torch.where(may_draft, drafts, FROM_DEVICE)
    drawn.flags, left, given_up = fuse(_move, plan.width)(plan.table, flight, rows, drawn.tokens, drafts)
    if plan.store is not None:
        plan.store.clear_rejected(rows[SLOT].long(), given_up)
    seat, turn = plan.table[0].long(), plan.table[FACTS - 1].long()
    plan.seats.reached[1 - turn, :, seat] = left
    return drawn


def run_again(executor: Pilot, plan: FlightPlan, check: Callable[[RowPlan], None] | None = None) -> None:
    """Takes rows that were lost up to their depths once more, from their tokens; the layers behind the loop as well."""
    _, rows = plan.look(_as_it_is)
    for step in range(plan.width - 1):
        submit(executor.advance, plan.again(rows, step), check)


def _move(
    table: torch.Tensor, flight: Flight, rows: torch.Tensor, finals: torch.Tensor, drafts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """After a step: one row out, one in, or the right token alone behind a wrong draft. finals, drafts: int64 [B],
    FROM_DEVICE for no draft.

    Flags [B], what is to be left in `SeatTable.reached` [B, REACHED + width], and the rows that are given up, bool
    [B, width].
    """
    width, active = flight.tokens.shape[1], rows[LENGTH, :, 0] > 0
    ended = active & (flight.age + 1 == width)
    foreseen = ended & (flight.size > 1) & (finals == flight.tokens[:, min(1, width - 1)])
    lost = ended & ~foreseen
    begun = active & (flight.age + 1 == flight.size)  # the youngest row
    room = flight.position + flight.size < table[4]
    drafted = begun & room & ~lost & (drafts != FROM_DEVICE)
    flags = ended * ENDED + foreseen * FORESEEN + drafted * DRAFTED + (active & (flight.age == 0)) * BEGUN

    number = torch.arange(width, device=rows.device)
    tokens = torch.where(number == flight.size[:, None], drafts[:, None], flight.tokens)
    tokens = torch.where(foreseen[:, None], _shifted(tokens, drafts), tokens)
    tokens = torch.where(lost[:, None], finals[:, None], tokens)
    count = torch.where(lost, 1, flight.size + drafted.long() - foreseen.long())
    age = torch.where(lost, 0, flight.age + 1 - foreseen.long())
    left = torch.cat((torch.stack((flight.position + ended, count, age), dim=1), tokens), dim=1)
    return flags + flight.size * ROWS, left, lost[:, None] & (number > 0)


def _shifted(tokens: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """The tokens of a full pipeline whose oldest row has gone; the draft follows the last one."""
    return torch.cat((tokens[:, 1:], drafts[:, None]), dim=1)
