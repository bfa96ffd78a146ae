"""Token pipelines: several rows of a request under way at depths 0, d, 2d ..., one out and one in with each step.

    step      row 7         row 8         row 9         row 10
    n         loops 2..3    loops 0..1 -> draft
    n + 1     (final)       loops 2..3    loops 0..1 -> draft
    n + 2                   (final)       loops 2..3    loops 0..1 -> draft

The oldest row finishes and gives the next token of the request. If that is what the row behind it was drafted with, all
goes on; otherwise the rows behind it are given up and the pipeline begins again with the right token. The youngest row
has been through the first loops, and the model's own head drafts the token of the row that begins with the next step.

Row p of a request has line p modulo the number of rows: there it keeps what it carries, and its slot.

What a pipeline is can always be had again from its tokens (`Flight.rows`): rows that were lost, by a failed run or a
suspension, are run again up to their depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from sparse_compile.runtime.plan import Segment
from sparse_compile.runtime.request import Request, RequestState
from sparse_compile.runtime.results import Batch, Entry, TokenReader
from sparse_compile.runtime.sampler import Drawn, best, draw, largest, processed
from sparse_compile.runtime.scheduler import Work
from sparse_compile.runtime.speculation import Speculator, accept_or_draw, check_logits, generators_kept

if TYPE_CHECKING:
    pass


@dataclass(frozen=True)
class Row:
    """A row under way. token: int32 [1], on the device. chance: [1, vocab], what a drawn draft was drawn from."""

    position: int
    token: torch.Tensor
    chance: torch.Tensor | None = None
    depth: int = 0  # bodies behind it


@dataclass
class Flight:
    """The rows of a request, the oldest first; the last may not have begun."""

    rows: list[Row] = field(default_factory=list)
    afloat: bool = True  # what the rows carry, their keys and their references are where they should be


@dataclass
class Stage:
    """One request in one step."""

    request: Request
    rows: list[Row]
    first: int = 0  # its first row in the run
    logits: int = 0  # its first row of logits

    @property
    def live(self) -> bool:
        return self.request.state is RequestState.RUNNING


class Pipelines(Speculator):
    """Runs steps of pipelines."""

    def run(self, works: Sequence[Work], batch: Batch) -> None:
        """A step of each request. Whatever passes through leaves them as they were, with rows to be run again."""
        requests = [work.request for work in works]
        try:
            with generators_kept(requests):
                self._step(requests, batch)
        except BaseException:
            for request in requests:
                if request.flight is not None:
                    request.flight.afloat = False
            raise

    def _step(self, requests: Sequence[Request], batch: Batch) -> None:
        stages = [Stage(request, self._rows(request)) for request in requests]
        for stage in stages:
            if stage.request.flight is not None and not stage.request.flight.afloat:
                self._again(stage)
        logits = self._advance(stages)
        finals = [stage for stage in stages if self._ends(stage.rows[0])]
        reader = self._finish(finals, logits) if finals else None
        foreseen = {}
        for number, stage in enumerate(finals):
            assert reader is not None
            foreseen[stage.request.id] = reader.flag(number)
        drafts = {
            stage.request.id: self._draft(stage, logits)
            for stage in stages
            if stage.live and foreseen.get(stage.request.id, True) and self._drafts(stage)
        }
        for stage in finals:
            if stage.live and not foreseen[stage.request.id]:
                self._give_up(stage.request, stage.rows[1:])
        for stage in stages:
            if stage.live:
                self._move(stage, drafts.get(stage.request.id), foreseen.get(stage.request.id, True))
        for number, stage in enumerate(finals):
            if stage.live and reader is not None:
                self._commit(stage, reader, number, foreseen[stage.request.id], batch)

    # ------------------------------------------------------------------ rows

    def _rows(self, request: Request) -> list[Row]:
        """The rows that run in this step: those under way, or the first of a pipeline that begins."""
        if request.flight is not None and request.flight.rows:
            return list(request.flight.rows)
        known = torch.tensor([request.tokens[request.computed]], dtype=torch.int32, device="cpu")
        return [Row(request.computed, known.to(self.plans.seats.device))]

    def _ends(self, row: Row) -> bool:
        return row.depth + self.drafting.loops >= self.scheduler.loops

    def _drafts(self, stage: Stage) -> bool:
        """Whether the youngest row begins now, and a row behind it could still give a token."""
        youngest = stage.rows[-1]
        room = youngest.position + 2 < stage.request.max_length
        return not youngest.depth and not self._ends(youngest) and room

    def _line(self, row: Row) -> int:
        return row.position % self.drafting.rows

    def _segment(self, request: Request, row: Row, wants_logits: bool) -> Segment:
        return self.scheduler.row(request, row.position, self._line(row), wants_logits, row.depth)

    def _renew(self, rows: Sequence[tuple[Request, Row]]) -> None:
        self.scheduler.renew([(request, self._line(row), row.position) for request, row in rows])

    # ------------------------------------------------------------------ runs

    def _submit(self, segments: Sequence[Segment], rows: Sequence[Row]) -> torch.Tensor:
        tokens = torch.cat([row.token for row in rows])
        plan = self.plans.build(segments, loops=self.drafting.loops, tokens=tokens)
        self.check(plan)
        logits = self.executor.advance(plan)
        check_logits(logits, plan)
        return logits

    def _advance(self, stages: Sequence[Stage]) -> torch.Tensor:
        """All rows of all requests, each some loops on; logits of the oldest where it ends, of the youngest's draft."""
        self._renew([(stage.request, row) for stage in stages for row in stage.rows if not row.depth])
        segments: list[Segment] = []
        count = 0
        for stage in stages:
            request, drafts = stage.request, self._drafts(stage)
            stage.first, stage.logits = len(segments), count
            for row in stage.rows:
                wants = self._ends(row) or (drafts and row is stage.rows[-1])
                segments.append(self._segment(request, row, wants))
                count += wants
        logits = self._submit(segments, [row for stage in stages for row in stage.rows])
        if self.store is not None:
            ended = [s for s in segments if s.sparse and s.loop + self.drafting.loops >= self.scheduler.loops]
            self.store.captured(segment.lease for segment in ended if segment.lease is not None)
        return logits

    def _again(self, stage: Stage) -> None:
        """Runs the rows of a request up to their depths, from their tokens; the layers behind the loop as well."""
        request = stage.request
        self._renew([(request, row) for row in stage.rows if row.depth])
        for row in stage.rows:
            for depth in range(0, row.depth, self.drafting.loops):
                self._submit([self._segment(request, replace(row, depth=depth), not depth)], [row])
        assert request.flight is not None
        request.flight.afloat = True

    # ------------------------------------------------------------------ tokens

    def _finish(self, stages: Sequence[Stage], logits: torch.Tensor) -> TokenReader:
        """The next token of each request, by the whole model; flags: whether the draft foresaw it."""
        places = torch.tensor([stage.logits for stage in stages], device="cpu").to(logits.device)
        raw = logits.index_select(0, places)
        drawn = largest(raw)
        for number, stage in enumerate(stages):
            params = stage.request.params
            if stage.live and (params.own_choice or params.keeps_scores):
                self._choose(stage, drawn, raw, number)
        # A pipeline of one row has no draft to be compared with.
        drafts = torch.cat([stage.rows[min(1, len(stage.rows) - 1)].token for stage in stages])
        behind = torch.tensor([len(stage.rows) > 1 for stage in stages], device="cpu").to(logits.device)
        drawn.flags = (drawn.tokens == drafts) & behind
        return TokenReader(drawn)

    @staticmethod
    def _choose(stage: Stage, drawn: Drawn, raw: torch.Tensor, number: int) -> None:
        request, params = stage.request, stage.request.params
        try:
            scores = processed(request, raw[number : number + 1], request.length)
        except Exception as error:
            drawn.errors[number] = error
            return
        if params.keeps_scores:
            drawn.kept[number] = raw[number].clone(), scores[0].clone()
        if not params.own_choice:
            return
        logs = scores.log_softmax(dim=-1)
        token = best(logs)
        if params.do_sample:
            behind = [row for row in stage.rows[1:2] if row.chance is not None]
            chances = [row.chance for row in behind if row.chance is not None]
            token = accept_or_draw(
                logs.exp(), [row.token.long() for row in behind], chances, params.generator
            )
        drawn.put(number, token[0], logs)

    def _draft(self, stage: Stage, logits: torch.Tensor) -> Row | None:
        """The row that begins with the next step; None where a processor raises, which will be asked again."""
        request, params, youngest = stage.request, stage.request.params, stage.rows[-1]
        row, chance = stage.logits + self._ends(stage.rows[0]), None
        raw = logits[row : row + 1]
        if params.own_choice:
            try:
                scores = processed(request, raw, youngest.position + 1)
            except Exception:
                return None
            chance = scores.softmax(dim=-1) if params.do_sample else None
            token = (best(scores) if chance is None else draw(chance, params.generator))[0]
        else:
            token = largest(raw).tokens
        request.note(token, youngest.position + 1)
        return Row(youngest.position + 1, token.to(torch.int32), chance)

    # ------------------------------------------------------------------ afterwards

    def _move(self, stage: Stage, draft: Row | None, foreseen: bool) -> None:
        """The pipeline as it is after the step: one row out, one in; or empty, behind a wrong draft."""
        request, rows = stage.request, stage.rows
        if rows[0].position == request.computed and not rows[0].depth:
            request.metrics.rounds += 1
        moved = [replace(row, depth=row.depth + self.drafting.loops) for row in rows]
        if self._ends(rows[0]):
            moved = moved[1:] if foreseen else []
        if draft is not None:
            request.metrics.drafted_tokens += 1
            moved.append(draft)
        request.flight = Flight(moved)

    def _give_up(self, request: Request, rows: Sequence[Row]) -> None:
        if self.store is None or not rows:
            return
        chain = [request.leases[self._line(row)] for row in rows]
        rejected = torch.ones(1, len(chain), dtype=torch.bool, device=self.store.device)
        self.store.invalidate([chain], rejected)

    def _commit(self, stage: Stage, reader: TokenReader, number: int, foreseen: bool, batch: Batch) -> None:
        request, error = stage.request, reader.drawn.errors.get(number)
        batch.entries.append(Entry(request, reader=reader, row=number, error=error, in_round=True))
        request.ending = error is not None
        request.computed += 1
        request.sampled(reader.drawn.tokens[number : number + 1])
        request.metrics.accepted_tokens += foreseen
        self.scheduler.counter.charge(request.metrics, self._segment(request, stage.rows[0], True))
