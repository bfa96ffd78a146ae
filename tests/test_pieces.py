"""Pieces: what lies between our ops, cut out, with equal pieces sharing one graph."""

from __future__ import annotations

import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shared_models import shared_model
from torch import fx
from toy import Toy, toy_compile

from sparse_compile import sparse_compile
from sparse_compile.passes.inductor import early_start, one_pass_reductions, reads_nothing_maybe
from sparse_compile.passes.pieces import Cutter, Name, OpCall, PieceCall
from sparse_compile.runtime.compiler import PieceCompiler

pytestmark = pytest.mark.usefixtures("shared_traces")


def calls_of(stages: tuple[object, ...], cutter: Cutter) -> list[object]:
    return [call for stage in stages for call in cutter.cut(stage).calls]  # type: ignore[arg-type]


def test_loops_layers_and_variants_share_their_graphs() -> None:
    def codes(layers: int) -> int:
        cutter, program = Cutter(), toy_compile(Toy(layers=layers))
        for variant in program.variants.values():
            calls = calls_of(variant.stages, cutter)
            assert sum(isinstance(call, OpCall) for call in calls) == variant.op_counts().total()
        return len(cutter.codes)

    assert codes(3) == codes(5) <= 6, "more layers are more of the same"


def test_loops_of_one_body_are_cut_once() -> None:
    cutter, stages = Cutter(), toy_compile(Toy()).variants["dense"].stages
    bodies = [cutter.cut(stage) for stage in stages if stage.name.startswith("body")]
    assert len(bodies) > 1
    assert all(cut.calls is bodies[0].calls for cut in bodies)
    assert [cut.stage.loop for cut in bodies] == list(range(len(bodies)))


def test_a_cut_stage_computes_what_the_stage_computes() -> None:
    """Every piece alone, on the values that the whole graph gives its inputs."""
    program = toy_compile(Toy())
    x = {"input_ids": torch.tensor([[3], [1], [2]]), "position_ids": torch.tensor([[0], [1], [2]])}
    seen: dict[str, torch.Tensor] = {}

    class Recorder(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            if str(getattr(n.target, "namespace", "")) == "sparse_compile":
                seen[n.name] = self.env[n.args[0]] * 0.5  # type: ignore[index]
            else:
                seen[n.name] = super().run_node(n)
            return seen[n.name]

    cutter, checked = Cutter(), 0
    environment: dict[str, object] = dict(x)
    for stage in program.variants["sparse"].stages:
        seen.clear()
        results = Recorder(stage.module).run(
            *(environment.get(name, torch.zeros(1)) for name in stage.inputs)
        )
        environment.update(zip(stage.outputs, results, strict=True))
        for call in cutter.cut(stage).calls:
            if isinstance(call, PieceCall):
                made = call.code.module(*(seen[name] for name in call.inputs), *call.weights)
                for name, value in zip(call.outputs, made, strict=True):
                    assert torch.equal(value, seen[name]), (stage.name, name)
                    checked += 1
    assert checked > 10


def test_nothing_is_kept_that_nothing_reads() -> None:
    for stage in toy_compile(Toy()).variants["sparse"].stages:
        cut = Cutter().cut(stage)
        alive = set(cut.inputs)
        for call, done in zip(cut.calls, cut.done, strict=True):
            reads = (
                call.inputs
                if isinstance(call, PieceCall)
                else [a.name for a in call.args if isinstance(a, Name)]
            )
            assert set(reads) <= alive, "a call reads what is there"
            alive |= set(call.outputs if isinstance(call, PieceCall) else (call.output,))
            assert set(done) <= alive
            alive -= set(done)
        assert set(cut.results) <= alive


def test_a_different_constant_is_a_different_graph() -> None:
    first, second = (calls_of(toy_compile(Toy()).variants["dense"].stages, Cutter()) for _ in range(2))
    keys = [[call.code.key for call in calls if isinstance(call, PieceCall)] for calls in (first, second)]
    assert keys[0] == keys[1]
    assert len(set(keys[0])) > 1


@pytest.mark.parametrize("name", ["ouro", "dory", "hrm-text"])
def test_inductor_gives_the_same_tokens_and_compiles_each_graph_once_per_kind_of_rows(name: str) -> None:
    model = shared_model(name)
    prompts = torch.randint(3, 270, (3, 9), generator=torch.Generator().manual_seed(2))
    want = sparse_compile(model, key_retention=0.3).generate(prompts, max_new_tokens=12, progress=False)
    compiled = sparse_compile(model, key_retention=0.3, inductor=True, validate=False)
    compiler = compiled._keeper.make_engine.compiler
    assert torch.equal(compiled.generate(prompts, max_new_tokens=12, progress=False), want)
    codes = compiler.compiled
    compiled.generate(prompts[:2], max_new_tokens=3, progress=False)
    assert compiler.compiled == codes, "two rows run in the graph of three"
    assert torch.equal(compiled.generate(prompts[:1], max_new_tokens=12, progress=False)[0], want[0])
    assert compiler.compiled <= 2 * codes


def test_warm_up_leaves_nothing_to_compile() -> None:
    compiled = sparse_compile(
        shared_model("ouro"), key_retention=0.3, inductor=True, validate=False, dense_below=12
    )
    told: list[tuple[int, int]] = []
    assert (
        compiled.warmup(max_batch=3, max_context=64, progress=lambda done, total: told.append((done, total)))
        > 0
    )
    compiler = compiled._keeper.make_engine.compiler
    before = compiler.compiled, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before[0] > 0
    assert told[-1][0] == told[-1][1] == len(told)
    prompts = torch.randint(3, 270, (3, 9), generator=torch.Generator().manual_seed(2))
    for rows in (3, 1, 2):
        compiled.generate(prompts[:rows], max_new_tokens=6, progress=False)
    assert (compiler.compiled, torch._dynamo.utils.counters["stats"]["unique_graphs"]) == before


def test_no_sum_of_a_piece_is_ordered_by_how_fast_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines would have other bits, and one alone in each process."""
    from torch._inductor import compile_fx

    seen, compile_graph = [], compile_fx.compile_fx

    def noted(*args: Any, **kwargs: Any) -> Any:
        seen.append(dict(kwargs.get("config_patches") or {}))
        return compile_graph(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx", noted)
    stage = toy_compile(Toy()).variants["dense"].stages[0]
    call = next(call for call in Cutter().cut(stage).calls if isinstance(call, PieceCall))
    torch._dynamo.reset()
    PieceCompiler(enabled=True)(call.code, [*(torch.tensor([[1], [2]]) for _ in call.inputs), *call.weights])
    assert seen[0]["deterministic"]


def test_without_inductor_pieces_run_as_they_are() -> None:
    compiler = PieceCompiler(enabled=False)
    stage = toy_compile(Toy()).variants["dense"].stages[0]
    call = next(call for call in Cutter().cut(stage).calls if isinstance(call, PieceCall))
    made = compiler(call.code, [*(torch.tensor([[1], [2]]) for _ in call.inputs), *call.weights])
    assert compiler.compiled == 0
    assert made[0].shape[0] == 2


@pytest.mark.parametrize(
    ("compute", "starts"),
    [
        (lambda make, x: make(torch.add, x, x), True),
        (lambda make, x: make(torch.add, x, make(torch.full, [3], 1.0)), True),  # a part of the sum's kernel
        (lambda make, x: make(torch.add, make(operator.getitem, make(torch.arange, 3), None), x), True),
        (lambda make, x: make(torch.full, [3], 1.0), False),
        (lambda make, x: make(torch.zeros_like, x), False),
        (lambda make, x: make(torch.add, make(torch.arange, 3), make(torch.full, [3], 1.0)), False),
        (lambda make, x: make(torch.cat, [x, make(torch.arange, 3)]), False),
        (lambda make, x: make(torch.index_select, x, 0, make(torch.arange, 3)), False),
        (lambda make, x: make(operator.setitem, x, 0, 1.0), False),
        (lambda make, x: make(operator.setitem, x, 0, x), True),
        (lambda make, x: make(torch.ops.aten.fill_.Scalar, x, 1.0), False),
        (lambda make, x: make(torch.ops.aten.zero_.default, x), False),
    ],
)
def test_kernels_start_early_where_each_reads_something(
    compute: Callable[..., fx.Node], starts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    made = compute(lambda target, *args: graph.call_function(target, args), x)
    graph.output((made,))
    assert (reads_nothing_maybe(graph) is None) == starts
    for capability, wanted in (((9, 0), {"triton.enable_pdl": True} if starts else {}), ((8, 0), {})):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert early_start(torch.device("cuda"), graph) == wanted
    assert early_start(torch.device("cpu"), graph) == {}


@pytest.mark.parametrize(
    ("numbers", "hint", "cooperative", "one_pass"),
    [
        (1024, "INNER", False, True),
        (2048, "INNER", False, True),
        (4096, "INNER", False, True),
        (4097, "INNER", False, False),
        (2048, "OUTER", False, False),
        (2048, "INNER", True, False),
    ],
)
def test_norms_of_wide_rows_are_reduced_in_one_pass(
    numbers: int, hint: str, cooperative: bool, one_pass: bool
) -> None:
    import sympy
    from torch._inductor.runtime.hints import ReductionHint
    from torch._inductor.sizevars import SizeVarAllocator
    from torch._inductor.virtualized import V

    row = SimpleNamespace(
        reduction_numel=sympy.Integer(numbers),
        numel=sympy.Integer(64),
        get_reduction_hint=lambda: ReductionHint[hint],
    )
    before = type(V.choices)
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())), one_pass_reductions():
        assert V.choices.should_use_persistent_reduction(row, cooperative) == one_pass
    assert type(V.choices) is before
