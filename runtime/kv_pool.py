"""The KV pool: pages of tokens for every plane of a looped model.

One page number serves all planes (a plane is one (loop, layer) pair), so a sequence needs one list of pages.
Page 0 is the dummy: padding rows write into it, and it is never handed out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch


class OutOfPages(RuntimeError):  # noqa: N818 (an event of scheduling, not a mistake)
    """The pool has fewer free pages than were asked for."""


@dataclass(frozen=True)
class KVSpec:
    """Shape of one cached token: `planes` pairs of k and v, each `[kv_heads, head_dim]` in `dtype`."""

    planes: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("planes", "kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")

    @property
    def bytes_per_token(self) -> int:
        """Bytes of k and v of one token over all planes."""
        return 2 * self.planes * self.kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_page(self) -> int:
        """Bytes of k and v of one page over all planes."""
        return self.bytes_per_token * self.page_size

    def pages_for(self, tokens: int) -> int:
        """Number of pages that hold `tokens` tokens."""
        return -(-tokens // self.page_size)


class KVPool:
    """`k_pool` and `v_pool`, each `[planes, pages, kv_heads, page_size, head_dim]`, and who holds which page.

    `pages` counts the dummy page 0. The memory is left uninitialised: readers mask what no row has written.
    Allocation is deterministic: the same calls in the same order give the same page numbers.
    """

    def __init__(self, spec: KVSpec, pages: int, device: torch.device | str) -> None:
        if pages < 2:
            raise ValueError(f"pages={pages} must be at least 2: page 0 is the dummy page")
        self.spec = spec
        self.pages = pages
        shape = (spec.planes, pages, spec.kv_heads, spec.page_size, spec.head_dim)
        self.k_pool = torch.empty(shape, dtype=spec.dtype, device=device)
        self.v_pool = torch.empty(shape, dtype=spec.dtype, device=device)
        self.device = self.k_pool.device
        self._free = list(range(pages - 1, 0, -1))  # a stack: the lowest fresh page is on top
        self._held: set[int] = set()

    @property
    def bytes(self) -> int:
        """Bytes of both pool tensors."""
        return self.pages * self.spec.bytes_per_page

    @property
    def usable_pages(self) -> int:
        """Pages that sequences can hold: all but the dummy."""
        return self.pages - 1

    @property
    def free_pages(self) -> int:
        return len(self._free)

    @property
    def held_pages(self) -> int:
        return len(self._held)

    def allocate(self, n: int) -> list[int]:
        """Takes `n` pages, or none at all: raises OutOfPages when fewer than `n` are free."""
        if n < 0:
            raise ValueError(f"cannot allocate {n} pages")
        if n > len(self._free):
            raise OutOfPages(
                f"{n} pages asked for, {len(self._free)} of {self.usable_pages} are free; "
                "wait for a request to finish, or raise max_batch or max_context"
            )
        taken = [self._free.pop() for _ in range(n)]
        self._held.update(taken)
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Gives pages back. One that is not held, or comes twice, is a ValueError, and then none is freed."""
        pages = list(pages)
        wrong = sorted(page for page, times in Counter(pages).items() if times > 1 or page not in self._held)
        if wrong:
            raise ValueError(f"pages {wrong} are not held: freed twice, or never allocated")
        self._held.difference_update(pages)
        self._free.extend(reversed(pages))

    def check_integrity(self) -> None:
        """Raises RuntimeError unless free + held are all pages but the dummy, each exactly once."""
        known = sorted([*self._free, *self._held])
        if known != list(range(1, self.pages)):
            raise RuntimeError(
                f"KV pool broken: {len(self._free)} free + {len(self._held)} held pages "
                f"are not the {self.usable_pages} usable pages, each once"
            )
