"""The rewritten graph through Inductor: same values, no copies of caches, and caches of compiled code that neither miss
nor mix.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_forms import Looped, example, sdpa
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code

import sparse_compile.backend as backend
from sparse_compile.backend.inductor import CachesStay, source_files, with_own_outputs
from sparse_compile.models.presets import tiny_model

_ops = torch.ops.sparse_compile


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(autouse=True)
def _fresh_counters() -> None:
    counters.clear()


class Step(nn.Module):
    """A decode step that writes its keys and values in place, as a static cache does, then attends in every loop."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Looped(sdpa)

    def forward(self, q: Tensor, ks: list[Tensor], vs: list[Tensor], mask: Tensor, at: Tensor) -> Tensor:
        for k, v in zip(ks, vs, strict=True):
            k.index_copy_(2, at, q[:, :2])
            v.index_copy_(2, at, q[:, :2] + 1)
        return self.inner(q, ks, vs, mask)


def inputs() -> tuple[Any, ...]:
    q, ks, vs, mask = example(loops=3)
    return q.float(), [k.float() for k in ks], [v.float() for v in vs], mask, torch.tensor([19])


def run(**options: Any) -> Tensor:
    step = torch.compile(Step(), backend="sparse_compile", options={"key_retention": 0.3, **options})
    return step(*inputs())


def test_one_compiled_step() -> None:
    """A21 and A22: consume sees what capture wrote, the caches are written in place, and none is copied.

    The mode asks for CUDA graphs, which the CPU does without.
    """
    wanted = run(inductor=False)
    torch._dynamo.reset()
    given = inputs()
    settings = {"key_retention": 0.3, "mode": "reduce-overhead"}
    step = torch.compile(Step(), backend="sparse_compile", options=settings)
    got, (code,) = run_and_get_code(step, *given)
    torch.testing.assert_close(got, wanted)
    assert bool((given[1][0][:, :, 19] == given[0][:, :2, 0]).all())
    for kind, times in (("dense", 1), ("capture", 1), ("consume", 1)):
        assert code.count(f"torch.ops.sparse_compile.cached_{kind}.default(") == times
    assert "empty_strided_cpu((3, 2, 24, 16)" not in code


def test_ops_may_be_given_a_tensor_and_its_copy() -> None:
    """A20: Inductor may place both in one memory where an op writes; ours write nothing but results."""

    def pair(k: Tensor, v: Tensor, q: Tensor) -> Tensor:
        table, length, row, slot = _ops.visible_keys(torch.ones(3, 24, dtype=torch.bool))
        how = {"scale": 0.3, "softcap": 0.0, "implementation": "batched"}
        copy = k.clone()
        out, *held = _ops.cached_capture(
            q, copy, k, table, length, row, None, None, slot, retention_num=3, retention_den=10, **how
        )
        copy.add_(1)
        return out + _ops.cached_consume(q, copy, k, table, length, row, None, slot, *held, **how)

    q, ks, vs, _ = example()
    given = (ks[0].float(), vs[0].float(), q[:, :, 0].float())
    torch.testing.assert_close(torch.compile(pair)(*given), pair(*given))


@pytest.mark.slow
def test_generate_through_inductor() -> None:
    """24 tokens of a left-padded batch at full retention are the plain model's."""
    from transformers import CompileConfig

    model = tiny_model("ouro", num_hidden_layers=1, total_ut_steps=3)
    ids = torch.randint(3, 60, (4, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 2, 5, 8)):
        mask[row, :padding] = 0
    config = CompileConfig(backend="sparse_compile", mode=None, options={"key_retention": 1})
    config._compile_all_devices = True
    arguments: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "cache_implementation": "static"}
    wanted = model.generate(input_ids=ids * mask, attention_mask=mask, **arguments)
    got = model.generate(input_ids=ids * mask, attention_mask=mask, compile_config=config, **arguments)
    assert torch.equal(got, wanted)
    assert [report.counts["dense"] for report in backend.reports()] == [3]


def test_equal_graphs_hit_the_cache_and_other_options_miss_it() -> None:
    with fresh_inductor_cache():
        for number, (options, hit) in enumerate(
            [({}, False), ({}, True), ({"key_retention": 0.5}, False), ({"on_unmatched": "warn"}, False)]
        ):
            torch._dynamo.reset()
            counters.clear()
            run(**options)
            assert counters["inductor"]["fxgraph_cache_hit"] == hit, number
            assert counters["inductor"]["fxgraph_cache_miss"] == (not hit), number


def test_the_identity_covers_sources_options_and_the_users_own_pass() -> None:
    class Theirs:
        def __init__(self, name: str | None) -> None:
            self.name = name

        def __call__(self, graph: Any) -> None:
            graph.seen = True

        def uuid(self) -> str | None:
            return self.name

    options = backend.BackendOptions()
    mine = CachesStay(options).uuid()
    assert CachesStay(backend.BackendOptions()).uuid() == mine
    assert CachesStay(backend.BackendOptions(key_retention=0.2)).uuid() != mine
    assert CachesStay(options, Theirs("a")).uuid() != CachesStay(options, Theirs("b")).uuid()
    assert CachesStay(options, Theirs(None)).uuid() is None
    names = {path.rpartition("/")[2] for path in source_files()}
    assert {"cached.py", "cached_rewrite.py", "masks.py", "compile.py", "triton_attention.py"} <= names


def test_a_copied_cache_is_a_failure() -> None:
    """The check that runs on Inductor's graph can fail."""
    from sparse_compile.passes.errors import PassError

    graph = torch.fx.Graph()
    q, k = graph.placeholder("q"), graph.placeholder("k")
    copied = graph.call_function(torch.ops.aten.clone.default, (k,))
    graph.call_function(_ops.cached_dense.default, (q, copied, k))
    with pytest.raises(PassError, match="a copy of a cache"):
        CachesStay(backend.BackendOptions())(graph)


@pytest.mark.gpu
def test_results_of_cuda_graphs_are_the_callers() -> None:
    """A16 on CUDA: logits of step t read after step t + 1; and the step runs from CUDA graphs."""
    q, ks, vs, mask, at = inputs()
    given = [q.cuda(), [k.cuda() for k in ks], [v.cuda() for v in vs], mask.cuda(), at.cuda()]
    for one in (*given[1], *given[2]):
        torch._dynamo.mark_static_address(one)
    settings = {"key_retention": 0.3, "mode": "reduce-overhead"}
    step = torch.compile(Step(), backend="sparse_compile", options=settings)
    with torch.no_grad():
        wanted = run(inductor=False)
        results = [step(*given) for _ in range(4)]
    for got in results:
        torch.testing.assert_close(got.cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert counters["inductor"]["cudagraph_skips"] == 0


def test_outputs_that_are_no_cuda_tensors_are_handed_on() -> None:
    x = torch.ones(2)
    assert with_own_outputs(lambda a: (a, 3))(x)[0] is x


@pytest.mark.slow
def test_symbolic_sizes() -> None:
    """Growing caches: batch and length are symbols, the capacity of a capture is computed from them."""
    step = torch.compile(Looped(sdpa), backend="sparse_compile", options={"key_retention": 0.3}, dynamic=True)
    results, seen = [], []
    sizes = ((3, 24), (2, 31))
    for rows, keys in sizes:
        results.append(step(*example(loops=3, rows=rows, keys=keys)))
        seen.append(len(backend.reports()))
    assert seen[0] == seen[1], "the second size compiled anew"
    for (rows, keys), got in zip(sizes, results, strict=True):
        torch._dynamo.reset()
        given = example(loops=3, rows=rows, keys=keys)
        settings = {"key_retention": 0.3, "inductor": False}
        plain = torch.compile(Looped(sdpa), backend="sparse_compile", options=settings, dynamic=False)
        torch.testing.assert_close(got, plain(*given))
