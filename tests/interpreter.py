"""Triton's interpreter without what it does again and again: by itself it patches `triton.language`, member by member,
in each call of a device function, though the launch around it has done so, and makes a table of dtypes to look up one.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any


class _PatchedOnce:
    """Stands in for the interpreter's `_patch_lang`: patches once in a launch for each set of modules to be patched."""

    def __init__(self, patch: Callable[[FunctionType], Any], modules: tuple[Any, ...]) -> None:
        self._patch, self._modules = patch, modules
        self._done: set[tuple[int, ...]] = set()

    def __call__(self, function: FunctionType) -> Any:
        seen = function.__globals__.values()
        found = tuple(at for at, module in enumerate(self._modules) if any(one is module for one in seen))
        if found in self._done:
            return None  # to the call of a device function: it leaves it to the launch to restore everything
        scope = self._patch(function)
        if not self._done:
            self._forget_when_restored(scope)
        self._done.add(found)
        return scope

    def _forget_when_restored(self, scope: Any) -> None:
        restore = scope.restore

        def restoring() -> None:
            self._done.clear()
            restore()

        scope.restore = restoring


def _remembering(dtype_of: Callable[[Any], Any], block_type: type) -> Callable[[Any], Any]:
    """The interpreter's `_get_np_dtype`: a scalar type's name says which."""
    known: dict[str, Any] = {}

    def remembering(kind: Any) -> Any:
        scalar = kind.element_ty if isinstance(kind, block_type) else kind
        if scalar.name not in known:
            known[scalar.name] = dtype_of(scalar)
        return known[scalar.name]

    return remembering


def shorten() -> None:
    """Has the interpreter do both once."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not (hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_get_np_dtype")):
        return  # another version of Triton: it takes longer
    if not isinstance(interpreter._patch_lang, _PatchedOnce):
        interpreter._patch_lang = _PatchedOnce(interpreter._patch_lang, (tl, tl.core))
        interpreter._get_np_dtype = _remembering(interpreter._get_np_dtype, tl.block_type)
