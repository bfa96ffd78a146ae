"""What users of neighbouring projects ran into, each as a named test of the whole product.

A1 to A10 are here, A11 to A34 in test_cases_runtime, what is asked for most in test_cases_wishes. Where a test of one
room covers a case, it is named here instead of copied:

    A7   test_passes_refusals::test_random_state_is_named (a random initial state is refused by name)
    A8   test_end_to_end::test_prefix_lm_is_honoured, ::test_prefix_lm_inputs_are_refused_where_they_mean_nothing
    A20  test_kernels_ops::test_a_cloned_operand_is_not_folded_into_its_origin
    A22  test_kernels_ops::test_consume_sees_what_capture_wrote_in_one_compiled_graph
    A23  test_passes::test_dead_code_elimination_keeps_captures, ::test_grammar_sees_a_lost_data_edge,
         test_kernels_ops::test_dead_code_elimination_keeps_the_ops_that_write
    A24  test_kernels_ops::test_strides_do_not_matter, ::test_opcheck,
         ::test_consume_leaves_the_store_alone_and_outputs_alias_nothing
    A25  test_kernels_batched::test_a_pool_beyond_int32_addresses (needs a GPU)
    A26  test_kernels_batched::test_every_head_ratio_and_dimension
    A27  test_kernels_ops::test_strides_do_not_matter (one fused projection, expanded, one row)
    A29  test_kernels_ops::test_consume_before_capture_is_refused
         test_retention_layers::test_the_first_and_last_keys_are_kept

    A35  test_serve::test_a35_an_abort_while_a_prompt_is_handed_over_to_decode (prefill and decode of one engine)
    A5   test_serve::test_a5_prompts_in_chunks_in_one_batch
    A19  test_serve::test_a19_a_python_callback_per_step
    A34  with preemption: test_engine_suspension::test_the_last_one_makes_room_when_pages_run_out
    A16, A17, A18  with CUDA graphs: test_graphs::test_the_key_covers_rows_width_kind_and_depths,
         ::test_a17_buckets_that_are_refilled_give_what_their_rows_give; with a GPU ::test_graphs_change_no_bits,
         ::test_rows_beyond_the_plan_touch_only_the_dummies

and of the torch.compile backend:

    A4   test_backend::test_position_ids_and_cache_positions_are_rewritten_alike
    A6   test_backend::test_masks_of_every_type_are_one_mask
    A11  test_backend::test_calls_of_other_sizes
    A12  test_backend::test_no_compilation_after_the_second_token
    A13  test_backend::test_a_mask_with_zeros_and_a_break_in_the_report
    A14  test_backend_graphs::test_nothing_rewritten_is_an_error_with_a_reason_per_node
    A15  test_backend::test_rows_that_end_cause_no_compilation, ::test_a_prompt_of_one_token
    A16  test_backend::test_logits_of_a_step_outlive_the_next
    A20, A21, A22  test_backend_inductor::test_ops_may_be_given_a_tensor_and_its_copy, ::test_one_compiled_step

of self-speculation:

    A30, A31  test_speculation::test_a30_a31_one_wrong_token_each_time_vanishes_from_all_loops,
         ::test_a30_drafts_of_a_pipeline_that_are_all_right_or_all_wrong, ::test_a31_an_abort_near_the_limit
    A32  test_speculation_sampling::test_a32_twenty_thousand_draws_have_the_distribution_of_plain_sampling
    A33  test_speculation::test_a33_a_processor_is_applied_at_each_draft_position

Of what is asked for most: lm_eval is in test_lm_eval; a deterministic mode with a self-test in test_deterministic and
test_selftest.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from cases_common import compiled_ouro, left_padded, new_tokens, prompts
from looped_models import (
    CachePositions,
    LoopedConfig,
    LoopedModel,
    MixedResiduals,
    OldCalls,
    OldNames,
    OwnSoftmax,
    RotaryInside,
)
from oracle import SparseOracle
from safetensors.torch import load_file, save_file
from shared_models import shared_model
from transformers import AutoModelForCausalLM

from sparse_compile import cli, sparse_compile
from sparse_compile.errors import ValidationError
from sparse_compile.models import TINY_MODELS, check_checkpoint, load_model, tiny_model
from sparse_compile.models.rotary_check import expected_frequencies
from sparse_compile.passes.errors import UnsupportedModel

pytestmark = pytest.mark.usefixtures("shared_traces")


def without_cache(model: Any, prompt: list[int], new: int) -> list[int]:
    """Greedy tokens by one whole forward per token."""
    ids = torch.tensor([prompt])
    for _ in range(new):
        ids = torch.cat((ids, model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    return ids[0, len(prompt) :].tolist()


def looped(kind: type[LoopedModel], dtype: torch.dtype = torch.float64) -> LoopedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(LoopedConfig()).to(dtype).eval()


@pytest.fixture(scope="module")
def ouro() -> Any:
    return compiled_ouro()


def test_the_tests_that_are_named_above_exist() -> None:
    """`file::test`, or `::test` for another one of the same file."""
    module = ""
    found = re.findall(r"(test_\w+)?::(test_\w+)", __doc__ or "")
    assert len(found) > 10
    for file, test in found:
        module = file or module
        assert f"\ndef {test}(" in (Path(__file__).parent / f"{module}.py").read_text(), f"{module}::{test}"


# Hugging Face models and caches


def test_a1_an_old_cache_name_and_an_own_cache_class_work() -> None:
    """The installed `generate` hands its cache over under the new name, where this model never sees it."""
    model = looped(OldNames)
    rows = prompts(5, 9, vocabulary=64)
    wanted = [without_cache(model, row, 8) for row in rows]
    assert new_tokens(sparse_compile(model, key_retention=1.0), rows, 8) == wanted


def test_attention_over_the_depth_of_one_token_is_no_site() -> None:
    model = looped(MixedResiduals)
    rows = prompts(5, 9, vocabulary=64)
    wanted = [without_cache(model, row, 8) for row in rows]
    compiled = sparse_compile(model, key_retention=1.0)
    assert new_tokens(compiled, rows, 8) == wanted
    assert {row.layer for row in compiled.report().layers} == {
        f"layers.{n}" for n in range(len(model.layers))
    }


def test_a1_attention_that_is_written_out_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "sparse_compile.passes.trace._export", lambda *_: pytest.fail("went on to the export")
    )
    with pytest.raises(UnsupportedModel) as caught:
        sparse_compile(looped(OwnSoftmax))
    message = str(caught.value)
    assert f"the installed transformers {transformers.__version__}" in message
    assert "layers.0 (OwnAttention) mixes tokens by itself" in message
    assert "use code of the model that calls its attention through ALL_ATTENTION_FUNCTIONS" in message
    assert "\n" not in message


def test_a1_code_that_no_longer_runs_is_one_clear_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnsupportedModel, match=r"OldCalls .*AttributeError: .*get_usable_length") as caught:
        sparse_compile(looped(OldCalls))
    assert f"runs under the installed transformers {transformers.__version__}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a1_a_model_that_cannot_generate_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    model = looped(RotaryInside)
    monkeypatch.setattr(model, "cache", lambda cache, use_cache: cache)  # too few slots for its loops
    with pytest.raises(ValidationError, match=r"own generate failed .*IndexError.*validate=False") as caught:
        sparse_compile(model)
    assert transformers.__version__ in str(caught.value)
    row = prompts(6, vocabulary=64)
    compiled = sparse_compile(model, key_retention=1.0, validate=False)
    assert new_tokens(compiled, row, 6) == [without_cache(model, row[0], 6)]


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a2_loaded_through_the_meta_device(name: str, tmp_path: Path) -> None:
    model = shared_model(name)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    rotary = {key: buffer for key, buffer in loaded.named_buffers() if key.endswith("inv_freq")}
    assert rotary
    for key, buffer in rotary.items():
        kind = key.split(".")[-1].removesuffix("inv_freq").rstrip("_").removesuffix("original").rstrip("_")
        formula, _ = expected_frequencies(loaded.config, kind or None)
        torch.testing.assert_close(buffer.double(), formula, rtol=1e-6, atol=0)
    ids = torch.tensor(prompts(10))
    logits = loaded(ids).logits
    assert logits.isfinite().all()
    assert torch.equal(logits, model(ids).logits)
    assert new_tokens(sparse_compile(loaded, key_retention=1.0), prompts(10), 8) == new_tokens(
        model, prompts(10), 8
    )


@pytest.mark.parametrize("value", [float("nan"), 0.0, 1e30])
@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a2_damaged_rotary_buffers_are_a_loud_error(name: str, value: float) -> None:
    model = tiny_model(name)
    key = next(key for key, _ in model.named_buffers() if key.endswith("inv_freq"))
    model.get_buffer(key)[1:] = value
    with pytest.raises(ValidationError, match=rf"{key} of .*off by .*loaded wrongly.*validate=False"):
        sparse_compile(model)


def test_a3_two_loads_are_the_file_bit_by_bit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_model("ouro").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    for loaded in (load_model(tmp_path), load_model(tmp_path)):
        state = loaded.state_dict()
        assert set(stored) == set(state)
        assert all(torch.equal(state[name], tensor) for name, tensor in stored.items())
    assert cli.run(["check", str(tmp_path)]) == 0
    name = next(name for name in stored if "mlp" in name)
    save_file({key: tensor for key, tensor in stored.items() if key != name}, file, {"format": "pt"})
    capsys.readouterr()
    assert cli.run(["check", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["missing"] == report["reinitialised"] == [name]
    changed = tiny_model("ouro")
    save_file(stored, file, {"format": "pt"})
    with torch.no_grad():
        changed.get_parameter(name).view(-1)[3] += 1
    assert [one.name for one in check_checkpoint(changed, tmp_path).differing] == [name]


def test_a4_position_ids_only_or_cache_positions() -> None:
    first, second = looped(RotaryInside), looped(CachePositions)
    second.load_state_dict(first.state_dict())
    rows = prompts(3, 8, vocabulary=64)
    outputs, sites = [], []
    for model in (first, second):
        compiled = sparse_compile(model, key_retention=0.4)
        sites.append([(site.layer, site.loop, site.kind) for site in compiled.program.sites])
        outputs.append(
            compiled.generate(
                **left_padded(rows), max_new_tokens=8, output_logits=True, return_dict_in_generate=True
            )
        )
        wanted = [SparseOracle(model, 0.4).generate(row, 8) for row in rows]
        assert outputs[-1].sequences[:, 8:].tolist() == wanted
    assert len(sites[0]) == 2 * 4
    assert sites[0] == sites[1]
    torch.testing.assert_close(outputs[0].logits, outputs[1].logits, rtol=1e-9, atol=1e-9)


def test_a4_a_model_that_ignores_position_ids_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts positions itself, which a row on its own cannot."""

    class Counts(CachePositions):
        def forward(
            self, input_ids: torch.Tensor, position_ids: Any = None, cache: Any = None, **kwargs: Any
        ) -> Any:
            return super().forward(input_ids, position_ids=None, cache=cache, **kwargs)

    with pytest.raises(ValidationError, match="disagrees with Counts's own generation"):
        sparse_compile(looped(Counts))


def test_a5_ragged_prompts_in_chunks_equal_solo_runs(ouro: Any) -> None:
    rows = prompts(5, 13)
    together = new_tokens(ouro, rows, 12)
    assert [new_tokens(ouro, [row], 12)[0] for row in rows] == together
    assert [SparseOracle(ouro.model, 0.3).generate(row, 12) for row in rows] == together


def test_a6_every_form_of_a_mask_is_one_answer(ouro: Any) -> None:
    inputs = left_padded(prompts(4, 9, 1))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ids[mask == 0] = 77  # a mask that is ignored shows
    wanted = ouro.generate(ids, attention_mask=mask, max_new_tokens=8)
    solo = [
        ouro.generate(ids[row : row + 1, 9 - n :], max_new_tokens=8)[0, n:] for row, n in enumerate((4, 9, 1))
    ]
    assert torch.equal(wanted[:, 9:], torch.stack(solo))
    lowest = torch.finfo(torch.float64).min
    for form in (mask.bool(), mask.double(), (1 - mask.double()) * lowest, mask.double().log(), mask.int()):
        assert torch.equal(ouro.generate(ids, attention_mask=form, max_new_tokens=8), wanted)
    for form in (mask[:, None, None].bool(), mask * 2, mask[:, 1:], mask.double() - 0.5):
        with pytest.raises(ValueError, match="attention_mask"):
            ouro.generate(ids, attention_mask=form, max_new_tokens=8)


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_a9_inspect_a_model_that_uses_its_cache_by_default(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shared_model(name).config.use_cache is True
    assert cli.run(["inspect", f"tiny:{name}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["rolled"] is True
    for layer in report["layers"]:
        loops = layer["loops"]
        sparse = layer["looped"] and not layer["window"]
        wanted = ["dense", "capture", *["consume"] * (loops - 2)] if sparse else ["dense"] * loops
        assert layer["kinds"] == wanted
    assert any("consume" in layer["kinds"] for layer in report["layers"])


def test_a10_wrapping_and_generating_leave_the_forward_bitwise_alone() -> None:
    model = shared_model("dory")
    inputs = left_padded(prompts(3, 11))
    y0 = model(**inputs).logits
    compiled = sparse_compile(model, key_retention=0.3)
    first, second = prompts(6, 2, 9, seed=2), prompts(9, 3, seed=3)
    answers = [compiled.generate(**left_padded(rows), max_new_tokens=6) for rows in (first, second)]
    assert torch.equal(model(**inputs).logits, y0)
    for rows, answer in zip((first, second), answers, strict=True):
        padded = left_padded(rows)["input_ids"]
        assert torch.equal(answer[:, : padded.shape[1]], padded)  # each under its own prompt
        backwards = compiled.generate(**left_padded(rows[::-1]), max_new_tokens=6)
        assert torch.equal(backwards.flip(0), answer)
