"""What can be said against the options of a command from the model's configuration, before its weights are loaded."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from sparse_compile.cli import notes
from sparse_compile.errors import ArgumentError

if TYPE_CHECKING:
    from sparse_compile.config import SparseConfig
    from sparse_compile.passes.program import Site


def asking(name: str) -> AbstractContextManager[None]:
    """Notes what is waited for where the name of a model is one of the hub."""
    from sparse_compile.models.sources import is_hub_name

    return notes.waiting(f"asking the Hugging Face hub for {name}") if is_hub_name(name) else nullcontext()


def outline(name: str) -> Any:
    """The model of a name without values, from its configuration alone; None where it takes the weights to have it.

    Raises UnknownModelError and FileNotFoundError for the name of no model. Any other error is of the model, and is
    left to the loading that follows.
    """
    import torch

    from sparse_compile.models import UnknownModelError, load_config
    from sparse_compile.planning import empty_model

    try:
        with asking(name), notes.bars(False):
            return empty_model(load_config(name), torch.float32)
    except (UnknownModelError, FileNotFoundError):
        raise
    except Exception:
        return None


def check_options(model: Any, configs: Iterable[SparseConfig]) -> None:
    """Raise ArgumentError for a loop, a number of layers or positions that the model has not. model: an outline."""
    import torch

    from sparse_compile.compile import arguments_of_options, check_calibration, pass_options
    from sparse_compile.limits import check_context
    from sparse_compile.passes.schedule import schedule_sites

    sites = _sites(model)
    for config in configs:
        check_context(model, config)
        check_calibration(config, model)
        if not sites:
            continue
        with arguments_of_options():
            schedule_sites(sites, pass_options(config, torch.device("cpu")))
        loops = max(site.loops for site in sites)
        _check_loops("loops_per_step", config.loops_per_step, loops)
        _check_loops("draft_loops", getattr(config.speculation, "draft_loops", None), loops)


def _sites(model: Any) -> tuple[Site, ...]:
    """The attention calls of the model; none where they cannot be had from an outline."""
    from sparse_compile.kernels.retention import Retention
    from sparse_compile.passes.base import Options
    from sparse_compile.passes.errors import UnsupportedModel
    from sparse_compile.passes.survey import survey

    try:
        return survey(model, Options(Retention.of(1), enabled=False)).sites
    except UnsupportedModel:  # compiling says it, from more than a configuration
        return ()


def _check_loops(name: str, asked: int | None, loops: int) -> None:
    if asked is not None and asked > loops:
        raise ArgumentError(name, asked, f"the model has {loops} loops", f"pass {name}={loops} or less")


def check_tokens(model: Any, argument: str, ids: list[int]) -> None:
    """Raise ArgumentError for ids outside of the vocabulary. model: an outline."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    for one in ids:
        if not 0 <= one < vocabulary:
            limit = f"must lie in 0 .. {vocabulary - 1}, the vocabulary"
            raise ArgumentError(argument, one, limit, "pass ids of the model's own tokenizer")
