"""Ouro: configuration, model and the meaning of its gates."""

from .configuration_ouro import OuroConfig
from .modeling_ouro import OuroForCausalLM, OuroModel, OuroPreTrainedModel
from .outputs import OuroCausalLMOutput, OuroModelOutput, exit_distribution, exit_loop

__all__ = [
    "OuroCausalLMOutput",
    "OuroConfig",
    "OuroForCausalLM",
    "OuroModel",
    "OuroModelOutput",
    "OuroPreTrainedModel",
    "exit_distribution",
    "exit_loop",
]
