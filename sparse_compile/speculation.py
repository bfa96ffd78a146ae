"""SpeculationConfig: how a looped model drafts for itself, checked on construction. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sparse_compile.errors import ArgumentError, whole_number

if TYPE_CHECKING:
    from sparse_compile.passes.program import Program
    from sparse_compile.runtime.options import Drafting

MODES = ("block", "pipeline")

MOST_DRAFT_TOKENS = 256
"""Rows of a block at most: each but the first is a draft behind the one before it, so a round of more is no gain."""


@dataclass(frozen=True)
class SpeculationConfig:
    """Options of self-speculation. Frozen; a bad value is an `ArgumentError` (a ValueError) on construction.

    mode: "block" drafts a few tokens one after the other, then verifies all of them at once. "pipeline" drafts one and
        verifies one in each step: tokens of one request are under way at depths 0, draft_loops, 2 * draft_loops ...
    draft_loops: loops that a draft runs, before the model's own head reads it; at most those of the model.
    num_draft_tokens: rows of a block, at most 256: so many tokens come out of a round at most. The first row has a
        token that is known, the others have drafted ones. (A pipeline has as many rows as a token takes steps.)
    adaptive: blocks get shorter where drafts are rejected: one row more than rounds gave tokens of late, on average,
        without the very last round, which may not have been read.
    """

    mode: str = "block"
    draft_loops: int = 1
    num_draft_tokens: int = 4
    adaptive: bool = False

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            known = ", ".join(map(repr, MODES))
            raise ArgumentError("mode", self.mode, f"must be one of {known}", "pass mode='block'")
        for name in ("draft_loops", "num_draft_tokens"):
            object.__setattr__(self, name, whole_number(name, getattr(self, name), 1))
        if self.num_draft_tokens > MOST_DRAFT_TOKENS:
            limit, remedy = f"must be at most {MOST_DRAFT_TOKENS}", "pass for example num_draft_tokens=4"
            raise ArgumentError("num_draft_tokens", self.num_draft_tokens, limit, remedy)
        if not isinstance(self.adaptive, bool):
            raise ArgumentError("adaptive", self.adaptive, "must be True or False", "pass adaptive=True")
        if self.adaptive and self.mode == "pipeline":
            limit = "a pipeline has no blocks whose length could adapt"
            raise ArgumentError("adaptive", True, limit, "leave adaptive out, or pass mode='block'")

    def rows(self, loops: int) -> int:
        """Rows of one request under way at once, for a program of so many loops."""
        return self.num_draft_tokens if self.mode == "block" else -(-loops // self.draft_loops)

    def drafting(self, loops: int) -> Drafting:
        """The same for the engine of a program of so many loops."""
        from sparse_compile.runtime.options import Drafting

        return Drafting(self.draft_loops, self.rows(loops), self.adaptive, self.mode == "pipeline")


Speculation = SpeculationConfig | Literal[False] | None
"""What a call may ask for: None takes what the model was compiled with, False none."""


def chosen(asked: object, default: SpeculationConfig | None) -> SpeculationConfig | None:
    """What holds for a call. ArgumentError for anything that is no `Speculation`."""
    if asked is None:
        return default
    if asked is False:
        return None
    if not isinstance(asked, SpeculationConfig):
        limit = "must be a SpeculationConfig, or False for none"
        raise ArgumentError("speculation", asked, limit, "pass SpeculationConfig(draft_loops=1)")
    return asked


def check_speculation(asked: SpeculationConfig | None, program: Program, loops_per_step: int | None) -> None:
    """Raise ArgumentError when this program, with these options, cannot draft like that."""
    if asked is None:
        return
    if program.roll is None:
        limit = f"needs a loop that is rolled, and this one is not: {program.roll_reason}"
        raise ArgumentError("speculation", asked, limit, "leave speculation out")
    if asked.draft_loops > program.roll.repeats:
        limit = f"the program has {program.roll.repeats} loops"
        remedy = f"pass draft_loops={program.roll.repeats} or less"
        raise ArgumentError("draft_loops", asked.draft_loops, limit, remedy)
    if loops_per_step is not None:
        limit = "cannot be combined with speculation, whose rounds say which loops run"
        remedy = "compile with loops_per_step=None, or leave speculation out"
        raise ArgumentError("loops_per_step", loops_per_step, limit, remedy)
