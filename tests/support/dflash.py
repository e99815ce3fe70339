"""A DFlash drafter written a second time, plainly: tensors by their published names, full attention matrices, no cache.

Frequencies come from `transformers`, so that nothing but torch is shared with the code under test.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class PlainDFlash:
    """`hidden(features [N, K d], anchor, embedding [V, d], sees)` for one request, in fp64."""

    def __init__(self, folder: Path, amplitude: float | None = None) -> None:
        self.c = json.loads((folder / "config.json").read_text())
        self.w = {k: v.double() for k, v in load_file(folder / "model.safetensors").items()}
        rope = dict(self.c["rope_parameters"])
        rope.setdefault("rope_type", rope.pop("type", None))
        if rope["rope_type"] == "default":
            exponents = torch.arange(0, self.c["head_dim"], 2, dtype=torch.float64) / self.c["head_dim"]
            self.frequencies, self.amplitude = rope["rope_theta"] ** -exponents, 1.0
        else:
            config = Qwen3Config(head_dim=self.c["head_dim"], rope_parameters=rope | {"rope_type": "yarn"})
            frequencies, self.amplitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
            self.frequencies = frequencies.double()
        self.amplitude = self.amplitude if amplitude is None else amplitude

    def norm(self, x, name):
        variance = x.pow(2).mean(-1, keepdim=True)
        return x / (variance + self.c["rms_norm_eps"]).sqrt() * self.w[name]

    def turn(self, x, positions):
        """Complex rotation of (first half) + i (second half); x [N, heads, hd]."""
        half = x.shape[-1] // 2
        angle = positions[:, None, None] * self.frequencies
        z = torch.complex(x[..., :half], x[..., half:]) * torch.polar(
            torch.full_like(angle, self.amplitude), angle
        )
        return torch.cat((z.real, z.imag), -1)

    def hidden(self, features, anchor, embedding, sees, size=None):
        """[size - 1, d]; `sees(layer, query position, key position)` is the attention rule of the layer."""
        c, w = self.c, self.w
        S, N = size or c["block_size"], len(features)
        tokens = [anchor] + [c["dflash_config"]["mask_token_id"]] * (S - 1)
        x = embedding.double()[tokens]
        if "mask_embedding" in w:
            x[1:] = w["mask_embedding"]
        context = self.norm(features.double() @ w["fc.weight"].T, "hidden_norm.weight")
        positions = torch.arange(N + S, dtype=torch.float64)
        for i in range(c["num_hidden_layers"]):
            at = f"layers.{i}.self_attn."
            h = self.norm(x, f"layers.{i}.input_layernorm.weight")
            both = torch.cat((context, h))
            q = (h @ w[at + "q_proj.weight"].T).view(S, -1, c["head_dim"])
            k = (both @ w[at + "k_proj.weight"].T).view(N + S, -1, c["head_dim"])
            v = (both @ w[at + "v_proj.weight"].T).view(N + S, -1, c["head_dim"])
            q = self.turn(self.norm(q, at + "q_norm.weight"), positions[N:])
            k = self.turn(self.norm(k, at + "k_norm.weight"), positions)
            allowed = torch.tensor([[sees(i, N + s, j) for j in range(N + S)] for s in range(S)])
            heads = []
            for head in range(q.shape[1]):
                shared = head * k.shape[1] // q.shape[1]
                scores = q[:, head] @ k[:, shared].T / c["head_dim"] ** 0.5
                heads.append(scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v[:, shared])
            x = x + torch.cat(heads, -1) @ w[at + "o_proj.weight"].T
            h = self.norm(x, f"layers.{i}.post_attention_layernorm.weight")
            gate, up = (h @ w[f"layers.{i}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
            x = x + (torch.nn.functional.silu(gate) * up) @ w[f"layers.{i}.mlp.down_proj.weight"].T
        return self.norm(x[1:], "norm.weight")
