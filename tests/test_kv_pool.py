"""The KV pool: who holds which page."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_compile.runtime.kv_pool import KVPool, KVSpec, OutOfPages

SPEC = KVSpec(planes=3, kv_heads=2, head_dim=8, page_size=4, dtype=torch.bfloat16)


def test_tensors_and_bytes_agree() -> None:
    pool = KVPool(SPEC, 7, "cpu")
    assert pool.k_pool.shape == pool.v_pool.shape == (3, 7, 2, 4, 8)
    assert pool.k_pool.dtype == torch.bfloat16
    assert pool.bytes == pool.k_pool.nbytes + pool.v_pool.nbytes
    assert SPEC.bytes_per_token == 2 * 3 * 2 * 8 * 2
    assert pool.bytes == 7 * 4 * SPEC.bytes_per_token


def test_pages_for_rounds_up() -> None:
    assert [SPEC.pages_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


def test_allocation_is_deterministic_and_never_the_dummy() -> None:
    first, second = KVPool(SPEC, 7, "cpu"), KVPool(SPEC, 7, "cpu")
    for pool in (first, second):
        a, b = pool.allocate(2), pool.allocate(3)
        pool.free(a)
        assert (a, b, pool.allocate(3)) == ([1, 2], [3, 4, 5], [1, 2, 6])
        pool.check_integrity()


def test_out_of_pages_takes_nothing() -> None:
    pool = KVPool(SPEC, 4, "cpu")
    pool.allocate(2)
    with pytest.raises(OutOfPages, match=r"2 pages asked for, 1 of 3 are free"):
        pool.allocate(2)
    assert pool.free_pages == 1
    pool.check_integrity()


@pytest.mark.parametrize("pages", [[1, 1], [3], [0], [99]], ids=["twice", "not held", "dummy", "unknown"])
def test_wrong_free_is_an_error_and_frees_nothing(pages: list[int]) -> None:
    pool = KVPool(SPEC, 5, "cpu")
    held = pool.allocate(2)
    with pytest.raises(ValueError, match="not held"):
        pool.free([*pages, 2])
    assert pool.held_pages == 2
    pool.free(held)
    with pytest.raises(ValueError, match="freed twice"):
        pool.free(held)
    pool.check_integrity()


@pytest.mark.parametrize("break_it", ["leak", "twice", "dummy"])
def test_check_integrity_finds_damage(break_it: str) -> None:
    pool = KVPool(SPEC, 5, "cpu")
    page = pool.allocate(1)[0]
    if break_it == "leak":
        pool._held.remove(page)
    else:
        pool._free.append(page if break_it == "twice" else 0)
    with pytest.raises(RuntimeError, match="KV pool broken"):
        pool.check_integrity()


def test_arguments_are_validated() -> None:
    with pytest.raises(ValueError, match="page_size=0"):
        KVSpec(1, 1, 1, 0, torch.float32)
    with pytest.raises(ValueError, match="pages=1"):
        KVPool(SPEC, 1, "cpu")
    with pytest.raises(ValueError, match="-1"):
        KVPool(SPEC, 2, "cpu").allocate(-1)


@given(st.lists(st.integers(0, 6), max_size=30), st.randoms(use_true_random=False))
@settings(max_examples=50, deadline=None)
def test_any_history_keeps_the_law(sizes: list[int], random: object) -> None:
    pool = KVPool(SPEC, 12, "cpu")
    held: list[list[int]] = []
    for size in sizes:
        try:
            held.append(pool.allocate(size))
        except OutOfPages:
            assert size > pool.free_pages
            pool.free(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        pool.check_integrity()
        assert pool.held_pages == sum(map(len, held))
