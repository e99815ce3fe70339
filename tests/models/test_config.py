"""Target and drafter configs: the published numbers, every refusal by name."""

from __future__ import annotations

import json

import pytest

from draftwood.models.config import TargetConfig
from draftwood.models.drafter_config import DrafterConfig, LayerAttention
from draftwood.models.errors import ModelError
from support.kimi_configs import KIMI, KIMI_DRAFTER, KIMI_K26_DRAFTER, KIMI_TEXT
from support.tiny import DRAFTER, TARGET

FITTING = {"hidden_size": 24, "vocab_size": 40, "num_target_layers": 2}


def write(folder, values, name="config.json"):
    (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))
    return folder


def target(folder, **changes):
    return TargetConfig.from_folder(
        write(folder, {k: v for k, v in (TARGET | changes).items() if v != "absent"})
    )


def drafter(folder, **changes):
    values = DRAFTER | FITTING | changes
    return DrafterConfig.from_folder(write(folder, {k: v for k, v in values.items() if v != "absent"}))


def test_kimi_k26(tmp_path):
    c = TargetConfig.from_folder(write(tmp_path, KIMI))
    assert c.wrapped
    assert (c.latent_dim, c.hidden_size, c.n_routed_experts) == (576, 7168, 384)
    assert c.softmax_scale == pytest.approx(0.14467963, abs=1e-8)
    assert c.rope.amplitude() == 1.0
    assert c.eos_token_ids == (163585, 163586)  # both, though the file names one
    assert [c.is_moe(i) for i in (0, 1, 60)] == [False, True, True]
    assert c.inner_norm_eps == 1e-6
    assert c.choices == {"inner_norm_eps": "1e-06, the reference code's; `rms_norm_eps` is 1e-05"}
    for asked in (1e-5, "config"):
        other = TargetConfig.from_folder(tmp_path, inner_norm_eps=asked)
        assert (other.inner_norm_eps, other.choices) == (1e-5, {})
    with pytest.raises(ModelError, match="inner_norm_eps: expected reference, config or a number"):
        TargetConfig.from_folder(tmp_path, inner_norm_eps="rms")


def test_eos_is_the_union_of_what_the_files_say(tmp_path):
    assert target(tmp_path, eos_token_id=[5, 3]).eos_token_ids == (3, 5)
    assert target(tmp_path, eos_token_id=None).eos_token_ids == ()
    write(tmp_path, {"eos_token_id": [9, 3], "temperature": 0.6}, "generation_config.json")
    assert target(tmp_path, eos_token_id=5).eos_token_ids == (3, 5, 9)


def test_mtp_layers_under_either_name(tmp_path):
    assert target(tmp_path, num_mtp_layers=1).num_nextn_predict_layers == 1
    assert target(tmp_path, num_nextn_predict_layers=2).num_nextn_predict_layers == 2


@pytest.mark.parametrize(
    "key",
    """model_type vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank
    qk_nope_head_dim qk_rope_head_dim v_head_dim intermediate_size moe_intermediate_size first_k_dense_replace
    n_routed_experts n_shared_experts num_experts_per_tok n_group topk_group norm_topk_prob
    routed_scaling_factor rms_norm_eps rope_theta max_position_embeddings""".split(),  # noqa: SIM905
)
def test_no_number_of_the_target_is_guessed(tmp_path, key):
    with pytest.raises(ModelError, match=f"config.json: key `{key}` is missing"):
        target(tmp_path, **{key: "absent"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attn_logit_softcapping": 30.0}, "`attn_logit_softcapping` is unknown"),
        ({"rope": {}}, "`rope` is unknown"),
        ({"wrapped": True}, "`wrapped` is unknown"),
        ({"inner_norm_eps": 1e-5}, "`inner_norm_eps` is unknown"),
        ({"model_type": "deepseek_v2"}, '`model_type` is "deepseek_v2"'),
        ({"hidden_act": "gelu"}, '`hidden_act` is "gelu"; only "silu"'),
        ({"attention_bias": True}, "`attention_bias` is true; only false"),
        ({"scoring_func": "softmax"}, '`scoring_func` is "softmax"'),
        ({"topk_method": "greedy"}, '`topk_method` is "greedy"'),
        ({"moe_layer_freq": 2}, "`moe_layer_freq` is 2"),
        ({"rope_interleave": False}, "`rope_interleave` is false"),
        ({"quantization_config": {"quant_method": "fp8"}}, r"`quantization_config\.quant_method` is \"fp8\""),
        ({"hidden_size": "24"}, '`hidden_size` is "24"'),
        ({"hidden_size": 24.5}, "`hidden_size` is 24.5"),
        ({"hidden_size": True}, "`hidden_size` is true"),
        ({"hidden_size": 0}, "`hidden_size` is 0"),
        ({"qk_rope_head_dim": 5}, "`qk_rope_head_dim` is 5"),
        ({"num_key_value_heads": 1}, "`num_key_value_heads` must equal"),
        ({"n_group": 3}, "`n_group` must divide"),
        ({"topk_group": 2}, "`topk_group` not exceed"),
        ({"n_group": 4, "topk_group": 4}, "two experts at least"),
        ({"n_group": 2, "num_experts_per_tok": 3}, "`num_experts_per_tok` exceeds"),
        ({"eos_token_id": 40}, "token id 40"),
        ({"eos_token_id": "</s>"}, "`eos_token_id` must be a token id"),
    ],
)
def test_target_refusals_name_the_key(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message) as e:
        target(tmp_path, **changes)
    assert "config.json" in str(e.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_config": None}, "`text_config` must be an object"),
        ({"lora_config": {}}, "`lora_config` is unknown"),
        ({"tie_word_embeddings": True}, "`tie_word_embeddings` differs"),
        ({"quantization_config": {"quant_method": "nvfp4"}}, "`nvfp4` weights"),
        (
            {"text_config": KIMI_TEXT | {"quantization_config": {"quant_method": "compressed-tensors"}}},
            r"`quantization_config\.config_groups` must hold one group",
        ),
    ],
)
def test_wrapper_refusals_name_the_key(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        TargetConfig.from_folder(write(tmp_path, KIMI | changes))


def test_what_the_wrapper_alone_says_counts(tmp_path):
    text = {key: value for key, value in KIMI_TEXT.items() if key != "tie_word_embeddings"}
    for tied in (True, False):
        values = KIMI | {"tie_word_embeddings": tied, "text_config": text}
        assert TargetConfig.from_folder(write(tmp_path, values)).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object, got list"),
        ("\xff", "not valid JSON"),
        pytest.param("[" * 100_000, "not valid JSON", id="deep"),
        pytest.param('{"vocab_size": 1' + "0" * 5000 + "}", "not valid JSON", id="5000 digits"),
    ],
)
def test_broken_files(tmp_path, text, message):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    for config in (TargetConfig, DrafterConfig):
        with pytest.raises(ModelError, match=f"config.json: {message}"):
            config.from_folder(tmp_path)
    with pytest.raises(ModelError, match=r"nowhere.config\.json: no such file"):
        TargetConfig.from_folder(tmp_path / "nowhere")


def test_kimi_drafters(tmp_path):
    """K2.5 and K2.6 differ in how their configs spell YaRN, and so in the amplitude they get."""
    (tmp_path / "target").mkdir()
    kimi = TargetConfig.from_folder(write(tmp_path / "target", KIMI))
    for values, rule, amplitude, reason in (
        (KIMI_DRAFTER, "factor", 1.41589, "Kimi-K2.5-DFlash"),
        (KIMI_K26_DRAFTER, "ratio", 1.0, "the config's own numbers"),
    ):
        c = DrafterConfig.from_folder(write(tmp_path, values))
        c.check_fits(kimi)
        assert c.target_layer_ids == (1, 12, 24, 35, 47, 58)  # the default for 6 of 61
        assert c.layers == (LayerAttention(causal=False, window=None),) * 6
        assert c.yarn_rule[0] == rule
        assert c.rope.amplitude(rule) == pytest.approx(amplitude, abs=1e-5)
        assert c.choices()["yarn_rule"].startswith(f"{rule}, so that")
        assert reason in c.choices()["yarn_rule"]
        other = "ratio" if rule == "factor" else "factor"
        assert c.choices(other)["yarn_rule"].endswith("asked for")
        plain = c.rope.model_copy(update={"factor": None}).inverse_frequencies(c.head_dim)
        slower = (c.rope.inverse_frequencies(c.head_dim) < plain * 0.999999).nonzero()
        assert slower.min() == 18  # the ramp is 0 at pair 17 of this head width
    slides = {"layer_types": ["sliding_attention"] * 6, "sliding_window": 4096, "use_sliding_window": True}
    c = DrafterConfig.from_folder(write(tmp_path, KIMI_K26_DRAFTER | slides))
    assert c.layers == (LayerAttention(causal=True, window=4096),) * 6


@pytest.mark.parametrize(
    ("layers", "depth", "ids"), [(1, 36, (18,)), (5, 36, (1, 9, 17, 25, 33)), (2, 10, (1, 7))]
)
def test_default_layer_ids(tmp_path, layers, depth, ids):
    c = drafter(
        tmp_path, num_hidden_layers=layers, num_target_layers=depth, dflash_config={"mask_token_id": 2}
    )
    assert c.target_layer_ids == ids


def test_keys_in_either_place(tmp_path):
    nested = {"mask_token_id": 2, "target_layer_ids": [0, 1], "block_size": 6, "num_target_layers": 2}
    flat = drafter(tmp_path, dflash_config="absent", **nested)
    inside = drafter(tmp_path, block_size="absent", num_target_layers="absent", dflash_config=nested)
    both = drafter(tmp_path, dflash_config=nested)
    assert flat == inside == both


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
        ({"projector_type": "domino"}, '`projector_type` is "domino"'),
        ({"dflash_config": {"projector_type": "dspark"}}, '`projector_type` is "dspark"'),
        ({"dflash_config": {"conv_kernel_size": 2}}, "`conv_kernel_size` belongs to a DFlash2"),
        ({"dflash_config": {"selector_rank": 256}}, "`selector_rank` belongs to a DFlash2"),
        ({"use_swa": True}, "`use_swa` is true"),
        ({"attention_sink_bias": True}, "`attention_sink_bias` is true"),
        ({"sample_from_anchor": True}, "`sample_from_anchor` is true"),
        ({"output_multiplier": 0.5}, "`output_multiplier` is 0.5"),
        ({"final_logit_softcapping": 30.0}, "`final_logit_softcapping` is 30.0"),
        ({"attention_mode": "mla"}, '`attention_mode` is "mla"'),
        ({"attention_bias": True}, "`attention_bias` is true"),
        ({"dflash_config": {"noise": 1}}, "`noise` is unknown"),
        ({"dflash_config": [1]}, "`dflash_config` must be an object"),
        (
            {"block_size": 6, "dflash_config": {"block_size": 7}},
            "`block_size` is 6, but 7 in `dflash_config`",
        ),
        ({"block_size": 1}, "`block_size` is 1"),
        ({"block_size": "absent"}, "`block_size` is missing"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "`mask_token_id` is missing"),
        ({"dflash_config": {"mask_token_id": 40, "target_layer_ids": [0]}}, "`mask_token_id` 40"),
        ({"dflash_config": {"mask_token_id": 2, "target_layer_ids": []}}, "`target_layer_ids` is"),
        (
            {"dflash_config": {"mask_token_id": 2}, "num_target_layers": "absent"},
            "`target_layer_ids` is missing",
        ),
        ({"num_key_value_heads": 3}, "`num_key_value_heads` must divide"),
        ({"head_dim": 7}, "`head_dim` is 7"),
        ({"layer_types": ["full_attention"] * 2}, "`layer_types` has 2 entries for 1"),
        ({"layer_types": ["linear_attention"]}, "`layer_types.0` is"),
        ({"layer_types": ["sliding_attention"]}, "`sliding_window` is not set"),
        ({"use_sliding_window": True}, "`sliding_window` is not set"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": False},
            "`use_sliding_window` is",
        ),
        ({"file": "x"}, "`file` is unknown"),
    ],
)
def test_drafter_refusals_name_the_key(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message) as e:
        drafter(tmp_path, **changes)
    assert "config.json" in str(e.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, "`hidden_size` is 32.*`hidden_size` is 24"),
        ({"vocab_size": 41}, "`vocab_size` is 41"),
        ({"num_target_layers": 3}, "`num_target_layers` is 3.*`num_hidden_layers` is 2"),
        (
            {"dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 2]}},
            "`target_layer_ids` names layer 2",
        ),
    ],
)
def test_a_drafter_that_does_not_fit(tmp_path, changes, message):
    (tmp_path / "target").mkdir()
    with pytest.raises(ModelError, match=message):
        drafter(tmp_path, **changes).check_fits(target(tmp_path / "target"))
