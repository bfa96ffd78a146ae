"""Whether a compiled model gives the same greedy tokens in every way of decoding, in every batch, and twice."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from sparse_compile.compiled import CompiledModel
from sparse_compile.speculation import Speculation

Prompt = Sequence[int]

TEXTS = (
    "A looped transformer runs the same layers again and again for every token it reads or writes.",
    "Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, I thought "
    "I would sail about a little and see the watery part of the world.",
    "def gcd(a: int, b: int) -> int:\n    while b:\n        a, b = b, a % b\n    return a\n",
    "Two trains leave at 9:15 and 9:40. The first goes 80 km in an hour, the second 120. When do they meet?",
    "It is a truth universally acknowledged, that a single man in possession of a good fortune must be in want of a "
    "wife.",
    "Wer reitet so spät durch Nacht und Wind? Es ist der Vater mit seinem Kind.",
    "The integral of 1/x from 1 to e is 1, and the sum of the first n odd numbers is n squared.",
    'SELECT name, COUNT(*) FROM orders WHERE total > 99.50 GROUP BY name HAVING COUNT(*) >= 3;',
    "Longtemps, je me suis couché de bonne heure. Parfois, à peine ma bougie éteinte, mes yeux se fermaient si vite.",
    "Water boils at 100 degrees Celsius at sea level; on a mountain of 3,000 metres it boils at about 90.",
    "Q: Which planet has the most moons?\nA: Saturn, as far as we know today.\nQ: And which has none?\nA:",
    "En un lugar de la Mancha, de cuyo nombre no quiero acordarme, no ha mucho tiempo que vivía un hidalgo.",
    '{"id": 17, "tags": ["red", "blue"], "size": {"width": 3.5, "height": null}, "ok": true}',
    "Step 1: warm the oven. Step 2: mix flour, butter and sugar. Step 3: wait, which is the hardest part of all.",
    "春眠不覚暁、処処聞啼鳥。夜来風雨声、花落知多少。",
    "Dear Ms. Okafor, thank you for your letter of 3 May. We are sorry to hear that the parcel never arrived.",
)  # fmt: skip


@dataclass(frozen=True)
class Run:
    """All prompts decoded in one way."""

    mode: str
    batch: int
    repeat: int
    tokens: tuple[tuple[int, ...], ...] = field(repr=False)
    seconds: float
    drafted: int = 0
    accepted: int = 0

    def __str__(self) -> str:
        return f"{self.mode}, batch {self.batch}, run {self.repeat}"

    def to_dict(self) -> dict[str, Any]:
        count = sum(map(len, self.tokens))
        return {
            "mode": self.mode,
            "batch": self.batch,
            "repeat": self.repeat,
            "tokens": count,
            "seconds": round(self.seconds, 3),
            "tokens_per_s": round(count / self.seconds, 1),
            "drafted": self.drafted,
            "accepted": self.accepted,
        }


@dataclass(frozen=True)
class Difference:
    """Where a prompt's tokens first differ from those of the first run; margins: of the two largest logits there.

    A token is None behind the end of a run; a margin is None where decoding it once more gave another token.
    """

    prompt: int
    run: str
    position: int
    tokens: tuple[int | None, int | None]
    margins: tuple[float | None, float | None]

    def __str__(self) -> str:
        found = [
            f"{'its end' if token is None else token} (margin {'?' if margin is None else f'{margin:.4g}'})"
            for token, margin in zip(self.tokens, self.margins, strict=True)
        ]
        return f"prompt {self.prompt}: {self.run}: token {self.position} is {found[1]}, and {found[0]} in the first run"


@dataclass(frozen=True)
class Outcome:
    """The runs, the first of which the others are compared with, and the first difference of each prompt."""

    runs: tuple[Run, ...]
    differences: tuple[Difference, ...]

    @property
    def ok(self) -> bool:
        return not self.differences


@dataclass
class SelfTest:
    """modes: how tokens are decoded, by name. All runs must equal the first one: first mode, first of `batches`."""

    compiled: CompiledModel
    prompts: Sequence[Prompt]
    modes: dict[str, Speculation]
    batches: Sequence[int]
    repeats: int = 2
    new_tokens: int = 48

    def run(self, note: Callable[[str], object] = lambda text: None) -> Outcome:
        """note: told of each run."""
        runs: list[Run] = []
        found: dict[int, tuple[Run, int]] = {}
        for mode in self.modes:  # an engine belongs to one mode
            for batch in self.batches:
                for repeat in range(1, self.repeats + 1):
                    one = self._decode(mode, batch, repeat)
                    runs.append(one)
                    differing = dict(_first_differences(runs[0], one))
                    for prompt, position in differing.items():
                        found.setdefault(prompt, (one, position))
                    note(f"{one}: {len(self.prompts) - len(differing)} of {len(self.prompts)} prompts equal")
        return Outcome(
            tuple(runs), tuple(self._describe(runs[0], prompt, *found[prompt]) for prompt in sorted(found))
        )

    def _decode(self, mode: str, batch: int, repeat: int) -> Run:
        start = time.perf_counter()
        tokens: list[tuple[int, ...]] = []
        drafted = accepted = 0
        for group in self._groups(batch):
            rows, output = self._generate(group, mode)
            tokens += rows
            drafted += sum(one.drafted_tokens for one in output.metrics)
            accepted += sum(one.accepted_tokens for one in output.metrics)
        return Run(mode, batch, repeat, tuple(tokens), time.perf_counter() - start, drafted, accepted)

    def _groups(self, batch: int) -> Iterator[Sequence[Prompt]]:
        for start in range(0, len(self.prompts), batch):
            yield self.prompts[start : start + batch]

    def _generate(
        self, prompts: Sequence[Prompt], mode: str, logits: bool = False
    ) -> tuple[list[tuple[int, ...]], Any]:
        """The new tokens of each prompt, and the output that they are from."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        output: Any = self.compiled.generate(
            ids.to(self.compiled.device),
            attention_mask=mask.to(self.compiled.device),
            max_new_tokens=self.new_tokens,
            do_sample=False,
            speculation=self.modes[mode],
            return_dict_in_generate=True,
            output_logits=logits,
            progress=False,
        )
        new = zip(output.sequences[:, width:].tolist(), output.logprobs, strict=True)
        return [tuple(row[: len(own)]) for row, own in new], output

    def _describe(self, first: Run, prompt: int, other: Run, position: int) -> Difference:
        tokens = tuple(_at(run.tokens[prompt], position) for run in (first, other))
        margins = tuple(self._margin(run, prompt, position) for run in (first, other))
        return Difference(prompt, str(other), position, tokens, margins)  # type: ignore[arg-type]

    def _margin(self, run: Run, prompt: int, position: int) -> float | None:
        """Decodes the prompt's batch once more, with logits."""
        start = prompt // run.batch * run.batch
        tokens, output = self._generate(self.prompts[start : start + run.batch], run.mode, logits=True)
        row = prompt - start
        token = _at(run.tokens[prompt], position)
        if token is None or _at(tokens[row], position) != token:
            return None
        largest = output.logits[position][row].float().topk(2).values
        return float(largest[0] - largest[1])


def _first_differences(first: Run, other: Run) -> Iterator[tuple[int, int]]:
    """(prompt, position) of the prompts whose tokens differ."""
    for prompt, (a, b) in enumerate(zip(first.tokens, other.tokens, strict=True)):
        if a != b:
            same = (at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
            yield prompt, next(same, min(len(a), len(b)))


def _at(tokens: Sequence[int], position: int) -> int | None:
    return tokens[position] if position < len(tokens) else None


def make_prompts(tokenizer: Any, count: int, longest: int) -> list[list[int]]:
    """`count` prompts of real text in several languages, of 1 to `longest` tokens, spread over all orders of length."""
    prompts = []
    for number in range(count):
        text = "\n".join(TEXTS[(number + at) % len(TEXTS)] for at in range(len(TEXTS)))
        ids = tokenizer(text)["input_ids"]
        share = (number + 1) * (math.sqrt(5) - 1) / 2 % 1  # the golden ratio's multiples are spread evenly
        length = max(1, round(longest**share)) if number else longest
        prompts.append((ids * -(-length // len(ids)))[:length])
    return prompts
