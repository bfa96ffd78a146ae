"""Run the tests and the benchmarks that need a GPU, one command after the other, and write what they measure.

    python -m benchmarks.figures --list                   the parts, what they run and how long each may take
    python -m benchmarks.figures                          all of them: about an hour on one H200
    python -m benchmarks.figures decode speculation       some, in this order
    python -m benchmarks.figures tests --into /tmp/run    results and logs somewhere else

Each part has a log beside its result. A part that fails, whose program is missing, or that takes too long (Ctrl-C is
sent to it, so that it keeps what it has measured) does not stop the next one; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.timing import need_gpu

RESULTS = Path("benchmarks/results")
MODELS = "ouro-1.4b,dory@2x32768+32x1900+1x1024,hrm-text@2x32768+32x1900+1x1024"
SYSTEMS = "sparse,dense,transformers-static@2x32768+1x1024"
TOLD = {0: "ok", 124: "took too long", 127: "could not be run"}
KERNEL_TESTS = "tests/test_triton.py tests/test_triton_select.py tests/test_triton_narrow.py"


@dataclass(frozen=True)
class Part:
    """A command line, where OUT stands for the result and PYTHON for this interpreter; seconds that it may take."""

    command: str
    seconds: int
    result: str = ""


PARTS = {
    "tests": Part("PYTHON -m pytest -m gpu -n 12 --dist worksteal -q tests", 900),
    "sanitizer": Part(
        "compute-sanitizer --tool memcheck --error-exitcode 9 "
        f"PYTHON -m pytest -m gpu -q -k cuda {KERNEL_TESTS}",
        3600,
    ),
    "decode": Part(
        f"PYTHON -m benchmarks.decode --model {MODELS} --systems {SYSTEMS} --steps 40 --breakdown "
        "--extras host,first-token --out OUT",
        900,
        "decode-h200.json",
    ),
    "speculation": Part("PYTHON -m benchmarks.speculation --out OUT", 300, "speculation-h200.json"),
    "attention": Part("PYTHON -m benchmarks.attention --out OUT", 600, "attention-h200.json"),
    "products": Part(
        "PYTHON -m benchmarks.products --seconds 110 --inductor --out OUT", 600, "products-h200.json"
    ),
    "norms": Part("PYTHON -m benchmarks.norms --out OUT", 200, "norms-h200.json"),
    "torch-compile": Part(
        "PYTHON -m benchmarks.torch_compile --kernels 22 --out OUT", 600, "torch-compile-h200.json"
    ),
    "warm-up": Part(
        'PYTHON -m benchmarks.decode --extras warm-up --systems "" --out OUT', 300, "warm-up-h200.json"
    ),
    "quality": Part("PYTHON -m benchmarks.quality --jobs 8 --out OUT", 600, "quality-demo.json"),
}


def run(name: str, into: Path) -> int:
    """The exit code of a part, whose output goes to its log; 124 where it took too long, 127 where there is no such
    program.
    """
    part = PARTS[name]
    given = {"OUT": str(into / part.result), "PYTHON": sys.executable}
    words = [given.get(word, word) for word in shlex.split(part.command)]
    into.mkdir(parents=True, exist_ok=True)
    print(
        f"=== {name}: {shlex.join(words)} (at most {part.seconds} s); its output: {into / name}.log",
        flush=True,
    )
    with (into / f"{name}.log").open("w") as log:
        log.write(f"{shlex.join(words)}\n")
        log.flush()
        try:
            with _interruptible():
                process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT)
        except OSError as error:
            log.write(f"{words[0]} cannot be run: {error}\n")
            return 127
        try:
            return process.wait(part.seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return 124


@contextmanager
def _interruptible() -> Iterator[None]:
    """What is started within it hears Ctrl-C, even where this process does not, as one in the background of a shell."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"some of {', '.join(PARTS)}; default: all")
    parser.add_argument("--list", action="store_true", help="show the parts and run none")
    parser.add_argument("--into", type=Path, default=RESULTS, help=f"a folder; default {RESULTS}")
    options = parser.parse_args(arguments)
    unknown = set(options.parts) - set(PARTS)
    if unknown:
        parser.error(f"unknown {', '.join(sorted(unknown))}; known: {', '.join(PARTS)}")
    options.parts = list(dict.fromkeys(options.parts))  # twice is once: a second run would replace the first
    if options.into.exists() and not options.into.is_dir():
        parser.error(f"--into: {options.into} is a file; name a folder, which is made where there is none")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        for name, part in PARTS.items():
            print(f"{name:14s} at most {part.seconds:5d} s  {part.command}")
        return 0
    need_gpu("--list shows what there is to run on one")
    codes: dict[str, int] = {}
    for name in options.parts or PARTS:
        started = time.monotonic()
        codes[name] = run(name, options.into)
        told = TOLD.get(codes[name], f"failed with exit code {codes[name]}")
        print(f"    {told} after {time.monotonic() - started:.0f} s", flush=True)
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main())
