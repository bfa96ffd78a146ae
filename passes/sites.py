"""Label every marker with its layer and loop.

%site   : [nn_module_stack: model.layers.3.self_attn]      -> layer model.layers.3.self_attn, loop 0 of 4
%site_24: [nn_module_stack: model.layers.3.self_attn@1]    -> layer model.layers.3.self_attn, loop 1 of 4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from .base import Compilation, Pass
from .errors import UnsupportedModel
from .graph import SITE, is_call, module_path
from .program import Site
from .trace import strip_wrapper


def number_calls(paths: Sequence[str]) -> list[tuple[str, int, int]]:
    """`(path, loop, loops)` for each call, given the module of each in execution order."""
    calls, seen, found = Counter(paths), Counter[str](), []
    for path in paths:
        found.append((path, seen[path], calls[path]))
        seen[path] += 1
    return found


def unscheduled_site(
    layer: str, loop: int, loops: int, plane: int, query: torch.Tensor, key: torch.Tensor, **numbers: Any
) -> Site:
    """A dense site before anything is scheduled. query [., H, ..., D], key [., Hkv, ..., D]; numbers: its scale, window
    and soft cap.
    """
    return Site(
        name=f"{layer}@{loop}",
        layer=layer,
        loop=loop,
        loops=loops,
        plane=plane,
        store_site=None,
        kind="dense",
        reason="not scheduled yet",
        heads=int(query.shape[1]),
        kv_heads=int(key.shape[1]),
        head_dim=int(query.shape[-1]),
        **numbers,
    )


class LabelSites(Pass):
    """Fills `compilation.sites`, all of kind dense for now, and refuses models that have nothing to gain."""

    name = "sites"

    def run(self, compilation: Compilation) -> dict[str, int]:
        markers = tuple(node for node in compilation.graph.graph.nodes if is_call(node, SITE))
        labels = [module_path(node) for node in markers]
        if len(set(labels)) != len(labels):
            path = next(label for label, count in Counter(labels).items() if count > 1)[0]
            raise UnsupportedModel(f"{strip_wrapper(path)} attends twice in one call.", strip_wrapper(path))
        numbered = number_calls([path for path, _ in labels])
        sites = []
        for plane, (node, (path, loop, loops)) in enumerate(zip(markers, numbered, strict=True)):
            query, key = node.args[0].meta["val"], node.args[1].meta["val"]
            scale, softcap = float(node.kwargs["scale"]), float(node.kwargs["softcap"])
            numbers = {"scale": scale, "window": int(node.kwargs["window"]), "softcap": softcap}
            sites.append(unscheduled_site(strip_wrapper(path), loop, loops, plane, query, key, **numbers))
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
