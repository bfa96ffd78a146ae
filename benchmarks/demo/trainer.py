"""The training loop: steps, a log, evaluations, checkpoints by the clock, and a clean end when it is told to stop."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.demo import checkpoint
from benchmarks.demo.checkpoint import State
from benchmarks.demo.data import Data
from benchmarks.demo.evaluation import evaluate
from benchmarks.demo.forward import Forward
from benchmarks.demo.optimizer import Optimizer
from benchmarks.demo.recipe import Recipe
from sparse_compile.models import OuroForCausalLM

MEASURED_STEPS = (30, 60)  # between them the speed is measured when the number of steps follows from a budget


@dataclass(frozen=True)
class Limits:
    """When this run of the program does what. Steps, but where another unit is in the name."""

    minutes: float = float("inf")  # since the program began: then save and leave
    stop_after: int | None = None  # steps of this run
    budget_minutes: float | None = None  # training in all; sets the recipe's steps
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
        self, recipe: Recipe, data: Data, out: Path, limits: Limits, resume: Path | None, start: float | None = None
    ) -> None:
        self.data, self.out, self.limits = data, out, limits
        self.start = time.monotonic() if start is None else start
        self.model = new_model(recipe, data.device)
        self.optimizer = Optimizer(self.model, recipe.weight_decay)
        dtype = torch.bfloat16 if data.device.type == "cuda" else torch.float32
        self.forward = Forward(self.model, dtype)
        self.state = State(recipe, data.digest)
        self.stopped = False
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
        return self.state

    def _stop(self, *_: Any) -> None:
        self.stopped = True

    def _train(self) -> None:
        first, saved = self.state.step, time.monotonic()
        sums: dict[str, Tensor] = {}
        clock, measured_from = time.monotonic(), 0.0
        self.log(event="start", **self._sizes())
        while self.state.step < self.recipe.steps and not self._should_stop(first):
            for kind, losses in self._step_or_eager(self.state.step == first).items():
                sums[kind] = sums.get(kind, 0) + losses
            self.state.step += 1
            done = self.state.step - first
            if done % self.limits.log_every == 0:
                self._log_losses(sums, time.monotonic() - clock)
                sums, clock = {}, time.monotonic()
            if self.limits.budget_minutes is not None and done in MEASURED_STEPS:
                measured_from = self._measure(done, measured_from)
            if self.state.step % self.limits.evaluate_every == 0 and self.state.step < self.recipe.steps:
                self.save()
                self._evaluate(*self.limits.quick)
                clock = time.monotonic()
            if time.monotonic() - saved > self.limits.save_every_seconds:
                self.save()
                saved = time.monotonic()
        self._finish()

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

    def _step_or_eager(self, is_first: bool) -> dict[str, Tensor]:
        """A step. When the first one does not compile, training goes on without compiling."""
        if not is_first:
            return self._step()
        try:
            return self._step()
        except Exception as error:
            if self.forward.is_eager:
                raise
            self.log(event="not compiled", error=f"{type(error).__name__}: {str(error)[:2000]}")
            self.forward.eager()
            self.model.zero_grad(set_to_none=True)
            return self._step()

    def _step(self) -> dict[str, Tensor]:
        """One update. Gives the losses of each loop by kind of micro-batch, [L] on the device."""
        step, recipe = self.state.step, self.recipe
        batches = list(self.data.step(step))
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

    def _measure(self, done: int, measured_from: float) -> float:
        """Set the number of steps so that the budget is used, from the time of the steps measured."""
        self._synchronize()
        if done == MEASURED_STEPS[0]:
            return time.monotonic()
        assert self.limits.budget_minutes is not None
        seconds = (time.monotonic() - measured_from) / (MEASURED_STEPS[1] - MEASURED_STEPS[0])
        left = self.limits.budget_minutes - self._minutes()
        steps = self.state.step + max(1, int(left * 60 * 0.96 / seconds))  # the rest: evaluations, checkpoints
        self.state.recipe = replace(self.recipe, steps=steps)
        self.log(event="budget", seconds_per_step=round(seconds, 4), steps=steps)
        return 0.0

    def _log_losses(self, sums: dict[str, Tensor], seconds: float) -> None:
        losses = {kind: (total / self.limits.log_every).tolist() for kind, total in sums.items()}
        if not all(torch.isfinite(total).all() for total in sums.values()):
            raise FloatingPointError(f"the loss is not finite at step {self.state.step}: {losses}")
        speed = self.limits.log_every * self.recipe.tokens_per_step / max(seconds, 1e-9)
        rounded = {kind: [round(value, 4) for value in values] for kind, values in losses.items()}
        rate = round(self.recipe.rate(self.state.step - 1), 4)
        self.log(**rounded, rate=rate, tokens_per_second=round(speed), minutes=round(self._minutes(), 3))

    def _evaluate(self, samples: int, windows: int | None) -> dict[str, Any]:
        figures = evaluate(self.forward, self.limits.contexts, samples, windows)
        self.log(event="evaluation", **figures)
        return figures

    def save(self) -> None:
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
