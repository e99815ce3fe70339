"""rotary in torch, each row by itself."""

from __future__ import annotations

from functools import partial

import torch

from draftwood.kernels.by_row import by_row
from draftwood.kernels.rotary import torch_impl

rotary = partial(torch_impl.rotary, cos=partial(by_row, torch.cos), sin=partial(by_row, torch.sin))
