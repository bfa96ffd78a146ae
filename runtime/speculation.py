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

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from sparse_compile.runtime.blocks import BlockFacts, BlockPlan, DevicePlan, Plan, build, run_round
from sparse_compile.runtime.plan import ProgramKind, RowPlan
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.results import Batch, Entry, TokenReader
from sparse_compile.runtime.sampler import Drawn, best, largest, processed, race
from sparse_compile.runtime.scheduler import Scheduler, Work

if TYPE_CHECKING:
    from sparse_compile.runtime.engine import Executor


@dataclass(frozen=True)
class Luck:
    """The random numbers of one request in one round: always as many, whatever becomes of its rows."""

    drafts: torch.Tensor  # [rows, vocab] exponential
    keeps: torch.Tensor  # [rows, 1] uniform
    finals: torch.Tensor  # [rows, vocab] exponential

    @classmethod
    def of(cls, rows: int, scores: torch.Tensor, generator: torch.Generator | None) -> Luck:
        """scores: [1, vocab], for the dtype and the device."""
        drafts, finals = (scores.new_empty(rows, scores.shape[1]) for _ in range(2))
        keeps = scores.new_empty(rows, 1)
        drafts.exponential_(1, generator=generator)
        keeps.uniform_(generator=generator)
        finals.exponential_(1, generator=generator)
        return cls(drafts, keeps, finals)


@dataclass
class Trip:
    """One request in a round, or in a step of pipelines."""

    request: Request
    number: int  # which of them it is
    _luck: Luck | None = field(default=None, init=False)

    @property
    def live(self) -> bool:
        """A callback may end any request at any time."""
        return self.request.state is RequestState.RUNNING

    @property
    def chooses(self) -> bool:
        """It takes more than the largest score."""
        return self.request.params.own_choice or self.request.params.keeps_scores

    def luck(self, rows: int, scores: torch.Tensor) -> Luck:
        """Its random numbers, drawn when they are first asked for."""
        if self._luck is None:
            self._luck = Luck.of(rows, scores, self.request.params.generator)
        return self._luck


@dataclass
class Block(Trip):
    """A block of rows in a round."""

    rows: int  # fewer when drafting had to stop
    chances: list[torch.Tensor] = field(default_factory=list)  # [1, vocab]: what drafts were drawn from


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


class Choices:
    """Tokens of a round with requests that choose for themselves, or whose scores are kept."""

    def __init__(self, blocks: Sequence[Block], most: int) -> None:
        """most: rows of a block, at most."""
        self.blocks, self.most = blocks, most

    def propose(self, logits: torch.Tensor, rows: torch.Tensor, line: int) -> torch.Tensor:
        """As `Chooser.propose`. A processor that raises ends the drafting of its request: if the token before is
        accepted, it will be asked again.
        """
        drawn = largest(logits)
        for block in self.blocks:
            if not block.live or not block.request.params.own_choice or line + 1 >= block.rows:
                continue
            try:
                token = self._draft(block, logits[block.number : block.number + 1], line)
            except Exception:
                stop(block, rows, line + 1)
                continue
            drawn.tokens[block.number : block.number + 1].copy_(token[0])
        self._give_up(rows)
        return drawn.tokens

    def decide(self, logits: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor) -> Drawn:
        """As `Chooser.decide`."""
        drawn = largest(logits)
        for block in self.blocks:
            if block.live and block.chooses:
                self._decide(block, logits, rows, drafts, drawn)
        self._give_up(rows)
        return drawn

    def _give_up(self, rows: torch.Tensor) -> None:
        """The rows of requests that a processor has ended."""
        for block in self.blocks:
            if not block.live:
                stop(block, rows, 0)

    def _draft(self, block: Block, logits: torch.Tensor, line: int) -> torch.Tensor:
        request, params = block.request, block.request.params
        scores = processed(request, logits, request.length + line)
        token = best(scores)
        if params.do_sample:
            block.chances.append(scores.softmax(dim=-1))
            token = race(block.chances[-1], block.luck(self.most, scores).drafts[line : line + 1])
        if params.processor is not None:
            request.note(token[0], request.length + line)
        return token

    def _decide(
        self, block: Block, logits: torch.Tensor, rows: torch.Tensor, drafts: torch.Tensor, drawn: Drawn
    ) -> None:
        """The request's own choice behind each of its rows, up to the first where a processor raises."""
        request, params = block.request, block.request.params
        first, scores = block.number * rows.shape[2], []
        for line in range(block.rows):
            row = first + line
            try:
                scores.append(processed(request, logits[row : row + 1], request.length + line))
            except Exception as error:
                drawn.errors[row] = error
                stop(block, rows, line + 1)
                break
            if params.keeps_scores:
                drawn.kept[row] = logits[row].clone(), scores[-1][0].clone()
        if not scores or not params.own_choice:
            return
        logs = torch.cat(scores).log_softmax(dim=-1)
        tokens = best(logs)
        if params.do_sample:
            tokens = self._draw(block, logs.exp(), rows[2, block.number] > 0, drafts[block.number])
        at = slice(first, first + len(scores))
        drawn.tokens[at].copy_(tokens[:, 0])
        drawn.logprobs[at].copy_(logs.gather(1, tokens)[:, 0])

    def _draw(
        self, block: Block, target: torch.Tensor, active: torch.Tensor, drafts: torch.Tensor
    ) -> torch.Tensor:
        """int64 [n, 1] by target [n, vocab]. active: bool [width]; drafts: int64 [width - 1]."""
        count, luck = target.shape[0], block.luck(self.most, target[:1])
        tokens, proposal = torch.zeros_like(target[:, :1], dtype=torch.int64), torch.zeros_like(target)
        drafted = min(count, len(block.chances))
        if drafted:
            tokens[:drafted, 0] = drafts[:drafted]
            # Where there is no row behind, nothing was drafted: the token is the target's.
            behind = torch.cat((active[1:], torch.zeros_like(active[:1])))[:drafted, None]
            proposal[:drafted] = torch.where(behind, torch.cat(block.chances[:drafted]), 0)
        return accept_or_draw(target, tokens, proposal, luck.keeps[:count], luck.finals[:count])


def stop(block: Block, rows: torch.Tensor, count: int) -> None:
    """Only the first `count` rows of a block remain. rows: int32 [8, B, width]."""
    block.rows = min(block.rows, count)
    rows[:, block.number, count:].zero_()


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


def accept_or_draw(
    target: torch.Tensor,
    drafts: torch.Tensor,
    proposal: torch.Tensor,
    keeps: torch.Tensor,
    finals: torch.Tensor,
) -> torch.Tensor:
    """int64 [n, 1]: the drafted token of each row where it is accepted, else one from what the draft has left over.

    target, proposal: [n, vocab] probabilities; all 0 in the proposal of a row without a draft, which takes its token
    from the target. drafts: int64 [n, 1]. keeps: [n, 1] uniform; finals: [n, vocab] exponential.
    """
    proposal = proposal.nan_to_num(nan=0.0)
    p, q = target.gather(1, drafts), proposal.gather(1, drafts)
    accepted = (keeps * q < p) & (q > 0)
    rest = (target - proposal).clamp(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)  # both are the same, up to rounding
    return torch.where(accepted, drafts, race(rest, finals))


@contextmanager
def generators_kept(requests: Sequence[Request]) -> Iterator[None]:
    """A block that does not come to its end takes nothing from the requests' generators."""
    generators = [one for request in requests if (one := request.params.generator) is not None]
    states = [generator.get_state() for generator in generators]
    try:
        yield
    except BaseException:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        raise
