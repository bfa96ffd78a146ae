"""The executor: rows that go through a few loops at a time, at several depths in one batch."""

from __future__ import annotations

import functools

import pytest
import torch
from shared_models import shared_model

from sparse_compile import CompiledModel, sparse_compile
from sparse_compile.runtime.engine import Engine
from sparse_compile.runtime.plan import Segment

pytestmark = pytest.mark.usefixtures("shared_traces")

PROMPT = list(range(5, 16))
TOKENS = [7, 31, 2, 19]


class Sequences:
    """The same prompt in several seats of one engine, each with a lease."""

    def __init__(self, engine: Engine, count: int) -> None:
        self.engine = engine
        assert engine.store is not None
        self.seats, self.leases, self.done = [], [], [0] * count
        for number in range(count):
            pages = engine.pool.allocate(engine.pool.spec.pages_for(len(PROMPT) + len(TOKENS)))
            self.seats.append(engine.plans.seats.take(pages))
            self.leases.append(engine.store.acquire(f"r{number}", 0))
            engine.executor.prefill(engine.plans.build([Segment(PROMPT, 0, self.seats[-1])]))

    def row(self, number: int, loop: int = 0, sparse: bool = True, logits: bool = True) -> Segment:
        at = self.done[number]
        lease = self.leases[number] if sparse else None
        return Segment(
            [TOKENS[at]], len(PROMPT) + at, self.seats[number],
            decode=True, sparse=sparse, lease=lease, wants_logits=logits, loop=loop,
        )  # fmt: skip

    def whole(self, number: int, sparse: bool = True) -> torch.Tensor:
        logits = self.engine.executor.decode(self.engine.plans.build([self.row(number, sparse=sparse)]))
        self.done[number] += 1
        return logits[0].clone()


@functools.cache
def compiled(name: str) -> CompiledModel:
    return sparse_compile(shared_model(name, dtype=torch.float64), key_retention=0.3, page_size=4)


def sequences(name: str, count: int) -> Sequences:
    return Sequences(compiled(name)._keeper.make_engine(count, 32), count)


@pytest.mark.parametrize("name", ["ouro", "dory", "hrm-text"])
@pytest.mark.parametrize("loops", [1, 2, 3])
def test_some_loops_at_a_time_give_the_logits_of_a_whole_run(name: str, loops: int) -> None:
    """Three rows start one run apart, one of them dense; each gets the bits of a run of its own."""
    batch, alone = sequences(name, 3), sequences(name, 3)
    executor, plans = batch.engine.executor, batch.engine.plans
    sparse = (True, False, True)
    depth, begins = [0, 0, 0], (0, 1, 2)
    got: list[list[torch.Tensor]] = [[], [], []]
    for turn in range(40):
        live = [n for n in range(3) if turn >= begins[n] and batch.done[n] < len(TOKENS)]
        if not live:
            break
        ends = [n for n in live if depth[n] + loops >= executor.loops]
        rows = [batch.row(n, depth[n], sparse[n], logits=n in ends) for n in live]
        logits = executor.decode(plans.build(rows, pad_to=4, loops=loops))
        assert logits.shape[0] == len(ends)
        for n, row in zip(ends, logits.clone(), strict=True):
            got[n].append(row)
        for n in live:
            depth[n] = 0 if n in ends else depth[n] + loops
            batch.done[n] += n in ends
    for n in range(3):
        want = [alone.whole(n, sparse[n]) for _ in TOKENS]
        assert len(got[n]) == len(want)
        for ours, whole in zip(got[n], want, strict=True):
            torch.testing.assert_close(ours, whole, rtol=0, atol=1e-12)


def test_what_a_row_carries_can_move_to_another_seat() -> None:
    here, there = sequences("ouro", 2), sequences("ouro", 2)
    executor, plans = here.engine.executor, here.engine.plans
    executor.decode(plans.build([here.row(0, 0, logits=False)], loops=2))
    carried = executor.save(here.seats[0])
    executor.decode(plans.build([here.row(1, 0, logits=False)], loops=1))  # other work in between
    here.seats[0], here.seats[1] = here.seats[1], here.seats[0]
    plans.seats.block_table[here.seats] = plans.seats.block_table[here.seats[::-1]]
    executor.load(here.seats[0], carried)
    logits = executor.decode(plans.build([here.row(0, 2)], loops=2))
    torch.testing.assert_close(logits[0], there.whole(0), rtol=0, atol=1e-12)


def test_a_program_that_is_not_rolled_has_no_loop_to_stop_at() -> None:
    model = shared_model("ouro")
    engine = sparse_compile(model, key_retention=0.3, roll=False)._keeper.make_engine(1, 32)
    assert engine.executor.loops == 1
    batch = Sequences(engine, 1)
    with pytest.raises(ValueError, match="loops=1: the program is not rolled, rolling is off"):
        engine.executor.decode(engine.plans.build([batch.row(0)], loops=1))
