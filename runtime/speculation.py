"""Rounds of block self-speculation: a looped model drafts for itself.

A round of a request is a block of rows. The first has the newest token; each goes through the first loops of the model,
whose own head then drafts the token of the next one:

    draft      row 0: loops 0 .. d-1, head -> token 1;    row 1: loops 0 .. d-1, head -> token 2;    ...
    verify     all rows at once: loops d .. L-1, head -> the tokens that ordinary decoding would choose
    accept     tokens up to the first that the draft did not foresee, which is the last one that counts

The keys, values and captures of the rows up to there are those of ordinary decoding. What lies behind them is never
seen: keys and values are written again before a row can look at them, references are invalidated. With sampling, a
drafted token x is kept with probability min(1, p(x) / q(x)), for q the distribution it was drawn from and p that of the
whole model; the token in its place is drawn from max(0, p - q). So tokens are distributed as p (Leviathan et al. 2023).

All of it is on the device (`runtime/blocks.py`), so a round can be submitted before the host has read the tokens of the
one before. Here is what the host adds: who takes part, choices that are a request's own, and what the tokens mean once
they are read. Until then nothing of a request changes but what can be written again: a round that fails is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from sparse_compile.runtime.blocks import BlockFacts, BlockPlan, DevicePlan, Plan, build, run_round
from sparse_compile.runtime.choices import Block, Choices, Trip, generators_kept
from sparse_compile.runtime.plan import ProgramKind, RowPlan
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import Request
from sparse_compile.runtime.results import Batch, Entry, TokenReader
from sparse_compile.runtime.sampler import Drawn
from sparse_compile.runtime.scheduler import Scheduler, Work

if TYPE_CHECKING:
    from sparse_compile.runtime.engine import Executor


class Speculator:
    """What rounds and pipelines have in common. check: what a plan must satisfy before it runs."""

    def __init__(
        self,
        executor: Executor,
        store: ReferenceStore | None,
        scheduler: Scheduler,
        check: Callable[[RowPlan], None],
    ) -> None:
        assert scheduler.options.drafting is not None
        self.executor, self.store, self.scheduler = executor, store, scheduler
        self.check, self.drafting = check, scheduler.options.drafting

    def plan(self, made: type[Plan], blocks: Sequence[tuple[Request, int, bool]]) -> Plan:
        """blocks: request, number of rows, and whether the device alone knows where they begin."""
        facts = [self.scheduler.block(request, rows, aloft) for request, rows, aloft in blocks]
        spans = [_span(request, rows) for request, rows, _ in blocks]
        leases = [request.leases[:rows] for request, rows, _ in blocks]
        seats, longest = self.scheduler.holdings.seats, max(most for _, most in spans)
        kind = _kind(facts, spans)
        return build(made, seats, self.store, facts, self.drafting.loops, kind, longest, leases)

    def captured(self, plan: DevicePlan, trips: Sequence[Trip]) -> None:
        """The captures of a plan are submitted. Leases of requests that have ended meanwhile are gone."""
        if self.store is not None:
            live = [own for trip, own in zip(trips, plan.leases, strict=True) if trip.live]
            self.store.captured(lease for own in live for lease in own)

    def waited(self, batch: Batch) -> bool:
        """Whether a step was read before the next one, though steps are asynchronous."""
        return batch.at_once and self.scheduler.options.async_steps


class Rounds(Speculator):
    """Runs rounds."""

    def run(self, works: Sequence[Work], batch: Batch) -> None:
        """A round of each request. Whatever passes through leaves them as they were."""
        with generators_kept([work.request for work in works]):
            blocks = [Block(work.request, number, work.rows) for number, work in enumerate(works)]
            plan = self.plan(BlockPlan, [(w.request, w.rows, w.request.unread > 0) for w in works])
            reader = TokenReader(self._submit(plan, blocks))
        for block, work in zip(blocks, works, strict=True):
            if block.live:
                self._file(block, work.rows, reader, plan.width, batch)

    def _submit(self, plan: BlockPlan, blocks: Sequence[Block]) -> Drawn:
        if any(block.chooses for block in blocks):
            chooser = Choices(blocks, self.drafting.rows)
            drawn = run_round(self.executor, plan, chooser, partial(self._check, blocks))
        else:
            drawn = self.executor.round(plan)
        self.captured(plan, blocks)
        return drawn

    def _check(self, blocks: Sequence[Block], plan: RowPlan) -> None:
        """Without the leases of requests that a callback has ended meanwhile; their rows are given up."""
        ended = {block.request.id for block in blocks if not block.live}
        self.check(replace(plan, leases=tuple(one for one in plan.leases if one.request not in ended)))

    # ------------------------------------------------------------------ tokens

    def _file(self, block: Block, rows: int, reader: TokenReader, width: int, batch: Batch) -> None:
        """A round of a request is submitted. Nothing here may fail: it cannot be repeated any more."""
        request = block.request
        request.submitted(least=1, most=rows)
        batch.at_once |= request.params.processor is not None  # it must be told how many tokens there are
        settle = partial(self._settle, block, rows, reader, width, batch)
        batch.entries.append(Entry(request, settle=settle))

    def _settle(self, block: Block, rows: int, reader: TokenReader, width: int, batch: Batch) -> list[Entry]:
        """The tokens that a round gave a request, now that they can be read."""
        request, metrics, drawn = block.request, block.request.metrics, reader.drawn
        first, start = block.number * width, request.computed
        count = sum(reader.number(first + line) for line in range(width))
        request.settled(least=1, most=rows)
        request.computed += count
        request.sampled(drawn.tokens[first : first + count])
        before = request.paces[1]
        request.paces = before, count if before is None else (before + count) / 2
        done = min(block.rows, request.max_length - 1 - start)
        metrics.rounds += 1
        metrics.waiting_rounds += self.waited(batch)
        metrics.drafted_tokens += done - 1
        metrics.accepted_tokens += count - 1
        for line in range(done):
            segment = self.scheduler.row(request, start + line)
            self.scheduler.counter.charge(metrics, segment, drafted=line + 1 < done)
        entries = []
        for row in range(first, first + count):
            error = drawn.errors.get(row)
            request.ending |= error is not None
            entries.append(Entry(request, reader=reader, row=row, error=error, in_round=True))
        return entries


def _span(request: Request, rows: int) -> tuple[int, int]:
    """Keys that the first row sees at least, and the last one at most, as far as the host knows."""
    most = request.computed + request.ahead + rows
    return request.computed + request.coming + 1, min(most, request.max_length - 1)


def _kind(facts: Sequence[BlockFacts], spans: Sequence[tuple[int, int]]) -> ProgramKind:
    """What the rows of a round are; "mixed" where the host cannot tell."""
    pairs = list(zip(facts, spans, strict=True))
    if all(least >= block.sparse_from for block, (least, _) in pairs):
        return "sparse"
    return "dense" if all(most < block.sparse_from for block, (_, most) in pairs) else "mixed"
