"""How much memory a device has left, and whether the pools fit into it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from sparse_compile.runtime.kv_pool import KVSpec
from sparse_compile.runtime.store_spec import StoreSpec

USABLE_SHARE = 0.9  # of the free memory; the rest is left to activations, logits and the allocator


def pool_pages(spec: KVSpec, max_context: int, max_batch: int) -> int:
    """Pages that let `max_batch` sequences of `max_context` tokens live at once, with the dummy page."""
    return 1 + max_batch * spec.pages_for(max_context)


def store_slots(max_batch: int, rows: int = 1) -> int:
    """Slots that let `max_batch` sequences decode at once, with the dummy slot. rows: of one that are under way."""
    return 1 + max_batch * rows


def kv_pool_bytes(spec: KVSpec, pages: int) -> int:
    """Bytes of a KVPool of `pages` pages, without building it."""
    return pages * spec.bytes_per_page


def reference_store_bytes(spec: StoreSpec, slots: int) -> int:
    """Bytes of a ReferenceStore of `slots` slots, without building it."""
    return slots * spec.bytes_per_slot


def free_memory(device: torch.device | str) -> int:
    """Bytes that can still be allocated on `device`. Host memory counts the limit of the process's control
    group.
    """
    device = torch.device(device)
    if device.type == "cuda":
        # What the caching allocator holds without using it is free for us as well.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    if device.type == "cpu":
        group = _control_group_free()
        return _host_free() if group is None else min(group, _host_free())
    raise ValueError(f"device={device}: free memory is known for 'cpu' and 'cuda' only")


def check_fits(
    needs: Mapping[str, int],
    device: torch.device | str,
    settings: Mapping[str, object],
    free: int | None = None,
) -> None:
    """Raises ValueError when what is needed does not fit into the free memory of `device`.

    needs: bytes by name ("KV pool": ...). settings: the settings that decide them and their values
    ("max_context": 4096, ...), named in the error. free: bytes, for callers that have measured already.
    """
    free = free_memory(device) if free is None else free
    limit = int(free * USABLE_SHARE)
    total = sum(needs.values())
    if total <= limit:
        return
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in needs.items())
    values = ", ".join(f"{name}={value}" for name, value in settings.items())
    raise ValueError(
        f"the pools need {format_bytes(total)} ({parts}), and {format_bytes(limit)} can be used on {device} "
        f"({USABLE_SHARE:.0%} of {format_bytes(free)} free); lower one of the settings that decide this: "
        f"{values}"
    )


def format_bytes(size: int) -> str:
    """`size` bytes for people: "1.50 GiB"."""
    value, unit = _scaled(size)
    return f"{size} bytes" if unit == "bytes" else f"{value:.2f} {unit}"


def format_at_least(size: int) -> str:
    """The same, rounded up: whoever has as much as it says has `size` bytes."""
    value, unit = _scaled(size)
    return f"{size} B" if unit == "bytes" else f"{math.ceil(value * 100) / 100:.2f} {unit}"


def _scaled(size: int) -> tuple[float, str]:
    value = float(size)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return value, unit
        value /= 1024
    return value, "TiB"


def _host_free(meminfo: Path = Path("/proc/meminfo")) -> int:
    """MemAvailable where the kernel tells it, else free physical pages."""
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    name = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf(name)


def _control_group_free(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the memory limit of the control group leaves, None where there is no limit."""
    for limit_name, used_name in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = _read_number(root / limit_name), _read_number(root / used_name)
        if limit is not None and used is not None:
            return max(0, limit - used)
    return None


def _read_number(path: Path) -> int | None:
    """The number in a file of one number; None when the file is missing or says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
