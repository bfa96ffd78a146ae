"""Tokens as they come: the items of `stream()`, text built piece by piece, and transformers' streamers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sparse_compile.errors import ArgumentError


@dataclass(frozen=True)
class StreamItem:
    """One emitted token.

    row: row of the input (0 for one prompt). logprob: log-probability under the processed scores. text: the
    text that became complete with this token, "" while a character is still incomplete, None without a
    tokenizer.
    finish_reason: "eos", "length" or "stop" on a row's last item.
    """

    token_id: int
    logprob: float
    text: str | None
    finished: bool
    finish_reason: str | None
    row: int


class Streamer(Protocol):
    """transformers' BaseStreamer."""

    def put(self, value: torch.Tensor) -> None: ...

    def end(self) -> None: ...


def check_streamer(streamer: Any, rows: int) -> None:
    """transformers' streamers take one sequence."""
    if not (callable(getattr(streamer, "put", None)) and callable(getattr(streamer, "end", None))):
        raise ArgumentError(
            "streamer", type(streamer).__name__, "must have put() and end()", "pass a BaseStreamer"
        )
    if rows != 1:
        raise ArgumentError(
            "streamer",
            type(streamer).__name__,
            f"takes one sequence, the call has {rows}",
            "use stream() for a batch",
        )


class IncrementalText:
    """Decodes a growing list of tokens into pieces whose concatenation is the whole text.

    A piece is held back while it ends in an incomplete character, for which tokenizers give U+FFFD or nothing at all.
    Only the last few tokens are decoded each time; the tokens before them are decoded along, since many tokenizers drop
    a leading space.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool = True) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._tokens: list[int] = []
        self._context = 0  # first token that is decoded again
        self._emitted = 0  # tokens whose text is out

    def push(self, token: int, last: bool = False) -> str:
        """The text that `token` completes; with `last`, all that is left."""
        self._tokens.append(token)
        before = self._decode(self._tokens[self._context : self._emitted])
        now = self._decode(self._tokens[self._context :])
        if not last and (now.endswith("\ufffd") or len(now) <= len(before)):
            return ""
        self._context, self._emitted = self._emitted, len(self._tokens)
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip)) if tokens else ""
