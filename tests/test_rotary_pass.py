"""Rotary embeddings found behind a product: the form that is rewritten, and one negative case per promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_skinny_pass import targets, weight
from torch import fx, nn
from torch.export import Dim, export
from torch.nn import functional as F

from sparse_compile.kernels.skinny import MAX_ROWS
from sparse_compile.passes.skinny import Rewritten, use_skinny

D, HIDDEN = 8, 16
Angles = tuple[torch.Tensor, torch.Tensor]


def halves(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def rotate(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = (one.unsqueeze(1) for one in angles)
    return (x * cos) + (halves(x) * sin)


def heads(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(part.shape[0], 1, -1, D).transpose(1, 2)


def attention(product: torch.Tensor, angles: Angles, turn: Callable[..., torch.Tensor] = rotate) -> Any:
    """Two query heads, one key head, one value head."""
    q, k, v = (heads(product[..., a:b]) for a, b in ((0, 16), (16, 24), (24, 32)))
    return turn(q, angles), turn(k, angles), v


def rewritten(
    forward: Callable[..., Any], dtype: torch.dtype = torch.bfloat16
) -> tuple[Rewritten, fx.GraphModule]:
    class Module(nn.Module):
        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, w: torch.Tensor) -> Any:
            return tuple(forward(F.linear(x, w), (cos, sin)))

    rows = torch.randn(3, 1, HIDDEN, dtype=dtype), *(torch.randn(3, 1, D, dtype=dtype) for _ in "cs")
    shapes = ({0: Dim.AUTO}, {0: Dim.AUTO}, {0: Dim.AUTO}, {})
    graph = export(
        Module(), (*rows, weight(32, HIDDEN, dtype=dtype)), dynamic_shapes=shapes, strict=False
    ).graph_module
    graph.graph.eliminate_dead_code()
    return use_skinny(graph), graph


def _sliced(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = (one.unsqueeze(1) for one in angles)
    return (x * cos) + (torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1) * sin)


@pytest.mark.parametrize("turn", [rotate, _sliced])
def test_queries_and_keys_are_rotated_by_the_product(turn: Callable[..., torch.Tensor]) -> None:
    made, before = rewritten(lambda p, a: attention(p, a, turn))
    assert made.counts == {"skinny_rotary": 1}
    (op,) = (node for node in made.module.graph.nodes if "skinny_rotary" in str(node.target))
    assert op.kwargs == {"rotated": 24}
    assert [node.name for node in op.args[1:]] == ["w", "cos", "sin"]
    assert not any(
        name.startswith(("aten.mul", "aten.add", "aten.cat", "aten.neg")) for name in targets(made)
    )
    for rows in (1, 5, MAX_ROWS):
        x = torch.randn(rows, 1, HIDDEN).bfloat16()
        cos, sin = (torch.rand(rows, 1, D).mul(7).cos().bfloat16() for _ in "cs")
        w = weight(32, HIDDEN)
        exact = attention(F.linear(x.double(), w.double()), (cos.double(), sin.double()))
        for mine, theirs, truth in zip(
            made.module(x, cos, sin, w), before(x, cos, sin, w), exact, strict=True
        ):
            errors = [(one.double() - truth).abs().max() for one in (mine, theirs)]
            assert errors[0] <= errors[1] + 2**-8 * truth.abs().max()


def test_with_fixed_bits_the_product_is_asked_for_them() -> None:
    _, graph = rewritten(attention)
    made = use_skinny(graph, fixed=True)
    (op,) = (node for node in made.module.graph.nodes if "skinny_rotary" in str(node.target))
    assert op.kwargs == {"fixed": True, "rotated": 24}


def test_only_what_is_rotated_is_rotated() -> None:
    made, _ = rewritten(
        lambda p, a: (rotate(heads(p[..., :16]), a), heads(p[..., 16:24]), heads(p[..., 24:]))
    )
    (op,) = (node for node in made.module.graph.nodes if "skinny_rotary" in str(node.target))
    assert op.kwargs == {"rotated": 16}


def _interleaved(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = (one.unsqueeze(1) for one in angles)
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def _backwards(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = (one.unsqueeze(1) for one in angles)
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((b, -a), -1) * sin


def _less(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = (one.unsqueeze(1) for one in angles)
    return torch.add(x * cos, halves(x) * sin, alpha=2)


def _twice(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    return rotate(x, angles) + x


def _normed(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    return rotate(x / 2, angles)


def _wide(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    return rotate(x.float(), angles)


def _quarter(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    cos, sin = (one.unsqueeze(1) for one in angles)
    return x * cos + torch.cat((-x[..., 2:6], x[..., :4]), -1) * sin


@pytest.mark.parametrize("turn", [_interleaved, _backwards, _less, _twice, _normed, _wide, _quarter])
def test_other_arithmetic_is_kept(turn: Callable[..., torch.Tensor]) -> None:
    assert rewritten(lambda p, a: attention(p, a, turn))[0].counts == {"skinny_linear": 1}


@pytest.mark.parametrize(
    "forward",
    [
        lambda p, a: (*attention(p, a), p),  # the whole product is read too
        lambda p, a: (*attention(p, a), p[..., 8:16]),  # and a part of what is rotated
        lambda p, a: (heads(p[..., :16]), rotate(heads(p[..., 16:]), a)),  # rotated heads are not first
        lambda p, a: (rotate(heads(p[..., :8]), a), rotate(heads(p[..., 4:12]), a)),  # parts overlap
    ],
)
def test_other_readers_are_respected(forward: Callable[..., Any]) -> None:
    assert rewritten(forward)[0].counts == {"skinny_linear": 1}


def test_keys_with_other_angles_stay() -> None:
    """Queries by the product, keys by their own operations."""
    made, _ = rewritten(lambda p, a: (rotate(heads(p[..., :16]), a), rotate(heads(p[..., 16:]), a[::-1])))
    (op,) = (node for node in made.module.graph.nodes if "skinny_rotary" in str(node.target))
    assert op.kwargs == {"rotated": 16}
    assert "aten.neg.default" in targets(made)


def test_angles_that_come_later_are_no_input() -> None:
    def forward(product: torch.Tensor, angles: Angles) -> Any:
        return attention(product, (angles[0].cos(), angles[1].sin()))

    assert rewritten(forward)[0].counts == {"skinny_linear": 1}


def test_float32_is_left_alone() -> None:
    assert rewritten(attention, torch.float32)[0].left_alone == (
        ("w", "there is no kernel for torch.float32"),
    )
