"""A DFlash drafter folder: its config, random start and trained tensors, with exactly the published names and keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draftwood.models.config import TargetConfig
from draftwood.models.drafter import Drafter, DraftLayer

SHARD_BYTES = 15_000_000


def default_taps(count: int, target_layers: int) -> tuple[int, ...]:
    """`count` layers evenly from the second to the third last, as published drafters have them."""
    if count == 1:
        return (target_layers // 2,)
    return tuple(
        dict.fromkeys(max(0, round(1 + i * (target_layers - 4) / (count - 1))) for i in range(count))
    )


def drafter_config(
    target: TargetConfig,
    *,
    layers: int,
    block_size: int,
    mask_token_id: int,
    taps: tuple[int, ...],
    heads: int,
    kv_heads: int,
    head_dim: int,
    intermediate_size: int,
) -> dict[str, Any]:
    """The published keys for a drafter of this shape; width and vocabulary are the target's."""
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": block_size,
        "dflash_config": {"mask_token_id": mask_token_id, "target_layer_ids": list(taps)},
        "dtype": "bfloat16",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": target.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": intermediate_size,
        "layer_types": ["full_attention"] * layers,
        "max_position_embeddings": target.max_position_embeddings,
        "max_window_layers": layers,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv_heads,
        "num_target_layers": target.num_hidden_layers,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_scaling": None,
        "rope_theta": target.rope.rope_theta,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": target.vocab_size,
    }


def random_tensors(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """fp32 start: norms at one, projections into the residual stream smaller by the square root of their number."""
    d, hd, inner = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q, kv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    generator = torch.Generator().manual_seed(seed)
    into_stream = (2 * config["num_hidden_layers"]) ** -0.5

    def matrix(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        tensor: Tensor = torch.randn(rows, columns, generator=generator) * (scale * columns**-0.5)
        return tensor

    taps = len(config["dflash_config"]["target_layer_ids"])
    tensors = {
        "fc.weight": matrix(d, taps * d),
        "hidden_norm.weight": torch.ones(d),
        "norm.weight": torch.ones(d),
    }
    for i in range(config["num_hidden_layers"]):
        tensors |= {
            f"layers.{i}.input_layernorm.weight": torch.ones(d),
            f"layers.{i}.post_attention_layernorm.weight": torch.ones(d),
            f"layers.{i}.self_attn.q_proj.weight": matrix(q, d),
            f"layers.{i}.self_attn.k_proj.weight": matrix(kv, d),
            f"layers.{i}.self_attn.v_proj.weight": matrix(kv, d),
            f"layers.{i}.self_attn.o_proj.weight": matrix(d, q, into_stream),
            f"layers.{i}.self_attn.q_norm.weight": torch.ones(hd),
            f"layers.{i}.self_attn.k_norm.weight": torch.ones(hd),
            f"layers.{i}.mlp.gate_proj.weight": matrix(inner, d),
            f"layers.{i}.mlp.up_proj.weight": matrix(inner, d),
            f"layers.{i}.mlp.down_proj.weight": matrix(d, inner, into_stream),
        }
    return tensors


def published_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The drafter's parameters under the published names and in the published dtype, on the CPU."""
    c = drafter.config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    tensors: dict[str, Tensor] = {
        "fc.weight": drafter.fc.weight,
        "hidden_norm.weight": drafter.context_norm,
        "norm.weight": drafter.norm,
    }
    if drafter.mask_embedding is not None:
        tensors["mask_embedding"] = drafter.mask_embedding
    for i, layer in enumerate(drafter.layers):
        assert isinstance(layer, DraftLayer)
        name = f"layers.{i}."
        for part, rows in zip("qkv", drafter.qkv.weight[i].split((q, kv, kv)), strict=True):
            tensors[f"{name}self_attn.{part}_proj.weight"] = rows
        gate, up = layer.mlp.gate_up.weight.chunk(2)
        tensors |= {
            name + "input_layernorm.weight": layer.attention_norm,
            name + "post_attention_layernorm.weight": layer.mlp_norm,
            name + "self_attn.q_norm.weight": layer.q_norm,
            name + "self_attn.k_norm.weight": drafter.k_norm[i],
            name + "self_attn.o_proj.weight": layer.o.weight,
            name + "mlp.gate_proj.weight": gate,
            name + "mlp.up_proj.weight": up,
            name + "mlp.down_proj.weight": layer.mlp.down.weight,
        }
    return {k: v.detach().cpu().bfloat16().contiguous() for k, v in tensors.items()}


def with_layers(tensors: dict[str, Tensor], layers: Sequence[int]) -> dict[str, Tensor]:
    """Published tensors of a drafter that has only these layers, in this order."""
    chosen = {k: v for k, v in tensors.items() if not k.startswith("layers.")}
    for i, layer in enumerate(layers):
        own = f"layers.{layer}."
        chosen |= {f"layers.{i}.{k.removeprefix(own)}": v for k, v in tensors.items() if k.startswith(own)}
    return chosen


def save_folder(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """config.json and the tensors as one safetensors file, or as shards of at most 15 MB and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    shards: list[dict[str, Tensor]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(t.nbytes for t in shards[-1].values()) + tensor.nbytes > SHARD_BYTES:
            shards.append({})
        shards[-1][name] = tensor
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    where: dict[str, str] = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(shard, file)
    size = sum(t.nbytes for shard in shards for t in shard.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
