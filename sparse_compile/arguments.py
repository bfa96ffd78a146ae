"""Which of transformers' generation arguments are not supported, and why: refused by name before any work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparse_compile.config import closest
from sparse_compile.errors import ArgumentError


def _given(value: Any) -> bool:
    return value is not None and value is not False


def _above_one(value: Any) -> bool:
    return value is not None and value != 1


# Arguments of `generate` itself (not of GenerationConfig). A value of None is the same as leaving them out.
REFUSED_ARGUMENTS: dict[str, str] = {
    "assistant_model": "assisted generation is not supported",
    "assistant_tokenizer": "assisted generation is not supported",
    "synced_gpus": "generation synchronised between processes is not supported",
    "negative_prompt_ids": "classifier-free guidance is not supported",
    "negative_prompt_attention_mask": "classifier-free guidance is not supported",
    "custom_generate": "custom decoding loops cannot run on the compiled program",
    "trust_remote_code": "it belongs to custom_generate, which is not supported",
    "inputs_embeds": "prompts are token ids",
    "position_ids": "positions follow from the attention mask",
    "past_key_values": "the compiled model keeps its own key-value pool",
    "cache": "the compiled model keeps its own key-value pool",
    "cache_params": "the compiled model keeps its own key-value pool",
    "cache_position": "positions follow from the attention mask",
    "head_mask": "attention heads cannot be masked",
    "encoder_outputs": "encoder-decoder models are not supported",
    "decoder_input_ids": "encoder-decoder models are not supported",
    "labels": "generate computes no loss",
}

# Settings of GenerationConfig whose meaning would be lost: refused when the predicate says they are in use,
# wherever they come from (the call, the given config, or the model's own generation_config).
REFUSED_SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_beams": (_above_one, "beam search is not supported"),
    "num_beam_groups": (_above_one, "beam search is not supported"),
    "constraints": (_given, "constrained beam search is not supported"),
    "force_words_ids": (_given, "constrained beam search is not supported"),
    "penalty_alpha": (lambda value: bool(value), "contrastive search is not supported"),
    "dola_layers": (_given, "DoLa decoding is not supported"),
    "use_mtp": (_given, "multi-token prediction is not supported"),
    "prompt_lookup_num_tokens": (_given, "prompt lookup decoding is not supported"),
    "assistant_early_exit": (_given, "assisted generation is not supported"),
    "guidance_scale": (_above_one, "classifier-free guidance is not supported"),
    "encoder_repetition_penalty": (_above_one, "there is no encoder"),
    "encoder_no_repeat_ngram_size": (lambda value: bool(value), "there is no encoder"),
    "token_healing": (_given, "token healing is not supported"),
    "output_attentions": (_given, "attention weights are never formed"),
    "output_hidden_states": (_given, "hidden states are not kept"),
    "cache_config": (_given, "the compiled model keeps its own key-value pool"),
}

# `cache_implementation` values that only lay the same cache out differently: ignored, since the compiled
# model has its own pool (likewise `use_cache`, `max_cache_len`, `prefill_chunk_size`, `compile_config`: same
# tokens either way). The others change numbers ("quantized") or promise memory that would not be saved
# ("offloaded"): refused.
_HARMLESS_CACHES = (None, "dynamic", "dynamic_full", "static", "hybrid", "sliding_window")


def refuse_arguments(kwargs: dict[str, Any]) -> None:
    """Raise for an argument of `generate` that is known and not supported."""
    for name, why in REFUSED_ARGUMENTS.items():
        if _given(kwargs.get(name)):
            raise _refusal(name, kwargs[name], why)


def refuse_settings(generation_config: Any) -> None:
    """Raise for a resolved GenerationConfig that asks for what is not supported."""
    for name, (in_use, why) in REFUSED_SETTINGS.items():
        value = getattr(generation_config, name, None)
        if in_use(value):
            raise _refusal(name, value, why)
    cache = getattr(generation_config, "cache_implementation", None)
    if cache not in _HARMLESS_CACHES:
        raise _refusal("cache_implementation", cache, "the compiled model keeps its own key-value pool")


def refuse_unknown(kwargs: dict[str, Any], known: list[str]) -> None:
    """Raise for what is left over. None counts as left out, as in transformers."""
    for name, value in kwargs.items():
        if value is None or name in REFUSED_ARGUMENTS:
            continue
        if name in known:  # an argument of generate() that was given to stream()
            raise ArgumentError(name, value, "is not taken here", f"remove {name}, or call generate()")
        accepted = [one for one in known if one not in REFUSED_SETTINGS]
        raise ArgumentError(name, value, "generate knows no such argument", closest(name, accepted))


def _refusal(name: str, value: object, why: str) -> ArgumentError:
    shown = value if isinstance(value, str | int | float | bool) else type(value).__name__
    return ArgumentError(name, shown, why, f"leave {name} out, or call .model.generate for it")
