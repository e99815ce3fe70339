"""Triton's interpreter where there is no GPU, and the same examples in every run of hypothesis.

The interpreter must be asked for before triton is first imported. Other examples: `pytest --hypothesis-seed=N`.
"""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure(config):
    if config.getoption("--hypothesis-profile") is None:
        slow = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}  # machines are
        settings.register_profile("same", derandomize=config.getoption("--hypothesis-seed") is None, **slow)
        settings.load_profile("same")
    if os.environ.get("TRITON_INTERPRET") == "1":
        _let_loop_bounds_be_arrays()


def _let_loop_bounds_be_arrays():
    """Triton 3.6 holds scalars as arrays of one element, which numpy 2.4 no longer turns into an `int`."""
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index_too(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_index_too
