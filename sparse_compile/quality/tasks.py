"""Synthetic tasks whose answer needs a far key, as bytes: made with numpy, the same on every machine.

A sequence is ``[name]``, dots that fill it up, a body, and queries with their answers. The answer of the only query of
``[recall]...ab42;cd17;?cd17;`` is its ``17``. Bodies are made of records of one width, so that whole batches are
made by array arithmetic.

| task | a record of the body | a query, its answer marked | what it needs |
|---|---|---|---|
| recall | ``ab42;`` | ``?ab42;`` (42) | the one pair that was asked for |
| copy | letters, then ``|`` | the same letters again (all of them) | one place after the other, far back |
| hops | ``>abcd`` | ``2>abef;`` (ef) | a pair that names the next pair; the digit says how many links |
| count | a letter | ``#A=3;`` (3) | every place of a rare capital, 0 to 9 of them |
| sums | ``ab7;`` | ``?ab+cd=11;`` (11) | two pairs and small arithmetic |

Token ids of the byte tokenizer are bytes + 3; :func:`to_ids` gives them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from sparse_compile.models.tokenizer import FIRST_BYTE_ID

Bytes = NDArray[np.uint8]
Generate = Callable[[torch.Tensor, int], torch.Tensor]

SHORTEST = 96  # bytes below which a sequence has no room for a body and a query of each task
COPY_ANSWER = 16  # bytes of a copy that a test asks for
SYMBOLS, MOST = 4, 9  # capitals that are counted, and how often one may occur
_LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz", np.uint8)
_PAIRS = np.stack(np.meshgrid(_LETTERS, _LETTERS, indexing="ij"), -1).reshape(-1, 2)  # [676, 2]
_KEYS = len(_PAIRS)


@dataclass(frozen=True)
class TaskBatch:
    """text uint8 [B, L]; answer bool [B, L], True where a byte belongs to an answer, predicted from those before."""

    text: Bytes
    answer: NDArray[np.bool_]


@dataclass(frozen=True)
class TaskSamples:
    """prompts uint8 [n, P] and the answers uint8 [n, A] that must follow: P + A is the context asked for."""

    name: str
    prompts: Bytes
    answers: Bytes

    @property
    def prompt_ids(self) -> torch.Tensor:
        return to_ids(self.prompts)

    @property
    def answer_ids(self) -> torch.Tensor:
        return to_ids(self.answers)


def to_ids(text: Bytes | bytes) -> torch.Tensor:
    """Bytes as token ids, int64 of the same shape."""
    array = np.frombuffer(text, np.uint8) if isinstance(text, bytes) else text
    return torch.from_numpy(array.astype(np.int64) + FIRST_BYTE_ID)


def training_batch(name: str, batch: int, length: int, rng: np.random.Generator) -> TaskBatch:
    """Sequences of exactly ``length`` bytes with many queries: between a twentieth and six tenths of each sequence.
    Half of the batches have few records: looking things up is learned among few of them.

    Raises:
        ValueError: for an unknown task or a length below ``SHORTEST``.
    """
    return _task(name, length)(rng, batch, length, float(rng.uniform(0.05, 0.6)))


def samples(name: str, count: int, context: int, seed: int = 0) -> TaskSamples:
    """``count`` questions of exactly ``context`` bytes with their answers at the end. A seed gives the same ones
    everywhere, and more of them with a larger ``count``.

    Raises:
        ValueError: for an unknown task or a context below ``SHORTEST``.
    """
    make = _task(name, context)
    length = (
        context if name == "copy" else context + 1
    )  # the others close with ';', which is no part of an answer
    key = (seed, list(TASKS).index(name), context)
    rows = [make(np.random.default_rng([*key, row]), 1, length, 0.0) for row in range(count)]
    text = np.concatenate([row.text[:, :context] for row in rows])
    width = COPY_ANSWER if name == "copy" else int(rows[0].answer.sum())
    return TaskSamples(name, text[:, :-width], text[:, -width:])


def accuracy(generate: Generate, asked: TaskSamples, batch: int = 64) -> float:
    """The share of samples whose answer comes out exactly, greedily.

    ``generate(prompt_ids [n, P], tokens)`` gives the new ids [n, tokens] (ids after the prompt alone).
    """
    right = 0
    for start in range(0, len(asked.prompts), batch):
        prompts, wanted = asked.prompt_ids[start : start + batch], asked.answer_ids[start : start + batch]
        found = generate(prompts, wanted.shape[1]).to(wanted.device)
        right += int((found == wanted).all(-1).sum())
    return right / len(asked.prompts)


def forced_accuracy(
    logits: Callable[[torch.Tensor], torch.Tensor], asked: TaskSamples, batch: int = 64
) -> float:
    """:func:`accuracy` of a model from plain forwards: an answer is generated greedily exactly when, with the answer
    given, each of its tokens is the most likely one. ``logits(ids [n, T])`` gives [n, T, V]."""
    right = 0
    ids = torch.cat((asked.prompt_ids, asked.answer_ids), 1)
    width = asked.answers.shape[1]
    for start in range(0, len(ids), batch):
        rows = ids[start : start + batch]
        found = logits(rows)[:, -width - 1 : -1].argmax(-1).to(rows.device)
        right += int((found == rows[:, -width:]).all(-1).sum())
    return right / len(ids)


def _task(name: str, length: int) -> Callable[[np.random.Generator, int, int, float], TaskBatch]:
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    if length < SHORTEST:
        raise ValueError(f"a sequence of {length} bytes is too short for a task; give at least {SHORTEST}")
    return TASKS[name]


def _recall(rng: np.random.Generator, batch: int, length: int, share: float) -> TaskBatch:
    pairs, queries = _sizes(rng, length - len("[recall]"), share, record=5, query=6)
    keys = _PAIRS[_draws(rng, batch, pairs)]
    values = _digits(rng.integers(0, 100, (batch, pairs)), 2)
    asked = _draws(rng, batch, queries, of=pairs)
    body = _records(keys, values, ord(";"))
    query = _records(ord("?"), _pick(keys, asked), _pick(values, asked), ord(";"))
    return _sequence("recall", length, body, query, answer=slice(3, 5))


def _hops(rng: np.random.Generator, batch: int, length: int, share: float) -> TaskBatch:
    links, queries = _sizes(rng, length - len("[hops]"), share, record=5, query=7)
    keys = _PAIRS[_draws(rng, batch, links)]
    order = _draws(rng, batch, links, of=links)
    follows = np.empty_like(
        order
    )  # link i leads to the key of link follows[i]; one cycle through all of them
    np.put_along_axis(follows, order, np.roll(order, 1, 1), 1)
    asked = _draws(rng, batch, queries, of=links)
    hops = rng.integers(1, 3, (batch, queries)) if share else np.full((batch, queries), 2)
    once = np.take_along_axis(follows, asked, 1)
    end = np.where(hops == 1, once, np.take_along_axis(follows, once, 1))
    body = _records(ord(">"), keys, _pick(keys, follows))
    query = _records(_digits(hops, 1), ord(">"), _pick(keys, asked), _pick(keys, end), ord(";"))
    return _sequence("hops", length, body, query, answer=slice(4, 6))


def _sums(rng: np.random.Generator, batch: int, length: int, share: float) -> TaskBatch:
    pairs, queries = _sizes(rng, length - len("[sums]"), share, record=4, query=10)
    keys = _PAIRS[_draws(rng, batch, pairs)]
    values = rng.integers(0, 10, (batch, pairs))
    first, second = rng.integers(0, pairs, (2, batch, queries))
    total = np.take_along_axis(values, first, 1) + np.take_along_axis(values, second, 1)
    body = _records(keys, _digits(values, 1), ord(";"))
    query = _records(
        ord("?"), _pick(keys, first), ord("+"), _pick(keys, second), ord("="), _digits(total, 2), ord(";")
    )
    return _sequence("sums", length, body, query, answer=slice(7, 9))


def _count(rng: np.random.Generator, batch: int, length: int, share: float) -> TaskBatch:
    queries = SYMBOLS if share else 1
    size = length - len("[count]") - 5 * queries
    counts = rng.integers(0, MOST + 1, (batch, SYMBOLS))
    body = _LETTERS[rng.integers(0, len(_LETTERS), (batch, size))]
    spots = _draws(rng, batch, SYMBOLS * MOST, of=size)
    capitals = np.repeat(np.arange(SYMBOLS, dtype=np.uint8) + ord("A"), MOST)[None]
    shown = np.tile(np.arange(MOST), SYMBOLS)[None] < np.repeat(counts, MOST, 1)
    np.put_along_axis(body, spots, np.where(shown, capitals, np.take_along_axis(body, spots, 1)), 1)
    asked = _draws(rng, batch, queries, of=SYMBOLS)
    names = (asked + ord("A")).astype(np.uint8)[..., None]
    digits = _digits(np.take_along_axis(counts, asked, 1), 1)
    query = _records(ord("#"), names, ord("="), digits, ord(";"))
    return _sequence("count", length, body, query, answer=slice(3, 4))


def _copy(rng: np.random.Generator, batch: int, length: int, share: float) -> TaskBatch:
    size = (length - len("[copy]") - 1) // 2
    if share:  # of many sizes, so that a copy is found by what it says and not by how far back it is
        size = int(rng.integers(size // 2, size + 1)) if rng.random() < 0.5 else _fewer(rng, size)
    body = _LETTERS[rng.integers(0, len(_LETTERS), (batch, size))]
    bar = np.full((batch, 1), ord("|"), np.uint8)
    return _sequence("copy", length, np.concatenate((body, bar), 1), body, answer=slice(0, size))


TASKS: dict[str, Callable[[np.random.Generator, int, int, float], TaskBatch]] = {
    "recall": _recall,
    "copy": _copy,
    "hops": _hops,
    "count": _count,
    "sums": _sums,
}


def _sizes(rng: np.random.Generator, room: int, share: float, record: int, query: int) -> tuple[int, int]:
    """(records, queries) that fill ``room`` bytes, the queries about ``share`` of it and at least one; with queries to
    train on there are fewer records in half of the cases. There are at most as many records as there are keys."""
    queries = max(1, int(room * share) // query)
    records = min((room - queries * query) // record, _KEYS)
    return _fewer(rng, records) if share and rng.random() < 0.5 else records, queries


def _fewer(rng: np.random.Generator, most: int) -> int:
    """From 2 to ``most``, each doubling as likely as the next."""
    return int(2 ** rng.uniform(1, np.log2(most + 1)))


def _draws(rng: np.random.Generator, batch: int, count: int, of: int = _KEYS) -> NDArray[np.int64]:
    """int64 [batch, count]: numbers below ``of`` in random order, none again before all have come."""
    rounds = -(-count // of)
    return np.argsort(rng.random((batch, rounds, of)), axis=-1).reshape(batch, -1)[:, :count]


def _digits(numbers: NDArray[np.int64], width: int) -> Bytes:
    """Decimal digits with leading zeros: [...] -> uint8 [..., width]."""
    powers = 10 ** np.arange(width - 1, -1, -1)
    return (numbers[..., None] // powers % 10 + ord("0")).astype(np.uint8)


def _pick(values: Bytes, index: NDArray[np.int64]) -> Bytes:
    """values [B, n, w], index [B, m] -> [B, m, w]."""
    return np.take_along_axis(values, index[..., None], 1)


def _records(*parts: Bytes | int) -> Bytes:
    """Parts [B, n, w] and single characters side by side: [B, n, width]."""
    shape = next(part.shape[:2] for part in parts if isinstance(part, np.ndarray))
    columns = [np.full((*shape, 1), part, np.uint8) if isinstance(part, int) else part for part in parts]
    return np.concatenate(columns, 2)


def _sequence(name: str, length: int, body: Bytes, queries: Bytes, answer: slice) -> TaskBatch:
    """Head, dots, body and queries as one sequence. ``answer``: which bytes of each query are asked for."""
    batch = len(body)
    marks = np.zeros(queries.shape[1:], bool)
    marks[..., answer] = True
    body, queries = body.reshape(batch, -1), queries.reshape(batch, -1)
    text = np.full((batch, length), ord("."), np.uint8)
    head = np.frombuffer(f"[{name}]".encode(), np.uint8)
    text[:, : len(head)] = head
    end = length - queries.shape[1]
    text[:, end - body.shape[1] : end] = body
    text[:, end:] = queries
    marked = np.zeros((batch, length), bool)
    marked[:, end:] = marks.reshape(-1)
    return TaskBatch(text, marked)
