"""Prefix reuse: full pages that stay after their request, found again by the tokens they hold.

It stands before the allocator: who takes pages through it may push out cached ones that nobody uses. Like the
allocator it is host bookkeeping and never sees what a page holds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from draftwood.cache.pages import OutOfPagesError, PageAllocator

Key = tuple[int | str, tuple[int, ...]]
"""Identity of the page before, or the kind of cache for the first one; and the tokens of this page."""


class PrefixCache:
    """Cached pages form chains: a page counts as found only after all pages before it, token for token.

    A key holds the page's own tokens and the number of the cached page before it. Numbers are never used twice, so equal
    keys mean equal text from position 0 on: there is no hash that could collide unnoticed. The cache holds one reference
    on each of its pages; those that nobody else holds are idle, and the longest idle one goes when a page is needed.

    `kind` keeps apart caches that hold different things for the same tokens: pages filled without a drafter lack its
    context, and are no hit where one drafts.
    """

    def __init__(self, allocator: PageAllocator, page_size: int, *, enabled: bool = True) -> None:
        self.allocator, self.page_size, self.enabled = allocator, page_size, enabled
        self._cached: dict[Key, tuple[int, int]] = {}  # page, and its number
        self._key_of: dict[int, Key] = {}  # by page
        self._idle: OrderedDict[int, None] = OrderedDict()  # pages, longest idle first
        self._numbers = 0

    @property
    def n_available(self) -> int:
        """Pages that `take` can give."""
        return self.allocator.n_free + len(self._idle)

    @property
    def n_cached(self) -> int:
        return len(self._cached)

    def take(self, n: int) -> list[int]:
        """n pages with one reference each; all or none. Raises `OutOfPagesError`, and then evicts nothing."""
        if n > self.n_available:
            raise OutOfPagesError(
                f"{n} pages asked for, {self.n_available} of {self.allocator.n_pages} are free"
            )
        while self.allocator.n_free < n:
            self._drop(next(iter(self._idle)))
        return self.allocator.take(n)

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to pages in use or cached."""
        self.allocator.share(pages)
        for page in pages:
            self._idle.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """One reference less. `pages` in text order: of a chain that falls idle, the end is evicted first."""
        self.allocator.release(pages)
        for page in reversed(pages):
            if page in self._key_of and self.allocator.references(page) == 1:
                self._idle[page] = None

    def match(self, tokens: Sequence[int], kind: str) -> list[int]:
        """The longest cached run of full pages that `tokens` begin with, one more reference on each."""
        pages = []
        for key in self._keys(tokens, kind):
            if key not in self._cached:
                break
            pages.append(self._cached[key][0])
        self.share(pages)
        return pages

    def publish(self, tokens: Sequence[int], pages: Sequence[int], kind: str) -> None:
        """Cache the full pages of a request: `tokens` from position 0 on, all of them in `pages`.

        Where the same text is cached already, that page stays the cached one.
        """
        if not self.enabled:
            return
        for key, page in zip(self._keys(tokens, kind), pages, strict=False):
            if key in self._cached:
                continue
            if page in self._key_of:  # what came before it has been forgotten since
                del self._cached[self._key_of[page]]
            else:
                self.allocator.share([page])
            self._numbers += 1
            self._cached[key] = page, self._numbers
            self._key_of[page] = key

    def forget(self, pages: Sequence[int]) -> None:
        """Take pages out of the cache whose content is in doubt; what follows them is not found any more either."""
        for page in pages:
            if page in self._key_of:
                self._drop(page)

    def clear(self) -> None:
        """Forget everything."""
        self.forget(list(self._key_of))

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless every page is free, cached, or in one of `tables`, and counted right."""
        self.allocator.check_integrity([*tables, list(self._key_of)])
        for page, key in self._key_of.items():
            if key not in self._cached or self._cached[key][0] != page:
                raise AssertionError(f"page {page} is cached under a key that leads elsewhere")
            if (page in self._idle) != (self.allocator.references(page) == 1):
                raise AssertionError(f"page {page}: idle is {page in self._idle}, against its references")
        if len(self._cached) != len(self._key_of) or not self._idle.keys() <= self._key_of.keys():
            raise AssertionError("the cache lists pages that it does not hold")

    def _keys(self, tokens: Sequence[int], kind: str) -> Iterator[Key]:
        """Keys of the full pages, in order; ends after one that is not cached when the next is asked for."""
        before: int | str = kind
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            key = before, tuple(tokens[start : start + self.page_size])
            yield key
            if key not in self._cached:
                return
            before = self._cached[key][1]

    def _drop(self, page: int) -> None:
        del self._cached[self._key_of.pop(page)]
        self._idle.pop(page, None)
        self.allocator.release([page])
