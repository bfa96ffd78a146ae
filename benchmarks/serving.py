"""Requests that arrive at random times: time to the first token, time per token, throughput.

    python -m benchmarks.serving --out benchmarks/results/serving-h200.json
    python -m benchmarks.serving --systems sparse,transformers-cb --rate 4 --requests 64
    python -m benchmarks.serving --tiny

Arrivals are a Poisson process and prompts have random lengths; both are the same for every system. Prompts are computed
for real, with random tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from benchmarks import decode
from benchmarks.models import MODELS, make_setup
from benchmarks.systems import Setup, free_memory
from benchmarks.timing import conditions
from sparse_compile.runtime.request import SamplingParams


@dataclass
class Arrival:
    """A request and what became of it; times in seconds from the start of the run."""

    at: float
    prompt: list[int]
    new_tokens: int
    token_times: list[float] = field(default_factory=list)

    @property
    def first_token_s(self) -> float:
        return self.token_times[0] - self.at

    @property
    def per_token_s(self) -> float:
        """Mean time per token after the first."""
        return (self.token_times[-1] - self.token_times[0]) / max(1, len(self.token_times) - 1)


def make_arrivals(options: argparse.Namespace, vocabulary: int) -> list[Arrival]:
    """The same list for the same options."""
    random, at, made = Random(options.seed), 0.0, []
    for _ in range(options.requests):
        at += random.expovariate(options.rate)
        length = random.randint(*options.prompt)
        prompt = [random.randrange(3, vocabulary) for _ in range(length)]
        made.append(Arrival(at, prompt, options.new_tokens))
    return made


def serve_engine(setup: Setup, arrivals: list[Arrival], batch: int, sparse: bool) -> None:
    """Serve on our engine, one thread; fills in the times of the tokens."""
    longest = max(len(one.prompt) + one.new_tokens for one in arrivals)
    engine = setup.factory(sparse)(batch, longest)
    warm = engine.add_request(arrivals[0].prompt, SamplingParams(max_new_tokens=2))
    while engine.has_unfinished():
        engine.step()
    engine.metrics(warm)
    waiting, live = list(arrivals), {}
    start = time.perf_counter()
    while waiting or engine.has_unfinished():
        while waiting and waiting[0].at <= time.perf_counter() - start:
            one = waiting.pop(0)
            live[engine.add_request(one.prompt, SamplingParams(max_new_tokens=one.new_tokens))] = one
        if not engine.has_unfinished():
            time.sleep(max(0.0, waiting[0].at - (time.perf_counter() - start)))
            continue
        outputs = engine.step()
        now = time.perf_counter() - start
        for output in outputs:
            if output.error is not None:
                raise output.error
            live[output.request_id].token_times.append(now)
    engine.check_integrity()


def serve_continuous(setup: Setup, arrivals: list[Arrival], batch: int) -> None:
    """Serve with transformers' continuous batching, in the thread that it starts; warmed up before the clock starts."""
    from transformers import GenerationConfig

    from benchmarks.continuous import batching_config, looped_paged_cache

    longest = max(len(one.prompt) + one.new_tokens for one in arrivals)
    generation = GenerationConfig(
        max_new_tokens=arrivals[0].new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    implementation = setup.model.config._attn_implementation
    with (
        looped_paged_cache(setup.model),
        setup.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=batching_config(longest, batch)
        ) as manager,
    ):
        start = time.perf_counter()
        for number, one in enumerate(arrivals):
            time.sleep(max(0.0, one.at - (time.perf_counter() - start)))
            manager.add_request(
                one.prompt, request_id=f"r{number}", max_new_tokens=one.new_tokens, record_timestamps=True
            )
        left = len(arrivals)
        while left:
            found = manager.get_result(timeout=1)
            if found is None:
                continue
            if found.error is not None:
                raise RuntimeError(found.error)
            times = [moment - start for moment in found.timestamps]
            arrivals[int(found.request_id[1:])].token_times = times
            left -= 1
    setup.model.set_attn_implementation(implementation)


SYSTEMS: dict[str, Callable[[Setup, list[Arrival], int], None]] = {
    "sparse": lambda setup, arrivals, batch: serve_engine(setup, arrivals, batch, True),
    "dense": lambda setup, arrivals, batch: serve_engine(setup, arrivals, batch, False),
    "transformers-cb": serve_continuous,
}


def summary(arrivals: list[Arrival]) -> dict[str, float]:
    """Percentiles in milliseconds, throughput in tokens per second from the first arrival to the last token."""
    tokens = sum(len(one.token_times) for one in arrivals)
    span = max(one.token_times[-1] for one in arrivals) - arrivals[0].at
    row = {"tokens": tokens, "span_s": round(span, 3), "tokens_per_s": round(tokens / span, 1)}
    for name in ("first_token", "per_token"):
        values = sorted(getattr(one, f"{name}_s") * 1000 for one in arrivals)
        row[f"{name}_ms_p50"] = round(statistics.median(values), 2)
        row[f"{name}_ms_p99"] = round(values[min(len(values) - 1, int(0.99 * len(values)))], 2)
    return row


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--rate", type=float, default=2.0, help="requests per second")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, nargs=2, default=(512, 8192), metavar=("LEAST", "MOST"))
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=16, help="sequences at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="ouro-1.4b", choices=MODELS)
    parser.add_argument("--retention", default="0.1")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    options.systems = [name for name in options.systems.split(",") if name]
    unknown = set(options.systems) - set(SYSTEMS)
    if unknown:
        parser.error(f"--systems: unknown {', '.join(sorted(unknown))}; known: {', '.join(SYSTEMS)}")
    if options.tiny:
        options.rate, options.requests, options.new_tokens = 50.0, 5, 4
        options.prompt, options.batch = (8, 24), 3
    return options


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    setup = make_setup(
        options.model, tiny=options.tiny, room=0, key_retention=options.retention, prefill_chunk=8192
    )
    report = conditions()
    print(json.dumps(report), flush=True)
    decode.check(setup)
    report |= {
        name: getattr(options, name) for name in ("rate", "requests", "prompt", "new_tokens", "batch", "seed")
    }
    report["rows"] = []
    for name in options.systems:
        row: dict[str, Any] = {"system": name}
        arrivals = make_arrivals(options, setup.vocabulary)
        try:
            SYSTEMS[name](setup, arrivals, options.batch)
            row |= summary(arrivals)
        except Exception as error:
            row["error"] = decode.reason(error)
        free_memory()
        print(json.dumps(row), flush=True)
        report["rows"].append(row)
        decode.write(report, options.out)
    return report


if __name__ == "__main__":
    main()
