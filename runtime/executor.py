"""Run row plans through a program: stage after stage over a small environment of named tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, wraps
from typing import Any, ParamSpec

import torch

from ..kernels.beside import beside
from ..kernels.prefill import Heads, Prompts, prefill_attention
from ..kernels.retention import Retention
from ..passes.pieces import CutStage, Cutter, Name, OpCall
from ..passes.program import (
    MODE_INPUTS,
    PLAN_INPUTS,
    POOL_INPUTS,
    STORE_INPUTS,
    Program,
)
from .blocks import BlockPlan, padding, run_round
from .compiler import PieceCompiler
from .depths import Depths
from .flights import FlightPlan, run_step
from .kv_pool import KVPool
from .options import Drafting
from .plan import ProgramKind, RowPlan, padding_plan
from .reference_store import ReferenceStore
from .sampler import Drawn
from .seats import SeatTable

Environment = dict[str, torch.Tensor]
Given = ParamSpec("Given")
RunOp = Callable[[CutStage, OpCall, tuple[Any, ...]], torch.Tensor]

_ONE_ROW_EACH = {"query_rows": 1}  # none reads a key that another one writes


def _selections_beside(run: Callable[Given, torch.Tensor]) -> Callable[Given, torch.Tensor]:
    """A run of an executor, in which what captures select is worked out beside the layers that follow."""

    @wraps(run)
    def around(*args: Given.args, **kwargs: Given.kwargs) -> torch.Tensor:
        with beside(args[0].device):  # type: ignore[attr-defined]
            return run(*args, **kwargs)

    return around


class Executor:
    """Runs plans over one pool and one store.

    Between runs it holds what rows carry that have only gone through some of the loops (`RowPlan.loops`), a line each
    (`RowPlan.row_carry`).
    """

    def __init__(
        self,
        program: Program,
        pool: KVPool,
        store: ReferenceStore | None,
        compiler: PieceCompiler | None = None,
    ) -> None:
        if program.sparse and store is None:
            raise ValueError("this program captures and consumes: it needs a reference store")
        self.program = program
        self.device, self.store = pool.device, store
        self.compiler = compiler or PieceCompiler(enabled=False)
        cutter = Cutter()
        self.variants = {
            name: tuple(cutter.cut(stage) for stage in variant.stages)
            for name, variant in program.variants.items()
        }
        self.compiler.prepare(cutter.codes.values())
        self.state: Environment = {name: getattr(pool, name) for name in POOL_INPUTS}
        if store is not None:
            self.state |= {name: getattr(store, name) for name in STORE_INPUTS}
        self.depths = Depths(program, self.device)
        self._carried: Environment = {}  # [lines, ...] each
        self._shared: Environment = {}  # what drafts leave for verification that is the same for all rows

    @property
    def loops(self) -> int:
        """Bodies that a row goes through; 1 for a program that is not rolled."""
        return self.depths.loops

    @torch.no_grad()
    def prefill(self, plan: RowPlan) -> torch.Tensor:
        """The logits `[len(plan.logit_rows), vocab]` of chunks of prompts, in the model's dtype."""
        if self.device.type != "cuda":
            return self._through("dense", plan, _call)

        def op(cut: CutStage, call: OpCall, args: tuple[Any, ...]) -> torch.Tensor:
            q, k, v, k_pool, v_pool, block_table, row_seq, row_position, row_length, row_loop, *gate = args
            n = call.kwargs
            heads = Heads(
                n["plane"] + n["plane_stride"] * cut.stage.loop, n["scale"], n["window"], n["softcap"]
            )
            prompts = Prompts(block_table, row_seq, row_position, row_length, row_loop, plan.chunks)
            return prefill_attention(q, k, v, k_pool, v_pool, prompts, heads, *gate)

        return self._through("dense", plan, op)

    @torch.no_grad()
    @_selections_beside
    def draft(self, plan: RowPlan) -> torch.Tensor:
        """What the model's own head makes of rows after their first `plan.loops` bodies: logits of `plan.logit_rows`.

        One row per sequence. Layers behind the loop run too, and write keys and values that `verify` overwrites.
        """
        prologue, bodies, tail = self._rolled_stages(plan)
        environment = self._environment(plan)
        self._layers([prologue, *bodies[: plan.loops]], environment, plan, _call_one_row_each)
        self._keep([prologue, bodies[0]], environment, plan)
        if plan.logit_rows.shape[0] == 0:
            return self._no_logits()
        return self._tail(tail, environment, plan, _call_one_row_each)

    @torch.no_grad()
    @_selections_beside
    def verify(self, plan: RowPlan) -> torch.Tensor:
        """Takes rows that `draft` left through the last `plan.loops` bodies; the logits of `plan.logit_rows`.

        Several rows per sequence: each sees the keys of those before it.
        """
        _, bodies, tail = self._rolled_stages(plan)
        environment = self._environment(plan) | self._shared
        lines = plan.row_carry.long()
        environment |= {name: kept.index_select(0, lines) for name, kept in self._carried.items()}
        op = _call_blocks(plan.block_rows)
        self._layers(bodies[self.loops - (plan.loops or 0) :], environment, plan, op)
        return self._tail(tail, environment, plan, op)

    @torch.no_grad()
    def force(self, plan: RowPlan, retention: Retention | None = None) -> torch.Tensor:
        """The logits of given tokens, several of a sequence in one run: what decoding one after the other computes.

        With `plan.loops`, what the model's own head makes of their first so many bodies. retention: in place of the
        program's, for all layers; the store must have room for it.
        """
        op = _call if retention is None else _call_keeping(retention)
        if plan.loops is None:
            return self._through(plan.kind if self.program.sparse else "dense", plan, op)
        prologue, bodies, tail = self._rolled_stages(plan)
        return self._tail([prologue, *bodies[: plan.loops], *tail], self._environment(plan), plan, op)

    @torch.no_grad()
    def round(self, plan: BlockPlan) -> Drawn:
        """A whole round of blocks in which every choice is the largest score."""
        return run_round(self, plan, share=not self.compiler.fixed)

    @torch.no_grad()
    def step(self, plan: FlightPlan) -> Drawn:
        """A step of pipelines in which every choice is the largest score."""
        return run_step(self, plan, fuse=self.compiler.fuse)

    @torch.no_grad()
    @_selections_beside
    def advance(self, plan: RowPlan, captures: tuple[bool, ...] | None = None) -> torch.Tensor:
        """Takes rows, several of a sequence among them, `plan.loops` bodies on from their own depths.

        The logits of `plan.logit_rows` are those of the whole model for rows that finish, and drafts for rows that have
        begun, and without meaning for others. captures: as in `decode`.
        """
        captures = self.depths.captures_at(plan) if captures is None else captures
        return self._some_loops(plan, captures, pipeline=True)

    @torch.no_grad()
    @_selections_beside
    def decode(self, plan: RowPlan, captures: tuple[bool, ...] | None = None) -> torch.Tensor:
        """The logits of a step of one row per sequence; of those rows that have been through the whole model.

        captures: for each body of a run of some loops, whether a row may capture there; None: `depths.captures_at`.
        """
        if plan.loops is not None:
            return self._some_loops(plan, self.depths.captures_at(plan) if captures is None else captures)
        return self._through(plan.kind if self.program.sparse else "dense", plan, _call_one_row_each)

    def warm_up(
        self,
        rows: Sequence[int],
        seats: SeatTable,
        kinds: Sequence[ProgramKind],
        loops: int | None = None,
        drafting: Drafting | None = None,
    ) -> list[Callable[[], object]]:
        """What to call once, so that no later step compiles anything: prompts, then steps of `rows` of each kind, or
        of `loops` bodies with every choice of those that may capture.
        """
        counts = self.compiler.one_of_each_kind({1, *rows})
        prompts = self.compiler.one_of_each_kind((1, 2, self.compiler.few_rows + 1))
        plans: list[tuple[Callable[[RowPlan], torch.Tensor], RowPlan]]
        plans = [(self.prefill, padding_plan(seats.block_table, count, "dense")) for count in prompts]
        flights: list[Callable[[], object]] = []
        if drafting is not None:
            plans += self._drafting_plans(rows, seats, kinds, drafting)
            flights = self._flights(rows, seats, drafting) if drafting.pipeline else []
        elif loops is None:
            plans += [
                (self.decode, padding_plan(seats.block_table, count, kind))
                for count in counts
                for kind in kinds
            ]
        steps: list[Callable[[], object]] = [*(partial(run, plan) for run, plan in plans), *flights]
        if loops is None:
            return steps
        for count in counts:
            plan = padding_plan(seats.block_table, count, "mixed", loops=loops)
            steps += [
                partial(self.decode, plan, captures) for captures in self.depths.capture_choices(loops, kinds)
            ]
        return steps

    def _flights(
        self, rows: Sequence[int], seats: SeatTable, drafting: Drafting
    ) -> list[Callable[[], object]]:
        """Steps of one request and of two: what compiles for two serves more."""
        pages, most = seats.block_table.shape[1], max(rows, default=0)
        return [
            partial(
                self.step,
                padding(
                    FlightPlan, seats, self.store, pages, (count, drafting.rows), drafting.loops, "dense", 0
                ),
            )
            for count in range(1, min(most, 2) + 1)
        ]

    def _drafting_plans(
        self,
        rows: Sequence[int],
        seats: SeatTable,
        kinds: Sequence[ProgramKind],
        drafting: Drafting,
    ) -> list[tuple[Callable[[RowPlan], torch.Tensor], RowPlan]]:
        lines, loops = seats.carry_lines, drafting.loops
        plans: list[tuple[Callable[[RowPlan], torch.Tensor], RowPlan]] = []
        most = max(rows, default=0) * drafting.rows
        for count in self.compiler.one_of_each_kind({1, *range(1, most + 1)}):
            for kind in kinds:
                plan = padding_plan(seats.block_table, count, kind, loops=loops, carry_lines=lines)
                if drafting.pipeline:
                    plans.append((self.advance, plan))
                else:
                    plans += [
                        (self.draft, plan),
                        (self.verify, replace(plan, loops=self.loops - loops)),
                    ]
        return plans

    def save(self, seat: int) -> tuple[torch.Tensor, ...]:
        """Copies of what the row of `seat` carries between two runs of some loops; nothing before the first."""
        return tuple(tensor[seat].clone() for tensor in self._carried.values())

    def load(self, seat: int, carried: tuple[torch.Tensor, ...]) -> None:
        """Gives `seat` what `save` returned, perhaps of another seat."""
        for tensor, value in zip(self._carried.values(), carried, strict=True):
            tensor[seat].copy_(value, non_blocking=True)

    # ------------------------------------------------------------------ the whole model

    def _through(self, variant: str, plan: RowPlan, op: RunOp) -> torch.Tensor:
        environment = self._environment(plan)
        return self._tail(self.variants[variant], environment, plan, op)

    def _tail(
        self, stages: Sequence[CutStage], environment: Environment, plan: RowPlan, op: RunOp
    ) -> torch.Tensor:
        """The logits that the stages up to the head make."""
        *layers, head = stages
        self._layers(layers, environment, plan, op)
        return self._logits(head, environment, plan)

    def _layers(self, stages: Sequence[CutStage], environment: Environment, plan: RowPlan, op: RunOp) -> None:
        """Runs stages that all rows go through, and adds what they make to `environment`."""
        for cut in stages:
            environment["row_loop"] = torch.full_like(plan.row_loop, cut.stage.loop)
            environment |= self._run(cut, environment, op)

    def _environment(self, plan: RowPlan) -> Environment:
        """Every input that a stage may ask for, before the first stage runs."""
        tokens = {"input_ids": plan.token_ids[:, None], "position_ids": plan.positions[:, None]}
        return self.state | tokens | _row_inputs(plan)

    def _logits(self, head: CutStage, environment: Environment, plan: RowPlan) -> torch.Tensor:
        """The head over those rows that need logits."""
        if plan.logit_rows.shape[0] == 0:  # a chunk inside a prompt
            return self._no_logits()
        names = head.stage.row_inputs
        few = {name: environment[name].index_select(0, plan.logit_rows) for name in names}
        return self._run(head, environment | few, _call)["logits"][:, 0]

    def _no_logits(self) -> torch.Tensor:
        dtype = self.state["k_pool"].dtype
        return torch.empty(0, self.program.vocabulary, dtype=dtype, device=self.device)

    def _run(self, cut: CutStage, environment: Environment, op: RunOp) -> Environment:
        """The outputs of one stage by name."""
        values: dict[str, Any] = {
            name: environment[given] for name, given in zip(cut.inputs, cut.stage.inputs, strict=True)
        }
        for call, done in zip(cut.calls, cut.done, strict=True):
            if isinstance(call, OpCall):
                args = tuple(values[arg.name] if isinstance(arg, Name) else arg for arg in call.args)
                values[call.output] = op(cut, call, args)
            else:
                inputs = [values[name] for name in call.inputs]
                made = self.compiler(call.code, [*inputs, *call.weights])
                values.update(zip(call.outputs, made, strict=True))
            for name in done:
                del values[name]
        return dict(zip(cut.stage.outputs, (values[name] for name in cut.results), strict=True))

    # ------------------------------------------------------------------ some loops of it

    def _some_loops(self, plan: RowPlan, captures: tuple[bool, ...], pipeline: bool = False) -> torch.Tensor:
        """Rows start where they left off; the first stages run for rows that begin, the last for those that finish,
        and in a pipeline for those that have begun as well.

        Raises ValueError for a program that is not rolled: it has no loop to stop at.
        """
        self._check_rolled(plan)
        prologue, body, *epilogue, head = self.variants["depth"]
        first, *inside, last = self.depths.stages(plan, len(captures), pipeline, self.compiler.fuse)
        environment = self._environment(plan)
        environment |= self._run(prologue, environment | first.inputs, _call_one_row_each)
        environment |= self._resumed(prologue, environment, plan, first.alive)
        for rows, captured in zip(inside, captures, strict=True):
            made = self._run(body, environment | rows.inputs, _call_at_depths(captured))
            for name, new in made.items():
                environment[name] = _where(rows.alive, new, environment[name]) if name in environment else new
        for name, kept in self._carried.items():
            kept.index_copy_(0, plan.row_carry.long(), environment[name])
        for cut in epilogue:
            environment |= self._run(
                cut, environment | last.inputs, _call if pipeline else _call_one_row_each
            )
        return self._logits(head, environment, plan)

    def _resumed(
        self, prologue: CutStage, environment: Environment, plan: RowPlan, begins: torch.Tensor
    ) -> Environment:
        """What the first stage made, for rows that begin; what their last run left, for the others."""
        result = {}
        for name in prologue.stage.outputs:
            if name not in prologue.stage.row_outputs:
                continue  # the same for all rows
            fresh = environment[name]
            result[name] = _where(begins, fresh, self._lines(name, fresh, plan)[plan.row_carry])
        return result

    def _lines(self, name: str, like: torch.Tensor, plan: RowPlan) -> torch.Tensor:
        """Where rows keep the value `name` between two runs, [lines, ...]."""
        if name not in self._carried:
            self._carried[name] = like.new_zeros(plan.carry_lines, *like.shape[1:])
        return self._carried[name]

    def _check_rolled(self, plan: RowPlan) -> None:
        if self.program.roll is None:
            raise ValueError(f"loops={plan.loops}: the program is not rolled, {self.program.roll_reason}")

    def _rolled_stages(self, plan: RowPlan) -> tuple[CutStage, list[CutStage], list[CutStage]]:
        """First stage, a body per loop, and what follows them, for rows that are all at one depth."""
        self._check_rolled(plan)
        prologue, *others = self.variants[plan.kind if self.program.sparse else "dense"]
        return prologue, others[: self.loops], others[self.loops :]

    def _keep(self, made_by: Sequence[CutStage], environment: Environment, plan: RowPlan) -> None:
        """Keeps what these stages have made for `verify`: by row on the rows' lines, the rest as it is."""
        for stage in (cut.stage for cut in made_by):
            for name in stage.outputs:
                if name in stage.row_outputs:
                    kept = self._lines(name, environment[name], plan)
                    kept.index_copy_(0, plan.row_carry.long(), environment[name])
                elif name in self._shared:  # graphs read from where it was first
                    self._shared[name].copy_(environment[name])
                else:
                    self._shared[name] = environment[name].clone()


def _row_inputs(plan: RowPlan) -> Environment:
    """The inputs of our ops that the plan gives, as they are where a row's depth is the stage's."""
    rows = {name: getattr(plan, name) for name in (*PLAN_INPUTS, "row_slot")}
    return rows | {name: plan.mode_at(kind) for kind, name in MODE_INPUTS.items()}


def _where(rows: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new` for the rows [T] that are true, else `old`."""
    return torch.where(rows.view(-1, *(1 for _ in new.shape[1:])), new, old)


def _call(cut: CutStage, call: OpCall, args: tuple[Any, ...]) -> torch.Tensor:
    return call.target(*args, **call.kwargs)


def _call_blocks(rows: int) -> RunOp:
    """For blocks of so many rows of one sequence each, which read its keys and values once where they read all."""
    shares = (torch.ops.sparse_compile.dense.default, torch.ops.sparse_compile.capture.default)

    def op(cut: CutStage, call: OpCall, args: tuple[Any, ...]) -> torch.Tensor:
        promise = {"query_rows": rows} if rows > 1 and call.target in shares else {}
        return call.target(*args, **(call.kwargs | promise))

    return op


def _call_keeping(retention: Retention) -> RunOp:
    """For programs that keep another share than they were made for."""
    kept = {"retention_num": retention.numerator, "retention_den": retention.denominator}
    kept |= {"keep_first": retention.first, "keep_last": retention.last}

    def op(cut: CutStage, call: OpCall, args: tuple[Any, ...]) -> torch.Tensor:
        captures = "retention_num" in call.kwargs
        return call.target(*args, **(call.kwargs | kept if captures else call.kwargs))

    return op


def _call_one_row_each(cut: CutStage, call: OpCall, args: tuple[Any, ...]) -> torch.Tensor:
    return call.target(*args, **(call.kwargs | _ONE_ROW_EACH))


def _call_at_depths(captures: bool) -> RunOp:
    """For the body that rows at any depth go through. captures: whether one of them may capture there.

    Several of them may belong to one sequence, each at a depth of its own, which has keys and values of its own.
    """

    def op(cut: CutStage, call: OpCall, args: tuple[Any, ...]) -> torch.Tensor:
        mixed = call.target is torch.ops.sparse_compile.mixed.default
        return call.target(*args, **(call.kwargs | _ONE_ROW_EACH | ({"captures": captures} if mixed else {})))

    return op
