"""Write the bundled pair with random weights: `python scripts/make_random_pair.py [FOLDER]`.

Everything follows from the seed and, for the tokenizer, from the Python version (3.11 for the bundled one): it is
trained on the standard library's source. A drafter trained for the target replaces the random one later.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from draftwood.bundled import pair

SEED = 20260
EOS, MASK = "<|end|>", "<|mask|>"  # ids 0 and 1

TARGET = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 768,
    "kv_lora_rank": 128,
    "max_position_embeddings": 4096,
    "moe_intermediate_size": 128,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 32,
    "vocab_size": 2048,
}

DRAFTER = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "attention_bias": False,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1]},
    "dtype": "bfloat16",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 256,
    "intermediate_size": 768,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 4096,
    "num_attention_heads": 8,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "num_target_layers": 3,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 2048,
}


def target_shapes() -> dict[str, tuple[int, ...]]:
    c = TARGET
    d, H, R = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
    N, P, V = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], d), "lm_head.weight": (c["vocab_size"], d)}
    shapes["model.norm.weight"] = (d,)
    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (d,),
            f"{layer}post_attention_layernorm.weight": (d,),
            f"{layer}self_attn.q_proj.weight": (H * (N + P), d),
            f"{layer}self_attn.kv_a_proj_with_mqa.weight": (R + P, d),
            f"{layer}self_attn.kv_a_layernorm.weight": (R,),
            f"{layer}self_attn.kv_b_proj.weight": (H * (N + V), R),
            f"{layer}self_attn.o_proj.weight": (d, H * V),
        }
        if i < c["first_k_dense_replace"]:
            shapes |= mlp_shapes(f"{layer}mlp.", d, c["intermediate_size"])
            continue
        E, inner = c["n_routed_experts"], c["moe_intermediate_size"]
        shapes |= {f"{layer}mlp.gate.weight": (E, d), f"{layer}mlp.gate.e_score_correction_bias": (E,)}
        shapes |= mlp_shapes(f"{layer}mlp.shared_experts.", d, inner * c["n_shared_experts"])
        for e in range(E):
            shapes |= mlp_shapes(f"{layer}mlp.experts.{e}.", d, inner)
    return shapes


def drafter_shapes() -> dict[str, tuple[int, ...]]:
    c = DRAFTER
    d, hd = c["hidden_size"], c["head_dim"]
    q, kv = c["num_attention_heads"] * hd, c["num_key_value_heads"] * hd
    taps = len(c["dflash_config"]["target_layer_ids"])
    shapes = {"fc.weight": (d, taps * d), "hidden_norm.weight": (d,), "norm.weight": (d,)}
    for i in range(c["num_hidden_layers"]):
        layer = f"layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (d,),
            f"{layer}post_attention_layernorm.weight": (d,),
            f"{layer}self_attn.q_proj.weight": (q, d),
            f"{layer}self_attn.k_proj.weight": (kv, d),
            f"{layer}self_attn.v_proj.weight": (kv, d),
            f"{layer}self_attn.o_proj.weight": (d, q),
            f"{layer}self_attn.q_norm.weight": (hd,),
            f"{layer}self_attn.k_norm.weight": (hd,),
        }
        shapes |= mlp_shapes(f"{layer}mlp.", d, c["intermediate_size"])
    return shapes


def mlp_shapes(prefix: str, d: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate_proj.weight": (inner, d),
        f"{prefix}up_proj.weight": (inner, d),
        f"{prefix}down_proj.weight": (d, inner),
    }


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Norms near one, a small router bias in fp32 as published, matrices that keep the variance of their input."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.randn(shape, generator=generator)
        if name.endswith("e_score_correction_bias"):
            tensors[name] = 0.01 * noise
        elif len(shape) == 1:
            tensors[name] = (1 + 0.05 * noise).bfloat16()
        else:
            scale = 0.02 if "embed_tokens" in name else shape[-1] ** -0.5
            tensors[name] = (scale * noise).bfloat16()
    return tensors


def train_tokenizer() -> Tokenizer:
    """Byte-level BPE of 2048 tokens over the standard library, the two special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TARGET["vocab_size"],
        special_tokens=[EOS, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "idle_test"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
    tokenizer.train_from_iterator((f.read_text(errors="replace") for f in files), trainer)
    return tokenizer


def write_json(path: Path, values: dict[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=pair()[0].parent)
    target, drafter = (parser.parse_args().folder / name for name in ("target", "drafter"))
    for folder, config, shapes, seed in (
        (target, TARGET, target_shapes(), SEED),
        (drafter, DRAFTER, drafter_shapes(), SEED + 1),
    ):
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", config)
        save_file(random_tensors(shapes, seed), folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)
    write_json(target / "generation_config.json", {"eos_token_id": 0, "max_length": 4096})
    train_tokenizer().save(str(target / "tokenizer.json"))
    write_json(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": EOS,
            "mask_token": MASK,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    )


if __name__ == "__main__":
    main()
