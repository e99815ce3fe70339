"""The published Kimi drafter's layout at reduced widths: 6 layers over a 61-layer target, block 8, 64 heads and 8 for K/V."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from draftwood import LLM, SamplingParams
from draftwood.models.config import TargetConfig
from draftwood.models.drafter_config import DrafterConfig
from support.dflash import PlainDFlash
from support.tiny import write_drafter, write_target

LAYER = [
    "input_layernorm",
    "post_attention_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
]
ROPE = {
    "type": "deepseek_yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
TARGET = {"num_hidden_layers": 61, "rms_norm_eps": 1e-5, "vocab_size": 40}
PROMPT = [5, 9, 17, 3, 3, 28, 31, 12, 6, 2, 19]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("kimi")
    target = write_target(root / "target", **TARGET)
    drafter = write_drafter(
        root / "drafter",
        TARGET,
        num_hidden_layers=6,
        num_attention_heads=64,
        num_key_value_heads=8,
        rms_norm_eps=1e-5,
        block_size=8,
        dflash_config={"mask_token_id": 38, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
        rope_parameters=ROPE,
    )
    config = json.loads((drafter / "config.json").read_text())
    del config["rope_theta"]  # it is in `rope_parameters`
    del config["dflash_config"]["target_layer_ids"]  # the default for 6 of 61
    (drafter / "config.json").write_text(json.dumps(config))
    return target, drafter


@pytest.fixture(scope="module")
def llms(folders):
    """By YaRN rule."""
    options = {"dtype": "float64", "device": "cpu", "budget": 12, "max_batch": 1, "inner_norm_eps": "config"}
    return {rule: LLM(*folders, yarn_rule=rule, **options) for rule in (None, "factor")}


def test_the_69_tensors(folders):
    names = {f"layers.{i}.{part}.weight" for i in range(6) for part in LAYER}
    names |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(names) == 69
    assert set(load_file(folders[1] / "model.safetensors")) == names


@pytest.mark.parametrize(("rule", "amplitude"), [(None, 1.0), ("factor", 1.4158883)])
def test_drafts_as_the_plain_drafter_does(folders, llms, rule, amplitude):
    """From the target's own features, through the cache that the engine filled."""
    llm, seen = llms[rule], []
    drafting = llm.drafting
    extend, forward = drafting.extend, drafting.drafter.forward

    def keep(features, page_table, start, count):
        seen.append(features[0, : int(count[0])].clone())
        extend(features, page_table, start, count)

    drafts = []

    def spy(anchor, context_len, *args, **options):
        hidden = forward(anchor, context_len, *args, **options)
        drafts.append((int(anchor), int(context_len), hidden[0].clone()))
        return hidden

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafting, "extend", keep)
        patch.setattr(drafting.drafter, "forward", spy)
        llm.generate(PROMPT, SamplingParams(max_new_tokens=6, ignore_eos=True))
    features = torch.cat(seen)
    assert features.shape[1] == 6 * 24
    plain = PlainDFlash(folders[1], amplitude)
    assert len(drafts) > 1
    for anchor, start, hidden in drafts:
        want = plain.hidden(features[:start], anchor, llm.target.embedding, lambda *_: True)
        torch.testing.assert_close(hidden, want, rtol=1e-5, atol=1e-5)


def test_the_rule_is_recorded_and_changes_no_text(llms):
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    texts = [llm.generate(PROMPT, params)[0].token_ids for llm in llms.values()]
    plain = llms[None].generate(PROMPT, params, mode="plain")[0].token_ids
    assert texts == [plain, plain]
    assert llms[None].choices == {
        "yarn_rule": "ratio, so that cos and sin are scaled by 1: the config's own numbers, "
        "as transformers and DeepSeek read them"
    }
    assert llms["factor"].choices == {
        "yarn_rule": "factor, so that cos and sin are scaled by 1.416: asked for"
    }
    assert llms[None].target.config.inner_norm_eps == 1e-5


def test_a_yarn_rule_needs_a_drafter(folders):
    with pytest.raises(ValueError, match="yarn_rule: given without a drafter"):
        LLM(folders[0], yarn_rule="ratio")


def test_taps_are_the_default_of_61_layers(folders):
    config = DrafterConfig.from_folder(folders[1])
    config.check_fits(TargetConfig.from_folder(folders[0]))
    assert config.target_layer_ids == (1, 12, 24, 35, 47, 58)
