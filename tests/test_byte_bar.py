"""The bar over bytes: with its rate on a terminal, silent elsewhere and for what is quick."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftwood import byte_bar


@pytest.mark.parametrize(
    ("terminal", "patience", "shown"), [(True, 0, True), (True, 60, False), (False, 0, False)]
)
def test_only_on_a_terminal_and_after_a_while(monkeypatch, terminal, patience, shown):
    monkeypatch.setattr(byte_bar, "PATIENCE_S", patience)
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    with byte_bar.byte_bar("loading", console) as progress:
        for done in range(0, 8_000_000_001, 1_000_000_000):
            progress(done, 8_000_000_000)
    text = out.getvalue()
    assert ("loading" in text and "8.0/8.0 GB" in text and "B/s" in text) == shown
    assert bool(text) == shown
