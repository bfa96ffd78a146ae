"""The ops as torch sees them: schemas, fakes, strides and aliasing, refusals, and their place in compiled
graphs.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from kernel_cases import BOTH, GARBAGE, SITE, Case, Shape, arguments, bits, build, call, next_loop
from torch._subclasses.fake_tensor import FakeTensorMode

from sparse_compile.kernels import checks, dispatch, ops

ATTENTION = ("dense", "capture", "consume", "mixed")
SMALL = Shape(((5, 2), (11, 1)), padding=1)
SITE_KEYWORDS: dict[str, Any] = {"scale": 0.1, "window": 0, "softcap": 0.0}


def captured(shape: Shape = SMALL) -> Case:
    """A case whose rows can also consume."""
    case = build(shape)
    call(case, "capture", "reference")
    return next_loop(case)


def overload(op: str) -> Any:
    return getattr(torch.ops.sparse_compile, op).default


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize(
    ("op", "gated"), [("kv_write", False), *((op, gated) for op in ATTENTION for gated in (False, True))]
)
def test_opcheck(op: str, gated: bool, implementation: str) -> None:
    """Schema, fake and tracing agree with the real op. This proves no numbers; other tests compare those."""
    args, kwargs = arguments(captured(replace(SMALL, dtype=torch.float32, gated=gated)), op, implementation)
    torch.library.opcheck(overload(op), args, kwargs)


@pytest.mark.parametrize("op", ["site"])
def test_opcheck_of_the_marker(op: str) -> None:
    """Nothing of the marker can be run, so only its schema and its fake are checked."""
    case = build(SMALL)
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in (case.q, case.k, case.v))
        results = [
            torch.ops.sparse_compile.site(*given, **SITE_KEYWORDS) for given in ((q, k, v), (q, k, v, q))
        ]
    for out in results:
        assert out.shape == case.q.shape
        assert out.dtype == case.q.dtype
        assert out.is_contiguous()
    assert not overload(op)._schema.is_mutable


def test_a_marker_that_runs_says_that_its_graph_was_never_rewritten() -> None:
    case = build(SMALL)
    with pytest.raises(RuntimeError, match=r"only marks an attention call .* never rewritten"):
        torch.ops.sparse_compile.site(case.q, case.k, case.v, case.q, **SITE_KEYWORDS)


def test_schemas_name_what_is_mutated() -> None:
    pool, store = {"k_pool", "v_pool"}, {"index", "count", "mass", "o_ref", "c_ref"}
    expected = {
        "kv_write": pool,
        "dense": pool,
        "capture": pool | store,
        "consume": pool,
        "mixed": pool | store,
    }
    writes_nothing = {"site", "cached_dense", "cached_capture", "cached_consume"}
    for op, names in (expected | {op: set() for op in writes_nothing}).items():
        mutated = {a.name for a in overload(op)._schema.arguments if a.alias_info and a.alias_info.is_write}
        assert mutated == names, op
        assert all(r.alias_info is None for r in overload(op)._schema.returns)
    assert set(ops.SCHEMAS) == set(expected) | writes_nothing


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", ["dense", "capture", "consume", "mixed"])
def test_consume_leaves_the_store_alone_and_outputs_alias_nothing(op: str, implementation: str) -> None:
    case = captured()
    before = bits(case.store)
    out = call(case, op, implementation)
    inputs = [case.q, case.k, case.v, *case.pool.values(), *case.plan.values(), *case.store.values()]
    assert all(out.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in inputs)
    if op in ("dense", "consume"):
        assert all(torch.equal(before[name], now) for name, now in bits(case.store).items())


def fused(case: Case) -> Case:
    """q, k, v and the gate as slices of one projection [T, (2 H + 2 Hkv) * D]."""
    d = case.shape.head_dim
    held = [getattr(case, name) for name in case.fresh]
    projection = torch.cat([x.flatten(1) for x in held], dim=1)
    parts = projection.split([x.shape[1] * d for x in held], dim=1)
    return replace(case, **{n: x.unflatten(1, (-1, d)) for n, x in zip(case.fresh, parts, strict=True)})


def heads_first(case: Case) -> Case:
    """q, k, v and the gate as transposed views of [H, T, D], as model code makes them."""
    return replace(
        case, **{n: getattr(case, n).transpose(0, 1).contiguous().transpose(0, 1) for n in case.fresh}
    )


def expanded(case: Case) -> Case:
    """One key/value head, one query row, and one number of each head's gate, shown to all."""
    k, v = (x[:, :1].expand_as(x) for x in (case.k, case.v))
    assert case.gate is not None
    return replace(
        case, q=case.q[:1].expand_as(case.q), k=k, v=v, gate=case.gate[..., :1].expand_as(case.gate)
    )


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize("view", [fused, heads_first, expanded])
@pytest.mark.parametrize(
    "shape", [SMALL, Shape(((7, 1),), heads=(6, 2), head_dim=12)], ids=["batch", "one row"]
)
def test_strides_do_not_matter(op: str, implementation: str, view: Any, shape: Shape) -> None:
    viewed = view(captured(replace(shape, gated=True)))
    plain = replace(viewed, **{name: getattr(viewed, name).clone().contiguous() for name in viewed.fresh})
    got, expected = (call(case.copy(), op, implementation) for case in (viewed, plain))
    assert torch.equal(got, expected)
    args, kwargs = arguments(viewed.copy(), op, implementation)
    with FakeTensorMode() as mode:
        fake = overload(op)(*(mode.from_tensor(x) for x in args), **kwargs)
    assert (fake.shape, fake.stride(), fake.dtype) == (got.shape, got.stride(), got.dtype)


@pytest.mark.parametrize("implementation", BOTH)
def test_strided_pools(implementation: str) -> None:
    """Keys and values interleaved in one allocation, pages not contiguous."""
    case = build(SMALL)
    expected = call(case.copy(), "dense", implementation)
    both = torch.stack(list(case.pool.values()), dim=3)
    strided = replace(case, pool={"k_pool": both[:, :, :, 0], "v_pool": both[:, :, :, 1]})
    assert torch.equal(call(strided, "dense", implementation), expected)


# Refusals ---------------------------------------------------------------------------------------------------
# ----------


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", ["capture", "mixed"])
def test_a_count_above_capacity_is_refused_before_anything_is_written(op: str, implementation: str) -> None:
    case = build(Shape(((40, 1),), retention="0.3"))
    case.row_mode.fill_(2)
    case.store["index"] = case.store["index"][..., :5].contiguous()
    before = bits(case.pool)
    with pytest.raises(RuntimeError, match=r"40 visible keys retains 12 .* room for 5; raise max_context"):
        call(case, op, implementation)
    assert all(torch.equal(before[name], now) for name, now in bits(case.pool).items())
    assert not case.store["count"].any()


@pytest.mark.parametrize("implementation", BOTH)
@pytest.mark.parametrize("op", ["consume", "mixed"])
def test_consume_before_capture_is_refused(op: str, implementation: str) -> None:
    case = build(SMALL)
    case.row_mode = torch.where(case.plan["row_length"] > 0, 3, 0).int()
    with pytest.raises(
        RuntimeError, match=r"consume before capture: row \d slot|consume before capture: row \d reads"
    ):
        call(case, op, implementation)


def test_a_corrupt_count_is_refused() -> None:
    case = captured()
    case.store["count"].fill_(GARBAGE)
    with pytest.raises(RuntimeError, match=f"count {GARBAGE}, outside 1 .. capacity"):
        call(case, "consume")


@pytest.mark.parametrize("op", ATTENTION)
def test_triton_names_the_remedy(op: str) -> None:
    with pytest.raises(ValueError, match=r'no kernels for torch.float64; use implementation="batched"'):
        call(captured(), op, "triton")


@pytest.mark.parametrize("op", ATTENTION)
def test_unknown_implementations_list_the_choices(op: str) -> None:
    with pytest.raises(
        ValueError, match="'fast' is unknown; choose one of 'reference', 'batched', 'triton', 'auto'"
    ):
        call(captured(), op, "fast")


@pytest.mark.parametrize("op", ATTENTION)
def test_auto_is_batched(op: str) -> None:
    case = captured()
    assert torch.equal(call(case.copy(), op, "auto"), call(case.copy(), op, "batched"))


def change(case: Case, name: str, value: Any) -> None:
    for holder in (case.plan, case.store, case.pool):
        if name in holder:
            holder[name] = value(holder[name])
            return
    setattr(case, name, value(getattr(case, name)))


@pytest.mark.parametrize(
    ("op", "name", "value", "message"),
    [
        ("dense", "q", lambda t: t[:, :3], "q has 3 heads, which is no multiple of the 2"),
        ("dense", "q", lambda t: t[..., :4], "q has head_dim 4 but k has 8"),
        ("dense", "q", lambda t: t.float(), "q is torch.float32 but k and the pool are torch.float64"),
        ("dense", "k", lambda t: t[1:], "k and v must both be"),
        ("dense", "v_pool", lambda t: t.float(), "v_pool is torch.float32"),
        ("dense", "k_pool", lambda t: t[:, :, :1], "k_pool and v_pool must both be"),
        ("dense", "row_seq", lambda t: t.long(), "row_seq must be int32"),
        ("dense", "row_length", lambda t: t[:-1], "row_length must be"),
        ("dense", "row_length", lambda t: t + 100, "row_length has values .* give it more pages"),
        ("dense", "row_position", lambda t: t - 1, "row_position has values -1"),
        ("dense", "row_seq", lambda t: t + 2, "row_seq has values"),
        ("dense", "row_loop", lambda t: t + 9, "row_loop .* has values"),
        ("dense", "block_table", lambda t: t - GARBAGE, "block_table holds page id -"),
        ("dense", "block_table", lambda t: t[0], "block_table must be"),
        ("capture", "row_slot", lambda t: t + 90, "row_slot.* is not one of the store's 6 slots"),
        ("capture", "row_slot", lambda t: torch.ones_like(t), "share a reference store slot"),
        ("capture", "mass", lambda t: t.float(), "mass must be torch.float64 for torch.float64 queries"),
        ("capture", "o_ref", lambda t: t[..., :4], "o_ref must be"),
        ("consume", "count", lambda t: t.long(), "count must be torch.int32"),
        ("mixed", "row_mode", lambda t: t + 4, "row_mode has values"),
        ("mixed", "row_mode", lambda t: t.long(), "row_mode must be int32"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(op: str, name: str, value: Any, message: str) -> None:
    case = captured()
    change(case, name, value)
    with pytest.raises((ValueError, IndexError), match=message):
        call(case, op)


@pytest.mark.parametrize("op", ATTENTION)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda t: t[..., :4], r"gate must be \[4, 4, 8\], as q, got \[4, 4, 4\]; expand it to q's shape"),
        (lambda t: t[1:], r"gate must be \[4, 4, 8\], as q, got \[3, 4, 8\]; expand it to q's shape"),
        (lambda t: t.float(), r"gate is torch.float32 but q is torch.float64; pass gate.to\(q.dtype\)"),
    ],
)
def test_a_gate_that_does_not_fit_is_refused(op: str, value: Any, message: str) -> None:
    case = captured(replace(SMALL, gated=True))
    before = bits(case.pool)
    change(case, "gate", value)
    with pytest.raises(ValueError, match=message):
        call(case, op)
    assert all(torch.equal(before[name], now) for name, now in bits(case.pool).items())


@pytest.mark.parametrize("op", ATTENTION)
def test_tensors_too_many_or_too_few_are_refused(op: str) -> None:
    args, kwargs = arguments(captured(replace(SMALL, gated=True)), op, "reference")
    kwargs.pop("query_rows", None)
    for wrong in ((*args, args[-1]), args[:-2]):
        with pytest.raises(ValueError, match="zip"):
            getattr(dispatch, op)(*wrong, **kwargs)


def test_a_gate_on_another_device_is_refused() -> None:
    case = captured(replace(SMALL, gated=True))
    assert case.gate is not None
    elsewhere = replace(case.attention, gate=case.gate.to("meta"))
    with pytest.raises(ValueError, match="gate is on meta but q is on cpu; move it to q's device"):
        checks.check_attention(elsewhere, case.k, case.v)


def test_one_memory_for_keys_and_values_is_refused() -> None:
    case = build(SMALL)
    case.pool["v_pool"] = case.pool["k_pool"]
    with pytest.raises(ValueError, match="k_pool and v_pool are the same memory"):
        call(case, "dense")


# Graphs -----------------------------------------------------------------------------------------------------
# ----------


CAPTURE_KEYWORDS = arguments(build(SMALL), "capture")[1]
CONSUME_KEYWORDS = {n: x for n, x in CAPTURE_KEYWORDS.items() if not n.startswith(("retention", "keep_"))}


def capture_then_consume(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.ops.sparse_compile.capture(*args, **CAPTURE_KEYWORDS)
    second = torch.ops.sparse_compile.consume(q, k, v, *args[3:], **CONSUME_KEYWORDS)
    return first, second


def write_to_a_clone(
    k: torch.Tensor, v: torch.Tensor, k_pool: torch.Tensor, *rest: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The clone must stay one: the op writes to it, and its origin is an operand too."""
    mine = k_pool.clone()
    torch.ops.sparse_compile.kv_write(k, v, mine, k_pool, *rest, plane=1, plane_stride=2)
    return mine.nan_to_num(), k_pool.nan_to_num()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_consume_sees_what_capture_wrote_in_one_compiled_graph(backend: str) -> None:
    case = build(SMALL)
    later = next_loop(case)
    args, _ = arguments(case, "capture")
    eager_args = [x.clone() for x in args]
    expected = capture_then_consume(later.q, later.k, later.v, *eager_args)
    compiled = torch.compile(capture_then_consume, backend=backend, fullgraph=True)
    for got, reference in zip(compiled(later.q, later.k, later.v, *args), expected, strict=True):
        assert torch.equal(got, reference)
    for got, reference in zip(args, eager_args, strict=True):
        assert torch.equal(bits({"x": got})["x"], bits({"x": reference})["x"])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_cloned_operand_is_not_folded_into_its_origin(backend: str) -> None:
    case = build(SMALL)
    (k, v, k_pool, _, *rest), _ = arguments(case, "kv_write")
    expected = write_to_a_clone(k, v, k_pool.clone(), *rest)
    compiled = torch.compile(write_to_a_clone, backend=backend, fullgraph=True)
    for got, reference in zip(compiled(k, v, k_pool.clone(), *rest), expected, strict=True):
        assert torch.equal(got, reference)


def test_dead_code_elimination_keeps_the_ops_that_write() -> None:
    graph = torch.fx.Graph()
    for op in ("capture", "consume", "dense", "mixed", "kv_write", "site"):
        names = [a.name for a in overload(op)._schema.arguments if not a.kwarg_only]
        graph.call_function(overload(op), tuple(graph.placeholder(f"{op}_{name}") for name in names))
    graph.output(())
    graph.eliminate_dead_code()
    left = [node.target for node in graph.nodes if node.op == "call_function"]
    assert left == [overload(op) for op in ("capture", "consume", "dense", "mixed", "kv_write")]


def test_symbolic_rows_compile_once() -> None:
    """One graph serves every row count."""
    case = captured(Shape(((9, 4), (5, 3)), padding=1))
    compilations = []

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        compilations.append(module)
        return module.forward

    def step(*args: torch.Tensor) -> torch.Tensor:
        return torch.ops.sparse_compile.consume(*args, **CONSUME_KEYWORDS) * 2

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
    for rows in ([0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6], [5, 2]):
        some = case.select(rows)
        args, keywords = arguments(some.copy(), "consume")
        expected = torch.ops.sparse_compile.consume(*args, **(keywords | CONSUME_KEYWORDS)) * 2
        assert torch.equal(compiled(*args), expected)
    assert len(compilations) == 1


def test_importing_the_ops_needs_torch_alone() -> None:
    code = (
        "import sys, sparse_compile.kernels.ops\n"
        "loaded = set(sys.modules)\n"
        "ours = {m.split('.')[1] for m in loaded if m.startswith('sparse_compile.')}\n"
        "print(sorted(ours), 'triton' in loaded, 'transformers' in loaded)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "['kernels'] False False"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fault", ["capacity", "empty"])
def test_cuda_asserts_on_the_device(fault: str) -> None:
    """A device assertion ends the process's CUDA context, so it is provoked in a process of its own."""
    code = (
        "import sys, torch; sys.path.insert(0, sys.argv[1])\n"
        "from kernel_cases import Shape, build, call\n"
        "case = build(Shape(((40, 1),), device='cuda'))\n"
        "if sys.argv[2] == 'capacity':\n"
        "    case.store['index'] = case.store['index'][..., :5].contiguous(); call(case, 'capture')\n"
        "else:\n"
        "    call(case, 'consume')\n"
        "torch.cuda.synchronize()"
    )
    command = [sys.executable, "-c", code, str(__file__).rsplit("/", 1)[0], fault]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "assert" in result.stderr.lower()


def test_the_store_site_is_checked() -> None:
    case = captured()
    args, keywords = arguments(case, "consume")
    with pytest.raises(ValueError, match=f"site={SITE + 9} is not one of the store's 3 sites"):
        torch.ops.sparse_compile.consume(*args, **(keywords | {"site": SITE + 9}))
