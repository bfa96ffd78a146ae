"""Rows at any loop depth: which of them take part in each stage of a run of some bodies, and with what plan inputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..passes.program import MODE_INPUTS, Program, depth_mode_input
from .flights import Fuse
from .plan import CAPTURE, CONSUME, DENSE, ProgramKind, RowPlan

_MODES = {"dense": DENSE, "capture": CAPTURE, "consume": CONSUME}
_LENGTH, _LOOP, _MODE = (RowPlan.ROW_FIELDS.index(name) for name in ("row_length", "row_loop", "row_mode"))


@dataclass(frozen=True)
class StageRows:
    """alive: bool [T], the rows that take part. inputs: what its ops read of the plan; other rows are padding there."""

    alive: torch.Tensor
    inputs: dict[str, torch.Tensor]


class Depths:
    """What rows of a program do at each depth. A program that is not rolled has one."""

    def __init__(self, program: Program, device: torch.device) -> None:
        self.loops = program.roll.repeats if program.roll is not None else 1
        sites, captures = program.depth_kinds(), ("capture",) * self.loops
        distinct = sorted({*sites, captures})
        # int32 [distinct sites of a body, loops]: what a sparse row does there
        modes = [[_MODES[kind] for kind in row] for row in distinct]
        self._modes = torch.tensor(modes, dtype=torch.int32, device=device)
        self._line = {depth_mode_input(number): distinct.index(row) for number, row in enumerate(sites)}
        self._line[MODE_INPUTS["capture"]] = distinct.index(captures)
        self._captures = [any(row[loop] == "capture" for row in sites) for loop in range(self.loops)]

    def captures_at(self, plan: RowPlan) -> tuple[bool, ...]:
        """For each body of a run of some loops: whether a row may capture there, as far as the host knows."""
        return tuple(
            plan.kind != "dense"
            and any(self._captures[depth + step] for depth in plan.depths if depth + step < self.loops)
            for step in range(plan.loops or 0)
        )

    def capture_choices(self, loops: int, kinds: Sequence[ProgramKind]) -> list[tuple[bool, ...]]:
        """Everything that `captures_at` may say of runs of `loops` bodies: rows stand at any of the depths where such
        runs begin, and only those that are not dense capture.
        """
        found = {(False,) * loops}
        if any(kind != "dense" for kind in kinds):
            for depth in range(0, self.loops, loops):
                steps = range(depth, depth + loops)
                at = tuple(step < self.loops and self._captures[step] for step in steps)
                found |= {tuple(map(any, zip(at, other, strict=True))) for other in found}
        return sorted(found)

    def stages(self, plan: RowPlan, bodies: int, pipeline: bool, fuse: Fuse) -> list[StageRows]:
        """The rows of the first stage, of each of the bodies, and of the last stages.

        pipeline: the last stages run for rows that have begun as well as for those that finish. fuse: as
        `PieceCompiler.fuse`.
        """
        rows_of = fuse(_rows_of_stages, bodies)
        made = rows_of(plan.packed, self._modes, self.loops, bodies, pipeline)
        return [self._stage(plan, *one) for one in zip(*made, strict=True)]

    def _stage(
        self, plan: RowPlan, alive: torch.Tensor, columns: torch.Tensor, modes: torch.Tensor
    ) -> StageRows:
        inputs = dict(zip(RowPlan.ROW_FIELDS, columns, strict=False))
        inputs |= {"block_table": plan.block_table, MODE_INPUTS["consume"]: inputs["row_mode"]}
        return StageRows(alive, inputs | {name: modes[line] for name, line in self._line.items()})


def _rows_of_stages(
    packed: torch.Tensor, modes: torch.Tensor, loops: int, bodies: int, pipeline: bool
) -> tuple[torch.Tensor, ...]:
    """packed: int32 [8, T], as in `RowPlan`. modes: int32 [M, loops].

    Of the first stage, the bodies and the last stages: the rows that are alive, bool [bodies + 2, T]; the columns of
    the plan, int32 [bodies + 2, 8, T]; and the modes, int32 [bodies + 2, M, T].
    """
    active, start = packed[_LENGTH] > 0, packed[_LOOP]
    begins, ends = active & (start == 0), active & (start + bodies >= loops)
    inside = [active & (start + step < loops) for step in range(bodies)]
    stages = [(begins, 0), *zip(inside, range(bodies), strict=True), (ends | begins if pipeline else ends, 0)]
    made = [(alive, *_at_stage(packed, modes, alive, step)) for alive, step in stages]
    return tuple(torch.stack(one) for one in zip(*made, strict=True))


def _at_stage(
    packed: torch.Tensor, modes: torch.Tensor, alive: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = packed * alive
    columns[_LOOP] += step * alive
    mode = columns[_MODE]
    return columns, torch.where(mode == CONSUME, modes[:, columns[_LOOP]], mode)
