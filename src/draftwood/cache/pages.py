"""Who owns which page. Host bookkeeping only: it never sees what a page holds.

A page id names the same positions in every pool that shares the page table (target latents, drafter context).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class OutOfPagesError(RuntimeError):
    """More pages were asked for than are free."""


class PageAllocator:
    """Reference-counted pages 0..n_pages-1."""

    def __init__(self, n_pages: int) -> None:
        if n_pages < 1:
            raise ValueError(f"n_pages must be at least 1, got {n_pages}")
        self._references = [0] * n_pages
        self._free = list(range(n_pages - 1, -1, -1))

    @property
    def n_pages(self) -> int:
        return len(self._references)

    @property
    def n_free(self) -> int:
        return len(self._free)

    def references(self, page: int) -> int:
        """How many hold this page; 0 is free."""
        return self._references[page]

    def take(self, n: int) -> list[int]:
        """n pages with one reference each; all or none. Raises `OutOfPagesError`."""
        if n > len(self._free):
            raise OutOfPagesError(f"{n} pages asked for, {len(self._free)} of {self.n_pages} are free")
        pages = [self._free.pop() for _ in range(n)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """One more reference to pages that are in use."""
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
        for page in pages:
            self._references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One reference less; a page without references is free again."""
        for page in pages:
            if self._references[page] == 0:
                raise ValueError(f"page {page} is released twice")
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise `AssertionError` unless references equal the uses in `tables` and all other pages are free."""
        uses = [0] * self.n_pages
        for table in tables:
            for page in table:
                uses[page] += 1
        for page, (have, want) in enumerate(zip(self._references, uses, strict=True)):
            if have != want:
                raise AssertionError(f"page {page}: {have} references, used by {want} tables")
        if sorted(self._free) != [p for p, n in enumerate(uses) if n == 0]:
            raise AssertionError("the free list differs from the pages without references")
