"""What comes into `generate`: token ids and masks in every form that Hugging Face users pass, out of it plain
prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparse_compile.errors import ArgumentError

# Additive masks write "hidden" as a very negative number: -inf, the dtype's minimum (-65504 in fp16) or
# -10000.
_HIDDEN_BELOW = -1000.0


@dataclass(frozen=True)
class Prompts:
    """The prompts of one call.

    input_ids: int64 [B, N] on the device that the caller used, padding included.
    tokens: per row the visible ids, padding and holes dropped; never empty.
    prefix_lengths: per row the number of leading tokens that see each other in both directions (prefix-LM),
    else 0.
    """

    input_ids: torch.Tensor
    tokens: list[list[int]]
    prefix_lengths: list[int]

    @property
    def width(self) -> int:
        return int(self.input_ids.shape[1])

    def repeated(self, times: int) -> Prompts:
        """Every row `times` times in a row, as `num_return_sequences` wants it."""
        if times == 1:
            return self
        return Prompts(
            self.input_ids.repeat_interleave(times, dim=0),
            [row for row in self.tokens for _ in range(times)],
            [length for length in self.prefix_lengths for _ in range(times)],
        )


def read_prompts(
    input_ids: Any,
    attention_mask: Any,
    token_type_ids: Any,
    *,
    vocab_size: int,
    prefix_lm: bool,
    pad_token_id: int | None,
    eos_token_ids: tuple[int, ...],
) -> Prompts:
    """Check and normalise the inputs of one call.

    input_ids: integer [B, N] or [N] (tensor or list). attention_mask: see `read_mask`; without one, pad
    tokens in the input are hidden as transformers does it, unless the pad token is an eos token.
    token_type_ids: only for prefix-LM models, see `_prefix_length`. Raises ValueError naming the argument.
    """
    ids = _read_ids("input_ids", input_ids)
    if attention_mask is not None:
        visible = read_mask(attention_mask, ids)
    elif pad_token_id is not None and pad_token_id not in eos_token_ids:
        visible = ids.ne(pad_token_id)
    else:
        visible = torch.ones_like(ids, dtype=torch.bool)
    types = _read_types(token_type_ids, ids, prefix_lm)
    rows = zip(
        ids.tolist(), visible.tolist(), types.tolist() if types is not None else ids.tolist(), strict=True
    )
    tokens, prefixes = [], []
    for index, (row, mask, kinds) in enumerate(rows):
        kept = [token for token, keep in zip(row, mask, strict=True) if keep]
        _check_tokens(index, kept, vocab_size)
        tokens.append(kept)
        shown = [kind for kind, keep in zip(kinds, mask, strict=True) if keep]
        prefixes.append(0 if types is None else _prefix_length(index, shown))
    return Prompts(ids, tokens, prefixes)


def _read_ids(name: str, value: Any) -> torch.Tensor:
    """An integer tensor [B, N] from a tensor or a list of ids, 1-D being one row."""
    remedy = "pass token ids of shape [batch, tokens], as a tokenizer with return_tensors='pt' gives them"
    if value is None:
        raise ArgumentError(name, None, "generate needs a prompt", remedy)
    try:
        ids = _as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise ArgumentError(name, value, "is no rectangular array of token ids", remedy) from None
    if ids.numel() == 0:
        raise ArgumentError(
            name, tuple(ids.shape), "must have shape [batch, tokens] and hold a token", remedy
        )
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ArgumentError(name, ids.dtype, "must be integers", remedy)
    if ids.dim() == 1:
        ids = ids.unsqueeze(0)
    if ids.dim() != 2:
        raise ArgumentError(name, tuple(ids.shape), "must have shape [batch, tokens]", remedy)
    return ids.long()


def _as_tensor(value: Any) -> torch.Tensor:
    """A tensor as it is; anything else on the CPU. (`torch.as_tensor` would move both to a default device.)"""
    return value if isinstance(value, torch.Tensor) else torch.as_tensor(value, device="cpu")


def _check_tokens(row: int, tokens: list[int], vocab_size: int) -> None:
    if not tokens:
        raise ArgumentError(
            "attention_mask",
            f"all zeros in row {row}",
            "a row needs a visible token",
            "unmask a token or drop the row",
        )
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise ArgumentError(
                f"input_ids[{row}]",
                token,
                f"must lie in 0 .. {vocab_size - 1}, the vocabulary",
                "check the tokenizer",
            )


def read_mask(mask: Any, ids: torch.Tensor) -> torch.Tensor:
    """Bool [B, N], True where a token is visible.

    Accepted, with the shape of `ids` (or [N] for one row): bool; integers 0 and 1; floats, read as 0/1 if any
    entry is 1, else as additive: 0 visible, very negative (at most -1000, such as -inf) hidden. Holes are
    fine: hidden tokens are dropped. Anything else (4-D, packed sequence numbers, soft biases, another length)
    is refused.
    """
    remedy = "pass a mask of 0 and 1 with the shape of input_ids"
    mask = _as_tensor(mask)
    if mask.dim() == 1 and ids.shape[0] == 1:
        mask = mask.unsqueeze(0)
    if mask.dim() != 2:
        raise ArgumentError("attention_mask", tuple(mask.shape), "must be 2-D [batch, tokens]", remedy)
    if mask.shape != ids.shape:
        raise ArgumentError(
            "attention_mask", tuple(mask.shape), f"input_ids has shape {tuple(ids.shape)}", remedy
        )
    if mask.dtype == torch.bool:
        return mask
    ones, zeros = mask == 1, mask == 0
    if bool((ones | zeros).all()) and (bool(ones.any()) or not mask.is_floating_point()):
        return ones
    if not mask.is_floating_point():
        raise ArgumentError(
            "attention_mask", mask[~(ones | zeros)][0].item(), "an integer mask holds 0 and 1", remedy
        )
    hidden = mask <= _HIDDEN_BELOW
    strange = ~(zeros | hidden)
    if bool(strange.any()):
        limit = f"a float mask holds 0 and 1, or (additive) 0 and values of at most {_HIDDEN_BELOW:g}"
        raise ArgumentError("attention_mask", mask[strange][0].item(), limit, remedy)
    return zeros


def _read_types(types: Any, ids: torch.Tensor, prefix_lm: bool) -> torch.Tensor | None:
    if types is None:
        return None
    if not prefix_lm:
        raise ArgumentError(
            "token_type_ids",
            tuple(_as_tensor(types).shape),
            "the model is no prefix-LM (config.prefix_lm is not true), so they would be ignored",
            "leave them out (tokenizer(..., return_token_type_ids=False))",
        )
    types = _read_ids("token_type_ids", types)
    if types.shape != ids.shape:
        limit = f"input_ids has shape {tuple(ids.shape)}"
        raise ArgumentError("token_type_ids", tuple(types.shape), limit, "pass one type per token")
    return types


def _prefix_length(row: int, types: list[int]) -> int:
    """Number of leading ones of a row's visible tokens, which must be all of its ones."""
    name, remedy = f"token_type_ids[{row}]", "mark one block at the start of the row with 1, the rest with 0"
    strange = next((kind for kind in types if kind not in (0, 1)), None)
    if strange is not None:
        raise ArgumentError(name, strange, "must be 0 or 1", remedy)
    length = types.index(0) if 0 in types else len(types)
    if 1 in types[length:]:
        raise ArgumentError(name, types, "the ones must form one block at the start of the prompt", remedy)
    return length
