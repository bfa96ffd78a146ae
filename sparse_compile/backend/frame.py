"""What only the compiled frame knows: the modules and cache layers behind a graph's nodes.

A graph from Dynamo names them by their place in the frame ("L['self'].model.layers.0.self_attn"), and a sliding window
is an attribute of theirs that leaves no trace in the graph while the cache is shorter than the window.
"""

from __future__ import annotations

import re
from typing import Any

from sparse_compile.passes.calls import AttentionCall
from sparse_compile.passes.nodes import cache_inputs

_NUMBER = re.compile(r"\.(\d+)(?=[.\[]|$)")


class Frame:
    """Looks up what stands behind names of one frame: its local variables L and its global ones G."""

    def __init__(self, variables: dict[str, Any], global_variables: dict[str, Any]) -> None:
        self.variables = {"L": variables, "G": global_variables}

    @classmethod
    def current(cls) -> Frame:
        """The frame of the function that is being compiled; an empty one outside of a compilation by Dynamo."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        try:
            root = InstructionTranslator.current_tx().output.root_tx
            return cls(dict(root.f_locals), root.f_globals)
        except AttributeError:  # no compilation is going on
            return cls({}, {})

    def module_maybe(self, path: str) -> Any:
        """The module at a path of `nn_module_stack` such as "L['models'][0].layers.1.attention", or None."""
        return self._value(_NUMBER.sub(r"._modules['\1']", path))

    def holder_maybe(self, source: Any) -> Any:
        """The object that has a graph input as an attribute or item, such as a layer of a cache; None if unknown."""
        base = getattr(source, "base", None)
        if base is None:
            return None
        name = base.name() if callable(base.name) else base.name
        return self._value(name)

    def _value(self, name: str) -> Any:
        try:
            return eval(name, {"__builtins__": {}}, self.variables)
        except Exception:  # a name that is no plain path, such as a call; nothing is known about it then
            return None

    def window_of(self, call: AttentionCall) -> int:
        """The sliding window of a call: its attention module's, or its cache layer's; 0 if neither has one."""
        stack = list((call.node.meta.get("nn_module_stack") or {}).values())
        module = self.module_maybe(str(stack[-1][0])) if stack else None
        window = getattr(module, "sliding_window", None)
        if isinstance(window, int) and window > 0:
            return window
        for node in cache_inputs(call.key):
            source = getattr(node, "_dynamo_source", None) or getattr(
                node.meta.get("grapharg"), "source", None
            )
            holder = self.holder_maybe(source)
            if getattr(holder, "is_sliding", False) is True:
                length = getattr(holder, "sliding_window", 0) or getattr(holder, "max_cache_len", 0)
                return int(length or 1)
        return 0
