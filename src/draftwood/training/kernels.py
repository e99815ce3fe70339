"""Stand-ins for three kernels, for whole batches of equally long sequences: static shapes, and differentiable.

The models themselves stay as they are: a `Target` or `Drafter` built with these computes the same function. The engine's own
kernels serve ragged batches; training has rectangles, runs under CUDA graphs and torch.compile, and needs gradients.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from draftwood.kernels.moe.torch_impl import route
from draftwood.kernels.registry import BETWEEN_PRODUCTS, Kernels, load_kernels


def training_kernels(device: str) -> Kernels:
    """The engine's kernels for `device` with verify_attn, moe and draft_attn replaced, and torch's where Triton has no gradient."""
    kernels = load_kernels(device, dict.fromkeys((*BETWEEN_PRODUCTS, "embed"), "torch"))
    return replace(kernels, verify_attn=attend_sequences, moe=dense_experts, draft_attn=attend_blocks)


def attend_sequences(
    q: Tensor,
    pages: Tensor,
    page_table: Tensor,
    prefix_len: Tensor,
    tree_kv: Tensor,
    ancestors: Tensor,
    n_slots: Tensor,
    scale: float,
    *,
    value_dim: int,
) -> tuple[Tensor, None]:
    """`verify_attn` for two cases, told apart by T: a whole sequence without prefix, or its next token (T = 1).

    Page b holds all of sequence b. Tables, ancestors and slot counts are not looked at: the tree is a chain and full.
    """
    if q.shape[1] > 1:
        k = tree_kv[:, None].expand(-1, q.shape[2], -1, -1)  # [B, H, T, C]
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k, k, is_causal=True, scale=scale)
        return o.transpose(1, 2)[..., :value_dim].contiguous(), None
    past = torch.arange(pages.shape[1], device=q.device) < prefix_len[:, None]  # [B, S]
    scores = torch.bmm(q[:, 0], pages.transpose(1, 2)).masked_fill_(~past[:, None], -torch.inf)  # [B, H, S]
    own = torch.bmm(q[:, 0], tree_kv.transpose(1, 2))  # [B, H, 1]
    p = (torch.cat((scores, own), -1).to(_wide(q)) * scale).softmax(-1).to(q.dtype)
    o = torch.bmm(p[..., :-1], pages[..., :value_dim]) + p[..., -1:] * tree_kv[:, :, :value_dim]
    return o[:, None], None


def dense_experts(
    x: Tensor,
    router: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    top_k: int,
    first_expert: int = 0,
    **routing: Any,
) -> Tensor:
    """`moe` with every expert run on every token, most with weight 0: two large products, no host decision."""
    if first_expert != 0:
        raise NotImplementedError("training has all experts on one rank")
    E, d, inner = down.shape
    weights, experts = route(x, router, bias, top_k=top_k, **routing)
    per_expert = torch.zeros(len(x), E, dtype=weights.dtype, device=x.device)
    per_expert.scatter_(1, experts.long(), weights)
    gate, up = F.linear(x, gate_up.reshape(-1, d)).view(len(x), E, 2 * inner).chunk(2, -1)
    h = F.silu(gate) * up * per_expert[..., None].to(x.dtype)  # [N, E, I]
    return h.view(len(x), -1) @ down.transpose(1, 2).reshape(E * inner, d)


def attend_blocks(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    context_len: Tensor,
    block_k: Tensor,
    block_v: Tensor,
    scale: float,
    *,
    causal: bool = False,
    window: int | None = None,
) -> Tensor:
    """`draft_attn` where page p holds all of sequence p and the rows p * A .. p * A + A - 1 are its A blocks.

    All blocks of a sequence share one attention call over [context | all its blocks] with a mask.
    """
    n, S = k_pages.shape[:2]
    rows, size, heads, _ = q.shape
    A = rows // n

    def by_sequence(x: Tensor) -> Tensor:
        return x.reshape(n, A * size, *x.shape[2:])

    k = torch.cat((k_pages, by_sequence(block_k)), 1).repeat_interleave(heads // k_pages.shape[2], 2)
    v = torch.cat((v_pages, by_sequence(block_v)), 1).repeat_interleave(heads // v_pages.shape[2], 2)
    start = context_len.view(n, A, 1).expand(-1, -1, size).reshape(n, A * size, 1)
    slot = torch.arange(size, device=q.device).repeat(A)  # [A * size]
    context = torch.arange(S, device=q.device)
    own = torch.arange(A, device=q.device).repeat_interleave(size)
    visible = torch.cat(((context < start), (own[:, None] == own).expand(n, -1, -1)), 2)
    # position of the key minus that of the query, [n, A * size, S + A * size]
    distance = torch.cat((context - start - slot[:, None], (slot - slot[:, None]).expand(n, -1, -1)), 2)
    if causal:
        visible = visible & (distance <= 0)
    if window is not None:
        visible = visible & (distance > -window) & (causal | (distance < window))
    q_all, k, v = by_sequence(q).transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    o = F.scaled_dot_product_attention(q_all, k, v, attn_mask=visible[:, None], scale=scale)
    return o.transpose(1, 2).reshape(q.shape)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
