"""Where and when a compiled model is used: other modes of torch, threads, callbacks, interrupts, growing pools."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from shared_models import shared_model

from sparse_compile import ArgumentError, CompiledModel, sparse_compile

pytestmark = pytest.mark.usefixtures("shared_traces")

PROMPTS = [torch.tensor([[5, 77, 130, 9]]), torch.tensor([[200, 31, 8]])]


@pytest.fixture(scope="module")
def model() -> Any:
    return shared_model("ouro", dtype=torch.float64)


@pytest.fixture
def compiled(model: Any) -> CompiledModel:
    return sparse_compile(model, key_retention=0.3, validate=False)


def tokens(compiled: CompiledModel, prompt: torch.Tensor, new: int = 10, **options: Any) -> list[int]:
    return compiled.generate(prompt, max_new_tokens=new, **options)[0, prompt.shape[1] :].tolist()


def test_inference_mode_leaves_nothing_behind(model: Any, compiled: CompiledModel) -> None:
    with torch.inference_mode():
        first = tokens(compiled, PROMPTS[0])
        stream = compiled.stream(PROMPTS[0], max_new_tokens=10, stopping_criteria=[lambda ids, scores: False])
        begun = [next(stream).token_id for _ in range(3)]
        again = sparse_compile(model, key_retention=0.3)
    assert tokens(compiled, PROMPTS[0]) == first
    assert begun + [item.token_id for item in stream] == first
    assert tokens(again, PROMPTS[0]) == first


@pytest.mark.parametrize("options", [{}, {"do_sample": True, "seed": 3, "top_k": 9}])
def test_a_default_device_is_not_mixed_up_with_the_models(
    model: Any, compiled: CompiledModel, options: dict[str, Any]
) -> None:
    want = tokens(compiled, PROMPTS[0], **options)
    mask = torch.ones_like(PROMPTS[0])
    with torch.device("meta"):
        assert tokens(compiled, PROMPTS[0], attention_mask=mask, **options) == want
        assert tokens(sparse_compile(model, key_retention=0.3), PROMPTS[0], **options) == want


def test_autocast_is_refused(model: Any, compiled: CompiledModel) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for call in (
            lambda: tokens(compiled, PROMPTS[0]),
            lambda: compiled.stream(PROMPTS[0]),
            compiled.validate,
            lambda: sparse_compile(model),
        ):
            with pytest.raises(ArgumentError, match=r"autocast.*bfloat16"):
                call()


def test_threads_share_one_compiled_model(compiled: CompiledModel) -> None:
    want = [tokens(compiled, prompt) for prompt in PROMPTS]
    found: dict[tuple[int, int], Any] = {}

    def work(thread: int) -> None:
        for turn in range(3):
            found[thread, turn] = tokens(compiled, PROMPTS[(thread + turn) % 2])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    assert found == {(i, j): want[(i + j) % 2] for i in range(4) for j in range(3)}
    compiled.engine.check_integrity()


def test_a_callback_must_not_generate_with_its_own_model(compiled: CompiledModel) -> None:
    def again(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tokens(compiled, PROMPTS[1], new=2)
        return scores

    want = tokens(compiled, PROMPTS[0])
    with pytest.raises(RuntimeError, match="must not generate"):
        tokens(compiled, PROMPTS[0], logits_processor=[again])
    assert not compiled.engine.has_unfinished()
    compiled.engine.check_integrity()
    assert tokens(compiled, PROMPTS[0]) == want


@pytest.mark.parametrize("where", ["logits_processor", "stopping_criteria"])
def test_an_interrupt_never_loses_a_token_silently(compiled: CompiledModel, where: str) -> None:
    want = tokens(compiled, PROMPTS[1])
    stream = compiled.stream(PROMPTS[1], max_new_tokens=10)
    got = [next(stream).token_id for _ in range(3)]

    def interrupt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] > 3:
            raise KeyboardInterrupt
        return scores

    with pytest.raises(KeyboardInterrupt):
        tokens(compiled, PROMPTS[1], new=5, **{where: [interrupt]})
    try:
        got += [item.token_id for item in stream]
    except RuntimeError as error:
        assert "interrupted by KeyboardInterrupt" in str(error)  # noqa: PT017  either is right: all, or loud
        assert got == want[: len(got)]
    else:
        assert got == want
    assert not compiled.engine.has_unfinished()
    compiled.engine.check_integrity()
    assert tokens(compiled, PROMPTS[1]) == want


def test_the_pool_grows_beside_an_open_stream(compiled: CompiledModel) -> None:
    want = tokens(compiled, PROMPTS[0])
    stream = compiled.stream(PROMPTS[0], max_new_tokens=10)
    got = [next(stream).token_id for _ in range(4)]
    larger = compiled.generate(PROMPTS[0].repeat(5, 1), max_new_tokens=60)
    assert larger[4, 4:14].tolist() == want
    assert got + [item.token_id for item in stream] == want
    compiled.engine.check_integrity()
