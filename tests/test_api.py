"""The forms of sparse_compile(), and the object that comes out."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from front_fakes import compiled_llama, fake_program, left_padded, tiny_llama
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from sparse_compile import sparse_compile
from sparse_compile.compiled import CompiledModel
from sparse_compile.config import SparseConfig


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, SparseConfig]]:
    """Replaces the compiler; returns the list of (model, config) it was called with."""
    calls: list[tuple[Any, SparseConfig]] = []

    def compile_model(model: Any, config: SparseConfig) -> CompiledModel:
        calls.append((model, config))
        return CompiledModel(model, config, fake_program(), lambda rows, context: None)  # type: ignore[arg-type, return-value]

    monkeypatch.setitem(sys.modules, "sparse_compile.compile", SimpleNamespace(compile_model=compile_model))
    return calls


def test_a_model(compiles: list[Any]) -> None:
    model = tiny_llama()
    compiled = sparse_compile(model, key_retention=0.5)
    assert compiled.model is model
    assert compiled.sparse_config.key_retention == 0.5


def test_options_are_checked_before_anything_else(compiles: list[Any]) -> None:
    with pytest.raises(ValueError, match="key_retention"):
        sparse_compile(object(), key_retention=0)
    with pytest.raises(ValueError, match="key_retenton"):
        sparse_compile(key_retenton=0.1)
    assert compiles == []


def test_a_compiled_model_is_compiled_again_from_its_original(compiles: list[Any]) -> None:
    model = tiny_llama()
    again = sparse_compile(sparse_compile(model, key_retention=0.5), enabled=False)
    assert again.model is model
    assert compiles[1][1] == SparseConfig(enabled=False)


def test_function_decorator_bare_and_with_options(compiles: list[Any]) -> None:
    @sparse_compile
    def plain() -> Any:
        """Makes a model."""
        return tiny_llama()

    @sparse_compile(key_retention=0.2)
    def with_options(layers: int) -> Any:
        return tiny_llama(num_hidden_layers=layers)

    assert plain.__name__ == "plain"
    assert plain.__doc__ == "Makes a model."
    assert isinstance(plain(), CompiledModel)
    assert with_options(2).sparse_config.key_retention == 0.2
    assert with_options(2).config.num_hidden_layers == 2


def test_function_that_returns_no_model(compiles: list[Any]) -> None:
    def nothing() -> None:
        return None

    with pytest.raises(TypeError, match=r"nothing\(\) returned None, not a model"):
        sparse_compile(nothing)()


def test_class_decorator(compiles: list[Any], tmp_path: Any) -> None:
    @sparse_compile(key_retention=0.2)
    class Mine(LlamaForCausalLM):
        """My model."""

        @staticmethod
        def helper() -> int:
            return 7

    tiny_llama().save_pretrained(tmp_path)
    assert Mine.__name__ == "Mine"
    assert Mine.__doc__ == "My model."
    assert Mine.helper() == 7
    assert Mine.config_class is LlamaForCausalLM.config_class
    made = Mine(tiny_llama().config)
    loaded = Mine.from_pretrained(tmp_path)
    pair = Mine.from_pretrained(tmp_path, output_loading_info=True)
    assert isinstance(pair, tuple)
    for compiled in (made, loaded, pair[0], Mine._from_config(made.config)):
        assert isinstance(compiled, CompiledModel)
        assert isinstance(compiled, Mine)
        assert compiled.sparse_config.key_retention == 0.2

    class Further(Mine):
        pass

    assert issubclass(Further, LlamaForCausalLM)


def test_auto_class(compiles: list[Any]) -> None:
    factory = sparse_compile(AutoModelForCausalLM)
    assert isinstance(factory.from_config(tiny_llama().config), CompiledModel)


@pytest.mark.parametrize(
    ("value", "shown"), [(None, "None"), (3, "int 3"), ("gpt2", "str 'gpt2'"), (int, "int")]
)
def test_anything_else_is_a_type_error(value: object, shown: str) -> None:
    with pytest.raises(TypeError, match=shown):
        sparse_compile(value)


def test_forward_and_attributes_are_the_models_own() -> None:
    compiled, _ = compiled_llama()
    model, ids = compiled.model, left_padded([5])["input_ids"]
    before = model(ids).logits
    compiled.generate(ids, max_new_tokens=3)
    compiled.generate(ids.flip(-1), max_new_tokens=3)
    assert torch.equal(compiled(ids).logits, before)
    assert torch.equal(compiled.forward(ids).logits, before)
    assert compiled.config is model.config
    assert compiled.device == model.device
    assert compiled.dtype == torch.float32
    assert compiled.num_parameters() == model.num_parameters()
    assert "num_parameters" in dir(compiled)
    assert (
        repr(compiled) == "CompiledModel(LlamaForCausalLM, key_retention=0.25, 2 dense, 2 capture, 4 consume)"
    )


def test_changes_under_the_program_are_refused() -> None:
    compiled, _ = compiled_llama()
    assert compiled.to("cpu") is compiled
    assert compiled.to(torch.float32) is compiled
    assert compiled.eval() is compiled
    with pytest.raises(AttributeError, match="compile that again"):
        compiled.to(torch.bfloat16)
    with pytest.raises(AttributeError, match="half"):
        compiled.half()
    with pytest.raises(AttributeError, match=r"set generation_config on its \.model"):
        compiled.generation_config = None
    with pytest.raises(AttributeError):
        _ = compiled.no_such_thing
    with pytest.raises(TypeError, match="compile that"):
        copy.deepcopy(compiled)
