"""Quality of one compiled model: perplexity, tasks, agreement with dense, retained mass, acceptance of drafts.

Everything but generated text is measured with given tokens (`forced`), whose rows are decode rows: prompts are always
dense, so figures over prompts alone would say nothing about sparse attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparse_compile.errors import ArgumentError, whole_number
from sparse_compile.limits import position_limit
from sparse_compile.quality.forced import Forced, Part, TeacherForcing
from sparse_compile.quality.tasks import TaskSamples, samples
from sparse_compile.speculation import SpeculationConfig

if TYPE_CHECKING:
    from sparse_compile.compiled import CompiledModel
    from sparse_compile.passes.program import Site

# Rows are sparse however short they are: quality is asked for, not speed. Programs run once each, so none is compiled.
OPTIONS: dict[str, Any] = {"dense_below": 0, "inductor": False, "cuda_graphs": False, "progress": False}

LOW = 0.05  # the percentile of retained mass that is reported beside its mean
Done = Callable[[int], object]


def check_window(window: int) -> None:
    """Raises ArgumentError for windows in which nothing could be decoded."""
    if window < 3:
        limit = "must be at least 3 tokens: a prompt, one to decode, and the one that follows"
        raise ArgumentError("window", window, limit, "pass for example window=2048")


@dataclass(frozen=True)
class Settings:
    """What is measured, the same for every compiled model.

    windows: texts of `window` tokens, whose first `prompt` are the dense prompt. task_contexts, task_samples: of each
    task. question: so many of the last prompt tokens of a task are decode rows too, as in a conversation that goes on;
    without that the first token of an answer would come from the dense prompt. generate_prompts, generate_prompt,
    generate_tokens: texts that are continued greedily. drafts: whether drafts are measured, of given tokens and in
    blocks of draft_rows rows. texts, rows: in one run.
    """

    windows: int = 64
    window: int = 2048
    prompt: int = 512
    tasks: tuple[str, ...] = ("recall", "copy", "hops", "count", "sums")
    task_contexts: tuple[int, ...] = (512, 1024, 2048)
    task_samples: int = 100
    question: int = 16
    generate_prompts: int = 16
    generate_prompt: int = 512
    generate_tokens: int = 128
    drafts: bool = True
    draft_rows: int = 4
    texts: int = 16
    rows: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        check_window(self.window)
        for name, value in vars(self).items():
            if isinstance(value, bool):
                continue
            if isinstance(value, int) and value < (
                0 if name in ("seed", "question", "generate_prompts") else 1
            ):
                raise ArgumentError(name, value, "must be positive", f"pass for example {name}=16")
        if not self.prompt <= self.window - 2:
            limit = f"leaves nothing to decode of windows of {self.window} tokens"
            raise ArgumentError("prompt", self.prompt, limit, f"pass prompt={self.window // 4}")


SUBSET = Settings(
    windows=2, window=224, prompt=32, tasks=("recall", "count"), task_contexts=(160,), task_samples=6,
    generate_prompts=2, generate_prompt=64, generate_tokens=16, texts=8, rows=512,
)  # fmt: skip
"""What a CPU measures in a few seconds."""


@dataclass
class Quality:
    """Figures of one compiled model; shares are fractions. None: not measured, or nothing captured.

    perplexity: of held-out text. agreement: decode rows of that text whose most likely token is the dense model's.
    exact: they and their losses are the dense ones, bit for bit. generated_agreement: places of generated text with
    the token of the dense model's; generated_prefix: tokens before the first other one, on average.
    tasks: name -> context -> share of answers that come out exactly; tasks_prompt_dense: the same with the whole prompt
    dense, as `generate` has it. mass: of the kept keys, mean and 5th percentile over rows; [layer][head] each, for
    `mass_layers`. acceptance: loops -> rows whose draft is the model's own token; accepted: loops -> drafted tokens
    that blocks of generated text kept.
    """

    perplexity: float
    agreement: float
    exact: bool
    tasks: dict[str, dict[int, float]] = field(default_factory=dict)
    tasks_prompt_dense: dict[str, dict[int, float]] = field(default_factory=dict)
    generated_agreement: float | None = None
    generated_prefix: float | None = None
    mass_layers: list[str] = field(default_factory=list)
    mass: list[list[float]] = field(default_factory=list)
    mass_low: list[list[float]] = field(default_factory=list)
    mass_mean: float | None = None
    mass_p5: float | None = None
    acceptance: dict[int, float] = field(default_factory=dict)
    accepted: dict[int, float] = field(default_factory=dict)

    @property
    def task_mean(self) -> float | None:
        return _mean_of_tasks(self.tasks)

    def to_dict(self) -> dict[str, Any]:
        longest = max((context for found in self.tasks.values() for context in found), default=0)
        recall = self.tasks.get("recall", {}).get(longest)
        return {
            **vars(self),
            "task_mean": self.task_mean,
            "task_mean_prompt_dense": _mean_of_tasks(self.tasks_prompt_dense),
            "recall_longest": recall,
            "recall_2k": recall if longest == 2048 else None,
        }


def _mean_of_tasks(tasks: dict[str, dict[int, float]]) -> float | None:
    found = [share for by_context in tasks.values() for share in by_context.values()]
    return sum(found) / len(found) if found else None


@dataclass(frozen=True)
class Dense:
    """What the dense model made of the same texts."""

    forced: Forced
    generated: Tensor | None


class Meter:
    """Measures compiled models on one text. text: its token ids. tasks: whether the model reads bytes, as tasks do."""

    def __init__(
        self, text: Tensor, settings: Settings, tasks: bool, done: Done = lambda units: None
    ) -> None:
        self.settings, self.done = settings, done
        self.windows = windows_of(text, settings.windows, settings.window)
        self.prompts = self.windows[: settings.generate_prompts, : settings.generate_prompt]
        names = settings.tasks if tasks else ()
        self.asked = [
            samples(name, settings.task_samples, context, settings.seed)
            for name in names
            for context in settings.task_contexts
        ]

    def units(self, compiled: CompiledModel) -> int:
        """How often `done` is told of a unit while one model is measured: runs over texts, and generations."""
        parts = 1 + len(self._draft_loops(compiled))
        generated = parts if len(self.prompts) else 0
        return parts * len(self.windows) + 2 * sum(len(one.prompts) for one in self.asked) + generated

    def dense(self, compiled: CompiledModel) -> Dense:
        """What later models are compared with."""
        runner = self._runner([compiled])
        (forced,) = runner.run(self.windows, [Part(self.settings.prompt)], self.done)
        runner.close()
        return Dense(forced, self._generated(compiled) if len(self.prompts) else None)

    def measure(self, models: Sequence[CompiledModel], dense: Dense) -> list[Quality]:
        """Of one model, compiled in several ways: prompts are computed once for all of them."""
        runner = self._runner(models)
        found = self._of_windows(runner, models, dense.forced)
        for asked in self.asked:
            self._add_task(found, runner, asked)
        runner.close()
        del runner  # the engines that generate need its memory
        if dense.generated is not None:
            for quality, compiled in zip(found, models, strict=True):
                self._add_generated(quality, compiled, dense.generated)
        return found

    def _runner(self, models: Sequence[CompiledModel]) -> TeacherForcing:
        contexts = self.settings.task_contexts if self.asked else ()
        return TeacherForcing(
            models, max(self.settings.window, *contexts, 0), self.settings.texts, self.settings.rows
        )

    def _of_windows(
        self, runner: TeacherForcing, models: Sequence[CompiledModel], dense: Forced
    ) -> list[Quality]:
        """What held-out text says of each model."""
        start, drafts = self.settings.prompt, [list(self._draft_loops(one)) for one in models]
        parts = [
            Part(start, loops, model=number)
            for number, of_model in enumerate(drafts)
            for loops in (None, *of_model)
        ]
        made = iter(runner.run(self.windows, parts, self.done))
        found = []
        for compiled, of_model in zip(models, drafts, strict=True):
            forced = next(made)
            quality = Quality(
                perplexity=float(forced.loss.double().mean().exp()),
                agreement=float((forced.best == dense.best).double().mean()),
                exact=torch.equal(forced.best, dense.best) and torch.equal(forced.loss, dense.loss),
            )
            self._add_mass(quality, compiled, forced)
            for loops in of_model:
                quality.acceptance[loops] = float((next(made).best == forced.best).double().mean())
            found.append(quality)
        return found

    def _add_mass(self, found: Quality, compiled: CompiledModel, forced: Forced) -> None:
        if forced.mass is None:
            return
        found.mass_layers = capturing_layers(compiled.program.sites)
        rows = forced.mass.flatten(0, 1).double()  # [rows, sites, heads]
        found.mass = rows.mean(0).tolist()
        found.mass_low = quantile(rows, LOW).tolist()
        found.mass_mean = float(rows.mean())
        found.mass_p5 = float(quantile(rows.flatten()[:, None], LOW))

    def _add_task(self, found: Sequence[Quality], runner: TeacherForcing, asked: TaskSamples) -> None:
        """With a prompt that is dense to its end, and with the question decoded."""
        ids = torch.cat((asked.prompt_ids, asked.answer_ids), 1)
        width = asked.answers.shape[1]
        end, question = ids.shape[1] - width, self.settings.question
        places = [(end - 1, 1), (end - max(question, 1), int(not question))]
        parts = [
            Part(start, dense_rows=dense, model=number)
            for start, dense in places  # the longer prompts first: the shorter ones are parts of them
            for number in range(len(found))
        ]
        tables = [*(one.tasks_prompt_dense for one in found), *(one.tasks for one in found)]
        for tasks, forced in zip(tables, runner.run(ids, parts, self.done), strict=True):
            right = forced.right[:, -width:].all(-1)
            tasks.setdefault(asked.name, {})[ids.shape[1]] = float(right.double().mean())

    def _add_generated(self, found: Quality, compiled: CompiledModel, dense: Tensor) -> None:
        same = self._generated(compiled) == dense
        found.generated_agreement = float(same.double().mean())
        found.generated_prefix = float(same.long().cumprod(-1).sum(-1).double().mean())
        for loops in self._draft_loops(compiled):
            asked = SpeculationConfig(draft_loops=loops, num_draft_tokens=self.settings.draft_rows)
            metrics = self._generate(compiled, asked).metrics
            drafted = sum(one.drafted_tokens for one in metrics)
            found.accepted[loops] = sum(one.accepted_tokens for one in metrics) / max(1, drafted)

    def _draft_loops(self, compiled: CompiledModel) -> range:
        """How many loops a draft may run: those before the last of a loop that is rolled."""
        roll = compiled.program.roll
        return range(1, roll.repeats if roll is not None and self.settings.drafts else 1)

    def _generated(self, compiled: CompiledModel) -> Tensor:
        """New tokens [B, generate_tokens], on the CPU."""
        return self._generate(compiled, False).sequences[:, self.prompts.shape[1] :].cpu()

    def _generate(self, compiled: CompiledModel, speculation: Any) -> Any:
        ids, tokens = self.prompts.to(compiled.device), self.settings.generate_tokens
        out = compiled.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False,
            eos_token_id=None, speculation=speculation, return_dict_in_generate=True, progress=False,
        )  # fmt: skip
        self.done(1)
        return out


def capturing_layers(sites: Sequence[Site]) -> list[str]:
    """The layers that capture, by line of the reference store."""
    lines = {site.store_site: site.layer for site in sites if site.store_site is not None}
    return [layer for _, layer in sorted(lines.items())]


def windows_of(text: Tensor, count: int, width: int) -> Tensor:
    """int64 [count, width]: parts of a text, evenly spread.

    Raises ArgumentError for a text with fewer tokens, and for a count or a width below 1.
    """
    whole_number("windows", count, 1)
    whole_number("window", width, 1)
    if len(text) < count * width:
        fitting = len(text) // width
        limit = f"of {width} tokens each need {count * width}, and the text has {len(text)}"
        if fitting:
            raise ArgumentError("windows", count, limit, f"pass a longer text, or windows={fitting}")
        raise ArgumentError("windows", count, limit, "pass a longer text, or a smaller window")
    starts = [number * (len(text) // count) for number in range(count)]
    return torch.stack([text[start : start + width] for start in starts])


def check_lengths(model: Any, window: int, task_contexts: Sequence[int] = ()) -> None:
    """Raises ArgumentError for texts that are longer than the model has positions."""
    limit = position_limit(model)
    if limit is None:
        return
    of_model = f"and the model has {limit} positions (config.max_position_embeddings)"
    if window > limit:
        raise ArgumentError(
            "window", window, f"is so many tokens, {of_model}", f"pass window={limit} or less"
        )
    longest = max(task_contexts, default=0)
    if longest > limit:
        remedy = f"measure tasks of at most {limit} tokens; on the command line --subset does"
        raise ArgumentError("task_contexts", longest, f"is so many tokens, {of_model}", remedy)


def quantile(values: Tensor, share: float) -> Tensor:
    """The smallest value of the first dimension that at least `share` of them do not exceed."""
    rank = max(1, -int(-share * len(values) // 1))
    return values.kthvalue(rank, dim=0).values
