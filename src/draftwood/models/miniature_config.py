"""The published configs of Kimi K2.6, its relatives and their DFlash drafters, at any size.

What is published stays: keys, nesting, rope, routing rules, epsilon, which experts are packed. What makes a model large can be
replaced. Ids of special tokens count from the end of the vocabulary, as the tokenizer that goes with it has them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Config = dict[str, Any]

Name = Literal["k2.6", "k2.5", "k2-thinking", "k2", "deepseek-v3"]

SPECIAL_SLOTS = 256
BOS, EOS, IM_END, MEDIA_PAD, MASK, PAD = 0, 1, 2, 21, 254, 255  # of the special slots


@dataclass(frozen=True)
class Family:
    model_type: str
    wrapped: bool
    packed: bool  # as published; the others are published in FP8 blocks, and written in bf16 here
    published: Config
    own: Config  # what differs from the other families at any size


_SIZES: Config = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 384,
}
_SMALL: Config = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,  # eight ranks have a group of 32 each
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 8,
    "q_lora_rank": 96,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 16,
    "max_position_embeddings": 8192,  # caches are allocated for it
}


def _yarn(factor: float, beta_fast: float) -> Config:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 4096,
        "beta_fast": beta_fast,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }


_KIMI: Config = {
    "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "num_nextn_predict_layers": 0,
    "rope_scaling": _yarn(64.0, 32.0),
}
_DEEPSEEK: Config = {
    "rope_theta": 10000,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_scaling": _yarn(40, 32),
}
_K2 = {"max_position_embeddings": 131072, "rms_norm_eps": 1e-6, "rope_scaling": _yarn(32.0, 1.0)}
_DEEPSEEK_SIZES = {
    "vocab_size": 129280,
    "num_attention_heads": 128,
    "n_routed_experts": 256,
    "first_k_dense_replace": 3,
}

FAMILIES: dict[Name, Family] = {
    "k2.6": Family("kimi_k2", True, True, _SIZES, _KIMI),
    "k2.5": Family("kimi_k2", True, True, _SIZES, _KIMI),
    "k2-thinking": Family("kimi_k2", False, True, _SIZES, _KIMI | {"rope_scaling": _yarn(64.0, 1.0)}),
    "k2": Family("kimi_k2", False, False, _SIZES, _KIMI | _K2),
    "deepseek-v3": Family("deepseek_v3", False, False, _SIZES | _DEEPSEEK_SIZES, _DEEPSEEK),
}

_LANGUAGE_ONLY = ("re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*")


def target_config(
    family: Name,
    *,
    true_width: bool = False,
    layers: int | None = None,
    experts: int | None = None,
    vocab_size: int | None = None,
    quantized: bool | None = None,
) -> Config:
    """A target's config.json. `true_width` keeps every published size; the others replace one of them.

    Raises `ValueError` for a size that the family cannot have.
    """
    kind = FAMILIES[family]
    sizes = dict(kind.published if true_width else _SMALL)
    asked = {"num_hidden_layers": layers, "n_routed_experts": experts, "vocab_size": vocab_size}
    sizes |= {key: value for key, value in asked.items() if value is not None}
    sizes["first_k_dense_replace"] = min(sizes["first_k_dense_replace"], sizes["num_hidden_layers"] - 1)
    _check(kind, sizes)
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "aux_loss_alpha": 0.001,
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModel": "modeling_deepseek.DeepseekV3Model",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
        "dtype": "bfloat16",
        "ep_size": 1,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "model_type": kind.model_type,
        "moe_layer_freq": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "num_key_value_heads": sizes["num_attention_heads"],
        "scoring_func": "sigmoid",
        "seq_aux": True,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "use_cache": True,
        **kind.own,
        **sizes,
        **_token_ids(family, sizes["vocab_size"]),
    }
    if kind.packed if quantized is None else quantized:
        text["quantization_config"] = _int4(kind.wrapped)
    return _wrap(text) if kind.wrapped else text


def generation_config(config: Config) -> Config:
    text = text_of(config)
    return {
        "eos_token_id": text["vocab_size"] - SPECIAL_SLOTS + IM_END,
        "max_length": text["max_position_embeddings"],
    }


def text_of(config: Config) -> Config:
    """The text model's part of a target's config."""
    text: Config = config.get("text_config", config)
    return text


def drafter_config(family: Name, target: Config) -> Config:
    """A DFlash drafter's config.json for such a target: six layers, block 8."""
    text = text_of(target)
    true_width = text["hidden_size"] == FAMILIES[family].published["hidden_size"]
    depth, V = text["num_hidden_layers"], text["vocab_size"]
    heads = (64, 8, 128) if true_width else (8, 2, 32)
    rope: Config = {"rope_scaling": _yarn(64.0, 32.0), "rope_theta": 50000.0}
    if family == "k2.6":
        parameters = {k: v for k, v in rope["rope_scaling"].items() if k != "type"}
        rope = {"rope_parameters": {**parameters, "rope_type": "deepseek_yarn", "rope_theta": 50000.0}}
    taps = [round(1 + i * (depth - 4) / 5) for i in range(6)] if depth > 8 else list(range(depth))[:6]
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": 8,
        "dflash_config": {"mask_token_id": V - SPECIAL_SLOTS + MASK, "target_layer_ids": taps},
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": text["hidden_size"],
        "intermediate_size": text["intermediate_size"],
        "layer_types": ["full_attention"] * 6,
        "max_position_embeddings": text["max_position_embeddings"],
        "max_window_layers": 6,
        "model_type": "qwen3",
        "num_attention_heads": heads[0],
        "num_hidden_layers": 6,
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "num_target_layers": depth,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": V,
        **rope,
    }


def _check(kind: Family, sizes: Config) -> None:
    groups, per_token = kind.own["n_group"], 8
    least = max(per_token, 2 * groups)
    E = sizes["n_routed_experts"]
    if least > E or E % groups or E // groups * kind.own["topk_group"] < per_token:
        raise ValueError(f"experts: expected at least {least} and a multiple of {groups}, got {E}")
    if sizes["num_hidden_layers"] < 2:
        raise ValueError(f"layers: expected at least 2, got {sizes['num_hidden_layers']}")


def _token_ids(family: Name, vocab_size: int) -> Config:
    base = vocab_size - SPECIAL_SLOTS
    eos = IM_END if family == "k2.6" else EOS  # generation_config.json names the other one
    return {"bos_token_id": base + BOS, "eos_token_id": base + eos, "pad_token_id": base + PAD}


def _int4(wrapped: bool) -> Config:
    rest = ("re:.*lm_head.*", "re:vision_tower.*", "re:mm_projector.*")
    return {
        "config_groups": {
            "group_0": {
                "input_activations": None,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {
                    "actorder": None,
                    "block_structure": None,
                    "dynamic": False,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "strategy": "group",
                    "symmetric": True,
                    "type": "int",
                },
            }
        },
        "format": "pack-quantized",
        "ignore": [*_LANGUAGE_ONLY, *rest] if wrapped else ["lm_head", *_LANGUAGE_ONLY],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _wrap(text: Config) -> Config:
    ids = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {
            "AutoConfig": "configuration_kimi_k25.KimiK25Config",
            "AutoModel": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
            "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration",
        },
        **{key: text[key] for key in ids},
        "dtype": "bfloat16",
        "ignore_index": -100,
        "media_placeholder_token_id": text["vocab_size"] - SPECIAL_SLOTS + MEDIA_PAD,
        "model_type": "kimi_k25",
        "text_config": text,
        "tie_word_embeddings": False,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>",
        "vision_config": {
            "merge_kernel_size": [2, 2],
            "mm_hidden_size": 1152,
            "mm_projector_type": "patchmerger",
            "patch_size": 14,
            "text_hidden_size": text["hidden_size"],
            "vt_hidden_size": 1152,
            "vt_intermediate_size": 4304,
            "vt_num_attention_heads": 16,
            "vt_num_hidden_layers": 27,
        },
    }
