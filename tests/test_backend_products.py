"""Products of a few rows in the graphs of torch.compile: what is rewritten, what is not and why; the same values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from looped_models import LoopedConfig, RotaryInside
from quantised import StandIn
from test_backend import decode_config, generate, padded_batch
from torch import Tensor, fx, nn
from torch._inductor.virtualized import V

import sparse_compile.backend as backend
from sparse_compile.backend.inductor import _prepare_product
from sparse_compile.backend.options import BackendOptions
from sparse_compile.errors import ArgumentError
from sparse_compile.kernels import skinny_choice
from sparse_compile.kernels.skinny import MAX_ROWS
from sparse_compile.models.presets import tiny_model
from sparse_compile.passes.graph import PRODUCTS

pytestmark = pytest.mark.usefixtures("fresh_compiler")

F = nn.functional
E, I, HEADS, KEYS = 16, 24, 2, 12  # hidden and intermediate size  # noqa: E741
Body = Callable[["Step", Tensor], Any]


class Step(nn.Module):
    """A decode step: attention over a cache, then `body`, which has the weights."""

    def __init__(self, body: Body, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        make = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            values = torch.randn(shape, generator=make) / shape[-1] ** 0.5
            return nn.Parameter(values.to(dtype), requires_grad=False)

        self.body = body
        self.w, self.gate, self.up, self.down = weight(E, E), weight(I, E), weight(I, E), weight(E, I)
        self.both, self.bias = weight(2 * I, E), weight(E)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, cache: Tensor, cos: Tensor, sin: Tensor) -> Any:
        """x [B, 1, E], cache [B, HEADS, KEYS, D], cos and sin [B, 1, D]."""
        self.cos, self.sin = cos, sin
        rows = x.shape[0]
        q = x.view(rows, 1, HEADS, -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, cache, cache)
        return self.body(self, out.transpose(1, 2).reshape(rows, 1, E))


def inputs(rows: int = 3, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(rows)
    size = E // HEADS
    x, cache = torch.randn(rows, 1, E, generator=make), torch.randn(rows, HEADS, KEYS, size, generator=make)
    cos, sin = (torch.rand(rows, 1, size, generator=make) * 2 - 1 for _ in "cs")
    return tuple(one.to(dtype) for one in (x, cache, cos, sin))


def compiled(step: nn.Module, **options: Any) -> Callable[..., Any]:
    settings = {"inductor": False, "on_unmatched": "ignore", "skinny_products": True, **options}
    return torch.compile(step, backend="sparse_compile", options=settings)


@torch.no_grad()
def report_of(body: Body, given: tuple[Tensor, ...] | None = None, **options: Any) -> backend.GraphReport:
    """The report of the compiled step, after a comparison of its values: at most as far from float64 as eager code is,
    beside a last place of bfloat16 in two factors.
    """
    given = inputs() if given is None else given
    got, eager = compiled(Step(body), **options)(*given), Step(body)(*given)
    exact = Step(body, torch.float64)
    exact.load_state_dict(Step(body).state_dict())
    truth = exact(*(one.double() for one in given))
    mine, theirs = ((one.double() - truth).abs().max() for one in (got, eager))
    assert mine <= theirs + 2**-7 * truth.abs().max()
    report = backend.last_report()
    assert report is not None
    return report


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def turned(step: Step, x: Tensor) -> Tensor:
    heads = F.linear(x, step.w).view(x.shape[0], 1, HEADS, -1).transpose(1, 2)
    return rotate(heads, step.cos.unsqueeze(1), step.sin.unsqueeze(1)) + 1


def gated(halves: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Body:
    def body(step: Step, x: Tensor) -> Tensor:
        gate, up = halves(F.linear(x, step.both))
        return F.silu(gate) * up

    return body


BODIES: dict[str, tuple[Body, dict[str, int]]] = {
    "plain": (lambda s, x: F.linear(x, s.w), {"skinny_linear": 1}),
    "bias": (lambda s, x: F.linear(x, s.w, s.bias).relu(), {"skinny_linear": 1}),
    "add": (lambda s, x: x + F.linear(x, s.w), {"skinny_add": 1}),
    "add-left": (lambda s, x: F.linear(x, s.w, s.bias).add(x), {"skinny_add": 1}),
    "add-torch": (lambda s, x: torch.add(x, F.linear(x, s.w)), {"skinny_add": 1}),
    "chunk": (gated(lambda y: y.chunk(2, dim=-1)), {"skinny_gated": 1}),
    "split": (gated(lambda y: torch.split(y, I, -1)), {"skinny_gated": 1}),
    "slices": (gated(lambda y: (y[..., :I], y[:, :, I:])), {"skinny_gated": 1}),
    "mlp": (
        lambda s, x: x + F.linear(gated(lambda y: y.chunk(2, -1))(s, x), s.down),
        {"skinny_gated": 1, "skinny_add": 1},
    ),
    "two weights": (lambda s, x: F.silu(F.linear(x, s.gate)) * F.linear(x, s.up), {"skinny_gated": 1}),
    "up before gate": (lambda s, x: F.linear(x, s.up) * F.silu(F.linear(x, s.gate)), {"skinny_gated": 1}),
    "other inputs": (lambda s, x: F.silu(F.linear(x, s.gate)) * F.linear(x + 1, s.up), {"skinny_linear": 2}),
    "one weight": (lambda s, x: F.silu(y := F.linear(x, s.gate)) * y, {"skinny_linear": 1}),
    "a bias": (lambda s, x: F.silu(F.linear(x, s.w, s.bias)) * F.linear(x, s.w), {"skinny_linear": 2}),
    "both read": (
        lambda s, x: F.silu(y := F.linear(x, s.gate)) * F.linear(x, s.up) + y,
        {"skinny_linear": 2},
    ),
    "rotary": (turned, {"skinny_rotary": 1}),
    # and what must stay as it is beside the product
    "up first": (gated(lambda y: (y[..., I:], y[..., :I])), {"skinny_linear": 1}),
    "first dimension": (lambda s, x: F.linear(x, s.w).chunk(1, 0)[0] * 2, {"skinny_linear": 1}),
    "twice": (lambda s, x: (y := F.linear(x, s.w)) + x + y, {"skinny_linear": 1}),
    "itself": (lambda s, x: (y := F.linear(x, s.w)) + y, {"skinny_linear": 1}),
    "alpha": (lambda s, x: torch.add(x, F.linear(x, s.w), alpha=2), {"skinny_linear": 1}),
    "broadcast": (lambda s, x: s.bias + F.linear(x, s.w), {"skinny_linear": 1}),
    "number": (lambda s, x: F.linear(x, s.w) + 1.0, {"skinny_linear": 1}),
    "other dtype": (lambda s, x: (x.float() + F.linear(x, s.w)).bfloat16(), {"skinny_linear": 1}),
    "in place": (lambda s, x: F.linear(x, s.w).add_(x), {"skinny_linear": 1}),
}


@pytest.mark.parametrize("name", BODIES)
def test_linear_layers_become_products(name: str) -> None:
    body, wanted = BODIES[name]
    report = report_of(body)
    assert report.products == wanted
    assert report.library == ()
    made = sum(wanted.values()) + (name in ("two weights", "up before gate"))
    assert report.replaced == made
    assert f"products of few rows: {made} of {made} linear layers" in str(report)


def scaled(x: Tensor) -> Tensor:
    """As models of transformers write it."""
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def normed(by: Callable[[Step, Tensor], Tensor]) -> Body:
    """Norms of what a product made, read by a product and by two that are one."""

    def body(step: Step, x: Tensor) -> Tensor:
        x = x + F.linear(x, step.w)
        x = x + F.linear(by(step, x), step.w)
        rows = by(step, x)
        return F.linear(F.silu(F.linear(rows, step.gate)) * F.linear(rows, step.up), step.down)

    return body


def _summed(step: Step, x: Tensor) -> Tensor:
    wide = x.float()
    return (torch.rsqrt(torch.sum(wide * wide, dim=2, keepdim=True) + 1e-6) * wide).type_as(x)


def _weight_in_float32(step: Step, x: Tensor) -> Tensor:
    wide = x.float()
    unit = wide * torch.rsqrt(1e-6 + torch.mean(torch.square(wide), -1, True))
    return (step.bias.float() * unit).bfloat16() if x.dtype == torch.bfloat16 else step.bias * unit


def _written_to(step: Step, x: Tensor) -> Tensor:
    """The product must read the weight as it was."""
    rows = step.bias * scaled(x)
    step.bias.mul_(2)
    return rows


NORMS: dict[str, tuple[Callable[[Step, Tensor], Tensor], int]] = {
    "llama": (lambda s, x: s.bias * scaled(x), 2),
    "weight behind": (lambda s, x: scaled(x) * s.bias, 2),
    "weight in float32": (_weight_in_float32, 2),
    "no weight": (lambda s, x: scaled(x), 2),
    "sum": (_summed, 2),
    "torch": (lambda s, x: F.rms_norm(x, (E,), s.bias, 1e-6), 2),
    "module": (lambda s, x: nn.functional.rms_norm(x, (E,), eps=1e-6), 2),
    # and what stays
    "no eps": (lambda s, x: F.rms_norm(x, (E,), s.bias), 0),
    "layer norm": (lambda s, x: F.layer_norm(x, (E,), s.bias, None, 1e-6), 0),
    "computed weight": (lambda s, x: (1 + s.bias) * scaled(x), 0),
    "other rows": (lambda s, x: scaled(x.flip(-1)), 0),
    "a write": (_written_to, 0),
}


@pytest.mark.parametrize("name", NORMS)
def test_products_take_norms_along(name: str) -> None:
    by, wanted = NORMS[name]
    report = report_of(normed(by))
    assert (report.norms, report.to_dict()["norms_replaced"]) == (wanted, wanted)
    assert report.replaced == 5
    assert ("with 2 norms" in str(report)) == (wanted == 2)


def test_nothing_is_moved_past_a_write() -> None:
    """The residual of the sum is another one than when the product was made, and the input of the product too."""

    def body(step: Step, x: Tensor) -> Tensor:
        y = F.linear(x, step.w)
        x.add_(1)
        return x + y

    assert report_of(body).products == {"skinny_linear": 1}


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (lambda s, x: F.linear(x, s.w * 2), "its weight is computed by the forward"),
        (lambda s, x: F.linear(x.float(), s.w.float()), "its weight is computed by the forward"),
    ],
)
def test_weights_that_are_computed_are_left_to_the_library(body: Body, reason: str) -> None:
    report = report_of(body)
    assert report.products == {}
    assert [one.reason for one in report.library] == [reason]
    assert f"the library's product, {reason}" in str(report)
    assert report.to_dict()["library"][0]["reason"] == reason


@torch.no_grad()
def test_other_dtypes_and_many_rows_are_left_to_the_library() -> None:
    compiled(Step(BODIES["plain"][0], torch.float32))(*inputs(dtype=torch.float32))
    report = backend.last_report()
    assert report is not None
    assert [one.reason for one in report.library] == ["there is no kernel for torch.float32"]
    many = report_of(BODIES["plain"][0], inputs(MAX_ROWS + 1))
    assert [one.reason for one in many.library] == [f"it has {MAX_ROWS + 1} rows, more than {MAX_ROWS}"]
    torch._dynamo.reset()
    assert report_of(BODIES["plain"][0], inputs(MAX_ROWS)).products == {"skinny_linear": 1}


def test_products_that_gradients_flow_through_are_left_to_the_library() -> None:
    step = Step(BODIES["plain"][0])
    step.w.requires_grad_()
    compiled(step)(*inputs())
    report = backend.last_report()
    assert report is not None
    assert ["gradients flow through it" in one.reason for one in report.library] == [True]
    step.w.requires_grad_(False)


@torch.no_grad()
def test_quantised_weights_are_left_to_the_library() -> None:
    step = Step(BODIES["plain"][0])
    step.w = nn.Parameter(StandIn.quantise(step.w), requires_grad=False)
    want = step(*inputs())
    torch.testing.assert_close(compiled(step)(*inputs()), want, rtol=2e-2, atol=1e-2)
    report = backend.last_report()
    assert report is not None
    assert report.products == {}
    assert [one.reason for one in report.library] == ["its weight is a StandIn, not a plain tensor"]


def test_a_prefill_keeps_the_librarys_products() -> None:
    model = tiny_model("ouro", num_hidden_layers=1, total_ut_steps=3).to(torch.bfloat16)
    model.forward = torch.compile(
        model.forward,
        backend="sparse_compile",
        options={"inductor": False, "key_retention": 1, "skinny_products": True},
    )
    generate(model, *padded_batch((5, 3)), 3)
    prefill, decode = (backend.last_report(kind) for kind in ("prefill", "decode"))
    assert prefill is not None
    assert decode is not None
    assert (prefill.products, prefill.library) == ({}, ())
    assert decode.products == {"skinny_rotary": 6, "skinny_linear": 10, "skinny_gated": 3}
    assert decode.norms == 0, "all of them follow a sum"
    assert decode.library == ()


def test_norms_of_a_whole_model() -> None:
    """HRM-Text's: all four of two layers, but for those of the sums that its stacks begin with."""
    model = tiny_model("hrm-text", H_cycles=1).to(torch.bfloat16)
    options = {"inductor": False, "key_retention": 1, "skinny_products": True, "on_unmatched": "ignore"}
    model.forward = torch.compile(model.forward, backend="sparse_compile", options=options)
    generate(model, *padded_batch((5, 3)), 3)
    decode = backend.last_report("decode")
    assert decode is not None
    assert (len(decode.sites), decode.norms, decode.library) == (6, 9, ())


@torch.no_grad()
def test_a_symbolic_batch_stays_symbolic() -> None:
    """One graph for 3, 2 and 70 rows: beyond the kernel's rows the ops are right all the same."""
    run, given = compiled(Step(BODIES["mlp"][0])), inputs()
    for one in given:
        torch._dynamo.mark_dynamic(one, 0)
    run(*given)
    for rows in (2, MAX_ROWS + 6):
        want = Step(BODIES["mlp"][0])(*inputs(rows))
        torch.testing.assert_close(run(*inputs(rows)), want, rtol=2e-2, atol=2e-2)
    assert [report.products for report in backend.reports()] == [{"skinny_gated": 1, "skinny_add": 1}]


def test_logits_are_as_good_as_the_models_own() -> None:
    """Sparse and dense alike, against float32; and no compilation after the second token (A12)."""
    exact = tiny_model("ouro", num_hidden_layers=1, total_ut_steps=3)
    model = tiny_model("ouro", num_hidden_layers=1, total_ut_steps=3).to(torch.bfloat16)
    exact.load_state_dict({name: value.float() for name, value in model.state_dict().items()})
    ids, mask = padded_batch()
    how: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    wanted, plain = (generate(one, ids, mask, 2, **how) for one in (exact, model))
    config = decode_config(key_retention=1, skinny_products=True)
    seen: list[int] = []

    def count(ids: Tensor, scores: Tensor) -> Tensor:
        seen.append(len(backend.reports()))
        return scores

    made = generate(model, ids, mask, 12, compile_config=config, logits_processor=[count], **how)
    rows = (wanted.sequences == plain.sequences).all(1) & (wanted.sequences == made.sequences[:, :15]).all(1)
    assert bool(rows.any()), "the second token follows the first: no row has the same one in both dtypes"
    errors = [(one.logits[1] - wanted.logits[1])[rows].abs().mean().item() for one in (made, plain)]
    assert errors[0] <= 1.5 * errors[1]
    assert seen[1] == seen[-1] == 1


def test_rows_that_end_cause_no_compilation() -> None:
    """A15, with products of a few rows."""
    model = tiny_model("ouro", num_hidden_layers=1, total_ut_steps=2).to(torch.bfloat16)
    ids, mask = padded_batch((5, 4, 3))
    config = decode_config(key_retention=1, skinny_products=True)
    free = generate(model, ids, mask, 8, compile_config=config)[:, 5:]
    ends = [int(free[0, 2]), int(free[1, 4])]
    generate(model, ids, mask, 8, compile_config=config, eos_token_id=ends)
    assert len(backend.reports()) == 1


@torch.no_grad()
def test_inductor_is_told_how_to_compile_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through Inductor: the same values; its choices and options are ours for graphs that have such products alone."""
    from torch._inductor import compile_fx

    seen: list[tuple[str, bool]] = []
    real = compile_fx.compile_fx

    def watch(*args: Any, config_patches: dict[str, Any] | None = None, **more: Any) -> Any:
        if config_patches is not None:  # it calls itself without them
            seen.append((type(V.choices).__qualname__, config_patches.get("triton.enable_pdl", False)))
        return real(*args, config_patches=config_patches, **more)

    monkeypatch.setattr(compile_fx, "compile_fx", watch)
    early = {"triton.enable_pdl": True}
    monkeypatch.setattr("sparse_compile.backend.inductor.early_start", lambda device, graph: early)
    with_them = report_of(BODIES["mlp"][0], inductor={})
    torch._dynamo.reset()
    without = report_of(BODIES["mlp"][0], inductor={}, skinny_products=False)
    torch._dynamo.reset()
    report_of(BODIES["plain"][0], inductor={"triton.enable_pdl": False})
    assert (len(with_them.products), len(without.products)) == (2, 0)
    ours, theirs = "_choices.<locals>.Choices", "InductorChoices"
    assert seen == [(ours, True), (theirs, False), (ours, False)], "what the user asks for goes first"


def test_the_option() -> None:
    """By default where it pays: on CUDA, in CUDA graphs."""

    def used(device: str, **options: Any) -> bool:
        return BackendOptions(**options).for_passes(None, device).skinny_products

    assert used("cuda", mode="reduce-overhead")
    assert used("cuda", inductor={"triton.cudagraphs": True})
    assert not used("cuda")
    assert not used("cuda", mode="reduce-overhead", skinny_products=False)
    assert not used("cpu", mode="reduce-overhead")
    assert used("cpu", skinny_products=True)
    with pytest.raises(ArgumentError, match="skinny_products"):
        BackendOptions(skinny_products="auto")  # type: ignore[arg-type]


def test_what_a_graph_needs_is_measured_when_it_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of rows that a graph may have; the counters of tiles with splits are made."""
    asked: list[int] = []
    monkeypatch.setattr(skinny_choice, "choose", lambda shape, bucket: asked.append(bucket))
    shape = skinny_choice.Shape(2048, 512, False, torch.bfloat16, torch.device("cpu"))
    for rows, wanted in ((3, [8]), (MAX_ROWS, [64]), (None, [8, 16, 32, 64]), (MAX_ROWS + 1, [])):
        asked.clear()
        skinny_choice.prepare(shape, rows)
        assert asked == wanted


def test_shapes_with_norms_are_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the op asks for them. Two weights are one shape."""
    asked: list[tuple[int, int, str, bool]] = []
    monkeypatch.setattr(
        skinny_choice, "choose", lambda shape, rows: asked.append((rows, shape.lines, shape.norm, shape.mean))
    )
    graph, values = fx.Graph(), {"x": (3, 1, E), "gate": (I, E), "up": (I, E), "gain": (E,)}
    nodes = [graph.placeholder(name) for name in values]
    for node, shape in zip(nodes, values.values(), strict=True):
        node.meta["example_value"] = torch.empty(shape, dtype=torch.bfloat16)
    x, gate, up, gain = nodes
    wanted: dict[str, dict[str, Any]] = {
        "": {},
        "norm": {"eps": 1e-6, "mean": False},
        "weighted norm": {"norm": gain, "eps": 1e-6},
    }
    for norm, options in wanted.items():
        asked.clear()
        node = graph.call_function(PRODUCTS["gated"], (x, gate), {"up": up, **options})
        _prepare_product(node, torch.empty(3, 1, E))
        assert asked == [(8, 2 * I, norm, norm != "norm")]
    asked.clear()
    shape = skinny_choice.Shape(I, E, False, torch.bfloat16, torch.device("cpu"), "weighted norm")
    skinny_choice.prepare(shape, None)
    assert [norm for *_, norm, _ in asked] == ["weighted norm"] * 4


@pytest.mark.gpu
@torch.no_grad()
def test_steps_in_cuda_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Nothing is measured after compiling, steps run from CUDA graphs, and logits are those of a run without."""
    from torch._dynamo.utils import counters

    monkeypatch.setenv("SPARSE_COMPILE_CACHE", str(tmp_path))
    monkeypatch.setattr(skinny_choice, "_choices", {})
    counters.clear()
    given = [one.cuda() for one in inputs(4)]
    for one in given:
        torch._dynamo.mark_static_address(one)
    cases = {name: BODIES[name] for name in ("add", "bias", "mlp", "two weights", "rotary")}
    for name in ("llama", "no weight"):
        wanted = {"skinny_add": 2, "skinny_gated": 1, "skinny_linear": 1}
        cases[name] = (normed(NORMS[name][0]), wanted)
    for name, (body, products) in cases.items():
        torch._dynamo.reset()
        step = Step(body).cuda()
        run = compiled(step, inductor={}, mode="reduce-overhead", skinny_products=None)
        want = run(*given)
        report = backend.last_report()
        assert report is not None
        assert report.products == products, name
        with monkeypatch.context() as patch:
            patch.setattr(
                skinny_choice, "measure", lambda *_: pytest.fail("it measures while a graph is made")
            )
            results = [run(*given) for _ in range(4)]
        eager = step(*given)
        for got in results:
            assert torch.equal(got, want), name
            torch.testing.assert_close(got, eager, rtol=3e-2, atol=3e-2)
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert skinny_choice.cache_file().exists()


@pytest.mark.gpu
@torch.no_grad()
def test_a_whole_model_in_cuda_graphs() -> None:
    """Prefill and decode of a model in bfloat16, against the same without our products."""
    model = RotaryInside(LoopedConfig()).cuda().to(torch.bfloat16).eval()
    ids, mask = (one.cuda() for one in padded_batch())
    how: dict[str, Any] = {"output_logits": True, "return_dict_in_generate": True}
    made = []
    for skinny in (None, False):
        torch._dynamo.reset()
        for name in ("_compiled_call", "_last_compile_config"):
            model.__dict__.pop(name, None)
        config = decode_config(key_retention=1, inductor={}, mode="reduce-overhead", skinny_products=skinny)
        made.append(generate(model, ids, mask, 6, compile_config=config, **how))
    ours, theirs = (one.logits[1].float() for one in made)
    same = (made[0].sequences[:, : ids.shape[1] + 1] == made[1].sequences[:, : ids.shape[1] + 1]).all(1)
    assert (ours - theirs)[same].abs().mean() <= 0.05 * theirs.abs().mean()
