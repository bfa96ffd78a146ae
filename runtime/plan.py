"""Row plans: one run of the executor as flat rows, one token each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from sparse_compile.kernels.prefill import Chunk
from sparse_compile.runtime.leases import Lease
from sparse_compile.runtime.seats import SeatTable, to_device

ProgramKind = Literal["dense", "sparse", "mixed"]

INACTIVE, DENSE, CAPTURE, CONSUME = 0, 1, 2, 3  # values of row_mode
FROM_DEVICE = -1  # a token that only the device knows yet: SeatTable.last_token of the row's seat


class PlanError(AssertionError):
    """A plan contradicts itself: a bug of its builder, found by `RowPlan.validate`."""


@dataclass(frozen=True)
class Segment:
    """Consecutive tokens of one sequence that a step computes: a chunk of a prompt, or one decode token."""

    tokens: Sequence[int]
    start: int  # position of the first token
    seat: int
    prefix_length: int = (
        0  # so many tokens at the beginning of the sequence see each other in both directions
    )
    decode: bool = False  # a generated token, not rows of the prompt
    sparse: bool = False  # the row captures and consumes, under `lease`
    lease: Lease | None = None
    wants_logits: bool = False  # the logits of the last row are needed
    loop: int = 0  # how many bodies the row has behind it

    def __post_init__(self) -> None:
        if self.sparse and self.lease is None:
            raise PlanError("a sparse segment needs the lease of a slot")
        if self.sparse and len(self.tokens) != 1:
            raise PlanError(f"a lease is for one row, the sparse segment has {len(self.tokens)}")

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    def rows(self) -> Iterator[tuple[int, int]]:
        """(position, visible keys) of each row: causal, but rows of the prefix see the whole prefix."""
        for position in range(self.start, self.end):
            inside = position < self.prefix_length
            yield position, max(position + 1, self.prefix_length) if inside else position + 1


@dataclass(frozen=True)
class RowPlan:
    """What a program needs to know about the T rows of a run.

    Inactive padding rows are 0 in every column: they write to page 0 and slot 0 only.
    """

    block_table: torch.Tensor  # int32 [1 + seats, pages]: the seat table's own; line 0 is page 0
    packed: torch.Tensor  # int32 [8, T]: ROW_FIELDS, then the token
    logit_rows: torch.Tensor  # int64 [n]: rows whose logits are needed, in the order of the segments
    kind: ProgramKind  # the program variant that runs it: what all active rows are, or "mixed"
    max_length: int  # visible keys of the longest row, known to the host
    leases: tuple[Lease, ...]  # of the rows that may be sparse
    chunks: tuple[Chunk, ...] = ()  # one per segment
    loops: int | None = None  # bodies to run from each row's depth on; None: the whole model, from its start
    depths: frozenset[int] = frozenset({0})  # row_loop of the active rows, known to the host
    carry_lines: int = 0  # row_carry stays below it

    ROW_FIELDS = ("row_seq", "row_position", "row_length", "row_loop", "row_slot", "row_mode", "row_carry")

    @property
    def rows(self) -> int:
        """T, padding included."""
        return self.packed.shape[1]

    @property
    def row_seq(self) -> torch.Tensor:
        """int32 [T]: line of block_table."""
        return self.packed[0]

    @property
    def row_position(self) -> torch.Tensor:
        """int32 [T]: where k and v of the row are written."""
        return self.packed[1]

    @property
    def row_length(self) -> torch.Tensor:
        """int32 [T]: visible keys, the first of the sequence; 0: inactive row."""
        return self.packed[2]

    @property
    def row_loop(self) -> torch.Tensor:
        """int32 [T]: loop depth at which the run starts the row."""
        return self.packed[3]

    @property
    def row_slot(self) -> torch.Tensor:
        """int32 [T]: slot of the reference store; 0: dummy."""
        return self.packed[4]

    @property
    def row_mode(self) -> torch.Tensor:
        """int32 [T]: 0 inactive, 1 dense, 3 sparse; a site's own: mode_at(site.kind)."""
        return self.packed[5]

    @property
    def row_carry(self) -> torch.Tensor:
        """int32 [T]: where what the row carries is kept between two runs; the lines of a seat are its own."""
        return self.packed[6]

    @property
    def token_ids(self) -> torch.Tensor:
        """int64 [T]"""
        return self.packed[7].long()

    @property
    def positions(self) -> torch.Tensor:
        """int64 [T]: row_position for the model."""
        return self.packed[1].long()

    def mode_at(self, kind: str) -> torch.Tensor:
        """row_mode at a site of `kind`: a sparse row is a capture row (2) at "capture", a consume row (3) at
        "consume".
        """
        if kind == "consume":
            return self.row_mode
        return self.row_mode.clamp(max=CAPTURE if kind == "capture" else DENSE)

    def validate(self, page_size: int, pages: int, slots: int) -> None:
        """Raises PlanError when the plan contradicts itself or the pools. Reads the device: for debugging and
        tests.
        """
        _require(self.packed.dtype == torch.int32, "packed must be int32")
        columns = 1 + len(self.ROW_FIELDS)
        _require(
            self.packed.shape[0] == columns,
            f"packed must have {columns} columns, it has {self.packed.shape[0]}",
        )
        _require(bool((self.row_length >= 0).all()), "row_length must not be negative")
        _require(bool((self.token_ids >= 0).all()), "token_ids must not be negative")
        longest = int(self.row_length.max()) if self.rows else 0
        _require(
            self.max_length >= longest, f"max_length={self.max_length} is below the longest row, {longest}"
        )
        table = self.block_table.cpu()
        _require(not table[0].any(), "line 0 of block_table must hold page 0 only")
        _require(bool(((table >= 0) & (table < pages)).all()), f"block_table must stay in {pages} pages")
        lines = self.row_seq.cpu().long()
        _require(bool(((lines >= 0) & (lines < table.shape[0])).all()), "row_seq must point into block_table")
        reach = (table[lines] > 0).sum(-1) * page_size  # tokens that the pages of each row's sequence hold
        _require(
            bool((self.row_length.cpu() <= reach).all()), "row_length must stay within the sequence's pages"
        )
        self._validate_rows(slots)

    def _validate_rows(self, slots: int) -> None:
        active = self.row_length > 0
        _require(bool((active == (self.row_mode > 0)).all()), "row_mode must be 0 exactly on inactive rows")
        _require(bool((self.row_position < self.row_length)[active].all()), "a row must see its own key")
        _require(not self.row_position[~active].any(), "inactive rows must write to position 0")
        _require(not self.row_seq[~active].any(), "inactive rows must belong to the dummy sequence")
        depths = set(self.row_loop[active].tolist())
        _require(depths <= self.depths, f"row_loop holds {sorted(depths)}, depths={sorted(self.depths)}")
        _require(
            bool((self.row_carry % self.block_table.shape[0] == self.row_seq).all()),
            "row_carry must be a line of the row's seat",
        )
        _require(
            bool((self.row_carry < self.carry_lines).all()),
            f"row_carry must stay in {self.carry_lines} lines",
        )
        carries = self.row_carry[active].tolist()
        partial = self.loops is not None
        _require(not partial or len(carries) == len(set(carries)), "two rows must not carry on one line")
        sparse = self.row_mode == CONSUME
        _require(bool((sparse == (self.row_slot > 0)).all()), "exactly the sparse rows must have a slot")
        _require(bool((self.row_slot < slots).all()), f"row_slot must stay in {slots} slots")
        slots_used, leased = self.row_slot[sparse].tolist(), {lease.slot for lease in self.leases}
        distinct = len(slots_used) == len(set(slots_used))
        _require(distinct and leased >= set(slots_used), "each sparse row must have a leased slot of its own")


_COLUMNS = 1 + len(RowPlan.ROW_FIELDS)


class PlanBuilder:
    """Builds plans on the host and puts them on the device of the seat table."""

    def __init__(self, seats: SeatTable) -> None:
        self.seats = seats

    def build(
        self,
        segments: Sequence[Segment],
        pad_to: int = 0,
        loops: int | None = None,
    ) -> RowPlan:
        """The rows of `segments` one after the other, then inactive rows up to `pad_to` in all."""
        columns: list[tuple[int, ...]] = []  # ROW_FIELDS, then the token
        logit_rows: list[int] = []
        chunks: list[Chunk] = []
        for segment in segments:
            chunks.append(
                Chunk(len(columns), len(segment.tokens), segment.seat, segment.start, segment.prefix_length)
            )
            columns.extend(self._rows_of(segment))
            if segment.wants_logits:
                logit_rows.append(len(columns) - 1)
        columns.extend([(0,) * _COLUMNS] * (pad_to - len(columns)))
        return RowPlan(
            block_table=self.seats.block_table,
            packed=self._pack(columns, any(FROM_DEVICE in segment.tokens for segment in segments)),
            logit_rows=self._put(torch.tensor(logit_rows, dtype=torch.int64, device="cpu")),
            kind=_kind(segments),
            max_length=max((row[2] for row in columns), default=0),
            leases=tuple(segment.lease for segment in segments if segment.sparse and segment.lease),
            chunks=tuple(chunks),
            loops=loops,
            depths=frozenset(segment.loop for segment in segments) or frozenset({0}),
            carry_lines=self.seats.carry_lines,
        )

    def _rows_of(self, segment: Segment) -> Iterator[tuple[int, ...]]:
        """The columns of each row: ROW_FIELDS, then the token."""
        slot, mode = (segment.lease.slot, CONSUME) if segment.sparse and segment.lease else (0, DENSE)
        carry = segment.seat  # its first line
        for token, (position, length) in zip(segment.tokens, segment.rows(), strict=True):
            yield segment.seat, position, length, segment.loop, slot, mode, carry, token

    def _pack(self, columns: list[tuple[int, ...]], from_device: bool) -> torch.Tensor:
        table = torch.tensor(columns, dtype=torch.int32, device="cpu").reshape(-1, _COLUMNS)
        # A copy, so that the strides are those of a fresh tensor for one row too: compiled pieces are particular.
        packed = self._put(table.t().clone(memory_format=torch.contiguous_format))
        if from_device:
            known = self.seats.last_token[packed[0]].to(torch.int32)
            packed[-1] = torch.where(packed[-1] == FROM_DEVICE, known, packed[-1])
        return packed

    def _put(self, tensor: torch.Tensor) -> torch.Tensor:
        return to_device(tensor, self.seats.device)


def padding_plan(
    block_table: torch.Tensor,
    rows: int,
    kind: ProgramKind,
    max_length: int = 0,
    loops: int | None = None,
    carry_lines: int | None = None,
    heads: bool = True,
) -> RowPlan:
    """A plan of inactive rows, each with logits unless `heads` is off: to compile and to capture over."""
    device = block_table.device
    return RowPlan(
        block_table=block_table,
        packed=torch.zeros(_COLUMNS, rows, dtype=torch.int32, device=device),
        logit_rows=torch.arange(rows if heads else 0, device=device),
        kind=kind,
        max_length=max_length,
        leases=(),
        loops=loops,
        carry_lines=carry_lines or block_table.shape[0],
    )


def _kind(segments: Sequence[Segment]) -> ProgramKind:
    sparse = sum(segment.sparse for segment in segments)
    if sparse == 0:
        return "dense"
    return "sparse" if sparse == len(segments) else "mixed"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
