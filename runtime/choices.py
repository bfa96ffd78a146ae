"""Choices that requests of a round make for themselves: processors, draws, scores that are kept.

They are made one request after the other, on the device, outside of CUDA graphs. The random numbers of a round are
drawn all at once from the generator of the request, always as many, so that its tokens depend neither on what becomes
of the rows nor on when the host reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from sparse_compile.runtime.blocks import LENGTH
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.sampler import Drawn, best, largest, processed, race


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
            tokens = self._draw(block, logs.exp(), rows[LENGTH, block.number] > 0, drafts[block.number])
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
