"""The prefix cache against a model of what the pages hold; who is evicted; what is kept apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftwood.cache.pages import OutOfPagesError, PageAllocator
from draftwood.cache.prefix import PrefixCache

PAGE = 2


def cache_of(n_pages: int) -> PrefixCache:
    return PrefixCache(PageAllocator(n_pages), PAGE)


def publish(cache: PrefixCache, tokens: list[int], kind: str = "a") -> list[int]:
    """A request comes, fills its pages and ends."""
    pages = cache.take(-(-len(tokens) // PAGE))
    cache.publish(tokens, pages, kind)
    cache.release(pages)
    return pages


def found(cache: PrefixCache, tokens: list[int], kind: str = "a") -> list[int]:
    pages = cache.match(tokens, kind)
    cache.release(pages)
    return pages


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["start", "start", "end", "forget"]),
        st.lists(st.integers(0, 1), max_size=9),
        st.sampled_from("ab"),
        st.integers(0, 5),
    ),
    max_size=40,
)


@given(STEPS)
def test_what_is_found_is_what_was_written(steps):
    """Pages are written by their owners alone; a hit must hold the tokens asked for, after any evictions."""
    cache, content, running = cache_of(6), {}, []
    for step, tokens, kind, n in steps:
        if step == "start":
            hit = cache.match(tokens, kind)
            assert len(hit) <= len(tokens) // PAGE
            for i, page in enumerate(hit):
                assert content[page] == (kind, tokens[: PAGE * (i + 1)])
            fresh = -(-len(tokens) // PAGE) - len(hit)
            if fresh > cache.n_available:
                with pytest.raises(OutOfPagesError):
                    cache.take(fresh)
                cache.release(hit)
                continue
            pages = hit + cache.take(fresh)
            for i, page in enumerate(pages[len(hit) :], len(hit)):
                content[page] = kind, tokens[: PAGE * (i + 1)]
            running.append((tokens, pages, kind))
        elif n < len(running):
            tokens, pages, kind = running.pop(n)
            if step == "end":
                cache.publish(tokens, pages, kind)
            else:
                cache.forget(pages)
            cache.release(pages)
        cache.check_integrity(pages for _, pages, _ in running)
    for _, pages, _ in running:
        cache.release(pages)
    cache.check_integrity([])
    assert cache.n_available == 6


def test_only_full_pages_after_all_pages_before_them():
    cache = cache_of(8)
    a, b, _ = publish(cache, [1, 2, 3, 4, 5])
    assert found(cache, [1, 2, 3, 4, 5]) == [a, b]
    assert found(cache, [1, 2, 3]) == [a]
    assert found(cache, [1]) == []
    assert found(cache, [1, 2, 9, 4]) == [a]
    assert found(cache, [9, 2, 3, 4]) == []
    assert found(cache, [3, 4]) == []
    assert found(cache, [1, 2, 3, 4], "b") == []


def test_the_longest_idle_goes_first_and_ends_before_beginnings():
    cache = cache_of(4)
    old, new = publish(cache, [1, 2, 3, 4]), publish(cache, [5, 6, 7, 8])
    assert found(cache, [1, 2]) == old[:1]  # used again
    assert cache.allocator.n_free == 0
    for victim in (old[1], new[1], new[0], old[0]):
        assert cache.take(1) == [victim]
    with pytest.raises(OutOfPagesError, match="1 pages asked for, 0 of 4 are free"):
        cache.take(1)


def test_a_request_for_too_much_evicts_nothing():
    cache = cache_of(2)
    pages = publish(cache, [1, 2, 3, 4])
    with pytest.raises(OutOfPagesError):
        cache.take(3)
    assert found(cache, [1, 2, 3, 4]) == pages


def test_the_same_text_is_cached_once():
    cache = cache_of(4)
    ours, theirs = cache.take(1), cache.take(2)
    cache.publish([1, 2], ours, "a")
    cache.publish([1, 2, 3, 4], theirs, "a")
    assert found(cache, [1, 2, 3, 4]) == [ours[0], theirs[1]]
    cache.release(ours)
    cache.release(theirs)
    assert (cache.allocator.n_free, cache.n_cached) == (2, 2)


def test_forgotten_pages_hide_what_follows_them_until_published_again():
    cache = cache_of(3)
    pages = cache.take(2)
    cache.publish([1, 2, 3, 4], pages, "a")
    cache.forget(pages[:1])
    assert found(cache, [1, 2, 3, 4]) == []
    cache.publish([1, 2, 3, 4], pages, "a")
    assert found(cache, [1, 2, 3, 4]) == pages
    cache.check_integrity([pages])
    cache.release(pages)
    cache.clear()
    assert (cache.n_cached, cache.allocator.n_free) == (0, 3)


def test_disabled_it_finds_nothing():
    cache = PrefixCache(PageAllocator(2), PAGE, enabled=False)
    publish(cache, [1, 2])
    assert found(cache, [1, 2]) == []
    assert cache.allocator.n_free == 2


def test_integrity_notices_a_page_that_is_idle_and_used():
    cache = cache_of(2)
    pages = publish(cache, [1, 2])
    cache.allocator.share(pages)  # past the cache, so it still thinks the page idle
    with pytest.raises(AssertionError, match=f"page {pages[0]}: idle is True"):
        cache.check_integrity([pages])
