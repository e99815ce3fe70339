"""mla_inputs in torch, each row by itself."""

from __future__ import annotations

from functools import partial

from draftwood.kernels.mla_inputs import torch_impl
from draftwood.kernels.torch_ops import fixed_rms_norm, fixed_rotate

mla_inputs = partial(torch_impl.mla_inputs, norm=fixed_rms_norm, turn=fixed_rotate)
