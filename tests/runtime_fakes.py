"""A deterministic model for the tests of the runtime: it has no weights, but reads and writes the pools like
one.

Each of its three bodies writes each row's token into the k pool and a digest of the tokens it sees into the v pool.
A sparse row captures the positions of the keys it retains into its slot in body 1, and consumes them from there in
body 2. The logits are drawn from a generator that is seeded with the digests the row sees. `oracle` computes the same
from the tokens alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sparse_compile.kernels.retention import Retention
from sparse_compile.runtime.blocks import BlockPlan, run_round
from sparse_compile.runtime.engine import Engine, EngineOptions
from sparse_compile.runtime.flights import FlightPlan, run_step
from sparse_compile.runtime.kv_pool import KVPool, KVSpec
from sparse_compile.runtime.plan import CONSUME, RowPlan
from sparse_compile.runtime.reference_store import ReferenceStore, StoreSpec
from sparse_compile.runtime.request import Request, SamplingParams, StepOutput
from sparse_compile.runtime.sampler import Drawn

VOCAB = 24
RETENTION = Retention(3, 10)
PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6, 5, 3], [2, 7], [1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4])


@dataclass(frozen=True)
class FakeSite:
    kind: str
    loops: int = 3
    heads: int = 4
    kv_heads: int = 2
    window: int = 0
    retention: Retention = RETENTION


SITES = (FakeSite("dense"), FakeSite("capture"), FakeSite("consume"), FakeSite("dense", loops=1, window=3))


def digest(values: Sequence[int]) -> int:
    return hash(tuple(values)) % 2**30


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def retained(tokens: Sequence[int], retention: Retention = RETENTION) -> list[int]:
    """Positions of the k "best" keys, ascending."""
    best = sorted(range(len(tokens)), key=lambda j: (-digest((j, tokens[j])), j))
    return sorted(best[: retention.count(len(tokens))])


class FakeExecutor:
    """Three bodies: 0 is dense, 1 captures, 2 consumes. A row that has been through some of them is carried per seat.

    Body `b` has plane `b` of the pools. `fault` is raised by the next run, before or after the pools are written;
    `curse` by every run that holds a row of that request.
    """

    loops = 3

    def __init__(self, pool: KVPool, store: ReferenceStore | None) -> None:
        self.pool, self.store = pool, store
        self.plans: list[RowPlan] = []
        self.broken: list[Exception] = []  # what a wrong plan or wrong contents of the pools led to
        self.fault: tuple[str, BaseException] | None = None
        self.curse: tuple[Request, str, BaseException] | None = None
        self.carried: dict[int, tuple[int, int]] = {}  # line -> (depth, value)

    def prefill(self, plan: RowPlan) -> torch.Tensor:
        assert plan.loops is None
        assert plan.kind == "dense"
        return self._watched(plan)

    def decode(self, plan: RowPlan) -> torch.Tensor:
        assert all(chunk.rows == 1 for chunk in plan.chunks)
        return self._watched(plan)

    def draft(self, plan: RowPlan) -> torch.Tensor:
        seats = plan.row_seq[plan.row_length > 0].tolist()
        assert len(set(seats)) == len(seats)
        return self._watched(plan, draft=True)

    def verify(self, plan: RowPlan) -> torch.Tensor:
        return self._watched(plan)

    def round(self, plan: BlockPlan) -> Drawn:
        return run_round(self, plan)

    def step(self, plan: FlightPlan) -> Drawn:
        return run_step(self, plan)

    def advance(self, plan: RowPlan) -> torch.Tensor:
        return self._watched(plan, draft=True)

    def save(self, seat: int) -> tuple[torch.Tensor, ...]:
        return (torch.tensor(self.carried[seat]),)

    def load(self, seat: int, carried: tuple[torch.Tensor, ...]) -> None:
        depth, value = carried[0].tolist()
        self.carried[seat] = (depth, value)

    def _watched(self, plan: RowPlan, draft: bool = False) -> torch.Tensor:
        try:
            return self._run(plan, draft)
        except (AssertionError, ValueError, KeyError) as error:  # not one that was asked for
            self.broken.append(error)
            raise

    def _run(self, plan: RowPlan, draft: bool) -> torch.Tensor:
        plan.validate(self.pool.spec.page_size, self.pool.pages, self.store.slots if self.store else 1)
        self.plans.append(plan)
        when, error = self._failure(plan)
        if error is not None and when == "before":
            raise error
        columns = {name: getattr(plan, name).tolist() for name in (*RowPlan.ROW_FIELDS, "token_ids")}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        values = [self._begin(plan, row) for row in rows]
        loops = self.loops if plan.loops is None else plan.loops
        for step in range(loops):
            self._body(plan, rows, values, step)
        if plan.loops is not None:
            for row, value in zip(rows, values, strict=True):
                self.carried[row["row_carry"]] = (row["row_loop"] + loops, value)
        if error is not None:
            raise error
        wanted = plan.logit_rows.tolist()
        active = [rows[row] for row in wanted if rows[row]["row_length"]]
        assert draft or all(row["row_loop"] + loops >= self.loops for row in active)
        logits = [logits_of(self._answer(plan, rows[row], values[row], loops)) for row in wanted]
        return torch.stack(logits) if logits else torch.empty(0, VOCAB, dtype=torch.float64)

    def _answer(self, plan: RowPlan, row: dict[str, int], value: int, loops: int) -> int:
        """A draft for a row that has begun, nothing of use for one on its way."""
        if row["row_loop"] + loops >= self.loops:
            return value
        return 0 if row["row_loop"] else self._guess(plan, row, value)

    def _failure(self, plan: RowPlan) -> tuple[str, BaseException | None]:
        fault, self.fault = self.fault, None
        if fault is not None:
            return fault
        if self.curse is not None and self.curse[0].seat in plan.row_seq[plan.row_length > 0]:
            return self.curse[1], self.curse[2]
        return "", None

    def _begin(self, plan: RowPlan, row: dict[str, int]) -> int:
        """What the row carries; a row that goes on finds what its own last run left."""
        if not row["row_loop"]:
            return 0
        depth, value = self.carried.pop(row["row_carry"])
        assert depth == row["row_loop"]
        return value

    def _body(self, plan: RowPlan, rows: list[dict[str, int]], values: list[int], step: int) -> None:
        alive = [
            (number, row, row["row_loop"] + step)
            for number, row in enumerate(rows)
            if row["row_length"] and row["row_loop"] + step < self.loops
        ]
        for _, row, plane in alive:
            self._write(self.pool.k_pool, plan, row, plane, row["token_ids"])
        for _, row, plane in alive:
            self._write(self.pool.v_pool, plan, row, plane, digest(self._visible("k_pool", plan, row, plane)))
        for number, row, plane in alive:
            seen = self._visible("v_pool", plan, row, plane)
            values[number] = self._attend(plan, row, plane, seen, values[number])

    def _guess(self, plan: RowPlan, row: dict[str, int], value: int) -> int:
        """What the last body will give, or something else for every third row."""
        if value % 3 == 0 or not row["row_length"]:
            return value + 1
        if row["row_mode"] != CONSUME:
            return value
        seen = self._visible("v_pool", plan, row, 0)
        return digest([value, *(seen[j] for j in retained(self._visible("k_pool", plan, row, 0)))])

    def _attend(self, plan: RowPlan, row: dict[str, int], plane: int, seen: list[int], value: int) -> int:
        if plane == 0:
            return digest(seen)
        assert value == digest(self._visible("v_pool", plan, row, 0))
        if row["row_mode"] != CONSUME:
            return value
        assert self.store is not None
        slot = row["row_slot"]
        if plane == 1:
            keep = retained(self._visible("k_pool", plan, row, 1))
            self.store.index[slot, 0, 0, : len(keep)] = torch.tensor(keep, dtype=torch.int32)
            self.store.count[slot, 0] = len(keep)
            for name in ("mass", "o_ref", "c_ref"):
                getattr(self.store, name)[slot] = value
            return value
        assert all(
            bool((getattr(self.store, name)[slot] == value).all()) for name in ("mass", "o_ref", "c_ref")
        )
        kept = self.store.index[slot, 0, 0, : int(self.store.count[slot, 0])].tolist()
        return digest([value, *(seen[j] for j in kept)])

    def _write(
        self, tensor: torch.Tensor, plan: RowPlan, row: dict[str, int], plane: int, value: int
    ) -> None:
        position, size = row["row_position"], self.pool.spec.page_size
        page = int(plan.block_table[row["row_seq"], position // size])
        tensor[plane, page, 0, position % size, 0] = value

    def _visible(self, pool: str, plan: RowPlan, row: dict[str, int], plane: int) -> list[int]:
        # int(nan) raises: a key that nobody has written is found here
        pages = plan.block_table[row["row_seq"]].long()
        values = getattr(self.pool, pool)[plane, pages, 0, :, 0].flatten()[: row["row_length"]]
        return [int(value) for value in values.tolist()]


def oracle_logits(
    tokens: Sequence[int], prompt: int, sparse: bool = False, dense_below: int = 0, prefix: int = 0
) -> torch.Tensor:
    """Logits behind the last of `tokens`, of which the first `prompt` are the prompt."""
    ends = [max(prefix, j + 1) if j < prefix else j + 1 for j in range(len(tokens))]
    seen = [digest(tokens[:end]) for end in ends][: ends[-1]]
    if sparse and len(tokens) > prompt and len(tokens) >= dense_below:
        return logits_of(digest([digest(seen), *(seen[j] for j in retained(tokens))]))
    return logits_of(digest(seen))


def oracle(
    prompt: Sequence[int], new: int, sparse: bool = False, dense_below: int = 0, prefix: int = 0
) -> list[int]:
    """Greedy tokens."""
    tokens = list(prompt)
    for _ in range(new):
        tokens.append(int(oracle_logits(tokens, len(prompt), sparse, dense_below, prefix).argmax()))
    return tokens[len(prompt) :]


def make_engine(
    pages: int = 33,
    slots: int = 9,
    sparse: bool = True,
    page_size: int = 4,
    capacity: int | None = None,
    **options: object,
) -> tuple[Engine, FakeExecutor]:
    """An engine over poisoned pools."""
    pool = KVPool(KVSpec(FakeExecutor.loops, 1, 1, page_size, torch.float64), pages, "cpu")
    pool.k_pool.fill_(torch.nan)
    pool.v_pool.fill_(torch.nan)
    defaults = {
        "max_context": 64,
        "prefill_chunk": 5,
        "max_prefill_tokens": 16,
        "max_seqs": 16,
        "sites": SITES,
        "debug": True,
    }
    settings: dict[str, object] = defaults | options
    store = None
    if sparse:
        settings.setdefault("retention", RETENTION)
        if capacity is None:
            capacity = StoreSpec.capacity_for(settings["max_context"], settings["retention"])  # type: ignore[arg-type]
        store = ReferenceStore(StoreSpec(1, 1, 1, capacity, torch.float64), slots, "cpu")
        poison(store)
    executor = FakeExecutor(pool, store)
    return Engine(executor, pool, store, EngineOptions(**settings)), executor  # type: ignore[arg-type]


PLACES = (
    "take",
    "write",
    "acquire",
    "allocate",
    "grow",
    "renew",
    "renew_all",
    "suspend",
    "offload",
    "resume",
)


@contextmanager
def no_room(engine: Engine, where: str, count: int = 1) -> Iterator[None]:
    """The `count`-th call there of what needs memory raises "no room"."""
    holdings, calls = engine.scheduler.holdings, itertools.count(1)
    owners = (holdings.seats, holdings.pages, holdings, engine.scheduler.suspension, engine.store)
    owner = next(one for one in owners if hasattr(one, where))
    whole = getattr(owner, where)

    def call(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == count:
            raise torch.OutOfMemoryError("no room")
        return whole(*arguments, **keywords)

    setattr(owner, where, call)
    try:
        yield
    finally:
        delattr(owner, where)


def poison(store: ReferenceStore) -> None:
    """Fills the payload with what no reader may ever use."""
    store.index.fill_(2**31 - 1)
    for tensor in (store.mass, store.o_ref, store.c_ref):
        tensor.fill_(torch.nan)


def run_all(engine: Engine, between: Callable[[], None] | None = None) -> dict[str, list[StepOutput]]:
    """Steps until nothing is left, checking the conservation laws after each; outputs by request."""
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(2000):
        assert not engine.executor.broken  # type: ignore[attr-defined]
        if not engine.has_unfinished():
            return outputs
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        if between:
            between()
    raise AssertionError("the engine makes no progress")


def tokens_of(outputs: Sequence[StepOutput]) -> list[int]:
    return [output.token for output in outputs]


def greedy(new: int, **settings: object) -> SamplingParams:
    return SamplingParams(max_new_tokens=new, **settings)  # type: ignore[arg-type]


def only(outputs: dict[str, list[StepOutput]]) -> list[StepOutput]:
    (values,) = outputs.values()
    return values


def generate(
    engine: Engine, prompts: Sequence[Sequence[int]], new: int = 6, **params: object
) -> list[list[int]]:
    ids = [engine.add_request(prompt, greedy(new, **params)) for prompt in prompts]
    outputs = run_all(engine)
    assert all(outputs[name][-1].finished for name in ids)
    return [tokens_of(outputs[name]) for name in ids]
