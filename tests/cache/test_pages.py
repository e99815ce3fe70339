"""Pages: references, exhaustion, and the integrity check that notices what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.cache.pages import OutOfPagesError, PageAllocator


def test_all_or_none():
    pages = PageAllocator(3)
    assert len(pages.take(2)) == 2
    with pytest.raises(OutOfPagesError, match="2 pages asked for, 1 of 3 are free"):
        pages.take(2)
    assert pages.n_free == 1


def test_shared_pages_live_until_the_last_release():
    pages = PageAllocator(2)
    own = pages.take(1)
    pages.share(own)
    pages.release(own)
    assert pages.n_free == 1
    pages.check_integrity([own])
    pages.release(own)
    pages.check_integrity([])


def test_misuse_is_refused():
    pages = PageAllocator(2)
    (page,) = pages.take(1)
    free = 1 - page
    with pytest.raises(ValueError, match=f"page {free} is free and cannot be shared"):
        pages.share([free])
    pages.release([page])
    with pytest.raises(ValueError, match=f"page {page} is released twice"):
        pages.release([page])
    with pytest.raises(ValueError, match="at least 1"):
        PageAllocator(0)


def test_integrity_names_the_page():
    pages = PageAllocator(2)
    (page,) = pages.take(1)
    with pytest.raises(AssertionError, match=f"page {page}: 1 references, used by 0 tables"):
        pages.check_integrity([])
    with pytest.raises(AssertionError, match=f"page {page}: 1 references, used by 2 tables"):
        pages.check_integrity([[page], [page]])


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "release"]), st.integers(0, 4)), max_size=60))
def test_no_page_is_lost_or_owned_twice(steps):
    pages, tables = PageAllocator(8), []
    for step, n in steps:
        if step == "take" and n <= pages.n_free:
            tables.append(pages.take(n))
        elif step == "share" and n < len(tables):
            pages.share(tables[n])
            tables.append(list(tables[n]))
        elif step == "release" and n < len(tables):
            pages.release(tables.pop(n))
        pages.check_integrity(tables)
