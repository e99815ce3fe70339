"""The worker of `bench generate` with an engine that has faults: chain kills the process in a batch of two, and
`tree:4` changes a token of its last request."""

from __future__ import annotations

import os
import sys

from draftwood.bench.generate.worker import Session
from draftwood.bench.worker import serve
from draftwood.engine.llm import LLM

sound = LLM.stream


def stream(self, prompts, params, **mode):
    if mode["mode"] == "chain" and len(prompts) == 2:
        print("last words of the engine", file=sys.stderr, flush=True)
        os.abort()
    for event in sound(self, prompts, params, **mode):
        tokens = event.output.token_ids
        if mode.get("budget") == 4 and event.index == len(prompts) - 1 and len(tokens) > 6:
            tokens[5] = (tokens[5] + 1) % 40
        yield event


if __name__ == "__main__":
    LLM.stream = stream
    serve(Session)
