"""A deterministic model for the tests of the runtime: it has no weights, but reads and writes the pools like
one.

Layer 1 writes each row's token into the k pool and a digest of the tokens it sees into the v pool. A sparse
row then captures the positions of the keys it retains into its slot, and consumes them from there. The logits
are drawn from a generator that is seeded with the digests the row sees. `oracle` computes the same from the
tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sparse_compile.kernels.retention import retained_count
from sparse_compile.runtime.engine import Engine, EngineOptions
from sparse_compile.runtime.kv_pool import KVPool, KVSpec
from sparse_compile.runtime.plan import CAPTURE, RowPlan
from sparse_compile.runtime.reference_store import ReferenceStore, StoreSpec
from sparse_compile.runtime.request import SamplingParams, StepOutput

VOCAB = 24
RETENTION = (3, 10)


@dataclass(frozen=True)
class FakeSite:
    kind: str
    loops: int = 3
    heads: int = 4
    kv_heads: int = 2
    window: int = 0


SITES = (FakeSite("dense"), FakeSite("capture"), FakeSite("consume"), FakeSite("dense", loops=1, window=3))


def digest(values: Sequence[int]) -> int:
    return hash(tuple(values)) % 2**30


def logits_of(seed: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def retained(tokens: Sequence[int], retention: tuple[int, int] = RETENTION) -> list[int]:
    """Positions of the k "best" keys, ascending."""
    best = sorted(range(len(tokens)), key=lambda j: (-digest((j, tokens[j])), j))
    return sorted(best[: retained_count(len(tokens), *retention)])


class FakeExecutor:
    """`fault` is raised by the next run, before or after the pools are written."""

    def __init__(self, pool: KVPool, store: ReferenceStore | None) -> None:
        self.pool, self.store = pool, store
        self.plans: list[RowPlan] = []
        self.fault: tuple[str, Exception] | None = None

    def run(self, plan: RowPlan) -> torch.Tensor:
        plan.validate(self.pool.spec.page_size, self.pool.pages, self.store.slots if self.store else 1)
        self.plans.append(plan)
        fault, self.fault = self.fault, None
        if fault and fault[0] == "before":
            raise fault[1]
        active = [row for row in range(plan.rows) if int(plan.row_length[row])]
        for row in active:
            self._write(self.pool.k_pool, plan, row, int(plan.token_ids[row]))
        for row in active:
            self._write(self.pool.v_pool, plan, row, digest(self._visible(self.pool.k_pool, plan, row)))
        if fault:
            raise fault[1]
        seeds = [self._seed(plan, row) for row in plan.logit_rows.tolist()]
        return torch.stack([logits_of(seed) for seed in seeds]) if seeds else torch.empty(0, VOCAB)

    def _seed(self, plan: RowPlan, row: int) -> int:
        seen = self._visible(self.pool.v_pool, plan, row)
        if int(plan.mode_at("capture")[row]) != CAPTURE:
            return digest(seen)
        assert self.store is not None
        slot = int(plan.row_slot[row])
        keep = retained(self._visible(self.pool.k_pool, plan, row))
        self.store.index[slot, 0, 0, : len(keep)] = torch.tensor(keep, dtype=torch.int32)
        self.store.count[slot, 0] = len(keep)
        kept = self.store.index[slot, 0, 0, : int(self.store.count[slot, 0])].tolist()
        return digest([digest(seen), *(seen[j] for j in kept)])

    def _at(self, plan: RowPlan, row: int, position: int) -> tuple[int, int, int, int, int]:
        page = int(plan.block_table[int(plan.row_seq[row]), position // self.pool.spec.page_size])
        return 0, page, 0, position % self.pool.spec.page_size, 0

    def _write(self, tensor: torch.Tensor, plan: RowPlan, row: int, value: int) -> None:
        tensor[self._at(plan, row, int(plan.row_position[row]))] = value

    def _visible(self, tensor: torch.Tensor, plan: RowPlan, row: int) -> list[int]:
        # int(nan) raises: a key that nobody has written is found here
        return [int(tensor[self._at(plan, row, j)]) for j in range(int(plan.row_length[row]))]


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
    pool = KVPool(KVSpec(1, 1, 1, page_size, torch.float64), pages, "cpu")
    pool.k_pool.fill_(torch.nan)
    pool.v_pool.fill_(torch.nan)
    defaults = {"max_context": 64, "prefill_chunk": 5, "max_rows": 16, "sites": SITES, "debug": True}
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


def poison(store: ReferenceStore) -> None:
    """Fills the payload with what no reader may ever use."""
    store.index.fill_(2**31 - 1)
    for tensor in (store.mass, store.o_ref, store.c_ref):
        tensor.fill_(torch.nan)


def run_all(engine: Engine, between: Callable[[], None] | None = None) -> dict[str, list[StepOutput]]:
    """Steps until nothing is left, checking the conservation laws after each; outputs by request."""
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(2000):
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
