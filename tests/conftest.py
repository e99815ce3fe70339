"""Without a GPU, Triton kernels run in Triton's interpreter; it must be told before triton is first imported."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
