"""Run one row plan through a program: stage after stage over a small environment of named tensors."""

from __future__ import annotations

import torch

from ..passes.program import MODE_INPUTS, PLAN_INPUTS, POOL_INPUTS, STORE_INPUTS, Program, Stage, Variant
from .kv_pool import KVPool
from .plan import RowPlan
from .reference_store import ReferenceStore

Environment = dict[str, torch.Tensor]


class Executor:
    """Runs plans over one pool and one store. Holds no state of its own between runs."""

    def __init__(self, program: Program, pool: KVPool, store: ReferenceStore | None) -> None:
        if program.sparse and store is None:
            raise ValueError("this program captures and consumes: it needs a reference store")
        self.program = program
        self.state: Environment = {name: getattr(pool, name) for name in POOL_INPUTS}
        if store is not None:
            self.state |= {name: getattr(store, name) for name in STORE_INPUTS}

    @torch.no_grad()
    def run(self, plan: RowPlan) -> torch.Tensor:
        """The logits `[len(plan.logit_rows), vocab]` of one step, in the model's dtype; memory of its own.

        The variant is the plan's `kind`; a program without sparse sites runs everything dense.
        """
        variant = self.variant(plan)
        environment = self.environment(plan)
        *layers, head = variant.stages
        for stage in layers:
            run_stage(stage, environment, plan)
        if plan.logit_rows.shape[0] == 0:  # a chunk inside a prompt
            return torch.empty(
                0, self.program.vocabulary, dtype=self.state["k_pool"].dtype, device=plan.row_seq.device
            )
        run_stage(head, environment, plan)
        return environment["logits"][:, 0]

    def variant(self, plan: RowPlan) -> Variant:
        return self.program.variants[plan.kind if self.program.sparse else "dense"]

    def environment(self, plan: RowPlan) -> Environment:
        """Every input that a stage may ask for, before the first stage runs."""
        tokens = {"input_ids": plan.token_ids[:, None], "position_ids": plan.positions[:, None]}
        rows = {name: getattr(plan, name) for name in (*PLAN_INPUTS, "row_slot")}
        modes = {name: plan.mode_at(kind) for kind, name in MODE_INPUTS.items()}
        return self.state | tokens | rows | modes


def run_stage(stage: Stage, environment: Environment, plan: RowPlan) -> None:
    """Run one stage and put its outputs into `environment`; the head sees only the rows that need logits."""
    environment["row_loop"] = torch.full_like(plan.row_loop, stage.loop)
    inputs = [
        environment[name].index_select(0, plan.logit_rows) if name in stage.row_inputs else environment[name]
        for name in stage.inputs
    ]
    environment.update(zip(stage.outputs, stage.module(*inputs), strict=True))
