"""Run row plans through a program: stage after stage over a small environment of named tensors."""

from __future__ import annotations

import torch

from ..passes.program import (
    MODE_INPUTS,
    PLAN_INPUTS,
    POOL_INPUTS,
    STORE_INPUTS,
    Program,
    Stage,
    Variant,
    depth_mode_input,
)
from .kv_pool import KVPool
from .plan import CAPTURE, CONSUME, DENSE, RowPlan
from .reference_store import ReferenceStore

Environment = dict[str, torch.Tensor]

_MODES = {"dense": DENSE, "capture": CAPTURE, "consume": CONSUME}


class Executor:
    """Runs plans over one pool and one store.

    Between runs it holds what rows carry that have only gone through some of the loops (`RowPlan.loops`), per seat.
    """

    def __init__(self, program: Program, pool: KVPool, store: ReferenceStore | None) -> None:
        if program.sparse and store is None:
            raise ValueError("this program captures and consumes: it needs a reference store")
        self.program = program
        self.device = pool.device
        self.state: Environment = {name: getattr(pool, name) for name in POOL_INPUTS}
        if store is not None:
            self.state |= {name: getattr(store, name) for name in STORE_INPUTS}
        kinds = [[_MODES[kind] for kind in row] for row in program.depth_kinds()]
        # int32 [sites of a body, loops]: what a sparse row does there
        self._modes = torch.tensor(kinds, dtype=torch.int32, device=self.device)
        self._carried: Environment = {}  # [1 + seats, ...] each

    @property
    def loops(self) -> int:
        """Bodies that a row goes through; 1 for a program that is not rolled."""
        return self.program.roll.repeats if self.program.roll is not None else 1

    @torch.no_grad()
    def prefill(self, plan: RowPlan) -> torch.Tensor:
        """The logits `[len(plan.logit_rows), vocab]` of chunks of prompts, in the model's dtype."""
        return self._through(self.program.variants["dense"], plan)

    @torch.no_grad()
    def decode(self, plan: RowPlan) -> torch.Tensor:
        """The logits of a step of one row per sequence; of those rows that have been through the whole model."""
        if plan.loops is not None:
            return self._some_loops(plan)
        return self._through(self.variant(plan), plan)

    def variant(self, plan: RowPlan) -> Variant:
        return self.program.variants[plan.kind if self.program.sparse else "dense"]

    def save(self, seat: int) -> tuple[torch.Tensor, ...]:
        """Copies of what the row of `seat` carries between two runs of some loops; nothing before the first."""
        return tuple(tensor[seat].clone() for tensor in self._carried.values())

    def load(self, seat: int, carried: tuple[torch.Tensor, ...]) -> None:
        """Gives `seat` what `save` returned, perhaps of another seat."""
        for tensor, value in zip(self._carried.values(), carried, strict=True):
            tensor[seat].copy_(value, non_blocking=True)

    # ------------------------------------------------------------------ the whole model

    def _through(self, variant: Variant, plan: RowPlan) -> torch.Tensor:
        environment = self.environment(plan)
        *layers, head = variant.stages
        for stage in layers:
            environment["row_loop"] = torch.full_like(plan.row_loop, stage.loop)
            environment |= run_stage(stage, environment)
        return self._logits(head, environment, plan)

    def environment(self, plan: RowPlan) -> Environment:
        """Every input that a stage may ask for, before the first stage runs."""
        tokens = {"input_ids": plan.token_ids[:, None], "position_ids": plan.positions[:, None]}
        return self.state | tokens | _row_inputs(plan)

    def _logits(self, head: Stage, environment: Environment, plan: RowPlan) -> torch.Tensor:
        """The head over those rows that need logits."""
        if plan.logit_rows.shape[0] == 0:  # a chunk inside a prompt
            dtype = self.state["k_pool"].dtype
            return torch.empty(0, self.program.vocabulary, dtype=dtype, device=self.device)
        few = {name: environment[name].index_select(0, plan.logit_rows) for name in head.row_inputs}
        return run_stage(head, environment | few)["logits"][:, 0]

    # ------------------------------------------------------------------ some loops of it

    def _some_loops(self, plan: RowPlan) -> torch.Tensor:
        """Rows start where they left off; the first stages run for rows that begin, the last for those that finish.

        Raises ValueError for a program that is not rolled: it has no loop to stop at.
        """
        if self.program.roll is None:
            raise ValueError(f"loops={plan.loops}: the program is not rolled, {self.program.roll_reason}")
        assert plan.loops is not None
        prologue, body, *epilogue, head = self.program.variants["depth"].stages
        environment = self.environment(plan)
        active, depth = plan.row_length > 0, plan.row_loop
        begins = active & (depth == 0)
        environment |= run_stage(prologue, environment | self._rows_at(plan, begins, 0))
        environment |= self._resumed(prologue, environment, plan, begins)
        for step in range(plan.loops):
            alive = active & (depth + step < self.loops)
            for name, new in run_stage(body, environment | self._rows_at(plan, alive, step)).items():
                environment[name] = _where(alive, new, environment[name]) if name in environment else new
        for name, kept in self._carried.items():
            kept.index_copy_(0, plan.row_seq.long(), environment[name])
        finished = active & (depth + plan.loops >= self.loops)
        for stage in epilogue:
            environment |= run_stage(stage, environment | self._rows_at(plan, finished, 0))
        return self._logits(head, environment, plan)

    def _resumed(
        self, prologue: Stage, environment: Environment, plan: RowPlan, begins: torch.Tensor
    ) -> Environment:
        """What the first stage made, for rows that begin; what their last run left, for the others."""
        result = {}
        for name in prologue.outputs:
            if name not in prologue.row_outputs:
                continue  # the same for all rows
            fresh = environment[name]
            if name not in self._carried:
                self._carried[name] = fresh.new_zeros(plan.block_table.shape[0], *fresh.shape[1:])
            result[name] = _where(begins, fresh, self._carried[name][plan.row_seq])
        return result

    def _rows_at(self, plan: RowPlan, alive: torch.Tensor, step: int) -> Environment:
        """Plan inputs `step` bodies after the plan's start; rows that are not `alive` are padding there."""
        rows = {name: value * alive for name, value in _row_inputs(plan).items() if name != "block_table"}
        depth = (plan.row_loop + step) * alive
        rows["row_loop"] = depth
        sparse = rows["row_mode_consume"] == CONSUME
        for number, modes in enumerate(self._modes):
            rows[depth_mode_input(number)] = torch.where(sparse, modes[depth], rows["row_mode_consume"])
        return rows


def _row_inputs(plan: RowPlan) -> Environment:
    """The inputs of our ops that the plan gives, as they are where a row's depth is the stage's."""
    rows = {name: getattr(plan, name) for name in (*PLAN_INPUTS, "row_slot")}
    return rows | {name: plan.mode_at(kind) for kind, name in MODE_INPUTS.items()}


def _where(rows: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """`new` for the rows [T] that are true, else `old`."""
    return torch.where(rows.view(-1, *(1 for _ in new.shape[1:])), new, old)


def run_stage(stage: Stage, environment: Environment) -> Environment:
    """The outputs of one stage by name."""
    inputs = [environment[name] for name in stage.inputs]
    return dict(zip(stage.outputs, stage.module(*inputs), strict=True))
