"""generate and stream by transformers' conventions, over an engine that runs the plain model."""

from __future__ import annotations

import gc
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from front_fakes import compiled_llama, left_padded, tiny_llama
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import GenerationConfig, LogitsProcessorList, TextStreamer
from transformers.generation.streamers import BaseStreamer

from sparse_compile.models import tiny_tokenizer
from sparse_compile.models.tokenizer import FIRST_BYTE_ID
from sparse_compile.outputs import GenerateOutput
from sparse_compile.streaming import IncrementalText

BATCH = left_padded([3, 7, 12, 5])
SOLO = left_padded([6])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


def new_tokens(sequences: torch.Tensor, width: int) -> list[list[int]]:
    return sequences[:, width:].tolist()


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 6},
        {"max_length": 17},
        {"generation_config": GenerationConfig(max_new_tokens=4, do_sample=False)},
        {"max_new_tokens": 6, "use_cache": False},
        {"max_new_tokens": 5, "suppress_tokens": [15, 20, 200]},
    ],
    ids=["new", "length", "config", "no cache", "suppress"],
)
def test_equals_transformers_on_a_padded_batch(model: Any, settings: dict[str, Any]) -> None:
    compiled, _ = compiled_llama(model)
    assert torch.equal(compiled.generate(**BATCH, **settings), model.generate(**BATCH, **settings))


def test_default_length_is_transformers(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    with pytest.warns(UserWarning, match="max_new_tokens"):
        ours = compiled.generate(**SOLO)
    with pytest.warns(UserWarning, match="max_new_tokens"):
        assert torch.equal(ours, model.generate(**SOLO))


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"forced_eos_token_id": 9},
        {"exponential_decay_length_penalty": (2, 1.5), "eos_token_id": 9},
        {"bad_words_ids": [[15], [20, 21]]},
        {"begin_suppress_tokens": [30, 40]},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_processors_act_as_in_transformers(model: Any, settings: dict[str, Any]) -> None:
    compiled, _ = compiled_llama(model)
    settings = {"max_new_tokens": 10, "pad_token_id": 0, **settings}
    assert torch.equal(compiled.generate(**SOLO, **settings), model.generate(**SOLO, **settings))
    # Rows of a padded batch behave as each does by itself.
    batch = compiled.generate(**BATCH, **settings)
    for row, length in enumerate((3, 7, 12, 5)):
        alone = model.generate(BATCH["input_ids"][row : row + 1, -length:], **settings)
        shorter = alone.shape[1] - length
        assert batch[row, 12 : 12 + shorter].tolist() == alone[0, length:].tolist()


def test_eos_list_pads_and_keeps_input_order(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    free = new_tokens(model.generate(**BATCH, max_new_tokens=8), 12)
    eos = [free[0][1], free[2][3]]  # from the model's own output, so that rows end at different lengths
    settings = {"max_new_tokens": 8, "eos_token_id": eos}
    ours = compiled.generate(**BATCH, **settings)
    assert torch.equal(ours, model.generate(**BATCH, **settings))
    unpadded = tiny_llama(pad_token_id=None)
    assert unpadded.generation_config.pad_token_id is None
    ours = compiled_llama(unpadded)[0].generate(**BATCH, **settings)
    assert torch.equal(ours, unpadded.generate(**BATCH, **settings))


@pytest.mark.parametrize("settings", [{"min_new_tokens": 6}, {"min_length": 17}], ids=["new", "length"])
def test_minimum_lengths(model: Any, settings: dict[str, Any]) -> None:
    compiled, _ = compiled_llama(model)
    eos = new_tokens(model.generate(**BATCH, max_new_tokens=8), 12)[0][1]
    settings = {"max_new_tokens": 8, "eos_token_id": eos, **settings}
    assert torch.equal(compiled.generate(**BATCH, **settings), model.generate(**BATCH, **settings))


def test_model_generation_config_is_respected() -> None:
    model = tiny_llama()
    eos = new_tokens(model.generate(**SOLO, max_new_tokens=4), 6)[0][1]
    model.generation_config.eos_token_id = eos
    model.generation_config.max_new_tokens = 4
    compiled, _ = compiled_llama(model)
    ours = compiled.generate(**SOLO)
    assert torch.equal(ours, model.generate(**SOLO))
    assert ours.shape[1] == 8


def test_right_padding_equals_left_padding(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    left = new_tokens(compiled.generate(**BATCH, max_new_tokens=5), 12)
    right = {name: value.clone() for name, value in BATCH.items()}
    for row, length in enumerate((3, 7, 12, 5)):
        for value in right.values():
            value[row] = value[row].roll(length)
    assert new_tokens(compiled.generate(**right, max_new_tokens=5), 12) == left
    additive = (1 - BATCH["attention_mask"].float()) * torch.finfo(torch.float32).min
    assert (
        new_tokens(compiled.generate(BATCH["input_ids"], attention_mask=additive, max_new_tokens=5), 12)
        == left
    )


def test_seeds_make_rows_independent_of_neighbours(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    settings = {"do_sample": True, "temperature": 3.0, "top_k": 0, "max_new_tokens": 8}
    both = new_tokens(compiled.generate(**BATCH, **settings, seed=5), 12)
    assert new_tokens(compiled.generate(**BATCH, **settings, seed=5), 12) == both
    assert new_tokens(compiled.generate(**BATCH, **settings, seed=6), 12) != both
    other = {name: value.clone() for name, value in BATCH.items()}
    other["input_ids"][2] = other["input_ids"][2].flip(0)
    changed = new_tokens(compiled.generate(**other, **settings, seed=5), 12)
    assert [changed[row] == both[row] for row in range(4)] == [True, True, False, True]
    first = {name: value[:1] for name, value in BATCH.items()}
    assert new_tokens(compiled.generate(**first, **settings, seed=5), 12)[0] == both[0]
    listed = new_tokens(compiled.generate(**BATCH, **settings, seed=[5, 1, 2, 3]), 12)
    assert listed[0] == both[0]
    torch.manual_seed(1)
    free = new_tokens(compiled.generate(**BATCH, **settings), 12)
    torch.manual_seed(1)
    assert new_tokens(compiled.generate(**BATCH, **settings), 12) == free


def test_num_return_sequences(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    out = compiled.generate(
        **SOLO, do_sample=True, temperature=3.0, num_return_sequences=3, max_new_tokens=6, seed=1
    )
    assert out.shape == (3, 12)
    assert len({tuple(row) for row in out.tolist()}) == 3
    with pytest.raises(ValueError, match="num_return_sequences"):
        compiled.generate(**SOLO, num_return_sequences=2, max_new_tokens=2)


def test_stop_strings(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    tokenizer = tiny_tokenizer()
    free = new_tokens(model.generate(**SOLO, max_new_tokens=30), 6)[0]
    place = next(
        at for at in range(2, 30) if tokenizer.decode([free[at]]).isascii() and tokenizer.decode([free[at]])
    )
    settings = {
        "max_new_tokens": 30,
        "stop_strings": [tokenizer.decode([free[place]])],
        "tokenizer": tokenizer,
    }
    ours = compiled.generate(**SOLO, **settings, return_dict_in_generate=True)
    assert torch.equal(ours.sequences, model.generate(**SOLO, **settings))
    assert ours.finish_reasons == ["stop"]
    with pytest.raises(ValueError, match="tokenizer"):
        compiled.generate(**SOLO, stop_strings=["a"], max_new_tokens=2)


def test_user_callables_see_rows_as_the_caller_padded_them(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    seen: list[tuple[str, int, list[int]]] = []

    def processor(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(("processor", *input_ids.shape[:1], input_ids[0, :12].tolist()))
        return scores.index_fill(1, torch.tensor([7]), 1e4)

    def criterion(input_ids: torch.Tensor, scores: Any) -> bool:
        assert scores is None
        return bool(input_ids.shape[1] == 12 + 2)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        assert ids[:12].tolist() == BATCH["input_ids"][row].tolist()
        return [7, 8] if row == 0 else [8]

    out = compiled.generate(
        **BATCH,
        logits_processor=LogitsProcessorList([processor]),
        stopping_criteria=[criterion],
        max_new_tokens=5,
    )
    assert new_tokens(out, 12) == [[7, 7]] * 4
    assert {tuple(ids) for _, rows, ids in seen} == {tuple(row) for row in BATCH["input_ids"].tolist()}
    out = compiled.generate(**BATCH, prefix_allowed_tokens_fn=allowed, max_new_tokens=1)
    assert [row[0] for row in new_tokens(out, 12)][1:] == [8, 8, 8]


def test_criteria_without_any_pad_token_are_refused() -> None:
    compiled, _ = compiled_llama(tiny_llama(pad_token_id=None))
    with pytest.raises(ValueError, match="pad_token_id=None"):
        compiled.generate(**BATCH, stopping_criteria=[lambda ids, scores: False], max_new_tokens=2)


def test_return_dict(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    eos = new_tokens(model.generate(**BATCH, max_new_tokens=4), 12)[0][1]
    settings = {"max_new_tokens": 4, "eos_token_id": eos, "return_dict_in_generate": True}
    out = compiled.generate(
        **BATCH, **settings, output_scores=True, output_logits=True, repetition_penalty=1.3
    )
    assert isinstance(out, GenerateOutput)
    assert out.finish_reasons[1] == "length"
    assert len(out.scores) == len(out.logits) == 4
    assert out.scores[0].shape == (4, 272)
    for row in range(4):
        emitted = out.sequences[row, 12 : 12 + len(out.logprobs[row])]
        for step, token in enumerate(emitted.tolist()):
            expected = out.scores[step][row].log_softmax(-1)[token]
            assert out.logprobs[row][step] == pytest.approx(float(expected))
        assert all(out.logits[step][row].isnan().all() for step in range(len(emitted), 4))
        assert out.metrics[row].new_tokens == len(emitted)
    plain = compiled.generate(**BATCH, **settings)
    assert plain.scores is None
    assert "scores" not in plain


class Recorder(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append("end")


def test_streamer_as_in_transformers(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    compiled, _ = compiled_llama(model)
    ours, theirs = Recorder(), Recorder()
    compiled.generate(**SOLO, streamer=ours, max_new_tokens=4)
    model.generate(**SOLO, streamer=theirs, max_new_tokens=4)
    assert ours.values == theirs.values
    compiled.generate(**SOLO, streamer=TextStreamer(tiny_tokenizer()), max_new_tokens=4)
    assert capsys.readouterr().out
    with pytest.raises(ValueError, match="takes one sequence, the call has 4"):
        compiled.generate(**BATCH, streamer=ours, max_new_tokens=4)
    with pytest.raises(ValueError, match="streamer"):
        compiled.generate(**SOLO, streamer=print, max_new_tokens=4)


def test_stream_gives_the_same_tokens_and_text(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    tokenizer = tiny_tokenizer()
    expected = new_tokens(compiled.generate(**BATCH, max_new_tokens=5), 12)
    items = list(compiled.stream(**BATCH, max_new_tokens=5))
    assert [[item.token_id for item in items if item.row == row] for row in range(4)] == expected
    assert [item.finish_reason for item in items if item.finished] == ["length"] * 4
    assert items[0].text is None
    solo = list(compiled.stream(SOLO["input_ids"], tokenizer=tokenizer, max_new_tokens=20))
    whole = tokenizer.decode([item.token_id for item in solo], skip_special_tokens=True)
    assert "".join(item.text or "" for item in solo) == whole


@given(st.lists(st.one_of(st.text(max_size=3), st.binary(max_size=2)), max_size=6))
@example(["d\u20acf\U0001f642", b"\xe2", "h", b"\xf0\x9f"])
def test_pieces_of_text_are_the_whole_text(parts: list[str | bytes]) -> None:
    """Characters of several tokens, and bytes that are none: some tokenizers say U+FFFD to them, some say nothing."""
    data = b"".join(part.encode() if isinstance(part, str) else part for part in parts)
    replaces = SimpleNamespace(decode=lambda ids, skip_special_tokens: bytes(ids).decode(errors="replace"))
    for tokenizer, first in ((tiny_tokenizer(), FIRST_BYTE_ID), (replaces, 0)):
        tokens = [byte + first for byte in data]
        text = IncrementalText(tokenizer)
        pieces = [text.push(token, at == len(tokens)) for at, token in enumerate(tokens, start=1)]
        assert "".join(pieces) == (tokenizer.decode(tokens, skip_special_tokens=True) if tokens else "")


def test_stream_checks_at_once_and_takes_no_streamer(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    with pytest.raises(ValueError, match="num_beams"):
        compiled.stream(**SOLO, num_beams=2)
    with pytest.raises(ValueError, match="streamer"):
        compiled.stream(**SOLO, streamer=Recorder(), max_new_tokens=2)


def test_stream_closed_early_leaves_nothing(model: Any) -> None:
    compiled, engines = compiled_llama(model)
    stream = compiled.stream(**BATCH, max_new_tokens=9)
    next(stream)
    assert engines[0].live
    stream.close()
    assert not engines[0].live
    stream = compiled.stream(**SOLO, max_new_tokens=9)
    next(stream)
    del stream
    gc.collect()
    assert not engines[0].live


def test_stream_and_generate_share_the_engine(model: Any) -> None:
    compiled, engines = compiled_llama(model, width=8)
    expected = new_tokens(compiled.generate(**BATCH, max_new_tokens=6), 12)
    stream = compiled.stream(**BATCH, max_new_tokens=6)
    items = [next(stream)]
    assert new_tokens(compiled.generate(**BATCH, max_new_tokens=6), 12) == expected
    items += stream
    assert [[item.token_id for item in items if item.row == row] for row in range(4)] == expected
    assert len(engines) == 1


@pytest.mark.parametrize("failure", [RuntimeError("broken row"), KeyboardInterrupt])
def test_failure_raises_and_cleans_up(model: Any, failure: Any) -> None:
    compiled, engines = compiled_llama(model)
    compiled.generate(**BATCH, max_new_tokens=2)
    engine = engines[0]
    engine.fail_after[engine._steps + 2] = failure
    recorder = type(failure) if isinstance(failure, Exception) else failure
    with pytest.raises(recorder) as caught:
        compiled.generate(**BATCH, max_new_tokens=2)
    if isinstance(failure, Exception):
        assert caught.value.__notes__ == ["in row 0 of the call"]
    assert not engine.live
    assert compiled.generate(**BATCH, max_new_tokens=2).shape == (4, 14)


def test_streamer_is_ended_after_a_failure(model: Any) -> None:
    compiled, engines = compiled_llama(model)
    compiled.generate(**SOLO, max_new_tokens=2)
    engines[0].fail_after[engines[0]._steps + 1] = RuntimeError("broken")
    recorder = Recorder()
    with pytest.raises(RuntimeError, match="broken"):
        compiled.generate(**SOLO, streamer=recorder, max_new_tokens=2)
    assert recorder.values[-1] == "end"


def test_engine_grows_on_demand(model: Any) -> None:
    compiled, engines = compiled_llama(model)
    for rows, new in ((4, 8), (2, 64), (8, 8), (4, 8)):
        prompts = left_padded([5] * rows, seed=rows)
        assert torch.equal(
            compiled.generate(**prompts, max_new_tokens=new), model.generate(**prompts, max_new_tokens=new)
        )
    sizes = [(engine.rows, engine.context) for engine in engines]
    assert sizes[0] == (4, 16)
    assert len(sizes) <= 3
    assert all(context % 16 == 0 for _, context in sizes)


def test_calls_of_several_threads_work_in_turn(model: Any) -> None:
    """Also where a call needs a larger engine than the one that works: they share the model and its device."""
    compiled, engines = compiled_llama(model)
    answers: dict[str, torch.Tensor] = {}
    thread = threading.Thread(
        target=lambda: answers.update(large=compiled.generate(**BATCH, max_new_tokens=3, progress=False))
    )

    def slow(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not answers and not thread.is_alive():
            thread.start()
            thread.join(0.3)  # it must not get to a step
            assert len(engines) < 2 or engines[1]._steps == 0
        return scores

    answers["small"] = compiled.generate(**SOLO, max_new_tokens=3, logits_processor=[slow], progress=False)
    thread.join()
    assert [engine.rows for engine in engines] == [1, 4]
    assert torch.equal(answers["large"], compiled.generate(**BATCH, max_new_tokens=3))
    assert torch.equal(answers["small"], compiled.generate(**SOLO, max_new_tokens=3))


def test_growth_falls_back_to_what_the_call_needs(model: Any) -> None:
    compiled, engines = compiled_llama(model)
    make = compiled._keeper.make_engine

    def limited(rows: int, context: int) -> Any:
        if rows * context > 128:
            raise ValueError("no memory")
        return make(rows, context)

    compiled._keeper.make_engine = limited
    compiled.generate(**left_padded([5] * 4), max_new_tokens=8)
    compiled.generate(**left_padded([5] * 2), max_new_tokens=40)
    assert [(engine.rows, engine.context) for engine in engines] == [(4, 16), (2, 48)]
    with pytest.raises(ValueError, match="no memory"):
        compiled.generate(**left_padded([5] * 8), max_new_tokens=40)


def test_fixed_limits(model: Any) -> None:
    compiled, engines = compiled_llama(model, max_batch=2, max_context=20)
    with pytest.raises(ValueError, match=r"max_batch=2: the call has 4 sequences"):
        compiled.generate(**BATCH, max_new_tokens=2)
    with pytest.raises(ValueError, match=r"max_context=20: the call needs 21 tokens"):
        compiled.generate(**SOLO, max_new_tokens=15)
    with pytest.raises(ValueError, match="max_context=20"):
        compiled.stream(**SOLO, max_new_tokens=15)
    assert engines == []
    compiled.generate(**SOLO, max_new_tokens=14)
    assert [(engine.rows, engine.context) for engine in engines] == [(2, 20)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_beams", 2),
        ("penalty_alpha", 0.6),
        ("guidance_scale", 1.5),
        ("assistant_model", "draft"),
        ("prompt_lookup_num_tokens", 3),
        ("constraints", ["x"]),
        ("inputs_embeds", torch.zeros(1, 2, 3)),
        ("past_key_values", ()),
        ("cache", ()),
        ("position_ids", torch.zeros(1, 6)),
        ("output_attentions", True),
        ("output_hidden_states", True),
        ("cache_implementation", "quantized"),
        ("cache_implementation", "offloaded"),
        ("custom_generate", "some/repo"),
        ("negative_prompt_ids", torch.zeros(1, 6)),
        ("synced_gpus", True),
        ("token_type_ids", torch.zeros(1, 6)),
        ("logits_processor", print),
        ("generation_config", {"max_new_tokens": 3}),
        ("seed", -1),
        ("max_new_tokens", "3"),
        ("max_length", [9]),
        ("encoder_outputs", ()),
    ],
)
def test_unsupported_arguments_are_refused_by_name(model: Any, name: str, value: Any) -> None:
    compiled, engines = compiled_llama(model)
    with pytest.raises(ValueError, match=name):
        compiled.generate(**SOLO, **{"max_new_tokens": 2, name: value})
    assert engines == []


def test_unknown_arguments_are_refused_with_a_suggestion(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    with pytest.raises(ValueError, match="did you mean max_new_tokens"):
        compiled.generate(**SOLO, max_new_token=3)
    with pytest.raises(ValueError, match="knows no such argument") as caught:
        compiled.generate(**SOLO, constrains=3)
    assert "constraints" not in str(caught.value)  # that one would be refused as well
    with pytest.raises(ValueError, match="both were given"):
        compiled.generate(SOLO["input_ids"], **SOLO)


def test_progress_can_be_replaced(model: Any) -> None:
    compiled, _ = compiled_llama(model)
    seen: list[tuple[int, int]] = []
    eos = new_tokens(model.generate(**SOLO, max_new_tokens=4), 6)[0][1]
    compiled.generate(
        **SOLO, max_new_tokens=4, eos_token_id=eos, progress=lambda done, total: seen.append((done, total))
    )
    assert seen == [(1, 4), (2, 2)]


def test_progress_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    from sparse_compile.progress import WorkProgress

    with WorkProgress(3, True, quiet=0) as bar:
        bar.advance()
        bar.advance()
    assert capsys.readouterr().err == "generating: 1 of at most 3 tokens\n"
    with WorkProgress(3, None, quiet=0) as bar:
        bar.advance()
    assert capsys.readouterr().err == ""


class _Listener:
    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


def test_no_progress_beside_a_streamer_unless_asked_for(
    model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sparse_compile.progress.WorkProgress.__init__.__defaults__", (0.0, "generating", "tokens")
    )
    compiled, _ = compiled_llama(model, progress=True)
    compiled.generate(**SOLO, max_new_tokens=2)
    assert "generating: 1 of at most 2 tokens" in capsys.readouterr().err
    compiled.generate(**SOLO, max_new_tokens=2, streamer=_Listener())
    assert capsys.readouterr().err == ""
    compiled.generate(**SOLO, max_new_tokens=2, streamer=_Listener(), progress=True)
    assert "generating: 1 of at most 2 tokens" in capsys.readouterr().err


def test_what_is_printed_under_a_bar_stays_on_stdout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from sparse_compile.progress import WorkProgress

    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes stderr for a terminal
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with WorkProgress(3, True, quiet=0) as bar:
        bar.advance()
        print("half a line", end="", flush=True)
        assert capsys.readouterr().out == "half a line"
