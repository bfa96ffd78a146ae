"""The reference store: what a capture leaves for the consumes that follow it.

One slot holds, for one live token, the retained keys S (`index`, `count`), their mass m, the dense output
O_ref and the centre C_ref of every captured site. The life of a slot:

    empty --acquire--> source-ready --captured--> reusable --retire--> retired --collect--> empty
                            ^                         |
                            +-------- renew ----------+      (the next token: a new incarnation)

A slot belongs to a lease (request, row, incarnation). Incarnations of a slot only grow, also across owners,
so a plan that carries an old lease is recognised and rejected (StalePlan). All work on the store is ordered
by one stream, which owns it. A retired slot is empty again once the fence recorded at its retirement has
passed, and every reader that announced itself (`reader`) has closed its ticket and that ticket's fence has
passed too.

Acceptance may be known on the device only: `invalidate` clears rejected rows and their descendants there, and
the host, which does not read back, goes on counting them as live: its numbers are upper bounds until it
renews or retires them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from sparse_compile.runtime.fences import CudaFence, Fence, ImmediateFence
from sparse_compile.runtime.leases import Lease, OutOfSlots, Slot, SlotState, StalePlan, Ticket
from sparse_compile.runtime.seats import to_device
from sparse_compile.runtime.store_spec import StoreSpec

__all__ = ["Lease", "OutOfSlots", "ReferenceStore", "SlotState", "StalePlan", "StoreSpec", "Ticket"]


class ReferenceStore:
    """The tensors of all slots and who holds which. `slots` counts the dummy slot 0, which is never leased.

    Tensors (all on `device`): index int32 [slots, sites, heads, capacity]; count int32 [slots, sites]; mass
    [slots, sites, heads] and c_ref [slots, sites, heads, head_dim] in the compute dtype; o_ref [slots, sites,
    heads, head_dim] in the model's dtype; valid bool [slots]: leased and not invalidated. Only count and
    valid are ever cleared; a count of 0 says that nothing else of the slot may be read.

    stream: the stream that owns the store, by default the current one of a CUDA device. fence: makes the
    fence of everything submitted so far, for tests that play a slow device.
    """

    def __init__(
        self,
        spec: StoreSpec,
        slots: int,
        device: torch.device | str,
        stream: torch.cuda.Stream | None = None,
        fence: Callable[[], Fence] | None = None,
    ) -> None:
        if slots < 2:
            raise ValueError(f"slots={slots} must be at least 2: slot 0 is the dummy slot")
        self.spec = spec
        self.slots = slots
        self.device = torch.device(device)
        per_head = (slots, spec.sites, spec.heads)
        self.index = torch.empty((*per_head, spec.capacity), dtype=torch.int32, device=device)
        self.count = torch.zeros((slots, spec.sites), dtype=torch.int32, device=device)
        self.mass = torch.empty(per_head, dtype=spec.compute_dtype, device=device)
        self.o_ref = torch.empty((*per_head, spec.head_dim), dtype=spec.dtype, device=device)
        self.c_ref = torch.empty((*per_head, spec.head_dim), dtype=spec.compute_dtype, device=device)
        self.valid = torch.zeros(slots, dtype=torch.bool, device=device)
        if self.device.type == "cuda" and stream is None:
            stream = torch.cuda.current_stream(self.device)
        self.stream = stream
        self._make_fence = fence or (ImmediateFence if stream is None else lambda: CudaFence(stream))
        self._slots = [Slot() for _ in range(slots)]
        self._free = list(range(slots - 1, 0, -1))
        self._retired: deque[int] = deque()

    @property
    def bytes(self) -> int:
        """Bytes of all tensors of the store."""
        return self.slots * self.spec.bytes_per_slot

    @property
    def usable_slots(self) -> int:
        """Slots that can be leased: all but the dummy."""
        return self.slots - 1

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def outstanding_slots(self) -> int:
        """Retired slots whose last readers have not been seen to finish."""
        return len(self._retired)

    @property
    def live_upper_bound(self) -> int:
        """Leased slots as the host counts them: the device may know that some of them are invalid."""
        return self.usable_slots - self.free_slots - self.outstanding_slots

    def state(self, slot: int) -> SlotState:
        return self._slots[slot].state

    # ------------------------------------------------------------------ leases

    def acquire(self, request: str, row: int) -> Lease:
        """Leases an empty slot (empty -> source-ready). Raises OutOfSlots when there is none."""
        self.collect()
        if not self._free:
            raise OutOfSlots(
                f"none of the {self.usable_slots} slots is empty, {self.outstanding_slots} of them wait for "
                "their readers; wait for a request to finish, or raise max_batch"
            )
        with self._on_stream():
            self.valid[self._free[-1]] = True  # may fail: then nothing is leased
        return self._lease(self._free.pop(), request, row)

    def renew(self, lease: Lease, row: int) -> Lease:
        """The same slot for another token of the request, also for a corrected one at the same row. `lease`
        goes stale.

        Work already submitted for the old incarnation is safe: the stream orders it before what the new one
        writes. Raises StalePlan for an old lease, RuntimeError while a reader outside the stream holds the
        slot.
        """
        return self.renew_all([lease], [row])[0]

    def renew_all(self, leases: Sequence[Lease], rows: Sequence[int], on_device: bool = False) -> list[Lease]:
        """`renew` for several at once. Nothing has changed when it raises. on_device: `begin_rows` will say which rows
        begin.
        """
        slots = [self._current(lease) for lease in leases]
        for lease, slot in zip(leases, slots, strict=True):
            if slot.open_readers or not all(fence.done() for fence in slot.fences):
                raise RuntimeError(
                    f"slot {lease.slot} is still read by others; retire it and acquire another"
                )
        doubtful = [lease.slot for lease, slot in zip(leases, slots, strict=True) if slot.doubtful]
        self._clear([] if on_device else doubtful, valid=True)
        for slot in slots:
            slot.fences.clear()
        return [self._lease(lease.slot, lease.request, row) for lease, row in zip(leases, rows, strict=True)]

    def check(self, leases: Iterable[Lease]) -> None:
        """Raises StalePlan unless every lease is the current one of its slot: what a plan is asked before it
        runs.
        """
        for lease in leases:
            self._current(lease)

    def captured(self, leases: Iterable[Lease]) -> None:
        """A capture of these leases has been submitted on the store's stream (source-ready -> reusable)."""
        for lease in leases:
            self._current(lease).state = SlotState.REUSABLE

    def reader(self, lease: Lease) -> Ticket:
        """Announces a reader outside the store's stream. Raises StalePlan unless the slot is reusable."""
        slot = self._current(lease)
        if slot.state is not SlotState.REUSABLE:
            raise StalePlan(f"{lease} is {slot.state.value}: nothing has been captured into it")
        return Ticket(slot)

    def retire(self, lease: Lease) -> None:
        """Gives the slot up. It is empty again once all work submitted so far, and every reader, has
        completed.
        """
        slot = self._current(lease)
        slot.state, slot.lease = SlotState.RETIRED, None
        slot.fences.append(self._make_fence())
        self._retired.append(lease.slot)

    def collect(self, wait: bool = False) -> int:
        """Empties retired slots whose readers have completed; `wait` blocks for those with a fence. Returns
        how many.
        """
        done: list[int] = []
        for number in self._retired:
            slot = self._slots[number]
            if wait and not slot.open_readers:
                for fence in slot.fences:
                    fence.wait()
            if not slot.open_readers and all(fence.done() for fence in slot.fences):
                done.append(number)
        self._clear(done, valid=False)  # may fail: then they stay retired
        for number in done:
            self._slots[number] = Slot(incarnation=self._slots[number].incarnation)
            self._retired.remove(number)
        self._free.extend(reversed(done))
        return len(done)

    # ------------------------------------------------------------------ contents

    def contents(self, lease: Lease) -> tuple[torch.Tensor, ...]:
        """Views of what the slot holds: index, count, mass, o_ref, c_ref."""
        self.check([lease])
        return tuple(tensor[lease.slot] for tensor in self._payload())

    def fill(self, lease: Lease, contents: Sequence[torch.Tensor]) -> None:
        """Writes what `contents` gave, perhaps of another slot."""
        self.check([lease])
        with self._on_stream():
            for tensor, value in zip(self._payload(), contents, strict=True):
                tensor[lease.slot].copy_(value, non_blocking=True)

    # ------------------------------------------------------------------ on the device

    def invalidate(self, chains: Sequence[Sequence[Lease]], rejected: torch.Tensor) -> None:
        """Clears rejected rows and their descendants on the device; the host reads nothing back.

        chains: per sequence the leases of a block of rows in order, each the parent of the next. rejected:
        bool [len(chains), longest chain] on the device; beyond the end of a chain it is not looked at.
        """
        width = max((len(chain) for chain in chains), default=0)
        if tuple(rejected.shape) != (len(chains), width) or rejected.dtype != torch.bool:
            raise ValueError(
                f"rejected is {rejected.dtype} {tuple(rejected.shape)}, "
                f"the chains need torch.bool {(len(chains), width)}"
            )
        for chain in chains:
            self.check(chain)
        for lease in (lease for chain in chains for lease in chain):
            self._slots[lease.slot].doubtful = True
        numbers = [[lease.slot for lease in chain] + [0] * (width - len(chain)) for chain in chains]
        with self._on_stream():
            self.clear_rejected(self._numbers(numbers), rejected)

    def clear_rejected(self, slots: torch.Tensor, rejected: torch.Tensor) -> None:
        """The part of `invalidate` that the device does, for runs whose rows the host does not know: on the current
        stream, and without a look at leases. slots: int64 [B, K], 0 for none; rejected: bool [B, K].
        """
        dead = rejected.to(torch.int32).cumsum(-1) > 0  # [B, K]: those behind a rejected row as well
        hit = torch.where(dead, slots, 0).flatten()  # the rest hit the dummy slot, which is never valid
        self.valid.index_fill_(0, hit, False)
        self.count.index_fill_(0, hit, 0)

    def begin_rows(self, slots: torch.Tensor, beginning: torch.Tensor) -> None:
        """The part of `renew` that the device does, likewise. slots: int64 [T], each once or 0; beginning: bool [T]."""
        beginning = beginning & (slots > 0)
        self.valid.index_copy_(0, slots, self.valid[slots] | beginning)
        self.count.index_fill_(0, torch.where(beginning, slots, 0), 0)

    def alive(self, row_slot: torch.Tensor) -> torch.Tensor:
        """bool [T] on the device: whether each row's slot is leased and has not been invalidated. row_slot:
        int32 [T].
        """
        return self.valid[row_slot.long()]

    # ------------------------------------------------------------------ the law

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free + leased + outstanding are all slots, and nobody's slots are
        cleared.
        """
        leased = [number for number, slot in enumerate(self._slots) if slot.lease is not None]
        known = sorted([*self._free, *leased, *self._retired])
        if known != list(range(1, self.slots)):
            raise RuntimeError(
                f"reference store broken: {len(self._free)} free + {len(leased)} leased + "
                f"{len(self._retired)} outstanding are not the {self.usable_slots} usable slots, each once"
            )
        wrong = [number for number in self._free if self._slots[number].state is not SlotState.EMPTY]
        wrong += [number for number in self._retired if self._slots[number].state is not SlotState.RETIRED]
        uncleared = (self.valid | (self.count != 0).any(-1)).tolist()
        wrong += [number for number in self._free if uncleared[number]]
        if wrong or bool(self.valid[0]):
            raise RuntimeError(f"reference store broken: slots {wrong or [0]} do not look like what they are")

    # ------------------------------------------------------------------ inside

    def _payload(self) -> tuple[torch.Tensor, ...]:
        return self.index, self.count, self.mass, self.o_ref, self.c_ref

    def _lease(self, number: int, request: str, row: int) -> Lease:
        slot = self._slots[number]
        slot.incarnation += 1
        slot.state, slot.doubtful = SlotState.SOURCE_READY, False
        slot.lease = Lease(number, request, row, slot.incarnation)
        return slot.lease

    def _current(self, lease: Lease) -> Slot:
        slot = self._slots[lease.slot]
        if slot.lease != lease:
            raise StalePlan(
                f"{lease} is stale: slot {lease.slot} is {slot.state.value}, its lease is {slot.lease}"
            )
        return slot

    def _clear(self, numbers: list[int], valid: bool) -> None:
        """Per-row metadata only: the payload is overwritten by the next capture."""
        if not numbers:
            return
        with self._on_stream():
            rows = self._numbers(numbers)
            self.count.index_fill_(0, rows, 0)
            self.valid.index_fill_(0, rows, valid)

    def _numbers(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64, device="cpu"), self.device)

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)
