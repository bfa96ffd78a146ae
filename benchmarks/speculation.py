"""Tokens per second with self-speculation, against ordinary decoding of the same engine, over caches of random numbers.

    python -m benchmarks.speculation --out benchmarks/results/speculation-h200.json     the default points
    python -m benchmarks.speculation --points 1x1024:dense --modes ordinary,block:3:2   some of them
    python -m benchmarks.speculation --points 8x8192:sparse --modes ordinary,pipeline:1,block:4:1
    python -m benchmarks.speculation --tiny                                             a look at it, on the CPU

A mode is `ordinary`, `pipeline:D` with drafts of D loops, or `block:K:D` with K rows. A row is timed over a window of
steps in which nothing was compiled or captured, and has the acceptance of that very window: of a pipeline, the part of
the tokens that the draft foresaw; of blocks, the part of all drafts that counted (a draft behind a wrong one is wrong).

The weights are random, with branches so small that later loops change little (`sparse_compile/models/branches.py`):
multiplied by `--scale`, or else by the largest power of two with an acceptance of `--least-acceptance` at the first
point with drafts of the fewest loops. `distinct` is the part of the new tokens of a row that differ from each other.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.decode import check, parse_points, reason, write
from benchmarks.models import MODELS, make_setup
from benchmarks.systems import Ours, Point, Setup, free_memory
from benchmarks.timing import conditions, synchronize
from sparse_compile.models.branches import Branches
from sparse_compile.speculation import SpeculationConfig

POINTS = "1x1024:dense,2x32768:dense,2x32768:sparse"
TINY_POINTS = "1x32:dense,2x48:sparse"
MODES = "ordinary,pipeline:2,pipeline:1,block:3:2"
SCALES = tuple(2.0**-power for power in range(3, 13))
WINDOWS = 8  # tried for a mode, until nothing is captured in one


@dataclass(frozen=True)
class Mode:
    """How tokens are decoded. rows: of a block; 0 for others. loops: of a draft; 0 for ordinary decoding."""

    name: str
    loops: int = 0
    rows: int = 0

    @property
    def speculation(self) -> SpeculationConfig | None:
        if self.name == "ordinary":
            return None
        if self.name == "pipeline":
            return SpeculationConfig("pipeline", draft_loops=self.loops)
        return SpeculationConfig("block", draft_loops=self.loops, num_draft_tokens=self.rows)

    @property
    def tokens_per_step(self) -> int:
        """At most, of one sequence."""
        return max(1, self.rows)

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.name, self.rows, self.loops) if part)


def parse_modes(text: str) -> list[Mode]:
    """ "ordinary,pipeline:2,block:3:2" -> modes. ValueError for what is none."""
    modes = []
    for item in text.split(","):
        name, *numbers = item.split(":")
        wanted = {"ordinary": 0, "pipeline": 1, "block": 2}.get(name)
        if wanted is None or len(numbers) != wanted or not all(number.isdigit() for number in numbers):
            raise ValueError(f"{item!r} is no mode; known: ordinary, pipeline:D, block:K:D")
        *rows, loops = [int(number) for number in numbers] or [0]
        modes.append(Mode(name, loops, *rows))
    return modes


def parse_places(text: str) -> list[tuple[Point, str]]:
    """ "2x32768:sparse" -> points with their attention. ValueError for what is none."""
    places = []
    for item in text.split(","):
        point, _, attention = item.partition(":")
        if attention not in ("dense", "sparse"):
            raise ValueError(f"{item!r} is no point; pass for example 2x32768:sparse or 1x1024:dense")
        places.append((parse_points(point)[0], attention))
    return places


@dataclass(frozen=True)
class Window:
    """What some steps did. seconds: on the wall's clock."""

    steps: int
    seconds: float
    tokens: int
    drafted: int
    accepted: int
    captured: int  # graphs, meanwhile

    def acceptance(self, mode: Mode) -> float | None:
        """None where nothing was drafted."""
        of = {"pipeline": self.tokens, "block": self.drafted}.get(mode.name, 0)
        return self.accepted / of if of else None


class Decoder(Ours):
    """Our engine at a point, in one mode."""

    def __init__(self, setup: Setup, point: Point, attention: str, mode: Mode) -> None:
        super().__init__(setup, point, sparse=attention == "sparse", speculation=mode.speculation)
        self.tokens: list[int] = []

    def step(self) -> None:
        for output in self.engine.step():
            if output.error is not None:
                raise output.error
            if output.finished:
                raise RuntimeError(f"{output.request_id} has no room for more tokens; pass fewer --steps")
            self.tokens.append(output.token)

    def window(self, steps: int) -> Window:
        """Takes `steps` steps."""
        before = self._counts()
        synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        synchronize()
        seconds = time.perf_counter() - start
        tokens, drafted, accepted, captured = (
            new - old for new, old in zip(self._counts(), before, strict=True)
        )
        return Window(steps, seconds, tokens, drafted, accepted, captured)

    def _counts(self) -> tuple[int, int, int, int]:
        found = [self.engine.metrics(f"row-{row}") for row in range(self.point.batch)]
        return (
            len(self.tokens),
            sum(one.drafted_tokens for one in found),
            sum(one.accepted_tokens for one in found),
            getattr(self.engine.executor, "captured", 0),  # none without CUDA graphs
        )


def search(setup: Setup, branches: Branches, place: tuple[Point, str], options: argparse.Namespace) -> float:
    """The largest of SCALES with the acceptance asked for; RuntimeError where there is none."""
    loops = min((mode.loops for mode in options.modes if mode.loops), default=1)
    mode, acceptance = Mode("pipeline", loops), 0.0
    system = Decoder(setup, *place, mode)
    try:
        for scale in SCALES:
            branches.scale(scale)
            system.window(2 * setup.compiled.program.loops)  # rows under way are those of the last scale
            acceptance = system.window(options.search_steps).acceptance(mode) or 0.0
            print(f"scale {scale:g}: acceptance {acceptance:.3f} with drafts of {loops} loops", flush=True)
            if acceptance >= options.least_acceptance:
                return scale
    finally:
        system.close()
    raise RuntimeError(
        f"no scale from {SCALES[0]:g} to {SCALES[-1]:g} has an acceptance of {options.least_acceptance}, the last has "
        f"{acceptance:.3f}; pass a lower --least-acceptance, or --scale"
    )


def measure(
    setup: Setup, place: tuple[Point, str], mode: Mode, options: argparse.Namespace
) -> dict[str, Any]:
    """One row of the result. RuntimeError where something was captured in every window."""
    (point, attention), started = place, time.perf_counter()
    system = Decoder(setup, point, attention, mode)
    try:
        system.window(options.warm)
        windows = (system.window(options.steps) for _ in range(WINDOWS))
        window = next((one for one in windows if not one.captured), None)
        if window is None:
            raise RuntimeError(f"graphs were captured in each of {WINDOWS} windows; pass more --warm steps")
    finally:
        system.close()
    acceptance = window.acceptance(mode)
    new = system.tokens[len(system.tokens) - window.tokens :]
    return {
        "batch": point.batch,
        "context": point.context,
        "mode": mode.name,
        "draft_loops": mode.loops,
        "num_draft_tokens": mode.rows,
        "attention": attention,
        "acceptance": None if acceptance is None else round(acceptance, 4),
        "tokens_per_s": round(window.tokens / window.seconds, 2),
        "tokens_per_step": round(window.tokens / window.steps / point.batch, 3),
        "step_ms": round(window.seconds / window.steps * 1000, 3),
        "steps": window.steps,
        "distinct": round(len(set(new)) / max(1, len(new)), 3),
        "setup_s": round(time.perf_counter() - started - window.seconds, 1),
    }


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each row how much faster it is than ordinary decoding, and than dense attention in the same mode."""

    def same(names: str, row: dict[str, Any], **others: Any) -> float | None:
        wanted = {name: row[name] for name in names.split()} | others
        found = (one for one in rows if all(one[name] == value for name, value in wanted.items()))
        return next((one["tokens_per_s"] for one in found), None)

    for row in rows:
        ordinary = same("batch context attention", row, mode="ordinary")
        dense = same("batch context mode draft_loops num_draft_tokens", row, attention="dense")
        for name, base in (("over_ordinary", ordinary), ("over_dense", dense)):
            row[name] = None if base is None else round(row["tokens_per_s"] / base, 3)


def setup_of(options: argparse.Namespace) -> Setup:
    """The model and what all modes share."""
    most = max(mode.tokens_per_step for mode in options.modes)
    searched = len(SCALES) * (options.search_steps + 32)
    return make_setup(
        options.model,
        tiny=options.tiny,
        room=max(most * (options.warm + WINDOWS * options.steps), searched) + 64,
        key_retention=options.retention,
        deterministic=options.deterministic,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", help=f"batch x context : attention; default {POINTS}")
    parser.add_argument("--modes", default=MODES, help=f"default {MODES}")
    parser.add_argument("--model", default="ouro-1.4b", choices=[n for n in MODELS if n.startswith("ouro")])
    parser.add_argument("--retention", default="0.1")
    parser.add_argument(
        "--deterministic", action="store_true", help="with deterministic=True; its cost, beside a run without"
    )
    parser.add_argument("--scale", type=float, help="of the branches; default: found by --least-acceptance")
    parser.add_argument("--least-acceptance", type=float, default=0.95)
    parser.add_argument("--search-steps", type=int, default=100, help="steps at each scale")
    parser.add_argument("--warm", type=int, default=40, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--budget", type=float, help="seconds, after which no point is begun; default: none")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    if options.tiny:
        options.warm, options.steps, options.search_steps = 4, 12, 12
    try:
        options.modes = parse_modes(options.modes)
        options.places = parse_places(options.points or (TINY_POINTS if options.tiny else POINTS))
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    started = time.perf_counter()
    options = parse(arguments)
    setup = setup_of(options)
    branches = Branches(setup.model)
    report = conditions()
    print(json.dumps(report), flush=True)
    check(setup)
    free_memory()
    report["deterministic"] = options.deterministic
    report["scale"] = options.scale or search(setup, branches, options.places[0], options)
    branches.scale(report["scale"])
    report |= {"rows": [], "left_out": []}
    for place in options.places:
        for mode in options.modes:
            what = f"{place[0]}:{place[1]} {mode}"
            free_memory()
            if options.budget is not None and time.perf_counter() - started > options.budget:
                report["left_out"].append(
                    {"what": what, "why": f"the budget of {options.budget:g} s is spent"}
                )
            else:
                try:
                    report["rows"].append(measure(setup, place, mode, options))
                except Exception as error:
                    report["left_out"].append({"what": what, "why": reason(error)})
                else:
                    compare(report["rows"])
                    print(json.dumps(report["rows"][-1]), flush=True)
            report["seconds"] = round(time.perf_counter() - started, 1)
            write(report, options.out)  # after every row, so that an interrupted run leaves what it measured
    for one in report["left_out"]:
        print(f"left out: {one['what']}: {one['why']}", flush=True)
    return report


if __name__ == "__main__":
    main()
