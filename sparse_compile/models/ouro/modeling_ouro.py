"""Ouro: a decoder whose layers run ``total_ut_steps`` times per token. Our own implementation.

    h = embed_tokens(ids)
    repeat total_ut_steps times:
        for each layer:
            h = h + input_layernorm_2(self_attn(input_layernorm(h)))
            h = h + post_attention_layernorm_2(mlp(post_attention_layernorm(h)))
        h = norm(h)                       # the next loop's input, the gate's input, the head's input
        gate = early_exit_gate(h)
    logits = lm_head(h)

Parameter names are those of the published checkpoints. Shapes below: B sequences, T tokens, S keys, E hidden
size, L loops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask
from transformers.modeling_utils import slice_logits_to_keep
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .cache import ensure_slots
from .configuration_ouro import (
    BOS_TOKEN_ID,
    EOS_TOKEN_ID,
    OuroConfig,
    token_ids_need_repair,
    warn_of_repair,
)
from .layers import OuroAttention, OuroDecoderLayer, OuroRMSNorm
from .outputs import OuroCausalLMOutput, OuroModelOutput
from .rotary import OuroRotaryEmbedding


class OuroPreTrainedModel(PreTrainedModel):
    config: OuroConfig
    config_class = OuroConfig
    base_model_prefix = "model"
    _no_split_modules = ["OuroDecoderLayer"]  # noqa: RUF012
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _can_compile_fullgraph = True
    _supports_attention_backend = True
    _can_record_outputs = {  # noqa: RUF012
        "hidden_states": OutputRecorder(OuroDecoderLayer, num_hidden_layers_key="num_slots"),
        "attentions": OutputRecorder(OuroAttention, index=1),
    }


def require_no_early_exit(config: OuroConfig) -> None:
    """Refuses every threshold but 1.0, which never leaves the loop early.

    Raises:
        NotImplementedError: naming the value and what to do instead.
    """
    if config.early_exit_threshold != 1.0:
        raise NotImplementedError(
            f"early_exit_threshold={config.early_exit_threshold} is not implemented: only 1.0 (every token "
            f"runs all total_ut_steps={config.total_ut_steps} loops). Set early_exit_threshold=1.0, and "
            "total_ut_steps to a smaller number if every token shall run fewer loops."
        )


class OuroModel(OuroPreTrainedModel):
    def __init__(self, config: OuroConfig) -> None:
        require_no_early_exit(config)
        super().__init__(config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(
            OuroDecoderLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = OuroRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.early_exit_gate = nn.Linear(config.hidden_size, 1, bias=True)
        self.rotary_emb = OuroRotaryEmbedding(config)
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_gates: bool = False,
        **kwargs: Any,
    ) -> OuroModelOutput:
        """Runs all loops.

        Args:
            input_ids: int64 [B, T]; or inputs_embeds [B, T, E] instead.
            attention_mask: [B, S] with 0 for padding, a 4-dimensional mask, or masks by layer type as
                ``generate`` prepares them.
            position_ids: int64 [B, T]; default: counted from the cache's length.
            cache: a transformers cache; grown to one slot per (loop, layer) when it is empty.
            output_gates: also return the gate of every loop, ``gate_logits`` [B, T, L].

        Raises:
            NotImplementedError: for an early_exit_threshold other than 1.0.
            ValueError: unless exactly one of input_ids and inputs_embeds is given; for another model's cache.
        """
        require_no_early_exit(self.config)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if cache is not None:
            ensure_slots(cache, self.config.num_slots)
        if position_ids is None:
            past = cache.get_seq_length() if cache is not None else 0
            steps = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
            position_ids = (steps + past).unsqueeze(0)
        if isinstance(attention_mask, dict):  # from generate() with a static cache: one mask per layer type
            kwargs["attention_mask"] = attention_mask["full_attention"]
        else:
            kwargs["attention_mask"] = create_causal_mask(
                config=self.config,
                inputs_embeds=inputs_embeds,
                attention_mask=attention_mask,
                cache=cache,
                position_ids=position_ids,
            )
        kwargs["position_embeddings"] = self.rotary_emb(inputs_embeds, position_ids)
        kwargs["position_ids"] = position_ids
        hidden_states, gates = inputs_embeds, []
        for loop in range(self.config.total_ut_steps):
            hidden_states = self.run_layers(hidden_states, loop, cache=cache, **kwargs)
            if output_gates:
                gates.append(self.early_exit_gate(hidden_states))
        return OuroModelOutput(
            last_hidden_state=hidden_states,
            cache=cache,
            gate_logits=torch.cat(gates, dim=-1) if output_gates else None,
        )

    def run_layers(self, hidden_states: Tensor, loop: int, **kwargs: Any) -> Tensor:
        """One loop: all layers, then the final norm. [B, T, E] -> [B, T, E]."""
        slot_offset = loop * self.config.num_hidden_layers
        for layer in self.layers:
            hidden_states = layer(hidden_states, slot_offset=slot_offset, **kwargs)
        return self.norm(hidden_states)


class OuroForCausalLM(OuroPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config)
        self.model = OuroModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | dict[str, Tensor | None] | None = None,
        position_ids: Tensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_gates: bool = False,
        **kwargs: Any,
    ) -> OuroCausalLMOutput:
        """The model and its head. See :meth:`OuroModel.forward`.

        ``logits_to_keep``: 0 for the logits of all T tokens, n for the last n, or the indices themselves.
        """
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_gates=output_gates,
            **kwargs,
        )
        logits = self.lm_head(slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.vocab_size, **kwargs)
        return OuroCausalLMOutput(
            loss=loss,
            logits=logits,
            cache=outputs.cache,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            gate_logits=outputs.gate_logits,
        )

    def adjust_generation_fn(self, *args: Any, **kwargs: Any) -> None:
        """``from_pretrained`` calls this to read generation_config.json, which has the same wrong ids."""
        super().adjust_generation_fn(*args, **kwargs)
        found = self.generation_config
        if found is not None and token_ids_need_repair(
            found.bos_token_id, found.eos_token_id, found.pad_token_id
        ):
            warn_of_repair("the generation configuration")
            found.bos_token_id, found.eos_token_id = BOS_TOKEN_ID, EOS_TOKEN_ID


__all__ = ["OuroForCausalLM", "OuroModel", "OuroPreTrainedModel"]
