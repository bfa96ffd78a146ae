"""CompiledModel: the user's model with a fast `generate` beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sparse_compile.config import SparseConfig
from sparse_compile.errors import ArgumentError
from sparse_compile.freshness import ModelState, refuse_autocast
from sparse_compile.generate import Call, prepare_call, run_generate, run_stream
from sparse_compile.limits import check_context, check_positions, check_size, position_limit
from sparse_compile.progress import ProgressCallback
from sparse_compile.report import DEFAULT_CONTEXTS, Report, build_report
from sparse_compile.session import MakeEngine, SessionKeeper
from sparse_compile.speculation import check_speculation, chosen
from sparse_compile.streaming import StreamItem

if TYPE_CHECKING:
    from sparse_compile.outputs import GenerateOutput
    from sparse_compile.passes.program import Program
    from sparse_compile.runtime.engine import Engine

# Methods that change a model in place. A program belongs to the weights, device and dtype it was made for.
_CHANGES_MODEL = frozenset(
    name
    for names in (
        "cuda cpu xpu half float double bfloat16 to_empty type train",
        "load_state_dict resize_token_embeddings set_input_embeddings set_output_embeddings",
    )
    for name in names.split()
)

_WARM_CONTEXT = 2048  # tokens that `warmup` prepares for where nothing says how many


class CompiledModel:
    """A compiled looped model. The wrapped model (`.model`) computes what it did before, bit for bit
    (`merge_linears` moves its weights in memory, no more): calling this object, and every attribute that is not
    defined here, is the model's own.

    model: the user's model. sparse_config: the options it was compiled with. program: what the passes made of
    it.
    make_engine: called with (rows, context), gives an engine for that many sequences of that many tokens, in a pool
    of fewer tokens where a third argument says so; it is called on the first generate, and again when a call needs
    more.
    """

    __slots__ = ("__weakref__", "_keeper", "_state", "model", "program", "sparse_config")

    def __init__(
        self, model: Any, sparse_config: SparseConfig, program: Program, make_engine: MakeEngine
    ) -> None:
        sparse_config = sparse_config.for_device(model.device.type)
        state = ModelState(model)
        for name, value in (
            ("model", model),
            ("sparse_config", sparse_config),
            ("program", program),
            ("_keeper", SessionKeeper(make_engine, sparse_config, state.weights)),
            ("_state", state),
        ):
            object.__setattr__(self, name, value)

    def generate(
        self,
        inputs: Any = None,
        generation_config: Any = None,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        prefix_allowed_tokens_fn: Any = None,
        *,
        streamer: Any = None,
        tokenizer: Any = None,
        seed: Any = None,
        speculation: Any = None,
        progress: Any = None,
        **kwargs: Any,
    ) -> torch.LongTensor | GenerateOutput:
        """Generate, with the arguments and defaults of transformers' `generate`.

        inputs (or input_ids): int [B, N] or [N].
        attention_mask: [B, N], 0/1 integers, bool or float (0/1 or additive); padding on any side, or holes.
        token_type_ids: for prefix-LM models, ones on the bidirectional prefix.
        generation_config, and further keyword arguments: transformers' generation settings. Lengths
            (max_length, min_length) count the padded width N, as in transformers.
        logits_processor, stopping_criteria: lists of callables, called per row with ids [1, N + new].
        prefix_allowed_tokens_fn: called with (row of the input, ids [N + new]).
        streamer: a BaseStreamer; one sequence only.
        tokenizer: for stop_strings.
        seed: an int (each row draws independently, see `sparse_compile.seeds`) or one per row; without it
            torch's global generator decides.
        speculation: a `SpeculationConfig` for this call, False for none; without it the option of the same name. An
            engine belongs to one: a call with another one makes a new engine. With it logits processors are asked
            about drafted tokens too, and about some positions twice: they must depend on nothing but their arguments.
        progress: overrides the option of the same name; a callable is given (done, total) tokens. Beside a
            streamer nothing is shown unless it is asked for here.

        Returns int64 [B, N + new] on the input's device, rows in input order, padded on the right where a row
        ended early; or a `GenerateOutput` with return_dict_in_generate=True. Raises ValueError naming any
        argument that is not supported, before any work is done, and StaleModelError when the model has other
        tensors, modules, hooks or settings than when it was compiled (new values in the same tensors are fine).
        """
        if progress is None:  # a streamer shows the progress already, and a bar would run through its text
            progress = self.sparse_config.progress if streamer is None else False
        call = self._prepare(
            inputs,
            generation_config,
            logits_processor,
            stopping_criteria,
            prefix_allowed_tokens_fn,
            tokenizer=tokenizer,
            seed=seed,
            speculation=speculation,
            **kwargs,
        )
        return run_generate(self._keeper, call, streamer, progress)

    def stream(self, inputs: Any = None, **kwargs: Any) -> Iterator[StreamItem]:
        """Like `generate`, as an iterator of tokens; `row` tells the rows of a batch apart. With `tokenizer=`
        items carry text.

        Arguments are checked at once, generation starts with the first item. Closing the iterator (or
        dropping it) ends its requests. Several streams and calls of `generate` may be open at a time.
        """
        return run_stream(self._keeper, self._prepare(inputs, **kwargs))

    def serve(
        self, max_batch: int | None = None, max_context: int | None = None, *, pool_tokens: int | None = None
    ) -> Engine:
        """A new engine, for those who schedule requests themselves: `add_request`, `step`, `abort`, `suspend`, ...

        max_batch: requests that run at once, and max_context: tokens (prompt + new) of one request; by default the
        options of the same names. pool_tokens: tokens that all requests together can have in memory; by default
        max_batch * max_context. With less, requests get memory as they grow, and the last ones are suspended
        when it runs out.

        ArgumentError: a size that is missing or no positive integer, or a context beyond the model's positions;
        ValueError: it does not fit into free memory.
        """
        self._state.check()
        refuse_autocast(self.device)
        config = replace(
            self.sparse_config,
            max_batch=self.sparse_config.max_batch if max_batch is None else max_batch,
            max_context=self.sparse_config.max_context if max_context is None else max_context,
        )
        for name in ("max_batch", "max_context"):
            if getattr(config, name) is None:
                limit = "an engine needs it, and no option fixes it"
                raise ArgumentError(name, None, limit, f"pass {name}=... to serve()")
        check_context(self.model, config)
        if pool_tokens is not None:
            pool_tokens = check_size("pool_tokens", pool_tokens, "pass pool_tokens=None")
        return self._keeper.engine(config.max_batch, config.max_context, pool_tokens)

    def _prepare(self, *args: Any, **kwargs: Any) -> Call:
        self._state.check()
        refuse_autocast(self.device)
        call = prepare_call(self.model, *args, **kwargs)
        asked = chosen(call.speculation, self.sparse_config.speculation)
        check_speculation(asked, self.program, self.sparse_config.loops_per_step)
        self._keeper.check(call.rows, call.context)
        check_positions(self.model, call.longest_prompt, call.new_tokens)
        return call

    def report(self, contexts: tuple[int, ...] = DEFAULT_CONTEXTS) -> Report:
        """What was rewritten and what it saves: `.render()` for people, `.to_dict()` for programs."""
        return build_report(self, contexts)

    def validate(self) -> float:
        """Compare the compiled program with the model's own generation on a short random prompt.

        Returns the relative error of the logits; raises ValidationError when it is above the dtype's
        tolerance.
        """
        from sparse_compile.validation import validate_program

        self._state.check()
        refuse_autocast(self.device)
        return validate_program(self.model, self._keeper.make_engine)

    def warmup(
        self,
        max_batch: int | None = None,
        max_context: int | None = None,
        progress: bool | ProgressCallback | None = None,
    ) -> float:
        """Compile and capture all that decoding up to `max_batch` sequences of `max_context` tokens needs; by default
        as many as the options of the same names fix, or else 1 of 2,048 tokens (of all positions, if those are fewer).

        Without it the first calls do so as they go. progress: as in `generate`, in steps of the warm-up. Compiled code
        is kept in PyTorch's cache on disk, so a later process is faster. Returns the seconds it took. Raises ValueError
        where memory, the model's positions or the limits of the config do not allow such an engine.
        """
        self._state.check()
        refuse_autocast(self.device)
        config = self.sparse_config
        if max_batch is None:
            max_batch = config.max_batch or 1
        if max_context is None:
            max_context = config.max_context or min(
                _WARM_CONTEXT, position_limit(self.model) or _WARM_CONTEXT
            )
        max_batch = check_size("max_batch", max_batch, "pass for example max_batch=1")
        max_context = check_size("max_context", max_context, "pass for example max_context=2048")
        check_context(self.model, replace(config, max_context=max_context))
        start = time.perf_counter()
        self._keeper.session(max_batch, max_context).warm_up(
            self.sparse_config.progress if progress is None else progress
        )
        return time.perf_counter() - start

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The plain model's forward, unchanged."""
        return self.model.forward(*args, **kwargs)

    @property
    def traced_hooks(self) -> tuple[str, ...]:
        """The forward hooks and replaced forwards that the model had when it was compiled, in words. What they did to
        tensors is in the program, which calls none of them.
        """
        return self._state.traced

    @property
    def config(self) -> Any:
        """The model's own configuration."""
        return self.model.config

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def engine(self) -> Any:
        """The present engine, None before the first generate."""
        session = self._keeper.present
        return None if session is None else session.engine

    @property
    def capacity(self) -> tuple[int, int]:
        """(sequences, tokens of each) that the present engine was made for, or else that max_batch and max_context
        ask for; (0, 0) when neither is there.
        """
        session, config = self._keeper.present, self.sparse_config
        if session is not None:
            return session.rows, session.context
        return (config.max_batch or 1, config.max_context) if config.max_context else (0, 0)

    def to(self, *args: Any, **kwargs: Any) -> CompiledModel:
        """Itself, when nothing changes: the program belongs to its device and dtype."""
        device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
        same_device = device is None or torch.empty(0, device=device).device == self.device
        if same_device and dtype in (None, self.dtype):
            return self
        raise self._refuse_change("to")

    def eval(self) -> CompiledModel:
        """Itself: the program is the model in evaluation mode."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in CompiledModel.__slots__:
            raise AttributeError(name)
        if name in _CHANGES_MODEL:
            raise self._refuse_change(name)
        return getattr(self.model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a CompiledModel cannot be changed; set {name} on its .model instead")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a CompiledModel cannot be copied or pickled; copy its .model and compile that")

    def _refuse_change(self, name: str) -> AttributeError:
        return AttributeError(
            f"{name}() would change the model under its compiled program; "
            "call it on .model, then compile that again"
        )

    def __repr__(self) -> str:
        counts = self.program.counts()
        kinds = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
        retention = self.sparse_config.key_retention if self.sparse_config.enabled else "off"
        return f"CompiledModel({type(self.model).__name__}, key_retention={retention}, {kinds})"
