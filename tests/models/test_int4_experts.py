"""INT4 checkpoints: the whole target against `transformers` with unpacked experts, and what is wrong with a file by name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.kernels.registry import load_kernels
from draftwood.models.errors import ModelError
from draftwood.models.int4_experts import Int4Experts, stack_int4
from draftwood.models.layers import pack
from draftwood.models.shard import WHOLE, Shard
from draftwood.models.target import Target
from draftwood.models.weights import Take, Weights
from support.deepseek import YARN, Paged, make_model, save
from support.published import quantise_experts

SIZES = {
    "hidden_size": 64,
    "moe_intermediate_size": 96,
    "q_lora_rank": 12,
    "rope": YARN,
    "initializer_range": 0.15,
}
PROMPT = torch.randint(0, 61, (40,), generator=torch.Generator().manual_seed(1)).tolist()
EXPERT = "model.layers.1.mlp.experts.3."


@pytest.fixture(scope="module")
def oracle():
    return make_model(**SIZES)


@pytest.fixture(scope="module")
def folder(oracle, tmp_path_factory):
    """With experts packed by compressed-tensors; the oracle then has what they unpack to."""
    root = tmp_path_factory.mktemp("int4")
    unpacked = quantise_experts(save(oracle, root / "plain"), root / "int4")
    experts = [layer.mlp.experts for layer in oracle.model.layers[1:]]
    with torch.no_grad():
        for i, layer in enumerate(experts, 1):
            for e in range(8):
                gate, up, down = (
                    unpacked[f"model.layers.{i}.mlp.experts.{e}.{name}_proj.weight"]
                    for name in ("gate", "up", "down")
                )
                layer.gate_up_proj[e], layer.down_proj[e] = torch.cat((gate, up)), down
    return root / "int4"


def load(folder, dtype=torch.float32, **options):
    return Target.from_folder(folder, dtype=dtype, device="cpu", kernels=load_kernels("cpu"), **options)


def test_as_transformers_with_unpacked_experts(oracle, folder):
    with torch.inference_mode():
        want = oracle(torch.tensor([PROMPT])).logits[0]
    target = load(folder)
    pack(target)
    state = Paged(target, 16)
    got = torch.cat(
        [target.logits(state.feed(part).hidden[0]) for part in (PROMPT[:30], PROMPT[30:31], PROMPT[31:])]
    )
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert want.std() > 0.3
    rounded = load(folder, torch.bfloat16)
    logits = rounded.logits(Paged(rounded, 16).feed(PROMPT).hidden[0])
    assert torch.nn.functional.cosine_similarity(logits, want, dim=-1).median() > 0.995


def test_words_and_scales_stay_as_stored(folder):
    stored = load_file(folder / "model.safetensors")
    moe = load(folder, torch.bfloat16).layers[1].mlp
    gate, down = (EXPERT + f"{name}_proj.weight_packed" for name in ("gate", "down"))
    assert torch.equal(moe.gate_up_packed[3, :96], stored[gate])
    assert torch.equal(moe.down_packed[3], stored[down])
    assert moe.down_scale.dtype == torch.bfloat16


def test_fp32_scales(oracle, folder, tmp_path):
    quantise_experts(folder.parent / "plain", tmp_path / "f32", torch.float32)
    assert load(tmp_path / "f32", torch.bfloat16).layers[1].mlp.down_scale.dtype == torch.float32


def stacked(folder, shard):
    weights = Weights(folder, str, torch.float32, torch.device("cpu"), shard=shard)
    return stack_int4(8, 64, 96, Take(weights, "model.layers.2.mlp.experts."))


def test_ranks_have_columns_of_every_expert(folder):
    want, ranks = stacked(folder, WHOLE), [stacked(folder, Shard(rank, 3)) for rank in range(3)]
    for name in Int4Experts._fields:
        parts = [getattr(rank, name) for rank in ranks]
        if name.startswith("down"):
            got = torch.cat(parts, 2)
        else:
            got = torch.cat([part.chunk(2, 1)[i] for i in (0, 1) for part in parts], 1)
        assert torch.equal(got, getattr(want, name))
    with pytest.raises(ModelError, match=r"`moe_intermediate_size`: 96 cannot be split .* over 5 ranks"):
        stacked(folder, Shard(0, 5))
    with pytest.raises(ModelError, match=r"columns of tensor `.*down_proj\.weight_scale`: 3 cannot be split"):
        stacked(folder, Shard(0, 6))


def changed(name, change):
    return lambda t: t | {EXPERT + name: change(t[EXPERT + name])}


def without(name):
    return lambda t: {k: v for k, v in t.items() if k != EXPERT + name}


WRONG = {
    "scale of another type": (
        changed("up_proj.weight_scale", lambda s: s.half()),
        r"model\.safetensors: tensor `.*experts\.3\.up_proj\.weight_scale` is F16, expected BF16",
    ),
    "words of another type": (
        changed("up_proj.weight_packed", lambda w: w.long()),
        r"`.*experts\.3\.up_proj\.weight_packed` is I64, expected I32",
    ),
    "words of another shape": (
        changed("down_proj.weight_packed", lambda w: w[:, 1:].contiguous()),
        r"`.*experts\.3\.down_proj\.weight_packed` has shape \[64, 11\], expected \[64, 12\]",
    ),
    "groups of another size": (
        changed("gate_proj.weight_scale", lambda s: s[:, ::2].contiguous()),
        r"`.*experts\.3\.gate_proj\.weight_scale` has shape \[96, 1\], expected \[96, 2\]",
    ),
    "another shape said": (
        changed("down_proj.weight_shape", lambda s: s.flip(0)),
        r"`.*experts\.3\.down_proj\.weight_shape` says \[96, 64\], expected \[64, 96\]",
    ),
    "no scale": (
        without("down_proj.weight_scale"),
        r"tensor `.*experts\.3\.down_proj\.weight_scale` .*is missing",
    ),
    "an expert that is not packed": (
        lambda t: (
            {k: v for k, v in t.items() if not k.startswith(EXPERT + "up_proj")}
            | {EXPERT + "up_proj.weight": torch.ones(96, 64)}
        ),
        r"`.*experts\.3\.up_proj\.weight` is not packed, but by `quantization_config` .* is",
    ),
    "a packed projection": (
        lambda t: t | {"model.layers.0.mlp.up_proj.weight_packed": torch.ones(2, dtype=torch.int32)},
        r"`model\.layers\.0\.mlp\.up_proj\.weight_packed` is packed, but by .* is not",
    ),
    "zero points": (
        lambda t: t | {EXPERT + "up_proj.weight_zero_point": torch.ones(2, dtype=torch.int32)},
        r"`.*up_proj\.weight_zero_point` has no place",
    ),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_tensor_is_named(folder, tmp_path, fault):
    change, message = WRONG[fault]
    save_file(change(load_file(folder / "model.safetensors")), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ModelError, match=message):
        load(tmp_path)


def test_packed_experts_without_a_word_in_the_config(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"weight_packed` is packed, but by `quantization_config` .* is not"):
        load(tmp_path)
