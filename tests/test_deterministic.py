"""deterministic=True: the bits of a row do not depend on the rows beside it, nor tokens on the way of decoding."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import PROMPTS as FAKE_PROMPTS
from runtime_fakes import make_engine
from shared_models import fresh_model, shared_model
from test_skinny_pass import E, piece
from torch import fx
from torch.nn import functional as F

from sparse_compile import sparse_compile
from sparse_compile.compiled import CompiledModel
from sparse_compile.determinism import check_rows
from sparse_compile.errors import ArgumentError
from sparse_compile.kernels import skinny
from sparse_compile.models import tiny_model
from sparse_compile.passes.pieces import Code, Cutter, PieceCall
from sparse_compile.runtime.deterministic import FixedCompiler, OneRowEach, _standard
from sparse_compile.runtime.options import FIXED_ROWS, Drafting, EngineOptions
from sparse_compile.runtime.request import SamplingParams
from sparse_compile.selftest import SelfTest, make_prompts
from sparse_compile.speculation import SpeculationConfig

pytestmark = pytest.mark.usefixtures("shared_traces")

MODES: dict[str, Any] = {
    "ordinary": False,
    "block": SpeculationConfig("block", draft_loops=1, num_draft_tokens=3),
    "pipeline": SpeculationConfig("pipeline", draft_loops=1),
}


@functools.cache
def compiled(name: str = "ouro", dtype: torch.dtype = torch.float32, **options: Any) -> CompiledModel:
    make = fresh_model if options.get("merge_linears") else shared_model  # joined weights move
    model = make(name, dtype=dtype)
    return sparse_compile(model, key_retention=0.3, validate=False, progress=False, **options)


def prompts(count: int, longest: int = 20, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (count,), generator=g).tolist()
    return [torch.randint(3, 270, (length,), generator=g).tolist() for length in lengths]


def all_logits(model: CompiledModel, batch: int, mode: str, rows: list[list[int]]) -> list[torch.Tensor]:
    """Per prompt the raw logits of all steps."""
    test, found = SelfTest(model, rows, MODES, (batch,), new_tokens=4), []
    for group in test._groups(batch):
        found += list(torch.stack(test._generate(group, mode, logits=True)[1].logits, dim=1))
    return found


@pytest.mark.parametrize("name", ["ouro", "dory", "hrm-text"])
def test_logits_are_the_same_bits_in_every_batch_and_mode(name: str) -> None:
    rows = prompts(3, 12)
    fixed = compiled(name, deterministic=True)
    want = all_logits(fixed, 1, "ordinary", rows)
    for mode in MODES:
        for batch in (1, 3):
            got = all_logits(fixed, batch, mode, rows)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), (mode, batch)
    # Without it they are not, or this test would show nothing.
    loose = compiled(name)
    alone, beside = (all_logits(loose, batch, "ordinary", rows) for batch in (1, 3))
    assert not all(torch.equal(a, b) for a, b in zip(alone, beside, strict=True))


def eager(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    return graph.forward


def test_one_compiled_graph_serves_all_rows_and_modes() -> None:
    model = compiled(dtype=torch.bfloat16, deterministic=True, merge_linears=True)
    made = Counter[str]()

    def counting(graph: fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        made["graphs"] += 1
        return graph.forward

    compiler = FixedCompiler(counting)
    model._keeper.make_engine.compiler = compiler  # type: ignore[attr-defined]
    test = SelfTest(model, prompts(4, 9), MODES, (4, 1), repeats=1, new_tokens=3)
    assert test.run().ok
    cutter = Cutter()
    calls = [
        call
        for variant in model.program.variants.values()
        for s in variant.stages
        for call in cutter.cut(s).calls
    ]
    codes = {call.code.key for call in calls if isinstance(call, PieceCall)}
    assert made["graphs"] == compiler.compiled == len(codes)
    modules = [rewritten.module for rewritten in compiler.rewritten.values()]
    ops = [node for module in modules for node in module.graph.nodes if "skinny_" in str(node.target)]
    assert all(op.kwargs["fixed"] for op in ops)
    assert any("skinny_rotary" in str(op.target) for op in ops)
    assert {kind for _, kind in compiler._runs} == {compiler.kind(1)}


def test_every_variant_is_made_of_the_same_pieces() -> None:
    for name in ("ouro", "dory"):
        cutter, found = Cutter(), []
        for variant in compiled(name).program.variants.values():
            calls = [call for stage in variant.stages for call in cutter.cut(stage).calls]
            found.append({call.code.key for call in calls if isinstance(call, PieceCall)})
        assert all(keys == found[0] for keys in found), name


def activated(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.silu(F.linear(x, w))


def code_of(forward: Any, *weights: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> Code:
    return Code(piece(forward, *weights, dtype=dtype), (0,), "made")


@pytest.mark.parametrize("compiler", [FixedCompiler(eager), OneRowEach(enabled=False)])
def test_a_row_alone_has_the_bits_that_it_has_among_others(compiler: Any) -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.randn(24, E, generator=g).bfloat16()
    code = code_of(activated, w)
    assert code.row_outputs == (0,)
    x = torch.randn(FIXED_ROWS, 1, E, generator=g).bfloat16()
    (whole,) = compiler(code, [x, w])
    assert whole.shape == (FIXED_ROWS, 1, 24)
    for rows in (1, 2, 3, 65):
        assert torch.equal(compiler(code, [x[:rows], w])[0], whole[:rows])


def test_one_row_each_leaves_more_rows_to_the_library() -> None:
    seen: list[int] = []

    class Watched(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
            seen.append(x.shape[0])
            return (x + 1,)

    code = Code(Watched(), (0,), "watched")  # type: ignore[arg-type]
    code.__dict__["row_outputs"] = (0,)
    for rows in (3, FIXED_ROWS + 1):
        OneRowEach(enabled=False)(code, [torch.zeros(rows, 2)])
    assert seen == [1, 1, 1, FIXED_ROWS + 1]
    assert OneRowEach(enabled=False).one_of_each_kind(range(1, FIXED_ROWS + 9)) == [1, FIXED_ROWS + 1]
    assert FixedCompiler(eager).one_of_each_kind(range(1, FIXED_ROWS + 9)) == [1, FIXED_ROWS + 1]


def test_more_rows_than_are_fixed_are_left_to_the_library() -> None:
    compiler, w = FixedCompiler(eager), torch.ones(24, E).bfloat16()
    code, x = code_of(activated, w), torch.ones(FIXED_ROWS + 1, 1, E).bfloat16()
    assert torch.equal(compiler(code, [x, w])[0], activated(x, w))
    assert torch.equal(compiler(code, [x[:1], w])[0], activated(x[:1], w))
    assert {kind for _, kind in compiler._runs} == {compiler.kind(1), compiler.kind(FIXED_ROWS + 1)}


def test_a_graph_is_not_compiled_a_second_time() -> None:
    compiler, w = FixedCompiler(eager), torch.ones(24, E).bfloat16()
    code, x = code_of(activated, w), torch.ones(3, 1, E).bfloat16()
    compiler(code, [x, w])
    with pytest.raises(Exception, match="compiled a second time"):
        compiler(code, [x, torch.ones(32, E).bfloat16()])


@settings(max_examples=30, deadline=None)
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_standard_strides(shape: list[int], seed: int) -> None:
    order = torch.randperm(len(shape), generator=torch.Generator().manual_seed(seed)).tolist()
    x = torch.arange(torch.Size(shape).numel()).view([shape[at] for at in order])
    x = x.permute([order.index(at) for at in range(len(shape))])
    assert torch.equal(_standard(x), x)
    assert _standard(x).stride() == torch.empty(shape).stride()


def test_products_without_a_fixed_order_are_refused() -> None:
    wide = code_of(F.linear, torch.ones(24, E), dtype=torch.float32)
    other = code_of(torch.matmul, torch.ones(E, 24).bfloat16())
    for code, message in ((wide, "no kernel for torch.float32"), (other, "matmul: it is no linear layer")):
        with pytest.raises(ValueError, match=message):
            FixedCompiler(eager).prepare([code])
        OneRowEach(enabled=False).prepare([code])  # row by row every product has one


@settings(max_examples=20, deadline=None)
@given(
    rows=st.integers(1, 70),
    kind=st.sampled_from(["linear", "gated", "add"]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    seed=st.integers(0, 9),
)
def test_fixed_products_row_by_row(rows: int, kind: str, dtype: torch.dtype, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    x, w = torch.randn(rows, 1, 96, generator=g).to(dtype), torch.randn(40, 96, generator=g).to(dtype)
    op = getattr(torch.ops.sparse_compile, f"skinny_{kind}")
    more = (torch.randn(rows, 1, 40, generator=g).to(dtype),) if kind == "add" else ()
    whole = op(x, w, *more, fixed=True)
    assert whole.shape == (rows, 1, 20 if kind == "gated" else 40)
    at = seed % rows
    alone = op(x[at : at + 1], w, *(one[at : at + 1] for one in more), fixed=True)
    assert torch.equal(whole[at : at + 1], alone)
    # The same sums as without it, in another order: float32, then rounded.
    loose = op(x, w, *more)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    assert torch.allclose(whole, loose, atol=tolerance * float(loose.abs().max()), rtol=0)


def test_fixed_products_pass_opcheck() -> None:
    x, w = torch.randn(5, 8).bfloat16(), torch.randn(6, 8).bfloat16()
    for kind, more in (("linear", ()), ("gated", ()), ("add", (torch.randn(5, 6).bfloat16(),))):
        op = getattr(torch.ops.sparse_compile, f"skinny_{kind}").default
        torch.library.opcheck(op, (x, w, *more), {"fixed": True})
    op, angles = torch.ops.sparse_compile.skinny_rotary.default, torch.randn(5, 2).bfloat16()
    torch.library.opcheck(op, (x, w, angles, angles.clone()), {"fixed": True, "rotated": 4})
    assert torch.ops.sparse_compile.skinny_linear(x[:0], w, fixed=True).shape == (0, 6)


def test_tiles_of_fixed_products_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from sparse_compile.kernels import skinny_choice

    monkeypatch.setattr(skinny_choice, "choose", lambda shape: pytest.fail("it would measure"))
    tiles = [skinny_choice.fixed_tiles(rows, torch.empty(512, 256), False) for rows in range(1, 65)]
    assert {(one.slices, one.splits) for one in tiles} == {(4, 1)}


# ---------------------------------------------------------------------- prompts


def test_prompts_run_one_by_one_in_chunks_of_their_own() -> None:
    """Rows of each run of a prompt: without it they would follow from what others have left of a step's rows."""
    for deterministic in (True, False):
        engine, executor = make_engine(prefill_chunk=4, max_prefill_tokens=6, deterministic=deterministic)
        for prompt in FAKE_PROMPTS:
            engine.add_request(prompt, SamplingParams(max_new_tokens=3))
        while engine.has_unfinished():
            engine.step()
        engine.check_integrity()
        runs = [plan.chunks for plan in executor.plans]
        sizes = Counter(tuple(chunk.rows for chunk in run) for run in runs if any(c.rows > 1 for c in run))
        if deterministic:
            want = [[min(4, len(p) - at) for at in range(0, len(p), 4)] for p in FAKE_PROMPTS]
            assert sizes == Counter((rows,) for chunks in want for rows in chunks if rows > 1)
        else:
            assert any(len(run) > 1 for run in sizes)


# ---------------------------------------------------------------------- refusals


def test_what_it_cannot_be_combined_with_is_refused() -> None:
    model = shared_model("ouro")
    for options, argument in (
        ({"prefix_caching": True}, "prefix_caching"),
        ({"implementation": "batched"}, "implementation"),
        ({"deterministic": "yes"}, "deterministic"),
    ):
        with pytest.raises(ArgumentError) as caught:
            sparse_compile(model, **{"deterministic": True, "validate": False, **options})
        assert caught.value.argument == argument
    made = sparse_compile(model, deterministic=True, validate=False, speculation=MODES["pipeline"])
    with pytest.raises(ArgumentError, match=f"pass max_batch={FIXED_ROWS // 4} or less"):
        made.serve(max_batch=FIXED_ROWS // 4 + 1, max_context=32)
    with pytest.raises(ArgumentError, match=r"a sequence has 257 rows at once.*pass draft_loops=2 or more"):
        check_rows(made.sparse_config, 1, SpeculationConfig("pipeline"), FIXED_ROWS + 1)
    for changes, message in (
        ({"max_seqs": 257}, "max_seqs=256 or less"),
        ({"max_seqs": 1, "drafting": Drafting(1, 257)}, "pass rows=256 or less"),
        ({"prefix_caching": True}, "prefix"),
    ):
        with pytest.raises(ValueError, match=message):
            EngineOptions(max_context=8, deterministic=True, **changes)  # type: ignore[arg-type]


def test_validation_runs_with_it() -> None:
    assert compiled(deterministic=True).validate() < 1e-4


# ---------------------------------------------------------------------- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ouro", "dory", "hrm-text"])
@pytest.mark.parametrize("graphs", [True, False])
def test_bfloat16_on_the_gpu_in_every_batch_and_mode(name: str, graphs: bool) -> None:
    from sparse_compile.models import tiny_tokenizer

    model = tiny_model(name, dtype=torch.bfloat16).cuda()
    made = sparse_compile(
        model, key_retention=0.3, dense_below=24, deterministic=True, cuda_graphs=graphs, max_batch=16,
        max_context=128, progress=False,
    )  # fmt: skip
    rows = make_prompts(tiny_tokenizer(), 16, 96)
    late = made.program.roll.repeats - 1  # whose drafts are right more often
    more = {"late block": SpeculationConfig("block", draft_loops=late, num_draft_tokens=4)}
    more["pipeline of two"] = SpeculationConfig("pipeline", draft_loops=2)
    outcome = SelfTest(made, rows, MODES | more, (1, 16), new_tokens=24).run()
    assert any(0 < run.accepted < run.drafted for run in outcome.runs)
    assert outcome.ok, "\n".join(map(str, outcome.differences))
    want = all_logits(made, 1, "ordinary", rows[:6])
    for mode in MODES:
        got = all_logits(made, 6, mode, rows[:6])
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), mode
    made.engine.check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6144, 2048), (2048, 5632), (2048, 2048), (49152, 2048), (96, 32)])
@pytest.mark.parametrize("kind", ["linear", "gated", "add"])
def test_fixed_products_on_the_gpu(kind: str, shape: tuple[int, int]) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    width, depth = shape
    x = torch.randn(FIXED_ROWS, depth, generator=g, device="cuda").bfloat16()
    w = (torch.randn(width, depth, generator=g, device="cuda") / depth**0.5).bfloat16()
    residual = torch.randn(FIXED_ROWS, width, generator=g, device="cuda").bfloat16()
    op = getattr(torch.ops.sparse_compile, f"skinny_{kind}")

    def product(rows: slice) -> torch.Tensor:
        return op(x[rows], w, *((residual[rows],) if kind == "add" else ()), fixed=True)

    whole = product(slice(None))
    for rows in (1, 2, 3, 8, 9, 17, 32, 33, 64, 65, 130):
        for first in (0, 37):
            rows_at = slice(first, first + rows)
            assert torch.equal(product(rows_at), whole[rows_at]), (rows, first)


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "turned", "heads"), [(128, 32, 48), (64, 20, 24), (16, 3, 4)])
def test_fixed_rotated_heads_on_the_gpu(size: int, turned: int, heads: int) -> None:
    g = torch.Generator("cuda").manual_seed(0)
    x, cos, sin = (
        torch.randn(FIXED_ROWS, width, generator=g, device="cuda").bfloat16() for width in (2048, size, size)
    )
    w = (torch.randn(heads * size, 2048, generator=g, device="cuda") / 2048**0.5).bfloat16()

    def product(at: slice) -> torch.Tensor:
        return torch.ops.sparse_compile.skinny_rotary(
            x[at], w, cos[at], sin[at], rotated=turned * size, fixed=True
        )

    whole = product(slice(None))
    want = skinny.define(x, w, rotary=skinny.Rotary(cos, sin, turned * size))
    torch.testing.assert_close(whole, want, rtol=2e-2, atol=2e-2)
    for rows in (1, 2, 3, 8, 9, 17, 32, 33, 64, 65, 130):
        for first in (0, 37):
            at = slice(first, first + rows)
            assert torch.equal(product(at), whole[at]), (rows, first)


@pytest.mark.gpu
def test_fixed_products_need_half_precision_on_the_gpu() -> None:
    x, w = torch.ones(2, 16, device="cuda"), torch.ones(8, 16, device="cuda")
    with pytest.raises(ValueError, match="no kernel for"):
        skinny.linear(x, w, fixed=True)
    with pytest.raises(ArgumentError, match="bfloat16 or float16"):
        sparse_compile(tiny_model("ouro").cuda(), deterministic=True)
