"""Models: our Ouro, presets, tiny random models, strict loading, and a check of what was loaded.

Importing this package registers Ouro with transformers' ``AutoConfig``, ``AutoModel`` and
``AutoModelForCausalLM``.
"""

from .checkpoint import CheckpointReport, check_checkpoint
from .loading import CheckpointError, load_model, load_ouro, load_tokenizer, register
from .ouro import OuroConfig, OuroForCausalLM, OuroModel, exit_distribution, exit_loop
from .presets import (
    DEMO,
    PRESETS,
    TINY_MODELS,
    demo_folder,
    preset_config,
    random_model,
    tiny_config,
    tiny_model,
)
from .sources import UnknownModelError, load_config
from .tokenizer import ByteTokenizer, tiny_tokenizer

register()

__all__ = [
    "DEMO",
    "PRESETS",
    "TINY_MODELS",
    "ByteTokenizer",
    "CheckpointError",
    "CheckpointReport",
    "OuroConfig",
    "OuroForCausalLM",
    "OuroModel",
    "UnknownModelError",
    "check_checkpoint",
    "demo_folder",
    "exit_distribution",
    "exit_loop",
    "load_config",
    "load_model",
    "load_ouro",
    "load_tokenizer",
    "preset_config",
    "random_model",
    "register",
    "tiny_config",
    "tiny_model",
    "tiny_tokenizer",
]
