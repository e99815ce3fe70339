"""Compile Triton kernels without launching them, in whatever thread calls: so that many compile at once.

A kernel's function is run on CPU tensors of the right shapes with every launch cut short after compiling; the result is
in Triton's caches when the real launch comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_thread = threading.local()


def compile_only(function: Callable[..., Any], arguments: Mapping[str, Any]) -> float:
    """Compile what `function(**arguments)` would launch; nothing runs on the device. Returns the seconds taken.

    Launches must have been made interruptible by `interruptible_launches`. Raises what the function raises.
    """
    start = time.perf_counter()
    _thread.compiling = True
    try:
        function(**arguments)
    finally:
        _thread.compiling = False
    return time.perf_counter() - start


@contextmanager
def interruptible_launches() -> Iterator[None]:
    """Within this, `compile_only` works in any thread; other threads launch as ever."""
    from triton.runtime.jit import JITFunction

    original = JITFunction.run

    def run(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return original(self, *args, warmup=warmup or getattr(_thread, "compiling", False), **kwargs)

    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original
