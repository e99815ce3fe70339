"""Stop strings over streamed text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from draftwood.engine.stops import StopStrings


def stream(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watcher = StopStrings(stops)
    shown = "".join(watcher.push(p) for p in pieces)
    if watcher.hit is None:
        shown += watcher.flush()
    return shown, watcher.hit


@given(
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.text("ab", max_size=3), max_size=12),
)
def test_same_as_searching_the_text_as_it_grows(stops, pieces):
    text = ""
    for piece in pieces:
        text += piece
        found = [(text.find(s), -len(s), s) for s in stops if s in text]
        if found:
            at, _, stop = min(found)
            assert stream(stops, pieces) == (text[:at], stop)
            return
    assert stream(stops, pieces) == (text, None)


def test_nothing_that_may_become_a_stop_is_shown():
    watcher = StopStrings(["END"])
    assert watcher.push("fooE") == "foo"
    assert watcher.push("N") == ""
    assert watcher.push("X") == "ENX"
    assert watcher.push("END") == ""
    assert watcher.hit == "END"
    assert watcher.push("more") == ""
