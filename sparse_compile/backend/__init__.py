"""The torch.compile backend "sparse_compile": the passes without the runtime.

    model.forward = torch.compile(model.forward, backend="sparse_compile", options={"key_retention": 0.1})
    model.generate(**inputs, cache_implementation="static", max_new_tokens=256)

For people who keep transformers' own `generate`, or a decode loop of their own, with a static cache. Installed, the
backend is found by name (entry point group `torch_dynamo_backends`); importing this module registers it as well.
`torch.compile(model, ...)` works for calls of its result; that result's `generate` is the plain model's, not compiled.
"""

from __future__ import annotations

from sparse_compile.backend.compile import sparse_compile_backend
from sparse_compile.backend.options import BackendOptions
from sparse_compile.backend.report import GraphReport, clear_reports, last_report, reports
from sparse_compile.backend.unmatched import NothingRewritten

__all__ = [
    "BackendOptions",
    "GraphReport",
    "NothingRewritten",
    "clear_reports",
    "last_report",
    "register",
    "reports",
    "sparse_compile_backend",
]


def register() -> None:
    """Make the backend known to torch.compile by its name, where no entry point has done it."""
    import torch._dynamo

    if "sparse_compile" not in torch._dynamo.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(sparse_compile_backend, name="sparse_compile")


register()
