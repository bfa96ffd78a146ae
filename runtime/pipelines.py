"""Token pipelines: several rows of a request under way at depths 0, d, 2d ..., one out and one in with each step.

    step      row 7         row 8         row 9         row 10
    n         loops 2..3    loops 0..1 -> draft
    n + 1     (final)       loops 2..3    loops 0..1 -> draft
    n + 2                   (final)       loops 2..3    loops 0..1 -> draft

The oldest row finishes and gives the next token of the request. If that is what the row behind it was drafted with, all
goes on; otherwise the rows behind it are given up and the pipeline begins again with the right token. The youngest row
has been through the first loops, and the model's own head drafts the token of the row that begins with the next step.

All of it is on the device (`runtime/flights.py`), so a step can be submitted before the host has read the one before.
What rows carry does not survive a failed run or a suspension; but what a pipeline is can always be had again from its
tokens: its rows are run again up to their depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from sparse_compile.runtime.choices import Trip, accept_or_draw, generators_kept
from sparse_compile.runtime.flights import (
    BEGUN,
    DRAFTED,
    ENDED,
    FORESEEN,
    ROWS,
    Flight,
    FlightPlan,
    run_again,
    run_step,
)
from sparse_compile.runtime.request import Request
from sparse_compile.runtime.results import Batch, Entry, TokenReader
from sparse_compile.runtime.sampler import Drawn, best, largest, processed, race
from sparse_compile.runtime.scheduler import Work
from sparse_compile.runtime.speculation import Speculator


@dataclass
class Course:
    """The pipeline of a request, as far as the host knows it: as it was when the last step was read."""

    aloft: bool = False  # a step was submitted
    count: int = 1  # rows under way
    age: int = 0  # steps that the oldest of them has behind it
    afloat: bool = True  # what the rows carry, their keys and their references are where they should be
    chances: torch.Tensor | None = None  # [lines, vocab]: what the tokens of rows were drawn from

    @property
    def lost(self) -> bool:
        return self.aloft and not self.afloat


class FlightChoices:
    """Tokens of a step with requests that choose for themselves, or whose scores are kept."""

    def __init__(self, trips: Sequence[Trip], lines: int) -> None:
        self.trips, self.lines = trips, lines

    def decide(self, logits: torch.Tensor, flight: Flight) -> Drawn:
        """As `FlightChooser.decide`."""
        drawn = largest(logits)
        for trip in self.trips:
            params = trip.request.params
            if trip.live and (params.own_choice or params.keeps_scores) and self._ends(trip):
                try:
                    self._decide(trip, logits[trip.number : trip.number + 1], flight, drawn)
                except Exception as error:
                    drawn.errors[trip.number] = error
        return drawn

    def propose(self, logits: torch.Tensor, flight: Flight, may_draft: torch.Tensor) -> torch.Tensor:
        """As `FlightChooser.propose`. A processor that raises keeps its request from drafting: it will be asked again
        if there is to be such a token.
        """
        drawn = largest(logits)
        for trip in self.trips:
            if not trip.live or not trip.request.params.own_choice or not self._begins(trip):
                continue
            try:
                token = self._draft(trip, logits[trip.number : trip.number + 1], flight)
            except Exception:
                may_draft[trip.number].fill_(False)
                continue
            drawn.tokens[trip.number : trip.number + 1].copy_(token[0])
        return drawn.tokens

    def _ends(self, trip: Trip) -> bool:
        """Whether the oldest row may end; a processor is only asked where it does."""
        course = course_of(trip.request)
        return trip.request.params.processor is None or course.age + 1 == self.lines

    def _begins(self, trip: Trip) -> bool:
        """Whether the youngest row may begin, with room behind it."""
        request, course = trip.request, course_of(trip.request)
        if self.lines == 1 or request.params.processor is None:
            return self.lines > 1
        return course.age + 1 == course.count and request.computed + course.count < request.max_length - 1

    def _decide(self, trip: Trip, logits: torch.Tensor, flight: Flight, drawn: Drawn) -> None:
        request, params = trip.request, trip.request.params
        scores = processed(request, logits, request.length)
        if params.keeps_scores:
            drawn.kept[trip.number] = logits[0].clone(), scores[0].clone()
        if not params.own_choice:
            return
        logs = scores.log_softmax(dim=-1)
        token = best(logs)
        if params.do_sample:
            luck, chances = trip.luck(1, scores), self._chances(request, scores)
            mine = slice(trip.number, trip.number + 1)
            behind = (flight.position[mine] + 1) % self.lines
            drafted = flight.size[mine, None] > 1
            proposal = torch.where(drafted, chances.index_select(0, behind), 0)
            draft = torch.where(drafted, flight.tokens[mine, min(1, self.lines - 1), None], 0)
            token = accept_or_draw(logs.exp(), draft, proposal, luck.keeps, luck.finals)
        drawn.put(trip.number, token[0], logs)

    def _draft(self, trip: Trip, logits: torch.Tensor, flight: Flight) -> torch.Tensor:
        request, params = trip.request, trip.request.params
        # Where there is a processor to be told, all steps are read, and this is right.
        at = request.computed + course_of(request).count
        scores = processed(request, logits, at)
        token = best(scores)
        if params.do_sample:
            chance, chances = scores.softmax(dim=-1), self._chances(request, scores)
            mine = slice(trip.number, trip.number + 1)
            chances.index_copy_(0, (flight.position[mine] + flight.size[mine]) % self.lines, chance)
            token = race(chance, trip.luck(1, scores).drafts)
        if params.processor is not None:
            request.note(token[0], at)
        return token

    def _chances(self, request: Request, scores: torch.Tensor) -> torch.Tensor:
        course = course_of(request)
        if course.chances is None:
            course.chances = scores.new_zeros(self.lines, scores.shape[1])
        return course.chances


class Pipelines(Speculator):
    """Runs steps of pipelines."""

    def run(self, works: Sequence[Work], batch: Batch) -> None:
        """A step of each request. Whatever passes through leaves them as they were, with rows to be run again."""
        requests = [work.request for work in works]
        trips = [Trip(request, number) for number, request in enumerate(requests)]
        courses = [course_of(request) for request in requests]
        try:
            with generators_kept(requests):
                lost = [one for one, course in zip(requests, courses, strict=True) if course.lost]
                if lost:
                    run_again(self.executor, self._plan(lost), self.check)
                reader = TokenReader(self._submit(self._plan(requests), trips))
        except BaseException:
            for course in courses:
                course.afloat = False
            raise
        for trip in trips:
            if trip.live:
                self._file(trip, reader, batch)

    def _plan(self, requests: Sequence[Request]) -> FlightPlan:
        rows = self.drafting.rows
        plan = self.plan(FlightPlan, [(request, rows, course_of(request).aloft) for request in requests])
        return plan if plan.kind == "dense" else replace(plan, kind="mixed")

    def _submit(self, plan: FlightPlan, trips: Sequence[Trip]) -> Drawn:
        if any(trip.chooses for trip in trips):
            drawn = run_step(self.executor, plan, FlightChoices(trips, self.drafting.rows), self.check)
        else:
            drawn = self.executor.step(plan)
        self.captured(plan, trips)
        return drawn

    # ------------------------------------------------------------------ tokens

    def _file(self, trip: Trip, reader: TokenReader, batch: Batch) -> None:
        """A step of a request is submitted. Nothing here may fail: it cannot be repeated any more."""
        request, course = trip.request, course_of(trip.request)
        course.aloft = course.afloat = True
        request.submitted(least=0, most=1)
        batch.at_once |= request.params.processor is not None
        batch.entries.append(Entry(request, settle=partial(self._settle, trip, reader, batch)))

    def _settle(self, trip: Trip, reader: TokenReader, batch: Batch) -> list[Entry]:
        """The token that a step gave a request, if it gave one, now that it can be read."""
        request, metrics, said = trip.request, trip.request.metrics, reader.number(trip.number)
        request.settled(least=0, most=1)
        metrics.rounds += bool(said & BEGUN)
        metrics.waiting_rounds += bool(said & BEGUN) and self.waited(batch)
        metrics.drafted_tokens += bool(said & DRAFTED)
        self._follow(course_of(request), said)
        if not said & ENDED:
            return []
        metrics.accepted_tokens += bool(said & FORESEEN)
        self._charge(request, said)
        request.computed += 1
        error = reader.drawn.errors.get(trip.number)
        request.ending |= error is not None
        request.sampled(reader.drawn.tokens[trip.number : trip.number + 1])
        return [Entry(request, reader=reader, row=trip.number, error=error, in_round=True)]

    @staticmethod
    def _follow(course: Course, said: int) -> None:
        """What the device did to the rows under way."""
        if said & ENDED and not said & FORESEEN:
            course.count, course.age = 1, 0
            return
        gone = bool(said & FORESEEN)
        course.count += bool(said & DRAFTED) - gone
        course.age += 1 - gone

    def _charge(self, request: Request, said: int) -> None:
        """The row that ended and, behind a wrong draft, those that are given up, as far as they have come."""
        under_way = said // ROWS if not said & FORESEEN else 1
        for number in range(under_way):
            segment = self.scheduler.row(request, request.computed + number)
            drafted = number + 1 < said // ROWS
            loops = (self.drafting.rows - number) * self.drafting.loops if number else None
            self.scheduler.counter.charge(request.metrics, segment, drafted, loops)


def course_of(request: Request) -> Course:
    """At first that of a row that is about to take off."""
    if request.course is None:
        request.course = Course()
    return request.course
