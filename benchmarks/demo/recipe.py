"""What is trained, and how: every number of a run in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparse_compile.models import OuroConfig
from sparse_compile.models.presets import demo_ouro
from sparse_compile.quality.text import PACKAGES

TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "head_dim": 16,
}


@dataclass(frozen=True)
class Recipe:
    """A training run. A checkpoint keeps it; a run that goes on must have the same one, but for ``steps``."""

    seed: int = 0
    steps: int = 4000
    micro_tokens: int = 32_768  # tokens of one forward and backward
    micros: int = 4  # of them per step
    context: int = 2048
    shortest: int = 128  # of the lengths that tasks are trained at: from here, doubling, to the context
    loop_weights: tuple[float, ...] = (0.2, 0.25, 0.2, 0.35)  # of the losses on the logits of each loop
    task_weight: float = 2.0  # of a micro-batch of tasks against one of text
    structure_weight: float = 0.02  # of bytes of tasks that are no answers, against the mean over answers
    muon_lr: float = 0.02
    adam_lr: float = 0.003
    weight_decay: float = 0.02
    warmup: float = 0.01  # shares of all steps: learning rates rise ...
    decay: float = 0.4  # ... stay, and fall to zero
    origins: tuple[str, ...] = ("stdlib", "topics", *PACKAGES)
    shape: tuple[tuple[str, Any], ...] = ()  # what differs from the configuration of the preset "demo"

    def __post_init__(self) -> None:
        if self.micro_tokens % self.context or self.context % self.shortest:
            raise ValueError(
                f"micro_tokens ({self.micro_tokens}) must be a multiple of context ({self.context}), and that one of "
                f"the shortest length ({self.shortest})"
            )
        if self.micros < 2:
            raise ValueError(f"micros must be at least 2 (text and tasks), got {self.micros}")

    @property
    def config(self) -> OuroConfig:
        return demo_ouro(**dict(self.shape))

    @property
    def tokens_per_step(self) -> int:
        return self.micros * self.micro_tokens

    def rate(self, step: int) -> float:
        """The factor on the learning rates at a step: up, level, down to zero."""
        up = (step + 1) / max(1.0, self.warmup * self.steps)
        down = (self.steps - step) / max(1.0, self.decay * self.steps)
        return max(0.0, min(1.0, up, down))

    def progress(self, step: int) -> float:
        return step / max(1, self.steps)


def as_tuples(value: Any) -> Any:
    """A value from JSON with tuples for lists, all the way down."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def tiny_recipe(**changes: Any) -> Recipe:
    """A recipe that a CPU runs in seconds: for tests."""
    small: dict[str, Any] = {
        "steps": 6,
        "micro_tokens": 512,
        "micros": 2,
        "context": 256,
        "origins": ("stdlib",),
        "shape": tuple(TINY.items()),
    }
    return Recipe(**{**small, **changes})


def flops_per_token(config: OuroConfig, length: int) -> float:
    """Of a forward and backward at this sequence length: 6 per weight and loop, and causal attention."""
    heads, kv_heads, size = config.attention_shape
    layer = config.hidden_size * size * (2 * heads + 2 * kv_heads)
    layer += 3 * config.hidden_size * config.intermediate_size
    attention = 3 * 2 * 2 * heads * size * length / 2
    per_loop = config.num_hidden_layers * (6 * layer + attention) + 6 * config.hidden_size * config.vocab_size
    return config.total_ut_steps * per_loop
