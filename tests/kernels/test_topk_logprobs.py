"""`topk_logprobs`: order, ties, holes, slices and the coupling with `sample`."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax

from draftwood.kernels.sample import SampleParams, sample
from draftwood.kernels.topk_logprobs import ref, topk_logprobs, torch_impl

RNG = np.random.default_rng(0)


def both(logits, k, **coupling):
    """The reference's result, after checking that torch gives the same."""
    lp, ids = topk_logprobs(logits, k, **coupling)
    tensors = {name: torch.from_numpy(value) for name, value in coupling.items()}
    lp2, ids2 = topk_logprobs(torch.from_numpy(logits), k, **tensors)
    np.testing.assert_array_equal(ids2.numpy(), ids)
    np.testing.assert_allclose(lp2.numpy(), lp, rtol=1e-6, atol=5e-6)
    assert (lp <= 0).all()
    assert (lp2 <= 0).all()
    assert (lp2[..., 1:] <= lp2[..., :-1]).all()
    return lp, ids


def test_is_the_log_softmax():
    logits = RNG.normal(0, 5, (2, 3, 500)).astype(np.float32)
    lp, ids = both(logits, 20)
    full = log_softmax(logits.astype(np.float64), -1)
    np.testing.assert_allclose(lp, -np.sort(-full, -1)[..., :20], rtol=1e-6)
    np.testing.assert_allclose(lp, np.take_along_axis(full, ids, -1), rtol=1e-6)


@pytest.mark.parametrize("k", [1, 3, 31, 64, 700])
def test_equal_values_go_to_the_smaller_id(k):
    logits = RNG.integers(-1, 2, (1, 4, 700)).astype(np.float32)
    _, ids = both(logits, k)
    for row, got in zip(logits[0], ids[0], strict=True):
        assert got.tolist() == sorted(range(700), key=lambda v: (-row[v], v))[:k]


def test_both_zeros_tie():
    logits = np.array([[[-0.0, 0.0, -0.0, -1.0]]], np.float32)
    assert both(logits, 4)[1].ravel().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ranked_by_the_value_not_by_the_rounded_logprob(dtype):
    step = np.finfo(dtype).eps
    logits = np.array([[[1.0, 1.0 + step, 1.0 + 2 * step] + [18.0] * 5]], dtype)
    lp, ids = both(logits, 8)
    assert ids.ravel().tolist() == [3, 4, 5, 6, 7, 2, 1, 0]
    assert lp[0, 0, 5] == lp[0, 0, 7]


def test_nan_and_infinities_are_no_candidates():
    nan, inf = np.nan, np.inf
    logits = np.array([[[nan, 1.0, inf, 2.0, -inf], [nan, -inf, inf, nan, nan], [0.0, nan, nan, nan, nan]]])
    lp, ids = both(logits.astype(np.float32), 4)
    assert ids[0].tolist() == [[3, 1, 0, 2], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert np.isfinite(lp[0]).sum(-1).tolist() == [2, 0, 1]
    assert lp[0, 2, 0] == 0.0
    np.testing.assert_allclose(np.exp(lp[0, 0, :2]).sum(), 1.0, rtol=1e-6)


@pytest.mark.parametrize("impl", ["ref", "torch"])
@pytest.mark.parametrize("k", [0, 6, -1])
def test_k_outside_the_vocabulary_raises(impl, k):
    logits = np.zeros((1, 1, 5), np.float32)
    with pytest.raises(ValueError, match=rf"k must be in 1\.\.5.*got {k}"):
        topk_logprobs(logits if impl == "ref" else torch.from_numpy(logits), k, impl=impl)


@pytest.mark.parametrize("given_", [("temperature",), ("seed", "position")])
def test_partly_given_coupling_raises(given_):
    values = {
        "temperature": np.ones(1),
        "seed": np.zeros(1, np.int64),
        "position": np.zeros((1, 1), np.int32),
    }
    missing = ", ".join(name for name in values if name not in given_)
    with pytest.raises(ValueError, match=f"missing: {missing}"):
        topk_logprobs(np.zeros((1, 1, 5), np.float32), 2, **{name: values[name] for name in given_})


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_slices_merge_to_the_whole(data):
    V = data.draw(st.integers(1, 60))
    cuts = sorted(data.draw(st.sets(st.integers(1, V), max_size=4)) | {0, V})
    k = data.draw(st.integers(1, V))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    logits = rng.integers(-3, 4, (2, 3, V)).astype(np.float32)
    logits[rng.random((2, 3, V)) < 0.3] = -np.inf
    coupling = {
        "temperature": np.array([0.0, 0.7], np.float32),
        "seed": np.array([1, -9]),
        "position": rng.integers(0, 1000, (2, 3)).astype(np.int32),
    }
    lp, ids = both(logits, k, **coupling)
    for module, convert in ((ref, np.asarray), (torch_impl, torch.from_numpy)):
        extra = {name: convert(value) for name, value in coupling.items()}
        parts = [module.partial(convert(logits[..., a:b]), k, a, **extra) for a, b in pairwise(cuts)]
        merged_lp, merged_ids = module.merge(parts, k)
        np.testing.assert_array_equal(np.asarray(merged_ids), ids)
        np.testing.assert_allclose(np.asarray(merged_lp), lp, rtol=1e-6, atol=5e-6)


def test_coupled_leader_is_what_sample_chooses():
    """A drafter whose logits equal the target's drafts exactly the tokens that will be chosen."""
    B, D, V = 3, 5, 1000
    logits = RNG.normal(0, 3, (B, D, V)).astype(np.float32)
    temperature = np.array([0.8, 0.0, 1.7], np.float32)
    seed, position = np.array([7, 8, -9]), np.arange(B * D).reshape(B, D).astype(np.int32)
    _, ids = both(logits, 4, temperature=temperature, seed=seed, position=position)
    off = SampleParams(
        temperature, np.zeros(B, np.int32), np.ones(B, np.float32), np.full(B, -np.inf, np.float32)
    )
    choice, status = sample(logits, off, seed, position)
    np.testing.assert_array_equal(ids[..., 0], choice)
    assert not status.any()


def test_rows_at_temperature_zero_do_not_see_the_noise():
    logits = RNG.normal(0, 1, (2, 2, 50)).astype(np.float32)
    mixed = both(
        logits,
        9,
        temperature=np.array([0.0, 1.0], np.float32),
        seed=np.array([3, 3]),
        position=np.ones((2, 2), np.int32),
    )
    plain = both(logits, 9)
    for got, want in zip(mixed, plain, strict=True):
        np.testing.assert_array_equal(got[0], want[0])
    assert (mixed[1][1] != plain[1][1]).any()
