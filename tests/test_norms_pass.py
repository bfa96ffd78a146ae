"""Norms that products take along: the forms that are found, one negative case per promise, and runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_passes import check_golden
from test_skinny_pass import E, I, targets, weight
from test_skinny_pass import piece as exported
from torch import fx
from torch.nn import functional as F

from sparse_compile.config import SparseConfig
from sparse_compile.models import tiny_model
from sparse_compile.passes.base import Options
from sparse_compile.passes.norms import Norms
from sparse_compile.passes.pieces import Cutter, OpCall
from sparse_compile.passes.pipeline import build_program
from sparse_compile.passes.skinny import Rewritten, use_skinny
from sparse_compile.runtime.compiler import PieceCompiler

GAIN, W, GATE_UP, DOWN = weight(E), weight(24, E), weight(2 * I, E), weight(E, I)
Tensor = torch.Tensor


def piece(
    forward: Callable[..., Tensor], *weights: Tensor, dtype: torch.dtype = torch.bfloat16, size: int = E
) -> fx.GraphModule:
    """As pieces are: without assertions, which `canonicalize` drops."""
    module = exported(forward, *weights, dtype=dtype, size=size)
    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def scaled(x: Tensor, eps: float = 1e-6) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)


def products(made: Rewritten) -> list[fx.Node]:
    return [node for node in made.module.graph.nodes if "skinny" in str(node.target)]


def eps_of(made: Rewritten) -> list[object]:
    return [node.kwargs.get("eps") for node in products(made)]


def llama(x: Tensor, gain: Tensor) -> Tensor:
    return gain * scaled(x).to(x.dtype)


def _squared(x: Tensor) -> Tensor:
    wide = x.float()
    return (torch.rsqrt(wide.square().mean(2, True) + 1e-6) * wide).type_as(x)


def _by_itself(x: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt((wide * wide).mean((-1,), keepdim=True) + 1e-6)).to(torch.bfloat16)


FORMS: dict[str, tuple[Callable[..., Tensor], bool]] = {
    "llama": (llama, True),
    "weight behind": (lambda x, g: scaled(x).to(x.dtype) * g, True),
    "olmo": (lambda x, g: (g * scaled(x)).to(x.dtype), True),
    "weight in float32": (lambda x, g: (scaled(x) * g.float()).type_as(x), True),
    "hrm": (lambda x, g: scaled(x).type_as(x), False),
    "square": (lambda x, g: _squared(x), False),
    "product with itself": (lambda x, g: _by_itself(x), False),
    "torch": (lambda x, g: F.rms_norm(x, (E,), g, 1e-6), True),
    "torch without weight": (lambda x, g: F.rms_norm(x, (E,), None, 1e-6), False),
}


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_norms(form: str) -> None:
    """No operation is left but the product, and it gives what the operations gave."""
    normed, weighted = FORMS[form]
    before = piece(lambda x, g, w: F.linear(normed(x, g), w), GAIN, W)
    made = use_skinny(before)
    assert (made.counts, made.norms) == ({"skinny_linear": 1}, 1)
    (op,) = products(made)
    assert targets(made) == ["sparse_compile.skinny_linear.default"]
    assert [one.op for one in op.args] == ["placeholder"] * 2  # type: ignore[union-attr]
    gain = {"norm": op.kwargs.get("norm")} if weighted else {}
    assert dict(op.kwargs) == {**gain, "eps": 1e-6}
    assert all(one.name == "weights_0" for one in gain.values())  # type: ignore[union-attr]
    for rows in (1, 5):
        x = torch.randn(rows, 1, E).bfloat16()
        exact = F.linear(llama(x.double(), GAIN.double() if weighted else 1.0), W.double())  # type: ignore[arg-type]
        mine, theirs = ((m(x, GAIN, W)[0].double() - exact).abs().max() for m in (made.module, before))
        assert mine <= theirs + 1e-5 * exact.abs().max()


def test_the_sum_of_squares() -> None:
    """As in Dory, where rows have length one."""

    def forward(x: Tensor, w: Tensor) -> Tensor:
        wide = x.float()
        return F.linear((wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).type_as(x), w)

    before = piece(forward, W)
    made = use_skinny(before)
    (op,) = products(made)
    assert dict(op.kwargs) == {"eps": 1e-6, "mean": False}
    x = torch.randn(4, 1, E).bfloat16()
    torch.testing.assert_close(made.module(x, W)[0], before(x, W)[0], rtol=2e-2, atol=1e-2)


def _twice(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    normed = llama(x, g)
    return F.linear(normed, w) + normed[..., :1]


@pytest.mark.parametrize(
    "forward",
    [
        _twice,  # the normalised rows are read by something else
        lambda x, g, w: F.linear(F.layer_norm(x, (E,), g, None, 1e-6), w),
        lambda x, g, w: F.linear(F.rms_norm(x, (E,), g), w),  # which eps, torch decides
        lambda x, g, w: F.linear(F.rms_norm(x, (1, E), g[None], 1e-6), w),
        lambda x, g, w: F.linear((1 + g) * scaled(x).to(x.dtype), w),  # a weight that is computed
        lambda x, g, w: F.linear(((1 + g.float()) * scaled(x)).to(x.dtype), w),
        lambda x, g, w: F.linear(g[:1] * scaled(x).to(x.dtype), w),
        lambda x, g, w: F.linear(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), w),  # in bfloat16
        lambda x, g, w: F.linear(scaled(x).to(x.dtype) + 1, w),
        lambda x, g, w: F.linear(
            (x.float() * torch.rsqrt(x.float().pow(3).mean(-1, True) + 1e-6)).to(x.dtype), w
        ),
        lambda x, g, w: F.linear(
            (x.float() * torch.rsqrt(x.float().pow(2).mean(0, True) + 1e-6)).to(x.dtype), w
        ),
        lambda x, g, w: F.linear(
            (x.float() * torch.sqrt(x.float().pow(2).mean(-1, True) + 1e-6)).to(x.dtype), w
        ),
        lambda x, g, w: F.linear(
            (g.float() * torch.rsqrt(x.float().pow(2).mean(-1, True) + 1e-6)).to(x.dtype), w
        ),
    ],
)
def test_other_arithmetic_is_kept(forward: Callable[..., Tensor]) -> None:
    made = use_skinny(piece(forward, GAIN, W), norms="all")
    assert (made.counts, made.norms, eps_of(made)) == ({"skinny_linear": 1}, 0, [None])


def test_float16_takes_norms_without_weight_only() -> None:
    """The product of row and weight may overflow before it is scaled."""
    half = [one.half() for one in (GAIN, W)]
    made = use_skinny(piece(lambda x, g, w: F.linear(llama(x, g), w), *half, dtype=torch.float16))
    assert (made.norms, eps_of(made)) == (0, [None])
    made = use_skinny(piece(lambda x, g, w: F.linear(scaled(x).to(x.dtype), w), *half, dtype=torch.float16))
    assert (made.norms, eps_of(made)) == (1, [1e-6])


def test_float32_is_left_alone() -> None:
    wide = [one.float() for one in (GAIN, W)]
    made = use_skinny(
        piece(lambda x, g, w: F.linear(llama(x, g), w), *wide, dtype=torch.float32), norms="all"
    )
    assert (made.counts, made.norms) == ({}, 0)
    assert "aten.linear.default" in targets(made)


def test_every_product_that_reads_a_norm_takes_it_along() -> None:
    def forward(x: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
        normed = llama(x, g)
        return F.linear(normed, a).sum(-1) + F.linear(normed, b).sum(-1)

    made = use_skinny(piece(forward, GAIN, W, weight(32, E)))
    assert (made.counts, made.norms, eps_of(made)) == ({"skinny_linear": 2}, 1, [1e-6, 1e-6])
    assert not any("rsqrt" in name for name in targets(made))


def test_a_product_that_stays_keeps_the_norm() -> None:
    """One of two products has a weight in another layout."""

    def forward(x: Tensor, g: Tensor, a: Tensor, b: Tensor) -> Tensor:
        normed = llama(x, g)
        return F.linear(normed, a).sum(-1) + F.linear(normed, b.t().contiguous()).sum(-1)

    made = use_skinny(piece(forward, GAIN, W, weight(E, 24)))
    assert (made.counts, made.norms, eps_of(made)) == ({"skinny_linear": 1}, 0, [None])


def block(x: Tensor, h: Tensor, gain: Tensor, gate_up: Tensor, down: Tensor, out: Tensor) -> Tensor:
    """A layer with its norms ahead: every norm is a kernel of its own, between two products."""
    h = h + F.linear(x, out)
    gate, up = F.linear(llama(h, gain), gate_up).chunk(2, -1)
    h = h + F.linear(F.silu(gate) * up, down)
    return F.linear(scaled(h).to(h.dtype), out)


def test_golden() -> None:
    before = piece(lambda x, *w: block(x, x, *w), GAIN, GATE_UP, DOWN, weight(E, E))
    made = use_skinny(before)
    assert made.counts == {"skinny_add": 2, "skinny_gated": 1, "skinny_linear": 1}
    assert made.norms == 2
    check_golden("skinny_norms", f"{before.graph}\n\n{made.module.graph}\n")
    off = use_skinny(before, norms="none")
    assert (off.counts, off.norms, eps_of(off)) == (made.counts, 0, [None] * 4)


def test_the_same_values() -> None:
    """As near to float64 as the operations that the products replace, at numbers of rows of all kinds."""
    weights = (GAIN, GATE_UP, DOWN, weight(E, E))
    before = piece(lambda x, *w: block(x, x, *w), *weights)
    after = use_skinny(before).module
    for rows in (1, 7, 64):
        x = torch.randn(rows, 1, E, generator=torch.Generator().manual_seed(rows)).bfloat16()
        wide = [one.double() for one in (x, *weights)]
        exact = block(wide[0], *wide)
        mine, theirs = ((m(x, *weights)[0].double() - exact).abs().mean() for m in (after, before))
        assert mine <= theirs


# ---------------------------------------------------------------------- which norms are kernels of their own


def sandwich(x: Tensor, gain: Tensor, out: Tensor, w: Tensor) -> Tensor:
    """As in Ouro: the norm follows a sum that follows a norm, all in one kernel."""
    h = x + llama(F.linear(x, out), gain)
    return F.linear(llama(h, gain), w).sum(-1, keepdim=True) + h


def _read_beside(x: Tensor, gain: Tensor, out: Tensor, w: Tensor) -> Tensor:
    h = x + F.linear(x, out)
    return F.linear(llama(h, gain), w).sum(-1, keepdim=True) + h.exp()


def _computed(x: Tensor, gain: Tensor, out: Tensor, w: Tensor) -> Tensor:
    return F.linear(llama(x.sigmoid(), gain), w)


def _from_a_view(x: Tensor, gain: Tensor, out: Tensor, w: Tensor) -> Tensor:
    return F.linear(llama(F.linear(x, out).reshape(-1, E).unsqueeze(1), gain), w)


@pytest.mark.parametrize(
    ("forward", "alone"), [(sandwich, 0), (_read_beside, 0), (_computed, 0), (_from_a_view, 1)]
)
@pytest.mark.parametrize("norms", ["alone", "all", "none"])
def test_norms_that_a_compiler_fuses(forward: Callable[..., Tensor], alone: int, norms: Norms) -> None:
    """They stay where they are, unless all are asked for."""
    made = use_skinny(piece(forward, GAIN, weight(E, E), W), norms=norms)
    assert made.norms == {"alone": alone, "all": 1, "none": 0}[norms]
    assert eps_of(made)[-1] == (1e-6 if made.norms else None)


def pieces_of(name: str) -> Iterator[fx.GraphModule]:
    """The distinct pieces of a tiny model in bfloat16, its linear layers merged."""
    model = tiny_model(name).to(torch.bfloat16)
    options = Options(SparseConfig().retention_for_passes(), merge_linears=True)
    cutter, seen = Cutter(), set[str]()
    for stage in build_program(model, options).variants["dense"].stages:
        for call in cutter.cut(stage).calls:
            if not isinstance(call, OpCall) and call.code.key not in seen:
                seen.add(call.code.key)
                yield call.code.module


@pytest.mark.parametrize(
    ("name", "alone", "every"),
    [
        ("ouro", 1, 4),  # that of the first layer: all others end kernels that add a residual
        ("hrm-text", 5, 8),  # norms ahead of the branches, behind products that add the residual
    ],
)
def test_norms_of_real_models(name: str, alone: int, every: int) -> None:
    modules = list(pieces_of(name))
    found = {norms: sum(use_skinny(one, norms=norms).norms for one in modules) for norms in ("alone", "all")}
    assert found == {"alone": alone, "all": every}


# ---------------------------------------------------------------------- compiled


def test_a_compiler_is_told_which_norms() -> None:
    from sparse_compile.passes.pieces import Code

    code = Code(piece(sandwich, GAIN, weight(E, E), W), (0,), "sandwich")
    found: dict[Any, int] = {}
    for norms in ("alone", "all"):
        compiler = PieceCompiler(enabled=True, skinny=True)
        compiler.norms = norms  # type: ignore[assignment]
        found[norms] = compiler._few_rows(code).norms
    assert found == {"alone": 0, "all": 1}


@pytest.mark.parametrize("norms", ["alone", "all"])
def test_compiled_by_inductor(norms: Norms) -> None:
    """Symbolic rows and a single one; on CUDA in and out of graphs."""
    from sparse_compile.passes.pieces import Code

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size, wide = 128, 256
    shapes = ((size,), (2 * wide, size), (size, wide), (size, size))
    weights = [(1 if len(shape) == 1 else shape[-1] ** -0.5) * weight(*shape) for shape in shapes]
    graph = piece(lambda x, *w: block(x, x, *w), *weights, size=size)
    compiler = PieceCompiler(enabled=True, skinny=True)
    compiler.norms = norms
    code, weights = Code(graph, (0,), norms), [one.to(device) for one in weights]
    for rows in (5, 1, 33):
        x = torch.randn(rows, 1, size, generator=torch.Generator().manual_seed(rows)).bfloat16().to(device)
        (made,) = compiler(code, [x, *weights])
        double = [one.double() for one in (x, *weights)]
        exact = block(double[0], *double)
        mine, theirs = ((one.double() - exact).abs().mean() for one in (made, block(x, x, *weights)))
        assert mine <= theirs, rows
        if device == "cuda":
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                (again,) = compiler(code, [x, *weights])
            captured.replay()
            assert torch.equal(again, made)
    assert compiler.rewritten[norms].norms == 2
