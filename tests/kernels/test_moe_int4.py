"""moe_int4 beyond agreement with the reference: compressed-tensors as oracle, the ways a GPU takes, what is read."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from draftwood.kernels.case import CaseError, Mismatch, make_case
from draftwood.kernels.chip import Chip
from draftwood.kernels.compile_case import CAPABILITIES
from draftwood.kernels.moe.torch_impl import moe, route
from draftwood.kernels.moe_int4 import cases, ref, torch_impl, triton_impl, triton_kernels
from draftwood.kernels.run_case import run, to_numpy, torch_inputs, verify

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIXTEEN_BITS = (
    "bfloat16" if torch.cuda.is_available() else "float16"
)  # Triton's interpreter has no products of the former


def case(**axes):
    narrow = {"N": 24, "E": 16, "top_k": 4, "d": 96, "I": 64, "dtype": "float32"}
    return make_case("moe_int4", cases.DEFAULTS, **{**narrow, **axes})


def routing(inputs):
    return {k: inputs[k] for k in ("top_k", "n_group", "topk_group", "norm_topk_prob", "scaling")}


def test_the_layout_is_that_of_compressed_tensors():
    values = torch.randint(-8, 8, (5, 7, 96), generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    packed = pack_to_int32(values, 4)
    scale = torch.rand(5, 7, 3, generator=torch.Generator().manual_seed(1)).bfloat16()
    want = values.double() * scale.double().repeat_interleave(32, -1)
    np.testing.assert_array_equal(ref.dequantise(packed.numpy(), scale.float().numpy()), want.numpy())
    for dtype in (torch.float64, torch.float32):
        assert torch.equal(torch_impl.dequantise(packed, scale, dtype).double(), want)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(torch_impl.dequantise(packed, scale, dtype), want.to(dtype))
    wide = scale.float() * (1 + 2**-14)
    assert torch.equal(
        torch_impl.dequantise(packed, wide, torch.bfloat16),
        (values * wide.repeat_interleave(32, -1)).bfloat16(),
    )
    words = torch.from_numpy(cases.make(case())["down_packed"])
    again = [unpack_from_int32(w, 4, torch.Size((96, 64))) for w in words]
    assert torch.equal(
        torch_impl.dequantise(words, torch.ones(16, 96, 2), torch.float32), torch.stack(again).float()
    )


@pytest.mark.parametrize("dtype", cases.TOLERANCE)
def test_as_moe_on_unpacked_experts(dtype):
    c = case(dtype=dtype)
    tensors = torch_inputs(c, cases.make(c), "cpu")
    unpacked = [
        torch_impl.dequantise(tensors[f"{name}_packed"], tensors[f"{name}_scale"], torch.float64)
        for name in ("gate_up", "down")
    ]
    want = moe(tensors["x"], tensors["router"], tensors["bias"], *unpacked, **routing(tensors))
    torch.testing.assert_close(torch_impl.moe_int4(**tensors), want, rtol=0, atol=0)


@pytest.mark.parametrize("way", [torch_impl.pair_by_pair, torch_impl.all_experts])
@pytest.mark.parametrize("dtype", cases.TOLERANCE)
def test_ways_that_do_not_wait(way, dtype, monkeypatch):
    monkeypatch.setattr(torch_impl, "_AT_ONCE", 3 * 2 * 64 * 96)  # three pairs at a time
    for N in (1, 24):
        c = case(N=N, dtype=dtype)
        inputs = cases.make(c)
        t = torch_inputs(c, inputs, "cpu")
        chosen = route(t["x"], t["router"], t["bias"], **routing(t))
        quantised = [t[f"{name}_{part}"] for name in ("gate_up", "down") for part in ("packed", "scale")]
        cases.compare(c, to_numpy(way(t["x"], *chosen, *quantised)), ref.moe_int4(**inputs))
        t["x"][N // 2] = torch.nan
        spoilt = way(t["x"], *chosen, *quantised).isnan()
        assert spoilt.any(1).nonzero().flatten().tolist() == [N // 2]


def test_only_chosen_experts_are_read():
    c = case(N=2, top_k=2)
    inputs = cases.make(c)
    out = run(c, inputs, "torch")
    _, experts = route(*(torch.from_numpy(inputs[k]) for k in ("x", "router", "bias")), top_k=2)
    idle = np.setdiff1d(np.arange(16), experts)
    inputs["gate_up_scale"][idle], inputs["down_scale"][idle] = np.nan, np.inf
    np.testing.assert_array_equal(run(c, inputs, "torch"), out)


@pytest.mark.parametrize("impl", [torch_impl, triton_impl])
def test_router_and_scales_wider_than_the_activations(impl):
    c = case(N=5, E=4, top_k=2, dtype=SIXTEEN_BITS)
    inputs = cases.make(c)
    tensors = torch_inputs(c, inputs, DEVICE)
    for name in ("router", "gate_up_scale", "down_scale"):
        inputs[name] = inputs[name] * np.float32(1.001)
        tensors[name] = torch.from_numpy(inputs[name]).to(DEVICE)
    cases.compare(c, to_numpy(impl.moe_int4(**tensors)), ref.moe_int4(**inputs))


def multiply_add(a, b, c, dtype):
    a, b, c = (packed.view(dtype).double() for packed in (a, b, c))
    return (a * b + c).to(dtype).view(torch.int32)


PTX = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, by: ((a.long() & 0xFFFFFFFF) >> by).int(),
    "lop3.b32": lambda a, b, c, table: {0xEA: a & b | c}[int(table[0])],
    "fma.rn.bf16x2": partial(multiply_add, dtype=torch.bfloat16),
    "fma.rn.f16x2": partial(multiply_add, dtype=torch.float16),
}


@pytest.mark.parametrize(
    ("dtype", "asm"), [(torch.bfloat16, triton_kernels._BF16), (torch.float16, triton_kernels._FP16)]
)
def test_instructions_that_unpack(dtype, asm):
    """What Triton's interpreter can't run, by hand on every half of a word."""
    halves = torch.arange(-(2**15), 2**15).to(torch.int16)
    scale = torch.randn(2**16, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale[:100] = 0
    registers = {"$4": halves.view(torch.int32), "$5": scale.view(torch.int32)}
    for instruction in asm.value.strip("{ ;}").split("; ")[1:]:
        name, to, *given = instruction.replace(",", "").split()
        constants = {a: torch.full((2**15,), int(a, 0)).int() for a in given if a[0].isdigit()}
        registers[to] = PTX[name](*((registers | constants)[a] for a in given))
    for j in range(4):
        want = ((halves >> 4 * j & 15) - 8).float() * scale.float()
        assert torch.equal(registers[f"${j}"].view(dtype), want.to(dtype))


@pytest.mark.parametrize(("N", "n_sms", "parts"), [(1, 2, 2), (2, 100, 4)])
def test_sums_in_parts(N, n_sms, parts, monkeypatch):
    """Over 224 numbers in four steps, the last of them half empty."""
    chip = Chip(80, n_sms)
    monkeypatch.setattr(triton_impl, "chip_of", lambda _: chip)
    assert triton_impl._splits(chip, 4 * N, 224, 64) == parts
    verify(case(N=N, E=4, top_k=2, d=224), "triton", DEVICE)


def test_the_largest_tile(monkeypatch):
    monkeypatch.setattr(triton_impl, "choose_tile", lambda *_: triton_impl.Tile(64, 32, 128, 2, 3))
    verify(case(N=20, E=2, top_k=1, d=160, dtype=SIXTEEN_BITS), "triton", DEVICE)


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_chosen_tiles_hold_twice_the_share_of_an_expert(capability):
    chip = Chip(capability, 100)
    for N in (1, 8, 128, 192, 300, 600, 10_000):
        tile = triton_impl.choose_tile(chip, 2, 8 * N, 384)
        assert tile.block_m >= min(64, 16 * N / 384)
        assert 2 * tile.shared(2) <= chip.shared
        assert tile.num_warps == 2  # with 4, Hopper would read weights from registers while they change


def test_nan_in_a_token_or_in_experts_not_chosen_spoils_no_other():
    c = case(N=3, E=3, top_k=1)
    inputs = cases.make(c)
    inputs["bias"][1] = -9.0
    clean = run(c, inputs, "triton", DEVICE)
    inputs["x"][1] = inputs["gate_up_scale"][1] = inputs["down_scale"][1] = np.nan
    spoilt = run(c, inputs, "triton", DEVICE)
    np.testing.assert_array_equal(spoilt[::2], clean[::2])
    assert np.isnan(spoilt[1]).all()


def test_strides():
    c = case(N=2, E=2, top_k=1)
    inputs = torch_inputs(c, cases.make(c), DEVICE)
    want = triton_impl.moe_int4(**inputs)
    wide = torch.full((2, 200), torch.nan, device=DEVICE)
    wide[:, 40:136] = inputs["x"]
    assert torch.equal(triton_impl.moe_int4(**{**inputs, "x": wide[:, 40:136]}), want)
    with pytest.raises(ValueError, match="`down_scale`: must be contiguous"):
        triton_impl.moe_int4(**{**inputs, "down_scale": inputs["down_scale"].mT.contiguous().mT})


@pytest.mark.parametrize("mistake", ["nibbles swapped", "unsigned", "scales of other groups"])
@pytest.mark.parametrize("dtype", cases.TOLERANCE)
def test_tolerances_catch_mistakes(mistake, dtype):
    c = case(dtype=dtype)
    inputs = cases.make(c)
    want = run(c, inputs, "ref")
    words = inputs["gate_up_packed"]
    wrong = {
        "nibbles swapped": {"gate_up_packed": (words & 0x0F0F0F0F) << 4 | (words >> 4) & 0x0F0F0F0F},
        "unsigned": {"gate_up_packed": words ^ np.int32(-0x77777778)},
        "scales of other groups": {"down_scale": np.roll(inputs["down_scale"], 1, -1)},
    }[mistake]
    with pytest.raises(Mismatch):
        cases.compare(c, run(c, {**inputs, **wrong}, "torch"), want)


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("gate_up_packed", lambda a: a[0], "`gate_up_packed`: expected three axes"),
        ("gate_up_packed", lambda a: a[..., 1:], "`gate_up_scale`: expected"),
        ("down_scale", lambda a: a[..., 1:], r"`down_scale`: expected \(16, 96, 2\)"),
        ("bias", lambda a: a[1:], "`bias`: expected"),
        ("x", lambda a: a[:, :32], "`router`: expected"),
    ],
)
def test_check_names_the_input(field, change, message):
    inputs = cases.make(case())
    cases.check(case(), inputs)
    with pytest.raises(CaseError, match=message):
        cases.check(case(), {**inputs, field: change(inputs[field])})


def test_work_model_counts_words_and_scales():
    c = make_case("moe_int4", cases.DEFAULTS, N=1)
    numbers = 8 * 3 * 7168 * 256
    assert cases.bytes_moved(c) == numbers // 2 + 2 * (numbers // 32 + 2 * 7168 + 384 * 7168) + 4 * 384


@pytest.mark.parametrize("N", [1, 24])
def test_slices_of_the_experts_add_up(N):
    """Uneven slices, one of them chosen by no token at all."""
    c = case(N=N)
    inputs = cases.make(c)
    inputs["bias"][12:] = -9.0
    t = torch_inputs(c, inputs, "cpu")
    chosen = route(t["x"], t["router"], t["bias"], **routing(t))
    names = [f"{name}_{part}" for name in ("gate_up", "down") for part in ("packed", "scale")]
    sums = []
    for first, stop in ((0, 3), (3, 12), (12, 16)):
        matrices = {name: inputs[name][first:stop].copy() for name in names}
        part = run(c, inputs | matrices | {"first_expert": first}, "torch")
        cases.compare(c, part, ref.moe_int4(**inputs | matrices, first_expert=first))
        quantised = [torch.from_numpy(matrices[name]) for name in names]
        on_gpu = torch_impl.all_experts(t["x"], *chosen, *quantised, range(first, stop))
        cases.compare(c, to_numpy(on_gpu), part)
        if N == 1:
            cases.compare(c, run(c, inputs | matrices | {"first_expert": first}, "triton", DEVICE), part)
        sums.append(part)
    cases.compare(c, np.sum(sums, 0), ref.moe_int4(**inputs))
    assert not sums[2].any()
