"""Given tokens through a compiled model, as decoding would take them: prompts dense, then every token as a decode row.

A decode row writes its keys and values, captures and consumes; it knows of earlier tokens by their keys alone, and in
every attention call the keys of all rows are written before any row attends. So rows of one text need not wait for each
other: many go through the program in one run, each with a slot of its own, and compute what decoding them one after the
other computes. (Verification of drafts runs rows in the same way.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_compile.runtime.executor import Executor
from sparse_compile.runtime.leases import Lease
from sparse_compile.runtime.plan import RowPlan, Segment

if TYPE_CHECKING:
    from sparse_compile.compiled import CompiledModel
    from sparse_compile.kernels.retention import Retention

PROMPT_ROWS = 8192  # of one run


@dataclass(frozen=True)
class Forced:
    """Texts [B, T] whose tokens from `start` on were decoded; R = T - start - 1 rows of each, for the last predicts
    what is not known.

    best: int64 [B, R], the most likely token after each row. loss: float32 [B, R], -log p of the token that follows.
    mass: float32 [B, R, sites, heads] that the kept keys had, or None where nothing captured. On the CPU.
    """

    start: int
    wanted: Tensor
    best: Tensor
    loss: Tensor
    mass: Tensor | None

    @property
    def right(self) -> Tensor:
        """bool [B, R]: the most likely token is the one that follows."""
        return self.best == self.wanted


class TeacherForcing:
    """Runs texts of up to `context` tokens through `compiled`, `texts` at a time, `rows` decode rows in one run.

    It has pools of its own, on the model's device; `close` gives them back.
    """

    def __init__(self, compiled: CompiledModel, context: int, texts: int = 16, rows: int = 1024) -> None:
        page = compiled.sparse_config.page_size
        self.compiled, self.context, self.texts = compiled, context, texts
        self.rows = max(rows, texts)
        self.engine = compiled.serve(self.rows, context, pool_tokens=texts * -(-context // page) * page)
        self.executor = Executor(compiled.program, self.engine.pool, self.engine.store)
        store = self.engine.store
        self.leases: list[Lease] = []
        if store is not None:
            self.leases = [store.acquire("text", number) for number in range(self.rows)]

    def run(
        self,
        ids: Tensor,
        start: int,
        loops: int | None = None,
        done: Callable[[int], object] = lambda texts: None,
        dense_rows: int = 0,
        retention: Retention | None = None,
    ) -> Forced:
        """ids: int64 [B, T]. start: tokens of the prompt, at least 1, which are dense. loops: what the head makes of so
        many loops, in place of all. done: told of texts that were finished. dense_rows: so many rows of each text
        behind its prompt are dense as well, like the last one of a prompt, whose logits give the first new token.
        retention: in place of the program's own, which must not be smaller.

        Raises ValueError for a start outside 1 .. T - 2 and for texts that are too long.
        """
        width = ids.shape[1]
        if not 1 <= start <= width - 2 or width > self.context:
            raise ValueError(
                f"start={start} of texts of {width} tokens: needs 1 <= start <= {width - 2}, "
                f"and texts of at most {self.context} tokens"
            )
        parts = []
        for chunk in ids.split(self.texts):
            parts.append(self._chunk(chunk, start, loops, start + dense_rows, retention))
            done(len(chunk))
        best, loss, mass = zip(*parts, strict=True)
        masses = [one for one in mass if one is not None]
        return Forced(
            start,
            ids[:, start + 1 :].cpu(),
            torch.cat(best),
            torch.cat(loss),
            torch.cat(masses) if masses else None,
        )

    def close(self) -> None:
        """Gives the slots back and checks that nothing is left."""
        if self.engine.store is not None:
            for lease in self.leases:
                self.engine.store.retire(lease)
            self.engine.store.collect(wait=True)
        self.engine.check_integrity()

    def _chunk(
        self, ids: Tensor, start: int, loops: int | None, sparse_from: int, retention: Retention | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        texts = ids.tolist()
        with self._seated(len(texts), ids.shape[1]) as seats:
            for plan in self._prompts(texts, start, seats):
                self.executor.prefill(plan)
            rows = ids.shape[1] - start - 1
            wanted = ids[:, start + 1 :].flatten().to(self.engine.pool.device)
            best, loss, mass = [], [], []
            for first, segments in self._decode_rows(texts, start, seats, sparse_from):
                logits = self.executor.force(
                    self.engine.plans.build(segments, loops=loops), retention
                ).float()
                best.append(logits.argmax(-1))
                part = wanted[first : first + len(segments)]
                loss.append(torch.nn.functional.cross_entropy(logits, part, reduction="none"))
                if loops is None and self.engine.store is not None:
                    slots = torch.tensor([lease.slot for lease in self.leases[: len(segments)]])
                    mass.append(self.engine.store.mass[slots.to(logits.device)].float())
        shape = (len(texts), rows)
        kept = torch.cat(mass).cpu().unflatten(0, shape) if mass else None
        return torch.cat(best).cpu().view(shape), torch.cat(loss).cpu().view(shape), kept

    @contextmanager
    def _seated(self, texts: int, width: int) -> Iterator[list[int]]:
        pool, seats = self.engine.pool, self.engine.plans.seats
        pages = [pool.allocate(pool.spec.pages_for(width)) for _ in range(texts)]
        taken = [seats.take(one) for one in pages]
        try:
            yield taken
        finally:
            for seat, one in zip(taken, pages, strict=True):
                seats.release(seat)
                pool.free(one)

    def _prompts(self, texts: list[list[int]], start: int, seats: list[int]) -> Iterator[RowPlan]:
        """As many texts in one run as their prompts allow, longer ones in chunks."""
        together = max(1, PROMPT_ROWS // start)
        for at in range(0, len(texts), together):
            for first in range(0, start, PROMPT_ROWS):
                last = min(first + PROMPT_ROWS, start)
                group = zip(texts[at : at + together], seats[at : at + together], strict=True)
                yield self.engine.plans.build(
                    [Segment(text[first:last], first, seat) for text, seat in group]
                )

    def _decode_rows(
        self, texts: list[list[int]], start: int, seats: list[int], sparse_from: int
    ) -> Iterator[tuple[int, list[Segment]]]:
        """(number of the first row, segments) of each run; the rows of a text are in order."""
        all_rows = [
            (text[position], position, seat)
            for text, seat in zip(texts, seats, strict=True)
            for position in range(start, len(text) - 1)
        ]
        sparse_from = max(sparse_from, (self.compiled.sparse_config.dense_below or 0) - 1)
        for first in range(0, len(all_rows), self.rows):
            rows = all_rows[first : first + self.rows]
            leases: list[Lease | None] = [None] * len(rows)
            if self.engine.store is not None:
                renewed = self.engine.store.renew_all(self.leases[: len(rows)], [row[1] for row in rows])
                self.leases[: len(rows)] = renewed
                leases = [
                    lease if row[1] >= sparse_from else None for lease, row in zip(renewed, rows, strict=True)
                ]
            yield (
                first,
                [
                    Segment(
                        [token],
                        position,
                        seat,
                        decode=True,
                        sparse=lease is not None,
                        lease=lease,
                        wants_logits=True,
                    )
                    for (token, position, seat), lease in zip(rows, leases, strict=True)
                ],
            )
