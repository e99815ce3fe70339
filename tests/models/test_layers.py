"""Where the shared pieces round, and how they multiply."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftwood.kernels.torch_ops import rms_norm
from draftwood.models.layers import Matrix


def test_rms_norm_rounds_before_the_weight():
    """fp32 inside, cast, then the weight: as DeepSeek's and Qwen's code, to the bit."""
    generator = torch.Generator().manual_seed(0)
    x = 3 * torch.randn(64, 256, generator=generator).bfloat16()
    weight = torch.randn(256, generator=generator).bfloat16()
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    assert torch.equal(rms_norm(x, weight, 1e-5), weight * normed.bfloat16())
    assert not torch.equal(rms_norm(x, weight, 1e-5), (weight.float() * normed).bfloat16())


def test_rms_norm_keeps_double_precision():
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    want = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(rms_norm(x, torch.ones_like(x[0]), 1e-5), want, rtol=0, atol=1e-14)


def test_rows_apart_are_multiplied_at_once():
    """A product per request would read the weight once per request: eight times the head, in a batch of eight."""
    called = []

    class Listening(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func.overloadpacket)
            return func(*args, **kwargs or {})

    x, head = torch.randn(8, 5, 16)[:, 1:], Matrix(torch.randn(40, 16))
    with Listening():
        y = head(x)
    assert y.shape == (8, 4, 40)
    assert torch.ops.aten.mm in called
    assert torch.ops.aten.bmm not in called
    torch.testing.assert_close(y, x.contiguous() @ head.weight.T)
