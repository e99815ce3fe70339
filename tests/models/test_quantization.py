"""What `quantization_config` may say: the published blocks, compressed-tensors' own reading of them, refusals by name."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from compressed_tensors.utils.match import is_match

from draftwood.models.config import TargetConfig
from draftwood.models.errors import ModelError
from support.published import INT4
from support.tiny import TARGET

TEXT = TARGET | {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 3}
THINKING = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
]


def block_with(place="", **changes):
    """The published block with keys replaced, or taken out (by "absent"), at a dotted place."""
    block = copy.deepcopy(INT4)
    at = block
    for key in filter(None, place.split(".")):
        at = at[key]
    at.update(changes)
    for key in [k for k, v in changes.items() if v == "absent"]:
        del at[key]
    return block


def read(folder, block, wrapped=False, outside=None):
    text = TEXT | ({} if block is None else {"quantization_config": block})
    config = {"model_type": "kimi_k25", "text_config": text} if wrapped else text
    if outside is not None:
        config["quantization_config"] = outside
    (folder / "config.json").write_text(json.dumps(config))
    return TargetConfig.from_folder(folder)


@pytest.mark.parametrize("wrapped", [False, True])
def test_as_compressed_tensors_reads_it(tmp_path, wrapped):
    """K2.6's block around and without the wrapper, and K2-Thinking's list, which is of the text model alone."""
    linear, other = torch.nn.Linear(1, 1), torch.nn.Module()
    for block in (INT4, block_with(ignore=THINKING)):
        config = read(tmp_path, block, wrapped)
        for module in config._modules():
            is_linear = "proj" in module or module == "lm_head"
            want = is_match(module, linear if is_linear else other, ["Linear"], block["ignore"])
            assert config.is_packed(module) == want == (".mlp.experts." in module)


def test_names_with_and_without_the_wrapper(tmp_path):
    ignore = [f"language_model.{name}" if name == "lm_head" else name for name in THINKING]
    assert not read(tmp_path, block_with(ignore=ignore), wrapped=True).is_packed("lm_head")
    with pytest.raises(ModelError, match="`lm_head` is packed"):
        read(tmp_path, block_with(ignore=ignore))
    targets = ["re:.*experts\\.\\d+\\..*"]
    config = read(tmp_path, block_with("config_groups.group_0", targets=targets))
    assert config.is_packed("model.layers.2.mlp.experts.1.up_proj")


def test_where_it_may_stand(tmp_path):
    assert read(tmp_path, None).quantization is None
    assert not read(tmp_path, None).is_packed("model.layers.2.mlp.experts.1.up_proj")
    inside = read(tmp_path, INT4, wrapped=True)
    assert inside.quantization is not None
    assert read(tmp_path, None, wrapped=True, outside=INT4) == inside
    assert read(tmp_path, INT4, wrapped=True, outside=INT4) == inside
    with pytest.raises(
        ModelError, match="`quantization_config` differs between the top level and `text_config`"
    ):
        read(tmp_path, INT4, wrapped=True, outside=block_with(ignore=[]))


def test_what_says_nothing_about_the_maths(tmp_path):
    block = block_with(version="0.12", global_compression_ratio=1.5, sparsity_config={}, transform_config={})
    block["config_groups"]["group_0"]["weights"] |= {"observer_kwargs": {"a": 1}, "zp_dtype": None}
    assert read(tmp_path, block) == read(tmp_path, INT4)


WEIGHTS = "config_groups.group_0.weights"
REFUSED = [
    (
        "",
        {"quant_method": "fp8"},
        r'`quantization_config\.quant_method` is "fp8": FP8 blocks .* not supported',
    ),
    ("", {"quant_method": "modelopt"}, r'is "modelopt": NVFP4 or FP8 weights of NVIDIA'),
    (
        "",
        {"format": "nvfp4-pack-quantized"},
        r'`quantization_config\.format` is "nvfp4.*": NVFP4 weights are not',
    ),
    ("", {"format": "mxfp4-pack-quantized"}, "MXFP4 weights are not supported"),
    (
        "",
        {"quant_method": "awq"},
        "`awq` weights are not supported, only bf16 to fp64, and routed experts in INT4",
    ),
    ("", {"quant_method": "absent"}, "`None` weights are not supported"),
    ("", {"format": "marlin-24"}, r'`quantization_config\.format` is "marlin-24"; only "pack-quantized"'),
    ("", {"format": "absent"}, r"`quantization_config\.format` is missing"),
    ("", {"quantization_status": "frozen"}, r'`quantization_config\.quantization_status` is "frozen"'),
    (
        "",
        {"kv_cache_scheme": {"num_bits": 8}},
        r"`quantization_config\.kv_cache_scheme\.num_bits` is unknown",
    ),
    ("", {"sparsity_config": {"format": "x"}}, r"`quantization_config\.sparsity_config\.format` is unknown"),
    ("", {"rotation": True}, r"`quantization_config\.rotation` is unknown"),
    ("", {"config_groups": {}}, "must hold one group"),
    ("", {"config_groups": {"a": {}, "b": {}}}, "must hold one group"),
    ("", {"ignore": ["re:("]}, r"`re:\(` is not a regular expression"),
    ("", {"ignore": "lm_head"}, r"`quantization_config\.ignore` is"),
    (
        "",
        {"ignore": [*THINKING[:1], *THINKING[2:]]},
        r"`model\.layers\.0\.self_attn\.q_proj` is packed; .* nothing else",
    ),
    (
        "",
        {"ignore": [*THINKING, "re:.*experts.*"]},
        r"`model\.layers\.\d\.mlp\.experts\.0\.gate_proj` is not packed",
    ),
    ("config_groups.group_0", {"targets": "absent"}, r"`quantization_config\.targets`"),
    (
        "config_groups.group_0",
        {"targets": ["re:.*embed_tokens", "Linear"]},
        r"`model\.embed_tokens` is packed",
    ),
    (
        "config_groups.group_0",
        {"input_activations": {"num_bits": 8}},
        r"input_activations\.num_bits` is unknown",
    ),
    ("config_groups.group_0", {"format": "int-quantized"}, r'`.*format` is "int-quantized"'),
    (WEIGHTS, {"num_bits": 8}, r"weights\.num_bits` is 8; only 4"),
    (WEIGHTS, {"num_bits": "absent"}, r"weights\.num_bits` is missing"),
    (WEIGHTS, {"group_size": 128}, r"weights\.group_size` is 128; only 32"),
    (WEIGHTS, {"symmetric": False}, r"weights\.symmetric` is false"),
    (WEIGHTS, {"type": "float"}, r'weights\.type` is "float"'),
    (WEIGHTS, {"strategy": "channel"}, r'weights\.strategy` is "channel"'),
    (WEIGHTS, {"actorder": "group"}, r'weights\.actorder` is "group"'),
    (WEIGHTS, {"dynamic": True}, r"weights\.dynamic` is true"),
    (WEIGHTS, {"scale_dtype": "torch.uint8"}, r"weights\.scale_dtype"),
    (WEIGHTS, {"zero": 1}, r"weights\.zero` is unknown"),
]


@pytest.mark.parametrize(("place", "changes", "message"), REFUSED)
def test_refused_by_name(tmp_path, place, changes, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, block_with(place, **changes))


def test_sizes_that_no_group_divides(tmp_path):
    for key in ("hidden_size", "moe_intermediate_size"):
        config = TEXT | {key: 48, "quantization_config": INT4}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ModelError, match=f"key `{key}` must be a multiple of 32"):
            TargetConfig.from_folder(tmp_path)
