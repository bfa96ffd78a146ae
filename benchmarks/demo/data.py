"""Batches: windows of text, and synthetic tasks at growing lengths. A batch follows from (seed, step, place) alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.demo.recipe import Recipe
from sparse_compile.models.tokenizer import FIRST_BYTE_ID
from sparse_compile.quality import tasks, text

ORIGIN_SHARES = {
    "stdlib": 0.25,
    "topics": 0.02,
    "torch": 0.3,
    "transformers": 0.25,
    "numpy": 0.05,
    "networkx": 0.05,
    "sympy": 0.08,
}
TASK_SHARES = {"recall": 0.5, "hops": 0.175, "copy": 0.125, "count": 0.1, "sums": 0.1}
LEAST_TEXT = 4_000_000  # bytes; with less the model would learn its text by heart


@dataclass(frozen=True)
class MicroBatch:
    """ids, targets int64 [B, T]; weights float32 [B, T] with which cross entropies are summed, 1 in all."""

    kind: str  # "text" or "tasks"
    ids: Tensor
    targets: Tensor
    weights: Tensor


class Data:
    """All text on the device, and the batches of each step.

    Raises:
        ValueError: when the installed packages hold too little text.
    """

    def __init__(self, origins: tuple[str, ...], device: torch.device) -> None:
        self.device = device
        self.sources = {o: t for o, t in text.training_text().items() if o in origins}
        if self.size < LEAST_TEXT:
            raise ValueError(
                f"only {self.size:,} bytes of text in {', '.join(origins)} of this Python; training needs "
                f"{LEAST_TEXT:,}: install Python with its full standard library, torch and transformers"
            )
        self.pools = {o: torch.from_numpy(t.copy()).to(device) for o, t in self.sources.items()}

    @property
    def size(self) -> int:
        return sum(map(len, self.sources.values()))

    @cached_property
    def digest(self) -> str:
        """Of all text: two machines with the same digest train on the same bytes."""
        found = hashlib.sha256()
        for origin, source in self.sources.items():
            found.update(origin.encode())
            found.update(source)
        return found.hexdigest()[:16]

    def step(self, step: int, recipe: Recipe) -> Iterator[MicroBatch]:
        """The micro-batches of a step, text first. Half of them are tasks at first, a quarter towards the end."""
        of_tasks = max(1, recipe.micros // (2 if recipe.progress(step) < 0.6 else 4))
        for place in range(recipe.micros):
            rng = np.random.default_rng([recipe.seed, step, place])
            if place < recipe.micros - of_tasks:
                yield self.text(rng, recipe.context, recipe.micro_tokens // recipe.context)
            else:
                length = int(rng.choice(*lengths(step, recipe)))
                yield self.tasks(rng, length, recipe.micro_tokens // length, recipe.structure_weight)

    def text(self, rng: np.random.Generator, length: int, rows: int) -> MicroBatch:
        """Windows at random places, each from one origin."""
        shares = np.array([ORIGIN_SHARES[origin] for origin in self.pools])
        chosen = rng.choice(len(shares), rows, p=shares / shares.sum())
        within = torch.arange(length + 1, device=self.device)
        windows = []
        for origin, pool in enumerate(self.pools.values()):
            starts = rng.integers(0, len(pool) - length, int((chosen == origin).sum()))
            windows.append(pool[self._move(starts)[:, None] + within])
        ids = torch.cat(windows).long() + FIRST_BYTE_ID
        weights = torch.full((rows, length), 1 / (rows * length), device=self.device)
        return MicroBatch("text", ids[:, :-1], ids[:, 1:], weights)

    def tasks(self, rng: np.random.Generator, length: int, rows: int, structure: float) -> MicroBatch:
        """All tasks at one length, by their shares."""
        bounds = np.round(np.cumsum([0.0, *TASK_SHARES.values()]) * rows).astype(int)
        texts, weights = [], []
        for name, first, last in zip(TASK_SHARES, bounds, bounds[1:], strict=False):
            if last > first:
                made = tasks.training_batch(name, int(last - first), length, rng)
                texts.append(made.text)
                weights.append(_weights(made.answer, structure, share=(last - first) / rows))
        ids = self._move(np.concatenate(texts)).long() + FIRST_BYTE_ID
        weight = self._move(np.concatenate(weights))
        return MicroBatch("tasks", ids, ids.roll(-1, 1), weight.roll(-1, 1))

    def _move(self, array: NDArray[Any]) -> Tensor:
        """To the device, without waiting for what it does."""
        tensor = torch.from_numpy(array)
        return (
            tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor
        )


def _weights(answer: NDArray[np.bool_], structure: float, share: float) -> NDArray[np.float32]:
    """By target: the mean over the answers of a task, and a little of the rest; the first byte is no target."""
    weights = np.where(answer, (1 - structure) / answer.sum(), structure / (~answer).sum()) * share
    weights[:, 0] = 0
    return weights.astype(np.float32)


def lengths(step: int, recipe: Recipe) -> tuple[NDArray[np.int64], int | None, bool, NDArray[np.float64]]:
    """Arguments of ``rng.choice``: lengths of tasks by now, the longest most often. Short ones come first, so that
    looking things up is learned where it is easy; all of them after a quarter of the run."""
    shortest, longest = recipe.shortest, recipe.context
    doubled = shortest * 2 ** np.arange(int(np.log2(longest // shortest)) + 1)
    known = doubled[: 2 + int(recipe.progress(step) / 0.25 * (len(doubled) - 1))]
    shares = np.arange(1.0, len(known) + 1)
    return known, None, True, shares / shares.sum()
