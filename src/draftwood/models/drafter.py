"""The DFlash drafter: one pass over [anchor, mask, ..., mask] that attends to features of the target.

The context (one feature vector per committed token) enters every layer as extra keys and values, which depend
on nothing else: they are made once per token and kept in pages. Source: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftwood.kernels.registry import Kernels
from draftwood.models.drafter_config import DrafterConfig, LayerAttention
from draftwood.models.layers import MLP, Matrix, Packable, frozen, matrix, ramp
from draftwood.models.packed import PackedMatrix
from draftwood.models.rope import Rotary, YarnRule
from draftwood.models.streams import beside
from draftwood.models.target import Target
from draftwood.models.weights import Take, Weights
from draftwood.parallel import ALONE, Ranks

Context = tuple[Tensor, Tensor, Tensor, Tensor]
"""What a layer attends to, as `draft_attn` takes it: k_pages, v_pages, page_table, context_len."""


class Projections(Packable):
    """Query, key and value weights of all layers: a layer's own product, and all layers' keys and values at once."""

    def __init__(self, weight: Tensor, query_rows: int) -> None:
        """weight: [Ld, query_rows + key and value rows, d]."""
        super().__init__()
        self.weight = matrix(weight)
        self.n_layers, self.query_rows = len(weight), query_rows
        self.packed: tuple[list[PackedMatrix], PackedMatrix] | None = None

    def pack(self) -> None:
        layers = [packed for w in self.weight if (packed := PackedMatrix.of(w)) is not None]
        kv = PackedMatrix.of(self.weight[:, self.query_rows :].flatten(0, 1))
        if kv is not None and len(layers) == self.n_layers:
            self.packed = (layers, kv)
            del self.weight

    def layer(self, i: int, x: Tensor) -> Tensor:
        """x [..., d] -> [..., query, key and value rows] of layer i."""
        return F.linear(x, self.weight[i]) if self.packed is None else self.packed[0][i](x)

    def keys_and_values(self, x: Tensor) -> Tensor:
        """x [N, d] -> [Ld, N, key and value rows]."""
        if self.packed is None:
            return torch.matmul(x, self.weight[:, self.query_rows :].transpose(1, 2))
        return self.packed[1](x).view(len(x), self.n_layers, -1).transpose(0, 1)


class DraftLayer(nn.Module):
    """One layer; its query, key and value weights are in the drafter's `Projections`.

    The first norm and the last sum are the caller's, in one with others.
    """

    def __init__(
        self, config: DrafterConfig, sees: LayerAttention, kernels: Kernels, take: Take, ranks: Ranks
    ) -> None:
        super().__init__()
        self.sees, self.attend, self.ranks = sees, kernels.draft_attn, ranks
        self.add_rms_norm, self.qk_norm_rope = kernels.add_rms_norm, kernels.qk_norm_rope
        self.eps, self.head_dim = config.rms_norm_eps, config.head_dim
        self.n_q = config.num_attention_heads // ranks.size
        self.n_kv = config.num_key_value_heads // ranks.size
        d = config.hidden_size
        self.attention_norm = frozen(take("input_layernorm.weight", d))
        self.mlp_norm = frozen(take("post_attention_layernorm.weight", d))
        self.q_norm = frozen(take("self_attn.q_norm.weight", config.head_dim))
        self.o = Matrix(
            take.columns("self_attn.o_proj.weight", d, config.num_attention_heads * config.head_dim)
        )
        self.mlp = MLP(d, config.intermediate_size, kernels, take.under("mlp"))

    def forward(
        self,
        x: Tensor,
        h: Tensor,
        project: Callable[[Tensor], Tensor],
        k_norm: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: Context,
    ) -> tuple[Tensor, Tensor]:
        """x [B S, d] and its `attention_norm` -> x after attention, and what is still to be added to it."""
        heads = (self.n_q, self.n_kv)
        qk, v = project(h).view(1, len(x), -1, self.head_dim).split((sum(heads), self.n_kv), -2)
        qk = self.qk_norm_rope(qk, self.q_norm, k_norm, cos, sin, self.eps, self.n_q)
        rows = len(context[3])
        q, k, v = (part.view(rows, -1, *part.shape[2:]) for part in (*qk.split(heads, -2), v))
        scale = self.head_dim**-0.5
        o = self.attend(q, *context, k, v, scale, causal=self.sees.causal, window=self.sees.window)
        added = self.ranks.all_reduce(self.o(o.reshape(len(x), -1)))
        x, h = self.add_rms_norm(x, self.mlp_norm, self.eps, added)
        return x, self.ranks.all_reduce(self.mlp(h))


class Drafter(nn.Module):
    """A DFlash drafter, inference only. Build it with `from_folder`.

    `yarn_rule` and `yarn_reason` say how YaRN's amplitude was chosen; it changes acceptance, never the output.
    Mask slots are embedded as the target's mask token, or as the drafter's own `mask_embedding` where an export has one.
    """

    def __init__(
        self,
        config: DrafterConfig,
        take: Take,
        *,
        kernels: Kernels,
        device: torch.device,
        yarn_rule: YarnRule | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        super().__init__()
        self.config, self.ranks = config, ranks
        self.add_rms_norm, self.qk_norm_rope = kernels.add_rms_norm, kernels.qk_norm_rope
        self.yarn_rule, self.yarn_reason = config.choose_yarn_rule(yarn_rule)
        d, hd, L = config.hidden_size, config.head_dim, config.num_hidden_layers
        q, kv = config.num_attention_heads * hd, config.num_key_value_heads * hd
        self.fc = Matrix(take.columns("fc.weight", d, len(config.target_layer_ids) * d))
        self.context_norm = frozen(take("hidden_norm.weight", d))
        self.norm = frozen(take("norm.weight", d))
        self.mask_embedding = frozen(take("mask_embedding", d)) if "mask_embedding" in take else None
        scopes = [take.under(f"layers.{i}") for i in range(L)]
        own = [n // ranks.size for n in (q, kv, kv)]
        qkv = take.empty(L, sum(own), d)
        for weight, scope in zip(qkv, scopes, strict=True):
            for name, n, rows in zip("qkv", (q, kv, kv), weight.split(own), strict=True):
                rows.copy_(scope.rows(f"self_attn.{name}_proj.weight", n, d))
        self.qkv = Projections(qkv, own[0])
        self.k_norm = frozen(torch.stack([scope("self_attn.k_norm.weight", hd) for scope in scopes]))
        self.layers = nn.ModuleList(
            DraftLayer(config, sees, kernels, scope, ranks)
            for sees, scope in zip(config.layers, scopes, strict=True)
        )
        self.rotary = Rotary(config.rope, hd, config.rope.amplitude(self.yarn_rule), kernels, device)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        target: Target,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels,
        yarn_rule: YarnRule | None = None,
    ) -> Self:
        """Load config and tensors: this rank's share, or all where `DrafterConfig.splits` says no.

        Raises `ModelError` naming what is wrong, or what does not fit the target.
        """
        config = DrafterConfig.from_folder(path)
        config.check_fits(target.config)
        ranks = target.ranks if config.splits(target.ranks.size) else ALONE
        weights = Weights(Path(path), own_name, dtype, torch.device(device), shard=ranks.shard)
        drafter = cls(
            config,
            Take(weights),
            kernels=kernels,
            device=torch.device(device),
            yarn_rule=yarn_rule,
            ranks=ranks,
        )
        weights.finish()
        return drafter

    @property
    def n_kv_heads(self) -> int:
        """Hkv: key-value heads of this rank."""
        return self.config.num_key_value_heads // self.ranks.size

    def context(self, features: Tensor, start: Tensor, steps: Tensor | None = None) -> Tensor:
        """Keys (RoPE applied) and values of committed tokens for every layer.

        Args:
            features: [B, N, K * d], the target's residual stream after the K tapped layers.
            start: [B] i32, position of each row's first token.
            steps: [B, N] i32, how far behind it each token's position is; None where they follow each other.

        Returns:
            [Ld, B, N, 2, Hkv, hd], keys first, of this rank's heads. A token's rows depend on that token alone, so any
            chunking will do.
        """
        c = self.config
        B, N, heads = *features.shape[:2], self.n_kv_heads
        steps = ramp(N, start.device).expand(B, N) if steps is None else steps
        tables = beside(start, lambda: self.rotary(steps, self.norm.dtype, start))
        own = features.chunk(self.ranks.size, -1)[self.ranks.shard.rank].to(self.norm.dtype)
        x = self.ranks.all_reduce(self.fc(own.flatten(0, 1)))
        _, x = self.add_rms_norm(x, self.context_norm, c.rms_norm_eps)
        kv = self.qkv.keys_and_values(x).unflatten(-1, (2 * heads, c.head_dim))  # [Ld, B N, ...]
        cos, sin = tables()
        kv = self.qk_norm_rope(kv, None, self.k_norm, cos, sin, c.rms_norm_eps, 0, n_v=heads)
        by_token: Tensor = kv.view(len(kv), B, N, 2, heads, c.head_dim)
        return by_token

    def forward(
        self,
        anchor: Tensor,
        context_len: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        page_table: Tensor,
        embed: Callable[..., Tensor],
        depth: int | None = None,
    ) -> Tensor:
        """Draft one block per row.

        Args:
            anchor: [B] i32, the newest committed token, at position context_len.
            context_len: [B] i32, tokens whose K/V are in the pages.
            k_pages, v_pages: [Ld, n_pages, page, Hkv, hd].
            page_table: [B, M] i32.
            embed: the target's `embed`.
            depth: tokens to draft, at most block_size - 1 (the default); a smaller block is legal, a larger was
                never trained.

        Returns:
            [B, depth, d], final norm applied: row i, through the target's `logits`, predicts position
            context_len + 1 + i.
        """
        c = self.config
        depth = c.block_size - 1 if depth is None else depth
        if not 1 <= depth < c.block_size:
            raise ValueError(
                f"depth must be in 1..{c.block_size - 1} for a block of {c.block_size}, got {depth}"
            )
        slots = ramp(depth + 1, anchor.device)
        B, S = len(anchor), depth + 1
        tables = beside(anchor, lambda: self.rotary(slots.expand(B, S), self.norm.dtype, context_len))
        x = embed(anchor, block=S, filler=c.mask_token_id).to(self.norm.dtype)  # [B S, d]
        if self.mask_embedding is not None:
            x = torch.where(slots.repeat(B)[:, None] == 0, x, self.mask_embedding)
        first, *others = (layer.attention_norm for layer in self.layers)
        x, h = self.add_rms_norm(x, first, c.rms_norm_eps)
        cos, sin = tables()
        for i, (layer, next_norm) in enumerate(zip(self.layers, (*others, self.norm), strict=True)):
            context = (k_pages[i], v_pages[i], page_table, context_len)
            project = partial(self.qkv.layer, i)
            x, added = layer(x, h, project, self.k_norm[i : i + 1], cos, sin, context)
            x, h = self.add_rms_norm(x, next_norm, c.rms_norm_eps, added)
        hidden: Tensor = h.view(B, S, -1)[:, 1:]
        return hidden


_RENAMED = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def own_name(name: str) -> str | None:
    """A stored tensor's published name: some exports add `model.` or rename the context encoder."""
    name = name.removeprefix("model.")
    if name.endswith("rotary_emb.inv_freq"):
        return None  # computed from the config
    return _RENAMED.get(name, name)
