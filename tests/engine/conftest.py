"""The small random pair that most tests of the engine share."""

from __future__ import annotations

import pytest

from support.tiny import write_drafter, write_target


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pair")
    return write_target(root / "target", 7), write_drafter(root / "drafter")
