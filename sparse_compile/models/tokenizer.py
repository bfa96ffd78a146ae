"""A byte tokenizer for the tiny models. It needs no files and no network."""

from __future__ import annotations

from typing import Any

from transformers import ByT5Tokenizer, PreTrainedConfig

TINY_VOCAB_SIZE = 272  # pad, eos, unk, 256 bytes, and 13 spare ids so that the size is a multiple of 16
FIRST_BYTE_ID = 3


class ByteTokenizer(ByT5Tokenizer):
    """UTF-8 bytes as ids 3..258. Unlike ByT5 it appends no end token, so that a prompt can be continued."""

    def build_inputs_with_special_tokens(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return token_ids_0 + (token_ids_1 or [])

    def create_token_type_ids_from_sequences(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None
    ) -> list[int]:
        return [0] * (len(token_ids_0) + len(token_ids_1 or []))

    def get_special_tokens_mask(
        self,
        token_ids_0: list[int],
        token_ids_1: list[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        if already_has_special_tokens:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens=True)
        return [0] * (len(token_ids_0) + len(token_ids_1 or []))


class ByteTokenizerOwner(PreTrainedConfig):
    """AutoTokenizer finds a tokenizer class by the configuration it is registered for. No model has this."""

    model_type = "sparse_compile_bytes"


def tiny_tokenizer(**options: Any) -> ByteTokenizer:
    """The tokenizer of every ``tiny:NAME`` model: 272 ids, all of them decodable, padding on the left."""
    spare = TINY_VOCAB_SIZE - FIRST_BYTE_ID - 256
    return ByteTokenizer(extra_ids=spare, **{"padding_side": "left", **options})
