"""The pass that puts products of a few rows into a piece: golden text, one negative case per promise, and a run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_passes import check_golden
from torch import fx, nn
from torch.export import Dim, export
from torch.nn import functional as F
from torch.utils._python_dispatch import return_and_correct_aliasing

from sparse_compile import sparse_compile
from sparse_compile.kernels import skinny
from sparse_compile.kernels.skinny import MAX_ROWS
from sparse_compile.models import tiny_model
from sparse_compile.passes.pieces import Code
from sparse_compile.passes.skinny import Rewritten, use_skinny
from sparse_compile.runtime.compiler import PieceCompiler

E, I = 8, 16  # hidden and intermediate size  # noqa: E741


def piece(
    forward: Callable[..., torch.Tensor],
    *weights: torch.Tensor,
    dtype: torch.dtype = torch.bfloat16,
    size: int = E,
) -> fx.GraphModule:
    """A piece over x [T, 1, size] with symbolic T, its weights as inputs."""

    class Module(nn.Module):
        def forward(self, x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor]:
            return (forward(x, *weights),)

    x = torch.randn(3, 1, size, dtype=dtype)
    rows = ({0: Dim.AUTO}, ({},) * len(weights))
    program = export(Module(), (x, *weights), dynamic_shapes=rows, strict=False)
    graph = program.graph_module
    graph.graph.eliminate_dead_code()
    return graph


def weight(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def block(x: torch.Tensor, merged: torch.Tensor, down: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    product = F.linear(x, merged)
    x = x + F.linear(F.silu(product[..., :I]) * product[..., I:], down)
    return F.linear(x, out)


WEIGHTS = (weight(2 * I, E), weight(E, I), weight(24, E))


def targets(made: Rewritten) -> list[str]:
    return [str(node.target) for node in made.module.graph.nodes if node.op == "call_function"]


def test_golden() -> None:
    before = piece(block, *WEIGHTS)
    text = str(before.graph)
    made = use_skinny(before)
    assert made.counts == {"skinny_gated": 1, "skinny_add": 1, "skinny_linear": 1}
    assert made.left_alone == ()
    assert str(before.graph) == text, "the piece itself is unchanged"
    check_golden("skinny_block", f"{text}\n\n{made.module.graph}\n")


@pytest.mark.parametrize("rows", [1, 3])
def test_the_same_values(rows: int) -> None:
    """Within the roundings that are left out: both within a few units of the last place of bfloat16 of float64."""
    before = piece(block, *WEIGHTS)
    after, x = use_skinny(before).module, weight(rows, 1, E)
    exact = block(x.double(), *(w.double() for w in WEIGHTS))
    mine, theirs = ((m(x, *WEIGHTS)[0].double() - exact).abs().max() for m in (after, before))
    assert mine <= theirs + 2**-8 * exact.abs().max()


@pytest.mark.parametrize(
    ("halves", "wanted"),
    [
        (lambda p: p.chunk(2, -1), True),
        (lambda p: p.split(I, -1), True),
        (lambda p: (p[..., :I], p[..., I:]), True),
        (lambda p: (p[..., I:], p[..., :I]), False),  # up before gate
        (lambda p: (p[..., : I // 2].repeat(1, 1, 2), p[..., I:]), False),
        (lambda p: p.split([I, I], -1), False),
    ],
)
def test_gated_halves(halves: Callable[..., tuple[torch.Tensor, torch.Tensor]], wanted: bool) -> None:
    def forward(x: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
        gate, up = halves(F.linear(x, merged))
        return up * F.silu(gate)

    counts = use_skinny(piece(forward, WEIGHTS[0])).counts
    assert counts == ({"skinny_gated": 1} if wanted else {"skinny_linear": 1})


def test_a_half_that_is_read_twice_is_kept() -> None:
    def forward(x: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, merged).chunk(2, -1)
        return F.silu(gate) * up + up

    assert use_skinny(piece(forward, WEIGHTS[0])).counts == {"skinny_linear": 1}


def test_another_activation_is_kept() -> None:
    def forward(x: torch.Tensor, merged: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, merged).chunk(2, -1)
        return F.gelu(gate) * up

    made = use_skinny(piece(forward, WEIGHTS[0]))
    assert made.counts == {"skinny_linear": 1}
    assert "aten.gelu.default" in targets(made)


@pytest.mark.parametrize(
    "total",
    [
        lambda x, y: torch.add(x, y, alpha=2),
        lambda x, y: x[:, :, :1] + y,  # broadcast
        lambda x, y: y + y,
        lambda x, y: (x + y) * y,  # the product is read twice
        lambda x, y: x.float() + y,
        lambda x, y: y + 1.0,
    ],
)
def test_other_sums_are_kept(total: Callable[..., torch.Tensor]) -> None:
    made = use_skinny(piece(lambda x, w: total(x, F.linear(x, w)), weight(E, E)))
    assert made.counts == {"skinny_linear": 1}
    assert any(name.startswith("aten.add") for name in targets(made))


def test_a_bias_goes_along() -> None:
    def forward(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, w, b), w, b) + x

    before = piece(forward, weight(E, E), weight(E))
    made = use_skinny(before)
    assert made.counts == {"skinny_linear": 1, "skinny_add": 1}
    x = torch.randn(2, 1, E).bfloat16()
    torch.testing.assert_close(
        made.module(x, weight(E, E), weight(E))[0], before(x, weight(E, E), weight(E))[0], rtol=0.03, atol=0.1
    )


class Quantised(torch.Tensor):
    """A tensor that holds another, as torchao's do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Quantised:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, inner.shape, dtype=inner.dtype, strides=inner.stride()
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):  # type: ignore[no-untyped-def]
        args = [a.inner if isinstance(a, cls) else a for a in args]
        return return_and_correct_aliasing(func, args, kwargs or {}, func(*args, **(kwargs or {})))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda w: w.float(), "its operands differ in dtype"),
        (lambda w: w[0], "its weight has 1 dimensions, not 2"),
        (lambda w: w.t().contiguous().t(), "the columns of its weight are not contiguous"),
        (Quantised, "its weight is a Quantised, not a plain tensor"),
    ],
)
def test_weights_left_alone(change: Callable[[torch.Tensor], torch.Tensor], reason: str) -> None:
    graph = piece(F.linear, weight(24, E))
    node = [node for node in graph.graph.nodes if node.op == "placeholder"][1]
    node.meta["val"] = change(weight(24, E))
    made = use_skinny(graph)
    assert made.left_alone == ((node.name, reason),)
    assert targets(made) == ["aten.linear.default"]


def test_float32_and_computed_weights_are_left_alone() -> None:
    made = use_skinny(piece(F.linear, weight(24, E, dtype=torch.float32), dtype=torch.float32))
    assert [reason for _, reason in made.left_alone] == ["there is no kernel for torch.float32"]
    made = use_skinny(piece(lambda x, w: F.linear(x, w * 2), weight(24, E)))
    assert [reason for _, reason in made.left_alone] == ["its weight is computed by the forward"]
    assert made.counts == {}


# ---------------------------------------------------------------------- in the compiler of pieces


def test_row_counts_have_three_kinds_of_graphs() -> None:
    few = PieceCompiler(enabled=True, skinny=True)
    assert len({few.kind(rows) for rows in (1, 2, MAX_ROWS, MAX_ROWS + 1)}) == 3
    assert few.kind(2) == few.kind(MAX_ROWS) != few.kind(MAX_ROWS + 1)
    assert few.one_of_each_kind((1, 3, 2, 200, 100)) == [1, 2, 100]
    plain = PieceCompiler(enabled=True)
    assert plain.kind(2) == plain.kind(MAX_ROWS + 1)


def test_compiled_pieces_use_the_ops_for_few_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda module, **_: seen.append(str(module.graph)) or module)
    code, compiler = Code(piece(block, *WEIGHTS), (0,), "block"), PieceCompiler(enabled=True, skinny=True)
    for rows in (2, MAX_ROWS, MAX_ROWS + 1, 1, 1000):
        compiler(code, [torch.randn(rows, 1, E).bfloat16(), *WEIGHTS])
    assert ["skinny_gated" in text for text in seen] == [True, False, True]
    assert compiler.compiled == 3
    assert compiler.rewritten["block"].counts == {"skinny_gated": 1, "skinny_add": 1, "skinny_linear": 1}


def test_a_piece_without_such_products_has_one_symbolic_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    code = Code(piece(F.linear, weight(24, E, dtype=torch.float32), dtype=torch.float32), (0,), "plain")
    compiler = PieceCompiler(enabled=True, skinny=True)
    for rows in (2, MAX_ROWS + 1):
        compiler(code, [torch.randn(rows, 1, E), weight(24, E, dtype=torch.float32)])
    assert compiler.compiled == 1
    assert [reason for _, reason in compiler.rewritten["plain"].left_alone] == [
        "there is no kernel for torch.float32"
    ]


@pytest.mark.gpu
def test_pieces_on_cuda_in_and_out_of_graphs() -> None:
    """Every kind of row count, compiled, against float64; rows of one kind do not know how many they are."""
    weights = [weight(n, k).cuda() / k**0.5 for n, k in ((2 * 512, 256), (256, 512), (384, 256))]

    def forward(x: torch.Tensor, *w: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, w[0]).chunk(2, -1)
        return F.linear(x + F.linear(F.silu(gate) * up, w[1]), w[2])

    graph = piece(forward, *(w.cpu() for w in weights), size=256)
    code, compiler = Code(graph, (0,), "cuda"), PieceCompiler(enabled=True, skinny=True)
    x = torch.randn(MAX_ROWS + 1, 1, 256, device="cuda").bfloat16()
    exact = forward(x.double(), *(w.double() for w in weights))
    for rows in (2, 5, MAX_ROWS, MAX_ROWS + 1, 1):
        (made,) = compiler(code, [x[:rows], *weights])
        error, eager = ((y.double() - exact[:rows]).abs().max() for y in (made, forward(x[:rows], *weights)))
        assert error <= eager + 2**-8 * exact.abs().max()
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            (again,) = compiler(code, [x[:rows], *weights])
        captured.replay()
        assert torch.equal(again, made)
    assert compiler.compiled == 3


def test_a_model_in_half_precision_runs_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled by Inductor: prompts of many, few and one rows are as near to float32 as the model's own forward."""
    model, exact = (tiny_model("ouro").to(dtype) for dtype in (torch.bfloat16, torch.float32))
    exact.load_state_dict(model.state_dict())
    seen: list[int] = []
    run = skinny._run
    monkeypatch.setattr(skinny, "_run", lambda x, *rest, **up: seen.append(x.shape[0]) or run(x, *rest, **up))
    compiled = sparse_compile(model, key_retention=1.0, inductor=True, validate=False)
    compiler = compiled._keeper.make_engine.compiler
    compiler.skinny = True
    compiled.warmup(max_batch=3, max_context=64)
    graphs = compiler.compiled
    for shape, rows in (((3, 30), {3}), ((3, 5), {15, 3}), ((1, 1), {1})):
        prompts = torch.randint(3, 270, shape, generator=torch.Generator().manual_seed(2))
        seen.clear()
        made = compiled.generate(
            prompts, max_new_tokens=1, progress=False, output_logits=True, return_dict_in_generate=True
        )
        with torch.no_grad():
            want, eager = (m(prompts).logits[:, -1].float() for m in (exact, model))
        mine, theirs = ((x.float() - want).abs().mean() for x in (made.logits[0], eager))
        assert mine <= 1.5 * theirs, (shape, float(mine), float(theirs))
        assert set(seen) == rows, "the head sees the last row of each prompt"
    assert compiler.compiled == graphs, "warming up has seen every kind of row count"
    assert {kind for _, kind in compiler._runs} == {1, 0, -1}
