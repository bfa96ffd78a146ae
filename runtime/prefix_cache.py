"""Pages of prompts that are kept for later prompts that begin in the same way.

Only full pages of prompt tokens are cached: their keys and values are dense and depend on the tokens up to their end
alone. Pages with generated tokens may hold what sparse rows wrote, and a bidirectional prefix depends on tokens behind
a page; neither is ever cached. A page is found by the chain of token pages up to it, compared exactly.

    free --> held by requests, counted --> idle: cached, and held by nobody --> evicted, the longest idle first: free
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparse_compile.runtime.kv_pool import KVPool, OutOfPages

ROOT = 0  # the chain of no page


@dataclass(frozen=True)
class _Link:
    """A cached page: the chain before it, the tokens on it, and the number of the chain with it."""

    before: int
    tokens: tuple[int, ...]
    number: int


class PageCache:
    """Lends the pages of a pool, perhaps one page to several requests. What is never filed goes straight back."""

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self._holders: Counter[int] = Counter()  # page -> requests that hold it
        self._links: dict[int, _Link] = {}  # page -> what is on it
        self._pages: dict[tuple[int, tuple[int, ...]], int] = {}  # (chain before, tokens) -> page
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._chains = ROOT

    @property
    def free_pages(self) -> int:
        """Pages that can be had, idle ones included."""
        return self.pool.free_pages + len(self._idle)

    def allocate(self, n: int) -> list[int]:
        """Takes `n` pages, or none at all: raises OutOfPages when fewer than `n` can be had."""
        if n > self.free_pages:
            raise OutOfPages(f"{n} pages asked for, {self.free_pages} of {self.pool.usable_pages} can be had")
        while self.pool.free_pages < n:
            self._evict()
        pages = self.pool.allocate(n)
        self._holders.update(pages)
        return pages

    def free(self, pages: Iterable[int]) -> None:
        """One holder gives pages back. One that nobody holds, or that comes twice, is a ValueError."""
        pages = list(pages)
        wrong = sorted(
            page for page, times in Counter(pages).items() if times > 1 or page not in self._holders
        )
        if wrong:
            raise ValueError(f"pages {wrong} are not held: freed twice, or never allocated")
        for page in reversed(pages):  # the end of a chain goes idle, and is evicted, before its beginning
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            del self._holders[page]
            if page in self._links:
                self._idle[page] = None
            else:
                self.pool.free([page])

    # ------------------------------------------------------------------ prompts

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Cached pages of the beginning of a prompt. One token at least is left to compute: it gives the logits."""
        size, pages, chain = self.pool.spec.page_size, [], ROOT
        for start in range(0, (len(tokens) - 1) // size * size, size):
            page = self._pages.get((chain, tuple(tokens[start : start + size])))
            if page is None:
                break
            pages.append(page)
            chain = self._links[page].number
        return pages

    def idle(self, pages: Iterable[int]) -> int:
        """How many of these pages nobody holds."""
        return sum(page in self._idle for page in pages)

    def share(self, pages: Sequence[int]) -> int:
        """One more holder of cached pages, which are a chain. Returns its number."""
        for page in pages:
            self._idle.pop(page, None)
        self._holders.update(pages)
        return self._links[pages[-1]].number if pages else ROOT

    def file(self, page: int, chain: int, tokens: Sequence[int]) -> int:
        """`page` holds `tokens`, behind the pages of `chain`. Returns the number of the chain with it.

        If another page holds the same, that one stays the cached one.
        """
        key = (chain, tuple(tokens))
        if key not in self._pages:
            self._chains += 1
            self._pages[key] = page
            self._links[page] = _Link(*key, self._chains)
        return self._links[self._pages[key]].number

    def forget(self) -> None:
        """No page is cached any more. Those that nobody holds go back to the pool."""
        self.pool.free(self._idle)
        self._idle.clear()
        self._links.clear()
        self._pages.clear()

    # ------------------------------------------------------------------ the law

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """Raises RuntimeError unless the pages of all requests, counted, and the idle ones are what the pool lent."""
        self.pool.check_integrity()
        counts = Counter(page for pages in held for page in pages)
        if counts != self._holders:
            raise RuntimeError(
                f"requests hold pages {dict(counts)}, the page cache counts {dict(self._holders)}"
            )
        if self._idle.keys() & counts.keys() or self._idle.keys() - self._links.keys():
            raise RuntimeError(f"idle pages {sorted(self._idle)} must be cached and held by nobody")
        if sorted(self._pages.values()) != sorted(self._links):
            raise RuntimeError("the index of cached pages and their links differ")
        if len(counts) + len(self._idle) != self.pool.held_pages:
            raise RuntimeError(
                f"requests hold {len(counts)} pages and {len(self._idle)} are idle, "
                f"the KV pool lent {self.pool.held_pages}"
            )

    def _evict(self) -> None:
        page, _ = self._idle.popitem(last=False)
        link = self._links.pop(page)
        del self._pages[link.before, link.tokens]
        self.pool.free([page])
