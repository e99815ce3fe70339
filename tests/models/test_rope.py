"""Rotary positions: against transformers' frequencies, and in fp64 up to position 65536."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from draftwood.kernels.registry import load_kernels
from draftwood.kernels.torch_ops import rotate
from draftwood.models.errors import ModelError
from draftwood.models.rope import Rope, Rotary, take_rope

FILE = Path("config.json")
KIMI_K26 = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def read(**values):
    return take_rope(values, FILE)[0]


@pytest.mark.parametrize("dim", [6, 64, 128])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"beta_fast": 1.0},
        {"factor": 32.0, "mscale": None},
        {"mscale": 0.7},
        {"attention_factor": 1.1},
        {"truncate": False},
        {"truncate": False, "beta_fast": 1.0},
    ],
)
def test_yarn_equals_transformers(dim, changes):
    rope = read(rope_scaling=KIMI_K26 | changes, rope_theta=5e4)
    parameters = {k: v for k, v in (KIMI_K26 | changes).items() if k != "type"}
    config = Qwen3Config(head_dim=dim, rope_parameters=parameters | {"rope_type": "yarn", "rope_theta": 5e4})
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    torch.testing.assert_close(rope.inverse_frequencies(dim).float(), frequencies, rtol=1e-5, atol=0)
    assert rope.amplitude() == pytest.approx(amplitude)


def test_kimi_ramp_runs_from_pair_8_to_20():
    ratio = read(rope_scaling=KIMI_K26, rope_theta=5e4).inverse_frequencies(64) / read(
        rope_theta=5e4
    ).inverse_frequencies(64)
    torch.testing.assert_close(ratio[:9], torch.ones(9, dtype=torch.float64))
    torch.testing.assert_close(ratio[20:], torch.full((12,), 1 / 64, dtype=torch.float64))
    assert ((ratio[9:20] < 1) & (ratio[9:20] > 1 / 64)).all()


@pytest.mark.parametrize("scaling", [None, KIMI_K26])
def test_tables_to_position_65536(scaling):
    """fp32 angles would be off by up to 4e-3 there."""
    rope = read(rope_theta=5e4, rope_scaling=scaling)
    positions = torch.tensor([0, 1, 2, 4095, 4096, 32767, 65535, 65536], dtype=torch.int32)
    cos, sin = Rotary(rope, 64, rope.amplitude(), load_kernels("cpu"), torch.device("cpu"))(
        positions, torch.bfloat16
    )
    assert cos.shape == (8, 1, 64)
    assert cos.dtype == torch.float32
    frequencies = rope.inverse_frequencies(64).tolist()
    for row, p in enumerate(positions.tolist()):
        for j, f in enumerate(frequencies):
            want_cos, want_sin = math.cos(p * f), math.sin(p * f)
            assert cos[row, 0, j].item() == pytest.approx(want_cos, abs=1e-7)
            assert cos[row, 0, j + 32].item() == pytest.approx(want_cos, abs=1e-7)
            assert sin[row, 0, j].item() == pytest.approx(-want_sin, abs=1e-7)
            assert sin[row, 0, j + 32].item() == pytest.approx(want_sin, abs=1e-7)


def test_rotation_depends_on_the_distance_alone():
    rotary = Rotary(read(rope_theta=1e4), 16, 1.0, load_kernels("cpu"), torch.device("cpu"))
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def score(i, j):
        turn = [rotate(x, *rotary(torch.tensor([p]), torch.float64)) for x, p in ((q, i), (k, j))]
        return (turn[0] * turn[1]).sum().item()

    assert score(7, 3) == pytest.approx(score(60007, 60003), abs=1e-9)
    assert score(7, 3) != pytest.approx(score(7, 4), abs=1e-3)


def test_rotation_rounds_once():
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    rotary = Rotary(read(rope_theta=1e4), 8, 1.0, load_kernels("cpu"), torch.device("cpu"))
    table = rotary(torch.arange(5), torch.bfloat16)
    got = rotate(x, *table)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, rotate(x.float(), *table).bfloat16())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "`rope_theta` is missing"),
        ({"rope_theta": -1.0}, "`rope_theta` is -1.0"),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            '`rope_scaling.rope_type` is "linear"',
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            "needs `factor` and `original_max",
        ),
        ({"rope_theta": 1e4, "rope_scaling": {"factor": 2.0}}, "for yarn only"),
        (
            {"rope_theta": 1e4, "rope_scaling": KIMI_K26 | {"short_factor": [1.0]}},
            "`rope_scaling.short_factor` is unknown",
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": KIMI_K26 | {"rope_type": "default"}},
            "disagree: yarn and default",
        ),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 2e4}}, "disagree: 10000.0 and 20000.0"),
        ({"rope_theta": 1e4, "rope_scaling": "yarn"}, "`rope_scaling` must be an object"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "`rope_parameters.partial_rotary_factor` is 0.5",
        ),
        (
            {"rope_parameters": {"rope_theta": 1.0}, "rope_scaling": KIMI_K26},
            "`rope_parameters` and `rope_scaling` disagree",
        ),
    ],
)
def test_refusals(values, message):
    with pytest.raises(ModelError, match=message.replace("(", r"\(").replace(".", r"\.")):
        take_rope(values, FILE)


def test_an_attention_factor_goes_before_any_rule():
    rope = read(rope_theta=5e4, rope_scaling=KIMI_K26 | {"attention_factor": 1.25})
    assert rope.amplitude("ratio") == rope.amplitude("factor") == 1.25
    plain = read(rope_theta=5e4, rope_scaling=KIMI_K26)
    assert plain.amplitude("ratio") == 1.0
    assert plain.amplitude("factor") == pytest.approx(1.41589, abs=1e-5)
    assert isinstance(plain, Rope)
