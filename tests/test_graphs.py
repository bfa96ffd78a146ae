"""Decode steps from CUDA graphs: the same bits as without, whatever the rows are. Most of it needs CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shared_models import shared_model

from sparse_compile import Engine, SamplingParams, SpeculationConfig, StepOutput, sparse_compile
from sparse_compile.models import tiny_model
from sparse_compile.runtime.graphs import BucketKey, GraphExecutor
from sparse_compile.runtime.options import Drafting
from sparse_compile.runtime.plan import PlanBuilder, RowPlan, Segment
from sparse_compile.runtime.seats import SeatTable

pytestmark = pytest.mark.usefixtures("shared_traces")

LENGTHS = (3, 17, 40)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 270, (length,), generator=generator) for length in lengths]


def generate(compiled: object, rows: list[torch.Tensor], new: int = 24) -> list[list[int]]:
    out = []
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, width - len(row) :], mask[i, width - len(row) :] = row, 1
    out = compiled.generate(  # type: ignore[attr-defined]
        input_ids=ids.cuda(), attention_mask=mask.cuda(), max_new_tokens=new, do_sample=False, progress=False
    )
    return out[:, width:].tolist()


@pytest.mark.parametrize(
    ("loops", "capture", "recapture"), [(None, 1, None), (1, 1, None), (2, 0, 2), (3, 0, 2), (1, 0, 3)]
)
def test_a_warm_up_knows_every_bucket_of_a_run(
    loops: int | None, capture: int, recapture: int | None
) -> None:
    """Nothing is captured here: the keys that requests of all ages meet are those that the warm-up goes through."""
    options = {
        "capture_loop": capture,
        "recapture_every": recapture,
        "dense_below": 9,
        "loops_per_step": loops,
    }
    model = sparse_compile(shared_model("ouro"), key_retention=0.3, validate=False, page_size=4, **options)
    engine = model.serve(3, 32)
    graphs, met = GraphExecutor(engine.executor, page_size=4, rows=(1, 2, 4)), set()
    run = engine.executor.decode

    def decode(plan: RowPlan) -> torch.Tensor:
        met.add(graphs.key(plan))
        return run(plan)

    engine.executor.decode = decode  # type: ignore[method-assign]
    for length in (3, 7, 12, 4):
        engine.add_request(list(range(5, 5 + length)), SamplingParams(7))
        engine.step()
        engine.step()
    while engine.has_unfinished():
        engine.step()
    steps = graphs.warm_up(range(1, 4), engine.plans.seats, ("dense", "sparse", "mixed"), loops)
    keys = [step.args[0] for step in steps if step.func == graphs.capture]  # type: ignore[attr-defined]
    assert len(set(keys)) == len(keys)
    assert len(met) > 3
    assert met <= set(keys)


class Replayed:
    """In place of a CUDA graph: runs over the buffers of its bucket again, and leaves the result where it was first."""

    def __init__(self, run: Callable[[], torch.Tensor], out: torch.Tensor) -> None:
        self.run, self.out = run, out

    def replay(self) -> None:
        self.out.copy_(self.run())


@pytest.mark.parametrize("loops", [None, 1])
def test_a17_buckets_that_are_refilled_give_what_their_rows_give(
    loops: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short, then long, then both, in the same buckets, with fewer rows as requests end; no GPU is needed for this."""

    def captured(self: GraphExecutor, run: Callable[[], torch.Tensor], device: object) -> Any:
        out = run().clone()
        return Replayed(run, out), out

    monkeypatch.setattr(GraphExecutor, "_captured", captured)
    options = {"key_retention": 0.3, "page_size": 4, "dense_below": 9, "loops_per_step": loops}
    model = sparse_compile(
        shared_model("ouro", dtype=torch.float64), validate=False, async_steps=True, **options
    )
    turns = [((3, 5, 2, 4), (4, 9, 9, 2)), ((40, 31, 50), (3, 4, 4)), ((2, 3, 7), (9, 3, 6))]
    found: list[dict[str, list[StepOutput]]] = []
    for graphs in (False, True):
        engine = model.serve(4, 64)
        buckets = GraphExecutor(engine.executor, page_size=4, rows=(1, 2, 4))
        if graphs:
            engine = Engine(buckets, engine.pool, engine.store, engine.options)
        engine.pool.k_pool.fill_(torch.nan)
        engine.pool.v_pool.fill_(torch.nan)
        outputs: dict[str, list[StepOutput]] = {}
        for turn, (lengths, news) in enumerate(turns):
            for at, (length, new) in enumerate(zip(lengths, news, strict=True)):
                prompt = [(7 * n + 3 * at + turn) % 200 + 3 for n in range(length)]
                engine.add_request(prompt, SamplingParams(new, want_logits=True), f"{turn} {at}")
            while engine.has_unfinished():
                for output in engine.step():
                    outputs.setdefault(output.request_id, []).append(output)
        engine.check_integrity()
        found.append(outputs)
    assert 3 <= len(buckets.buckets) <= 9  # far fewer than steps: most are replays
    for name, wanted in found[0].items():
        assert [output.token for output in found[1][name]] == [output.token for output in wanted]
        for one, other in zip(found[1][name], wanted, strict=True):
            torch.testing.assert_close(one.logits, other.logits, rtol=1e-10, atol=1e-10)


class FakeInner:
    """As much of an executor as the keys need."""

    loops = 4

    @property
    def depths(self) -> FakeInner:
        return self

    def captures_at(self, plan: object) -> tuple[bool, ...]:
        return (True,) * (plan.loops or 0)  # type: ignore[attr-defined]

    def capture_choices(self, loops: int, kinds: object) -> list[tuple[bool, ...]]:
        return [(True,) * loops]


def plan_of(lengths: tuple[int, ...], loops: int | None = None) -> object:
    seats = SeatTable(8, 512, "cpu")
    segments = [Segment([1], length - 1, seats.take([1])) for length in lengths]
    return PlanBuilder(seats).build(segments, loops=loops)


def test_the_key_covers_rows_width_kind_and_depths() -> None:
    graphs = GraphExecutor(FakeInner(), page_size=16, rows=(1, 2, 4))  # type: ignore[arg-type]
    assert graphs.key(plan_of((5,))) == BucketKey(1, "dense", 64)
    assert graphs.key(plan_of((5, 1024, 7))) == BucketKey(4, "dense", 64)
    assert graphs.key(plan_of((5, 1025))) == BucketKey(2, "dense", 128)
    assert graphs.key(plan_of((8192,))) == BucketKey(1, "dense", 512)
    assert graphs.key(plan_of((5,), loops=2)) == BucketKey(1, "mixed", 64, 2, (True, True))
    assert graphs.key(plan_of((1, 2, 3, 4, 5))) is None
    assert graphs.widths(512) == [64, 128, 256, 512]
    assert graphs.widths(500) == [64, 128, 256, 500]
    assert graphs.widths(40) == [40]
    assert [key.rows for key in graphs.keys([1, 3], 64, ["dense"])] == [4, 1]


def test_the_keys_of_speculation() -> None:
    """Drafts with and without a head, verification of whole blocks, pipelines with and without a row that captures."""
    graphs = GraphExecutor(FakeInner(), page_size=16, rows=(1, 2, 4))  # type: ignore[arg-type]
    assert graphs.key(plan_of((5,), loops=2), "draft") == BucketKey(1, "dense", 64, 2, (), "draft", False)
    assert graphs.key(plan_of((5, 6, 7), loops=2), "verify") == BucketKey(4, "dense", 64, 2, (), "verify")
    assert graphs.key(plan_of((5,), loops=1), "advance") == BucketKey(1, "mixed", 64, 1, (True,), "advance")
    keys = graphs.draft_keys([1], 64, ["dense", "sparse"], Drafting(1, 3))
    assert {(key.run, key.rows, key.loops, key.heads, key.kind) for key in keys} == {
        *(("round", 1, 1, True, kind) for kind in ("dense", "sparse")),
        *(("draft", 1, 1, heads, kind) for heads in (True, False) for kind in ("dense", "sparse")),
        *(("verify", rows, 3, True, kind) for rows in (1, 2, 4) for kind in ("dense", "sparse")),
    }
    order = {"round": 0, "draft": 1, "verify": 2}  # drafts leave what is verified
    assert [order[key.run] for key in keys] == sorted(order[key.run] for key in keys)
    assert {key.width for key in keys if key.run == "round"} == {3}
    keys = graphs.draft_keys([1], 64, ["dense"], Drafting(1, 3, adaptive=True))
    assert {key.width for key in keys if key.run == "round"} == {1, 2, 3}
    keys = graphs.draft_keys([1], 64, ["dense", "sparse"], Drafting(1, 4, pipeline=True))
    assert {(key.run, key.rows, key.kind, key.captures, key.width) for key in keys} == {
        *(("advance", rows, "mixed", (on,), 1) for rows in (1, 2, 4) for on in (False, True)),
        *(("step", 1, kind, (), 4) for kind in ("dense", "mixed")),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["block", "pipeline"])
@pytest.mark.parametrize("name", ["ouro", "dory"])
def test_graphs_of_speculation_change_no_bits(name: str, mode: str) -> None:
    model, asked = tiny_model(name).cuda(), SpeculationConfig(mode, draft_loops=1, num_draft_tokens=3)
    options = {
        "key_retention": 0.3,
        "page_size": 4,
        "inductor": False,
        "dense_below": 0,
        "speculation": asked,
    }
    plain = sparse_compile(model, cuda_graphs=False, async_steps=False, **options)
    graphed = sparse_compile(model, cuda_graphs=True, **options)
    for rows in (prompts(), *([row] for row in prompts())):
        assert generate(graphed, rows) == generate(plain, rows)
    assert graphed.engine.options.async_steps
    assert {key.run for key in graphed.engine.executor.round_buckets} == {
        "round" if mode == "block" else "step"
    }
    assert not graphed.engine.executor.buckets  # all of it is in one graph
    graphed.engine.check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "retention", "inductor"),
    [(name, retention, False) for name in ("ouro", "dory", "hrm-text") for retention in (1.0, 0.3)]
    + [("ouro", 0.3, True), ("dory", 0.3, True), ("hrm-text", 0.3, True)],
)
def test_graphs_change_no_bits(name: str, retention: float, inductor: bool) -> None:
    model = tiny_model(name).cuda()
    options = {"key_retention": retention, "page_size": 4, "inductor": inductor, "dense_below": 0}
    plain = sparse_compile(model, cuda_graphs=False, **options)
    graphed = sparse_compile(model, cuda_graphs=True, **options)
    assert generate(graphed, prompts()) == generate(plain, prompts())
    assert graphed.engine.executor.buckets
    for row in prompts():  # other buckets, shorter and longer than what ran before
        assert generate(graphed, [row]) == generate(plain, [row])
    graphed.engine.check_integrity()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ouro", "dory", "hrm-text"])
def test_on_the_gpu_dense_equals_transformers(name: str) -> None:
    model = tiny_model(name).cuda()
    compiled = sparse_compile(model, key_retention=1.0, inductor=False)
    for row in prompts():
        own = model.generate(row[None].cuda(), max_new_tokens=24, do_sample=False)[:, len(row) :].tolist()
        assert generate(compiled, [row]) == own


@pytest.mark.gpu
def test_rows_beyond_the_plan_touch_only_the_dummies() -> None:
    compiled = sparse_compile(
        tiny_model("ouro").cuda(), key_retention=0.3, page_size=4, dense_below=0, inductor=False
    )
    generate(compiled, prompts())
    engine = compiled.engine
    executor, pool, store = engine.executor, engine.pool, engine.store
    (key, bucket), *_ = [pair for pair in executor.buckets.items() if pair[0].rows == 4]
    before = [tensor.clone() for tensor in (pool.k_pool, pool.v_pool, store.index, store.count, store.o_ref)]
    bucket.plan.packed.zero_()
    bucket.graph.replay()
    after = (pool.k_pool, pool.v_pool, store.index, store.count, store.o_ref)
    for old, new in zip(before[:2], after[:2], strict=True):
        assert torch.equal(old[:, 1:].nan_to_num(), new[:, 1:].nan_to_num())
    for old, new in zip(before[2:], after[2:], strict=True):
        assert torch.equal(old[1:].nan_to_num(), new[1:].nan_to_num())
    assert key.kind in ("sparse", "mixed", "dense")


@pytest.mark.gpu
def test_kernels_that_wait_for_the_host_are_not_captured() -> None:
    model = tiny_model("ouro", dtype=torch.float64).cuda()  # no Triton kernels in float64
    assert sparse_compile(model, key_retention=0.3).sparse_config.cuda_graphs is False
    with pytest.raises(ValueError, match=r"cuda_graphs=True: .*Triton"):
        sparse_compile(model, key_retention=0.3, cuda_graphs=True)


def test_graphs_need_cuda() -> None:
    with pytest.raises(ValueError, match="cuda_graphs=True: needs a model on CUDA, this one is on cpu"):
        sparse_compile(tiny_model("ouro"), key_retention=0.3, cuda_graphs=True)
