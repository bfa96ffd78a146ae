"""One decode step of transformers' own forward with a static cache: plain torch.compile against our backend.

    python -m benchmarks.torch_compile --out benchmarks/results/torch-compile-h200.json     Ouro-1.4B shape, one GPU
    python -m benchmarks.torch_compile --tiny                                               a check that this runs

Plain is `torch.compile(forward, mode="reduce-overhead")`; ours is the backend "sparse_compile" with the same mode. Each
has a process of its own, so that both compile at the same time (minutes) and each has a model and a cache from the same
seeds; then the two are timed in turns on the idle device. A step runs on a cache of `--cache` tokens that holds `held`.

A correctness gate runs before any figure: the logits of each are compared with those of an uncompiled step with the
same arithmetic in plain torch (`sparse_eager`), and ours may not be much further from theirs than plain from its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.sparse_eager import logits_of
from sparse_compile.kernels.retention import Retention

VARIANTS = ("plain", "ours")
MARGIN = 0.01
"""Relative error of logits allowed beyond twice that of plain: near-ties of bfloat16 scores choose other keys."""


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
    def error(self, held: int) -> float:
        """Largest error of a row's logits, relative to their size, against an uncompiled step."""
        arguments = self.hold(held)
        got = self.step(**arguments).logits.float().clone()
        self.rewind(held)
        wanted = logits_of(self.model, self.model.forward, arguments, self.retention).float()
        if not bool(got.isfinite().all()):
            return float("inf")
        return ((got - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max().item()

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
    try:
        start = time.perf_counter()
        bench = Bench(variant, options)
        for held in options.held:
            bench.run(held, 4)  # compile once; record the CUDA graph
        pipe.send(("ready", time.perf_counter() - start))
        while (asked := pipe.recv()) is not None:
            name, *arguments = asked
            pipe.send((name, getattr(bench, name)(*arguments)))
    except EOFError:  # the other side has left
        pass
    except Exception as error:
        pipe.send(("failed", f"{type(error).__name__}: {error}"))
        raise


def ask(pipe: Connection, *question: Any) -> Any:
    pipe.send(question)
    word, answer = pipe.recv()
    if word == "failed":
        raise SystemExit(answer)
    return answer


def start_workers(options: argparse.Namespace) -> dict[str, Connection]:
    context = multiprocessing.get_context("spawn")
    pipes = {}
    for variant in VARIANTS:
        mine, theirs = context.Pipe()
        context.Process(target=work, args=(variant, options, theirs), daemon=True).start()
        pipes[variant] = mine
    for variant, pipe in pipes.items():
        word, detail = pipe.recv()
        if word != "ready":
            raise SystemExit(f"{variant}: {detail}")
        print(f"{variant}: compiled after {detail:.0f} s", flush=True)
    return pipes


def measure(pipes: dict[str, Connection], held: int, options: argparse.Namespace) -> dict[str, Any]:
    """Rounds in turns; the median over all steps of each variant."""
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    errors = {variant: ask(pipes[variant], "error", held) for variant in VARIANTS}
    print(f"held {held}: relative errors of logits: {errors}", flush=True)
    if not errors["ours"] <= 2 * errors["plain"] + MARGIN:
        raise SystemExit(f"held {held}: our logits are wrong, errors {errors}")
    for _ in range(options.rounds):
        for variant in VARIANTS:
            times[variant] += ask(pipes[variant], "run", held, options.steps)[
                1:
            ]  # the first follows an idle device
    plain, ours = (statistics.median(times[variant]) for variant in VARIANTS)
    row = {"rows": options.rows, "cache": options.cache, "held": held}
    return row | {"plain_ms": round(plain, 3), "ours_ms": round(ours, 3), "ratio": round(ours / plain, 4)}


def machine(tiny: bool) -> dict[str, Any]:
    if not tiny:
        from benchmarks.timing import conditions

        return conditions()
    return {"gpu": "none", "torch": torch.__version__, "command": "python -m benchmarks.torch_compile --tiny"}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--cache", type=int, default=16384)
    parser.add_argument("--held", type=int, nargs="+", default=[16384, 1024])
    parser.add_argument("--retention", default="0.1")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try it out")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, without CUDA graphs")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.tiny:
        options.cache, options.held, options.layers = 64, [64, 8], options.layers or 1
    report = machine(options.tiny)
    print(json.dumps(report), flush=True)
    pipes = start_workers(options)
    report["rows"] = []
    for held in options.held:
        report["rows"].append(measure(pipes, held, options))
        print(json.dumps(report["rows"][-1]), flush=True)
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    for pipe in pipes.values():
        pipe.send(None)


if __name__ == "__main__":
    main()
