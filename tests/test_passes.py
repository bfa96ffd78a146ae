"""The passes over graphs that a person can read: golden text, counts, and one negative case per promise."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch
from torch import fx
from toy import Toy, toy_compile, toy_graph

from sparse_compile.kernels.retention import Retention
from sparse_compile.models import tiny_model
from sparse_compile.passes.base import Compilation, Options, Pass, PassManager
from sparse_compile.passes.errors import OptionError, PassError, UnsupportedModel
from sparse_compile.passes.grammar import Grammar, check_grammar
from sparse_compile.passes.graph import SITE, is_call, lazy_module, lean_tracing
from sparse_compile.passes.pipeline import PASSES, build_program
from sparse_compile.passes.program import Site, Variant
from sparse_compile.passes.roll import NotIsomorphic, Period, _Prover, find_periods, find_roll
from sparse_compile.passes.schedule import check_order, schedule_site

GOLDEN = Path(__file__).parent / "golden"


def check_golden(name: str, text: str) -> None:
    """Compare with the stored text; SPARSE_COMPILE_UPDATE_GOLDEN=1 rewrites it."""
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("SPARSE_COMPILE_UPDATE_GOLDEN"):
        path.write_text(text + "\n")
    assert text + "\n" == path.read_text()


def text_of(variant: Variant) -> str:
    return "\n\n".join(stage.text() for stage in variant.stages)


def test_golden_rolled() -> None:
    check_golden("toy_rolled_sparse", text_of(toy_compile(Toy()).variants["sparse"]))


def test_golden_unrolled() -> None:
    check_golden("toy_unrolled_sparse", text_of(toy_compile(Toy(), roll=False).variants["sparse"]))


def test_golden_mixed() -> None:
    check_golden("toy_rolled_mixed", text_of(toy_compile(Toy()).variants["mixed"]))


@pytest.mark.parametrize("roll", [True, False])
def test_op_counts_before_and_after(roll: bool) -> None:
    compilation = toy_compile(Toy(layers=2, loops=4), roll=roll)
    assert sum(is_call(node, SITE) for node in compilation.graph.graph.nodes) == 8
    assert compilation.variants["dense"].op_counts() == {"dense": 8}
    assert compilation.variants["sparse"].op_counts() == {"dense": 2, "capture": 2, "consume": 4}
    assert compilation.variants["mixed"].op_counts() == {"dense": 2, "mixed": 6}


def test_rolled_bodies_share_one_graph_per_kind() -> None:
    stages = toy_compile(Toy(loops=5)).variants["sparse"].stages
    bodies = [stage for stage in stages if stage.name.startswith("body")]
    assert [stage.loop for stage in bodies] == [0, 1, 2, 3, 4]
    assert len({id(stage.module) for stage in bodies}) == 3
    assert bodies[2].module is bodies[3].module is bodies[4].module


def test_one_carried_value_and_the_injected_input_invariant() -> None:
    roll = toy_compile(Toy()).roll
    assert roll is not None
    assert (roll.repeats, len(roll.carried), len(roll.invariant)) == (3, 1, 1)


def test_prefix_and_suffix_layers_stay_outside_the_loop() -> None:
    class Framed(Toy):
        def __init__(self) -> None:
            super().__init__(layers=3, loops=3)

        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            x = x + self.layers[0](x)
            for _ in range(3):
                x = x + self.layers[1](x)
            return self.head(x + self.layers[2](x))

    compilation = toy_compile(Framed())
    assert compilation.roll is not None
    assert (compilation.roll.first_site, compilation.roll.period, compilation.roll.repeats) == (1, 1, 3)
    assert [stage.name for stage in compilation.variants["sparse"].stages] == [
        "prologue",
        "body 0 (dense)",
        "body 1 (capture)",
        "body 2 (consume)",
        "epilogue",
        "head",
    ]
    assert [site.reason for site in compilation.sites if site.loops == 1] == ["layer is not looped"] * 2


def test_first_loop_is_peeled_when_only_it_differs() -> None:
    compilation = toy_compile(Toy(loops=4, twist=lambda x, loop: x.relu() if loop else x))
    assert compilation.roll is not None
    assert (compilation.roll.first_site, compilation.roll.repeats) == (1, 3)
    assert compilation.variants["sparse"].op_counts() == {"dense": 1, "capture": 1, "consume": 2}


@pytest.mark.parametrize(
    "twist",
    [
        lambda x, loop: x * (1.0 + loop),
        lambda x, loop: x.relu() if loop in (0, 3) else x.tanh(),
        lambda x, loop: x.relu() if loop == 2 else x,
    ],
    ids=["constant", "operation", "size"],
)
def test_bodies_that_differ_are_not_rolled(twist: object) -> None:
    compilation = toy_compile(Toy(loops=4, twist=twist))  # type: ignore[arg-type]
    assert compilation.roll is None
    assert compilation.roll_reason.startswith("loop bodies differ")
    assert compilation.variants["sparse"].op_counts() == {"dense": 1, "capture": 1, "consume": 2}


def test_reading_an_early_loop_afterwards_is_not_rolled() -> None:
    class Leaky(Toy):
        def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(input_ids)
            kept = []
            for _ in range(4):
                x = x + self.layers[0](x)
                kept.append(x)
            return self.head(x + kept[1])

    compilation = toy_compile(Leaky())
    assert compilation.roll is None
    assert "read after the last one" in compilation.roll_reason


class Momentum(Toy):
    """Each loop reads the two before it."""

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        history = [self.embed(input_ids)] * 2
        for _ in range(4):
            history.append(history[-1] + self.layers[0](history[-1]) + history[-2])
        return self.head(history[-1])


def test_reading_two_loops_back_does_not_line_up() -> None:
    graph = toy_graph(Momentum()).graph
    markers = tuple(node for node in graph.nodes if is_call(node, SITE))
    prover = _Prover(list(graph.nodes), markers, Period(0, 1, 4))
    for start in prover.starts():
        with pytest.raises(NotIsomorphic, match="line up"):
            prover.prove(start)


def test_reading_two_loops_back_rolls_two_loops_at_a_time() -> None:
    roll = toy_compile(Momentum()).roll
    assert roll is not None
    assert (roll.period, roll.repeats, len(roll.carried)) == (2, 2, 2)


def test_alternating_loops_roll_two_at_a_time() -> None:
    compilation = toy_compile(Toy(loops=4, twist=lambda x, loop: x.relu() if loop % 2 else x.tanh()))
    assert compilation.roll is not None
    assert (compilation.roll.period, compilation.roll.repeats) == (2, 2)
    assert [s.name for s in compilation.variants["sparse"].stages if "body" in s.name] == [
        "body 0 (dense/capture)",
        "body 1 (consume)",
    ]


def test_rolling_can_be_switched_off() -> None:
    assert toy_compile(Toy(), roll=False).roll_reason == "rolling is off (roll=False)"


def test_find_periods() -> None:
    assert find_periods(list("abab"))[0] == Period(0, 2, 2)
    assert find_periods(list("pababx"))[0] == Period(1, 2, 2)
    assert find_periods(list("aaaa"))[0] == Period(0, 1, 4)
    assert find_periods(list("llhllh"))[0] == Period(0, 3, 2)
    assert find_periods(list("abc")) == []


SITE_FIELDS = {
    "name": "a@0",
    "layer": "a",
    "plane": 0,
    "store_site": None,
    "kind": "dense",
    "reason": "",
    "heads": 2,
    "kv_heads": 2,
    "head_dim": 4,
    "scale": 1.0,
    "softcap": 0.0,
}


def kinds(loops: int, window: int = 0, **options: object) -> list[str]:
    share = Retention.of(options.pop("retention", 0.3))  # type: ignore[arg-type]
    chosen = Options(share, **options)  # type: ignore[arg-type]
    given = {**SITE_FIELDS, "retention": share, "loops": loops, "window": window}
    sites = [Site(**given, loop=loop) for loop in range(loops)]
    return [schedule_site(site, chosen)[0] for site in sites]


def test_schedule() -> None:
    d, c, s = "dense", "capture", "consume"
    assert kinds(4) == [d, c, s, s]
    assert kinds(4, capture_loop=0) == [c, s, s, s]
    assert kinds(4, capture_loop=2) == [d, d, c, s]
    assert kinds(4, capture_loop=3) == [d, d, d, d]
    assert kinds(2) == [d, d]
    assert kinds(2, capture_loop=0) == [c, s]
    assert kinds(1) == [d]
    assert kinds(6, recapture_every=2) == [d, c, s, c, s, d]
    assert kinds(6, recapture_every=1) == [d] * 6
    assert kinds(7, recapture_every=3) == [d, c, s, s, c, s, s]
    assert kinds(4, window=8) == [d] * 4
    assert kinds(4, enabled=False) == [d] * 4
    assert kinds(4, retention=1.0) == [d] * 4


def test_schedule_says_why() -> None:
    options = Options(Retention.of(0.3))
    site = Site(**SITE_FIELDS, loop=2, loops=4, window=0, retention=Retention.of(0.3))
    assert schedule_site(site, options) == ("consume", "keys chosen in loop 1")
    assert schedule_site(dataclasses.replace(site, window=8), options)[1] == "sliding window of 8 tokens"
    last = dataclasses.replace(site, loop=1, loops=2)
    assert "no later loop consumes" in schedule_site(last, options)[1]


def test_consume_without_capture_is_refused() -> None:
    consume = Site(**{**SITE_FIELDS, "kind": "consume"}, loop=2, loops=4, window=0)
    with pytest.raises(PassError, match="no lower loop of a captures"):
        check_order((consume,))
    other = dataclasses.replace(consume, layer="b", kind="capture", loop=1)
    with pytest.raises(PassError):
        check_order((other, consume))


def test_sliding_layers_of_a_looped_section_stay_dense() -> None:
    compilation = toy_compile(Toy(layers=2, loops=3, windows=(4, 0)))
    assert [site.kind for site in compilation.sites] == [
        "dense",
        "dense",
        "dense",
        "capture",
        "dense",
        "consume",
    ]
    assert {site.store_site for site in compilation.sites if site.kind != "dense"} == {0}


# --- grammar: break a correct program in one place, and see it caught


def broken(change: object, **options: object) -> pytest.ExceptionInfo[PassError]:
    compilation = toy_compile(Toy(), roll=False, **options)
    stage = compilation.variants["sparse"].stages[0]
    change(stage.module.graph)  # type: ignore[operator]
    with pytest.raises(PassError) as caught:
        Grammar().run(compilation)
    return caught


def ops(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [node for node in graph.nodes if is_call(node, getattr(torch.ops.sparse_compile, name).default)]


def test_grammar_accepts_what_the_passes_made() -> None:
    assert Grammar().run(toy_compile(Toy()))["variants"] == 4


def test_grammar_sees_a_pool_clone() -> None:
    def clone(graph: fx.Graph) -> None:
        pool = next(node for node in graph.nodes if node.target == "k_pool")
        with graph.inserting_after(pool):
            graph.call_function(torch.ops.aten.clone.default, (pool,))

    assert "only our ops may" in str(broken(clone).value)


def test_grammar_sees_a_swapped_plane() -> None:
    def swap(graph: fx.Graph) -> None:
        node = ops(graph, "consume")[0]
        node.kwargs = {**node.kwargs, "plane": 0}

    assert "does not follow the schedule at site 2" in str(broken(swap).value)


def test_grammar_sees_a_missing_capture() -> None:
    def drop(graph: fx.Graph) -> None:
        node = ops(graph, "capture")[0]
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)

    assert "does not follow the schedule" in str(broken(drop).value)


def test_grammar_sees_a_wrong_plan_input() -> None:
    def swap(graph: fx.Graph) -> None:
        node = ops(graph, "dense")[0]
        arguments = list(node.args)
        arguments[6], arguments[7] = arguments[7], arguments[6]
        node.args = tuple(arguments)

    assert "wrong plan inputs" in str(broken(swap).value)


def test_grammar_sees_a_lost_data_edge() -> None:
    def cut(graph: fx.Graph) -> None:
        consume, dense = ops(graph, "consume")[0], ops(graph, "dense")[0]
        consume.args = (dense.args[0], dense.args[1], dense.args[2], *consume.args[3:])

    assert "without depending on" in str(broken(cut).value)


def test_dead_code_elimination_keeps_captures() -> None:
    for variant in toy_compile(Toy()).variants.values():
        before = variant.op_counts()
        for stage in variant.stages:
            stage.module.graph.eliminate_dead_code()
        assert variant.op_counts() == before


# --- manager


def test_a_failing_pass_is_named_with_those_before_it() -> None:
    class Break(Pass):
        name = "break"

        def run(self, compilation: Compilation) -> dict[str, int]:
            raise KeyError("lost")

    manager = PassManager((PASSES[0], Break()), check_grammar)
    with pytest.raises(PassError, match=r"pass 'break' failed \(passes before it: canonicalize\)"):
        manager.run(Compilation(toy_graph(Toy()), Options(Retention.of(0.3))))


def test_a_broken_promise_raises() -> None:
    class Promise(Pass):
        name = "promise"

        def run(self, compilation: Compilation) -> dict[str, int]:
            return {}

        def ensure(self, compilation: Compilation) -> None:
            raise AssertionError("not kept")

    with pytest.raises(PassError, match="not kept"):
        PassManager((Promise(),), check_grammar).run(
            Compilation(toy_graph(Toy()), Options(Retention.of(0.3)))
        )


def test_the_grammar_is_checked_after_every_pass() -> None:
    class Spoil(Pass):
        name = "spoil"

        def run(self, compilation: Compilation) -> dict[str, int]:
            graph = compilation.variants["sparse"].stages[0].module.graph
            node = next(node for node in graph.nodes if node.target == "k_pool")
            with graph.inserting_after(node):
                graph.call_function(torch.ops.aten.clone.default, (node,))
            return {}

    manager = PassManager((*PASSES[:-1], Spoil()), check_grammar)
    with pytest.raises(PassError, match=r"pass 'spoil' failed .*only our ops may"):
        manager.run(Compilation(toy_graph(Toy()), Options(Retention.of(0.3), roll=False)))


def test_numbered_dumps(tmp_path: Path) -> None:
    toy_compile(Toy(), dump_dir=tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[:2] == ["00_canonicalize_after.txt", "00_canonicalize_before.txt"]
    assert "06_rewrite_sparse.txt" in names
    assert "capture" in (tmp_path / "06_rewrite_sparse.txt").read_text()


def test_a_model_without_loops_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="not a looped model"):
        toy_compile(Toy(loops=1))


def test_capture_loop_out_of_range() -> None:
    with pytest.raises(OptionError, match="must be below 3"):
        toy_compile(Toy(), capture_loop=3)


def test_no_roll_without_repetition() -> None:
    graph = toy_graph(Toy(layers=3, loops=1))
    markers = tuple(node for node in graph.graph.nodes if is_call(node, SITE))
    sites = tuple(Site(**{**SITE_FIELDS, "layer": name}, loop=0, loops=1, window=0) for name in "abc")
    with pytest.raises(NotIsomorphic, match="no run of layers is repeated"):
        find_roll(graph.graph, markers, sites)


# --- real models


@pytest.mark.parametrize(("name", "loops"), [("ouro", 4), ("dory", 3), ("hrm-text", 6)])
def test_tiny_models_roll_and_follow_the_schedule(name: str, loops: int) -> None:
    program = build_program(tiny_model(name), Options(Retention.of(0.3)))
    assert program.rolled, program.roll_reason
    assert program.loops == loops
    for site in program.sites:
        if site.loops == 1 or site.window:
            assert site.kind == "dense"
        else:
            assert site.kind == ("dense", "capture")[site.loop] if site.loop < 2 else site.kind == "consume"
    assert program.counts() == {
        kind: program.variants["sparse"].op_counts()[kind] for kind in ("dense", "capture", "consume")
    }


def test_weights_are_the_users_own() -> None:
    model = tiny_model("ouro")
    program = build_program(model, Options(Retention.of(0.3)))
    own = {id(parameter) for parameter in model.parameters()}
    for variant in program.variants.values():
        for stage in variant.stages:
            assert {id(parameter) for parameter in stage.module.parameters()} <= own


def test_trace_is_deterministic() -> None:
    texts = [
        build_program(tiny_model("dory"), Options(Retention.of(0.3))).graph_text("after") for _ in range(2)
    ]
    assert texts[0] == texts[1]


def test_tracing_leaves_the_model_as_it_was() -> None:
    model = tiny_model("hrm-text").train()
    before = model.config._attn_implementation
    build_program(model, Options(Retention.of(0.3)))
    assert model.config._attn_implementation == before
    assert all(module.training for module in model.modules())
    assert not any(module._forward_hooks for module in model.modules())


def test_tracing_settings_of_torch_come_back() -> None:
    from torch.fx import _lazy_graph_module as lazy
    from torch.fx import config

    config.do_not_emit_stack_traces = False  # also where torch has no such setting
    with lean_tracing():
        assert config.do_not_emit_stack_traces
        assert lazy._use_lazy_graph_module_flag
    with pytest.raises(KeyError), lean_tracing():
        raise KeyError
    assert not config.do_not_emit_stack_traces
    assert not lazy._use_lazy_graph_module_flag


def test_a_graph_is_written_as_code_when_it_is_called() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.neg, (x,)))
    module = lazy_module({}, graph, "Piece")
    assert not hasattr(module, "_code")
    assert type(module).__name__ == "Piece"
    assert torch.equal(module(torch.ones(2)), -torch.ones(2))
    assert "neg" in module.code
