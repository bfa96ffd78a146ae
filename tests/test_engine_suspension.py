"""Priorities, memory on demand, and suspension: who runs when changes nothing about what comes out."""

from __future__ import annotations

import pytest
import torch
from runtime_fakes import PROMPTS, greedy, make_engine, oracle, run_all, tokens_of

from sparse_compile.runtime.engine import Engine
from sparse_compile.runtime.request import StepOutput

# ---------------------------------------------------------------------- by hand


def trample(engine: Engine) -> None:
    """Overwrites what is free: a request that has given up a page or a slot must not look there again."""
    pool, store = engine.pool, engine.store
    held = {page for request in engine.scheduler.requests.values() for page in request.pages}
    for page in set(range(1, pool.pages)) - held:
        pool.k_pool[:, page] = pool.v_pool[:, page] = torch.nan
    assert store is not None
    store.collect()
    leased = {one.slot for r in engine.scheduler.requests.values() for one in r.leases}
    for slot in set(range(1, store.slots)) - leased:
        store.index[slot] = 2**31 - 1
        for tensor in (store.mass, store.o_ref, store.c_ref):
            tensor[slot] = torch.nan


def collect(outputs: dict[str, list[StepOutput]], more: list[StepOutput]) -> None:
    for output in more:
        outputs.setdefault(output.request_id, []).append(output)


@pytest.mark.parametrize("how", ["resident", "offloaded", "converted"])
@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("loops", [None, 1, 2])
@pytest.mark.parametrize("count", range(1, 10))
def test_a_suspended_request_goes_on_as_if_nothing_had_been(
    how: str, async_steps: bool, loops: int | None, count: int
) -> None:
    """In the middle of its prompt, between two of its tokens, between two loops of a token."""
    engine, executor = make_engine(async_steps=async_steps, loops_per_step=loops, prefill_chunk=3)
    name = engine.add_request(PROMPTS[1], greedy(5))
    other = engine.add_request(PROMPTS[0], greedy(20))
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(count):
        collect(outputs, engine.step())
    if not engine.suspend(name, offload=how == "offloaded"):
        return
    assert engine.metrics().requests_suspended == 1
    executor.carried = {seat: row for seat, row in executor.carried.items() if seat != 1}
    for turn in range(3):
        collect(outputs, engine.step())
        engine.check_integrity()
        if how == "converted" and turn == 1:
            assert engine.offload(name)
    request = engine.scheduler.requests[name]
    assert (request.seat, bool(request.pages)) == (0, how == "resident")
    trample(engine)
    third = engine.add_request(PROMPTS[2], greedy(30))  # takes the seat, and what else was given up
    collect(outputs, engine.step())
    assert engine.resume(name)
    for key, more in run_all(engine).items():
        outputs.setdefault(key, []).extend(more)
    for key, prompt, new in ((name, PROMPTS[1], 5), (other, PROMPTS[0], 20), (third, PROMPTS[2], 30)):
        assert tokens_of(outputs[key]) == oracle(prompt, new, True)
    assert engine.metrics().resumed == 1


def test_suspended_requests_do_not_keep_steps_busy() -> None:
    engine, _ = make_engine()
    name = engine.add_request(PROMPTS[0], greedy(5))
    assert engine.suspend(name)  # before it has begun
    assert not engine.has_unfinished()
    assert engine.step() == []
    assert engine.offload(name)
    assert engine.resume(name)
    assert engine.resume(name)  # no change
    assert tokens_of(run_all(engine)[name]) == oracle(PROMPTS[0], 5, True)
    assert [engine.suspend(name), engine.offload(name), engine.resume(name)] == [False] * 3
    for act in (engine.suspend, engine.offload, engine.resume):
        with pytest.raises(KeyError, match="nobody"):
            act("nobody")


def test_a_suspended_request_can_be_aborted_and_its_id_used_again() -> None:
    for offload in (False, True):
        engine, _ = make_engine()
        engine.add_request(PROMPTS[0], greedy(5), "a")
        engine.step()
        engine.suspend("a", offload=offload)
        output = engine.abort("a")
        assert output is not None
        assert output.finish_reason == "abort"
        engine.check_integrity()
        assert engine.pool.held_pages == 0
        engine.add_request(PROMPTS[1], greedy(3), "a")
        assert tokens_of(run_all(engine)["a"]) == oracle(PROMPTS[1], 3, True)


def test_only_what_is_suspended_can_be_offloaded() -> None:
    engine, _ = make_engine()
    name = engine.add_request(PROMPTS[0], greedy(5))
    engine.step()
    with pytest.raises(ValueError, match="is running; suspend it first"):
        engine.offload(name)


def test_what_is_on_its_way_is_read_before_a_request_is_suspended() -> None:
    engine, executor = make_engine(async_steps=True)
    name = engine.add_request(PROMPTS[0], greedy(1))
    assert engine.step() == []
    assert not engine.suspend(name)  # that was its last token
    assert tokens_of(engine.step()) == oracle(PROMPTS[0], 1, True)
    assert len(executor.plans) == 1


# ---------------------------------------------------------------------- by need


def test_pages_come_with_the_tokens() -> None:
    engine, _ = make_engine()
    engine.add_request(PROMPTS[0], greedy(20))
    held = []
    while engine.has_unfinished():
        engine.step()
        held.append(engine.pool.held_pages)
    assert held == [1, *[1 + n // 4 for n in range(3, 21)], 0]


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("loops", [None, 1, 2])
@pytest.mark.parametrize("pages", [7, 9, 12])
def test_the_last_one_makes_room_when_pages_run_out(pages: int, loops: int | None, async_steps: bool) -> None:
    engine, _ = make_engine(pages=pages, async_steps=async_steps, loops_per_step=loops)
    ids = [engine.add_request(prompt, greedy(14)) for prompt in PROMPTS[:3]]
    firsts: list[str] = []
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_unfinished():
        more = engine.step()
        trample(engine)
        engine.check_integrity()
        collect(outputs, more)
        firsts += [output.request_id for output in more if output.finished]
    assert [tokens_of(outputs[name]) for name in ids] == [oracle(prompt, 14, True) for prompt in PROMPTS[:3]]
    assert firsts[0] == ids[0]
    assert engine.metrics(ids[0]).preemptions == 0
    look = engine.metrics()
    assert look.preemptions == look.resumed > 0
    assert look.preemptions < 8  # whoever is let in again has room to grow


@pytest.mark.parametrize("async_steps", [False, True])
@pytest.mark.parametrize("scarce", ["seats", "slots", "pages"])
def test_a_higher_priority_pushes_the_last_of_the_lower_ones_out(scarce: str, async_steps: bool) -> None:
    limits = {"seats": {"max_seqs": 2}, "slots": {"slots": 3}, "pages": {"pages": 7}}[scarce]
    engine, _ = make_engine(async_steps=async_steps, **limits)
    low = [engine.add_request(prompt, greedy(8), priority=n) for n, prompt in enumerate(PROMPTS[:2])]
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(3):
        collect(outputs, engine.step())
    high = engine.add_request(PROMPTS[2], greedy(6), priority=5)
    collect(outputs, engine.step())
    assert high in engine.scheduler.running
    assert low[0] not in engine.scheduler.running
    saved = engine.scheduler.requests[low[0]].saved
    assert saved is not None
    assert saved.offloaded is (scarce != "seats")
    for name, more in run_all(engine, lambda: trample(engine)).items():
        outputs.setdefault(name, []).extend(more)
    for name, prompt, new in ((low[0], PROMPTS[0], 8), (low[1], PROMPTS[1], 8), (high, PROMPTS[2], 6)):
        assert tokens_of(outputs[name]) == oracle(prompt, new, True)
    assert engine.metrics(high).preemptions == 0


def test_equal_priority_pushes_nobody_out() -> None:
    engine, _ = make_engine(max_seqs=1)
    first = engine.add_request(PROMPTS[0], greedy(6), priority=3)
    engine.step()
    engine.add_request(PROMPTS[1], greedy(2), priority=3)
    engine.step()
    assert list(engine.scheduler.running) == [first]


def test_waiting_requests_go_by_priority_then_arrival() -> None:
    engine, _ = make_engine(max_seqs=1)
    ids = [engine.add_request([n], greedy(2), priority=priority) for n, priority in enumerate((0, 1, 1, 0))]
    ends = [output.request_id for _ in range(12) for output in engine.step() if output.finished]
    assert ends == [ids[1], ids[2], ids[0], ids[3]]


def test_a_resident_request_is_moved_out_when_others_need_its_pages() -> None:
    engine, _ = make_engine(pages=9)
    idle = engine.add_request(PROMPTS[3], greedy(10))
    engine.step()
    engine.suspend(idle)
    busy = engine.add_request(PROMPTS[3], greedy(12))
    outputs = run_all(engine, lambda: trample(engine))
    assert tokens_of(outputs[busy]) == oracle(PROMPTS[3], 12, True)
    saved = engine.scheduler.requests[idle].saved
    assert saved is not None
    assert saved.offloaded
    engine.resume(idle)
    assert tokens_of(run_all(engine)[idle]) == oracle(PROMPTS[3], 10, True)


@pytest.mark.parametrize("what", ["suspend", "offload", "resume"])
def test_a_request_that_cannot_be_moved_ends_and_the_others_go_on(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = make_engine(pages=7)
    ids = [engine.add_request(prompt, greedy(14)) for prompt in PROMPTS[:3]]
    suspension = engine.scheduler.suspension
    whole = getattr(suspension, what)

    def fail(request: object) -> None:
        monkeypatch.setattr(suspension, what, whole)
        raise RuntimeError("no host memory")

    monkeypatch.setattr(suspension, what, fail)
    outputs = run_all(engine)
    failed = [name for name in ids if outputs[name][-1].finish_reason == "error"]
    assert len(failed) == 1
    assert str(outputs[failed[0]][-1].error) == "no host memory"
    for name, prompt in zip(ids, PROMPTS, strict=False):
        if name not in failed:
            assert tokens_of(outputs[name]) == oracle(prompt, 14, True)
    assert engine.pool.held_pages == 0


def test_a_request_that_cannot_be_suspended_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not held then: `resume` must not put one that runs into the queue as well."""
    engine, executor = make_engine(loops_per_step=1)
    engine.add_request(PROMPTS[0], greedy(4), "a")
    outputs: dict[str, list[StepOutput]] = {}
    for _ in range(2):
        collect(outputs, engine.step())
    with monkeypatch.context() as patch:
        patch.setattr(executor, "save", lambda seat: (_ for _ in ()).throw(torch.OutOfMemoryError("no room")))
        with pytest.raises(torch.OutOfMemoryError):
            engine.suspend("a")
    engine.check_integrity()
    assert engine.resume("a")
    assert engine.metrics().requests_running == 1
    for name, more in run_all(engine).items():
        outputs.setdefault(name, []).extend(more)
    assert tokens_of(outputs["a"]) == oracle(PROMPTS[0], 4, True)


def test_moving_requests_from_a_callback_is_refused() -> None:
    engine, _ = make_engine()

    def stop(ids: torch.Tensor, scores: torch.Tensor | None) -> bool:
        return engine.suspend(name)

    name = engine.add_request(PROMPTS[0], greedy(5, stop=stop))
    (output,) = run_all(engine)[name]
    assert "suspend: a step of this engine is running" in str(output.error)
