"""The training loop: steps, a log, evaluations, checkpoints by the clock, and a clean end when it is told to stop."""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.demo import checkpoint
from benchmarks.demo.checkpoint import State
from benchmarks.demo.data import Data, MicroBatch
from benchmarks.demo.evaluation import evaluate
from benchmarks.demo.forward import Forward
from benchmarks.demo.optimizer import Optimizer
from benchmarks.demo.recipe import Recipe
from sparse_compile.models import OuroForCausalLM

UNTIMED_STEPS, TIMED_STEPS = 15, 25  # when the number of steps follows from a budget
REMEDY = "begin anew with a lower rate, such as --set muon_lr=0.01"


@dataclass(frozen=True)
class Limits:
    """When this run of the program does what. Steps, but where another unit is in the name."""

    minutes: float = float("inf")  # since the program began: then save and leave
    stop_after: int | None = None  # steps of this run
    budget_minutes: float | None = None  # training in all; a new run sets the recipe's steps from it
    save_every_seconds: float = 60.0
    log_every: int = 20
    evaluate_every: int = 250
    contexts: tuple[int, ...] = (512, 1024, 2048)
    quick: tuple[int, int] = (64, 32)  # evaluations on the way: samples per task and context, windows of text
    samples: int = 256  # per task and context, in the last evaluation
    windows: int | None = None  # of text in the last evaluation; None: all


def new_model(recipe: Recipe, device: torch.device) -> OuroForCausalLM:
    """A model with the recipe's seed. Embeddings have the scale of what layers add to them; branches begin small; the
    exit gate is not trained, and is zero."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        model = OuroForCausalLM(recipe.config)
        with torch.no_grad():
            nn.init.normal_(model.model.embed_tokens.weight)
            for layer in model.model.layers:
                layer.input_layernorm_2.weight.fill_(0.5)
                layer.post_attention_layernorm_2.weight.fill_(0.5)
            for parameter in model.model.early_exit_gate.parameters():
                parameter.zero_().requires_grad_(False)
    return model.to(device).train()


class Trainer:
    """One run of the program. ``start`` is when the program began, by ``time.monotonic``."""

    def __init__(
        self,
        recipe: Recipe,
        data: Data,
        out: Path,
        limits: Limits,
        resume: Path | None,
        start: float | None = None,
    ) -> None:
        self.data, self.out, self.limits = data, out, limits
        self.start = time.monotonic() if start is None else start
        self.model = new_model(recipe, data.device)
        self.optimizer = Optimizer(self.model, recipe.weight_decay)
        dtype = torch.bfloat16 if data.device.type == "cuda" else torch.float32
        self.forward = Forward(self.model, dtype)
        self.state = State(recipe, data.digest)
        self.stopped = self.has_stepped = False
        self.maker = ThreadPoolExecutor(1)
        self.next_batches: Future[tuple[Recipe, int, list[MicroBatch]]] | None = None
        out.mkdir(parents=True, exist_ok=True)
        log: list[str] = []
        if resume is not None:
            self.state = checkpoint.load(resume, self.model, self.optimizer, data.digest)
            self.state.recipe = replace(self.state.recipe, steps=recipe.steps)
            log = (resume / "log.jsonl").read_text().splitlines(keepends=True)
        self.minutes_before = self.state.minutes
        done = [line for line in log if json.loads(line).get("step", 0) <= self.state.step]
        (out / "log.jsonl").write_text("".join(done))

    @property
    def recipe(self) -> Recipe:
        return self.state.recipe

    def run(self) -> State:
        """Train until the recipe's end or a limit; the newest checkpoint is in the output folder afterwards."""
        before = signal.signal(signal.SIGTERM, self._stop)
        try:
            self._train()
        finally:
            signal.signal(signal.SIGTERM, before)
            self.maker.shutdown()
        return self.state

    def _stop(self, *_: Any) -> None:
        self.stopped = True

    def _train(self) -> None:
        first = self.state.step
        self.log(event="start", **self._sizes())
        if self.limits.budget_minutes is not None and first == 0:
            self._set_steps(self.limits.budget_minutes)
        sums: dict[str, Tensor] = {}
        saved = clock = time.monotonic()
        while self.state.step < self.recipe.steps and not self._should_stop(first):
            for kind, losses in self._step_or_eager(self.state.step).items():
                sums[kind] = sums.get(kind, 0) + losses
            self.state.step += 1
            if (self.state.step - first) % self.limits.log_every == 0:
                self._log_losses(sums, time.monotonic() - clock)
                sums, clock = {}, time.monotonic()
            if time.monotonic() - saved > self.limits.save_every_seconds:
                self.save()
                saved = time.monotonic()
            if self.state.step % self.limits.evaluate_every == 0 and self.state.step < self.recipe.steps:
                self._evaluate(*self.limits.quick)
                clock = time.monotonic()
        self._finish()

    def _set_steps(self, minutes: float) -> None:
        """Set the number of steps so that the budget is used, from the time of a few steps; then begin anew, so that
        ``steps`` alone repeats the run. The steps are of the middle of a run, where tasks are of all lengths: the short
        ones of its beginning take less time."""
        first = self.recipe.steps // 2
        for number in range(UNTIMED_STEPS + TIMED_STEPS):
            if number == UNTIMED_STEPS:
                self._synchronize()
                start = time.monotonic()
            self._step_or_eager(first + number)
        self._synchronize()
        seconds = (time.monotonic() - start) / TIMED_STEPS
        left = 0.96 * 60 * (minutes - self._minutes())  # the rest is for evaluations and checkpoints
        self.state.recipe = replace(self.recipe, steps=max(1, int(left / seconds)))
        with torch.no_grad():
            for own, new in zip(
                self.model.parameters(), new_model(self.recipe, self.data.device).parameters(), strict=True
            ):
                own.copy_(new)
        self.optimizer = Optimizer(self.model, self.recipe.weight_decay)
        self.log(event="budget", seconds_per_step=round(seconds, 4), steps=self.recipe.steps)

    def _should_stop(self, first: int) -> bool:
        after = self.limits.stop_after
        over = (time.monotonic() - self.start) / 60 > self.limits.minutes
        return self.stopped or over or (after is not None and self.state.step - first >= after)

    def _finish(self) -> None:
        complete = self.state.step >= self.recipe.steps
        self.save()  # before anything that could fail
        if not self.stopped:
            figures = self._evaluate(
                *((self.limits.samples, self.limits.windows) if complete else self.limits.quick)
            )
            self.state.figures = {**figures, "complete": complete}
            self.save()
        self.log(event="end", complete=complete, minutes=round(self.state.minutes, 2))

    def _step_or_eager(self, step: int) -> dict[str, Tensor]:
        """A step. If the first one of this run does not compile, training goes on without compiling."""
        if self.has_stepped or self.forward.is_eager:
            return self._step(step)
        try:
            found = self._step(step)
        except Exception as error:
            self.log(event="not compiled", error=f"{type(error).__name__}: {str(error)[:2000]}")
            self.forward.eager()
            self.model.zero_grad(set_to_none=True)
            found = self._step(step)
        self.has_stepped = True
        return found

    def _step(self, step: int) -> dict[str, Tensor]:
        """One update. Gives the losses of each loop by kind of micro-batch, [L] on the device."""
        recipe = self.recipe
        batches = self._batches(step)
        found: dict[str, Tensor] = {}
        weights = torch.tensor(recipe.loop_weights, device=self.data.device)
        for batch in batches:
            share = 1 / sum(other.kind == batch.kind for other in batches)
            losses = self.forward.losses(batch.ids, batch.targets, batch.weights)
            scale = share * (recipe.task_weight if batch.kind == "tasks" else 1.0)
            (losses @ weights * scale).backward()
            found[batch.kind] = found.get(batch.kind, 0) + losses.detach() * share
        rate = recipe.rate(step)
        self.optimizer.step(step, rate * recipe.muon_lr, rate * recipe.adam_lr)
        return found

    def _batches(self, step: int) -> list[MicroBatch]:
        """Those of this step; those of the next are made meanwhile."""

        def make(step: int) -> tuple[Recipe, int, list[MicroBatch]]:
            return recipe, step, list(self.data.step(step, recipe))

        recipe = self.recipe
        ready = self.next_batches.result() if self.next_batches is not None else None
        if ready is None or ready[:2] != (recipe, step):
            ready = make(step)
        self.next_batches = self.maker.submit(make, step + 1)
        return ready[2]

    def _log_losses(self, sums: dict[str, Tensor], seconds: float) -> None:
        losses = {kind: (total / self.limits.log_every).tolist() for kind, total in sums.items()}
        if not all(torch.isfinite(total).all() for total in sums.values()):
            raise FloatingPointError(f"the loss is not finite at step {self.state.step}: {losses}; {REMEDY}")
        speed = self.limits.log_every * self.recipe.tokens_per_step / max(seconds, 1e-9)
        rounded = {kind: [round(value, 4) for value in values] for kind, values in losses.items()}
        rate = round(self.recipe.rate(self.state.step - 1), 4)
        self.log(**rounded, rate=rate, tokens_per_second=round(speed), minutes=round(self._minutes(), 3))

    def _evaluate(self, samples: int, windows: int | None) -> dict[str, Any]:
        figures = evaluate(self.forward, self.limits.contexts, samples, windows)
        self.log(event="evaluation", **figures)
        return figures

    def save(self) -> None:
        """Write a checkpoint.

        Raises:
            FloatingPointError: for weights that are not finite; the checkpoint before is kept.
        """
        finite = torch.stack([p.detach().isfinite().all() for p in self.model.parameters()])
        if not finite.all():
            raise FloatingPointError(f"the weights are not finite at step {self.state.step}; {REMEDY}")
        self.state.minutes = self._minutes()
        checkpoint.save(self.out, self.model, self.optimizer, self.state)

    def log(self, **entry: Any) -> None:
        """One line to the log file, and to stdout."""
        line = json.dumps({"step": self.state.step, **entry})
        print(line, flush=True)
        with (self.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")

    def _minutes(self) -> float:
        """Of training in all, those of earlier runs included."""
        return self.minutes_before + (time.monotonic() - self.start) / 60

    def _sizes(self) -> dict[str, Any]:
        return {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "text_bytes": {origin: len(source) for origin, source in self.data.sources.items()},
            "digest": self.data.digest,
            "steps": self.recipe.steps,
        }

    def _synchronize(self) -> None:
        if self.data.device.type == "cuda":
            torch.cuda.synchronize()
