"""Decode steps from CUDA graphs: one graph per bucket, captured once and replayed over refilled plan buffers.

A bucket is everything that a launch takes from the host: which run it is, the number of rows, the program variant, the
width of the block table that the kernels are told of, and for rows at several depths how many bodies run and which of
them may capture. Lengths, positions, tokens, slots, modes and pages are read on the device. Rows beyond those of a plan
are padding: they touch the dummy page and slot only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeVar

import torch

from .blocks import BlockPlan, DevicePlan, padding
from .executor import Executor
from .flights import FlightPlan
from .options import Drafting
from .plan import ProgramKind, RowPlan, padding_plan
from .reference_store import ReferenceStore
from .sampler import Drawn
from .seats import SeatTable

LEAST_KEYS = 1024  # the narrowest block table of a bucket, in keys
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


Out = TypeVar("Out")
Run = Literal["decode", "draft", "verify", "advance", "round", "step"]  # methods of an executor


@dataclass(frozen=True)
class BucketKey:
    """What a graph was captured for. captures: per body of a run of rows at any depth; () for others. heads: False for
    drafts that nobody wants. width: rows of each block of a round, whose `rows` are blocks.
    """

    rows: int
    kind: ProgramKind
    pages: int
    loops: int | None = None
    captures: tuple[bool, ...] = ()
    run: Run = "decode"
    heads: bool = True
    width: int = 1


@dataclass(frozen=True)
class Bucket:
    """A captured graph, the plan whose tensors it reads, and where it leaves the logits `[rows, vocab]`."""

    graph: torch.cuda.CUDAGraph
    plan: RowPlan
    logits: torch.Tensor


@dataclass(frozen=True)
class RoundBucket:
    """The same for a round of blocks or a step of pipelines, acceptance included: it leaves what was drawn."""

    graph: torch.cuda.CUDAGraph
    plan: DevicePlan
    drawn: Drawn


class GraphExecutor:
    """An executor whose decode steps are replayed. Prompts, and steps beyond the largest bucket, run as they are.

    All buckets share one memory pool, so only the logits of the last run are good.
    """

    def __init__(self, inner: Executor, page_size: int, rows: Sequence[int] = ROW_BUCKETS) -> None:
        self.inner = inner
        self.page_size = page_size
        self.row_buckets = tuple(sorted(rows))
        self.buckets: dict[BucketKey, Bucket] = {}
        self.round_buckets: dict[BucketKey, RoundBucket] = {}
        self._memory = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
        self._stream: torch.cuda.Stream | None = None

    @property
    def loops(self) -> int:
        """Bodies that a row goes through; 1 for a program that is not rolled."""
        return self.inner.loops

    @property
    def captured(self) -> int:
        """Graphs so far, those of whole rounds and steps among them."""
        return len(self.buckets) + len(self.round_buckets)

    def prefill(self, plan: RowPlan) -> torch.Tensor:
        """As `Executor.prefill`."""
        return self.inner.prefill(plan)

    def decode(self, plan: RowPlan) -> torch.Tensor:
        """As `Executor.decode`; the logits are overwritten by the next run."""
        return self._replay("decode", plan)

    def draft(self, plan: RowPlan) -> torch.Tensor:
        """As `Executor.draft`; the logits are overwritten by the next run."""
        return self._replay("draft", plan)

    def verify(self, plan: RowPlan) -> torch.Tensor:
        """As `Executor.verify`; the logits are overwritten by the next run."""
        return self._replay("verify", plan)

    def advance(self, plan: RowPlan) -> torch.Tensor:
        """As `Executor.advance`; the logits are overwritten by the next run."""
        return self._replay("advance", plan)

    def round(self, plan: BlockPlan) -> Drawn:
        """As `Executor.round`; what was drawn is overwritten by the next run."""
        return self._replay_round("round", plan)

    def step(self, plan: FlightPlan) -> Drawn:
        """As `Executor.step`; what was drawn is overwritten by the next run."""
        return self._replay_round("step", plan)

    def save(self, seat: int) -> tuple[torch.Tensor, ...]:
        """As `Executor.save`."""
        return self.inner.save(seat)

    def load(self, seat: int, carried: tuple[torch.Tensor, ...]) -> None:
        """As `Executor.load`."""
        self.inner.load(seat, carried)

    # ------------------------------------------------------------------ buckets

    def _replay(self, run: Run, plan: RowPlan) -> torch.Tensor:
        key = self.key(plan, run)
        if key is None:
            return getattr(self.inner, run)(plan)
        bucket = self.buckets.get(key) or self.capture(key, plan.block_table, plan.carry_lines)
        self._fill(bucket.plan, plan)
        bucket.graph.replay()
        return bucket.logits[: plan.logit_rows.shape[0]]

    def _replay_round(self, run: Run, plan: DevicePlan) -> Drawn:
        rows = self._rows(plan.blocks)
        if rows is None:
            return getattr(self.inner, run)(plan)
        pages = self._pages(plan.max_length, plan.block_table.shape[1])
        key = BucketKey(rows, plan.kind, pages, plan.loops, run=run, width=plan.width)
        bucket = self.round_buckets.get(key) or self.capture_round(key, plan.seats, plan.store)
        bucket.plan.fill(plan)
        bucket.graph.replay()
        drawn = bucket.drawn
        assert drawn.flags is not None
        count = drawn.flags.shape[0] // rows * plan.blocks
        return Drawn(drawn.tokens[:count], drawn.logprobs[:count], flags=drawn.flags[:count])

    def key(self, plan: RowPlan, run: Run = "decode") -> BucketKey | None:
        """The bucket of a decode plan; None for one with more rows than the largest."""
        rows = self._rows(plan.rows)
        if rows is None:
            return None
        pages = self._pages(plan.max_length, plan.block_table.shape[1])
        heads = run != "draft" or plan.logit_rows.shape[0] > 0
        if plan.loops is None or run in ("draft", "verify"):  # all rows at one depth
            return BucketKey(rows, plan.kind, pages, plan.loops, (), run, heads)
        return BucketKey(rows, "mixed", pages, plan.loops, self.inner.depths.captures_at(plan), run, heads)

    def widths(self, table_pages: int) -> list[int]:
        """Every width of block table that a bucket may have, in pages."""
        widths = [self._pages(1, table_pages)]
        while widths[-1] < table_pages:
            widths.append(min(2 * widths[-1], table_pages))
        return widths

    def capture(self, key: BucketKey, block_table: torch.Tensor, carry_lines: int | None = None) -> Bucket:
        """Run the bucket once, so that all is compiled and allocated, then capture it over padding rows."""
        device = block_table.device
        table = block_table[:, : key.pages]
        reach = key.pages * self.page_size
        plan = padding_plan(table, key.rows, key.kind, reach, key.loops, carry_lines, key.heads)
        graph, logits = self._captured(partial(self._run, key, plan), device)
        self.buckets[key] = Bucket(graph, plan, logits)
        return self.buckets[key]

    def capture_round(self, key: BucketKey, seats: SeatTable, store: ReferenceStore | None) -> RoundBucket:
        """As `capture`, of a round or a step over padding."""
        assert key.loops is not None
        reach = key.pages * self.page_size
        made = BlockPlan if key.run == "round" else FlightPlan
        plan = padding(made, seats, store, key.pages, (key.rows, key.width), key.loops, key.kind, reach)
        graph, drawn = self._captured(partial(getattr(self.inner, key.run), plan), seats.device)
        self.round_buckets[key] = RoundBucket(graph, plan, drawn)
        return self.round_buckets[key]

    def _captured(self, run: Callable[[], Out], device: torch.device) -> tuple[torch.cuda.CUDAGraph, Out]:
        stream = self._recording(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=stream):
            made = run()
        return graph, made

    def _recording(self, device: torch.device) -> torch.cuda.Stream:
        """The stream that graphs are recorded on: one for all, or they could not share memory. Its kernels go first
        where what runs beside a step (`kernels/beside.py`) has programs waiting too.
        """
        if self._stream is None:
            self._stream = torch.cuda.Stream(device, priority=-1)
        return self._stream

    def _run(self, key: BucketKey, plan: RowPlan) -> torch.Tensor:
        if key.run in ("draft", "verify"):
            return getattr(self.inner, key.run)(plan)
        return getattr(self.inner, key.run)(plan, key.captures)

    def keys(
        self,
        rows: Iterable[int],
        table_pages: int,
        kinds: Sequence[ProgramKind],
        loops: int | None = None,
    ) -> list[BucketKey]:
        """Every bucket of runs of these rows and loops, the largest first, so that the others fit into its memory."""
        wanted = sorted({b for count in rows if (b := self._rows(count)) is not None}, reverse=True)
        widths = self.widths(table_pages)[::-1]
        if loops is None:
            return [BucketKey(count, kind, pages) for count in wanted for pages in widths for kind in kinds]
        choices = self.inner.depths.capture_choices(loops, kinds)
        return [
            BucketKey(count, "mixed", pages, loops, captures)
            for count in wanted
            for pages in widths
            for captures in choices
        ]

    def draft_keys(
        self, rows: Iterable[int], table_pages: int, kinds: Sequence[ProgramKind], drafting: Drafting
    ) -> list[BucketKey]:
        """As `keys`, of the runs of self-speculation; what `verify` reads is there when `draft` has run."""
        most, loops = max(rows, default=0), drafting.loops
        more = self.keys(range(1, most * drafting.rows + 1), table_pages, kinds)
        first = self.keys(range(1, most + 1), table_pages, kinds)
        if drafting.pipeline:
            return self._pipeline_keys(first, more, kinds, drafting)
        heads = (True, False) if drafting.rows > 1 else (False,)
        widths = range(drafting.rows, 0 if drafting.adaptive else drafting.rows - 1, -1)
        return [
            *(replace(key, loops=loops, run="round", width=width) for key in first for width in widths),
            *(replace(key, loops=loops, run="draft", heads=one) for key in first for one in heads),
            *(replace(key, loops=self.loops - loops, run="verify") for key in more),
        ]

    def _pipeline_keys(
        self,
        first: Sequence[BucketKey],
        more: Sequence[BucketKey],
        kinds: Sequence[ProgramKind],
        drafting: Drafting,
    ) -> list[BucketKey]:
        """Rows may be at any depth, as far as the host knows: they capture wherever one of them may."""
        loops = drafting.loops
        choices = {(False,) * loops}
        if any(kind != "dense" for kind in kinds):
            choices.add(tuple(map(any, zip(*self.inner.depths.capture_choices(loops, kinds), strict=True))))
        advances = {
            replace(key, kind="mixed", loops=loops, run="advance", captures=one)
            for key in more
            for one in choices
        }
        steps = {
            replace(
                key,
                kind="dense" if key.kind == "dense" else "mixed",
                loops=loops,
                run="step",
                width=drafting.rows,
            )
            for key in first
        }
        return sorted({*advances, *steps}, key=lambda key: (-key.rows * key.width, -key.pages))

    def warm_up(
        self,
        rows: Sequence[int],
        seats: SeatTable,
        kinds: Sequence[ProgramKind],
        loops: int | None = None,
        drafting: Drafting | None = None,
    ) -> list[Callable[[], object]]:
        """As `Executor.warm_up`: the prompts, and every bucket of these rows."""
        pages = seats.block_table.shape[1]
        if drafting is None:
            keys = self.keys(rows, pages, kinds, loops)
        else:
            keys = self.draft_keys(rows, pages, kinds, drafting)
        steps: list[Callable[[], object]] = self.inner.warm_up((), seats, ())
        for key in keys:
            if key.run in ("round", "step"):
                if key not in self.round_buckets:
                    steps.append(partial(self.capture_round, key, seats, self.inner.store))
            elif key not in self.buckets:
                steps.append(partial(self.capture, key, seats.block_table, seats.carry_lines))
        return steps

    def _rows(self, count: int) -> int | None:
        return next((rows for rows in self.row_buckets if rows >= count), None)

    def _pages(self, length: int, table_pages: int) -> int:
        """The narrowest power of two times the least width that holds `length` keys, or the whole table."""
        pages = max(1, LEAST_KEYS // self.page_size)
        while pages * self.page_size < length:
            pages *= 2
        return min(pages, table_pages)

    @staticmethod
    def _fill(static: RowPlan, plan: RowPlan) -> None:
        """Bring a bucket's buffers up to `plan`: its rows, then padding."""
        static.packed[:, plan.rows :].zero_()
        static.packed[:, : plan.rows].copy_(plan.packed, non_blocking=True)
        static.logit_rows[: plan.logit_rows.shape[0]].copy_(plan.logit_rows, non_blocking=True)
