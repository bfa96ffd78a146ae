"""Given tokens through a compiled model, as decoding would take them: prompts dense, then every token as a decode row.

A decode row writes its keys and values, captures and consumes; it knows of earlier tokens by their keys alone, and in
every attention call the keys of all rows are written before any row attends. So rows of one text need not wait for each
other: many go through the program in one run, each with a slot of its own, and compute what decoding them one after the
other computes. (Verification of drafts runs rows in the same way.)

Prompts are dense under every schedule: what is measured of several compiled forms of one model shares them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparse_compile.runtime.executor import Executor
from sparse_compile.runtime.leases import Lease
from sparse_compile.runtime.plan import RowPlan, Segment

if TYPE_CHECKING:
    from sparse_compile.compiled import CompiledModel
    from sparse_compile.kernels.retention import Retention
    from sparse_compile.runtime.engine import Engine
    from sparse_compile.runtime.kv_pool import KVPool

PROMPT_ROWS = 8192  # of one run
_Run = tuple[int, list[Segment], RowPlan]  # the number of its first row; its rows, twice


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
    program's own, which must not be smaller. model: which of the compiled models decodes.
    """

    start: int
    loops: int | None = None
    dense_rows: int = 0
    retention: Retention | None = None
    model: int = 0


class _Lane:
    """What one of the compiled models needs beside the pool: its program over it, and a slot for each row of a run.

    A run overwrites what the last one left in the slots: a lease is for the row of a run, not for a token. Leases of a
    new store are the slots 1 to `rows`, so that plans serve the rows of every lane that has slots.
    """

    def __init__(self, compiled: CompiledModel, engine: Engine, pool: KVPool, rows: int) -> None:
        self.store = engine.store
        self.executor = Executor(compiled.program, pool, self.store)
        self.dense_below = compiled.sparse_config.dense_below or 0
        store = self.store
        self.leases = [] if store is None else [store.acquire("text", number) for number in range(rows)]

    def mass(self, segments: Sequence[Segment]) -> Tensor | None:
        """float32 [rows, sites, heads]: of the rows that have just run; 1 for dense ones, which keep all."""
        if self.store is None:
            return None
        slots = torch.tensor([one.lease.slot if one.lease else 0 for one in segments])
        slots = slots.to(self.store.mass.device)
        return torch.where((slots > 0)[:, None, None], self.store.mass[slots], 1.0).float()

    def close(self) -> None:
        """Gives the slots back and checks that nothing is left."""
        if self.store is None:
            return
        for lease in self.leases:
            self.store.retire(lease)
        self.store.collect(wait=True)
        self.store.check_integrity()


class TeacherForcing:
    """Runs texts of up to `context` tokens through `compiled`, `texts` at a time, `rows` decode rows in one run.

    compiled: one model, compiled in one way or in several; see `Part.model`. Pools are its own, on the model's device;
    `close` gives them back.
    """

    def __init__(
        self,
        compiled: CompiledModel | Sequence[CompiledModel],
        context: int,
        texts: int = 16,
        rows: int = 1024,
    ) -> None:
        models = compiled if isinstance(compiled, Sequence) else [compiled]
        page = models[0].sparse_config.page_size
        self.context, self.texts = context, texts
        self.rows = max(rows, texts)
        # One pool serves all of them.
        tokens = [texts * -(-context // page) * page, *(page for _ in models[1:])]
        engines = [
            one.serve(self.rows, context, pool_tokens=pool) for one, pool in zip(models, tokens, strict=True)
        ]
        self.engine = engines[0]
        self.lanes = [
            _Lane(one, engine, self.engine.pool, self.rows)
            for one, engine in zip(models, engines, strict=True)
        ]

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
        """Gives back what was taken and checks that nothing is left."""
        for lane in self.lanes:
            lane.close()
        self.engine.check_integrity()

    def _chunk(self, ids: Tensor, parts: Sequence[Part]) -> Iterator[Forced]:
        """Each part overwrites what lies behind its own prompt; so much of the prompt is made anew for the next."""
        texts = ids.tolist()
        with self._seated(len(texts), ids.shape[1]) as seats:
            ready = 0  # tokens whose keys and values are those of a prompt
            made: dict[tuple[int, int, bool], list[_Run]] = {}  # shared by parts whose rows are the same
            for part in parts:
                if ready < part.start:
                    for plan in self._prompts(texts, part.start, seats, ready):
                        self.lanes[0].executor.prefill(plan)
                ready = part.start
                lane = self.lanes[part.model]
                sparse_from = max(part.start + part.dense_rows, lane.dense_below - 1)
                kind = (part.start, sparse_from, bool(lane.leases))
                if kind not in made:
                    made[kind] = list(self._decode_rows(texts, part.start, sparse_from, lane.leases, seats))
                yield self._decode(ids, part, lane, made[kind])

    def _decode(self, ids: Tensor, part: Part, lane: _Lane, runs: Sequence[_Run]) -> Forced:
        wanted = ids[:, part.start + 1 :].cpu()
        targets = wanted.flatten().to(self.engine.pool.device)
        best, loss, mass = [], [], []
        for first, segments, plan in runs:
            logits = lane.executor.force(replace(plan, loops=part.loops), part.retention).float()
            best.append(logits.argmax(-1))
            target = targets[first : first + len(segments)]
            loss.append(torch.nn.functional.cross_entropy(logits, target, reduction="none"))
            kept = lane.mass(segments) if part.loops is None else None
            if kept is not None:
                mass.append(kept)
        return Forced(
            part.start,
            wanted,
            torch.cat(best).cpu().view(wanted.shape),
            torch.cat(loss).cpu().view(wanted.shape),
            torch.cat(mass).cpu().unflatten(0, wanted.shape) if mass else None,
        )

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
        self, texts: list[list[int]], start: int, sparse_from: int, leases: Sequence[Lease], seats: list[int]
    ) -> Iterator[_Run]:
        """The runs that take all tokens behind `start`; the rows of a text are in order."""
        rows = [
            (text[position], position, seat)
            for text, seat in zip(texts, seats, strict=True)
            for position in range(start, len(text) - 1)
        ]
        for first in range(0, len(rows), self.rows):
            segments = [
                _row(token, position, seat, leases[number] if leases and position >= sparse_from else None)
                for number, (token, position, seat) in enumerate(rows[first : first + self.rows])
            ]
            yield first, segments, self.engine.plans.build(segments)


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
