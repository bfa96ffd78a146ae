"""sparse_compile: sparse attention by loop depth, for the looped Hugging Face model you already have.

    from sparse_compile import sparse_compile

    model = sparse_compile(model, key_retention=0.1)
    out = model.generate(**inputs, max_new_tokens=256)

Importing the package imports nothing heavy: every public name is resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_compile.api import ModelFactory, sparse_compile
    from sparse_compile.compiled import CompiledModel
    from sparse_compile.config import SparseConfig
    from sparse_compile.errors import ArgumentError, SparseCompileError, StaleModelError, ValidationError
    from sparse_compile.outputs import GenerateOutput
    from sparse_compile.passes.errors import UnsupportedModel
    from sparse_compile.report import Report
    from sparse_compile.runtime.engine import Engine
    from sparse_compile.runtime.metrics import EngineMetrics
    from sparse_compile.runtime.request import RequestMetrics, SamplingParams, StepOutput
    from sparse_compile.speculation import SpeculationConfig
    from sparse_compile.streaming import StreamItem

    __version__: str

_EXPORTS = {
    "sparse_compile": "sparse_compile.api",
    "ModelFactory": "sparse_compile.api",
    "CompiledModel": "sparse_compile.compiled",
    "SparseConfig": "sparse_compile.config",
    "SparseCompileError": "sparse_compile.errors",
    "ArgumentError": "sparse_compile.errors",
    "StaleModelError": "sparse_compile.errors",
    "ValidationError": "sparse_compile.errors",
    "UnsupportedModel": "sparse_compile.passes.errors",
    "GenerateOutput": "sparse_compile.outputs",
    "StreamItem": "sparse_compile.streaming",
    "Report": "sparse_compile.report",
    "Engine": "sparse_compile.runtime.engine",
    "EngineMetrics": "sparse_compile.runtime.metrics",
    "RequestMetrics": "sparse_compile.runtime.request",
    "SamplingParams": "sparse_compile.runtime.request",
    "StepOutput": "sparse_compile.runtime.request",
    "SpeculationConfig": "sparse_compile.speculation",
}

__all__ = [
    "ArgumentError",
    "CompiledModel",
    "Engine",
    "EngineMetrics",
    "GenerateOutput",
    "ModelFactory",
    "Report",
    "RequestMetrics",
    "SamplingParams",
    "SparseCompileError",
    "SparseConfig",
    "SpeculationConfig",
    "StaleModelError",
    "StepOutput",
    "StreamItem",
    "UnsupportedModel",
    "ValidationError",
    "__version__",
    "sparse_compile",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("sparse-compile")
    elif name in _EXPORTS:
        value = getattr(import_module(_EXPORTS[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
