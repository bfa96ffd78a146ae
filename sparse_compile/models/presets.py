"""Known configurations, and tiny random models for tests, examples and the command line."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import DoryConfig, HrmTextConfig, PreTrainedConfig, PreTrainedModel

from .ouro import OuroConfig, OuroForCausalLM
from .tokenizer import TINY_VOCAB_SIZE

DEMO = "demo"  # the trained model that comes with this package
DEMO_FOLDER = Path(__file__).with_name("demo")

# What every tiny model shares. No end token: greedy text runs to max_new_tokens. Token 0 is padding, so
# prompts for these models are drawn from the ids 3 and up.
TINY_SHARED: dict[str, Any] = {
    "vocab_size": TINY_VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def ouro_1_4b(**overrides: Any) -> OuroConfig:
    """The published 1.4B shape: 24 layers x 4 loops."""
    return OuroConfig(**overrides)


def ouro_2_6b(**overrides: Any) -> OuroConfig:
    """The published 2.6B shape: 48 layers x 4 loops."""
    return OuroConfig(**{"num_hidden_layers": 48, **overrides})


def demo_ouro(**overrides: Any) -> OuroConfig:
    """The trained model of this package: 4 layers x 4 loops, 7.3 million parameters, 2,048 positions of bytes."""
    shape = {
        "vocab_size": TINY_VOCAB_SIZE,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "head_dim": 64,
        "total_ut_steps": 4,
        "max_position_embeddings": 2048,
        "rope_theta": 1_000_000.0,  # as published: at 10,000 too few dimensions turn slowly enough to match far keys
        "bos_token_id": None,  # no end token: text runs to max_new_tokens
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return OuroConfig(**{**shape, **overrides})


def tiny_ouro(**overrides: Any) -> OuroConfig:
    """2 layers x 4 loops, 4 query and KV heads. The wide initialisation keeps logits and attention uneven."""
    tiny = {**TINY_SHARED, "num_hidden_layers": 2, "total_ut_steps": 4, "initializer_range": 0.4}
    return OuroConfig(**{**tiny, "rope_theta": 10_000.0, **overrides})


def tiny_dory(**overrides: Any) -> DoryConfig:
    """1 input layer, 2 recurrent layers x 3 loops, 1 output layer; 4 query heads on 2 KV heads.

    Sliding-window and full layers both inside the recurrent section (0 based layer 1 slides, layer 2 is
    full) and outside it (layer 0 slides, layer 3 is full). Its hidden states have norm 1, hence the
    initialisation of 1.
    """
    tiny = {
        **TINY_SHARED,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "n_input_layers": 1,
        "n_recurrent_layers": 2,
        "n_output_layers": 1,
        "n_recurrent_loops": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 8,
        "initializer_range": 1.0,
        "ngpt_alpha_init": 0.4,
    }
    return DoryConfig(**{**tiny, **overrides})


def tiny_hrm_text(**overrides: Any) -> HrmTextConfig:
    """2 layers in each of the stacks H and L; 3 cycles of (L, L, H): 18 attention calls per token."""
    tiny = {**TINY_SHARED, "num_hidden_layers": 2, "H_cycles": 3, "L_cycles": 2, "initializer_range": 0.25}
    return HrmTextConfig(**{**tiny, **overrides})


PRESETS: dict[str, Callable[..., PreTrainedConfig]] = {
    "ouro-1.4b": ouro_1_4b,
    "ouro-2.6b": ouro_2_6b,
    DEMO: demo_ouro,
    "ouro-tiny": tiny_ouro,
}
TINY_MODELS: dict[str, Callable[..., PreTrainedConfig]] = {
    "ouro": tiny_ouro,
    "dory": tiny_dory,
    "hrm-text": tiny_hrm_text,
}


def demo_folder() -> Path:
    """Where the trained model of this package is.

    Raises:
        FileNotFoundError: when its weights are not there.
    """
    if not (DEMO_FOLDER / "model.safetensors").exists():
        folder = f"; for the folder of this name here write ./{DEMO}" if Path(DEMO).is_dir() else ""
        raise FileNotFoundError(
            f"the weights of the model {DEMO!r} are not in this installation: no {DEMO_FOLDER / 'model.safetensors'}. "
            "Train them with `python -m benchmarks.train_demo` from a clone, or take 'tiny:ouro', which has random "
            f"weights{folder}"
        )
    return DEMO_FOLDER


def _choose(
    kind: str, name: str, known: dict[str, Callable[..., PreTrainedConfig]]
) -> Callable[..., PreTrainedConfig]:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"unknown {kind} {name!r}; known: {', '.join(known)}.{hint}")
    return known[name]


def preset_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a preset, with fields replaced.

    Raises:
        ValueError: for a name that is not in ``PRESETS``.
    """
    return _choose("preset", name, PRESETS)(**overrides)


def tiny_config(name: str, **overrides: Any) -> PreTrainedConfig:
    """The configuration of a tiny model, with fields replaced.

    Raises:
        ValueError: for a name that is not in ``TINY_MODELS``.
    """
    return _choose("tiny model", name, TINY_MODELS)(**overrides)


def random_model(
    config: PreTrainedConfig, dtype: torch.dtype = torch.float32, seed: int = 0
) -> PreTrainedModel:
    """A seeded random model in eval mode, built in float32 and cast: one seed gives one model in every dtype.

    Parameters that initialise to a constant (norm weights, learned scales, biases) are moved off it, so
    that a pass which drops or swaps one of them changes the logits. The caller's random state is left as
    it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _build(config)
        with torch.no_grad():
            _perturb(parameter for _, parameter in model.named_parameters() if parameter.dim() == 1)
    return model.to(dtype).eval()


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    if isinstance(config, OuroConfig):
        return OuroForCausalLM(config)
    return AutoModelForCausalLM.from_config(config)


def _perturb(vectors: Iterable[torch.Tensor]) -> None:
    """v -> v * (1 + 0.2 n) + 0.05 n', with standard normal n, n': moves ones, other constants and zeros."""
    for vector in vectors:
        vector.mul_(1 + 0.2 * torch.randn_like(vector))
        vector.add_(0.05 * torch.randn_like(vector))


def tiny_model(
    name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A tiny random model by name: "ouro", "dory" or "hrm-text". ``overrides`` replace configuration fields.

    All use the vocabulary of :func:`sparse_compile.models.tiny_tokenizer` (272 ids).

    Raises:
        ValueError: for an unknown name.
    """
    return random_model(tiny_config(name, **overrides), dtype, seed)
