"""Products are told the weight that is read next where a compiler's kernels lie between the two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_norms_pass import llama, piece, products
from test_skinny_pass import E, I, weight
from torch import Tensor, fx
from torch.nn import functional as F

from sparse_compile.passes.following import name_following
from sparse_compile.passes.graph import PRODUCTS
from sparse_compile.passes.skinny import Rewritten, use_skinny

GAIN, SQUARE, UP, OUT = weight(E), weight(E, E), weight(I, E), weight(24, E)


def told(made: Rewritten) -> list[list[str]]:
    """Of each product, the names of the weights it is told."""
    return [[one.name for one in node.kwargs.get("following", ())] for node in products(made)]


def sandwich(x: Tensor, gain: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """A norm of what a product made, a sum with a residual, and the norm of that: one kernel, between two products."""
    x = x + llama(F.linear(x, first), gain)
    return F.linear(llama(x, gain), second)


def test_the_weight_behind_a_norm() -> None:
    before = piece(sandwich, GAIN, SQUARE, OUT)
    made = use_skinny(before)
    assert told(made) == [["weights_2"], []]
    x = torch.randn(3, 1, E).bfloat16()
    torch.testing.assert_close(made.module(x, GAIN, SQUARE, OUT)[0], before(x, GAIN, SQUARE, OUT)[0])


def test_a_gate_and_its_up() -> None:
    def forward(x: Tensor, gain: Tensor, first: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        x = x + llama(F.linear(x, first), gain)
        normed = llama(x, gain)
        return F.silu(F.linear(normed, gate)) * F.linear(normed, up)

    made = use_skinny(piece(forward, GAIN, SQUARE, UP, -UP))
    assert made.counts == {"skinny_linear": 1, "skinny_gated": 1}
    assert told(made) == [["weights_2", "weights_3"], []]


def test_every_product_of_three() -> None:
    def forward(x: Tensor, gain: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
        return sandwich(sandwich(x, gain, first, second), gain, first, third)

    made = use_skinny(piece(forward, GAIN, SQUARE, SQUARE.flip(0), OUT))
    # The second and the third are neighbours: the third starts early, and asks for itself.
    assert told(made) == [["weights_2"], [], ["weights_3"], []]


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, gain, first, second: F.linear(F.linear(x, first), second),
        lambda x, gain, first, second: F.linear(
            F.linear(x, first).view(-1, E)[:, None].transpose(1, 1), second
        ),
        lambda x, gain, first, second: F.linear(
            llama(F.linear(x, first), gain), second
        ),  # takes the norm along
    ],
)
def test_not_where_nothing_is_computed_between(forward: Callable[..., Tensor]) -> None:
    made = use_skinny(piece(forward, GAIN, SQUARE, OUT))
    assert len(products(made)) == 2
    assert told(made) == [[], []]


@pytest.mark.parametrize("case", ["told", "one of our ops between", "a weight that comes later"])
def test_what_lies_between(case: str) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.get_attr("first")
    second = None if case == "a weight that comes later" else graph.get_attr("second")
    made = graph.call_function(PRODUCTS["linear"], (x, first))
    made = graph.call_function(torch.ops.aten.silu.default, (made,))
    if case == "one of our ops between":
        made = graph.call_function(torch.ops.sparse_compile.site.default, (made,))
    second = second or graph.get_attr("second")
    graph.output(graph.call_function(PRODUCTS["linear"], (made, second)))
    assert name_following(graph) == (case == "told")
    named = [node.kwargs.get("following") for node in graph.nodes if node.target is PRODUCTS["linear"]]
    assert named == [[second] if case == "told" else None, None]


def test_how_much_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from sparse_compile.kernels import skinny_backend

    monkeypatch.setattr(skinny_backend, "ASKED_BYTES", 1 << 12)
    asked = skinny_backend._asked_bytes
    wide = torch.zeros(64, 64, dtype=torch.bfloat16)  # 8 KiB
    assert asked([wide], 4) == 1 << 10
    assert asked([wide, wide.clone()], 4) == 1 << 9
    assert asked([wide], 10) == 400  # a multiple of 16
    assert asked([wide[:4]], 4) == 128, "no more than there is"
    assert asked([wide], 4096) == 0
    assert asked([wide[:0]], 4) == 0
    assert asked([wide.t()], 4) == 0, "lines do not follow each other"
    assert asked([wide.flatten()[1:-63].view(63, 64)], 4) == 0, "begins at no multiple of 16 bytes"
    assert asked([wide, wide[:32]], 4) == 0, "of two sizes"
