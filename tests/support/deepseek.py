"""Tiny DeepSeek-V3 models made and saved by `transformers`, and a target run over pages against them."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from draftwood.models.target import Target, TargetOutput, TreeBatch
from draftwood.tree import from_parents

SIZES = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
    "num_mtp_layers": 0,
    "initializer_range": 0.2,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e3,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}


def make_model(seed: int = 0, rope: dict | None = None, **sizes) -> DeepseekV3ForCausalLM:
    """A random fp32 model whose norms and router biases are not the identity that they start as."""
    torch.manual_seed(seed)
    config = DeepseekV3Config(
        **{**SIZES, **sizes}, rope_parameters=dict(rope or ROPE), attn_implementation="eager"
    )
    model = DeepseekV3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if name.endswith("e_score_correction_bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def save(model: DeepseekV3ForCausalLM, folder: Path, **options) -> Path:
    model.save_pretrained(folder, **options)
    return folder


class Paged:
    """One request's pages, shuffled and full of NaN where nothing was written; `feed` runs slots and commits them."""

    def __init__(self, target: Target, page: int, capacity: int = 192, seed: int = 0) -> None:
        c = target.config
        n_pages = capacity // page + 3
        self.target, self.page, self.length = target, page, 0
        shape = (c.num_hidden_layers, n_pages, page, c.latent_dim)
        self.pages = torch.full(shape, torch.nan, dtype=target.dtype)
        order = torch.randperm(n_pages, generator=torch.Generator().manual_seed(seed))
        self.table = order[: capacity // page].to(torch.int32)[None]

    def tree(self, tokens, parents, depths, ancestors, n_slots, taps=()) -> TargetOutput:
        """Run one row's tree (tensors [1, ...]) on the committed prefix, committing nothing."""
        batch = TreeBatch(self.table, torch.tensor([self.length], dtype=torch.int32), ancestors, n_slots)
        with torch.inference_mode():
            return self.target(tokens, depths, self.pages, batch, taps)

    def feed(self, tokens: list[int], taps: tuple[int, ...] = ()) -> TargetOutput:
        """Run a chain and commit all of it."""
        t = from_parents([tokens], [range(-1, len(tokens) - 1)], [len(tokens)]).torch()
        out = self.tree(t.tokens, t.parents, t.depths, t.ancestors, t.n_slots, taps)
        for i in range(len(tokens)):
            where = self.length + i
            self.pages[:, self.table[0, where // self.page], where % self.page] = out.latents[:, 0, i]
        self.length += len(tokens)
        return out
