"""Time decode steps of several systems side by side, over KV caches of random numbers.

    python -m benchmarks.decode --out benchmarks/results/decode-h200.json        all systems at all points
    python -m benchmarks.decode --systems sparse,dense --points 2x32768,1x1024   some of them
    python -m benchmarks.decode --systems sparse,transformers-static@2x32768     one of them at points of its own
    python -m benchmarks.decode --systems sparse,dense --breakdown --plot steps.png
    python -m benchmarks.decode --model ouro-1.4b,dory@1x1024,hrm-text           several models, points of their own
    python -m benchmarks.decode --model dory --out FILE --add                    more rows, behind those of FILE
    python -m benchmarks.decode --model hrm-text --gates-apart --breakdown       with gates in attention, and without
    python -m benchmarks.decode --extras host,first-token,warm-up --systems ""
    python -m benchmarks.decode --tiny                                           a look at all of it, on the CPU

Points of a system go before those of a model, and both before `--points`.
Systems of transformers are known for Ouro's shapes alone, and left out of other models. Extras are of the first model.
With --add the file must be of the same GPU, versions and commit; its command names both. Rows that it has stay.

A model has a published shape and random weights; contexts may go beyond the positions it was made for, which cost the
same. Every row names its model. `bytes` of attention are the keys and values that a step reads, those of products the
weights (of layers in a loop once per loop); floor_ms is both over the read bandwidth. Before anything is timed the
program is compared with the model.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import breakdown, latency
from benchmarks.models import MODELS, make_setup
from benchmarks.systems import SYSTEMS, Point, Setup, free_memory
from benchmarks.timing import conditions, need_plots, step_time
from sparse_compile.validation import validate_program

POINTS = "2x32768,4x16384,32x1900,8x8192,1x1024"
TINY_POINTS = "2x64,1x32"
HOST_POINT, FIRST_TOKEN_POINTS = "32x1900", "1x8192,8x2048"
OURS = ("sparse", "dense")
BANDWIDTH = 4.35e12  # bytes per second that an H200 reads
EXTRAS = ("host", "first-token", "warm-up")


def parse_points(text: str) -> list[Point]:
    """ "2x32768,1x1024" -> points. ValueError for what is none."""
    points = []
    for item in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)x(\d+)", item)
        if found is None or not int(found[1]) or not int(found[2]):
            raise ValueError(f"{item!r} is no point; write batch x context, both at least 1, such as 2x32768")
        points.append(Point(int(found[1]), int(found[2])))
    return points


def setup_of(options: argparse.Namespace, name: str, fuse_gates: bool = True) -> Setup:
    """A model and the options of all systems."""
    return make_setup(
        name,
        tiny=options.tiny,
        room=4 * (options.warm + options.steps) + 64,
        key_retention=options.retention,
        dense_below=options.dense_below,
        prefill_chunk=options.prefill_chunk,
        fuse_gates=fuse_gates,
    )


def measure(name: str, setup: Setup, point: Point, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the result; a system that fails gives a row with the reason."""
    row: dict[str, Any] = {
        "model": setup.name,
        "batch": point.batch,
        "context": point.context,
        "system": name if setup.config.fuse_gates else f"{name}-gates-apart",
    }
    free_memory()
    started = time.perf_counter()
    try:
        system = SYSTEMS[name](setup, point)
        try:
            times = step_time(system.step, options.warm, options.steps)
            row["step_ms"] = round(times.device_ms, 3)
            row["wall_ms"] = round(times.wall_ms, 3)
            if options.breakdown:
                found, outside = breakdown.kernel_classes(system.step)
                row["breakdown"] = {kind: round(spent, 4) for kind, spent in found.items()}
                row["other_ms"] = round(outside, 3)
        finally:
            system.close()
    except Exception as error:
        row["error"] = reason(error)
    sparse = name == "sparse" and point.context >= (setup.config.dense_below or 0)
    traffic = {"attention": setup.kv_bytes(point, sparse), "products": setup.weight_bytes(point)}
    row["bytes"] = traffic
    row["floor_ms"] = round(sum(traffic.values()) / BANDWIDTH * 1000, 3)
    row["setup_s"] = round(time.perf_counter() - started, 1)
    shown = {key: value for key, value in row.items() if key not in ("breakdown", "bytes")}
    print(json.dumps(shown), flush=True)
    if "breakdown" in row:
        print(
            breakdown.table(f"{setup.name} {point} {row['system']}", row["breakdown"], traffic, BANDWIDTH),
            flush=True,
        )
    return row


def check(setup: Setup) -> None:
    """The gate: the program's logits on a short prompt are those of the model. Raises ValidationError."""
    error = validate_program(setup.model, setup.factory(sparse=True))
    print(f"gate: relative error of the logits against the model's own generation {error:.2e}", flush=True)


def run_extras(
    setup: Setup, options: argparse.Namespace, extras: Sequence[str], arguments: list[str]
) -> dict[str, Any]:
    """Results of the extras by name; one that fails gives the reason."""
    host = parse_points("2x32" if options.tiny else HOST_POINT)[0]
    points = parse_points("2x32" if options.tiny else FIRST_TOKEN_POINTS)
    runs: dict[str, Callable[[], Any]] = {
        "host": lambda: latency.host_overhead(setup, host, 10 if options.tiny else 200),
        "first-token": lambda: [latency.first_token(setup, point) for point in points],
        "warm-up": lambda: latency.warm_up_cold_and_warm(arguments),
    }
    found = {}
    for name in extras:
        free_memory()
        try:
            found[name.replace("-", "_")] = runs[name]()
        except Exception as error:
            found[name.replace("-", "_")] = {"error": reason(error)}
            print(f"{name} failed: {reason(error)}", flush=True)
    return found


def reason(error: Exception) -> str:
    """An error as one line of a report."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--points", help=f"batch x context; default {POINTS}")
    parser.add_argument(
        "--systems",
        help=f"default {','.join(SYSTEMS)}; beyond Ouro, {','.join(OURS)}, which are all there are",
    )
    parser.add_argument(
        "--model",
        default="ouro-1.4b",
        help=f"one or more of {','.join(MODELS)}, with points of its own behind an @",
    )
    parser.add_argument("--retention", default="0.1")
    parser.add_argument("--dense-below", type=int, help="default: by device")
    parser.add_argument("--prefill-chunk", type=int, default=8192)
    parser.add_argument("--warm", type=int, default=10, help="steps before the clock starts")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--breakdown", action="store_true", help="time by kernel class, and other_ms")
    parser.add_argument(
        "--gates-apart",
        action="store_true",
        help="systems of ours once more, with the gates of attention outside of its kernels (fuse_gates=False)",
    )
    parser.add_argument("--plot", type=Path, help="a picture of the breakdown")
    parser.add_argument("--extras", default="", help=f"some of {','.join(EXTRAS)}")
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--warm-up-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="to the rows that the file of --out has")
    options = parser.parse_args(arguments)
    if options.plot:
        need_plots(parser)
    try:
        models = with_points(options.model)
        systems = with_points(",".join(SYSTEMS) if options.systems is None else options.systems)
    except ValueError as error:
        parser.error(str(error))
    options.extras = [name for name in options.extras.split(",") if name]
    lists = (("model", models, MODELS), ("systems", systems, SYSTEMS), ("extras", options.extras, EXTRAS))
    for name, given, known in lists:
        unknown = set(given) - set(known)
        if unknown:
            parser.error(f"--{name}: unknown {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    idle = [name for name in systems if not any(served(name, model) for model in models)]
    if options.systems is not None and idle:
        parser.error(f"--systems: {', '.join(idle)} runs Ouro's shapes alone, and --model has none of them")
    if options.add and (options.out is None or not options.out.is_file()):
        parser.error(f"--add: there is no file {options.out or '(give --out)'} to add rows to")
    if not models:
        parser.error(f"--model {options.model!r} names no model; known: {', '.join(MODELS)}")
    if options.tiny:
        options.warm, options.steps = 2, 4
    points = options.points or (TINY_POINTS if options.tiny else POINTS)
    try:
        options.models = {
            model: {
                name: parse_points(own or of_model or points)
                for name, own in systems.items()
                if served(name, model)
            }
            for model, of_model in models.items()
        }
    except ValueError as error:
        parser.error(f"--points: {error}")
    return options


def with_points(text: str) -> dict[str, str]:
    """ "one,other@2x32+1x16" -> {"one": "", "other": "2x32,1x16"}. ValueError for a name that comes twice."""
    parted = [item.partition("@") for item in text.split(",") if item]
    found = {name: points.replace("+", ",") for name, _, points in parted}
    if len(found) < len(parted):
        twice = Counter(name for name, _, _ in parted).most_common(1)[0][0]
        raise ValueError(f"{twice} is named twice in {text!r}; name it once, with its points joined by +")
    return found


def served(system: str, model: str) -> bool:
    """Whether a system runs a model: transformers' own, over its caches, are known for Ouro alone."""
    return system in OURS or model.startswith("ouro")


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    options = parse(arguments)
    if options.warm_up_only:
        setup = setup_of(options, next(iter(options.models)))
        print(latency.warm_up(setup, *((2, 64) if options.tiny else (32, 2048))))
        return {}
    report = conditions()
    print(json.dumps(report), flush=True)
    report = added_to(options.out, report, options.extras) if options.add else {**report, "rows": []}
    for at, name in enumerate(options.models):
        run_model(name, options, report, options.extras if at == 0 else [])
        torch._dynamo.reset()  # what is compiled of one model is of no use to the next
        free_memory()
    if options.plot:
        breakdown.plot(report["rows"], options.plot)
    return report


def added_to(path: Path, report: dict[str, Any], extras: Sequence[str]) -> dict[str, Any]:
    """The report of a file, to which rows and these extras are added under the conditions of `report`.

    Raises SystemExit where the file is of others, has one of the extras (perhaps of another model), or is no report.
    """
    try:
        found: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"--add: {path} cannot be read ({error}); write to another file") from None
    if not (isinstance(found, dict) and isinstance(found.get("rows"), list) and "command" in found):
        raise SystemExit(f"--add: {path} is no report with a command and rows; write to another file")
    has = [name for name in extras if name.replace("-", "_") in found]
    if has:
        raise SystemExit(f"--add: {path} has {', '.join(has)} already; leave it out or write to another file")
    other = [key for key in report if key != "command" and found.get(key) != report[key]]
    if other:
        told = ", ".join(f"{key} {found.get(key)!r} and not {report[key]!r}" for key in other)
        raise SystemExit(f"--add: {path} has {told}; write to another file")
    return {**found, "command": f"{found['command']} && {report['command']}"}


def run_model(name: str, options: argparse.Namespace, report: dict[str, Any], extras: Sequence[str]) -> None:
    """Adds to the report what is to be measured of one model."""
    setup = setup_of(options, name)
    check(setup)
    apart = setup_of(options, name, fuse_gates=False) if options.gates_apart else None
    shared = ["--model", name, "--retention", options.retention, *(["--tiny"] if options.tiny else [])]
    report.update(run_extras(setup, options, extras, shared))
    if extras:
        write(report, options.out)
    # By system, since the end of one that is compiled as a whole makes PyTorch forget what is compiled of the others.
    for system, points in options.models[name].items():
        for point in points:
            for one in filter(None, (setup, apart if system in OURS else None)):
                report["rows"].append(measure(system, one, point, options))
                write(report, options.out)  # after every row: an interrupted run leaves what it measured


def write(report: dict[str, Any], path: Path | None) -> None:
    """Store the report, if it is wanted."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
