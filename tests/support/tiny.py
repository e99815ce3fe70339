"""Tiny random targets and DFlash drafters, written as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": 0,
    "bos_token_id": 1,
}

DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 2, "target_layer_ids": [0, 1]},
}


def write_target(folder: Path, seed: int = 0, scale: float = 0.5, **overrides) -> Path:
    """A random target in fp32; `scale` spreads the logits. Overrides replace keys of `TARGET`."""
    config = TARGET | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_random(target_shapes(config), seed, scale), folder / "model.safetensors")
    write_tokenizer(folder, config["vocab_size"])
    return folder


def write_drafter(
    folder: Path, target: dict | None = None, seed: int = 1, scale: float = 0.5, **overrides
) -> Path:
    """A random DFlash drafter that fits `TARGET | target`; overrides replace keys of `DRAFTER`."""
    target = TARGET | (target or {})
    shared = {
        "hidden_size": target["hidden_size"],
        "vocab_size": target["vocab_size"],
        "num_target_layers": target["num_hidden_layers"],
    }
    config = DRAFTER | shared | overrides
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(_random(drafter_shapes(config), seed, scale), folder / "model.safetensors")
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """One word per token: "t0", "t1", ..."""
    tokenizer = Tokenizer(WordLevel({f"t{i}": i for i in range(vocab_size)}, unk_token="t0"))
    tokenizer.pre_tokenizer, tokenizer.decoder = WhitespaceSplit(), ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def target_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    d, H, R = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes = {
        "model.embed_tokens.weight": (c["vocab_size"], d),
        "model.norm.weight": (d,),
        "lm_head.weight": (c["vocab_size"], d),
    }
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (d,)
        a = layer + "self_attn."
        if c["q_lora_rank"]:
            shapes[a + "q_a_proj.weight"] = (c["q_lora_rank"], d)
            shapes[a + "q_a_layernorm.weight"] = (c["q_lora_rank"],)
            shapes[a + "q_b_proj.weight"] = (H * (nope + rope), c["q_lora_rank"])
        else:
            shapes[a + "q_proj.weight"] = (H * (nope + rope), d)
        shapes[a + "kv_a_proj_with_mqa.weight"] = (R + rope, d)
        shapes[a + "kv_a_layernorm.weight"] = (R,)
        shapes[a + "kv_b_proj.weight"] = (H * (nope + v), R)
        shapes[a + "o_proj.weight"] = (d, H * v)
        m = layer + "mlp."
        if i < c["first_k_dense_replace"]:
            shapes |= _mlp(m, d, c["intermediate_size"])
            continue
        shapes[m + "gate.weight"] = (c["n_routed_experts"], d)
        shapes[m + "gate.e_score_correction_bias"] = (c["n_routed_experts"],)
        if c["n_shared_experts"]:
            shapes |= _mlp(m + "shared_experts.", d, c["moe_intermediate_size"] * c["n_shared_experts"])
        for e in range(c["n_routed_experts"]):
            shapes |= _mlp(f"{m}experts.{e}.", d, c["moe_intermediate_size"])
    return shapes


def drafter_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    d, hd = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
    shapes = {
        "fc.weight": (d, d * len(c["dflash_config"]["target_layer_ids"])),
        "hidden_norm.weight": (d,),
        "norm.weight": (d,),
    }
    for i in range(c["num_hidden_layers"]):
        layer = f"layers.{i}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (d,)
        a = layer + "self_attn."
        shapes |= {a + "q_proj.weight": (q, d), a + "k_proj.weight": (kv, d), a + "v_proj.weight": (kv, d)}
        shapes |= {a + "o_proj.weight": (d, q), a + "q_norm.weight": (hd,), a + "k_norm.weight": (hd,)}
        shapes |= _mlp(layer + "mlp.", d, c["intermediate_size"])
    return shapes


def _mlp(prefix: str, d: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        prefix + "gate_proj.weight": (inner, d),
        prefix + "up_proj.weight": (inner, d),
        prefix + "down_proj.weight": (d, inner),
    }


def _random(shapes: dict[str, tuple[int, ...]], seed: int, scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensors[name] = 1 + 0.1 * noise
        elif name.endswith("bias"):
            tensors[name] = 0.1 * noise
        elif name == "lm_head.weight":
            tensors[name] = scale * noise
        else:
            tensors[name] = noise * shape[-1] ** -0.5 if "embed" not in name else noise
    return tensors
