"""From a model and a config to a compiled model: trace and rewrite, make engines on demand, validate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sparse_compile.calibration import REMEDY, Calibration
from sparse_compile.compiled import CompiledModel
from sparse_compile.config import SparseConfig, warn_of_last_loop
from sparse_compile.determinism import check_deterministic, check_rows, make_compiler, settle_deterministic
from sparse_compile.errors import ArgumentError
from sparse_compile.freshness import refuse_autocast, warn_of_hooks
from sparse_compile.kernels.dispatch import resolve, triton_obstacle
from sparse_compile.limits import check_context
from sparse_compile.passes.base import Options
from sparse_compile.passes.errors import OptionError
from sparse_compile.passes.pipeline import STEPS, build_program
from sparse_compile.passes.probe import vocabulary_size
from sparse_compile.passes.program import Program
from sparse_compile.passes.trace import check_model
from sparse_compile.progress import WorkProgress
from sparse_compile.runtime.budget import PoolSizes
from sparse_compile.runtime.engine import Engine
from sparse_compile.runtime.executor import Executor
from sparse_compile.runtime.graphs import ROW_BUCKETS, GraphExecutor
from sparse_compile.runtime.kv_pool import KVPool
from sparse_compile.runtime.memory import check_fits
from sparse_compile.runtime.options import EngineOptions
from sparse_compile.runtime.reference_store import ReferenceStore
from sparse_compile.speculation import Speculation, SpeculationConfig, check_speculation, chosen
from sparse_compile.validation import check_rotary, validate_program

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DUMP_VARIABLE = "SPARSE_COMPILE_DUMP"


def compile_model(model: PreTrainedModel, config: SparseConfig) -> CompiledModel:
    """Trace `model`, rewrite its attention by loop depth, and check the result against the model's own tokens.

    By the option `progress` it shows its steps on stderr: the trace, each pass, and the validation.

    Raises:
        UnsupportedModel: the model cannot be compiled; one sentence that names the module.
        ArgumentError: an option that does not fit this model or this machine.
        ValidationError: the model's rotary frequencies are damaged, or the compiled program disagrees with the model
            (off-switch: validate=False).
    """
    check_model(model)
    asked, config = config, settle_deterministic(config.for_device(model.device.type), model)
    refuse_autocast(model.device)
    check_context(model, config)
    check_graphs(config, model)
    check_calibration(config, model)
    if config.validate:
        check_rotary(model)
    steps = len(STEPS) + config.validate
    with WorkProgress(steps, config.progress, verb="compiling", unit="steps") as bar:
        compiled = _compile(model, asked, config, bar.begin)
    warn_of_hooks(compiled.traced_hooks)
    return compiled


def _compile(
    model: PreTrainedModel, asked: SparseConfig, config: SparseConfig, begin: Callable[[str], None]
) -> CompiledModel:
    """What takes time of `compile_model`. asked: the options as they were given; begin: told each step."""
    with arguments_of_options():
        program = build_program(model, pass_options(config, model.device), begin)
    if config.enabled:
        warn_of_last_loop(config, program.loops)
    check_implementation(config, program, model)
    check_deterministic(config, program, model)
    check_loops(config, program)
    check_speculation(config.speculation, program, config.loops_per_step)
    config = settle_graphs(asked.cuda_graphs, config, program, model)
    engines = EngineFactory(model, config, program)
    if config.max_context is not None:
        engines.check_memory(config.max_batch or 1, config.max_context)
    if config.validate:
        begin("validation")
        validate_program(model, engines)
    return CompiledModel(model, config, program, engines)


@contextmanager
def arguments_of_options() -> Iterator[None]:
    """Within this, an option that the passes refuse is an ArgumentError, as it is for those who gave it."""
    try:
        yield
    except OptionError as error:
        raise ArgumentError(error.argument, error.value, error.limit, error.remedy) from None


def check_calibration(config: SparseConfig, model: PreTrainedModel) -> None:
    """Raise ArgumentError for a calibration of another kind of model, whose layers may well have the same names."""
    found, own = config.calibration, type(model).__name__
    if isinstance(found, Calibration) and found.model != own:
        limit = f"was measured on another kind of model, and this one is {own}"
        raise ArgumentError("calibration", found.model, limit, REMEDY)


def check_graphs(config: SparseConfig, model: PreTrainedModel) -> None:
    """Raise ArgumentError where CUDA graphs are asked for without CUDA."""
    if config.cuda_graphs and model.device.type != "cuda":
        limit = f"needs a model on CUDA, this one is on {model.device}"
        raise ArgumentError(
            "cuda_graphs", True, limit, "move the model with .cuda(), or leave cuda_graphs out"
        )


def settle_graphs(
    asked: bool | None, config: SparseConfig, program: Program, model: PreTrainedModel
) -> SparseConfig:
    """`config` without CUDA graphs where the kernels that run are not Triton's: the others wait for the host.

    Raises ArgumentError where graphs were asked for.
    """
    if not config.cuda_graphs:
        return config
    runs = resolve(config.implementation, model.device.type, model.dtype, program.sites[0].head_dim)
    if runs == "triton":
        return config
    if asked:
        limit = f"needs the Triton kernels, and the {runs} ones run here"
        raise ArgumentError("cuda_graphs", True, limit, "leave cuda_graphs out")
    return replace(config, cuda_graphs=False)


def check_implementation(config: SparseConfig, program: Program, model: PreTrainedModel) -> None:
    """Raise ArgumentError when the kernels that were asked for cannot run this model here."""
    if config.implementation != "triton":
        return
    obstacle = triton_obstacle(model.device.type, model.dtype, program.sites[0].head_dim)
    if obstacle:
        limit = f"cannot run here: {obstacle}"
        raise ArgumentError("implementation", "triton", limit, "pass implementation='auto'")


def check_loops(config: SparseConfig, program: Program) -> None:
    """Raise ArgumentError when this program cannot run `loops_per_step` of its loops."""
    asked = config.loops_per_step
    if asked is None:
        return
    if program.roll is None:
        limit = f"needs a loop that is rolled, and this one is not: {program.roll_reason}"
        raise ArgumentError("loops_per_step", asked, limit, "pass loops_per_step=None")
    if asked > program.roll.repeats:
        limit = f"the program has {program.roll.repeats} loops"
        raise ArgumentError(
            "loops_per_step", asked, limit, f"pass loops_per_step={program.roll.repeats} or less"
        )


def pass_options(config: SparseConfig, device: torch.device) -> Options:
    """What the passes need to know of a config for a model on `device`.

    Graphs are dumped where SPARSE_COMPILE_DUMP points.
    """
    dump = os.environ.get(DUMP_VARIABLE)
    return Options(
        retention=config.retention_for_passes(),
        enabled=config.enabled,
        capture_loop=config.capture_loop,
        recapture_every=config.recapture_every,
        implementation=config.implementation,
        roll=config.roll,
        merge_linears=device.type == "cuda" if config.merge_linears == "auto" else bool(config.merge_linears),
        fuse_gates=config.fuse_gates,
        dump_dir=Path(dump) if dump else None,
    )


class EngineFactory:
    """Makes an engine with room for so many sequences of so many tokens, on the model's device and in its dtype."""

    def __init__(self, model: PreTrainedModel, config: SparseConfig, program: Program) -> None:
        config = config.for_device(model.device.type)
        self.model, self.config, self.program = model, config, program
        self.compiler = make_compiler(config, model.device.type)

    @property
    def bodies(self) -> int:
        return self.program.roll.repeats if self.program.roll is not None else 1

    def sizes(self, speculation: SpeculationConfig | None = None) -> PoolSizes:
        return PoolSizes(
            self.program.sites,
            self.config.key_bucket,
            self.config.page_size,
            self.model.dtype,
            speculation.rows(self.bodies) if speculation is not None else 1,
        )

    def check_memory(
        self, rows: int, context: int, pool_tokens: int | None = None, speculation: Speculation = None
    ) -> None:
        """Raise ValueError, naming the settings, when pool and store do not fit into free memory."""
        settings: dict[str, Any] = {"max_batch": rows, "max_context": context}
        if pool_tokens is not None:
            settings["pool_tokens"] = pool_tokens
        if self.program.sparse:
            settings["key_retention"] = self.config.key_retention
        asked = chosen(speculation, self.config.speculation)
        if self.program.sparse and asked is not None:
            settings["speculation"] = asked
        check_fits(self.sizes(asked).needs(rows, context, pool_tokens), self.model.device, settings)

    def __call__(
        self, rows: int, context: int, pool_tokens: int | None = None, speculation: Speculation = None
    ) -> Engine:
        """pool_tokens: tokens that all sequences hold together; None: as many as they may ever need.

        Raises ArgumentError when the program cannot draft as `speculation` says, ValueError when it does not fit.
        """
        asked = chosen(speculation, self.config.speculation)
        check_rows(self.config, rows, asked, self.bodies)
        self.check_memory(rows, context, pool_tokens, speculation)
        check_speculation(asked, self.program, self.config.loops_per_step)
        with torch.inference_mode(False):  # an engine outlives the call that makes it
            return self._make(rows, context, pool_tokens, asked)

    def options(self, rows: int, context: int, speculation: SpeculationConfig | None) -> EngineOptions:
        """Limits of an engine of this size, by the config."""
        config = self.config
        assert config.prefill_chunk is not None
        assert config.dense_below is not None
        return EngineOptions(
            max_context=context,
            max_seqs=rows,
            prefill_chunk=config.prefill_chunk,
            max_prefill_tokens=config.prefill_chunk,
            dense_below=config.dense_below,
            sites=self.program.sites,
            body_sites=self.program.body_sites,
            last_sites=self.program.last_sites,
            retention=self.program.retention,
            async_steps=bool(config.async_steps),
            drafting=speculation.drafting(self.bodies) if speculation is not None else None,
            loops_per_step=config.loops_per_step,
            prefix_caching=config.prefix_caching,
            deterministic=config.deterministic,
            vocabulary=vocabulary_size(self.model),
            prefix_lm=getattr(self.model.config, "prefix_lm", False) is True,
        )

    def _make(
        self, rows: int, context: int, pool_tokens: int | None, speculation: SpeculationConfig | None
    ) -> Engine:
        sizes, device = self.sizes(speculation), self.model.device
        spec = sizes.kv_spec()
        pool = KVPool(spec, sizes.pages(rows, context, pool_tokens), device)
        store_spec = sizes.store_spec(context)
        store = ReferenceStore(store_spec, sizes.slots(rows), device) if store_spec is not None else None
        executor = Executor(self.program, pool, store, self.compiler)
        # A single row runs as two where bits must not depend on the number of rows.
        buckets = ROW_BUCKETS[1:] if self.config.deterministic else ROW_BUCKETS
        runner = GraphExecutor(executor, spec.page_size, buckets) if self.config.cuda_graphs else executor
        return Engine(runner, pool, store, self.options(rows, context, speculation))
