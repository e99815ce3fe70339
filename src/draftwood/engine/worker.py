"""The main program of a started rank: builds the engine that its parent describes, and serves it.

Building an engine with another rank than the first never returns, see `draftwood.engine.llm.LLM`.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time

from draftwood.engine.world import ReportedError

POLL = 0.5
"""Seconds between looks at whether the parent lives."""


def main() -> None:
    parent, build = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    try:
        build()
    except (SystemExit, ReportedError) as e:
        sys.stdout.flush()
        os._exit(
            0 if isinstance(e, SystemExit) else 1
        )  # at once: an interpreter takes a second to end in order


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL)
    os._exit(1)
