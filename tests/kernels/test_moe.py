"""moe beyond agreement with the reference: independent oracles, ties, and independence of the batch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftwood.kernels.case import CaseError, Mismatch, make_case
from draftwood.kernels.moe import cases, ref, torch_impl
from draftwood.kernels.run_case import run, torch_inputs, verify

IMPLS = pytest.mark.parametrize("impl", ["ref", "torch"])
GROUPS = pytest.mark.parametrize(("n_group", "topk_group"), [(1, 1), (4, 2)])


def case(**axes):
    narrow = {"N": 24, "E": 16, "top_k": 4, "d": 32, "I": 20, "dtype": "float64"}
    return make_case("moe", cases.DEFAULTS, **{**narrow, **axes})


def route_of(impl, c, inputs):
    options = {k: inputs[k] for k in ("top_k", "n_group", "topk_group", "norm_topk_prob", "scaling")}
    if impl == "ref":
        return ref.route(inputs["x"], inputs["router"], inputs["bias"], **options)
    tensors = torch_inputs(c, inputs, "cpu")
    weights, experts = torch_impl.route(tensors["x"], tensors["router"], tensors["bias"], **options)
    return weights.numpy(), experts.numpy()


@IMPLS
@GROUPS
@pytest.mark.parametrize("norm", [0, 1])
def test_one_token_at_a_time_by_hand(norm, n_group, topk_group, impl):
    c = case(n_group=n_group, topk_group=topk_group, norm=norm)
    inputs = cases.make(c)
    out, size = run(c, inputs, impl), 16 // n_group
    for n, x in enumerate(inputs["x"]):
        score = [1 / (1 + math.exp(-float(row @ x))) for row in inputs["router"]]
        biased = [s + float(b) for s, b in zip(score, inputs["bias"], strict=True)]
        group = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(n_group)]
        kept = sorted(range(n_group), key=lambda g: (-group[g], g))[:topk_group]
        chosen = sorted((e for e in range(16) if e // size in kept), key=lambda e: (-biased[e], e))[:4]
        total = sum(score[e] for e in chosen) + 1e-20 if norm else 1.0
        want = np.zeros(32)
        for e in chosen:
            gate, up = inputs["gate_up"][e, :20] @ x, inputs["gate_up"][e, 20:] @ x
            want += score[e] / total * 2.827 * (inputs["down"][e] @ (gate / (1 + np.exp(-gate)) * up))
        np.testing.assert_allclose(out[n], want, rtol=1e-11, atol=1e-13)


@IMPLS
@GROUPS
def test_equals_transformers(n_group, topk_group, impl):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    c = case(n_group=n_group, topk_group=topk_group, dtype="float32")
    inputs = cases.make(c)
    tensors = torch_inputs(c, inputs, "cpu")
    oracle = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=32,
            moe_intermediate_size=20,
            n_routed_experts=16,
            n_shared_experts=1,
            num_experts_per_tok=4,
            n_group=n_group,
            topk_group=topk_group,
            routed_scaling_factor=2.827,
            norm_topk_prob=True,
        )
    )
    weights = {
        "gate.weight": tensors["router"],
        "gate.e_score_correction_bias": tensors["bias"],
        "experts.gate_up_proj": tensors["gate_up"],
        "experts.down_proj": tensors["down"],
    }
    shared = {
        k: torch.zeros_like(v) for k, v in oracle.state_dict().items() if k.startswith("shared_experts")
    }
    oracle.load_state_dict({**weights, **shared})
    with torch.no_grad():
        want = oracle(tensors["x"][None])[0].numpy()
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(run(c, inputs, impl), want, rtol=1e-5, atol=1e-5)


@IMPLS
@GROUPS
def test_ties_go_to_the_smaller_index(n_group, topk_group, impl):
    c = case(N=32, n_group=n_group, topk_group=topk_group, ties=1, dtype="float32")
    inputs = cases.make(c)
    weights, experts = route_of(impl, c, inputs)
    tied = np.diff(weights) == 0
    assert tied.mean() > 0.2
    assert (np.diff(experts)[tied] > 0).all()
    flat = {**inputs, "router": np.zeros_like(inputs["router"])}  # all experts and groups equal
    np.testing.assert_array_equal(route_of(impl, c, flat)[1], np.tile(np.arange(4), (32, 1)))


@GROUPS
def test_routes_agree(n_group, topk_group):
    for dtype in cases.TOLERANCE:
        c = case(N=100, n_group=n_group, topk_group=topk_group, dtype=dtype)
        inputs = cases.make(c)
        weights, experts = route_of("torch", c, inputs)
        want_weights, want_experts = route_of("ref", c, inputs)
        np.testing.assert_array_equal(experts, want_experts)
        np.testing.assert_allclose(weights, want_weights, rtol=1e-5)
        assert weights.dtype == (np.float64 if dtype == "float64" else np.float32)
        assert experts.dtype == np.int32
        np.testing.assert_allclose(weights.sum(1), 2.827, rtol=1e-5)


@IMPLS
def test_bias_selects_and_does_not_weigh(impl):
    c = case(N=8)
    inputs = cases.make(c)
    inputs["bias"] = np.where(np.arange(16) < 4, 100, 0).astype(np.float32)
    weights, experts = route_of(impl, c, inputs)
    assert (np.sort(experts) == np.arange(4)).all()
    score = 1 / (1 + np.exp(-inputs["x"] @ inputs["router"].T))
    chosen = np.take_along_axis(score, experts, 1)
    np.testing.assert_allclose(weights, 2.827 * chosen / chosen.sum(1, keepdims=True), rtol=1e-6)


@IMPLS
def test_scores_that_underflow_give_finite_weights(impl):
    c = case(N=3, dtype="float32")
    inputs = cases.make(c)
    inputs["x"], inputs["router"] = np.ones((3, 32), np.float32), np.full((16, 32), -100, np.float32)
    inputs["bias"][:] = 0
    with np.errstate(over="ignore"):
        weights, experts = route_of(impl, c, inputs)
    assert (weights == 0).all()
    assert (experts == np.arange(4)).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_does_not_depend_on_the_batch(dtype):
    c = case(N=40, E=8, top_k=2, dtype=dtype)
    inputs = cases.make(c)
    out = run(c, inputs, "torch")
    np.testing.assert_array_equal(run(c, inputs, "torch"), out)
    for n in (0, 7, 39):
        alone = run(c, {**inputs, "x": inputs["x"][n : n + 1]}, "torch")
        cases.compare(c, alone, out[n : n + 1])
    order = c.rng.permutation(40)
    cases.compare(c, run(c, {**inputs, "x": inputs["x"][order]}, "torch"), out[order])


def test_nan_stays_in_its_token():
    c = case(N=12)
    inputs = cases.make(c)
    out = run(c, inputs, "torch")
    inputs["x"][5] = np.nan
    with_nan = run(c, inputs, "torch")
    assert np.isnan(with_nan[5]).all()
    others = np.arange(12) != 5
    np.testing.assert_allclose(with_nan[others], out[others], rtol=1e-12)


def test_only_chosen_experts_are_read():
    c = case(N=2, E=16, top_k=2)
    inputs = cases.make(c)
    out = run(c, inputs, "torch")
    idle = np.setdiff1d(np.arange(16), route_of("ref", c, inputs)[1])
    inputs["gate_up"][idle], inputs["down"][idle] = np.nan, np.inf
    np.testing.assert_array_equal(run(c, inputs, "torch"), out)


def test_a_router_wider_than_the_activations():
    c = case(N=6, dtype="bfloat16")
    inputs = cases.make(c)
    tensors = torch_inputs(c, inputs, "cpu")
    inputs["router"] = inputs["router"] * np.float32(1.0001)
    tensors["router"] = torch.from_numpy(inputs["router"])
    cases.compare(c, torch_impl.moe(**tensors).float().numpy(), ref.moe(**inputs))


def test_inputs_are_not_written():
    tensors = torch_inputs(case(), cases.make(case(n_group=4, topk_group=2)), "cpu")
    before = {k: v.clone() for k, v in tensors.items() if isinstance(v, torch.Tensor)}
    torch_impl.moe(**tensors)
    for name, tensor in before.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", cases.TOLERANCE)
@pytest.mark.parametrize("mistake", ["unbiased", "gate and up swapped", "scaling", "one expert less"])
def test_tolerances_catch_mistakes(mistake, dtype):
    c = case(dtype=dtype)
    inputs = cases.make(c)
    want = run(c, inputs, "ref")
    wrong = {
        "unbiased": {"bias": np.zeros_like(inputs["bias"])},
        "gate and up swapped": {"gate_up": np.roll(inputs["gate_up"], 20, axis=1)},
        "scaling": {"scaling": 2.9},
        "one expert less": {"top_k": 3},
    }[mistake]
    with pytest.raises(Mismatch):
        cases.compare(c, run(c, {**inputs, **wrong}, "torch"), want)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("x", lambda a: a[:0], "`x`: expected"),
        ("bias", lambda a: np.append(a[:-1], np.float32(np.nan)), "`bias`: must be finite.*15"),
        ("gate_up", lambda a: a[:, 1:], "`gate_up`: expected"),
        ("down", lambda a: a[1:], "`down`: expected"),
        ("n_group", lambda _: 5, "`n_group`: must divide 16"),
        ("n_group", lambda _: 16, "`n_group`: a group needs two"),
        ("topk_group", lambda _: 5, "`topk_group`"),
        ("top_k", lambda _: 17, "`top_k`"),
    ],
)
def test_check_names_the_input(field, change, message):
    inputs = cases.make(case())
    cases.check(case(), inputs)
    with pytest.raises(CaseError, match=message):
        cases.check(case(), {**inputs, field: change(inputs[field])})


@settings(max_examples=30, deadline=None)
@given(
    N=st.integers(1, 40),
    groups=st.sampled_from([(1, 1, 5, 5), (1, 1, 8, 2), (2, 1, 8, 3), (4, 3, 12, 4), (8, 8, 64, 8)]),
    d=st.integers(1, 40),
    I=st.integers(1, 20),
    seed=st.integers(0, 10_000),
    dtype=st.sampled_from(["float32", "float64", "bfloat16"]),
)
def test_any_case(N, groups, d, I, seed, dtype):
    n_group, topk_group, E, top_k = groups
    axes = {"N": N, "E": E, "top_k": top_k, "d": d, "I": I, "n_group": n_group, "topk_group": topk_group}
    verify(make_case("moe", cases.DEFAULTS, seed=seed, dtype=dtype, **axes), "torch")


def test_work_model_counts_chosen_experts_once():
    c = make_case("moe", cases.DEFAULTS, N=1)
    assert cases.flops(c) == 2 * 2048 * 64 + 8 * 2 * 3 * 2048 * 1408
    assert cases.bytes_moved(c) == 2 * (2 * 2048 + 64 * 2048 + 8 * 3 * 2048 * 1408) + 4 * 64
    many = case(dtype="float32")
    distinct = len(np.unique(route_of("ref", many, cases.make(many))[1]))
    assert 4 < distinct <= 16
    assert cases.bytes_moved(many) == 4 * (2 * 24 * 32 + 16 * 32 + distinct * 3 * 32 * 20 + 16)


@pytest.mark.parametrize("impl", ["ref", "torch", "triton"])
@pytest.mark.parametrize("N", [1, 24])
def test_slices_of_the_experts_add_up(impl, N):
    """Uneven slices, one of them chosen by no token at all."""
    c = case(N=N, I=32, dtype="float32")
    inputs = cases.make(c)
    inputs["bias"][12:] = -9.0
    whole = ref.moe(**inputs)
    parts = []
    for first, stop in ((0, 3), (3, 12), (12, 16)):
        matrices = {name: inputs[name][first:stop].copy() for name in ("gate_up", "down")}
        part = run(c, inputs | matrices | {"first_expert": first}, impl)
        cases.compare(c, part, ref.moe(**inputs | matrices, first_expert=first))
        parts.append(part)
    cases.compare(c, np.sum(parts, 0), whole)
    assert not parts[2].any()
    assert parts[0].any()
