"""Configuration of Ouro, a looped transformer (``model_type`` "ouro").

Field names are those of the published checkpoints, so that their ``config.json`` loads as it is.
"""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import RopeParameters
from transformers.utils import logging

logger = logging.get_logger(__name__)

BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID = 1, 2, 0


def token_ids_need_repair(bos: Any, eos: Any, pad: Any) -> bool:
    """True for the triple the published checkpoints ship by mistake: bos = eos = pad = 0.

    With it, generation would stop at padding and never at the end of an answer.
    """
    return all(isinstance(token, int) and token == 0 for token in (bos, eos, pad))


def warn_of_repair(what: str) -> None:
    logger.warning(
        "%s has bos = eos = pad = 0, a known mistake of the published Ouro checkpoints; using bos %d, "
        "eos %d, pad %d instead. To silence this, write these three ids into the file. To really stop at "
        "token 0, pass eos_token_id=0 to generate().",
        what,
        BOS_TOKEN_ID,
        EOS_TOKEN_ID,
        PAD_TOKEN_ID,
    )


@strict
class OuroConfig(PreTrainedConfig):
    """Shape of an Ouro model. The defaults are those of the 1.4B checkpoint.

    ``num_hidden_layers`` counts the layers that own weights; each runs ``total_ut_steps`` times per token, so
    a KV cache has ``num_slots = num_hidden_layers * total_ut_steps`` slots (slot = loop * layers + layer).

    ``rope_theta`` (the published spelling) and ``rope_parameters`` (that of transformers 5) are accepted.

    ``early_exit_threshold``: 1.0 never leaves the loop early. No other value is implemented; a model refuses
    it when it is built and when it runs. Token ids bos = eos = pad = 0 are corrected to 1 / 2 / 0, with a
    warning.
    """

    model_type = "ouro"
    keys_to_ignore_at_inference = ["cache"]  # noqa: RUF012  (the base class declares it this way)
    default_theta = 1_000_000.0

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    hidden_act: str = "silu"
    max_position_embeddings: int = 65536
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-6
    use_cache: bool = True
    tie_word_embeddings: bool = False
    rope_parameters: RopeParameters | dict | None = None
    attention_dropout: float | int = 0.0
    layer_types: list[str] | None = None
    use_sliding_window: bool = False
    total_ut_steps: int = 4
    early_exit_threshold: float | int = 1.0
    bos_token_id: int | None = BOS_TOKEN_ID
    eos_token_id: int | list[int] | None = EOS_TOKEN_ID
    pad_token_id: int | None = PAD_TOKEN_ID

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.head_dim is None:
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.layer_types is None or set(self.layer_types) == {"full_attention"}:
            # One entry per layer that owns weights, whatever number of equal entries the file lists.
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        if token_ids_need_repair(self.bos_token_id, self.eos_token_id, self.pad_token_id):
            warn_of_repair("the model configuration")
            self.bos_token_id, self.eos_token_id = BOS_TOKEN_ID, EOS_TOKEN_ID
        super().__post_init__(**kwargs)

    @property
    def num_slots(self) -> int:
        """KV cache slots of one token: one per (loop, layer)."""
        return self.total_ut_steps * self.num_hidden_layers

    @property
    def attention_shape(self) -> tuple[int, int, int]:
        """(query heads, KV heads, head dimension), with the defaults filled in."""
        assert self.num_key_value_heads is not None
        assert self.head_dim is not None
        return self.num_attention_heads, self.num_key_value_heads, self.head_dim

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary settings as transformers 5 spells them: rope_type, rope_theta, and those of the type."""
        return dict(self.rope_parameters or {})

    def validate_architecture(self) -> None:
        """Checks the shape. Runs when a configuration is built or loaded.

        Raises:
            ValueError: for loops below one, query heads that the KV heads do not divide, an odd head
                dimension or attention that is not full.
        """
        if self.total_ut_steps < 1:
            raise ValueError(f"total_ut_steps must be at least 1, got {self.total_ut_steps}")
        if self.num_key_value_heads is not None and self.num_attention_heads % self.num_key_value_heads != 0:
            raise ValueError(
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.head_dim is not None and self.head_dim % 2 != 0:
            raise ValueError(f"head_dim must be even for rotary embeddings, got {self.head_dim}")
        other = set(self.layer_types or ()) - {"full_attention"}
        if other or self.use_sliding_window:
            raise ValueError(
                "Ouro has full attention only: layer_types must all be 'full_attention' and "
                f"use_sliding_window must be false, got layer types {sorted(set(self.layer_types or ()))} "
                f"and use_sliding_window={self.use_sliding_window}"
            )


__all__ = ["OuroConfig"]
