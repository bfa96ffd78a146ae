"""What the model itself limits, the number of positions that it was made for, and sizes that calls are given."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

from sparse_compile.errors import ArgumentError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sparse_compile.config import SparseConfig


def position_limit(model: PreTrainedModel) -> int | None:
    """The number of positions that the model was made for, where its config says so."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def check_context(model: PreTrainedModel, config: SparseConfig) -> None:
    """Raise ArgumentError when `max_context` goes beyond the model's own positions."""
    limit = position_limit(model)
    if config.max_context is not None and limit is not None and config.max_context > limit:
        raise ArgumentError(
            "max_context",
            config.max_context,
            f"the model has {limit} positions (config.max_position_embeddings)",
            f"pass max_context={limit} or less",
        )


def check_positions(model: PreTrainedModel, prompt: int, new_tokens: int) -> None:
    """Raise ArgumentError when a call's longest prompt and `new_tokens` go beyond the model's own positions."""
    limit = position_limit(model)
    if limit is not None and prompt + new_tokens > limit:
        raise ArgumentError(
            "max_new_tokens",
            new_tokens,
            f"with {prompt} prompt tokens that makes {prompt + new_tokens}, and the model has {limit} positions "
            "(config.max_position_embeddings)",
            "shorten the prompt or lower max_new_tokens",
        )


def check_size(name: str, value: object, remedy: str) -> int:
    """`value` as a plain int; ArgumentError unless it is an integer of at least 1."""
    try:
        size = 0 if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        size = 0
    if size < 1:
        raise ArgumentError(name, value, "must be an integer >= 1", remedy)
    return size
