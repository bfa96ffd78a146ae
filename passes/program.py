"""What the passes produce: sites, the proved loop, program variants made of stages, and the program that holds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from torch import fx

from ..kernels.retention import Retention

PLAN_INPUTS = ("block_table", "row_seq", "row_position", "row_length", "row_loop")
POOL_INPUTS = ("k_pool", "v_pool")
STORE_INPUTS = ("index", "count", "mass", "o_ref", "c_ref")
MODE_INPUTS = {"capture": "row_mode_capture", "consume": "row_mode_consume"}
DEPTH_MODE = "row_mode_site"

ALL_KEYS = Retention(1, 1)


def depth_mode_input(number: int) -> str:
    """Input of the variant "depth" with each row's mode at the `number`-th site of a body."""
    return f"{DEPTH_MODE}{number}"


@dataclass(frozen=True)
class Site:
    """One attention call of one forward.

    Attributes:
        name: `layer` with its loop, e.g. "model.layers.3.self_attn@2".
        layer: path of the attention module.
        loop: which call of this module it is, from 0.
        loops: how many calls of this module one forward makes; 1 means the layer is not looped.
        plane: KV plane, equal to the site's place in execution order.
        store_site: line of the reference store, for layers that capture.
        kind: "dense", "capture" or "consume".
        reason: why, in one clause.
        scale, window, softcap: the attention's own numbers; window 0 and softcap 0.0 mean none.
        retention: the share of the visible keys that a consume of this layer keeps.
        gated: its op multiplies the result with a gate.
    """

    name: str
    layer: str
    loop: int
    loops: int
    plane: int
    store_site: int | None
    kind: str
    reason: str
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int
    softcap: float
    retention: Retention = ALL_KEYS
    gated: bool = False


@dataclass(frozen=True)
class PassRecord:
    """One pass that ran: its name, wall time in seconds, and what it counted."""

    name: str
    seconds: float
    counters: dict[str, int]


@dataclass(frozen=True)
class MergedLinears:
    """Linear layers that became one: the names of their weights, that of the joined one, calls per forward, and bytes
    that could not be given back, since other tensors of the model lie in the same storage.
    """

    parts: tuple[str, ...]
    weight: str
    calls: int
    held_twice: int = 0


@dataclass(frozen=True)
class LeftAlone:
    """Weights of linear layers that read the same input and were not merged, with the reason in one clause."""

    weights: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class GateLeftAlone:
    """An attention layer whose calls do not take the gate of their result along, with the reason in one clause."""

    layer: str
    reason: str


@dataclass(frozen=True)
class Carried:
    """A value that one body hands to the next: where it starts, and the place in the body that renews it."""

    initial: fx.Node
    offset: int


@dataclass(frozen=True)
class Roll:
    """A loop proved in the traced graph: body i is nodes[start + i * length : start + (i + 1) * length].

    Attributes:
        repeats: number of bodies.
        first_site, period: the sites of body i are first_site + i * period ... + period - 1.
        carried: values handed from body to body.
        invariant: values from before the loop that every body reads.
        exported: offsets in the last body that later nodes read.
    """

    start: int
    length: int
    repeats: int
    first_site: int
    period: int
    carried: tuple[Carried, ...]
    invariant: tuple[fx.Node, ...]
    exported: tuple[int, ...]


@dataclass(frozen=True)
class Stage:
    """One graph of a variant, run on named values.

    Attributes:
        name: "trunk", "prologue", "body 2 (consume)", "epilogue" or "head".
        module: the graph; called with `inputs` in order, returns a tuple for `outputs`.
        inputs, outputs: names in the executor's environment.
        loop: value of the plan input `row_loop` while this stage runs.
        any_depth: each row brings its own `row_loop`, and the stage is run once per loop.
        row_inputs: for the head: the inputs whose first dimension is rows, reduced to the rows that need logits.
        row_outputs: those of the outputs whose first dimension is rows.
    """

    name: str
    module: fx.GraphModule
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loop: int = 0
    row_inputs: frozenset[str] = frozenset()
    row_outputs: frozenset[str] = frozenset()
    any_depth: bool = False

    def text(self) -> str:
        return (
            f"# {self.name}: ({', '.join(self.inputs)}) -> ({', '.join(self.outputs)})\n{self.module.graph}"
        )


@dataclass(frozen=True)
class Variant:
    """One way to run the model over a row batch: all dense, by the schedule, or with a mode per row."""

    name: str
    stages: tuple[Stage, ...]

    def op_counts(self) -> Counter[str]:
        """How many of our ops one step of this variant runs."""
        return Counter(
            node.target._schema.name.split("::")[1]
            for stage in self.stages
            for node in stage.module.graph.nodes
            if node.op == "call_function" and str(getattr(node.target, "namespace", "")) == "sparse_compile"
        )


@dataclass(frozen=True)
class Program:
    """A compiled model: what was found, what was rewritten, and the variants that run it."""

    sites: tuple[Site, ...]
    traced: fx.GraphModule
    variants: dict[str, Variant]
    roll: Roll | None
    roll_reason: str
    passes: tuple[PassRecord, ...] = field(default=())
    merged: tuple[MergedLinears, ...] = ()
    left_alone: tuple[LeftAlone, ...] = ()
    gates_left_alone: tuple[GateLeftAlone, ...] = ()

    @property
    def rolled(self) -> bool:
        return self.roll is not None

    @property
    def loops(self) -> int:
        """The largest number of calls of one layer."""
        return max(site.loops for site in self.sites)

    @property
    def body_sites(self) -> tuple[tuple[Site, ...], ...]:
        """Of each body, those before the loop with the first; nothing for a program that is not rolled."""
        roll = self.roll
        if roll is None:
            return ()
        ends = [roll.first_site + roll.period * (body + 1) for body in range(roll.repeats)]
        return tuple(self.sites[start:end] for start, end in zip([0, *ends], ends, strict=False))

    @property
    def last_sites(self) -> tuple[Site, ...]:
        """Those behind the loop; none in a program that is not rolled."""
        roll = self.roll
        return () if roll is None else self.sites[roll.first_site + roll.period * roll.repeats :]

    @property
    def planes(self) -> int:
        return len(self.sites)

    @property
    def store_sites(self) -> int:
        """Lines of the reference store; 0 when nothing captures."""
        return len({site.store_site for site in self.sites if site.store_site is not None})

    @property
    def vocabulary(self) -> int:
        """Number of logits per row."""
        output = self.traced.graph.output_node().args[0]
        assert isinstance(output, fx.Node)
        return int(output.meta["val"].shape[-1])

    @property
    def retention(self) -> Retention | None:
        """The largest share that any layer keeps; None when nothing captures."""
        kept = [site.retention for site in self.sites if site.kind == "capture"]
        return max(kept, key=lambda one: one.share, default=None)

    @property
    def sparse(self) -> bool:
        return any(site.kind == "consume" for site in self.sites)

    def depth_kinds(self) -> tuple[tuple[str, ...], ...]:
        """Kind of the n-th site of a body in each of the bodies; empty for a program that is not rolled."""
        roll = self.roll
        if roll is None:
            return ()
        end = roll.first_site + roll.repeats * roll.period
        firsts = range(roll.first_site, roll.first_site + roll.period)
        return tuple(tuple(site.kind for site in self.sites[at : end : roll.period]) for at in firsts)

    def counts(self) -> dict[str, int]:
        found = Counter(site.kind for site in self.sites)
        return {kind: found[kind] for kind in ("dense", "capture", "consume")}

    def graph_text(self, which: str) -> str:
        """The traced graph ("before"), what a decode step runs ("after"), or the distinct loop bodies ("body").

        Raises:
            ValueError: "body" of a program that is not rolled, with the reason; an unknown name.
        """
        stages = self.variants["sparse" if self.sparse else "dense"].stages
        if which == "before":
            return str(self.traced.graph)
        if which == "after":
            return "\n\n".join(stage.text() for stage in stages)
        if which != "body":
            raise ValueError(f"graph={which!r}: choose one of before, after, body.")
        if not self.rolled:
            raise ValueError(f"graph='body': the loop is not rolled, {self.roll_reason}. Use 'after'.")
        bodies = {id(stage.module): stage for stage in reversed(stages) if stage.name.startswith("body")}
        return "\n\n".join(stage.text() for stage in reversed(bodies.values()))
