"""Label every marker with its layer and loop.

%site   : [nn_module_stack: model.layers.3.self_attn]      -> layer model.layers.3.self_attn, loop 0 of 4
%site_24: [nn_module_stack: model.layers.3.self_attn@1]    -> layer model.layers.3.self_attn, loop 1 of 4
"""

from __future__ import annotations

from collections import Counter

from .base import Compilation, Pass
from .errors import UnsupportedModel
from .graph import SITE, is_call, module_path
from .program import Site
from .trace import strip_wrapper


class LabelSites(Pass):
    """Fills `compilation.sites`, all of kind dense for now, and refuses models that have nothing to gain."""

    name = "sites"

    def run(self, compilation: Compilation) -> dict[str, int]:
        markers = tuple(node for node in compilation.graph.graph.nodes if is_call(node, SITE))
        labels = [module_path(node) for node in markers]
        calls = Counter(path for path, _ in labels)
        if len(set(labels)) != len(labels):
            path = next(label for label, count in Counter(labels).items() if count > 1)[0]
            raise UnsupportedModel(f"{strip_wrapper(path)} attends twice in one call.", strip_wrapper(path))
        seen: Counter[str] = Counter()
        sites = []
        for plane, (node, (path, _)) in enumerate(zip(markers, labels, strict=True)):
            loop = seen[path]
            seen[path] += 1
            query, key = node.args[0].meta["val"], node.args[1].meta["val"]
            layer = strip_wrapper(path)
            sites.append(
                Site(
                    name=f"{layer}@{loop}",
                    layer=layer,
                    loop=loop,
                    loops=calls[path],
                    plane=plane,
                    store_site=None,
                    kind="dense",
                    reason="not scheduled yet",
                    heads=int(query.shape[1]),
                    kv_heads=int(key.shape[1]),
                    head_dim=int(query.shape[2]),
                    scale=float(node.kwargs["scale"]),
                    window=int(node.kwargs["window"]),
                    softcap=float(node.kwargs["softcap"]),
                )
            )
        compilation.sites, compilation.markers = tuple(sites), markers
        refuse_hopeless(compilation.sites)
        return {"sites": len(sites), "looped": sum(site.loops > 1 for site in sites)}


def refuse_hopeless(sites: tuple[Site, ...]) -> None:
    """Raises UnsupportedModel where no layer is looped, or one pool and one store cannot serve all layers."""
    if all(site.loops == 1 for site in sites):
        raise UnsupportedModel(
            "no attention layer runs more than once per token: this is not a looped model, and nothing can be saved."
        )
    shapes = {(site.kv_heads, site.head_dim) for site in sites}
    if len(shapes) > 1:
        odd = next(
            site for site in sites if (site.kv_heads, site.head_dim) != (sites[0].kv_heads, sites[0].head_dim)
        )
        raise UnsupportedModel(
            f"{odd.layer} has {odd.kv_heads} KV heads of {odd.head_dim} where {sites[0].layer} has "
            f"{sites[0].kv_heads} of {sites[0].head_dim}; one KV pool serves one shape.",
            odd.layer,
        )
    if len({site.heads for site in sites}) > 1:
        raise UnsupportedModel(
            "layers differ in their number of query heads; one reference store serves one number."
        )
