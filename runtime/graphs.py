"""Decode steps from CUDA graphs: one graph per bucket, captured once and replayed over refilled plan buffers.

A bucket is everything that a launch takes from the host: the number of rows, the program variant, the width of the
block table that the kernels are told of, and for rows at several depths how many bodies run and which of them may
capture. Lengths, positions, tokens, slots, modes and pages are read on the device. Rows beyond those of a plan are
padding: they touch the dummy page and slot only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from .executor import Executor
from .plan import ProgramKind, RowPlan, padding_plan

LEAST_KEYS = 1024  # the narrowest block table of a bucket, in keys
ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class BucketKey:
    """What a graph was captured for. captures: per body of a partial run; () for whole runs."""

    rows: int
    kind: ProgramKind
    pages: int
    loops: int | None = None
    captures: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """A captured graph, the plan whose tensors it reads, and where it leaves the logits `[rows, vocab]`."""

    graph: torch.cuda.CUDAGraph
    plan: RowPlan
    logits: torch.Tensor


class GraphExecutor:
    """An executor whose decode steps are replayed. Prompts, and steps beyond the largest bucket, run as they are.

    All buckets share one memory pool, so only the logits of the last run are good.
    """

    def __init__(self, inner: Executor, page_size: int, rows: Sequence[int] = ROW_BUCKETS) -> None:
        self.inner = inner
        self.page_size = page_size
        self.row_buckets = tuple(sorted(rows))
        self.buckets: dict[BucketKey, Bucket] = {}
        self._memory = torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None

    @property
    def loops(self) -> int:
        """Bodies that a row goes through; 1 for a program that is not rolled."""
        return self.inner.loops

    def prefill(self, plan: RowPlan) -> torch.Tensor:
        """As `Executor.prefill`."""
        return self.inner.prefill(plan)

    def decode(self, plan: RowPlan) -> torch.Tensor:
        """As `Executor.decode`; the logits are overwritten by the next run."""
        key = self.key(plan)
        if key is None:
            return self.inner.decode(plan)
        bucket = self.buckets.get(key) or self.capture(key, plan.block_table)
        self._fill(bucket.plan, plan)
        bucket.graph.replay()
        return bucket.logits[: plan.logit_rows.shape[0]]

    def save(self, seat: int) -> tuple[torch.Tensor, ...]:
        """As `Executor.save`."""
        return self.inner.save(seat)

    def load(self, seat: int, carried: tuple[torch.Tensor, ...]) -> None:
        """As `Executor.load`."""
        self.inner.load(seat, carried)

    # ------------------------------------------------------------------ buckets

    def key(self, plan: RowPlan) -> BucketKey | None:
        """The bucket of a decode plan; None for one with more rows than the largest."""
        rows = self._rows(plan.rows)
        if rows is None:
            return None
        pages = self._pages(plan.max_length, plan.block_table.shape[1])
        kind = plan.kind if plan.loops is None else "mixed"
        return BucketKey(rows, kind, pages, plan.loops, self.inner.captures_at(plan))

    def widths(self, table_pages: int) -> list[int]:
        """Every width of block table that a bucket may have, in pages."""
        widths = [self._pages(1, table_pages)]
        while widths[-1] < table_pages:
            widths.append(min(2 * widths[-1], table_pages))
        return widths

    def capture(self, key: BucketKey, block_table: torch.Tensor) -> Bucket:
        """Run the bucket once, so that all is compiled and allocated, then capture it over padding rows."""
        device = block_table.device
        table = block_table[:, : key.pages]
        plan = padding_plan(table, key.rows, key.kind, key.pages * self.page_size, key.loops)
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            self.inner.decode(plan, key.captures)
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self.inner.decode(plan, key.captures)
        self.buckets[key] = Bucket(graph, plan, logits)
        return self.buckets[key]

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
        choices = self.inner.capture_choices(loops, kinds)
        return [
            BucketKey(count, "mixed", pages, loops, captures)
            for count in wanted
            for pages in widths
            for captures in choices
        ]

    def warm_up(
        self,
        rows: Sequence[int],
        block_table: torch.Tensor,
        kinds: Sequence[ProgramKind],
        loops: int | None = None,
    ) -> list[Callable[[], object]]:
        """As `Executor.warm_up`: the prompts, and every bucket of these rows."""
        keys = [key for key in self.keys(rows, block_table.shape[1], kinds, loops) if key not in self.buckets]
        return [
            *self.inner.warm_up((), block_table, ()),
            *(partial(self.capture, key, block_table) for key in keys),
        ]

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
