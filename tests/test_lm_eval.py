"""The harness's own adapter against ours: the same answers and scores on local tasks, without a network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_models import shared_model

from sparse_compile import ArgumentError, sparse_compile
from sparse_compile.models import tiny_tokenizer

pytestmark = pytest.mark.usefixtures("shared_traces")

lm_eval = pytest.importorskip("lm_eval", reason="needs the extra eval: pip install 'sparse-compile[eval]'")

QUESTIONS = ("ab=42;cd=17;?cd=", "Loops.", "abcabcabcabcabcabc", "x = [1, 2, 3]\nprint(", "a0123456789", "?")
NEW = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return shared_model("ouro", dtype=torch.float64)


@pytest.fixture(scope="module")
def tasks(model: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """A task that generates, whose right answers are the dense model's own for every other question; and a choice."""
    tokenizer, lines = tiny_tokenizer(), []
    for place, question in enumerate(QUESTIONS):
        ids = tokenizer(question, return_tensors="pt")
        new = model.generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :]
        answer = tokenizer.decode(new, skip_special_tokens=True).split("\n")[0]
        lines.append(
            {
                "question": question,
                "answer": answer if place % 2 else "no",
                "choices": ["a", answer[:2] or "b"],
            }
        )
    path = tmp_path_factory.mktemp("lm_eval") / "lines.json"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
    }
    shared = {**data, "doc_to_text": "{{question}}", "target_delimiter": ""}
    generates = {
        **shared,
        "task": "local_generate",
        "output_type": "generate_until",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": NEW},
        "metric_list": [{"metric": "exact_match"}],
    }
    chooses = {
        **shared,
        "task": "local_choice",
        "output_type": "multiple_choice",
        "doc_to_target": 1,
        "doc_to_choice": "choices",
        "metric_list": [{"metric": "acc"}],
    }
    return [generates, chooses]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def evaluate(lm: Any, tasks: list[dict[str, Any]]) -> tuple[dict[str, Any], list[Any]]:
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)  # the harness's own tasks are thousands of files
    found = lm_eval.simple_evaluate(
        model=lm, tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    scores = {
        name: {key: one for key, one in value.items() if "," in key}
        for name, value in found["results"].items()
    }
    responses = [sample["resps"] for name in sorted(found["samples"]) for sample in found["samples"][name]]
    return scores, responses


def test_the_dense_model_scores_as_under_the_harness_itself(model: Any, tasks: list[dict[str, Any]]) -> None:
    from lm_eval.models.huggingface import HFLM

    from sparse_compile.lm_eval_adapter import SparseLM

    tokenizer = tiny_tokenizer()
    theirs = evaluate(HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4), tasks)
    dense = SparseLM(model, tokenizer, batch_size=4, enabled=False)
    assert evaluate(dense, tasks) == theirs
    assert theirs[0]["local_generate"]["exact_match,none"] == 0.5
    assert dense.get_model_info()["loglikelihood"].startswith("dense")
    json.dumps(dense.get_model_info(), default=str)


def test_what_generates_is_the_compiled_model(model: Any, tasks: list[dict[str, Any]]) -> None:
    from sparse_compile.lm_eval_adapter import SparseLM

    compiled = sparse_compile(model, key_retention=0.05, validate=False)
    tokenizer = tiny_tokenizer()
    lm = SparseLM(compiled, tokenizer, batch_size=3)
    _, responses = evaluate(lm, tasks[:1])
    want = []
    for question in QUESTIONS:
        ids = tokenizer(question, return_tensors="pt")
        new = compiled.generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids["input_ids"].shape[1] :]
        text = tokenizer.decode(new, skip_special_tokens=True)
        want.append([[text.split("\n")[0]]])
    assert responses == want


def test_options_are_checked(model: Any) -> None:
    from sparse_compile.lm_eval_adapter import SparseLM

    with pytest.raises(ArgumentError, match="key_retention=3"):
        SparseLM("tiny:ouro", key_retention=3)
    with pytest.raises(ArgumentError, match="peft='x': unknown option"):
        SparseLM("tiny:ouro", peft="x")
    with pytest.raises(ArgumentError, match="tokenizer=None"):
        SparseLM(model, enabled=False, validate=False)
    compiled = sparse_compile(model, enabled=False, validate=False)
    with pytest.raises(ArgumentError, match="the model is compiled already"):
        SparseLM(compiled, tiny_tokenizer(), key_retention=0.1)
