"""Which attention calls the backend understands, what it makes of them, and what it says of the others."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_forms import FORMS, SCALE, Form, Looped, eager_added, example, flex, repeat_kv, sdpa
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed

import sparse_compile.backend as backend
from sparse_compile.backend.inspection import inspect_model
from sparse_compile.kernels.retention import Retention
from sparse_compile.models import tiny_model

pytestmark = pytest.mark.usefixtures("fresh_compiler")

F = nn.functional
_ops = torch.ops.sparse_compile


def compile_form(form: Form, **options: Any) -> Callable[..., Tensor]:
    settings = {"inductor": False, **options}
    return torch.compile(Looped(form), backend="sparse_compile", options=settings)


def by_hand(
    q: Tensor,
    ks: list[Tensor],
    vs: list[Tensor],
    mask: Tensor | None,
    retention: str,
    bias: Tensor | None = None,
) -> Tensor:
    """The default schedule over the ops themselves: dense, capture, consume, consume."""
    visible = torch.ones(q.shape[0], ks[0].shape[2], dtype=torch.bool) if mask is None else mask[:, 0, 0]
    table, length, row, slot = _ops.visible_keys(visible)
    if bias is not None:
        bias = bias[:, :, 0].gather(2, table.long()[:, None].expand(-1, bias.shape[1], -1))
    share = Retention.of(retention)
    how = {"scale": SCALE, "softcap": 0.0, "implementation": "reference"}
    kept = {"retention_num": share.numerator, "retention_den": share.denominator}
    held: list[Tensor] = []
    for loop, (k, v) in enumerate(zip(ks, vs, strict=True)):
        shared = (q[:, :, 0], k, v, table, length, row, bias)
        if loop == 0:
            out = _ops.cached_dense(*shared, None, **how)
        elif loop == 1:
            out, *held = _ops.cached_capture(*shared, None, slot, **kept, **how)
        else:
            out = _ops.cached_consume(*shared, slot, *held, **how)
        q = q + out[:, :, None]
    return q


def counts() -> dict[str, int]:
    report = backend.last_report()
    assert report is not None
    return report.counts


@pytest.mark.parametrize("name", FORMS)
def test_every_form_is_understood(name: str) -> None:
    inputs = example()
    dense = compile_form(FORMS[name], key_retention=1)(*inputs)
    torch.testing.assert_close(dense, Looped(FORMS[name])(*inputs))
    torch._dynamo.reset()
    sparse = compile_form(FORMS[name], key_retention="0.3")(*inputs)
    torch.testing.assert_close(sparse, by_hand(*inputs, "0.3"))
    assert counts() == {"dense": 1, "capture": 1, "consume": 2}


def test_without_a_mask_every_key_is_seen() -> None:
    q, ks, vs, _ = example()
    sparse = compile_form(sdpa, key_retention=0.3)(q, ks, vs, None)
    torch.testing.assert_close(sparse, by_hand(q, ks, vs, None, "0.3"))


@pytest.mark.parametrize("heads", [1, 4])
def test_an_additive_mask_from_outside_is_added_and_read(heads: int) -> None:
    """Values that are neither 0 nor the lowest count; with one value per head the model must say what is seen."""
    q, ks, vs, mask = example()
    extra = torch.randn(3, heads, 1, 24, dtype=torch.float64)
    low = torch.where(mask, extra, torch.finfo(torch.float64).min)

    def form(q: Tensor, k: Tensor, v: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
        bias = (
            given[1]
            if heads == 1
            else torch.where(given[0], extra, torch.finfo(torch.float64).min).contiguous()
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=SCALE, enable_gqa=True)

    inputs = (q, ks, vs, (mask, low))
    torch.testing.assert_close(compile_form(form, key_retention=1)(*inputs), Looped(form)(*inputs))
    torch._dynamo.reset()
    sparse = compile_form(form, key_retention=0.3)(*inputs)
    torch.testing.assert_close(sparse, by_hand(q, ks, vs, mask, "0.3", extra))


def test_a_soft_cap_is_read() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, repeat_kv(k, 2).transpose(2, 3)) * SCALE
        scores = torch.tanh(scores / 5.0) * 5.0
        return scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ repeat_kv(v, 2)

    inputs = example()
    torch.testing.assert_close(compile_form(form, key_retention=1)(*inputs), Looped(form)(*inputs))
    report = backend.last_report()
    assert report is not None
    assert {site.softcap for site in report.sites} == {5.0}


def test_arguments_by_name_are_read_as_those_by_place() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        keys, values = (torch.repeat_interleave(input=x, repeats=2, dim=1) for x in (k, v))
        scores = torch.matmul(input=q, other=torch.transpose(input=keys, dim0=2, dim1=3)) * SCALE
        weights = torch.softmax(input=scores.masked_fill(mask=~mask, value=float("-inf")), dim=-1)
        return torch.matmul(input=weights, other=values)

    inputs = example()
    torch.testing.assert_close(compile_form(form, key_retention=0.3)(*inputs), by_hand(*inputs, "0.3"))


def test_a_mask_that_is_a_sum_with_a_factor() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        slope = torch.arange(24, dtype=q.dtype)[None, None, None] / 10
        low = torch.add(torch.where(mask, 0.0, -torch.inf).double(), slope, alpha=3)
        return attention(q, k, v, low)

    inputs = example()
    torch.testing.assert_close(compile_form(form, key_retention=1)(*inputs), Looped(form)(*inputs))


def padded_in_place(mask: Tensor) -> Tensor:
    """An additive mask as transformers made it for years: causal first, then padding written into a copy."""
    low = torch.finfo(torch.float64).min
    made = torch.full((1, 24), low, dtype=torch.float64)
    made *= torch.arange(24) > torch.tensor([[19]])
    made = made[None, None].expand(3, 1, -1, -1).clone()
    padding = made[:, :, :, :20] + mask[:, :, :, :20].double() == 0
    made[:, :, :, :20] = made[:, :, :, :20].masked_fill(padding, low)
    return made


def changed_summand(mask: Tensor) -> Tensor:
    one, other = torch.where(mask, 0.0, -torch.inf).double(), torch.zeros(24, dtype=torch.float64)
    made = one + other
    one.zero_()
    return made


def written_zeros(mask: Tensor) -> Tensor:
    zeros = torch.zeros(3, 1, 1, 24, dtype=torch.float64)
    zeros[..., 12] = -torch.inf
    return torch.where(mask, zeros, -torch.inf)


def filled_view(mask: Tensor) -> Tensor:
    made = torch.zeros(3, 1, 1, 24, dtype=torch.float64).masked_fill(~mask, -1e9)
    made[..., 12].fill_(-1e9)
    return made


@pytest.mark.parametrize("make", [padded_in_place, changed_summand, written_zeros, filled_view])
def test_what_is_written_into_a_mask_counts(make: Callable[[Tensor], Tensor]) -> None:
    class Masked(Looped):
        def forward(self, q: Tensor, ks: list[Tensor], vs: list[Tensor], mask: Tensor) -> Tensor:
            return super().forward(q, ks, vs, make(mask))

    q, ks, vs, mask = example()
    settings = {"inductor": False, "key_retention": "0.3"}
    got = torch.compile(Masked(sdpa), backend="sparse_compile", options=settings)(q, ks, vs, mask)
    torch.testing.assert_close(got, by_hand(q, ks, vs, make(mask) > -9000, "0.3"))
    assert counts()["consume"] == 2


def test_flex_attention_with_a_block_mask() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    q, ks, vs, mask = example(keys=200)
    seen = mask[:, 0, 0]
    block_mask = create_block_mask(
        lambda b, h, i, j: seen[b, j] & (j <= i + 150), 3, None, 1, 200, device="cpu", BLOCK_SIZE=16
    )
    shown = mask & (torch.arange(200) <= 150)
    sparse = compile_form(flex, key_retention=0.3)(q, ks, vs, block_mask)
    torch.testing.assert_close(sparse, by_hand(q, ks, vs, shown, "0.3"))
    assert counts() == {"dense": 1, "capture": 1, "consume": 2}


def test_the_copies_of_repeated_heads_are_gone() -> None:
    """And nothing of the old attention is left; what writes stays."""
    graphs: list[fx.GraphModule] = []

    def form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        k.index_copy_(2, torch.tensor([3]), q[:, :2] * 0 + 1)
        return eager_added(q, k, v, mask)

    def keep(graph: fx.GraphModule, inputs: list[Any]) -> Any:
        made = backend.sparse_compile_backend(graph, inputs, options={"inductor": False})
        graphs.append(graph)
        return made

    inputs = example()
    copied = ([x.clone() for x in inputs[1]], inputs[2], inputs[3])
    got = torch.compile(Looped(form), backend=keep)(inputs[0], *copied)
    assert bool((copied[0][0][:, :, 3] == 1).all())
    code = graphs[0].code
    assert "softmax" not in code
    assert ".expand(3, 2, 2, 24, 16)" not in code
    assert code.count(".index_copy_(") == 4
    graphs[0].graph.eliminate_dead_code()  # A23: data edges hold captures, not luck
    ours = [str(node.target) for node in graphs[0].graph.nodes if "sparse_compile.cached" in str(node.target)]
    kinds = ("dense", "capture", "consume", "consume")
    assert ours == [f"sparse_compile.cached_{kind}.default" for kind in kinds]
    assert got.shape == inputs[0].shape


def reason_of(form: Form, inputs: tuple[Any, ...] | None = None, module: nn.Module | None = None) -> str:
    run = torch.compile(
        module or Looped(form),
        backend="sparse_compile",
        options={"inductor": False, "on_unmatched": "ignore"},
    )
    run(*(inputs or example()))
    report = backend.last_report()
    assert report is not None
    assert not report.rewritten
    return report.left[0].reason


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, **arguments: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, repeat_kv(k, 2), repeat_kv(v, 2), attn_mask=mask, **arguments)


@torch.library.custom_op("sparse_compile_tests::flash_attn_varlen", mutates_args=())
def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return attention(q, k, v, None)


@flash.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q)


def scaled_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    low = torch.where(mask, 0.0, -5.0)
    return ((q @ repeat_kv(k, 2).mT + low) * SCALE).softmax(-1) @ repeat_kv(v, 2)


def with_sink(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = q @ repeat_kv(k, 2).mT
    weights = torch.cat([scores, scores[..., :1] * 0], -1).softmax(-1)[..., :-1]
    return weights @ repeat_kv(v, 2)


def masked_before_the_cap(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ repeat_kv(k, 2).mT).masked_fill(~mask, float("-inf"))
    return (torch.tanh(scores / 5.0) * 5.0).softmax(-1) @ repeat_kv(v, 2)


def masked_before_a_factor(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return ((q @ repeat_kv(k, 2).mT).masked_fill(~mask, -1e4) * -1.0).softmax(-1) @ repeat_kv(v, 2)


def mask_taken_thrice(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    scores = torch.add(q @ repeat_kv(k, 2).mT, torch.where(mask, 0.5, -1.0).double(), alpha=3)
    return scores.softmax(-1) @ repeat_kv(v, 2)


def query_changed_meanwhile(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    query = q.clone()
    weights = (query @ repeat_kv(k, 2).mT).masked_fill(~mask, float("-inf")).softmax(-1)
    query.zero_()
    return weights @ repeat_kv(v, 2)


def written_copy_of_keys(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    keys = repeat_kv(k, 2)
    keys[:, 0] = 0.0
    return F.scaled_dot_product_attention(q, keys, repeat_kv(v, 2), attn_mask=mask)


def weighed(form: Callable[[Tensor, Tensor], Tensor]) -> Form:
    """Attention whose weights meet the values in a form of its own."""

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.einsum("bhqd,bhkd->bhqk", q, repeat_kv(k, 2)).masked_fill(~mask, float("-inf"))
        return form(scores, repeat_kv(v, 2))

    return run


def in_three_dimensions(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    keys, values = (repeat_kv(x, 2).flatten(0, 1) for x in (k, v))
    scores = torch.bmm(q.flatten(0, 1), keys.mT).view(3, 4, 1, 24).masked_fill(~mask, float("-inf"))
    return torch.bmm(scores.softmax(-1).view(12, 1, 24), values).view(3, 4, 1, 16)


LEFT: dict[str, tuple[Form, str]] = {
    "random": (lambda q, k, v, m: attention(q, k, v, m, dropout_p=0.5), "dropout_p=0.5 makes it random"),
    "causal": (lambda q, k, v, m: attention(q, k, v, None, is_causal=True), "sees the first key alone"),
    "per head": (lambda q, k, v, m: attention(q, k, v, m.expand(3, 4, 1, 24).clone()), "from each head"),
    "per head, additive": (
        lambda q, k, v, m: attention(q, k, v, m.double().expand(3, 4, 1, 24).clone()),
        "nothing says which keys are seen",
    ),
    "computed": (lambda q, k, v, m: attention(q, k * 2, v, m), "do not come from a cache"),
    "no past": (lambda q, k, v, m: attention(q, k[:, :, :1], v[:, :, :1], None), "there is no past"),
    "flash": (lambda q, k, v, m: flash(q, k, v), "flash_attn_varlen.* no form of attention that is known"),
    "scaled mask": (scaled_mask, "scores go through"),
    "masked before the cap": (masked_before_the_cap, "scores go through masked_fill"),
    "masked before a factor": (masked_before_a_factor, "scores go through masked_fill"),
    "query changed meanwhile": (query_changed_meanwhile, "query, which it reads, is written to before"),
    "written copy of keys": (written_copy_of_keys, "keys, which it reads, is written to before"),
    "bool added": (
        lambda q, k, v, m: (q @ repeat_kv(k, 2).mT + m).softmax(-1) @ repeat_kv(v, 2),
        "scores go through add",
    ),
    "mask taken thrice": (mask_taken_thrice, "scores go through add"),
    "einsum": (
        weighed(lambda s, v: torch.einsum("bhqk,bhkd->bhqd", s.softmax(-1), v)),
        "not multiplied with values in a way that is known",
    ),
    "made to sum to one again": (
        weighed(lambda s, v: F.normalize(s.softmax(-1), p=1, dim=-1) @ v),
        "not multiplied with values in a way that is known",
    ),
    "exp": (weighed(lambda s, v: (s - s.logsumexp(-1, keepdim=True)).exp() @ v), "written out with exp"),
    "three dimensions": (in_three_dimensions, "not multiplied with values in a way that is known"),
    "widths": (
        lambda q, k, v, m: attention(q, k, v[..., :8], m).repeat(1, 1, 1, 2),
        r"size: \[3, 4, 1, 16\], \[3, 2, 24, 16\], \[3, 2, 24, 8\]",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_alone_says_why(name: str) -> None:
    form, reason = LEFT[name]
    if name == "no past":
        run = compile_form(form)  # nothing to choose from: no reason for an error
        run(*example())
        assert backend.last_report("other") is not None
        return
    assert re.search(reason, reason_of(form))


def test_autocast_is_not_undone() -> None:
    q, ks, vs, mask = example()
    given = (q.float(), [k.float() for k in ks], [v.float() for v in vs], mask)
    with torch.autocast("cpu", torch.bfloat16):
        assert "autocast computes it in torch.bfloat16" in reason_of(sdpa, given)


def test_weights_that_are_returned_are_not_rewritten_away() -> None:
    class Returns(nn.Module):
        def forward(self, q: Tensor, ks: list[Tensor], vs: list[Tensor], mask: Tensor) -> Any:
            weights = (q @ repeat_kv(ks[0], 2).mT).masked_fill(~mask, float("-inf")).softmax(-1)
            return weights @ repeat_kv(vs[0], 2), weights

    assert "used elsewhere" in reason_of(sdpa, module=Returns())


def test_nothing_rewritten_is_an_error_with_a_reason_per_node() -> None:
    form = LEFT["per head"][0]
    with pytest.raises(BackendCompilerFailed) as caught:
        compile_form(form)(*example())
    message = str(caught.value)
    assert "none of the 4 attention calls of this decode graph was rewritten" in message
    assert message.count("its mask hides other keys from each head") == 4
    assert "on_unmatched" in message


@pytest.mark.parametrize("choice", ["warn", "ignore"])
def test_on_unmatched_warns_or_says_nothing(choice: str) -> None:
    form, inputs = LEFT["per head"][0], example()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = compile_form(form, on_unmatched=choice)(*inputs)
    said = [str(one.message) for one in caught if "attention calls" in str(one.message)]
    assert len(said) == (choice == "warn")
    assert torch.equal(got, Looped(form)(*inputs))


def test_a_model_that_gains_nothing_is_an_error_too() -> None:
    """Two loops with the capture in the last one; capture_loop=0 is the way out."""
    q, ks, vs, mask = example(loops=2)
    with pytest.raises(BackendCompilerFailed, match=r"nothing is sparse(.|\n)*choose a lower capture_loop"):
        compile_form(sdpa)(q, ks, vs, mask)
    torch._dynamo.reset()
    compile_form(sdpa, capture_loop=0)(q, ks, vs, mask)
    assert counts() == {"dense": 0, "capture": 1, "consume": 1}


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"capture_loop": 3}, "choose a lower capture_loop than 3, or pass"),
        ({"recapture_every": 1}, "choose a higher recapture_every than 1, or pass"),
    ],
)
def test_a_schedule_that_is_never_sparse_says_which_option_makes_it_so(
    options: dict[str, Any], remedy: str
) -> None:
    with pytest.raises(BackendCompilerFailed, match=rf"nothing is sparse(.|\n)*{remedy}"):
        compile_form(sdpa, **options)(*example())


def test_gradients_are_refused_not_lost() -> None:
    """The ops have no backward; weights before them would silently get the gradients of another function."""
    q, ks, vs, mask = example()
    q.requires_grad_()
    with pytest.raises(BackendCompilerFailed, match=r"gradients flow through it; decode under torch.no_grad"):
        compile_form(sdpa)(q, ks, vs, mask)
    torch._dynamo.reset()
    with torch.no_grad():
        compile_form(sdpa)(q, ks, vs, mask)
    assert counts() == {"dense": 1, "capture": 1, "consume": 2}


def test_a_capture_loop_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match=r"capture_loop=4 must be below 4"):
        compile_form(sdpa, capture_loop=4)(*example())


def test_recapture() -> None:
    compile_form(sdpa, capture_loop=0, recapture_every=2)(*example(loops=5))
    assert counts() == {"dense": 1, "capture": 2, "consume": 2}


def test_a_consume_under_another_mask_stays_dense() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        mask = mask.pop(0)
        return attention(q, k, v, mask)

    q, ks, vs, mask = example()
    other = mask.clone()
    other[:, :, :, 8] = False
    compile_form(form)(q, ks, vs, [mask, mask, other, mask])
    report = backend.last_report()
    assert report is not None
    assert [site.kind for site in report.sites] == ["dense", "capture", "dense", "consume"]
    assert report.sites[2].reason == "sees other keys than the capture in loop 1"


def test_a_cache_layer_that_slides_is_kept() -> None:
    """Where the attention module knows no window, the layer of the cache does."""

    class Layer:
        def __init__(self, keys: Tensor, values: Tensor, is_sliding: bool) -> None:
            self.keys, self.values, self.is_sliding = keys, values, is_sliding
            self.max_cache_len = keys.shape[2]

    class OverLayers(Looped):
        def forward(self, q: Tensor, layers: list[Layer], mask: Tensor) -> Tensor:
            for layer in layers:
                q = q + self.attend(q, layer.keys, layer.values, mask)
            return q

    q, ks, vs, mask = example(loops=3)
    layers = [Layer(k, v, number == 2) for number, (k, v) in enumerate(zip(ks, vs, strict=True))]
    settings = {"inductor": False, "on_unmatched": "ignore"}
    got = torch.compile(OverLayers(sdpa), backend="sparse_compile", options=settings)(q, layers, mask)
    report = backend.last_report()
    assert report is not None
    assert [site.window for site in report.sites] == [0, 0, 24]
    assert len(report.rewritten) == 2
    torch.testing.assert_close(got, Looped(sdpa)(q, ks, vs, mask))


def test_equal_masks_made_anew_are_one_mask_unless_something_is_written_between() -> None:
    def fresh(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention(q, k, v, mask[:, :, :, :24])

    def written(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        mask[:, :, :, 8].logical_not_()
        return attention(q, k, v, mask[:, :, :, :24])

    compile_form(fresh)(*example())
    assert counts() == {"dense": 1, "capture": 1, "consume": 2}
    torch._dynamo.reset()
    q, ks, vs, mask = example()
    wanted = Looped(written)(q, ks, vs, mask.clone())
    got = compile_form(written, on_unmatched="ignore")(q, ks, vs, mask.clone())
    assert counts()["consume"] == 0
    torch.testing.assert_close(got, wanted)


def test_a_sink_takes_part() -> None:
    sink = torch.randn(3, 4, 1, 1, dtype=torch.float64)

    def form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, repeat_kv(k, 2).transpose(2, 3)) * SCALE
        scores = torch.cat([scores.masked_fill(~mask, float("-inf")), sink], dim=-1)
        return scores.softmax(-1)[..., :-1] @ repeat_kv(v, 2)

    inputs = example()
    torch.testing.assert_close(compile_form(form, key_retention=1)(*inputs), Looped(form)(*inputs))
    assert counts() == {"dense": 4, "capture": 0, "consume": 0}


def test_reports_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="sparse_compile.backend"):
        compile_form(sdpa)(*example())
    text = "\n".join(
        record.getMessage() for record in caplog.records if record.name == "sparse_compile.backend"
    )
    assert "rewrote 4 of 4 attention calls" in text
    assert "cached_consume" in text


def test_prefill_stays_dense() -> None:
    q, ks, vs, _ = example()
    compile_form(sdpa)(q.expand(3, 4, 5, 16), ks, vs, None)
    report = backend.last_report("prefill")
    assert report is not None
    assert not report.rewritten
    assert all("several queries" in one.reason for one in report.left)


def test_every_graph_says_why_it_was_compiled() -> None:
    """The guards of two compilations fail for a third shape: the latest counts. Another function begins anew."""

    def double(x: torch.Tensor, times: int) -> torch.Tensor:
        return x * 2 + times

    def other(x: torch.Tensor) -> torch.Tensor:
        return x - 1

    options = {"inductor": False, "on_unmatched": "ignore"}
    compiled = torch.compile(double, backend="sparse_compile", options=options, dynamic=False)
    compiled(torch.ones(2, 3), 1)
    compiled(torch.ones(2, 3), 1)
    compiled(torch.ones(2, 3, dtype=torch.float64), 1)
    compiled(torch.ones(2, 3, dtype=torch.float64), 5)
    torch.compile(other, backend="sparse_compile", options=options)(torch.ones(2))
    causes = [report.cause for report in backend.reports()]
    assert causes[0] == causes[3] == "first call of this function"
    assert re.fullmatch(r"failed guard tensor 'x' dtype mismatch\..*Double.*", causes[1])
    assert re.fullmatch(r"failed guard times == 1.*", causes[2])
    assert len(causes) == 4
    assert all("\n" not in cause for cause in causes)
    for report in backend.reports():
        assert report.headline().endswith(f"\n  cause: {report.cause}")
        assert report.to_dict()["cause"] == report.cause


def test_graphs_of_the_same_calls_are_told_once() -> None:
    """Dory's window is passed while decoding, for which Dynamo compiles the same graph again."""
    seen = inspect_model(tiny_model("dory"), {})
    lines = seen.text().splitlines()
    assert len(seen.reports) > 1
    number = seen.reports[0].number
    assert lines.count(f"  its calls: as in graph {number}") == len(seen.reports) - 1
    assert sum("model.layers.2.self_attn@1: capture" in line for line in lines) == 1
    assert sum("cause: failed guard" in line and "cumulative_length" in line for line in lines) >= 1


def test_a_graph_break_is_reported_with_its_line() -> None:
    def form(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return sdpa(q, k, v, mask)

    compile_form(form, on_unmatched="ignore")(*example())
    broken = [report for report in backend.reports() if report.breaks]
    assert broken
    for report in broken:
        assert all("test_backend_graphs.py" in one and "graph_break()" in one for one in report.breaks)
        assert "graph break: " in str(report)


def test_the_report_says_what_was_rewritten() -> None:
    compile_form(sdpa, key_retention=0.3)(*example())
    report = backend.last_report()
    assert report is not None
    assert "rewrote 4 of 4 attention calls (1 layers, up to 4 loops): 1 dense, 1 capture, 2 consume" in str(
        report
    )
    assert "attend@3: consume, keys chosen in loop 1" in str(report)
    assert report.to_dict()["rewritten"] == report.to_dict()["total"] == 4


def test_dumps_are_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSE_COMPILE_DUMP", str(tmp_path))
    compile_form(sdpa, key_retention=0.3)(*example())
    (folder,) = tmp_path.iterdir()
    names = sorted(path.name for path in folder.iterdir())
    assert names[0] == "00_find_calls_after.txt"
    assert "03_rewrite_calls_before.txt" in names
    assert "cached_consume" in (folder / "03_rewrite_calls_after.txt").read_text()
    assert "cached_consume" not in (folder / "03_rewrite_calls_before.txt").read_text()
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setenv("SPARSE_COMPILE_DUMP", str(tmp_path / "taken"))
    with pytest.raises(
        Exception, match=r"SPARSE_COMPILE_DUMP=.*is no folder that can be written.*; name another"
    ):
        compile_form(sdpa, key_retention=0.25)(*example())
    number = backend.reports()[-1].number
    for following in range(number + 1, number + 4):  # the files cannot be written, though the folder can
        taken = tmp_path / "files" / f"graph_{following:02d}" / "00_find_calls_before.txt"
        taken.mkdir(parents=True)
    monkeypatch.setenv("SPARSE_COMPILE_DUMP", str(tmp_path / "files"))
    with pytest.raises(Exception, match=r"SPARSE_COMPILE_DUMP=.*is no folder that can be written"):
        compile_form(sdpa, key_retention=0.2)(*example())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key_retentoin": 0.1}, "did you mean key_retention"),
        ({"key_retention": 0}, "key_retention=0"),
        ({"on_unmatched": "never"}, "on_unmatched='never'"),
        ({"mode": "fast"}, "mode='fast'"),
        ({"mode": "reduce-overhead", "inductor": False}, "leave one of them out"),
        ({"inductor": 3}, "inductor=3"),
        ({"inductor": {"max_autotun": True}}, "no option of this Inductor; did you mean max_autotune"),
        (
            {"inductor": {"max_autotune": "yes"}},
            "gives 'max_autotune' a str; pass for example 'max_autotune': ",
        ),
        ({"max_autotune": True}, r"one of Inductor: pass options=\{'inductor': \{'max_autotune': True\}\}"),
        ({"mode": ["max-autotune"]}, "must be one of default"),
        ({3: 4}, "3=4: unknown option"),
        ("key_retention=0.1", "options='key_retention=0.1': must be a dict"),
    ],
)
def test_bad_options_are_refused_by_name(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backend.BackendOptions.of(options)


def test_the_mode_of_torch_compile_becomes_options_of_inductor() -> None:
    """torch.compile takes `mode=` or `options=`; the option "mode" is how to have both."""
    direct = backend.BackendOptions.of(None, "reduce-overhead")
    named = backend.BackendOptions.of({"mode": "reduce-overhead", "inductor": {"max_autotune": True}})
    assert direct.config_patches() == {"triton.cudagraphs": True}
    assert named.config_patches() == {"triton.cudagraphs": True, "max_autotune": True}
