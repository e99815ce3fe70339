"""A mixture of experts shared by ranks: what they add up to, and that each has looked at every tensor or left it to another."""

from __future__ import annotations

import pytest
import torch

from draftwood.kernels.registry import load_kernels
from draftwood.models.config import TargetConfig
from draftwood.models.errors import ModelError
from draftwood.models.shard import Shard
from draftwood.models.target import MoE
from draftwood.models.weights import Take, Weights
from support.deepseek import make_model, save
from support.published import quantise_experts

SIZES = {"hidden_size": 64, "moe_intermediate_size": 96, "n_group": 2, "topk_group": 1}
PREFIX = "model.layers.1.mlp."


@pytest.fixture(scope="module", params=["bf16", "int4"])
def folder(request, tmp_path_factory):
    root = tmp_path_factory.mktemp("moe")
    save(make_model(**SIZES).bfloat16(), root / "plain")
    if request.param == "int4":
        quantise_experts(root / "plain", root / "int4", torch.bfloat16)
    return root / ("int4" if request.param == "int4" else "plain")


def share(folder, rank, size, expert_parallel):
    weights = Weights(
        folder,
        lambda name: name if name.startswith(PREFIX) else None,
        torch.float32,
        torch.device("cpu"),
        shard=Shard(rank, size),
    )
    config = TargetConfig.from_folder(folder)
    moe = MoE(config, load_kernels("cpu"), Take(weights, PREFIX), expert_parallel)
    weights.finish()
    return moe


@pytest.mark.parametrize(("size", "expert_parallel"), [(3, False), (2, True), (4, True)])
def test_shares_add_up(folder, size, expert_parallel):
    whole = share(folder, 0, 1, False)
    shares = [share(folder, rank, size, expert_parallel) for rank in range(size)]
    numbers = [
        sum(p.numel() for n, p in m.named_parameters() if n not in ("router", "bias"))
        for m in (whole, *shares)
    ]
    assert numbers[1:] == [numbers[0] // size] * size
    for rows in (1, 5, 40):
        x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(sum(m(x) for m in shares), whole(x), rtol=1e-5, atol=1e-5)
    for m in shares:
        m.pack()
    torch.testing.assert_close(sum(m(x[:5]) for m in shares), whole(x[:5]), rtol=1e-5, atol=1e-5)


def test_experts_that_do_not_divide_are_named(folder):
    with pytest.raises(ModelError, match="key `n_routed_experts`: 8 cannot be split evenly over 3 ranks"):
        share(folder, 0, 3, True)
