"""Train the demo model, on one GPU in about a quarter of an hour, or a tiny one on the CPU.

    python -m benchmarks.train_demo --out run --budget 15            one run; or two, of which the first stops early:
    python -m benchmarks.train_demo --out a --budget 15 --minutes 8.5
    python -m benchmarks.train_demo --out b --resume a --minutes 8.5
    python -m benchmarks.train_demo --export b                          weights and model card, into the package

`--budget` measures the speed and sets the number of steps, which the log and the model card state: `--steps N` repeats
the run. The output folder holds a checkpoint (`benchmarks/demo/checkpoint.py`), the log and the plot of the losses. It
is saved once a minute, at the end, and on SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.demo import card, plot
from benchmarks.demo.checkpoint import read_state
from benchmarks.demo.data import Data
from benchmarks.demo.recipe import Recipe, as_tuples, flops_per_token, tiny_recipe
from benchmarks.demo.trainer import Limits, Trainer
from benchmarks.timing import conditions

RESULTS = Path(__file__).with_name("results")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder of the checkpoint, the log and the plot")
    parser.add_argument("--resume", type=Path, help="folder of a checkpoint to go on from")
    parser.add_argument("--steps", type=int, help="steps in all")
    parser.add_argument(
        "--budget", type=float, help="minutes of training in all; sets the steps by the speed"
    )
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="save and leave after so many minutes"
    )
    parser.add_argument("--stop-after", type=int, help="save and leave after so many steps of this run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=60.0, help="seconds")
    parser.add_argument("--log-every", type=int, default=20, help="steps")
    parser.add_argument("--evaluate-every", type=int, default=400, help="steps")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=JSON", help="another value in the recipe"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, for tests on a CPU")
    parser.add_argument(
        "--export", type=Path, metavar="RUN", help="write the model of a finished run into --into"
    )
    parser.add_argument(
        "--into", type=Path, help="default: the package, and benchmarks/results for log and plot"
    )
    args = parser.parse_args(arguments)
    if args.export is None and args.out is None:
        parser.error("give --out FOLDER, or --export RUN")
    return args


def make_recipe(args: argparse.Namespace) -> Recipe:
    """The checkpoint's recipe, or a new one; with what the command line changes."""
    changes = dict(pair.split("=", 1) for pair in args.set)
    if args.resume is not None:
        if changes:
            raise SystemExit(
                "--set changes the recipe, which a checkpoint has already; only --steps may change"
            )
        recipe = read_state(args.resume).recipe
    else:
        made = tiny_recipe() if args.tiny else Recipe()
        values = {name: json.loads(value) for name, value in changes.items()}
        values = {name: as_tuples(v) for name, v in values.items()}
        recipe = replace(made, seed=args.seed, **values)
    return recipe if args.steps is None else replace(recipe, steps=args.steps)


def train(args: argparse.Namespace, start: float) -> None:
    recipe = make_recipe(args)
    torch.set_float32_matmul_precision("high")
    context = recipe.context
    limits = Limits(
        minutes=args.minutes,
        stop_after=args.stop_after,
        budget_minutes=None if args.resume is not None else args.budget,
        save_every_seconds=args.save_every,
        log_every=args.log_every,
        evaluate_every=args.evaluate_every,
        contexts=tuple(sorted({max(recipe.shortest, context // part) for part in (4, 2, 1)})),
    )
    if args.tiny:
        limits = replace(limits, quick=(4, 4), samples=4, windows=4)
    data = Data(recipe.origins, torch.device(args.device))
    trainer = Trainer(recipe, data, args.out, limits, args.resume, start)
    if not args.no_compile and not args.tiny:
        trainer.forward.compile()
    flops = flops_per_token(recipe.config, context)
    trainer.log(event="conditions", **conditions(), python=sys.version.split()[0], flops_per_token=flops)
    try:
        trainer.run()
    finally:
        plot.draw(args.out / "log.jsonl", args.out / "loss.png")


def main(arguments: list[str] | None = None) -> None:
    start = time.monotonic()
    args = parse(arguments)
    if args.export is not None:
        into, results = (args.into, None) if args.into else (card.PACKAGED, RESULTS)
        print(card.export(args.export, into, results))
    else:
        train(args, start)


if __name__ == "__main__":
    main()
