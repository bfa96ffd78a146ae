"""One decode step of transformers' own forward with a static cache: plain torch.compile against our backend.

    python -m benchmarks.torch_compile --out benchmarks/results/torch-compile-h200.json     Ouro-1.4B shape, one GPU
    python -m benchmarks.torch_compile --tiny                                               a check that this runs

Plain is `torch.compile(forward, mode="reduce-overhead")`; ours is the backend "sparse_compile" with the same mode. Each
has a process of its own, so that both compile at the same time (minutes) and each has a model and a cache from the same
seeds; then the two are timed in turns on the idle device. A step runs on a cache of `--cache` tokens that holds `held`.

A correctness gate runs before any figure: the logits of each are compared with those of an uncompiled step with the
same arithmetic in plain torch (`sparse_eager`). They may not be much further from them than those move when each
output of attention is off by a rounding: with random keys that is several times as far where some keys are chosen as
where all are read. The branches of the layers are scaled down (`--branch-scale`), or a random model of so many layers
would make as much of a rounding as of an error; times do not depend on it.

The report is written after every row. If one of the two fails, or is not compiled in time for `--budget` seconds in
all, the row holds the other's figure and says what failed, and the exit status is 1.

`--kernels N` lists, after the timing, the N kernels of each variant with the most time of a step (torch.profiler).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.breakdown import kernel_lines, profiled
from benchmarks.sparse_eager import logits_of
from benchmarks.timing import need_gpu
from sparse_compile.kernels.retention import Retention
from sparse_compile.models.branches import Branches

VARIANTS = ("plain", "ours")
MARGIN = 0.005
"""Relative error of logits allowed beyond twice what a rounding of attention's outputs makes."""
PROFILED = 4
"""Steps of which the kernels are listed."""
MEASURING = 30
"""Seconds of the budget that are kept for the figures: what is not compiled by then is given up."""


class Bench:
    """A model, a static cache full of random keys and values, and a compiled step."""

    def __init__(self, variant: str, options: argparse.Namespace) -> None:
        from transformers import StaticCache

        from sparse_compile.models.ouro import OuroForCausalLM
        from sparse_compile.models.ouro.cache import ensure_slots
        from sparse_compile.models.presets import ouro_1_4b, tiny_ouro

        self.rows, self.length = options.rows, options.cache
        self.retention = Retention.of(options.retention) if variant == "ours" else None
        self.device = torch.device("cpu" if options.tiny else "cuda")
        dtype = torch.float32 if options.tiny else torch.bfloat16
        layers = {"num_hidden_layers": options.layers} if options.layers else {}
        config = tiny_ouro(**layers) if options.tiny else ouro_1_4b(**layers)
        torch.manual_seed(0)
        with self.device:
            self.model = OuroForCausalLM(config).eval().to(dtype)
        Branches(self.model).scale(options.branch_scale)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # the float32 weights: the other process needs the room
        _, kv_heads, dim = config.attention_shape
        self.cache = StaticCache(config=config, max_cache_len=self.length)
        ensure_slots(self.cache, config.num_slots)
        self.cache.early_initialization(self.rows, kv_heads, dim, dtype, self.device)
        for layer in self.cache.layers:
            layer.keys.normal_()
            layer.values.normal_()
        self.ids = torch.full((self.rows, 1), 7, device=self.device)
        self.step = self.compiled(variant, options)

    def compiled(self, variant: str, options: argparse.Namespace) -> Any:
        mode = None if options.tiny else "reduce-overhead"
        if variant == "plain":
            return torch.compile(self.model.forward, mode=mode)
        import sparse_compile.backend  # noqa: F401  registers it where the package is not installed

        settings = {"key_retention": options.retention, "mode": mode}
        return torch.compile(self.model.forward, backend="sparse_compile", options=settings)

    def hold(self, held: int) -> dict[str, Any]:
        """Arguments of a step whose token is the last of `held`."""
        self.rewind(held)
        visible = (
            (torch.arange(self.length, device=self.device) < held).expand(self.rows, 1, 1, -1).contiguous()
        )
        position = torch.full((self.rows, 1), held - 1, device=self.device)
        return {
            "input_ids": self.ids,
            "attention_mask": {"full_attention": visible},
            "position_ids": position,
            "cache": self.cache,
            "use_cache": True,
        }

    @torch.no_grad()
    def run(self, held: int, steps: int) -> list[float]:
        """Milliseconds of each step."""
        times = []
        arguments = self.hold(held)
        for _ in range(steps):
            self.rewind(held)
            times.append(self.timed(arguments))
        return times

    @torch.no_grad()
    def kernels(self, held: int, most: int) -> list[str]:
        """Lines for people: the kernels that take the most time of a step, and the totals (`kernel_lines`).

        The steps are the last of `held`, one behind the other, so that nothing is set back between them.
        """
        arguments = self.hold(held)
        self.rewind(held - PROFILED)
        return kernel_lines(profiled(lambda: self.step(**arguments), PROFILED), PROFILED, most)

    @torch.no_grad()
    def errors(self, held: int) -> dict[str, float]:
        """Largest errors of a row's logits, relative to their size, against an uncompiled step: of the compiled step,
        and of an uncompiled one that is off by a rounding in each output of attention.
        """
        arguments = self.hold(held)
        got = self.step(**arguments).logits.float().clone()
        noise = torch.finfo(self.model.dtype).eps / 2
        wanted, moved = (self._eager(arguments, held, noise) for noise in (0.0, noise))
        if not bool(got.isfinite().all()):
            return {"error": float("inf"), "rounding": 0.0}
        size = wanted.norm(dim=-1)
        error, rounding = (((x - wanted).norm(dim=-1) / size).max().item() for x in (got, moved))
        return {"error": error, "rounding": rounding}

    def _eager(self, arguments: dict[str, Any], held: int, noise: float) -> Tensor:
        self.rewind(held)
        return logits_of(self.model, self.model.forward, arguments, self.retention, noise).float()

    def rewind(self, held: int) -> None:
        """Set the cache's counters back to before the last of `held` tokens."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(held - 1)

    def timed(self, arguments: dict[str, Any]) -> float:
        if self.device.type == "cpu":
            start = time.perf_counter()
            self.step(**arguments)
            return (time.perf_counter() - start) * 1000
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.step(**arguments)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end)


def work(variant: str, options: argparse.Namespace, pipe: Connection) -> None:
    """The process of one variant: compile, say so, then time what is asked for."""
    start = time.perf_counter()

    def say(what: str) -> None:
        print(f"{variant}: {what} after {time.perf_counter() - start:.0f} s", flush=True)

    try:
        bench = Bench(variant, options)
        say("model and cache made")
        for held in options.held:
            bench.run(held, 1)
            say(f"first step over {held} tokens")
            bench.run(held, 3)  # records the CUDA graph
        pipe.send(("ready", True))
        say("ready")
        while (asked := pipe.recv()) is not None:
            name, *arguments = asked
            pipe.send((name, getattr(bench, name)(*arguments)))
    except EOFError:  # the other side has left
        pass
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        raise


class Workers:
    """One process per variant. One that fails is noted in `failed` and asked no more, and the other goes on."""

    def __init__(self, options: argparse.Namespace, end: float) -> None:
        self.failed: dict[str, str] = {}
        self.pipes: dict[str, Connection] = {}
        self.processes: dict[str, BaseProcess] = {}
        self.end = end
        context = multiprocessing.get_context("spawn")
        for variant in VARIANTS:
            self.pipes[variant], theirs = context.Pipe()
            self.processes[variant] = context.Process(
                target=work, args=(variant, options, theirs), daemon=True
            )
            self.processes[variant].start()
            theirs.close()  # so that its end is noticed here
        for variant in VARIANTS:
            self.answer(variant, end - MEASURING)

    def ask(self, variant: str, *question: Any) -> Any:
        """The answer, or None once the variant has failed."""
        if variant in self.failed:
            return None
        try:
            self.pipes[variant].send(question)
        except OSError:
            return self.fail(variant, "its process has ended")
        return self.answer(variant, self.end)

    def answer(self, variant: str, until: float) -> Any:
        try:
            if not self.pipes[variant].poll(max(0.0, until - time.monotonic())):
                return self.fail(variant, "not done in time; a higher --budget gives it more")
            word, answer = self.pipes[variant].recv()
        except (EOFError, OSError):
            return self.fail(variant, "its process has ended")
        return self.fail(variant, answer) if word == "failed" else answer

    def fail(self, variant: str, why: str) -> None:
        print(f"{variant}: failed: {why}", flush=True)
        self.failed[variant] = why
        self.processes[variant].terminate()


def wrong(errors: dict[str, float]) -> str:
    """Why the logits are not good enough, of what `Bench.errors` gave; "" where they are."""
    error, limit = errors["error"], 2 * errors["rounding"] + MARGIN
    return "" if error <= limit else f"its logits are wrong: error {error:.4f} above {limit:.4f}"


def measure(workers: Workers, held: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds in turns; the median over all steps of each variant that has not failed."""
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    errors = {variant: workers.ask(variant, "errors", held) for variant in VARIANTS}
    print(f"held {held}: relative errors of logits: {errors}", flush=True)
    for variant, found in errors.items():
        if found is not None and (why := wrong(found)):
            workers.fail(variant, f"held {held}: {why}")
    for _ in range(options.rounds):
        for variant in VARIANTS:
            got = workers.ask(variant, "run", held, options.steps)
            times[variant] += got[1:] if got else []  # the first follows an idle device
    for variant in VARIANTS if options.kernels else ():
        for line in workers.ask(variant, "kernels", held, options.kernels) or ():
            print(f"{variant}, held {held}: {line}", flush=True)
    row: dict[str, Any] = {"rows": options.rows, "cache": options.cache, "held": held, "errors": errors}
    medians = {name: statistics.median(times[name]) for name in VARIANTS if name not in workers.failed}
    row |= {f"{name}_ms": round(median, 3) for name, median in medians.items()}
    if workers.failed:
        return row | {"failed": dict(workers.failed)}
    return row | {"ratio": round(medians["ours"] / medians["plain"], 4)}


def machine(tiny: bool) -> dict[str, Any]:
    if not tiny:
        from benchmarks.timing import conditions

        return conditions()
    return {"gpu": "none", "torch": torch.__version__, "command": "python -m benchmarks.torch_compile --tiny"}


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--cache", type=int, default=16384)
    parser.add_argument("--held", type=int, nargs="+", default=[16384, 1024])
    parser.add_argument("--retention", default="0.1")
    parser.add_argument("--branch-scale", type=float, default=0.1, help="of what each layer adds")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try it out")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", type=int, default=0, help="list the kernels with the most time, so many")
    parser.add_argument("--budget", type=float, default=260, help="seconds in all")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, without CUDA graphs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.cache, options.held, options.layers = 64, [64, 8], options.layers or 1
    else:
        need_gpu()
    report = machine(options.tiny)
    print(json.dumps(report), flush=True)
    workers = Workers(options, begin + options.budget)
    report["rows"] = []
    for held in options.held:
        report["rows"].append(measure(workers, held, options))
        print(json.dumps(report["rows"][-1]), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
        if len(workers.failed) == len(VARIANTS):
            break
    raise SystemExit(1 if workers.failed else 0)


if __name__ == "__main__":
    main()
