"""The backend on a model's own generate, for a few tokens, to see what it makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from sparse_compile.backend.compile import sparse_compile_backend
from sparse_compile.backend.report import GraphReport, reports
from sparse_compile.passes.errors import UnsupportedModel

TOKENS = 4


@dataclass(frozen=True)
class Inspection:
    """The graphs of a few decode steps: their reports, and the text of each before and after the passes."""

    reports: tuple[GraphReport, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def decode(self) -> GraphReport | None:
        """The first decode graph, None if there was none."""
        return next((report for report in self.reports if report.kind == "decode"), None)

    def text(self) -> str:
        """All reports; of those that say the same of their calls, the first in full."""
        seen: dict[tuple[str, ...], int] = {}
        parts = []
        for report in self.reports:
            details = tuple(report.details())
            first = seen.setdefault(details, report.number)
            same = first != report.number and details
            parts.append(
                "\n".join([report.headline(), f"  its calls: as in graph {first}"] if same else [str(report)])
            )
        return "\n".join(parts)

    def graph_text(self, which: str) -> str:
        texts = self.before if which == "before" else self.after
        return "\n".join(
            f"# graph {report.number} ({report.kind})\n{text}"
            for report, text in zip(self.reports, texts, strict=True)
        )


def inspect_model(model: Any, options: Mapping[str, Any], rows: int = 2, prompt: int = 6) -> Inspection:
    """Generate a few tokens with a static cache, the decode step compiled by this backend without Inductor.

    Raises:
        UnsupportedModel: the model cannot generate with a static cache, or nothing of it is compiled then.
    """
    from transformers import CompileConfig

    seen: list[tuple[GraphReport, str, str]] = []

    def watch(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        before = graph.print_readable(print_output=False)
        made = sparse_compile_backend(
            graph, inputs, options={**options, "inductor": False, "on_unmatched": "ignore"}
        )
        seen.append((reports()[-1], before, graph.print_readable(print_output=False)))
        return made

    config = CompileConfig(backend=watch, mode=None)
    config._compile_all_devices = True
    device = next(model.parameters()).device
    ids = 3 + torch.arange(rows * prompt, device=device).reshape(rows, prompt) % 50
    torch._dynamo.reset()
    try:
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=TOKENS,
            do_sample=False,
            cache_implementation="static",
            compile_config=config,
        )
    except Exception as error:
        inner = getattr(error, "inner_exception", None)
        if inner is not None:
            raise inner from error
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UnsupportedModel(
            f"{type(model).__name__} cannot generate with a static cache: {type(error).__name__}: {first}"
        ) from error
    finally:
        for name in ("_compiled_call", "_last_compile_config"):
            model.__dict__.pop(name, None)
    if not seen:
        raise UnsupportedModel(
            f"{type(model).__name__}: transformers compiled no decode step of its generate; are its caches "
            "compileable, and generation_config.disable_compile unset?"
        )
    found, before, after = zip(*seen, strict=True)
    return Inspection(tuple(found), tuple(before), tuple(after))
