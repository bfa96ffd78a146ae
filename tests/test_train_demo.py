"""Training of the demo model: its arithmetic is the model's, and runs go on exactly where they were."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from benchmarks.demo import checkpoint
from benchmarks.demo.data import Data, lengths
from benchmarks.demo.forward import Forward
from benchmarks.demo.optimizer import Optimizer, orthogonal
from benchmarks.demo.recipe import Recipe, flops_per_token, tiny_recipe
from benchmarks.demo.trainer import Limits, Trainer, new_model
from benchmarks.train_demo import main
from sparse_compile.models import OuroForCausalLM, load_model, load_tokenizer, random_model

CPU = torch.device("cpu")
QUIET = Limits(log_every=2, evaluate_every=100, contexts=(128,), quick=(2, 2), samples=2, windows=2)


@pytest.fixture(scope="module")
def data() -> Data:
    torch.set_num_threads(1)
    return Data(("stdlib",), CPU)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{kind}:{name}": tensor
        for kind in checkpoint.TENSORS
        for name, tensor in load_file(folder / f"{kind}.safetensors").items()
    }


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_logits_of_every_loop_are_those_of_the_model_with_so_many_loops(kv_heads: int) -> None:
    shape = {**dict(tiny_recipe().shape), "num_key_value_heads": kv_heads}
    model = random_model(replace(tiny_recipe(), shape=tuple(shape.items())).config)
    assert isinstance(model, OuroForCausalLM)
    ids = torch.randint(3, 259, (2, 50), generator=torch.Generator().manual_seed(0))
    for loop, found in enumerate(Forward(model, torch.float32).logits(ids)):
        model.config.total_ut_steps = loop + 1
        with torch.no_grad():
            assert torch.allclose(found, model(ids).logits, atol=1e-5, rtol=1e-5)


def test_losses_and_gradients_are_those_of_the_model() -> None:
    model = random_model(tiny_recipe().config).train()
    assert isinstance(model, OuroForCausalLM)
    ids = torch.randint(3, 259, (2, 40), generator=torch.Generator().manual_seed(1))
    targets, weights = ids.roll(-1, 1), torch.rand(2, 40, generator=torch.Generator().manual_seed(2))
    expected = (functional.cross_entropy(model(ids).logits.mT, targets, reduction="none") * weights).sum()
    expected.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    losses = Forward(model, torch.float32).losses(ids, targets, weights)
    assert losses.shape == (4,)
    assert torch.allclose(losses[-1], expected, rtol=1e-5)
    losses[-1].backward()
    for name, p in model.named_parameters():
        assert name not in gradients or torch.allclose(p.grad, gradients[name], atol=1e-4, rtol=1e-3), name


def test_splitting_float32_loses_nothing() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(
        -20, 20, 0.004
    )
    ties = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0, -0x407F8000], dtype=torch.int32).view(
        torch.float32
    )
    for tensor in (values, ties, -values):
        rounded, rest = checkpoint.split(tensor)
        assert torch.equal(checkpoint.join(rounded, rest).view(torch.int32), tensor.view(torch.int32))
        assert ((rounded.float() - tensor).abs() <= (tensor.to(torch.bfloat16).float() - tensor).abs()).all()


def test_a_run_in_parts_is_the_run_in_one_bit_for_bit(data: Data, tmp_path: Path) -> None:
    recipe = tiny_recipe()
    Trainer(recipe, data, tmp_path / "whole", QUIET, None).run()
    part = replace(QUIET, stop_after=2)
    Trainer(recipe, data, tmp_path / "a", part, None).run()
    Trainer(recipe, data, tmp_path / "b", part, tmp_path / "a").run()
    state = Trainer(
        recipe, data, tmp_path / "b", part, tmp_path / "b"
    ).run()  # into the folder it goes on from
    assert state.step == recipe.steps
    assert state.figures["complete"]
    whole, parts = tensors(tmp_path / "whole"), tensors(tmp_path / "b")
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not all(torch.equal(t, parts[name]) for name, t in tensors(tmp_path / "a").items())
    logs = [
        [json.loads(line) for line in (tmp_path / run / "log.jsonl").read_text().splitlines()]
        for run in ("whole", "b")
    ]
    losses = [[(e["step"], e["text"], e["tasks"]) for e in log if "text" in e] for log in logs]
    assert losses[0] == losses[1]
    assert [step for step, *_ in losses[0]] == [2, 4, 6]


def test_the_weights_that_are_written_are_the_trained_ones_rounded(data: Data, tmp_path: Path) -> None:
    trainer = Trainer(tiny_recipe(steps=2), data, tmp_path, QUIET, None)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.run()
    model = OuroForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    for name, p in model.named_parameters():
        trained = trainer.model.get_parameter(name)
        assert torch.allclose(p.float(), trained, rtol=2**-8, atol=0)
        assert torch.equal(trained, before[name]) == ("gate" in name and "gate_proj" not in name), name
    sizes = [file.stat().st_size for file in tmp_path.glob("*.safetensors")]
    assert len(list(tmp_path.iterdir())) <= 7
    assert sum(sizes) < 12 * sum(p.numel() for p in model.parameters())  # the tiny model is mostly embeddings


def test_it_saves_when_it_is_told_to_stop(data: Data, tmp_path: Path) -> None:
    trainer = Trainer(tiny_recipe(steps=50), data, tmp_path, QUIET, None)
    step = trainer._step

    def stopping(number: int) -> dict[str, torch.Tensor]:
        if number == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(number)

    trainer._step = stopping  # type: ignore[method-assign]
    handler = signal.getsignal(signal.SIGTERM)
    assert trainer.run().step == 3
    assert signal.getsignal(signal.SIGTERM) == handler
    assert checkpoint.read_state(tmp_path).step == 3
    resumed = Trainer(tiny_recipe(steps=4), data, tmp_path, QUIET, tmp_path).run()
    assert resumed.step == 4


def test_a_step_that_does_not_compile_runs_eagerly(data: Data, tmp_path: Path) -> None:
    trainer = Trainer(tiny_recipe(steps=2), data, tmp_path, QUIET, None)

    def broken(*_: object) -> None:
        raise RuntimeError("no compiler")

    trainer.forward.after = broken
    trainer.forward.before = torch.compile(trainer.forward.before, backend="eager")
    trainer.run()
    assert trainer.forward.is_eager
    log = (tmp_path / "log.jsonl").read_text()
    assert "RuntimeError: no compiler" in log
    Trainer(tiny_recipe(steps=2), data, tmp_path / "plain", QUIET, None).run()
    plain = tensors(tmp_path / "plain")
    assert all(torch.equal(t, plain[name]) for name, t in tensors(tmp_path).items())


def test_a_budget_sets_the_steps_and_the_run_is_that_of_so_many_steps(data: Data, tmp_path: Path) -> None:
    limits = replace(QUIET, budget_minutes=1.0, stop_after=1)
    state = Trainer(tiny_recipe(), data, tmp_path / "budget", limits, None).run()
    assert state.recipe.steps > 40
    again = replace(tiny_recipe(), steps=state.recipe.steps)
    Trainer(again, data, tmp_path / "steps", replace(QUIET, stop_after=1), None).run()
    expected = tensors(tmp_path / "steps")
    assert all(torch.equal(t, expected[name]) for name, t in tensors(tmp_path / "budget").items())


def test_other_text_and_torn_checkpoints_are_refused(data: Data, tmp_path: Path) -> None:
    Trainer(tiny_recipe(steps=1), data, tmp_path, QUIET, None).run()
    model = new_model(tiny_recipe(), CPU)
    optimizer = Optimizer(model, 0.0)
    with pytest.raises(checkpoint.ResumeError, match="trained on other text"):
        checkpoint.load(tmp_path, model, optimizer, "another")
    state = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**state, "step": 9}))
    with pytest.raises(checkpoint.ResumeError, match=r"of step 1, state.json of 9"):
        checkpoint.load(tmp_path, model, optimizer, data.digest)
    with pytest.raises(checkpoint.ResumeError, match="no checkpoint"):
        checkpoint.read_state(tmp_path / "nowhere")


def test_the_loss_must_be_a_number(data: Data, tmp_path: Path) -> None:
    trainer = Trainer(tiny_recipe(), data, tmp_path, QUIET, None)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match="not finite at step 2"):
        trainer.run()
    assert not (tmp_path / "model.safetensors").exists()


def test_a_checkpoint_is_not_replaced_by_one_that_is_no_number(data: Data, tmp_path: Path) -> None:
    Trainer(tiny_recipe(steps=4), data, tmp_path, replace(QUIET, stop_after=1), None).run()
    before = tensors(tmp_path)
    eager = replace(
        QUIET, log_every=100, save_every_seconds=0.0
    )  # a checkpoint after each step, and no line of a log
    trainer = Trainer(tiny_recipe(steps=4), data, tmp_path, eager, tmp_path)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match=r"weights are not finite at step 2; .* --set muon_lr"):
        trainer.run()
    assert checkpoint.read_state(tmp_path).step == 1
    assert all(torch.equal(t, before[name]) for name, t in tensors(tmp_path).items())


def test_the_steps_of_a_budget_are_timed_where_tasks_are_of_all_lengths(data: Data, tmp_path: Path) -> None:
    trainer = Trainer(tiny_recipe(steps=100, context=512), data, tmp_path, QUIET, None)
    seen: list[list[int]] = []
    trainer._step = lambda step: seen.append(lengths(step, trainer.recipe)[0].tolist()) or {}  # type: ignore[method-assign, func-returns-value]
    trainer._set_steps(1.0)
    assert len(seen) == 40
    assert all(found == [128, 256, 512] for found in seen)


def test_tasks_get_longer_and_weights_sum_to_one(data: Data) -> None:
    recipe = Recipe(steps=1000)
    assert lengths(0, recipe)[0].tolist() == [128, 256]
    assert lengths(260, recipe)[0].tolist() == [128, 256, 512, 1024, 2048]
    assert lengths(0, recipe)[3].sum() == pytest.approx(1)
    small = tiny_recipe(micro_tokens=4096)
    text, tasks = data.step(3, small)
    for batch in (text, tasks):
        assert batch.ids.numel() == batch.targets.numel() == 4096
        assert torch.equal(batch.ids[:, 1:], batch.targets[:, :-1])
        assert float(batch.weights.sum()) == pytest.approx(1, abs=0.01)
    again = list(data.step(3, small))[1]
    assert torch.equal(tasks.ids, again.ids)
    assert not torch.equal(tasks.ids, list(data.step(4, small))[1].ids)


def test_newton_schulz_makes_matrices_nearly_orthogonal() -> None:
    for shape in ((3, 40, 16), (2, 16, 40), (1, 24, 24)):
        singular = torch.linalg.svdvals(
            orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
        )
        assert ((singular > 0.3) & (singular < 1.5)).all()


def test_the_size_and_cost_of_the_real_model() -> None:
    recipe = Recipe()
    model = new_model(recipe, CPU)
    assert sum(p.numel() for p in model.parameters()) * 2 < 15_500_000  # bytes of the weights file
    weights = sum(p.numel() for name, p in model.named_parameters() if ".layers." in name and p.dim() == 2)
    head = recipe.config.vocab_size * recipe.config.hidden_size
    assert flops_per_token(recipe.config, 0) == 4 * 6 * (weights + head)
    assert recipe.rate(0) > 0
    assert recipe.rate(recipe.steps // 2) == 1
    assert 0 < recipe.rate(recipe.steps - 1) < 0.001


def test_far_keys_can_be_matched_whatever_their_distance() -> None:
    """A rotary pair says which key it is, and not how far away, where it turns little within the context: with a fifth
    of the pairs so slow, a small model stopped at 0.4 of recall; with half of them it reached 1.0."""
    config = Recipe().config
    model = new_model(Recipe(shape=(("num_hidden_layers", 1),)), CPU)
    turns = config.max_position_embeddings * model.model.rotary_emb.inv_freq / (2 * torch.pi)
    assert float((turns < 1 / 4).float().mean()) > 0.45


def test_the_command_trains_and_goes_on(tmp_path: Path) -> None:
    main(["--tiny", "--out", str(tmp_path / "a"), "--stop-after", "2", "--log-every", "1", "--seed", "3"])
    main(["--tiny", "--out", str(tmp_path / "b"), "--resume", str(tmp_path / "a"), "--steps", "3"])
    state = checkpoint.read_state(tmp_path / "b")
    assert (state.step, state.recipe.seed, state.recipe.steps) == (3, 3, 3)
    with pytest.raises(SystemExit, match="only --steps may change"):
        main(["--tiny", "--out", str(tmp_path / "b"), "--resume", str(tmp_path / "a"), "--set", "micros=3"])


def test_what_is_exported_loads_and_its_card_has_the_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, into = tmp_path / "run", tmp_path / "model"
    main(["--tiny", "--out", str(run), "--steps", "3", "--stop-after", "2", "--log-every", "1"])
    with pytest.raises(ValueError, match=r"at step 2 of 3: go on with --resume"):
        main(["--export", str(run), "--into", str(into)])
    main(["--tiny", "--out", str(run), "--resume", str(run)])
    main(["--export", str(run), "--into", str(into)])
    model, tokenizer = load_model(into), load_tokenizer(into)
    assert model.dtype == torch.bfloat16
    trained = load_file(run / "model.safetensors")
    assert all(torch.equal(t, trained[name]) for name, t in model.state_dict().items())
    assert tokenizer.decode(tokenizer("[recall]")["input_ids"]) == "[recall]"
    found = (into / "README.md").read_text()
    figures = checkpoint.read_state(run).figures
    for bits, same in zip(figures["bits_per_byte"], figures["agreement_with_last_loop"], strict=True):
        assert f"| {bits:.3f} | {same:.1%} |" in found
    assert "| recall | " in found
    assert "PSF-2.0" in found
    assert found.count("python -m benchmarks.") == 2  # both runs
    assert re.search("Not learned in this run: .*copy", found)  # in three steps
    assert "{" not in found


def test_recipes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="micro_tokens"):
        Recipe(micro_tokens=1000)
    with pytest.raises(ValueError, match="micros must be at least 2"):
        Recipe(micros=1)
    assert np.isfinite(Recipe().rate(0))
