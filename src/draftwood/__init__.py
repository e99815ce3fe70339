"""draftwood: lossless draft-tree speculative decoding for MLA models.

from draftwood import LLM, SamplingParams

for output in LLM().generate(["def fibonacci(n):"], SamplingParams(max_new_tokens=64)):
    print(output.text)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from draftwood.engine.llm import LLM
    from draftwood.engine.outputs import RequestOutput
    from draftwood.engine.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_HOME = {
    "LLM": "draftwood.engine.llm",
    "RequestOutput": "draftwood.engine.outputs",
    "SamplingParams": "draftwood.engine.sampling_params",
}


def __getattr__(name: str) -> Any:
    """Import the public classes on first use, so that `draftwood.tree` alone needs numpy only."""
    if name not in _HOME:
        raise AttributeError(f"module `draftwood` has no attribute `{name}`")
    return getattr(import_module(_HOME[name]), name)
