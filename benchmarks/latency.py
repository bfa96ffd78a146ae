"""What a user waits for besides steps: the host between them, the first token, and the warm-up."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.systems import Ours, Point, Setup, free_memory
from benchmarks.timing import step_time, synchronize
from sparse_compile.runtime.request import SamplingParams


def host_overhead(setup: Setup, point: Point, steps: int) -> dict[str, Any]:
    """Wall time per step over many steps, against the time of the graph that they replay. `context` is their middle."""
    system = Ours(setup, replace(point, context=point.context - steps // 2), sparse=True)
    try:
        times = step_time(system.step, 10, steps)
        graph = system.graph_ms()
    finally:
        system.close()
    row = {"batch": point.batch, "context": point.context, "steps": steps, "wall_ms": round(times.wall_ms, 3)}
    row["graph_ms"] = None if graph is None else round(graph, 3)
    row["ratio"] = None if graph is None else round(times.wall_ms / graph, 4)
    print(f"host overhead {point}: {row}", flush=True)
    return row


def first_token(setup: Setup, point: Point, repeats: int = 3) -> dict[str, Any]:
    """Time from prompts to their first tokens: our engine, and transformers' forward over the same prompts. The best
    of a few, after one that is not counted.
    """
    prompts = torch.randint(3, setup.vocabulary, (point.batch, point.context), device=setup.device)

    @torch.no_grad()
    def theirs() -> None:
        out = setup.model(input_ids=prompts, use_cache=True, logits_to_keep=1)
        out.logits[:, -1].argmax(-1).tolist()

    best = {"ours_ms": min(_our_first_tokens(setup, point, prompts.tolist(), repeats + 1)) * 1000}
    free_memory()
    best["transformers_ms"] = min(_seconds(theirs) for _ in range(repeats + 1)) * 1000
    free_memory()
    row = {"batch": point.batch, "context": point.context} | {k: round(v, 2) for k, v in best.items()}
    row["ratio"] = round(best["ours_ms"] / best["transformers_ms"], 4)
    print(f"first token {point}: {row}", flush=True)
    return row


def _our_first_tokens(setup: Setup, point: Point, prompts: list[list[int]], repeats: int) -> list[float]:
    engine = setup.factory(sparse=True)(point.batch, point.context + setup.room)

    def run() -> None:
        waiting = {engine.add_request(prompt, SamplingParams(max_new_tokens=2)) for prompt in prompts}
        while waiting:
            waiting -= {output.request_id for output in engine.step()}

    seconds = []
    for _ in range(repeats):
        seconds.append(_seconds(run))
        while engine.has_unfinished():
            engine.step()
    return seconds


def _seconds(call: Any) -> float:
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    return time.perf_counter() - start


def warm_up(setup: Setup, rows: int, context: int) -> float:
    """Seconds of the warm-up for all buckets of up to `rows` rows, in this process and with its cache on disk."""
    return setup.compiled.warmup(rows, context, progress=False)


def warm_up_cold_and_warm(arguments: list[str]) -> dict[str, float]:
    """The same in fresh processes: with an empty compile cache, and again with what that left there."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        folders = {
            "TORCHINDUCTOR_CACHE_DIR": "inductor",
            "TRITON_CACHE_DIR": "triton",
            "SPARSE_COMPILE_CACHE": "own",
        }
        caches = {name: f"{folder}/{own}" for name, own in folders.items()}
        for name in ("cold_s", "warm_s"):
            command = [sys.executable, "-m", "benchmarks.decode", "--warm-up-only", *arguments]
            done = subprocess.run(
                command, env={**os.environ, **caches}, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")
            found[name] = round(float(done.stdout.strip().splitlines()[-1]), 2)
            print(f"warm-up {name}: {found[name]}", flush=True)
    return found
