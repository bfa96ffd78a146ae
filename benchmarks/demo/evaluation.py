"""What a model in training is worth: held-out bits per byte, agreement of loops, accuracy on the tasks."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.demo.forward import Forward
from sparse_compile.quality import tasks, text


def held_out_windows(length: int, most: int | None = None) -> Tensor:
    """The held-out text as windows that follow one another, int64 [n, length + 1] with one byte in common."""
    ids = tasks.to_ids(text.held_out_text())
    windows = ids.unfold(0, length + 1, length)
    return windows if most is None else windows[:: max(1, len(windows) // most)][:most]


def text_figures(
    forward: Forward, length: int, most: int | None = None, batch: int = 16
) -> dict[str, list[float]]:
    """On held-out text, for each loop: bits per byte, and how often its most likely byte is that of the last loop,
    which is how often a draft of so many loops is accepted when all bytes before it are right."""
    windows = held_out_windows(length, most).to(forward.model.device)
    loops = forward.model.config.total_ut_steps
    nats, same = torch.zeros(loops, dtype=torch.float64), torch.zeros(loops, dtype=torch.float64)
    for rows in windows.split(batch):
        logits = forward.logits(rows[:, :-1])
        last = logits[-1].argmax(-1)
        for loop, one in enumerate(logits):
            loss = functional.cross_entropy(one.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
            nats[loop] += float(loss)
            same[loop] += int((one.argmax(-1) == last).sum())
    count = windows[:, 1:].numel()
    return {
        "bits_per_byte": (nats / count / math.log(2)).tolist(),
        "agreement_with_last_loop": (same / count).tolist(),
    }


def task_figures(
    forward: Forward, contexts: tuple[int, ...], count: int, tokens: int = 65_536, seed: int = 1
) -> dict[str, float]:
    """Accuracy of the last loop, and of recall also after each other loop, as "task@context"."""
    device = forward.model.device
    figures: dict[str, float] = {}
    for context in contexts:
        batch = max(1, tokens // context)
        for name in tasks.TASKS:
            asked = tasks.samples(name, count, context, seed)
            figures[f"{name}@{context}"] = tasks.forced_accuracy(
                lambda ids: forward.logits(ids.to(device))[-1], asked, batch
            )
    return figures


def evaluate(forward: Forward, contexts: tuple[int, ...], count: int, windows: int | None) -> dict[str, Any]:
    """Both kinds of figures, and how long they took."""
    start = time.perf_counter()
    longest = max(contexts)
    return {
        **text_figures(forward, longest, windows),
        "tasks": task_figures(forward, contexts, count),
        "seconds": round(time.perf_counter() - start, 1),
    }
