"""The noise: Philox known answers, one value for one (seed, position, token) however it is asked for, Gumbel law."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftwood.kernels.noise import GUMBEL_MAX, GUMBEL_MIN, ref, torch_impl

FULL = 0xFFFFFFFF
KNOWN_ANSWERS = [  # Random123, philox4x32-10
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((FULL,) * 4, (FULL,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, answer):
    def arrays(words):
        return [np.array([w], np.int64) for w in words]

    def tensors(words):
        return [torch.tensor([w]) for w in words]

    assert [int(w[0]) for w in ref.philox4x32(arrays(counter), arrays(key))] == list(answer)
    assert [int(w[0]) for w in torch_impl.philox4x32(arrays(counter), arrays(key))] == list(answer)
    assert [int(w) for w in torch_impl.philox4x32(tensors(counter), tensors(key))] == list(answer)


def test_counter_and_key_layout():
    seed, position, token = 0x0123456789ABCDEF, 77, 4 * 1234 + 2
    words = ref.philox4x32(
        [np.array([w], np.int64) for w in (1234, 77, 0, 0)],
        [np.array([w], np.int64) for w in (0x89ABCDEF, 0x01234567)],
    )
    assert ref.random_bits(np.int64(seed), np.int32(position), np.int32(token)) == words[2][0]


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**31 - 1),
    offset=st.integers(0, 2**31 - 70),
    size=st.integers(1, 67),
)
@settings(max_examples=100, deadline=None)
def test_torch_equals_numpy_and_slices_equal_tokens(seed, position, offset, size):
    token = np.arange(offset, offset + size)
    bits = ref.random_bits(np.int64(seed), np.int64(position), token)
    s, p = torch.tensor(seed), torch.tensor(position)
    np.testing.assert_array_equal(torch_impl.random_bits(s, p, torch.from_numpy(token)).numpy(), bits)
    np.testing.assert_array_equal(torch_impl.slice_bits(s, p, offset, size).numpy(), bits)
    want = ref.gumbel(np.int64(seed), np.int64(position), token)
    np.testing.assert_array_equal(torch_impl.slice_gumbel(s, p, offset, size).numpy(), want)


def test_arguments_broadcast():
    seed, position, token = np.arange(3), np.arange(5)[:, None], np.arange(7)[:, None, None]
    want = ref.gumbel(seed, position, token)
    assert want.shape == (7, 5, 3)
    got = torch_impl.gumbel(*(torch.from_numpy(a) for a in (seed, position, token)))
    np.testing.assert_array_equal(got.numpy(), want)
    np.testing.assert_array_equal(want[6, 4, 2], ref.gumbel(np.int64(2), np.int64(4), np.int64(6)))


@pytest.mark.parametrize(
    "gumbel_of_bits", [ref.gumbel_of_bits, lambda b: torch_impl.gumbel_of_bits(torch.tensor(b))]
)
def test_extreme_bits_stay_within_the_published_bounds(gumbel_of_bits):
    high, low = (float(g) for g in gumbel_of_bits([0, 2**32 - 1]))
    assert GUMBEL_MAX - 0.01 < high <= GUMBEL_MAX
    assert GUMBEL_MIN <= low < GUMBEL_MIN + 0.02


def test_gumbel_law():
    sample = ref.gumbel(np.int64(-3), np.arange(200)[:, None], np.arange(500)).ravel()
    assert stats.kstest(sample, "gumbel_r").pvalue > 1e-3


@pytest.mark.parametrize("axis", ["seed", "seed high word", "position", "token"])
def test_neighbours_are_independent(axis):
    n = 20_000
    step = {"seed": (1, 0, 0), "seed high word": (1 << 32, 0, 0), "position": (0, 1, 0), "token": (0, 0, 1)}[
        axis
    ]
    index = np.arange(n)
    bits = ref.random_bits(*(np.int64(5) + s * index for s in step)) / 2.0**32
    assert stats.kstest(bits, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(bits[:-1], bits[1:])[0, 1]) < 4 / np.sqrt(n)


def test_remembered_rows_are_the_same_rows_and_few():
    row = torch_impl.slice_gumbel(torch.tensor(3), torch.tensor(5), 8, 100)
    recent = torch_impl.RecentRows(most_bytes=3 * row.nbytes)
    for positions in ([5, 5, 6], [7, 5], [8, 9, 10, 11, 12], [5, 12]):
        got = recent.rows([(3, position, 8, 100) for position in positions])
        want = torch_impl.gumbel(torch.tensor(3), torch.tensor(positions)[:, None], torch.arange(8, 108))
        assert torch.equal(torch.stack(got), want)
        assert len(recent) <= 3
    assert torch_impl.slice_gumbel(torch.tensor([3]), torch.zeros(0, 1), 0, 7).shape == (0, 1, 7)
