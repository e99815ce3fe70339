"""Rounding of case inputs against torch's own casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood.kernels.rounding import PERIOD, normal, round_to

EDGES = [
    0.0,
    -0.0,
    1.0,
    1 + 2**-8,
    1 + 2**-7,
    1 + 3 * 2**-8,
    65504.0,
    65520.0,
    3.39e38,
    -3.4e38,
    1e-45,
    2**-126,
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rounds_as_torch_does(dtype):
    random = np.random.default_rng(0).standard_normal(100_000, dtype=np.float32)
    values = np.concatenate([random, random * 1e5, random * 1e-6, EDGES]).astype(np.float32)
    want = torch.from_numpy(values).to(getattr(torch, dtype)).float().numpy()
    got = round_to(values, dtype)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0x7FC00000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_nan_of_any_bits_stays_nan(bits, dtype):
    assert np.isnan(round_to(np.array([bits], np.uint32).view(np.float32), dtype)).all()


def test_leaves_its_input_and_shape_alone():
    values = np.full((2, 3), 1 + 2**-9, np.float32)
    assert round_to(values, "bfloat16").shape == (2, 3)
    assert (values == np.float32(1 + 2**-9)).all()
    assert round_to(np.float32(1.0), "bfloat16").shape == ()


def test_unknown_dtype():
    with pytest.raises(ValueError, match="unknown dtype `int8`"):
        round_to(np.zeros(1), "int8")


def test_long_draws_repeat_at_the_period():
    values = normal(np.random.default_rng(0), (PERIOD + 3,), "bfloat16")
    assert values.shape == (PERIOD + 3,)
    np.testing.assert_array_equal(values[PERIOD:], values[:3])
    assert abs(values[:1000].std() - 1) < 0.1
