"""A model for EleutherAI's lm-evaluation-harness that generates through us. Needs the extra `eval`.

    lm = SparseLM("tiny:ouro", key_retention=0.1, batch_size=8)
    lm_eval.simple_evaluate(lm, tasks=["gsm8k"])

    python -m sparse_compile.lm_eval_adapter --model sparse_compile \\
        --model_args pretrained=tiny:ouro,key_retention=0.1 --tasks gsm8k

Only tasks that generate (`generate_until`) go through sparse attention. Log-likelihoods, as of multiple choice, are the
plain model's own: they score given tokens in one forward, which is a prompt, and prompts are dense.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM

from sparse_compile.api import sparse_compile
from sparse_compile.compiled import CompiledModel
from sparse_compile.config import SparseConfig
from sparse_compile.errors import ArgumentError
from sparse_compile.models import load_model, load_tokenizer

log = logging.getLogger("sparse_compile.lm_eval")

LOGLIKELIHOOD = "dense: the plain model's own forward, as for any prompt"
_OF_HARNESS = (
    "batch_size", "max_batch_size", "max_length", "truncation", "logits_cache", "softmax_dtype", "add_bos_token",
    "prefix_token_id", "think_end_token", "enable_thinking", "chat_template_args",
)  # fmt: skip


@register_model("sparse_compile")
class SparseLM(HFLM):
    """lm-eval's adapter of Hugging Face models, whose generation runs a compiled model.

    pretrained: a name or a local folder, as for the command line; a model; or a compiled model. tokenizer: needed with
        the latter two.
    dtype, device: where a name is loaded. options: those of the harness's own adapter that do not concern loading, and
        those of `sparse_compile`.

    Raises ArgumentError for an unknown option, and for options of `sparse_compile` beside a compiled model.
    """

    def __init__(
        self,
        pretrained: Any,
        tokenizer: Any = None,
        dtype: str = "auto",
        device: str | None = None,
        **options: Any,
    ) -> None:
        mine = {name: options.pop(name) for name in _OF_HARNESS if name in options}
        compiled = self._compiled(pretrained, dtype, device, options)
        if tokenizer is None and not isinstance(pretrained, str):
            limit = "is needed for a model that was not loaded by name"
            raise ArgumentError("tokenizer", None, limit, "pass tokenizer=...")
        own = (
            load_tokenizer(tokenizer or pretrained) if isinstance(tokenizer or pretrained, str) else tokenizer
        )
        super().__init__(pretrained=compiled.model, backend="causal", tokenizer=own, **mine)
        self.compiled = compiled
        log.info("generate_until: %s; loglikelihood: %s", compiled, LOGLIKELIHOOD)

    @staticmethod
    def _compiled(pretrained: Any, dtype: str, device: str | None, options: dict[str, Any]) -> CompiledModel:
        if isinstance(pretrained, CompiledModel):
            if options:
                name, value = next(iter(options.items()))
                limit = "is an option of sparse_compile, and the model is compiled already"
                raise ArgumentError(
                    name, value, limit, "pass the plain model, or compile it with this option"
                )
            return pretrained
        SparseConfig.from_options(**options)
        if isinstance(pretrained, str):
            place = device or ("cuda" if torch.cuda.is_available() else "cpu")
            pretrained = load_model(pretrained, dtype=dtype, device=place)
        return sparse_compile(pretrained, **options)

    def _model_generate(
        self, context: torch.Tensor, max_length: int, stop: list[str], **generation_kwargs: Any
    ) -> torch.Tensor:
        """As in HFLM, where a temperature of 0 means greedy. Stop strings are watched per row by ours: the harness's
        own criterion counts on seeing the same batch at every step.
        """
        temperature = generation_kwargs.pop("temperature", 0.0)
        if temperature:
            generation_kwargs["temperature"] = temperature
        elif generation_kwargs.get("do_sample") is None:
            generation_kwargs["do_sample"] = False
        out = self.compiled.generate(
            context,
            max_length=max_length,
            stop_strings=stop,
            tokenizer=self.tokenizer,
            pad_token_id=self.tokenizer.pad_token_id,
            progress=False,
            **generation_kwargs,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def get_model_info(self) -> dict[str, Any]:
        """For the results file; asks no network."""
        options = dataclasses.asdict(self.compiled.sparse_config)
        return {
            "model_num_parameters": sum(one.numel() for one in self.compiled.model.parameters()),
            "model_dtype": str(self.compiled.dtype),
            "loglikelihood": LOGLIKELIHOOD,
            "sparse_compile": {name: value for name, value in options.items() if name != "calibration"},
            "kept": self.compiled.sparse_config.retention_text,
        }


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
