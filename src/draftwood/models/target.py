"""The target: a DeepSeek-V3 decoder whose MLA runs in latent space over a paged prefix and a draft tree.

One forward serves prefill (a chain of slots), plain decoding (one slot) and tree verification. It reads the
pages, writes nothing into them, and knows neither requests nor sampling. Source: arXiv 2412.19437, section 2.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from draftwood.kernels.embed.torch_impl import blocks
from draftwood.kernels.moe.torch_impl import route
from draftwood.kernels.registry import Kernels
from draftwood.kernels.verify_attn import for_layers
from draftwood.models.config import InnerNormEps, TargetConfig
from draftwood.models.dense_experts import DenseExperts, most_rows
from draftwood.models.int4_experts import Int4Experts, check_stored, stack_int4
from draftwood.models.layers import (
    MLP,
    Fixable,
    Matrix,
    Packable,
    frozen,
    matrix,
)
from draftwood.models.mla import MLA, Attend
from draftwood.models.rope import Rotary
from draftwood.models.streams import beside
from draftwood.models.vocabulary import SoftmaxPart, VocabularySlice
from draftwood.models.weights import Progress, Take, Weights
from draftwood.parallel import ALONE, Ranks


@dataclass(frozen=True)
class TreeBatch:
    """What the slots of a forward may see: each row's committed prefix, and ancestors among the slots."""

    page_table: Tensor  # [B, M] i32
    prefix_len: Tensor  # [B] i32
    ancestors: Tensor  # [B, T, W] i64, see `DraftTree`
    n_slots: Tensor  # [B] i32


@dataclass(frozen=True)
class TargetOutput:
    hidden: Tensor  # [B, T, d], after the final norm
    latents: Tensor  # [L, B, T, C], what `commit_kv` copies into pages
    taps: tuple[Tensor, ...]  # each [B, T, d], residual stream after the tapped layers, in the order asked

    @property
    def features(self) -> Tensor | None:
        """[B, T, len(taps) * d], the taps side by side."""
        return torch.cat(self.taps, -1) if self.taps else None


class MoE(Packable):
    """Routed experts through the `moe` kernel, or `moe_int4`, plus the shared ones, which are not scaled.

    A rank has its share of every expert's inner columns, or with `expert_parallel` its share of the routed experts, and
    gives their part of the sum. All ranks choose the same experts for a token.
    Packed, and for few rows, all of them at once: see `DenseExperts`.
    """

    def __init__(self, config: TargetConfig, kernels: Kernels, take: Take, expert_parallel: bool) -> None:
        super().__init__()
        E, d, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.own, experts = range(E), take.under("experts")
        if expert_parallel:
            self.own = range(*take.shard.bounds(E, what="key `n_routed_experts`"))
            experts = experts.whole()
        self.is_int4 = config.quantization is not None
        self.matrices: tuple[str, ...]
        if self.is_int4:
            self.experts, self.matrices = kernels.moe_int4, Int4Experts._fields
            for name, tensor in stack_int4(E, d, inner, experts, self.own)._asdict().items():
                self.register_parameter(name, frozen(tensor))
        else:
            self.experts, self.matrices = kernels.moe, ("gate_up", "down")
            self.gate_up, self.down = map(matrix, _stack_experts(E, d, inner, experts, self.own))
        # The router stays in fp32 (fp64 in an fp64 model): near ties decide which experts run.
        precise = torch.promote_types(take.dtype, torch.float32)
        self.router = frozen(take("gate.weight", E, d, dtype=precise))
        self.bias = frozen(take("gate.e_score_correction_bias", E, dtype=torch.float32))
        n_shared = config.n_shared_experts or 0
        self.shared = MLP(d, inner * n_shared, kernels, take.under("shared_experts")) if n_shared else None
        self.routing: dict[str, Any] = {
            "top_k": config.num_experts_per_tok,
            "n_group": config.n_group,
            "topk_group": config.topk_group,
            "norm_topk_prob": config.norm_topk_prob,
            "scaling": config.routed_scaling_factor,
        }
        self.dense: DenseExperts | None = None
        self.dense_rows = 0

    def pack(self) -> None:
        if self.is_int4:
            return
        self.dense_rows = most_rows(len(self.router), self.routing["top_k"])
        if self.dense_rows > 0:
            shared = None if self.shared is None else (self.shared.gate_up.weight, self.shared.down.weight)
            self.dense = DenseExperts.of(self.gate_up, self.down, shared, self.own, len(self.router))

    def forward(self, x: Tensor) -> Tensor:
        """x [N, d] -> [N, d]."""
        first, *more = self.addends(x)
        return first + more[0] if more else first

    def addends(self, x: Tensor) -> tuple[Tensor, ...]:
        """One or two tensors that add up to the result."""
        if self.dense is not None and len(x) <= self.dense_rows:
            return (self.dense(x, *route(x, self.router, self.bias, **self.routing)),)
        experts, first = (getattr(self, name) for name in self.matrices), self.own.start
        shared = None if self.shared is None else beside(x, partial(self.shared, x))
        routed = self.experts(x, self.router, self.bias, *experts, first_expert=first, **self.routing)
        return (routed,) if shared is None else (routed, shared())


class Layer(Fixable):
    """x += attention(norm(x)); x += MLP or MoE(norm(x)). The first norm and the last sum are the caller's, in one with others."""

    def __init__(
        self,
        config: TargetConfig,
        index: int,
        kernels: Kernels,
        take: Take,
        ranks: Ranks,
        expert_parallel: bool,
    ) -> None:
        super().__init__()
        self.eps, self.ranks = config.rms_norm_eps, ranks
        self.add_rms_norm, self.all_reduce = kernels.add_rms_norm, ranks.all_reduce
        self.attention_norm = frozen(take("input_layernorm.weight", config.hidden_size))
        self.mlp_norm = frozen(take("post_attention_layernorm.weight", config.hidden_size))
        self.attention = MLA(config, kernels, take.under("self_attn"))
        self.mlp: MLP | MoE
        if config.is_moe(index):
            self.mlp = MoE(config, kernels, take.under("mlp"), expert_parallel)
        else:
            self.mlp = MLP(config.hidden_size, config.intermediate_size, kernels, take.under("mlp"))

    def fix(self, kernels: Kernels) -> None:
        self.all_reduce = self.ranks.sum_in_order

    def forward(
        self, x: Tensor, h: Tensor, cos: Tensor, sin: Tensor, pages: Tensor, attend: Attend, latents: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """x [B T, d] and its `attention_norm` -> x after attention, and what is still to be added to it."""
        added = self.all_reduce(self.attention(h, cos, sin, pages, attend, latents))
        x, h = self.add_rms_norm(x, self.mlp_norm, self.eps, added)
        if self.ranks.size == 1:
            return x, self.mlp.addends(h)
        return x, (self.all_reduce(self.mlp(h)),)


class Target(nn.Module):
    """A DeepSeek-V3 model, inference only. Build it with `from_folder`."""

    def __init__(
        self,
        config: TargetConfig,
        take: Take,
        *,
        kernels: Kernels,
        device: torch.device,
        ranks: Ranks = ALONE,
        expert_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.attend, self.ranks = config, kernels.verify_attn, ranks
        self.add_rms_norm, self.embed_rows = kernels.add_rms_norm, kernels.embed
        V, d = config.vocab_size, config.hidden_size
        self.slice = VocabularySlice.of(V, take.shard)
        self.embedding = frozen(take.vocabulary("model.embed_tokens.weight", V, d))
        self.layers = nn.ModuleList(
            Layer(config, i, kernels, take.under(f"model.layers.{i}"), ranks, expert_parallel)
            for i in range(config.num_hidden_layers)
        )
        self.norm = frozen(take("model.norm.weight", d))
        tied = config.tie_word_embeddings
        self.head = Matrix(self.embedding if tied else take.vocabulary("lm_head.weight", V, d))
        self.rotary = Rotary(config.rope, config.qk_rope_head_dim, config.rope.amplitude(), kernels, device)

    @classmethod
    def from_folder(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        kernels: Kernels,
        progress: Progress | None = None,
        inner_norm_eps: InnerNormEps = "reference",
        ranks: Ranks = ALONE,
        expert_parallel: bool = False,
    ) -> Self:
        """Load config and this rank's share of the tensors, see `MoE` for `expert_parallel`.

        Raises `ModelError` naming the key, file or tensor at fault.
        """
        config, device = TargetConfig.from_folder(path, inner_norm_eps=inner_norm_eps), torch.device(device)
        config.check_ranks(ranks.shard, expert_parallel=expert_parallel)
        weights = Weights(
            Path(path), lambda name: own_name(name, config), dtype, device, progress, ranks.shard
        )
        check_stored(weights, config)
        target = cls(
            config,
            Take(weights),
            kernels=kernels,
            device=device,
            ranks=ranks,
            expert_parallel=expert_parallel,
        )
        weights.finish()
        return target

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    def forward(
        self, tokens: Tensor, depths: Tensor, pages: Tensor, batch: TreeBatch, taps: tuple[int, ...] = ()
    ) -> TargetOutput:
        """Run the slots of every row against its prefix.

        Args:
            tokens: [B, T] i32; slots >= n_slots may hold any token id of the vocabulary.
            depths: [B, T] i32, how far behind the prefix each slot's position is; 0 comes right after it.
            pages: [L, n_pages, page, C], read only.
            batch: what each slot sees.
            taps: layers whose output is wanted; the same layer may be asked for twice.
        """
        tables = beside(depths, lambda: self.rotary(depths, self.dtype, batch.prefix_len))
        x = self.embed(tokens.flatten())  # [B T, d]
        latents = x.new_empty(len(self.layers), *tokens.shape, self.config.latent_dim)
        attend = for_layers(
            self.attend, batch.page_table, batch.prefix_len, batch.ancestors, batch.n_slots, pages.shape[2]
        )
        tapped: dict[int, Tensor] = {}
        first, *others = (layer.attention_norm for layer in self.layers)
        x, h = self.add_rms_norm(x, first, self.config.rms_norm_eps)
        cos, sin = tables()
        for i, (layer, next_norm) in enumerate(zip(self.layers, (*others, self.norm), strict=True)):
            x, added = layer(x, h, cos, sin, pages[i], attend, latents[i])
            x, h = self.add_rms_norm(x, next_norm, self.config.rms_norm_eps, *added)
            if i in taps:
                tapped[i] = x
        h, *streams = (y.view(*tokens.shape, -1) for y in (h, *(tapped[i] for i in taps)))
        return TargetOutput(h, latents, tuple(streams))

    def embed(self, tokens: Tensor, *, block: int = 1, filler: int = 0) -> Tensor:
        """tokens [N] i32 -> [N block, d], see the kernel `embed`."""
        if self.ranks.size == 1:
            rows: Tensor = self.embed_rows(tokens, self.embedding, block=block, filler=filler)
            return rows
        row, inside = self.slice.row(blocks(tokens, block, filler))
        return self.ranks.all_reduce(F.embedding(row, self.embedding).masked_fill_(~inside[..., None], 0))

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d], after the final norm -> [..., V] f32; of several ranks, this one's slice of the vocabulary."""
        return self.slice.filled(self.head.wide(hidden))

    def logprobs(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """log softmax at tokens [...] i32 of `logits` [..., V], f32; the same on all ranks."""
        if self.ranks.size == 1:
            return logits.log_softmax(-1).gather(-1, tokens.long()[..., None])[..., 0]
        row, inside = self.slice.row(tokens)
        own = logits.gather(-1, row.long()[..., None])[..., 0].masked_fill(~inside, -torch.inf)
        parts = self.ranks.gather(SoftmaxPart(own, logits.logsumexp(-1)))
        chosen, sums = (torch.stack(x) for x in zip(*((p.chosen, p.sum) for p in parts), strict=True))
        return chosen.amax(0) - sums.logsumexp(0)


def own_name(name: str, config: TargetConfig) -> str | None:
    """A stored tensor's name without wrapper prefixes; None for what text generation does not need."""
    if config.wrapped:
        if name.startswith(("vision_tower.", "mm_projector.")):
            return None  # text only
        name = name.removeprefix("language_model.")
        if name.startswith(("layers.", "embed_tokens.", "norm.")):
            name = f"model.{name}"  # some re-quantised exports drop the inner prefix
    if name.endswith("rotary_emb.inv_freq"):
        return None  # computed from the config
    if name == "lm_head.weight" and config.tie_word_embeddings:
        return None  # a copy of the embedding
    first = config.num_hidden_layers
    for layer in range(first, first + config.num_nextn_predict_layers):
        if name.startswith(f"model.layers.{layer}."):
            return None  # MTP layers
    return name


def _stack_experts(E: int, d: int, inner: int, take: Take, own: range) -> tuple[Tensor, Tensor]:
    """gate_up [E', 2 I, d], gate rows first, and down [E', d, I] from one tensor per expert and projection.

    E' counts the experts `own` out of E; I is the rank's share of `inner`.
    """
    I = inner // take.shard.size
    gate_up, down = take.empty(len(own), 2 * I, d), take.empty(len(own), d, I)
    for other in set(range(E)).difference(own):
        take.under(str(other)).skip(*(f"{name}_proj.weight" for name in ("gate", "up", "down")))
    for e, number in enumerate(own):
        expert = take.under(str(number))
        gate_up[e, :I] = expert.rows("gate_proj.weight", inner, d)
        gate_up[e, I:] = expert.rows("up_proj.weight", inner, d)
        down[e] = expert.columns("down_proj.weight", d, inner)
    return gate_up, down
