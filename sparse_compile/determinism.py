"""What `deterministic=True` needs of a model and a machine, and how its engines compile."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from sparse_compile.config import SparseConfig
from sparse_compile.errors import ArgumentError
from sparse_compile.kernels.dispatch import resolve
from sparse_compile.kernels.skinny import HALF
from sparse_compile.passes.program import Program
from sparse_compile.runtime.compiler import PieceCompiler
from sparse_compile.runtime.deterministic import FixedCompiler, OneRowEach
from sparse_compile.runtime.options import FIXED_ROWS
from sparse_compile.speculation import SpeculationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LEAVE = "leave deterministic out"


def settle_deterministic(config: SparseConfig, model: PreTrainedModel) -> SparseConfig:
    """`config` with kernels for deterministic decoding, where it asks for that.

    Raises ArgumentError where this model on this device cannot decode so.
    """
    if not config.deterministic:
        return config
    if model.device.type == "cpu":
        if config.implementation not in ("auto", "reference"):
            limit = "works on several rows at once on the CPU, so that their bits depend on each other"
            raise ArgumentError(
                "implementation", config.implementation, limit, "pass implementation='auto', or " + _LEAVE
            )
        return replace(config, implementation="reference")
    if model.dtype not in HALF:
        limit = f"needs a model in bfloat16 or float16 on {model.device.type}, this one is in {model.dtype}"
        raise ArgumentError(
            "deterministic", True, limit, "load the model with dtype='bfloat16', or " + _LEAVE
        )
    if not config.inductor:
        limit = "cannot be combined with deterministic=True on CUDA, where one compiled graph serves all rows"
        raise ArgumentError("inductor", False, limit, "leave inductor out")
    return config


def check_deterministic(config: SparseConfig, program: Program, model: PreTrainedModel) -> None:
    """Raise ArgumentError where other attention kernels than Triton's would run on CUDA."""
    if not config.deterministic or model.device.type == "cpu":
        return
    runs = resolve(config.implementation, model.device.type, model.dtype, program.sites[0].head_dim)
    if runs != "triton":
        limit = f"needs the Triton kernels, and the {runs} ones run here"
        raise ArgumentError("deterministic", True, limit, _LEAVE)


def check_rows(config: SparseConfig, rows: int, speculation: SpeculationConfig | None, loops: int) -> None:
    """Raise ArgumentError for an engine of more decode rows at once than have fixed bits."""
    each = speculation.rows(loops) if speculation is not None else 1
    if config.deterministic and each > FIXED_ROWS:
        limit = f"a sequence has {each} rows at once, and deterministic=True serves up to {FIXED_ROWS}"
        raise ArgumentError(
            "speculation", speculation, limit, f"pass draft_loops={-(-loops // FIXED_ROWS)} or more"
        )
    if config.deterministic and rows * each > FIXED_ROWS:
        limit = f"deterministic=True serves up to {FIXED_ROWS} rows at once, and a sequence has {each} here"
        remedy = f"pass max_batch={FIXED_ROWS // each} or less, or split the call"
        raise ArgumentError("max_batch", rows, limit, remedy)


def make_compiler(config: SparseConfig, device: str) -> PieceCompiler:
    """The compiler of an engine's pieces, for a config whose choices by device are made."""
    if not config.deterministic:
        return PieceCompiler(bool(config.inductor), skinny=bool(config.skinny_products))
    return OneRowEach(bool(config.inductor)) if device == "cpu" else FixedCompiler()
