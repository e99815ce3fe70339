"""Work beside other work on a GPU, most of which small launches leave idle."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


def beside(x: Tensor, work: Callable[[], Result]) -> Callable[[], Result]:
    """Do `work` on the device of x, beside what is launched until the returned function is called for its result.

    The work may read what is there by now and stays there until then. Only in a graph that is being recorded it becomes a
    branch; otherwise it is done at once, since events would take the host longer than the branch saves.
    """
    if x.is_cuda:
        branch = _branch(x.device)
        if torch.cuda.is_current_stream_capturing():
            branch.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(branch):
                later = work()
            done = branch.record_event()

            def join() -> Result:
                torch.cuda.current_stream(x.device).wait_event(done)
                return later

            return join
    result = work()
    return lambda: result


@cache
def _branch(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
