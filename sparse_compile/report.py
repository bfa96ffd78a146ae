"""What a compiled model does: which attention calls became what, why, and what it reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from sparse_compile.kernels.dispatch import resolve
from sparse_compile.kernels.retention import Retention
from sparse_compile.passes.skinny import survey
from sparse_compile.passes.weights import is_plain, memory, named_tensors
from sparse_compile.runtime.budget import PoolSizes

if TYPE_CHECKING:
    import torch
    from rich.console import Group
    from torch import nn

    from sparse_compile.compiled import CompiledModel
    from sparse_compile.config import SparseConfig
    from sparse_compile.passes.program import Program, Site

KINDS = ("dense", "capture", "consume")
DEFAULT_CONTEXTS = (512, 2048, 8192, 32768)
# Kinds of weights, as their classes are called, whose steps were timed beside those of plain weights. None so far.
MEASURED_KINDS: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LayerRow:
    """One attention module: the kind and the reason of each of its calls, in order of loops, the share of the keys that
    its consumes keep, and whether its calls multiply their result with its gate.
    """

    layer: str
    kinds: tuple[str, ...]
    reasons: tuple[str, ...]
    window: int
    retention: Retention
    gated: bool

    @property
    def looped(self) -> bool:
        return len(self.kinds) > 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "layer": self.layer,
            "looped": self.looped,
            "loops": len(self.kinds),
            "kinds": list(self.kinds),
            "reasons": list(self.reasons),
            "window": self.window,
            "key_retention": float(self.retention.share),
            "fraction": str(self.retention),
            "gated": self.gated,
        }


@dataclass(frozen=True)
class Reads:
    """Bytes of keys and values that decoding one token reads with `context` visible tokens, over all layers
    and loops.

    sparse_bytes: an upper bound, since the query heads that share a KV head may keep the same keys; never
    more than dense.
    """

    context: int
    dense_bytes: int
    sparse_bytes: int

    @property
    def ratio(self) -> float:
        return self.sparse_bytes / self.dense_bytes

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "ratio": self.ratio}


@dataclass(frozen=True)
class Report:
    """Everything `inspect` shows. Sizes in bytes, times in seconds.

    implementation: the kernels that run; implementation_option: what was asked for, such as "auto".
    merged: linear layers that became one product, as tuples of weight names; held_twice: bytes that this could not give
        back; left_alone: those that read one input and did not, with the reason.
    retention: the options; "key_retention" is the largest of all layers where there is one for each ("by_layer").
    gated: attention calls of one forward that multiply their result with its gate, those of the layers that are
        `gated`; gates_left_alone: the layers whose gate stays a product of its own, with the reason.
    skinny: how many linear layers run with kernels of ours at a few rows, where those are the faster ones; None where
        that is off. not_skinny: those that cannot, with the reason.
    quantised: weights that are no plain tensors, by the name of their class: how many ("weights"), their "bytes", and
        whether steps with such weights were "measured"; they run as they compute themselves.
    hooks: forward hooks and replaced forwards that the model had while it was compiled, in words. What they did to
        tensors is in the program; what else they do happened while compiling only.
    speculation: how the model drafts for itself, empty when it does not: "mode", "draft_loops", "rows" of a request at
        once, "asynchronous", and "synchronous_for", the requests whose rounds are read at once all the same.
    budget: what the present engine, or max_batch and max_context, need: "batch", "context", and bytes by name; empty
        when neither is there.
    memory: bytes that the present engine holds by name, empty before the first generate.
    """

    model: str
    loops: int
    rolled: bool
    roll_reason: str
    layers: tuple[LayerRow, ...]
    kv_bytes_per_token: int
    reads: tuple[Reads, ...]
    passes: tuple[tuple[str, float, dict[str, int]], ...]
    merged: tuple[tuple[str, ...], ...]
    held_twice: int
    left_alone: tuple[tuple[tuple[str, ...], str], ...]
    gated: int
    gates_left_alone: tuple[tuple[str, str], ...]
    skinny: int | None
    not_skinny: tuple[tuple[str, str], ...]
    quantised: dict[str, dict[str, Any]]
    hooks: tuple[str, ...]
    retention: dict[str, Any]
    dense_below: int
    implementation: str
    implementation_option: str
    speculation: dict[str, Any]
    budget: dict[str, int]
    memory: dict[str, int]

    @property
    def counts(self) -> dict[str, int]:
        """Number of attention calls of each kind in one forward."""
        found = Counter(kind for layer in self.layers for kind in layer.kinds)
        return {kind: found[kind] for kind in KINDS}

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return {
            "model": self.model,
            "loops": self.loops,
            "rolled": self.rolled,
            "roll_reason": self.roll_reason,
            "layers": [layer.to_dict() for layer in self.layers],
            "counts": self.counts,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "reads": [one.to_dict() for one in self.reads],
            "passes": [
                {"name": name, "seconds": seconds, "counters": counters}
                for name, seconds, counters in self.passes
            ],
            "merged_linears": [list(parts) for parts in self.merged],
            "merged_held_twice": self.held_twice,
            "left_alone_linears": [
                {"weights": list(weights), "reason": reason} for weights, reason in self.left_alone
            ],
            "gated_attention": self.gated,
            "gates_left_alone": [
                {"layer": layer, "reason": reason} for layer, reason in self.gates_left_alone
            ],
            "skinny_products": self.skinny,
            "not_skinny": [{"weight": weight, "reason": reason} for weight, reason in self.not_skinny],
            "quantised": self.quantised,
            "hooks": list(self.hooks),
            "retention": self.retention,
            "dense_below": self.dense_below,
            "implementation": self.implementation,
            "implementation_option": self.implementation_option,
            "speculation": self.speculation,
            "budget": self.budget,
            "memory": self.memory,
        }

    def render(self) -> Group:
        """The report as a rich renderable: `rich.print(report.render())`."""
        from sparse_compile.report_view import render

        return render(self)


def build_report(compiled: CompiledModel, contexts: Sequence[int] = DEFAULT_CONTEXTS) -> Report:
    """The report of a compiled model. contexts: numbers of visible tokens to state the expected reads for."""
    program, config = compiled.program, compiled.sparse_config
    item = compiled.dtype.itemsize
    skinny, not_skinny = survey(program) if config.skinny_products else (None, ())
    return Report(
        model=type(compiled.model).__name__,
        loops=program.loops,
        rolled=program.rolled,
        roll_reason=program.roll_reason,
        layers=tuple(_layers(program.sites)),
        kv_bytes_per_token=sum(_kv_bytes(site, item) for site in program.sites),
        reads=tuple(_reads(program, context, item, config.dense_below) for context in contexts),
        passes=tuple((one.name, one.seconds, dict(one.counters)) for one in program.passes),
        merged=tuple(one.parts for one in program.merged),
        held_twice=sum(one.held_twice for one in program.merged),
        left_alone=tuple((one.weights, one.reason) for one in program.left_alone),
        gated=sum(site.gated for site in program.sites),
        gates_left_alone=tuple((one.layer, one.reason) for one in program.gates_left_alone),
        skinny=skinny,
        not_skinny=not_skinny,
        quantised=_quantised(compiled.model),
        hooks=compiled.traced_hooks,
        retention={
            "key_retention": float(max(config.shares)),
            "fraction": config.retention_text,
            "keep_first": config.keep_first,
            "keep_last": config.keep_last,
            "by_layer": not isinstance(config.retention, Fraction),
            "capture_loop": config.capture_loop,
            "recapture_every": config.recapture_every,
            "enabled": config.enabled,
        },
        dense_below=config.dense_below,
        implementation=resolve(
            config.implementation, compiled.device.type, compiled.dtype, program.sites[0].head_dim
        ),
        implementation_option=config.implementation,
        speculation=_speculation(config, program),
        budget=_budget(compiled),
        memory=_memory(compiled.engine),
    )


def _layers(sites: Iterable[Site]) -> Iterable[LayerRow]:
    by_layer: dict[str, list[Site]] = {}
    for site in sites:
        by_layer.setdefault(site.layer, []).append(site)
    for layer, calls in by_layer.items():
        calls.sort(key=lambda site: site.loop)
        kinds, reasons = tuple(site.kind for site in calls), tuple(site.reason for site in calls)
        yield LayerRow(layer, kinds, reasons, calls[0].window, calls[0].retention, calls[0].gated)


def _kv_bytes(site: Site, item: int) -> int:
    """Bytes of one key and one value of every KV head at a site."""
    return 2 * site.kv_heads * site.head_dim * item


def _reads(program: Program, context: int, item: int, dense_below: int) -> Reads:
    dense = sparse = 0
    for site in program.sites:
        visible = min(context, site.window) if site.window else context
        whole = visible * _kv_bytes(site, item)
        dense += whole
        if site.kind == "consume" and context >= dense_below:
            kept = site.retention.count(context)
            whole = min(whole, 2 * site.heads * kept * site.head_dim * item)
        sparse += whole
    return Reads(context, dense, sparse)


def _quantised(model: nn.Module) -> dict[str, dict[str, Any]]:
    by_kind: dict[str, dict[int, torch.Tensor]] = {}
    for tensor in named_tensors(model).values():
        if not is_plain(tensor):
            by_kind.setdefault(type(tensor).__name__, {})[id(tensor)] = tensor
    return {
        kind: {"weights": len(found), "bytes": memory(found.values()), "measured": kind in MEASURED_KINDS}
        for kind, found in by_kind.items()
    }


def _speculation(config: SparseConfig, program: Program) -> dict[str, Any]:
    asked = config.speculation
    if asked is None:
        return {}
    asynchronous = bool(config.async_steps)
    return {
        "mode": asked.mode,
        "draft_loops": asked.draft_loops,
        "rows": asked.rows(program.loops),
        "asynchronous": asynchronous,
        "synchronous_for": "requests with a logits processor" if asynchronous else "all requests",
    }


def _budget(compiled: CompiledModel) -> dict[str, int]:
    config, program = compiled.sparse_config, compiled.program
    rows, context = compiled.capacity
    if not context:
        return {}
    asked = config.speculation
    block = 1 if asked is None else asked.rows(program.loops)
    sizes = PoolSizes(program.sites, config.key_bucket, config.page_size, compiled.dtype, block)
    weights = memory(named_tensors(compiled.model).values())
    needs = {"weights": weights, **sizes.needs(rows, context)}
    named = {name.replace(" ", "_").lower(): size for name, size in needs.items()}
    return {"batch": rows, "context": context, **named, "total": sum(needs.values())}


def _memory(engine: Any) -> dict[str, int]:
    if engine is None:
        return {}
    pools = {"kv_pool": engine.pool, "reference_store": engine.store}
    return {name: int(pool.bytes) for name, pool in pools.items() if pool is not None}


def format_bytes(size: float) -> str:
    """Bytes for people: "768.0 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
