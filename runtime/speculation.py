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

Until the tokens that count are read, at the end of a round, nothing of a request changes but what can be written again:
a round that fails is repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from sparse_compile.runtime.plan import PlanBuilder, RowPlan, Segment
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.results import Batch, Entry, TokenReader
from sparse_compile.runtime.sampler import Drawn, best, draw, largest, processed
from sparse_compile.runtime.scheduler import Scheduler, Work
from sparse_compile.runtime.seats import to_device

if TYPE_CHECKING:
    from sparse_compile.runtime.engine import Executor

NO_DRAFT = -1


@dataclass
class Block:
    """The rows of one request in a round, as far as they have come."""

    request: Request
    segments: list[Segment]  # of its rows; fewer when drafting had to stop
    inputs: list[torch.Tensor] = field(default_factory=list)  # int32 [1]: the token of each row
    drafts: list[torch.Tensor] = field(
        default_factory=list
    )  # int64 [1]: the token drafted behind each but the last
    chances: list[torch.Tensor] = field(default_factory=list)  # [1, vocab]: what those were drawn from
    first: int = 0  # its first row in the run that verifies

    @property
    def live(self) -> bool:
        """A callback may end any request at any time."""
        return self.request.state is RequestState.RUNNING

    @property
    def rows(self) -> int:
        return len(self.segments)

    def stop(self, rows: int) -> None:
        """Only the first `rows` remain."""
        del self.segments[rows:], self.drafts[rows - 1 :], self.chances[rows - 1 :]


class Speculator:
    """What rounds and pipelines run with. check: what a plan must satisfy before it runs."""

    def __init__(
        self,
        executor: Executor,
        store: ReferenceStore | None,
        scheduler: Scheduler,
        plans: PlanBuilder,
        check: Callable[[RowPlan], None],
    ) -> None:
        assert scheduler.options.drafting is not None
        self.executor, self.store, self.scheduler, self.plans = executor, store, scheduler, plans
        self.check, self.drafting = check, scheduler.options.drafting


class Rounds(Speculator):
    """Runs rounds."""

    def run(self, works: Sequence[Work], batch: Batch) -> None:
        """A round of each request. Whatever passes through leaves them as they were."""
        with generators_kept([work.request for work in works]):
            rows = self.scheduler.blocks(works)
            blocks = [Block(work.request, own) for work, own in zip(works, rows, strict=True)]
            for line in range(max(block.rows for block in blocks)):
                self._draft([block for block in blocks if block.live and block.rows > line], line)
            blocks = [block for block in blocks if block.live]
            if not blocks:
                return
            drawn = self._verify(blocks)
            blocks = [block for block in blocks if block.live]
            if not blocks:
                return
            self._accept(blocks, drawn)
            reader = TokenReader(drawn)
            counts = [sum(reader.flag(block.first + n) for n in range(block.rows)) for block in blocks]
        for block, count in zip(blocks, counts, strict=True):
            self._commit(block, count, reader, batch)

    # ------------------------------------------------------------------ draft

    def _draft(self, blocks: Sequence[Block], line: int) -> None:
        """Row `line` of each block through the first loops, and the token that it makes for the next row."""
        if not blocks:
            return
        plan = self.plans.build([block.segments[line] for block in blocks], loops=self.drafting.loops)
        self.check(plan)
        logits = self.executor.draft(plan)
        check_logits(logits, plan)
        for block, token in zip(blocks, plan.packed[-1].split(1), strict=True):
            block.inputs.append(token)
        drafting = [block for block in blocks if block.segments[line].wants_logits]
        if not drafting:
            return
        tokens = self.propose(drafting, logits, line)
        seats = torch.tensor([block.request.seat for block in drafting], device="cpu")
        table = self.scheduler.holdings.seats
        table.last_token.index_copy_(0, to_device(seats, table.device), tokens)
        for block, token in zip(drafting, tokens.split(1), strict=True):
            block.drafts.append(token)
            block.request.note(token, block.request.length + line)
            if block.rows == line + 1:
                block.stop(line + 1)

    def propose(self, blocks: Sequence[Block], logits: torch.Tensor, line: int) -> torch.Tensor:
        """int64 [len(blocks)]: the tokens drafted behind row `line` of each block.

        A processor that raises ends the drafting of its request: if the token before is accepted, it will be asked
        again.
        """
        drawn = largest(logits)
        for row, block in enumerate(blocks):
            params = block.request.params
            if not params.own_choice:
                continue
            try:
                scores = processed(block.request, logits[row : row + 1], block.request.length + line)
            except Exception:
                del block.segments[line + 1 :]
                continue
            token = best(scores)
            if params.do_sample:
                block.chances.append(scores.softmax(dim=-1))
                token = draw(block.chances[-1], params.generator)
            drawn.tokens[row : row + 1].copy_(token[0])
        return drawn.tokens

    # ------------------------------------------------------------------ verify

    def _verify(self, blocks: Sequence[Block]) -> Drawn:
        """All rows through the other loops, and the tokens that the whole model chooses behind each."""
        depth = self.drafting.loops
        segments: list[Segment] = []
        for block in blocks:
            block.first = len(segments)
            segments += [replace(segment, loop=depth, wants_logits=True) for segment in block.segments]
        tokens = torch.cat([token for block in blocks for token in block.inputs[: block.rows]])
        plan = self.plans.build(segments, loops=self.scheduler.loops - depth, tokens=tokens)
        self.check(plan)
        logits = self.executor.verify(plan)
        check_logits(logits, plan)
        if self.store is not None:
            self.store.captured(plan.leases)
        drawn = largest(logits)
        for block in blocks:
            if block.live and (block.request.params.own_choice or block.request.params.keeps_scores):
                self._choose(block, drawn, logits)
        return drawn

    @staticmethod
    def _choose(block: Block, drawn: Drawn, logits: torch.Tensor) -> None:
        """The request's own choice behind each of its rows, up to the first where a processor raises."""
        request, params, scores = block.request, block.request.params, []
        for line in range(block.rows):
            row = block.first + line
            try:
                scores.append(processed(request, logits[row : row + 1], request.length + line))
            except Exception as error:
                drawn.errors[row] = error
                break
            if params.keeps_scores:
                drawn.kept[row] = logits[row].clone(), scores[-1][0].clone()
        if not scores or not params.own_choice:
            return
        logs = torch.cat(scores).log_softmax(dim=-1)
        tokens = best(logs)
        if params.do_sample:
            tokens = accept_or_draw(logs.exp(), block.drafts, block.chances, params.generator)
        at = slice(block.first, block.first + len(scores))
        drawn.tokens[at].copy_(tokens[:, 0])
        drawn.logprobs[at].copy_(logs.gather(1, tokens)[:, 0])

    # ------------------------------------------------------------------ accept

    def _accept(self, blocks: Sequence[Block], drawn: Drawn) -> None:
        """On the device: which tokens count, the newest of each request for its seat, and what is invalid now."""
        device, width = drawn.tokens.device, max(block.rows for block in blocks)
        places = [[block.first + min(n, block.rows - 1) for n in range(width)] for block in blocks]
        table = to_device(torch.tensor(places, device="cpu"), device)  # [B, width] rows of `drawn`
        none = torch.full((1,), NO_DRAFT, device=device)
        drafts = torch.cat([token for block in blocks for token in self._drafts(block, drawn, none, width)])
        foreseen = drawn.tokens[table] == drafts.view(-1, width)
        ahead = foreseen.to(torch.int64).cumprod(dim=1)[:, :-1]  # none from the last row of a block on
        counts = torch.cat((torch.ones_like(table[:, :1]), ahead), dim=1)
        # A row that is in the table more than once is the last of its block, and only the first place can count.
        drawn.flags = torch.zeros_like(drawn.tokens).scatter_add_(0, table.flatten(), counts.flatten())
        newest = table.gather(1, counts.sum(dim=1, keepdim=True) - 1)[:, 0]
        seats = self.scheduler.holdings.seats
        lines = to_device(torch.tensor([block.request.seat for block in blocks], device="cpu"), device)
        seats.last_token.index_copy_(0, lines, drawn.tokens[newest])
        if self.store is not None:
            self.store.invalidate([block.request.leases[: block.rows] for block in blocks], counts == 0)

    @staticmethod
    def _drafts(block: Block, drawn: Drawn, none: torch.Tensor, width: int) -> Iterator[torch.Tensor]:
        """The token drafted behind each row, up to `width` rows; none behind the last row and one that has an error."""
        for line in range(width):
            known = line + 1 < block.rows and block.first + line not in drawn.errors
            yield block.drafts[line] if known else none

    def _commit(self, block: Block, count: int, reader: TokenReader, batch: Batch) -> None:
        """Files the `count` tokens that a round gave a request."""
        request, metrics, drawn = block.request, block.request.metrics, reader.drawn
        rows = range(block.first, block.first + count)
        for row in rows:
            batch.entries.append(
                Entry(request, reader=reader, row=row, error=drawn.errors.get(row), in_round=True)
            )
        request.ending = any(row in drawn.errors for row in rows)
        request.computed += count
        request.sampled(drawn.tokens[rows.start : rows.stop])
        request.pace = count if request.pace is None else (request.pace + count) / 2
        metrics.rounds += 1
        metrics.drafted_tokens += len(block.drafts)
        metrics.accepted_tokens += count - 1
        for segment in block.segments:
            self.scheduler.counter.charge(metrics, segment)


def accept_or_draw(
    target: torch.Tensor,
    drafts: Sequence[torch.Tensor],
    chances: Sequence[torch.Tensor],
    generator: torch.Generator | None,
) -> torch.Tensor:
    """int64 [n, 1]: the drafted token of each row where it is accepted, else one from what the draft has left over.

    target: [n, vocab] probabilities. drafts: int64 [1] and chances: [1, vocab] of n - 1 rows at least; a row without a
    draft takes its token from the target.
    """
    rows = target.shape[0]
    drafts, chances = list(drafts[:rows]), list(chances[:rows])
    if len(drafts) < rows:
        drafts.append(torch.zeros(1, dtype=torch.int64, device=target.device))
        chances.append(torch.zeros_like(target[:1]))
    tokens, proposal = torch.cat(drafts)[:, None], torch.cat(chances).nan_to_num(nan=0.0)
    p, q = target.gather(1, tokens), proposal.gather(1, tokens)
    luck = torch.empty_like(p).uniform_(generator=generator)
    accepted = (luck * q < p) & (q > 0)
    rest = (target - proposal).clamp(min=0)
    rest = torch.where(rest.sum(dim=-1, keepdim=True) > 0, rest, target)  # both are the same, up to rounding
    return torch.where(accepted, tokens, draw(rest, generator))


def check_logits(logits: torch.Tensor, plan: RowPlan) -> None:
    """Raises RuntimeError unless an executor gave a row of logits for each that was asked for."""
    if logits.dim() != 2 or logits.shape[0] != plan.logit_rows.shape[0]:
        raise RuntimeError(
            f"the executor gave logits {tuple(logits.shape)} for {plan.logit_rows.shape[0]} rows"
        )


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
