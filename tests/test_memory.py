"""Free memory, and pools that do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparse_compile.runtime import memory
from sparse_compile.runtime.kv_pool import KVPool, KVSpec
from sparse_compile.runtime.reference_store import ReferenceStore, StoreSpec

KV = KVSpec(planes=2, kv_heads=2, head_dim=8, page_size=16, dtype=torch.float32)
STORE = StoreSpec(sites=3, heads=4, head_dim=8, capacity=10, dtype=torch.bfloat16)


def test_sizes_are_those_of_the_real_pools() -> None:
    pages, slots = memory.pool_pages(KV, max_context=40, max_batch=3), memory.store_slots(max_batch=3)
    assert (pages, slots) == (1 + 3 * 3, 4)
    assert memory.kv_pool_bytes(KV, pages) == KVPool(KV, pages, "cpu").bytes
    assert memory.reference_store_bytes(STORE, slots) == ReferenceStore(STORE, slots, "cpu").bytes


def test_free_memory_of_the_host_is_sane() -> None:
    free = memory.free_memory("cpu")
    assert 0 < free < 2**50


def test_unknown_device_is_refused() -> None:
    with pytest.raises(ValueError, match="meta"):
        memory.free_memory("meta")


def test_what_fits_passes() -> None:
    memory.check_fits({"KV pool": 899}, "cpu", {"max_batch": 1}, free=1000)


def test_what_does_not_fit_names_the_settings() -> None:
    settings = {"max_context": 4096, "max_batch": 8, "key_retention": 0.1, "page_size": 16}
    with pytest.raises(ValueError, match=r"3\.00 GiB") as caught:
        memory.check_fits({"KV pool": 2 * 2**30, "reference store": 2**30}, "cpu", settings, free=2 * 2**30)
    message = str(caught.value)
    for part in (
        "KV pool 2.00 GiB",
        "reference store 1.00 GiB",
        "1.80 GiB",
        "max_context=4096",
        "max_batch=8",
    ):
        assert part in message
    assert "key_retention=0.1" in message
    assert "page_size=16" in message


def test_a_real_pool_too_large_for_this_machine() -> None:
    pages = memory.pool_pages(KV, max_context=2**31, max_batch=2**20)
    with pytest.raises(ValueError, match="max_batch=1048576"):
        memory.check_fits({"KV pool": memory.kv_pool_bytes(KV, pages)}, "cpu", {"max_batch": 2**20})


def test_control_group_limit_counts(tmp_path: Path) -> None:
    assert memory._control_group_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("600\n")
    assert memory._control_group_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory._control_group_free(tmp_path) == 400


def test_host_memory_from_meminfo_and_without(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable: 5 kB\n")
    assert memory._host_free(tmp_path / "meminfo") == 5 * 1024
    assert memory._host_free(tmp_path / "missing") > 0


@pytest.mark.parametrize(
    ("size", "text"), [(5, "5 bytes"), (1536, "1.50 KiB"), (3 * 2**30, "3.00 GiB"), (2**41, "2.00 TiB")]
)
def test_format_bytes(size: int, text: str) -> None:
    assert memory.format_bytes(size) == text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_free_memory_of_a_gpu_counts_the_allocators_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    # Other processes may use the same GPU meanwhile: what the driver says is held still, the allocator is ours.
    reserved = torch.cuda.memory_reserved()
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda device: (2**36 - torch.cuda.memory_reserved() + reserved, 2**37)
    )
    before = memory.free_memory("cuda")
    block = torch.empty(64 * 2**20, dtype=torch.uint8, device="cuda")
    assert before - memory.free_memory("cuda") >= block.nbytes
    del block
    assert memory.free_memory("cuda") >= before - 2**20
