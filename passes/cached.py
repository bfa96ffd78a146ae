"""The passes over a compiled forward with a cache: from the graph that Dynamo made to one with our ops.

The graph belongs to the user's own model and keeps its cache, its masks and its inputs; attention calls of one query
over a cache change, and the linear layers of a graph that has such calls. A graph of a prefill is left as it is.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import fx

from ..kernels.skinny import MAX_ROWS
from .base import Compilation, Options, Pass, PassManager
from .cached_grammar import check_cached
from .cached_layers import layers_of
from .cached_rewrite import RewriteCalls
from .cached_schedule import ScheduleCalls
from .calls import AttentionCall, Unmatched, find_calls
from .errors import PassError
from .nodes import cache_inputs, fake, fake_maybe, operation, size_hint_maybe
from .program import PassRecord
from .sites import number_calls, unscheduled_site
from .skinny import Replaced, operands, replace_linears, why_not
from .values import Values

WindowOf = Callable[[AttentionCall], int]
_ROOT = re.compile(r"^[LG](?:\[[^\]]*\])+(?:\.args\[\d+\])?\.?")
"""The variable that holds a model: L['self'], G['MODEL'], L['models'][0], L['partial'].args[0]."""
_MODULES = re.compile(r"_modules\['([^']*)'\]")
GRADIENTS = "gradients flow through it; decode under torch.no_grad() or torch.inference_mode()"
NO_PAST = "there is no past: its keys are those of this step"


@dataclass
class CachedCompilation(Compilation):
    """A compilation of one graph from Dynamo.

    Attributes:
        window_of: the sliding window of a call, 0 for none; asked of the front end, which knows the modules.
        calls: the calls that can be rewritten, one per site.
        left: what was found and is left alone, with the reason.
        products: what became of the linear layers of a decode graph; None where they were not to change.
    """

    window_of: WindowOf = field(default=lambda call: 0)
    calls: tuple[AttentionCall, ...] = ()
    left: tuple[Unmatched, ...] = ()
    products: Replaced | None = None
    prefill: bool = False

    @property
    def kind(self) -> str:
        """What the graph is: "decode", "prefill", or "other" where no call could choose between keys."""
        if self.prefill:
            return "prefill"
        past = self.calls or [one for one in self.left if one.reason != NO_PAST]
        return "decode" if past else "other"


def _place_of(node: fx.Node) -> tuple[str, str]:
    """Root and path of the innermost module that made a node: "L['model']", "layers.0.attention"; "" for none."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = _MODULES.sub(r"\1", str(stack[-1][0])) if stack else ""
    rest = _ROOT.sub("", path)
    return path.removesuffix(rest), rest


def module_of(node: fx.Node) -> str:
    """The path of the innermost module that made a node, as its model names it; "" for none."""
    return _place_of(node)[1]


def _layer_names(calls: tuple[AttentionCall, ...], layers: list[int]) -> list[str]:
    """A name for the layer of each call: the path of the module in its first call, with its root where a graph has
    several. Layers of one module are numbered.
    """
    places = [_place_of(call.node) for call in calls]
    several = len({root for root, _ in places}) > 1
    names: dict[int, str] = {}
    taken: Counter[str] = Counter()
    for layer, (root, path) in zip(layers, places, strict=True):
        if layer in names:
            continue
        name = (root + path if several else path) or root.removesuffix(".") or "function"
        names[layer] = f"{name}#{taken[name]}" if taken[name] else name
        taken[name] += 1
    return [names[layer] for layer in layers]


class FindCalls(Pass):
    """Fills `calls` and `left`. A graph without a call of one query over a cache is a prefill if some call has more."""

    name = "find_calls"

    def run(self, compilation: Compilation) -> dict[str, int]:
        assert isinstance(compilation, CachedCompilation)
        found = list(find_calls(compilation.graph.graph))
        understood = [call for call in found if isinstance(call, AttentionCall)]
        cached = [call.single and not call.fresh and bool(cache_inputs(call.key)) for call in understood]
        compilation.prefill = not any(cached) and not all(call.single for call in understood)
        left = [one for one in found if isinstance(one, Unmatched)]
        calls = []
        for call in understood:
            reason = _reason_to_leave(call, compilation)
            if reason:
                left.append(Unmatched(call.node, reason))
            else:
                calls.append(call)
        compilation.calls, compilation.left = tuple(calls), tuple(left)
        return {"found": len(found), "rewritable": len(calls)}


def _reason_to_leave(call: AttentionCall, compilation: CachedCompilation) -> str:
    if not call.single:
        return "prefill: it has several queries" if compilation.prefill else "it has several queries"
    if call.fresh:
        return NO_PAST
    if not cache_inputs(call.key) or not cache_inputs(call.value):
        return "its keys do not come from a cache"
    if fake(call.node).requires_grad:
        return GRADIENTS
    return ""


class LabelCalls(Pass):
    """Fills `sites`, one per call: its layer, how often that was called before, and its sizes."""

    name = "label_calls"

    def run(self, compilation: Compilation) -> dict[str, int]:
        assert isinstance(compilation, CachedCompilation)
        layers = layers_of(compilation.calls, Values(compilation.graph.graph))
        paths = _layer_names(compilation.calls, layers)
        sites = []
        for plane, (call, (path, loop, loops)) in enumerate(
            zip(compilation.calls, number_calls(paths), strict=True)
        ):
            query, key = fake(call.query), fake(call.key)
            numbers = {"scale": call.scale, "window": compilation.window_of(call), "softcap": call.softcap}
            sites.append(unscheduled_site(path, loop, loops, plane, query, key, **numbers))
        compilation.sites = tuple(sites)
        compilation.markers = tuple(call.node for call in compilation.calls)
        return {"sites": len(sites), "looped": sum(site.loops > 1 for site in sites)}


class FewRows(Pass):
    """Linear layers of a decode graph into products of a few rows, as `skinny` says, with the norms that those take
    along, where the option asks for them.

    A symbolic number of rows is judged by the one that the graph is compiled for, without a guard: the ops are right
    for any number, beyond MAX_ROWS with the library's products.
    """

    name = "few_rows"

    def run(self, compilation: Compilation) -> dict[str, int]:
        assert isinstance(compilation, CachedCompilation)
        if not compilation.options.skinny_products or compilation.kind != "decode":
            return {}
        made = compilation.products = replace_linears(compilation.graph.graph, _why_not_few)
        return dict(made.counts, norms=made.norms, library=len(made.left))

    def ensure(self, compilation: Compilation) -> None:
        assert isinstance(compilation, CachedCompilation)
        if compilation.products is None:
            return
        known = {node for node, _ in compilation.products.left}
        for node in compilation.graph.graph.nodes:
            if operation(node) == "linear" and node not in known:
                raise PassError(f"the linear layer {node.name} was neither replaced nor given a reason")


def _why_not_few(node: fx.Node) -> str:
    x = fake_maybe(operands(node)[0])
    rows = None if x is None else size_hint_maybe(x.shape[:-1])
    if rows is None:
        return "its number of rows is not known"
    if rows > MAX_ROWS:
        return f"it has {rows} rows, more than {MAX_ROWS}"
    value = fake_maybe(node)
    return GRADIENTS if value is None or value.requires_grad else why_not(node)


PASSES = (FindCalls(), LabelCalls(), ScheduleCalls(), RewriteCalls(), FewRows())


def rewrite_graph(
    graph: fx.GraphModule, options: Options, window_of: WindowOf, number: int = 0
) -> tuple[CachedCompilation, tuple[PassRecord, ...]]:
    """Run all passes on `graph`, in place. `number` tells the dumps of several graphs apart.

    Raises:
        OptionError: `capture_loop` is not below the number of loops.
        PassError: a bug of the compiler.
    """
    if options.dump_dir is not None:
        options = replace(options, dump_dir=options.dump_dir / f"graph_{number:02d}")
    compilation = CachedCompilation(graph, options, window_of=window_of)
    records = PassManager(PASSES, check_cached).run(compilation)
    graph.recompile()
    return compilation, records
