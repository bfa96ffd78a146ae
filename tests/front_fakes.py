"""Stand-ins for the rooms below the front: an engine that runs the plain model, and a program description."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from sparse_compile.compiled import CompiledModel
from sparse_compile.config import SparseConfig
from sparse_compile.kernels.retention import Retention
from sparse_compile.passes.program import Program
from sparse_compile.runtime.request import RequestMetrics, SamplingParams, StepOutput

VOCAB = 272


def tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    """A random Llama whose logits are far apart, so that argmax does not hang on rounding."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.5,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()


@dataclass
class _Live:
    ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics


class FakeEngine:
    """Serves requests with the model's plain forward, `width` requests at a time; the rest wait."""

    def __init__(self, model: Any, rows: int, context: int, width: int = 2) -> None:
        self.model, self.rows, self.context, self.width = model, rows, context, width
        self.live: dict[str, _Live] = {}
        self.aborted: list[str] = []
        self.fail_after: dict[int, Exception | type[BaseException]] = {}  # step number -> what it raises
        self.pool = SimpleNamespace(bytes=1024)
        self.store = None
        self._names = (f"request-{number}" for number in itertools.count())
        self._steps = 0

    def add_request(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str | None = None
    ) -> str:
        if len(prompt_ids) + params.max_new_tokens > self.context:
            raise ValueError("max_context")
        name = request_id or next(self._names)
        self.live[name] = _Live(list(prompt_ids), params, RequestMetrics(prompt_tokens=len(prompt_ids)))
        return name

    def has_unfinished(self) -> bool:
        return bool(self.live)

    def abort(self, name: str) -> None:
        if self.live.pop(name, None) is not None:
            self.aborted.append(name)

    def step(self) -> list[StepOutput]:
        self._steps += 1
        failure = self.fail_after.pop(self._steps, None)
        if isinstance(failure, type):
            raise failure
        outputs = [self._advance(name) for name in list(self.live)[: self.width]]
        if isinstance(failure, Exception):
            name = outputs[0].request_id
            self.live.pop(name, None)
            outputs[0] = StepOutput(name, -1, math.nan, True, "error", error=failure)
        return outputs

    def _advance(self, name: str) -> StepOutput:
        request = self.live[name]
        params = request.params
        logits = self.model(torch.tensor([request.ids]), use_cache=False).logits[0, -1]
        scores = logits.float()[None]
        if params.processor is not None:
            scores = params.processor(torch.tensor([request.ids]), scores.clone())
        logs = scores.log_softmax(-1)
        if params.do_sample:
            token = int(torch.multinomial(logs.exp(), 1, generator=params.generator))
        else:
            token = int(scores.argmax())
        request.ids.append(token)
        request.metrics.new_tokens += 1
        reason = self._reason(request, token, scores)
        output = StepOutput(name, token, float(logs[0, token]), reason is not None, reason)
        if params.want_logits:
            output.logits, output.scores = logits.clone(), scores[0].clone()
        if reason is not None:
            output.metrics = request.metrics
            del self.live[name]
        return output

    @staticmethod
    def _reason(request: _Live, token: int, scores: torch.Tensor) -> Any:
        params = request.params
        if token in params.eos_token_ids:
            return "eos"
        if params.stop is not None and params.stop(torch.tensor([request.ids]), scores):
            return "stop"
        return "length" if request.metrics.new_tokens == params.max_new_tokens else None


def fake_site(layer: str, loop: int, loops: int, kind: str, **changes: Any) -> SimpleNamespace:
    values = {
        "layer": layer,
        "loop": loop,
        "loops": loops,
        "kind": kind,
        "reason": f"because of {kind}",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "window": 0,
        "store_site": None if kind == "dense" else 0,
        "retention": Retention(1, 4),
        "gated": False,
    }
    return SimpleNamespace(**{**values, **changes})


def fake_program(sites: list[Any] | None = None, **changes: Any) -> Any:
    kinds = ("dense", "capture", "consume", "consume")
    if sites is None:
        names = ("model.layers.0.self_attn", "model.layers.1.self_attn")
        sites = [fake_site(name, loop, 4, kind) for loop, kind in enumerate(kinds) for name in names]
    values = {
        "sites": tuple(sites),
        "loops": max(site.loops for site in sites),
        "rolled": True,
        "roll_reason": "",
        "merged": (),
        "left_alone": (),
        "gates_left_alone": (),
        "passes": (SimpleNamespace(name="trace", seconds=0.5, counters={"nodes": 3}),),
        "retention": Retention(1, 4),
        "graph_text": lambda which: f"graph {which}",
    }
    made = SimpleNamespace(**{**values, **changes})
    made.counts = lambda: Program.counts(made)
    return made


def compiled_llama(model: Any = None, width: int = 2, **options: Any) -> tuple[Any, list[FakeEngine]]:
    """A CompiledModel over fake engines, and the list of the engines it has made."""
    model = model if model is not None else tiny_llama()
    engines: list[FakeEngine] = []

    def make_engine(rows: int, context: int) -> Any:
        engines.append(FakeEngine(model, rows, context, width))
        return engines[-1]

    config = SparseConfig.from_options(**{"key_retention": 0.25, "progress": False, **options})
    return CompiledModel(model, config, fake_program(), make_engine), engines


def left_padded(lengths: list[int], pad: int = 0, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random prompts of these lengths, padded on the left, with their mask."""
    source = torch.Generator().manual_seed(seed)
    width = max(lengths)
    ids = torch.full((len(lengths), width), pad)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = torch.randint(3, VOCAB, (length,), generator=source)
        mask[row, width - length :] = 1
    return {"input_ids": ids, "attention_mask": mask}
