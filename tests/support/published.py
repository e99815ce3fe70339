"""The `quantization_config` of Kimi K2.6, K2.5 and K2-Thinking, and a folder of `transformers` put into its layout."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file

from support.kimi_configs import INT4

SCHEME = QuantizationScheme(
    targets=["Linear"], weights=QuantizationArgs(num_bits=4, strategy="group", group_size=32)
)


def quantise_experts(source: Path, folder: Path, scale=torch.bfloat16) -> dict[str, torch.Tensor]:
    """Write a copy of a plain folder with INT4 experts, packed by compressed-tensors; returns what they unpack to."""
    tensors, unpacked = {}, {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if ".mlp.experts." not in name:
            tensors[name] = tensor
            continue
        groups = tensor.view(*tensor.shape[:-1], -1, 32)
        state = {"weight": tensor, "weight_scale": (groups.abs().amax(-1) / 7.5).to(scale)}
        state = PackedQuantizationCompressor.compress(state, SCHEME)
        state["weight_shape"] = state["weight_shape"].int()
        tensors |= {f"{name.removesuffix('weight')}{kind}": t for kind, t in state.items()}
        wide = state | {"weight_scale": state["weight_scale"].float()}
        unpacked[name] = PackedQuantizationCompressor.decompress(wide, SCHEME)["weight"]
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((source / "config.json").read_text()) | {"quantization_config": INT4}
    (folder / "config.json").write_text(json.dumps(config))
    return unpacked
