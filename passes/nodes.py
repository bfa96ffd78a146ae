"""Reading graphs, in which one operation has many spellings: those that Dynamo hands to a backend, and exported ones.

`a @ b`, `torch.matmul(a, b)` and `a.matmul(b)` are three targets; `operation` gives them one name. Shapes are those of
the fake values that tracers leave on their nodes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor

F = torch.nn.functional
aten = torch.ops.aten
PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
"""Types of values that are nothing more than their numbers."""

_FUNCTIONS: dict[Any, str] = {
    aten._to_copy.default: "cast",
    aten.add.Tensor: "add",
    aten.cat.default: "cat",
    aten.chunk.default: "chunk",
    aten.linear.default: "linear",
    aten.mean.dim: "mean",
    aten.mul.Tensor: "mul",
    aten.neg.default: "neg",
    aten.pow.Tensor_Scalar: "pow",
    aten.reshape.default: "reshape",
    aten.rms_norm.default: "rms_norm",
    aten.rsqrt.default: "rsqrt",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.slice.Tensor: "slice",
    aten.split.Tensor: "split",
    aten.square.default: "square",
    aten.squeeze.dim: "squeeze",
    aten.sum.dim_IntList: "sum",
    aten.to.dtype: "cast",
    aten.to.dtype_layout: "cast",
    aten.transpose.int: "transpose",
    aten.type_as.default: "cast",
    aten.unsqueeze.default: "unsqueeze",
    aten.view.default: "reshape",
    F.scaled_dot_product_attention: "sdpa",
    torch.matmul: "matmul",
    torch.bmm: "matmul",
    operator.matmul: "matmul",
    operator.mul: "mul",
    operator.imul: "mul",
    torch.mul: "mul",
    operator.truediv: "div",
    operator.itruediv: "div",
    torch.div: "div",
    operator.add: "add",
    operator.iadd: "add",
    torch.add: "add",
    torch.softmax: "softmax",
    F.softmax: "softmax",
    F.dropout: "dropout",
    torch.dropout: "dropout",
    torch.tanh: "tanh",
    torch.where: "where",
    torch.masked_fill: "masked_fill",
    torch.transpose: "transpose",
    torch.permute: "permute",
    torch.reshape: "reshape",
    torch.repeat_interleave: "repeat_interleave",
    torch.cat: "cat",
    torch.unsqueeze: "unsqueeze",
    operator.getitem: "getitem",
    getattr: "getattr",
}
_METHODS = {
    "__matmul__": "matmul",
    "bmm": "matmul",
    "mul_": "mul",
    "div_": "div",
    "add_": "add",
    "swapaxes": "transpose",
    "view": "reshape",
    "float": "cast",
    "to": "cast",
    "type": "cast",
    "type_as": "cast",
    "half": "cast",
    "bfloat16": "cast",
    "double": "cast",
}


def operation(node: fx.Node) -> str:
    """One name for all spellings of an operation; "" for what is no call."""
    if node.op == "call_function":
        known = _FUNCTIONS.get(node.target)
        return known if known is not None else str(getattr(node.target, "__name__", node.target))
    if node.op == "call_method":
        return _METHODS.get(str(node.target), str(node.target))
    return ""


def argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    """An argument that may have been given by place or by name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def fake_maybe(node: Any) -> torch.Tensor | None:
    """The fake tensor that stands for a node's value, if it is one."""
    if not isinstance(node, fx.Node):
        return None
    value = node.meta.get("example_value", node.meta.get("val"))
    return value if isinstance(value, torch.Tensor) else None


def fake(node: fx.Node) -> torch.Tensor:
    found = fake_maybe(node)
    assert found is not None, f"node {node.name} carries no tensor"
    return found


def same_sizes(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether sizes are equal for every value of their symbols; asking adds no guard."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    pairs = zip(these, those, strict=False)
    return len(these) == len(those) and all(statically_known_true(mine == theirs) for mine, theirs in pairs)


def size_hint_maybe(sizes: Sequence[Any]) -> int | None:
    """How many elements a shape has where its symbols are what the graph is compiled for; None where one has no such
    value. Asking adds no guard.
    """
    hints = [size if isinstance(size, int) else size.node.hint for size in sizes]
    return None if any(hint is None for hint in hints) else math.prod(map(int, hints))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def number_maybe(value: Any) -> float | None:
    """A plain number, also one that `dynamic=True` made an input of the graph: reading it fixes it by a guard."""
    if is_number(value):
        return float(value)
    held = value.meta.get("example_value") if isinstance(value, fx.Node) else None
    return float(held) if isinstance(held, torch.SymFloat | torch.SymInt) else None


def scalar_operand(node: fx.Node) -> tuple[fx.Node, float] | None:
    """`(x, c)` of a product, quotient or sum of a tensor and a plain number; for a quotient c divides."""
    if node.kwargs.get("rounding_mode") is not None or not is_plain_sum(node):
        return None
    first, second = argument(node, 0, "input"), argument(node, 1, "other")
    if fake_maybe(first) is not None and (factor := number_maybe(second)) is not None:
        return first, factor
    if (
        operation(node) != "div"
        and fake_maybe(second) is not None
        and (factor := number_maybe(first)) is not None
    ):
        return second, factor
    return None


def is_plain_sum(node: fx.Node) -> bool:
    """Whether a sum takes its second operand once, as nearly all do; true of what is no sum."""
    return bool(node.kwargs.get("alpha", 1) == 1)


def untransposed(node: fx.Node) -> fx.Node | None:
    """x of `x.transpose(-2, -1)` in any spelling, for x with four dimensions."""
    value = fake_maybe(node)
    if value is None or value.dim() != 4:
        return None
    source = argument(node, 0, "input")
    if not isinstance(source, fx.Node):
        return None
    name = operation(node)
    if name == "transpose":
        dims = {int(argument(node, 1, "dim0")) % 4, int(argument(node, 2, "dim1")) % 4}
        return source if dims == {2, 3} else None
    if name == "permute":
        dims = argument(node, 1, "dims")
        given = dims if isinstance(dims, tuple | list) else node.args[1:]
        return source if [int(d) % 4 for d in given] == [0, 1, 3, 2] else None  # type: ignore[arg-type]
    if name == "getattr" and node.args[1] == "mT":
        return source
    return None


def without_casts(node: fx.Node) -> fx.Node:
    """The value before casts and copies that keep its shape."""
    while operation(node) in ("cast", "contiguous", "clone") and isinstance(_source(node), fx.Node):
        node = _source(node)
    return node


def _source(node: fx.Node) -> Any:
    """The first argument, by place or by name."""
    return argument(node, 0, "input")


def unrepeated(node: fx.Node) -> fx.Node:
    """The KV heads before they were repeated for their query heads; the node itself if they were not.

    Both spellings: `x[:, :, None].expand(...).reshape(...)` and `x.repeat_interleave(n, 1)`.
    """
    node = without_casts(node) if operation(node) in ("contiguous", "clone") else node
    name = operation(node)
    if name == "repeat_interleave":
        source, dim = _source(node), argument(node, 2, "dim")
        given = argument(node, 1, "repeats")
        if isinstance(source, fx.Node) and isinstance(given, int) and dim in (1, -3):
            return source
    spread_node = _source(node)
    if name != "reshape" or not isinstance(spread_node, fx.Node) or operation(spread_node) != "expand":
        return node
    raised = _source(spread_node)
    if not isinstance(raised, fx.Node) or operation(raised) not in ("getitem", "unsqueeze"):
        return node
    base, wide = _source(raised), fake_maybe(raised)
    if not isinstance(base, fx.Node) or wide is None:
        return node
    narrow, whole, spread = fake_maybe(base), fake(node), fake(spread_node)
    if narrow is None or narrow.dim() != 4 or wide.dim() != 5 or spread.dim() != 5 or whole.dim() != 4:
        return node
    b, h, s, d = narrow.shape
    same = tuple(wide.shape) == (b, h, 1, s, d) and tuple(whole.shape) == (b, h * spread.shape[2], s, d)
    return base if same else node


_LAYOUT = {
    "getitem",
    "transpose",
    "permute",
    "reshape",
    "expand",
    "flatten",
    "unflatten",
    "contiguous",
    "unsqueeze",
    "squeeze",
    "clone",
    "cast",
    "getattr",
}
_UPDATES = {
    "index_copy",
    "index_put",
    "scatter",
    "slice_scatter",
    "index_copy_",
    "index_put_",
    "copy_",
    "cat",
}
_MAKERS = {"zeros", "empty", "ones", "full", "new_zeros", "new_empty", "zeros_like", "empty_like"}


_WRITES = {
    operator.setitem,
    operator.iadd,
    operator.imul,
    operator.isub,
    operator.itruediv,
    operator.iand,
    operator.ior,
}


def writes(node: fx.Node) -> bool:
    """Whether a node changes its first argument in place."""
    if node.op == "call_method":
        name = str(node.target)
        return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return node.op == "call_function" and (node.target in _WRITES or str(node.target).endswith("_"))


def is_layout(node: fx.Node) -> bool:
    """Whether a value shares the memory of its first argument, or may."""
    return operation(node) in _LAYOUT


def sources(node: fx.Node) -> Iterator[fx.Node]:
    """Where the memory of a value comes from, through layout changes and cache updates."""
    name = operation(node)
    if name == "cat":
        parts = argument(node, 0, "tensors")
        for part in parts if isinstance(parts, tuple | list) else ():
            if isinstance(part, fx.Node):
                yield from sources(part)
    elif (name in _LAYOUT | _UPDATES or writes(node)) and isinstance(_source(node), fx.Node):
        yield from sources(_source(node))
    else:
        yield node


def cache_inputs(node: fx.Node) -> list[fx.Node]:
    """The graph inputs, other than weights, that a value is a view or an update of."""
    return [
        source
        for source in sources(node)
        if source.op == "placeholder" and not isinstance(fake_maybe(source), torch.nn.Parameter)
    ]


def made_here(node: fx.Node) -> bool:
    """Whether the memory of a value is allocated in this graph: a cache before its first use."""
    return any(operation(source) in _MAKERS for source in sources(node))
