"""Triton's own parts: the noise and its bounds, selection, slices, and the paths that data rarely takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from draftwood.kernels.case import make_case
from draftwood.kernels.noise import ref as noise_ref
from draftwood.kernels.noise.triton_impl import (
    RATE_ERROR,
    approximate_rate,
    gumbel,
    random_bits,
    tile_bits,
    upper_bound,
)
from draftwood.kernels.run_case import cases_of, run, to_numpy, torch_inputs, verify
from draftwood.kernels.sample import triton_impl as sample_impl
from draftwood.kernels.topk_logprobs import triton_impl as topk_impl
from draftwood.kernels.triton_line import owner, run_start
from draftwood.kernels.triton_ops import from_ordered, ordered, packed, packed_index, packed_value

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@triton.jit
def noise_kernel(seed, position, bits, tile, noise, rate, bound, first, N: tl.constexpr):
    i = tl.arange(0, N)
    s, p = tl.load(seed), tl.load(position)
    b = random_bits(s, p, first + i)
    tl.store(bits + i, b.to(tl.int64))
    tl.store(tile + i, tile_bits(s, p, first, N).to(tl.int64))
    tl.store(noise + i, gumbel(b))
    tl.store(rate + i, approximate_rate(b))
    tl.store(bound + i, upper_bound(b))


def test_noise_and_its_stand_ins():
    N, rng = 4096, np.random.default_rng(0)
    for _ in range(20):
        seed = rng.integers(-(2**63), 2**63, 1, dtype=np.int64)
        position = rng.integers(0, 2**31, 1).astype(np.int32)
        first = 4 * int(rng.integers(0, 2**28))
        dtypes = (torch.int64, torch.int64, torch.float32, torch.float32, torch.float32)
        out = [torch.empty(N, dtype=d, device=DEVICE) for d in dtypes]
        noise_kernel[(1,)](*(torch.from_numpy(a).to(DEVICE) for a in (seed, position)), *out, first, N)
        bits, tile, noise, rate, bound = (o.cpu().numpy() for o in out)
        want = noise_ref.random_bits(seed, position, np.arange(first, first + N))
        np.testing.assert_array_equal(bits, want)
        np.testing.assert_array_equal(tile, want)
        np.testing.assert_array_equal(noise, noise_ref.gumbel_of_bits(want))
        assert np.abs(-np.log(rate.astype(np.float64)) - noise).max() < RATE_ERROR.value
        assert (bound > noise - RATE_ERROR.value).all()
        v = want / 2.0**32
        assert (bound - noise < 0.35 * v**2 + RATE_ERROR.value)[v < 0.5].all()  # few tokens are in doubt


@triton.jit
def line_kernel(total, programs, program, start, at, holder, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(start + i, run_start(tl.load(program + i), tl.load(total), tl.load(programs)))
    tl.store(holder + i, owner(tl.load(at + i), tl.load(total), tl.load(programs)))


def test_runs_of_a_line_are_as_exact_integers_give_them():
    """Lines of up to 2^31 - 1 units, whose products with a program's index 32 bits would not hold."""
    N, rng = 4096, np.random.default_rng(0)
    for n in (1, 2, 5, 132, 264, 1023, 1024):
        for total in (1, n - 1, n, n + 1, 2**31 - 1, *rng.integers(1, 3000, 2), *rng.integers(1, 2**31, 2)):
            active, program = min(max(int(total), 1), n), np.arange(N) % (n + 1)
            starts = [int(total) * p // active for p in range(active + 1)]
            edges = np.array([*starts[:-1], *(s - 1 for s in starts[1:])])
            at = np.resize(edges[(edges >= 0) & (edges < max(total, 1))], N)
            given = [torch.tensor(a, dtype=torch.int32, device=DEVICE) for a in (total, n, program, at)]
            start, holder = (torch.empty(N, dtype=torch.int32, device=DEVICE) for _ in range(2))
            line_kernel[(1,)](*given[:3], start, given[3], holder, N)
            assert start.tolist() == [starts[min(p, active)] for p in program]
            if total > 0:
                assert holder.tolist() == (np.searchsorted(starts, at, side="right") - 1).tolist()


@triton.jit
def order_kernel(x, i, out, back, index, N: tl.constexpr):
    place = tl.arange(0, N)
    value = tl.load(x + place)
    key = packed(value, tl.load(i + place))
    tl.store(out + place, key)
    tl.store(back + place, packed_value(key))
    tl.store(index + place, packed_index(key))
    tl.store(x + place, from_ordered(ordered(value)))


def test_keys_are_in_the_order_of_values_then_ids():
    x = np.array(
        [np.inf, 3e38, 1.5, 1e-45, 0.0, -0.0, -1e-45, -2.0, -2.0, -3e38, -np.inf, -np.inf] + [7.0] * 4
    )
    i = np.array([5, 2**31 - 1, 0, 3, 1, 2, 9, 4, 6, 8, 0, 2**31 - 1, 10, 11, 12, 13], np.int32)
    x = torch.from_numpy(x.astype(np.float32)).to(DEVICE)
    given, ids = x.clone(), torch.from_numpy(i).to(DEVICE)
    key, back, index = (
        torch.empty(16, dtype=torch.int64, device=DEVICE),
        torch.empty_like(x),
        torch.empty_like(ids),
    )
    order_kernel[(1,)](x, ids, key, back, index, 16)
    assert torch.equal(x.view(torch.int32), given.view(torch.int32))
    assert torch.equal(back, given)
    assert torch.equal(index, ids)
    by_key = key.cpu().numpy().argsort()[::-1]
    np.testing.assert_array_equal(by_key, np.lexsort((i, -given.cpu().numpy().astype(np.float64))))


@pytest.mark.parametrize(("coupled", "values"), [(0, "ties"), (1, "holes")])
def test_topk_slices_merge_to_the_whole(coupled, values):
    cases = cases_of("topk_logprobs")
    case = make_case("topk_logprobs", cases.DEFAULTS, B=2, D=1, V=300, k=9, coupled=coupled, values=values)
    inputs = cases.make(case)
    given = torch_inputs(case, inputs, DEVICE)
    logits, k = given.pop("logits"), given.pop("k")
    cuts = [0, 1, 6, 130, 299, 300]
    parts = [topk_impl.partial(logits[..., a:b], k, a, **given) for a, b in pairwise(cuts)]
    cases.compare(case, to_numpy(topk_impl.merge(parts, k)), run(case, inputs, "ref"))


@pytest.mark.parametrize("coupled", [0, 1])
def test_topk_over_many_tiles(coupled):
    """Groups of groups; the best spread out, side by side (lists of more than one chunk), and too many that are equal."""
    cases, V = cases_of("topk_logprobs"), 20000
    case = make_case("topk_logprobs", cases.DEFAULTS, D=4, V=V, k=16, coupled=coupled)
    inputs = cases.make(case)
    rng = np.random.default_rng(0)
    inputs["logits"][0, 1, 3000:3600] += 20 + 8 * (rng.random(600) < 0.1)
    inputs["logits"][0, 2] = np.where(np.arange(V) % 7 == 3, 2.5, -1e4)
    inputs["logits"][0, 3] = np.where(np.arange(V) % 32 == 9, 1.0 + (np.arange(V) > V - 300), -1e4)
    cases.compare(case, run(case, inputs, "triton", DEVICE), run(case, inputs, "ref"))


def test_topk_when_noise_decides_nothing():
    """Far from zero, sums of logit and noise tie by the thousand: more than are ranked exactly at first."""
    rng = np.random.default_rng(0)
    logits = np.full((1, 1, 600), 3e7, np.float32) + rng.integers(0, 3, 600).astype(np.float32) * 2
    given = {
        "temperature": np.ones(1, np.float32),
        "seed": np.array([7]),
        "position": np.array([[3]], np.int32),
    }
    case = make_case("topk_logprobs", cases_of("topk_logprobs").DEFAULTS, D=1, V=600, k=5, coupled=1)
    inputs = {"logits": logits, "k": 5, **given}
    cases_of("topk_logprobs").compare(case, run(case, inputs, "triton", DEVICE), run(case, inputs, "ref"))


@pytest.mark.parametrize("values", ["normal", "ties", "holes"])
def test_sample_narrows_until_few_tokens_are_left(values, monkeypatch):
    """With room for few candidates, cuts need more passes; with ties there is no end to them but one value."""
    monkeypatch.setattr(sample_impl, "_CAPACITY", 4)
    axes = {"B": 2, "T": 1, "V": 331, "values": values}
    for rows in ("top_k", "top_p", "all"):
        verify(make_case("sample", cases_of("sample").DEFAULTS, rows=rows, **axes), "triton", DEVICE)


@pytest.mark.parametrize(
    ("extras", "values", "tree"), [("all", "ties", 1), ("mask", "normal", 0), ("none", "holes", 1)]
)
def test_sample_slices_merge_to_the_whole(extras, values, tree):
    cases = cases_of("sample")
    axes = {"B": 6, "T": 2, "V": 297, "rows": "mixed"}
    case = make_case("sample", cases.DEFAULTS, **axes, extras=extras, values=values, tree=tree)
    inputs = cases.make(case)
    given = torch_inputs(case, inputs, DEVICE)
    logits = given.pop("logits")
    cuts = [0, 1, 6, 130, 296, 297]
    parts = [sample_impl.partial(logits[..., a:b], **given, offset=a) for a, b in pairwise(cuts)]
    cases.compare(case, to_numpy(sample_impl.merge(parts, **given)), run(case, inputs, "ref"))


@pytest.mark.parametrize("rows", ["greedy", "plain"])
def test_sample_slices_without_filters_hand_over_winners_only(rows):
    cases = cases_of("sample")
    case = make_case(
        "sample", cases.DEFAULTS, B=3, T=2, V=97, rows=rows, extras="all", values="holes", tree=1
    )
    inputs = cases.make(case)
    unfiltered = replace(inputs["params"], unfiltered=np.ones(3, bool))
    given = torch_inputs(case, inputs | {"params": unfiltered}, DEVICE)
    logits = given.pop("logits")
    parts = [sample_impl.partial(logits[..., a:b], **given, offset=a) for a, b in pairwise([0, 40, 97])]
    assert all(part.x.numel() == 0 for part in parts)
    cases.compare(case, to_numpy(sample_impl.merge(parts, **given)), run(case, inputs, "ref"))


@pytest.mark.parametrize("top_p", [0.0, 0.05, 0.5])
def test_sample_when_top_p_keeps_none_of_the_best_by_noise(top_p):
    """Over nearly flat logits noise decides who is best, and few of those are kept: several rounds."""
    cases, rng = cases_of("sample"), np.random.default_rng(1)
    case = make_case("sample", cases.DEFAULTS, T=6, V=700, rows="top_p")
    inputs = cases.make(case)
    inputs["logits"] = rng.normal(0, 0.1, (1, 6, 700)).astype(np.float32)
    inputs["params"] = replace(inputs["params"], top_p=np.full(1, top_p, np.float32))
    cases.compare(case, run(case, inputs, "triton", DEVICE), run(case, inputs, "ref"))


@pytest.mark.parametrize("most", [64, 2])
def test_sample_weighs_the_tokens_before_the_best_chunk_by_chunk(most, monkeypatch):
    """A program to each chunk, which computes weights ahead, or several chunks to a program, some with nothing to add."""
    monkeypatch.setattr(sample_impl, "_MOST_PARTS", most)
    cases, chunk, share = cases_of("sample"), 4096, np.float32(0.9)
    case = make_case("sample", cases.DEFAULTS, T=4, V=2 * chunk + 900, rows="top_p")
    inputs = cases.make(case)
    inputs["logits"] /= 3.0
    inputs["logits"][:, 0, chunk : 2 * chunk] -= 60.0
    inputs["params"] = replace(inputs["params"], top_p=np.full(1, share), temperature=np.ones(1, np.float32))
    given = []
    launch = sample_impl._launch

    def recorded(kernel, grid, arguments):
        launch(kernel, grid, arguments)
        given.append(arguments)

    monkeypatch.setattr(sample_impl, "_launch", recorded)
    cases.compare(case, run(case, inputs, "triton", DEVICE), run(case, inputs, "ref"))
    assert given[-1]["EARLY"] == (most == 64)
    assert (given[-1]["tasks"] == 1).any()  # rows in doubt
    inputs["logits"] -= 200.0
    inputs["logits"][:, 0, chunk : 2 * chunk] = -np.inf  # nothing to add, however small weights are beside 1
    cases.compare(case, run(case, inputs, "triton", DEVICE), run(case, inputs, "ref"))
    weighed = given[-1]["before"].view(4, -1)[(given[-1]["tasks"] == 1).view(-1)]
    assert len(weighed)
    assert weighed.isfinite().all()


def test_sample_finds_the_cut_exactly_where_sums_leave_a_doubt():
    """The weight before the second of two equal tokens is exactly the share to keep, and a hair more and less."""
    cases = cases_of("sample")
    case = make_case("sample", cases.DEFAULTS, T=6, V=2, rows="top_p")
    inputs = cases.make(case)
    inputs["logits"] = np.zeros((1, 6, 2), np.float32)
    half = np.float32(0.5)
    for top_p in (half, np.nextafter(half, np.float32(0)), np.nextafter(half, np.float32(1))):
        inputs["params"] = replace(inputs["params"], top_p=np.full(1, top_p, np.float32))
        cases.compare(case, run(case, inputs, "triton", DEVICE), run(case, inputs, "ref"))
