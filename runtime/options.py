"""The limits of an engine, and what it must know of its program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sparse_compile.kernels.retention import Retention
from sparse_compile.runtime.accounting import SiteLike

FIXED_ROWS = 256  # decode rows of one run whose bits can be kept from depending on each other


@dataclass(frozen=True)
class Drafting:
    """Self-speculation: up to `rows` rows of a request are under way at once, drafted with the first `loops` bodies.

    adaptive: a block has one row more than the rounds before the last one gave tokens. pipeline: rows at several depths
    instead of blocks; `rows` must be as many as a row takes steps of `loops` bodies.
    """

    loops: int
    rows: int
    adaptive: bool = False
    pipeline: bool = False

    def __post_init__(self) -> None:
        for name in ("loops", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"drafting {name}={getattr(self, name)} must be at least 1")


_LEAST = {"max_context": 2, "max_seqs": 1, "prefill_chunk": 1, "max_prefill_tokens": 1, "dense_below": 0}


@dataclass(frozen=True)
class EngineOptions:
    """A step has one run for rows of prompts, of at most max_prefill_tokens rows, and one with a row of each of the
    at most max_seqs requests that decode.
    """

    max_context: int  # tokens of prompt and answer together
    max_seqs: int = 64  # requests that run at once
    max_prefill_tokens: int = 512  # rows of all prompts in one step
    prefill_chunk: int = 256  # rows of one prompt in one step
    dense_below: int = 0  # decode rows with fewer visible keys run dense
    sites: Sequence[SiteLike] = ()  # of the program, for the count of keys read
    # Of those, the sites of each body, with the ones before the loop in the first, and the ones behind the loop, which
    # drafts go through as well.
    body_sites: Sequence[Sequence[SiteLike]] = ()
    last_sites: Sequence[SiteLike] = ()
    retention: Retention | None = None  # the largest of any layer; None runs everything dense
    async_steps: bool = False  # submit a step before the tokens of the last one are read
    loops_per_step: int | None = (
        None  # bodies that a decode row goes through in one step; None: the whole model
    )
    drafting: Drafting | None = None  # decode in rounds of self-speculation
    prefix_caching: bool = False  # keep full pages of prompts for later prompts that begin in the same way
    vocabulary: int | None = None  # ids of prompts are below it; None: not checked
    prefix_lm: bool = True  # the model's prompts may begin with tokens that see each other in both directions
    deterministic: bool = False  # prompts are computed one by one, in chunks that no other request changes
    debug: bool = False  # validate every plan, which reads the device

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise ValueError(
                    f"{name}={getattr(self, name)} must be at least {least}; pass {name}={least} or more"
                )
        if self.drafting is not None:
            self._check_drafting()
        if self.deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        if self.block_rows > FIXED_ROWS:
            raise ValueError(
                f"drafting rows={self.block_rows} are more than the {FIXED_ROWS} rows of a step that "
                f"deterministic=True serves; pass rows={FIXED_ROWS} or less"
            )
        if self.max_seqs * self.block_rows > FIXED_ROWS:
            raise ValueError(
                f"max_seqs={self.max_seqs} with {self.block_rows} rows of each request is more than the {FIXED_ROWS} "
                f"rows of a step that deterministic=True serves; pass max_seqs={FIXED_ROWS // self.block_rows} or less"
            )
        if self.prefix_caching:
            raise ValueError(
                "prefix_caching=True cannot be combined with deterministic=True: what is computed of a prompt would "
                "depend on the prompts before it; pass prefix_caching=False"
            )

    def _check_drafting(self) -> None:
        assert self.drafting is not None
        if self.loops_per_step is not None:
            raise ValueError(
                f"loops_per_step={self.loops_per_step} cannot be combined with drafting={self.drafting}, which says "
                "which loops run; pass loops_per_step=None"
            )

    def check_loops(self, loops: int) -> None:
        """Raises ValueError unless a program whose body repeats `loops` times can run what these options ask for."""
        if self.drafting is not None:
            self._check_draft_loops(loops)
        asked = self.loops_per_step
        if asked is None:
            return
        if loops == 1:
            raise ValueError(
                f"loops_per_step={asked} needs a program whose loop is rolled, and this one's is not; "
                "compile with roll=True, or pass loops_per_step=None"
            )
        if not 1 <= asked <= loops:
            raise ValueError(f"loops_per_step={asked} must be from 1 to the program's {loops} loops, or None")

    def _check_draft_loops(self, loops: int) -> None:
        assert self.drafting is not None
        if loops == 1:
            raise ValueError(
                f"drafting={self.drafting} needs a program whose loop is rolled, and this one's is not; "
                "compile with roll=True, or pass drafting=None"
            )
        if self.drafting.loops > loops:
            raise ValueError(
                f"drafting loops={self.drafting.loops} must be from 1 to the program's {loops} loops"
            )
        steps = -(-loops // self.drafting.loops)
        if self.drafting.pipeline and self.drafting.rows != steps:
            raise ValueError(
                f"drafting rows={self.drafting.rows} must be {steps} in a pipeline: {loops} loops, "
                f"{self.drafting.loops} in a step"
            )

    @property
    def block_rows(self) -> int:
        """Rows of one request that may be under way at once."""
        return 1 if self.drafting is None else self.drafting.rows
