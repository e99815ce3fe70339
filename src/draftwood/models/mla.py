"""Multi-head latent attention, absorbed: what of a target layer lies between its first norm and the residual sum.

Source: arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from draftwood.kernels.registry import Kernels
from draftwood.models.config import TargetConfig
from draftwood.models.layers import Fixable, Matrix, by_head, frozen
from draftwood.models.streams import beside
from draftwood.models.weights import Take

Attend = Callable[..., Tensor]
"""`verify_attn` of one pass, see `for_layers`."""


class MLA(Fixable):
    """Multi-head latent attention, absorbed: W_UK goes into the query, W_UV into the output.

    A rank has its share of the heads and gives their part of the sum.
    """

    def __init__(self, config: TargetConfig, kernels: Kernels, take: Take) -> None:
        super().__init__()
        heads, R, P = config.num_attention_heads, config.kv_lora_rank, config.qk_rope_head_dim
        H = heads // take.shard.size
        N, V, d = config.qk_nope_head_dim, config.v_head_dim, config.hidden_size
        Q = config.q_lora_rank
        self.shape, self.scale, self.norm_eps = (H, N, R, P, V), config.softmax_scale, config.inner_norm_eps
        self.add_rms_norm, self.mla_inputs = kernels.add_rms_norm, kernels.mla_inputs
        self.has_q_lora = Q is not None
        self.widths: tuple[int, ...]
        latent, k_rope = _nope_and_rope(take("kv_a_proj_with_mqa.weight", R + P, d), 1, P)
        self.kv_norm = frozen(take("kv_a_layernorm.weight", R))
        if Q is None:
            q = torch.cat(_nope_and_rope(take.rows("q_proj.weight", heads * (N + P), d), H, P))
            self.widths = (H * N, H * P, P, R)
        else:
            q = take("q_a_proj.weight", Q, d)
            self.widths = (Q, P, R)
            self.q_norm = frozen(take("q_a_layernorm.weight", Q))
            q_b = take.rows("q_b_proj.weight", heads * (N + P), Q)
            self.q_b = Matrix(torch.cat(_nope_and_rope(q_b, H, P)))
        self.qkv_a = Matrix(torch.cat((q, k_rope, latent)))
        kv_b = take.rows("kv_b_proj.weight", heads * (N + V), R)
        w_uk, w_uv = kv_b.view(H, N + V, R).split((N, V), 1)
        self.w_uk = frozen(w_uk.contiguous())  # [H, N, R]
        self.w_uv = frozen(w_uv.transpose(1, 2).contiguous())  # [H, R, V]
        self.o = Matrix(take.columns("o_proj.weight", d, heads * V))
        self.by_head: Callable[[Tensor, Tensor, Tensor], object] = by_head

    def fix(self, kernels: Kernels) -> None:
        def product(x: Tensor, weight: Tensor, out: Tensor) -> None:
            out.copy_(kernels.linear(x.transpose(0, 1), weight.mT).transpose(0, 1))

        self.by_head = product

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, pages: Tensor, attend: Attend, latents: Tensor
    ) -> Tensor:
        """x [B T, d] -> [B T, d]; fills `latents` [B, T, C] of this layer."""
        H, N, R, P, V = self.shape
        if self.has_q_lora:
            q_a, k_rope, latent = self.qkv_a(x).split_with_sizes(self.widths, -1)
            _, q_a = self.add_rms_norm(q_a, self.q_norm, self.norm_eps)
            q_nope, q_rope = self.q_b(q_a).split_with_sizes((H * N, H * P), -1)
        else:
            q_nope, q_rope, k_rope, latent = self.qkv_a(x).split_with_sizes(self.widths, -1)
        q = x.new_empty(len(x), H, R + P)
        turned = q_rope.view(-1, H, P), k_rope, latent, cos, sin
        written = q, latents.view(-1, R + P)
        inputs = beside(x, lambda: self.mla_inputs(*turned, self.kv_norm, self.norm_eps, *written))
        self.by_head(q_nope.view(-1, H, N), self.w_uk, q[..., :R])
        inputs()
        o = attend(q.view(*latents.shape[:2], H, R + P), pages, latents, self.scale, value_dim=R)
        values = x.new_empty(len(x), H, V)
        self.by_head(o.view(-1, H, R), self.w_uv, values)
        y: Tensor = self.o(values.flatten(1))
        return y


def _nope_and_rope(weight: Tensor, heads: int, rope_dim: int) -> tuple[Tensor, Tensor]:
    """Rows of all heads without rope, and with it: each head's last `rope_dim`.

    Those go from interleaved pairs to half-split, once instead of per token.
    """
    nope, rope = weight.view(heads, -1, weight.shape[-1]).split(
        (weight.shape[0] // heads - rope_dim, rope_dim), 1
    )
    return nope.flatten(0, 1), torch.cat((rope[:, 0::2], rope[:, 1::2]), 1).flatten(0, 1)
