"""Prefix caching: pages of equal prompts are computed once, shared, and evicted when pages are needed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_fakes import greedy, make_engine, oracle, run_all, tokens_of

from sparse_compile.runtime.kv_pool import KVPool, KVSpec, OutOfPages
from sparse_compile.runtime.prefix_cache import ROOT, PageCache

LONG = [1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7]  # two full pages and three tokens


def cache(pages: int = 7) -> PageCache:
    return PageCache(KVPool(KVSpec(1, 1, 1, 4, torch.float32), pages, "cpu"))


def test_a_prompt_that_begins_like_an_earlier_one_skips_its_pages() -> None:
    engine, executor = make_engine(prefix_caching=True, prefill_chunk=16)
    for prompt, cached in (
        (LONG, 0),
        (LONG, 8),
        (LONG[:8], 4),
        ([*LONG[:4], 0, *LONG[5:]], 4),
        ([0, *LONG], 0),
    ):
        executor.plans.clear()
        name = engine.add_request(prompt, greedy(6))
        assert tokens_of(run_all(engine)[name]) == oracle(prompt, 6, True)
        assert executor.plans[0].rows == len(prompt) - cached
        assert engine.metrics(name).cached_tokens == cached
    assert engine.metrics().cached_tokens == 16
    assert engine.metrics().pages_free == engine.metrics().pages_total


def test_running_requests_share_pages() -> None:
    engine, _ = make_engine(prefix_caching=True, prefill_chunk=16)
    first = engine.add_request(LONG, greedy(6))
    outputs = {first: engine.step()}
    second = engine.add_request(LONG, greedy(9))
    engine.step()
    requests = engine.scheduler.requests
    assert requests[first].pages[:2] == requests[second].pages[:2]
    assert requests[first].pages[2] != requests[second].pages[2]
    engine.abort(first)
    assert tokens_of(run_all(engine)[second]) == oracle(LONG, 9, True)[1:]
    del outputs


def test_forgotten_pages_are_computed_anew() -> None:
    """Also those of a request that is in the middle of its prompt: it has begun with other weights."""
    engine, executor = make_engine(prefix_caching=True, prefill_chunk=5)
    first = engine.add_request(LONG, greedy(4))
    tokens = tokens_of(run_all(engine)[first])
    engine.add_request([*LONG[:8], 1, 1, 1, 1], greedy(4), "unfinished")
    engine.add_request([2, *LONG], greedy(4), "begun")
    engine.step()
    engine.forget_prefixes()
    engine.check_integrity()
    run_all(engine)
    assert engine.metrics().pages_free == engine.metrics().pages_total
    for prompt in (LONG, [2, *LONG]):
        executor.plans.clear()
        again = engine.add_request(prompt, greedy(4))
        assert tokens_of(run_all(engine)[again]) == oracle(prompt, 4, True)
        assert engine.metrics(again).cached_tokens == 0
    again = engine.add_request(LONG, greedy(4))
    assert tokens_of(run_all(engine)[again]) == tokens
    assert engine.metrics(again).cached_tokens == 8


def test_pages_with_generated_tokens_are_not_cached() -> None:
    engine, executor = make_engine(prefix_caching=True, prefill_chunk=16)
    name = engine.add_request(LONG, greedy(6))
    whole = [*LONG, *tokens_of(run_all(engine)[name])]
    executor.plans.clear()
    again = engine.add_request(whole, greedy(2))
    assert tokens_of(run_all(engine)[again]) == oracle(whole, 2, True)
    assert executor.plans[0].rows == len(whole) - 8


def test_a_bidirectional_prefix_is_neither_cached_nor_found() -> None:
    engine, _ = make_engine(prefix_caching=True, prefill_chunk=16)
    for prefix in (6, 0, 6):
        name = engine.add_request(LONG, greedy(3, prefix_length=prefix))
        assert tokens_of(run_all(engine)[name]) == oracle(LONG, 3, True, prefix=prefix)
        assert engine.metrics(name).cached_tokens == 0


def test_it_is_off_unless_asked_for() -> None:
    engine, _ = make_engine()
    for _ in range(2):
        name = engine.add_request(LONG, greedy(2))
        run_all(engine)
    assert engine.metrics(name).cached_tokens == 0
    assert engine.pool.held_pages == 0


def test_the_longest_idle_page_is_evicted_first_and_ends_of_chains_before_their_beginnings() -> None:
    pages = cache(pages=4)
    (a, b, c) = pages.allocate(3)
    chain = pages.file(a, ROOT, [1, 1, 1, 1])
    pages.file(b, chain, [2, 2, 2, 2])
    pages.free([a, b])
    assert (pages.free_pages, pages.pool.free_pages) == (2, 0)
    assert pages.find([1] * 4 + [2] * 4 + [3]) == [a, b]
    assert pages.allocate(1) == [b]
    assert pages.find([1] * 4 + [2] * 4 + [3]) == [a]
    pages.check_integrity([[b, c]])
    with pytest.raises(OutOfPages, match="2 pages asked for, 1 of 3 can be had"):
        pages.allocate(2)
    assert pages.find([1] * 4) == []  # a token must be left


def test_of_two_pages_with_the_same_tokens_one_is_cached() -> None:
    pages = cache()
    a, b, c = pages.allocate(3)
    chain = pages.file(a, ROOT, [1, 1, 1, 1])
    assert pages.file(b, ROOT, [1, 1, 1, 1]) == chain
    pages.file(c, chain, [2, 2, 2, 2])
    pages.free([b])
    assert pages.pool.free_pages == 4
    assert pages.find([1] * 4 + [2] * 4 + [3]) == [a, c]


def test_wrong_returns_are_refused_and_a_broken_count_is_noticed() -> None:
    pages = cache()
    held = pages.allocate(2)
    for wrong in ([held[0], held[0]], [6]):
        with pytest.raises(ValueError, match="freed twice, or never allocated"):
            pages.free(wrong)
    with pytest.raises(RuntimeError, match="the page cache counts"):
        pages.check_integrity([held, held[:1]])
    pages.check_integrity([held])


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=14), st.integers(1, 5)), max_size=8),
    st.integers(6, 14),
    st.integers(1, 3),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_cached_pages_change_no_token(
    requests: list[tuple[list[int], int]], pages: int, seats: int, async_steps: bool
) -> None:
    engine, _ = make_engine(
        pages=pages, max_seqs=seats, max_context=20, prefix_caching=True, async_steps=async_steps
    )
    ids = [engine.add_request(prompt, greedy(new)) for prompt, new in requests]
    outputs = run_all(engine)
    assert [tokens_of(outputs[name]) for name in ids] == [
        oracle(prompt, new, True) for prompt, new in requests
    ]
