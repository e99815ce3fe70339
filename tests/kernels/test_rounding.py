"""Rounding of case inputs against torch's own casts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from draftwood.kernels.rounding import PERIOD, normal, round_to
from draftwood.kernels.run_case import to_torch

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


def test_long_draws_repeat_at_the_period_and_take_assignments():
    values = normal(np.random.default_rng(0), (3, PERIOD), "bfloat16")
    assert values.shape == (3, PERIOD)
    values[np.array([False, True, False])] = np.full(PERIOD, 7, np.float32)
    array = np.asarray(values)
    np.testing.assert_array_equal(array[2], array[0])
    assert (array[1] == 7).all()
    assert abs(array[0, :1000].std() - 1) < 0.1
    tensor = to_torch(values, "cpu", "bfloat16")
    assert tensor.dtype == torch.bfloat16
    np.testing.assert_array_equal(tensor.float().numpy(), array)
