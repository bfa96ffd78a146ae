"""The shape of a pass and the manager that runs them.

A pass reads and extends one `Compilation`. The manager times it, dumps the graph before and after under numbered names,
lints it, and checks the pass's own post-condition; a failure names the pass and those that ran before it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import fx

from ..kernels.retention import Retention
from .errors import OptionError, PassError, UnsupportedModel
from .program import GateLeftAlone, LeftAlone, MergedLinears, PassRecord, Roll, Site, Variant


@dataclass(frozen=True)
class Options:
    """What the passes are told.

    Attributes:
        retention: share of visible keys that a consume keeps: one for all layers, one per layer in the order of their
            first calls, or one per layer by name.
        enabled: False makes every site dense.
        capture_loop: loop whose scores choose the retained keys.
        recapture_every: capture again every so many loops after `capture_loop`; None captures once.
        implementation: which kernels the ops run: "auto", "reference", "batched" or "triton".
        roll: fold the loop into one body where that can be proved.
        merge_linears: join linear layers that read the same input.
        fuse_gates: let attention calls multiply their result with its gate.
        skinny_products: in decode graphs of torch.compile, run linear layers as products of a few rows.
        dump_dir: where numbered graphs are written, or None.
    """

    retention: Retention | tuple[Retention, ...] | Mapping[str, Retention]
    enabled: bool = True
    capture_loop: int = 1
    recapture_every: int | None = None
    implementation: str = "auto"
    roll: bool = True
    merge_linears: bool = False
    fuse_gates: bool = True
    skinny_products: bool = False
    dump_dir: Path | None = None


@dataclass
class Compilation:
    """Everything that passes hand on to each other.

    Attributes:
        graph: the traced graph with one marker per attention call.
        tensors: every parameter and buffer of the user's model by name, also those that the graph does not read.
        merged, left_alone: linear layers that became one, and those that could not, with the reason.
        gates_left_alone: attention layers that do not take their gate along, with the reason.
        sites: one entry per marker, in execution order; empty until the site pass ran.
        markers: the marker nodes, in the same order.
        roll: the proved loop, or None with `roll_reason` saying why not.
        variants: the rewritten programs by name ("dense", "sparse", "mixed").
    """

    graph: fx.GraphModule
    options: Options
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    merged: list[MergedLinears] = field(default_factory=list)
    left_alone: list[LeftAlone] = field(default_factory=list)
    gates_left_alone: list[GateLeftAlone] = field(default_factory=list)
    sites: tuple[Site, ...] = ()
    markers: tuple[fx.Node, ...] = ()
    roll: Roll | None = None
    roll_reason: str = ""
    variants: dict[str, Variant] = field(default_factory=dict)


def ignore(step: str) -> None:
    """Nobody watches."""


class Pass(ABC):
    """One transformation. `run` returns what it did as counters; `ensure` raises if its promise does not hold."""

    name: ClassVar[str]

    @abstractmethod
    def run(self, compilation: Compilation) -> dict[str, int]: ...

    def ensure(self, compilation: Compilation) -> None:  # noqa: B027  most passes are covered by lint and grammar
        """Check the post-condition; the base class promises nothing beyond a graph that lints."""


@dataclass
class PassManager:
    """Runs passes in order over one compilation.

    After each of them the graph is linted, the pass's own promise checked, and `check` asked, which knows what must
    hold of any program however far it is built. `begin` is told the name of each pass before it runs.
    """

    passes: tuple[Pass, ...]
    check: Callable[[Compilation], None]
    begin: Callable[[str], None] = ignore

    def run(self, compilation: Compilation) -> tuple[PassRecord, ...]:
        records: list[PassRecord] = []
        for number, step in enumerate(self.passes):
            self.begin(step.name)
            self._dump(compilation, number, step.name, "before")
            start = time.perf_counter()
            try:
                counters = step.run(compilation)
                compilation.graph.graph.lint()
                step.ensure(compilation)
                self.check(compilation)
            except (UnsupportedModel, OptionError):
                raise
            except Exception as error:
                before = ", ".join(record.name for record in records) or "none"
                raise PassError(f"pass {step.name!r} failed (passes before it: {before}): {error}") from error
            records.append(PassRecord(step.name, time.perf_counter() - start, counters))
            self._dump(compilation, number, step.name, "after")
        return tuple(records)

    @staticmethod
    def _dump(compilation: Compilation, number: int, name: str, when: str) -> None:
        directory = compilation.options.dump_dir
        if directory is None:
            return
        texts = {when: str(compilation.graph.graph)}
        if when == "after":
            for variant in compilation.variants.values():
                texts[variant.name] = "\n\n".join(stage.text() for stage in variant.stages)
        try:
            directory.mkdir(parents=True, exist_ok=True)
            for which, text in texts.items():
                (directory / f"{number:02d}_{name}_{which}.txt").write_text(text + "\n")
        except OSError as error:
            limit = f"is no folder that can be written: {error.strerror}"
            raise OptionError("SPARSE_COMPILE_DUMP", str(directory), limit, "name another folder") from None
