"""Given tokens through a compiled model, as decoding would take them: prompts dense, then every token as a decode row.

A decode row writes its keys and values, captures and consumes; it knows of earlier tokens by their keys alone, and in
every attention call the keys of all rows are written before any row attends. So rows of one text need not wait for each
other: many go through the program in one run, each with a slot of its own, and compute what decoding them one after the
other computes. (Verification of drafts runs rows in the same way.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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


@dataclass(frozen=True)
class Part:
    """What becomes of texts behind their first `start` tokens, which are a dense prompt.

    loops: what the head makes of so many loops, in place of all. dense_rows: so many rows behind the prompt are dense
    as well, like the last one of a prompt, whose logits give the first new token. retention: in place of the
    program's own, which must not be smaller.
    """

    start: int
    loops: int | None = None
    dense_rows: int = 0
    retention: Retention | None = None


class TeacherForcing:
    """Runs texts of up to `context` tokens through `compiled`, `texts` at a time, `rows` decode rows in one run.

    It has pools of its own, on the model's device; `close` gives them back.
    """

    def __init__(self, compiled: CompiledModel, context: int, texts: int = 16, rows: int = 1024) -> None:
        page = compiled.sparse_config.page_size
        self.context, self.texts = context, texts
        self.rows = max(rows, texts)
        self.dense_below = compiled.sparse_config.dense_below or 0
        self.engine = compiled.serve(self.rows, context, pool_tokens=texts * -(-context // page) * page)
        self.executor = Executor(compiled.program, self.engine.pool, self.engine.store)
        store = self.engine.store
        self.leases: list[Lease] = []
        if store is not None:
            self.leases = [store.acquire("text", number) for number in range(self.rows)]

    def run(
        self, ids: Tensor, parts: Sequence[Part], done: Callable[[int], object] = lambda texts: None
    ) -> list[Forced]:
        """ids: int64 [B, T]. Each part on its own, behind one and the same prompt. done: told of texts that a part has
        finished.

        Raises ValueError for a start outside 1 .. T - 2 and for texts that are too long.
        """
        width = ids.shape[1]
        for part in parts:
            if not 1 <= part.start <= width - 2 or width > self.context:
                raise ValueError(
                    f"start={part.start} of texts of {width} tokens: needs 1 <= start <= {width - 2}, "
                    f"and texts of at most {self.context} tokens"
                )
        found: list[list[Forced]] = [[] for _ in parts]
        for chunk in ids.split(self.texts):
            for place, one in enumerate(self._chunk(chunk, parts)):
                found[place].append(one)
                done(len(chunk))
        return [_join(chunks) for chunks in found]

    def close(self) -> None:
        """Gives the slots back and checks that nothing is left."""
        if self.engine.store is not None:
            for lease in self.leases:
                self.engine.store.retire(lease)
            self.engine.store.collect(wait=True)
        self.engine.check_integrity()

    def _chunk(self, ids: Tensor, parts: Sequence[Part]) -> Iterator[Forced]:
        """Each part overwrites what lies behind its own prompt; so much of the prompt is made anew for the next."""
        texts = ids.tolist()
        with self._seated(len(texts), ids.shape[1]) as seats:
            ready = 0  # tokens whose keys and values are those of a prompt
            for part in parts:
                if ready < part.start:
                    for plan in self._prompts(texts, part.start, seats, ready):
                        self.executor.prefill(plan)
                ready = part.start
                yield self._decode(ids, texts, part, seats)

    def _decode(self, ids: Tensor, texts: list[list[int]], part: Part, seats: list[int]) -> Forced:
        wanted = ids[:, part.start + 1 :].cpu()
        targets = wanted.flatten().to(self.engine.pool.device)
        best, loss, mass = [], [], []
        for first, segments in self._decode_rows(texts, part, seats):
            plan = self.engine.plans.build(segments, loops=part.loops)
            logits = self.executor.force(plan, part.retention).float()
            best.append(logits.argmax(-1))
            target = targets[first : first + len(segments)]
            loss.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
            if part.loops is None and self.engine.store is not None:
                mass.append(self._mass(segments))
        kept = torch.cat(mass).cpu().unflatten(0, wanted.shape) if mass else None
        return Forced(
            part.start,
            wanted,
            torch.cat(best).cpu().view(wanted.shape),
            torch.cat(loss).cpu().view(wanted.shape),
            kept,
        )

    def _mass(self, segments: Sequence[Segment]) -> Tensor:
        """float32 [rows, sites, heads]: of the rows that have just run; 1 for dense ones, which keep all."""
        store = self.engine.store
        assert store is not None
        slots = torch.tensor([one.lease.slot if one.lease else 0 for one in segments]).to(store.mass.device)
        return torch.where((slots > 0)[:, None, None], store.mass[slots], 1.0).float()

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

    def _prompts(self, texts: list[list[int]], end: int, seats: list[int], begin: int) -> Iterator[RowPlan]:
        """Tokens begin .. end - 1: as many texts in one run as their prompts allow, longer ones in chunks."""
        together = max(1, PROMPT_ROWS // (end - begin))
        for at in range(0, len(texts), together):
            for first in range(begin, end, PROMPT_ROWS):
                last = min(first + PROMPT_ROWS, end)
                group = zip(texts[at : at + together], seats[at : at + together], strict=True)
                yield self.engine.plans.build(
                    [Segment(text[first:last], first, seat) for text, seat in group]
                )

    def _decode_rows(
        self, texts: list[list[int]], part: Part, seats: list[int]
    ) -> Iterator[tuple[int, list[Segment]]]:
        """(number of the first row, segments) of each run; the rows of a text are in order."""
        rows = [
            (text[position], position, seat)
            for text, seat in zip(texts, seats, strict=True)
            for position in range(part.start, len(text) - 1)
        ]
        sparse_from = max(part.start + part.dense_rows, self.dense_below - 1)
        for first in range(0, len(rows), self.rows):
            group = rows[first : first + self.rows]
            leases = self._renewed([position for _, position, _ in group])
            yield (
                first,
                [
                    _row(token, position, seat, lease if position >= sparse_from else None)
                    for (token, position, seat), lease in zip(group, leases, strict=True)
                ],
            )

    def _renewed(self, positions: list[int]) -> list[Lease] | list[None]:
        """A slot for each of these rows; None where the program has no store."""
        store = self.engine.store
        if store is None:
            return [None] * len(positions)
        self.leases[: len(positions)] = store.renew_all(self.leases[: len(positions)], positions)
        return self.leases[: len(positions)]


def _row(token: int, position: int, seat: int, lease: Lease | None) -> Segment:
    return Segment(
        [token], position, seat, decode=True, sparse=lease is not None, lease=lease, wants_logits=True
    )


def _join(chunks: list[Forced]) -> Forced:
    """Of several groups of texts, one after the other."""
    wanted, best, loss = (
        torch.cat([getattr(one, name) for one in chunks]) for name in ("wanted", "best", "loss")
    )
    masses = [one.mass for one in chunks if one.mass is not None]
    return Forced(chunks[0].start, wanted, best, loss, torch.cat(masses) if masses else None)
