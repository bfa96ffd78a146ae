"""The reference store: the life of a slot, who may use it, and what the device alone knows."""

from __future__ import annotations

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import poison

from sparse_compile.kernels.retention import Retention
from sparse_compile.runtime.fences import CudaFence
from sparse_compile.runtime.reference_store import (
    Lease,
    OutOfSlots,
    ReferenceStore,
    SlotState,
    StalePlan,
    StoreSpec,
)

SPEC = StoreSpec(sites=2, heads=3, head_dim=4, capacity=5, dtype=torch.bfloat16)


class ManualFence:
    """A device that finishes when the test says so."""

    def __init__(self) -> None:
        self.passed = False

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.passed = True


class SlowStore(ReferenceStore):
    """Keeps its fences where the test can reach them."""

    def __init__(self, slots: int) -> None:
        self.made: list[ManualFence] = []
        super().__init__(SPEC, slots, "cpu", fence=self._fence)

    def _fence(self) -> ManualFence:
        self.made.append(ManualFence())
        return self.made[-1]


def make_store(slots: int = 4) -> ReferenceStore:
    store = ReferenceStore(SPEC, slots, "cpu")
    poison(store)
    return store


def capture(store: ReferenceStore, *leases: Lease) -> None:
    """What a capture op does to the metadata."""
    for lease in leases:
        store.count[lease.slot] = 3
    store.captured(leases)


def payload_hash(store: ReferenceStore) -> str:
    tensors = (store.index, store.mass, store.o_ref.float(), store.c_ref)
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


# ---------------------------------------------------------------------- shapes and capacity


@pytest.mark.parametrize(
    ("dtype", "compute"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_tensors_follow_the_spec(dtype: torch.dtype, compute: torch.dtype) -> None:
    spec = StoreSpec(2, 3, 4, 5, dtype)
    store = ReferenceStore(spec, 6, "cpu")
    assert (store.index.shape, store.index.dtype) == ((6, 2, 3, 5), torch.int32)
    assert (store.count.shape, store.count.dtype) == ((6, 2), torch.int32)
    assert (store.mass.shape, store.mass.dtype) == ((6, 2, 3), compute)
    assert (store.o_ref.shape, store.o_ref.dtype) == ((6, 2, 3, 4), dtype)
    assert (store.c_ref.shape, store.c_ref.dtype) == ((6, 2, 3, 4), compute)
    tensors = (store.index, store.count, store.mass, store.o_ref, store.c_ref, store.valid)
    assert store.bytes == sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize(
    ("context", "retention", "bucket", "capacity"),
    [
        (70, Retention(1, 10), 1, 7),
        (71, Retention(1, 10), 1, 8),
        (71, Retention(1, 10), 16, 16),
        (64, Retention(1, 1), 16, 64),
        (3, Retention(1, 10), 1, 1),
    ],
)
def test_capacity_follows_context_and_retention(
    context: int, retention: Retention, bucket: int, capacity: int
) -> None:
    assert StoreSpec.capacity_for(context, retention, bucket) == capacity
    StoreSpec(1, 1, 1, capacity, torch.float32).check_capacity(context, retention)


def test_a_count_above_capacity_fails_before_anything_runs() -> None:
    with pytest.raises(ValueError, match=r"60 visible keys retains 6 keys .* holds 5; raise max_context"):
        SPEC.check_capacity(60, Retention(1, 10))
    SPEC.check_capacity(50, Retention(1, 10))


def test_arguments_are_validated() -> None:
    with pytest.raises(ValueError, match="capacity=0"):
        StoreSpec(1, 1, 1, 0, torch.float32)
    with pytest.raises(ValueError, match="slots=1"):
        ReferenceStore(SPEC, 1, "cpu")


# ---------------------------------------------------------------------- the life of a slot


def test_the_whole_life_of_a_slot() -> None:
    store = SlowStore(2)
    assert store.state(1) is SlotState.EMPTY
    lease = store.acquire("a", 7)
    assert (lease.slot, lease.request, lease.row) == (1, "a", 7)
    assert store.state(1) is SlotState.SOURCE_READY
    with pytest.raises(StalePlan, match="nothing has been captured"):
        store.reader(lease)
    capture(store, lease)
    assert store.state(1) is SlotState.REUSABLE
    store.retire(lease)
    assert store.state(1) is SlotState.RETIRED
    assert (store.free_slots, store.live_upper_bound, store.outstanding_slots) == (0, 0, 1)
    store.check_integrity()
    assert store.collect() == 0
    store.made[0].passed = True
    assert store.collect() == 1
    assert store.state(1) is SlotState.EMPTY
    store.check_integrity()


def test_the_dummy_slot_is_never_leased() -> None:
    store = make_store(4)
    assert sorted(store.acquire("a", row).slot for row in range(3)) == [1, 2, 3]
    with pytest.raises(OutOfSlots, match="none of the 3 slots is empty, 0 of them wait"):
        store.acquire("b", 0)
    store.check_integrity()


def test_acquire_takes_slots_whose_readers_have_finished() -> None:
    store = SlowStore(2)
    store.retire(store.acquire("a", 0))
    with pytest.raises(OutOfSlots, match="1 of them wait"):
        store.acquire("b", 0)
    store.made[0].passed = True
    assert store.acquire("b", 0).slot == 1
    store.check_integrity()


def test_a_slow_slot_does_not_hold_back_the_others() -> None:
    store = SlowStore(3)
    first, second = store.acquire("a", 0), store.acquire("b", 0)
    store.retire(first)
    store.retire(second)
    store.made[1].passed = True
    assert store.collect() == 1
    assert store.state(first.slot) is SlotState.RETIRED
    assert store.acquire("c", 0).slot == second.slot
    store.check_integrity()


def test_collect_can_wait() -> None:
    store = SlowStore(2)
    store.retire(store.acquire("a", 0))
    assert store.collect(wait=True) == 1
    assert store.made[0].passed


def test_an_open_reader_keeps_the_slot() -> None:
    store = make_store(2)
    lease = store.acquire("a", 0)
    capture(store, lease)
    ticket = store.reader(lease)
    store.retire(lease)
    assert store.collect(wait=True) == 0
    assert int(store.count[lease.slot, 0]) == 3, "the reader still needs the metadata"
    fence = ManualFence()
    ticket.close(fence)
    assert store.collect() == 0
    fence.passed = True
    assert store.collect() == 1
    with pytest.raises(RuntimeError, match="closed already"):
        ticket.close(fence)
    store.check_integrity()


def test_a_slot_read_by_others_cannot_be_renewed() -> None:
    store = make_store(2)
    lease = store.acquire("a", 0)
    capture(store, lease)
    ticket, fence = store.reader(lease), ManualFence()
    with pytest.raises(RuntimeError, match="still read by others"):
        store.renew(lease, 1)
    ticket.close(fence)
    with pytest.raises(RuntimeError, match="still read by others"):
        store.renew(lease, 1)
    fence.passed = True
    assert store.renew(lease, 1).row == 1


def test_retirement_clears_metadata_and_leaves_the_payload() -> None:
    store = make_store()
    lease = store.acquire("a", 0)
    store.index[lease.slot] = 1
    capture(store, lease)
    before = payload_hash(store)
    store.retire(lease)
    store.collect()
    assert payload_hash(store) == before
    assert not store.count.any()
    assert not store.valid.any()


# ---------------------------------------------------------------------- incarnations


def test_a_renewed_lease_makes_the_old_one_stale() -> None:
    store = make_store()
    old = store.acquire("a", 5)
    capture(store, old)
    new = store.renew(old, 6)
    assert (new.slot, new.row, new.incarnation) == (old.slot, 6, old.incarnation + 1)
    assert store.state(new.slot) is SlotState.SOURCE_READY
    store.check([new])
    for use in (
        store.retire,
        store.reader,
        lambda lease: store.renew(lease, 7),
        lambda lease: store.check([lease]),
    ):
        with pytest.raises(StalePlan, match="stale"):
            use(old)


def test_a_corrected_token_at_the_same_row_is_a_new_incarnation() -> None:
    store = make_store()
    draft = store.acquire("a", 5)
    corrected = store.renew(draft, 5)
    assert corrected != draft
    with pytest.raises(StalePlan):
        store.check([corrected, draft])


def test_a_lease_of_an_earlier_owner_stays_stale() -> None:
    store = make_store(2)
    first = store.acquire("a", 0)
    store.retire(first)
    with pytest.raises(StalePlan):
        store.retire(first)
    second = store.acquire("a", 0)
    assert second.slot == first.slot
    assert second.incarnation > first.incarnation
    with pytest.raises(StalePlan):
        store.check([first])


# ---------------------------------------------------------------------- acceptance on the device


def test_rejection_takes_the_descendants_along() -> None:
    store = make_store(8)
    long = [store.acquire("a", row) for row in range(4)]
    short = [store.acquire("b", row) for row in range(2)]
    capture(store, *long, *short)
    rejected = torch.tensor([[False, True, False, False], [False, False, True, True]])
    store.invalidate([long, short], rejected)
    rows = torch.tensor([lease.slot for lease in (*long, *short)], dtype=torch.int32)
    assert store.alive(rows).tolist() == [True, False, False, False, True, True]
    assert (store.count[rows, 0] > 0).tolist() == [True, False, False, False, True, True]
    assert store.live_upper_bound == 6, "the host has not read anything back"
    store.check_integrity()


def test_invalidation_never_touches_the_payload() -> None:
    store = make_store()
    lease = store.acquire("a", 0)
    before = payload_hash(store)
    store.invalidate([[lease]], torch.tensor([[True]]))
    assert payload_hash(store) == before


def test_a_renewed_lease_is_alive_again_and_empty() -> None:
    store = make_store()
    lease = store.acquire("a", 3)
    capture(store, lease)
    store.invalidate([[lease]], torch.tensor([[True]]))
    lease = store.renew(lease, 3)
    assert store.alive(torch.tensor([lease.slot], dtype=torch.int32)).tolist() == [True]
    assert not store.count[lease.slot].any()
    capture(store, lease)
    store.retire(lease)
    store.collect()
    store.check_integrity()


def test_an_accepted_lease_loses_its_old_reference_when_renewed() -> None:
    store = make_store()
    lease = store.acquire("a", 3)
    capture(store, lease)
    store.invalidate([[lease]], torch.tensor([[False]]))
    lease = store.renew(lease, 4)
    assert not store.count[lease.slot].any()


def test_invalidate_checks_its_arguments() -> None:
    store = make_store()
    lease = store.acquire("a", 0)
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        store.invalidate([[lease]], torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="int64"):
        store.invalidate([[lease]], torch.zeros(1, 1, dtype=torch.int64))
    store.renew(lease, 1)
    with pytest.raises(StalePlan):
        store.invalidate([[lease]], torch.zeros(1, 1, dtype=torch.bool))


class NoReadback(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails on every operation that would make the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func)
        assert not any(
            word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")
        )
        return func(*args, **(kwargs or {}))


def test_the_host_reads_nothing_back() -> None:
    store = make_store(6)
    chain = [store.acquire("a", row) for row in range(3)]
    rejected = torch.tensor([[False, True, False]])
    with NoReadback():
        store.captured(chain)
        store.invalidate([chain], rejected)
        store.alive(torch.tensor([1, 2], dtype=torch.int32))
        lease = store.renew(chain[1], 1)
        for held in (chain[0], lease, chain[2]):
            store.retire(held)
        store.collect()
    store.check_integrity()


# ---------------------------------------------------------------------- the law


@pytest.mark.parametrize("break_it", ["leak", "twice", "dummy", "uncleared", "valid dummy"])
def test_check_integrity_finds_damage(break_it: str) -> None:
    store = make_store()
    lease = store.acquire("a", 0)
    if break_it == "leak":
        store._slots[lease.slot].lease = None
    elif break_it == "uncleared":
        store.count[2] = 1
    elif break_it == "valid dummy":
        store.valid[0] = True
    else:
        store._free.append(lease.slot if break_it == "twice" else 0)
    with pytest.raises(RuntimeError, match="reference store broken"):
        store.check_integrity()


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["acquire", "renew", "capture", "retire", "invalidate", "finish", "collect"]),
            st.integers(0, 99),
        )
    )
)
@settings(max_examples=100, deadline=None)
def test_any_history_keeps_the_law(history: list[tuple[str, int]]) -> None:
    store = SlowStore(5)
    live: list[Lease] = []
    dead: list[Lease] = []
    for what, number in history:
        lease = live[number % len(live)] if live else None
        if what == "acquire":
            try:
                live.append(store.acquire("r", number))
            except OutOfSlots:
                assert store.free_slots == 0
        elif what == "finish" and store.made:
            store.made[number % len(store.made)].passed = True
        elif what == "collect":
            store.collect(wait=number % 2 == 0)
        elif lease is not None:
            if what == "capture":
                capture(store, lease)
            elif what == "invalidate":
                store.invalidate([[lease]], torch.tensor([[number % 2 == 0]]))
            elif what in ("renew", "retire"):
                live.remove(lease)
                dead.append(lease)
                if what == "renew":
                    live.append(store.renew(lease, number))
                else:
                    store.retire(lease)
        store.check_integrity()
        store.check(live)
        assert store.live_upper_bound == len(live)
        for old in dead:
            with pytest.raises(StalePlan):
                store.check([old])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_retired_slot_waits_for_the_stream_that_owns_the_store() -> None:
    stream = torch.cuda.Stream()
    store = ReferenceStore(SPEC, 3, "cuda", stream=stream)
    lease = store.acquire("a", 0)
    store.captured([lease])
    with torch.cuda.stream(stream):
        torch.cuda._sleep(2_000_000_000)
        ticket = store.reader(lease)
        ticket.close(CudaFence(stream))
    store.retire(lease)
    assert store.collect() == 0
    stream.synchronize()
    assert store.collect() == 1
    store.check_integrity()
