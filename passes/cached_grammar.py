"""What must hold of a graph with cached ops: every consume takes all that one earlier capture of its layer made."""

from __future__ import annotations

import operator

from torch import fx

from .base import Compilation
from .cached_rewrite import HELD, OPS
from .errors import PassError
from .schedule import check_order


def check_cached(compilation: Compilation) -> None:
    """Raise PassError unless all that exists so far holds; the manager asks after every pass."""
    check_order(compilation.sites)
    for node in compilation.graph.graph.nodes:
        if node.op == "call_function" and node.target is OPS["consume"]:
            _check_consume(node)


def _check_consume(node: fx.Node) -> None:
    held = node.args[-HELD:]
    sources = [arg.args[0] for arg in held if isinstance(arg, fx.Node) and arg.target is operator.getitem]
    places = [arg.args[1] for arg in held if isinstance(arg, fx.Node) and arg.target is operator.getitem]
    captures = {
        source for source in sources if isinstance(source, fx.Node) and source.target is OPS["capture"]
    }
    if len(captures) != 1 or places != list(range(1, 1 + HELD)):
        raise PassError(f"{node.name} does not take its keys from one capture")
    (capture,) = captures
    if str(capture.meta["site"]).rpartition("@")[0] != str(node.meta["site"]).rpartition("@")[0]:
        raise PassError(f"{node.name} of {node.meta['site']} reads what {capture.meta['site']} captured")
    if capture.args[3:6] != node.args[3:6]:
        raise PassError(f"{node.name} and {capture.name} number their keys by different tables")
