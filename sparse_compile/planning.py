"""What fits on a GPU, from a model's configuration alone: no weights are loaded and no GPU is needed."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch

from sparse_compile.compile import arguments_of_options, pass_options
from sparse_compile.config import SparseConfig
from sparse_compile.errors import ArgumentError
from sparse_compile.limits import position_limit
from sparse_compile.models import load_config
from sparse_compile.passes.survey import Survey, survey
from sparse_compile.runtime.budget import Budget, PoolSizes
from sparse_compile.runtime.memory import format_at_least

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_UNITS = {"B": 1}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", start=1)}
_COUNTS = {"": 1, "k": 1024, "m": 1024**2}


def parse_size(text: str) -> int:
    """Bytes of "80GiB", "141 GB", "512MiB". Raises ValueError for a number without a unit, which could mean both."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?i?B)\s*", text, re.IGNORECASE)
    units = {name.lower(): size for name, size in _UNITS.items()}
    if found is None or found[2].lower() not in units or not float(found[1]):
        raise ValueError(f"{text!r} is no size; write a number and one of {', '.join(_UNITS)}, such as 80GiB")
    return int(Fraction(found[1]) * units[found[2].lower()])


def parse_tokens(text: str) -> int:
    """Tokens of "32k" (32 * 1024), "4096", "1M"."""
    found = re.fullmatch(r"\s*(\d+)\s*([kKmM]?)\s*", text)
    if found is None or not int(found[1]):
        raise ValueError(f"{text!r} is no number of tokens; write for example 4096 or 32k (k is 1024)")
    return int(found[1]) * _COUNTS[found[2].lower()]


def empty_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a configuration on the meta device, in `dtype`: it has shapes and no values."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False).eval()


@dataclass(frozen=True)
class MemoryPlan:
    """Whether `batch` sequences of `context` tokens fit, and what would. Sizes in bytes.

    dtype_source: where the dtype comes from, in words. positions: what the model was made for, where it says so.
    max_context, max_batch: at the batch and at the context asked for, 0 when not even one fits.
    """

    model: str
    dtype: torch.dtype
    dtype_source: str
    parameters: int
    context: int
    batch: int
    positions: int | None
    budget: Budget
    settings: dict[str, Any]

    @property
    def needs(self) -> dict[str, int]:
        return self.budget.needs(self.batch, self.context)

    @property
    def fits(self) -> bool:
        return self.budget.fits(self.batch, self.context)

    @property
    def max_context(self) -> int:
        return self.budget.max_context(self.batch, self.positions or 2**31)

    @property
    def max_batch(self) -> int:
        return self.budget.max_batch(self.context)

    @property
    def changes(self) -> list[str]:
        """Settings that would make it fit, each alone; empty when it fits."""
        if self.fits:
            return []
        least = self.budget.least_gpu_bytes(self.batch, self.context)
        changes = [f"a GPU with {format_at_least(least)} or more"]
        if self.max_batch:
            changes.insert(0, f"--batch {self.max_batch} or less")
        if self.max_context:
            changes.insert(0, f"--context {self.max_context} or less")
        return changes

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        needs = self.needs
        return {
            "model": self.model,
            "dtype": str(self.dtype).removeprefix("torch."),
            "parameters": self.parameters,
            "gpu_memory": self.budget.gpu_bytes,
            "context": self.context,
            "batch": self.batch,
            "settings": self.settings,
            "kv_bytes_per_token": self.budget.pools.kv_spec().bytes_per_token,
            "needs": {name.replace(" ", "_").lower(): size for name, size in needs.items()},
            "total": sum(needs.values()),
            "pool_limit": self.budget.pool_limit(self.batch),
            "reserve": self.budget.reserve(self.batch),
            "fits": self.fits,
            "max_context": self.max_context,
            "max_batch": self.max_batch,
            "changes": self.changes,
        }


def make_plan(
    name: str, gpu_memory: int, context: int, batch: int, config: SparseConfig, dtype: torch.dtype | None
) -> MemoryPlan:
    """The plan of a model by name. dtype: None takes the configuration's own, bfloat16 where it has none.

    Raises:
        ValueError: a batch below 1, a context below 2 or beyond the model's positions, an option that does not fit the
            model.
        UnsupportedModel: the model has no loops or cannot be looked at without weights.
    """
    config = config.for_device("cuda")
    if batch < 1:
        raise ArgumentError("batch", batch, "must be at least 1", "pass for example --batch 8")
    if context < 2:
        limit = "must be at least 2: a token of a prompt and a new one"
        raise ArgumentError("context", context, limit, "pass for example --context 32k")
    model_config = load_config(name)
    own = getattr(model_config, "dtype", None)
    chosen = dtype or (own if isinstance(own, torch.dtype) else torch.bfloat16)
    source = "asked for" if dtype else "of the checkpoint" if isinstance(own, torch.dtype) else "assumed"
    model = empty_model(model_config, chosen)
    positions = position_limit(model)
    if positions is not None and context > positions:
        limit = f"the model has {positions} positions (config.max_position_embeddings)"
        raise ArgumentError("context", context, limit, f"pass --context {positions} or less")
    with arguments_of_options():
        found = survey(model, pass_options(config, torch.device("cuda")))
    return MemoryPlan(
        model=name,
        dtype=chosen,
        dtype_source=source,
        parameters=found.parameters,
        context=context,
        batch=batch,
        positions=positions,
        budget=_budget(found, gpu_memory, config, chosen),
        settings={
            "key_retention": config.retention_text,
            "capture_loop": config.capture_loop,
            "page_size": config.page_size,
            "prefill_chunk": config.prefill_chunk,
            "enabled": config.enabled,
        },
    )


def _budget(found: Survey, gpu_memory: int, config: SparseConfig, dtype: torch.dtype) -> Budget:
    assert config.prefill_chunk is not None
    pools = PoolSizes(found.sites, config.key_bucket, config.page_size, dtype)
    return Budget(
        gpu_bytes=gpu_memory,
        weight_bytes=found.weight_bytes,
        pools=pools,
        row_bytes=found.layer_bytes,
        prefill_chunk=config.prefill_chunk,
        vocabulary=found.vocabulary,
    )
