"""The target as it is trained: DeepSeek-V3 with static shapes, and its export to a published-format folder.

The maths is that of `draftwood.models.target` (a test holds the two together); only the form differs: attention is not absorbed,
and experts run as one batched product over equal shares of `capacity` tokens, so that everything compiles.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load_file
from torch import Tensor, nn

CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": None,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 384,
    "intermediate_size": 1024,
    "kv_lora_rank": 128,
    "max_position_embeddings": 1024,
    "moe_intermediate_size": 224,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 7,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "v_head_dim": 64,
    "vocab_size": 4096,
}
TINY = CONFIG | {  # the same architecture for a rehearsal on CPU
    "hidden_size": 64,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "max_position_embeddings": 256,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
}


def wide(x: Tensor) -> Tensor:
    """At least fp32, for what bf16 is too coarse for."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(wide(x), self.weight.shape, self.weight, 1e-6).to(x.dtype)


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """MLA with keys and values written out; RoPE pairs are (j, j + P / 2) here and interleaved in the file."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        d, self.H, self.R = c["hidden_size"], c["num_attention_heads"], c["kv_lora_rank"]
        self.N, self.P, self.V = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        self.q = nn.Linear(d, self.H * (self.N + self.P), bias=False)
        self.kv_a = nn.Linear(d, self.R + self.P, bias=False)
        self.kv_norm = Norm(self.R)
        self.kv_b = nn.Linear(self.R, self.H * (self.N + self.V), bias=False)
        self.o = nn.Linear(self.H * self.V, d, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, T, _ = x.shape
        q_nope, q_rope = self.q(x).view(B, T, self.H, -1).split((self.N, self.P), -1)
        latent, k_rope = self.kv_a(x).split((self.R, self.P), -1)
        k_nope, v = self.kv_b(self.kv_norm(latent)).view(B, T, self.H, -1).split((self.N, self.V), -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin)), -1)
        k_rope = rotate(k_rope[:, :, None], cos, sin).expand(-1, -1, self.H, -1)
        k = torch.cat((k_nope, k_rope), -1)
        o = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True)
        return self.o(o.transpose(1, 2).reshape(B, T, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, P], cos and sin [T, 1, P / 2]."""
    a, b = wide(x).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


class Dispatch(torch.autograd.Function):
    """x [N, d] -> rows of `slots` [S, d]; both directions are gathers, no scatter-add."""

    @staticmethod
    def forward(ctx, x: Tensor, choice_of_slot: Tensor, slot_of_choice: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(slot_of_choice)
        ctx.top_k = top_k
        used = choice_of_slot < len(slot_of_choice)
        return x[(choice_of_slot // top_k).clamp(max=len(x) - 1)] * used[:, None]

    @staticmethod
    def backward(ctx, grad: Tensor):
        (slot_of_choice,) = ctx.saved_tensors
        kept = slot_of_choice < len(grad)
        per_choice = grad[slot_of_choice.clamp(max=len(grad) - 1)] * kept[:, None]
        return per_choice.view(-1, ctx.top_k, grad.shape[-1]).sum(1), None, None, None


class Combine(torch.autograd.Function):
    """rows [S, d], weights [N, k] -> [N, d], the weighted sum of each token's rows; dropped choices add nothing."""

    @staticmethod
    def forward(ctx, rows: Tensor, weights: Tensor, choice_of_slot: Tensor, slot_of_choice: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, choice_of_slot, slot_of_choice)
        kept = (slot_of_choice < len(rows)).view_as(weights)
        picked = rows[slot_of_choice.clamp(max=len(rows) - 1)].view(*weights.shape, -1)
        return (picked * (weights * kept)[..., None].to(rows.dtype)).sum(1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        rows, weights, choice_of_slot, slot_of_choice = ctx.saved_tensors
        kept = (slot_of_choice < len(rows)).view_as(weights)
        picked = rows[slot_of_choice.clamp(max=len(rows) - 1)].view(*weights.shape, -1)
        grad_weights = (wide(picked) * wide(grad)[:, None]).sum(-1) * kept
        n = len(slot_of_choice)
        choice = choice_of_slot.clamp(max=n - 1)
        scale = weights.reshape(-1)[choice] * (choice_of_slot < n)
        grad_rows = grad[choice // weights.shape[1]] * scale[:, None].to(grad.dtype)
        return grad_rows, grad_weights.to(weights.dtype), None, None


class MoE(nn.Module):
    """Sigmoid routing; the bias only selects, and moves against the load after each step (no auxiliary loss)."""

    def __init__(self, c: dict) -> None:
        super().__init__()
        d, self.E, self.k = c["hidden_size"], c["n_routed_experts"], c["num_experts_per_tok"]
        inner = c["moe_intermediate_size"]
        self.router = nn.Parameter(torch.empty(self.E, d))
        self.register_buffer("bias", torch.zeros(self.E))
        self.gate_up = nn.Parameter(torch.empty(self.E, d, 2 * inner))
        self.down = nn.Parameter(torch.empty(self.E, inner, d))
        self.shared = SwiGLU(d, inner * c["n_shared_experts"])

    def forward(self, x: Tensor, capacity_factor: float) -> tuple[Tensor, Tensor]:
        """x [B, T, d] -> [B, T, d] and the load [E], tokens per expert over their mean."""
        flat = x.reshape(-1, x.shape[-1])
        N = len(flat)
        with torch.autocast(x.device.type, enabled=False):
            scores = F.linear(wide(flat), wide(self.router)).sigmoid()
        chosen = (scores + self.bias).topk(self.k, -1).indices  # [N, k]
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        C = min(N, -(-int(capacity_factor * N * self.k / self.E) // 64) * 64)
        with torch.no_grad():
            expert = chosen.flatten()
            mine = (expert == torch.arange(self.E, device=x.device)[:, None]).int()  # [E, N k]
            place = mine.cumsum(1).gather(0, expert[None])[0] - 1
            slot_of_choice = torch.where(place < C, expert * C + place, self.E * C)
            choice_of_slot = torch.full((self.E * C + 1,), N * self.k, device=x.device)
            choice_of_slot = choice_of_slot.scatter(
                0, slot_of_choice, torch.arange(N * self.k, device=x.device)
            )[:-1]
            load = mine.sum(1).float() * (self.E / (N * self.k))
        rows = Dispatch.apply(flat, choice_of_slot, slot_of_choice, self.k).view(self.E, C, -1)
        gate, up = torch.bmm(rows, self.gate_up.to(rows.dtype)).chunk(2, -1)
        rows = torch.bmm(F.silu(gate) * up, self.down.to(rows.dtype)).view(self.E * C, -1)
        routed = Combine.apply(rows, weights, choice_of_slot, slot_of_choice)
        return routed.view_as(x).to(x.dtype) + self.shared(x), load


class Layer(nn.Module):
    def __init__(self, c: dict, index: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = Norm(c["hidden_size"]), Norm(c["hidden_size"])
        self.attention = Attention(c)
        dense = index < c["first_k_dense_replace"]
        self.mlp = SwiGLU(c["hidden_size"], c["intermediate_size"]) if dense else MoE(c)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, capacity_factor: float
    ) -> tuple[Tensor, Tensor | None]:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        h, load = self.mlp_norm(x), None
        if isinstance(self.mlp, MoE):
            h, load = self.mlp(h, capacity_factor)
        else:
            h = self.mlp(h)
        return x + h, load


class TrainableTarget(nn.Module):
    def __init__(self, config: dict, seed: int = 0) -> None:
        super().__init__()
        self.c = c = config
        self.stream: torch.dtype | None = None  # of the residual stream; None is the weights' own
        self.embedding = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c, i) for i in range(c["num_hidden_layers"]))
        self.norm = Norm(c["hidden_size"])
        self.head = nn.Linear(c["hidden_size"], c["vocab_size"], bias=False)
        generator = torch.Generator().manual_seed(seed)
        out = (2 * c["num_hidden_layers"]) ** -0.5  # projections into the residual stream start smaller
        for name, p in self.named_parameters():
            if p.ndim > 1:
                fan_in = p.shape[1] if p.ndim == 2 or name.endswith(("gate_up", "down")) else p.shape[-1]
                std = 0.02 if "embedding" in name else fan_in**-0.5 * (0.5 if "head" in name else 1.0)
                std *= out if name.endswith(("o.weight", "down.weight", "down")) else 1.0
                with torch.no_grad():
                    p.normal_(0.0, std, generator=generator)

    def forward(self, ids: Tensor, capacity_factor: float) -> tuple[Tensor, Tensor]:
        """ids [B, T] -> hidden [B, T, d] after the final norm, and the loads [MoE layers, E]."""
        P = self.c["qk_rope_head_dim"]
        pair = torch.arange(0, P, 2, device=ids.device, dtype=torch.float64)
        angle = torch.arange(ids.shape[1], device=ids.device)[:, None, None] * self.c["rope_theta"] ** (
            -pair / P
        )
        precise = torch.promote_types(self.head.weight.dtype, torch.float32)
        cos, sin = angle.cos().to(precise), angle.sin().to(precise)
        x, loads = self.embedding(ids).to(self.stream or self.head.weight.dtype), []
        for layer in self.layers:
            x, load = layer(x, cos, sin, capacity_factor)
            if load is not None:
                loads.append(load)
        return self.norm(x), torch.stack(loads)

    def loss(self, ids: Tensor, labels: Tensor, capacity_factor: float) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy in nats per token over labels [B, T] that are not -100, and the loads."""
        hidden, loads = self(ids, capacity_factor)
        return self.cross_entropy(hidden, labels), loads

    def cross_entropy(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(wide(self.head(hidden)).flatten(0, 1), labels.flatten())

    def compile_parts(self) -> None:
        """Compile layer by layer: layers of one kind share the code, so this takes seconds, not minutes."""
        for layer in self.layers:
            layer.compile(dynamic=False)
        self.cross_entropy = torch.compile(self.cross_entropy, dynamic=False)

    @torch.no_grad()
    def load_published(self, folder: Path) -> None:
        """Take the weights of a folder that holds what `published` gave."""
        stored = {}
        for file in sorted(folder.glob("*.safetensors")):
            stored |= load_file(file)
        for name, mine in self.views().items():
            value = stored[name].to(mine)
            rows = self.file_order(name)
            mine.copy_(value) if rows is None else mine.index_copy_(0, rows.to(mine.device), value)

    def published(self) -> dict[str, Tensor]:
        """Tensors under the published names: bf16, router biases fp32, experts apart, RoPE rows interleaved."""
        out = {}
        for name, mine in self.views().items():
            rows = self.file_order(name)
            value = mine.detach().cpu().to(torch.float32 if name.endswith("bias") else torch.bfloat16)
            out[name] = (value if rows is None else value[rows]).contiguous()
        return out

    def file_order(self, name: str) -> Tensor | None:
        """Which of our rows each row of the file is; None for the same order."""
        c = self.c
        N, P, R = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["kv_lora_rank"]
        pairs = torch.arange(P).view(2, -1).T.flatten()  # of half-split rows, interleaved
        if name.endswith("q_proj.weight"):
            head = torch.cat((torch.arange(N), N + pairs))
            return (torch.arange(c["num_attention_heads"])[:, None] * (N + P) + head).flatten()
        return torch.cat((torch.arange(R), R + pairs)) if "kv_a_proj" in name else None

    def exact_capacity(self) -> float:
        """The capacity factor at which no token can be dropped: what the published model computes."""
        return self.c["n_routed_experts"] / self.c["num_experts_per_tok"]

    @torch.no_grad()
    def balance(self, loads: Tensor, step: float) -> None:
        for layer, load in zip((m for m in self.layers if isinstance(m.mlp, MoE)), loads, strict=True):
            layer.mlp.bias += step * torch.sign(1.0 - load)

    def views(self) -> dict[str, Tensor]:
        """Views of the parameters under the published names: what is written to one is written to the other."""
        out: dict[str, Tensor] = {}

        def swiglu(name: str, gate_up: Tensor, down: Tensor) -> None:
            out[f"{name}.gate_proj.weight"], out[f"{name}.up_proj.weight"] = gate_up.chunk(2)
            out[f"{name}.down_proj.weight"] = down

        out["model.embed_tokens.weight"], out["model.norm.weight"] = self.embedding.weight, self.norm.weight
        out["lm_head.weight"] = self.head.weight
        for i, layer in enumerate(self.layers):
            name, a = f"model.layers.{i}", layer.attention
            out[f"{name}.input_layernorm.weight"] = layer.attention_norm.weight
            out[f"{name}.post_attention_layernorm.weight"] = layer.mlp_norm.weight
            out[f"{name}.self_attn.q_proj.weight"] = a.q.weight
            out[f"{name}.self_attn.kv_a_proj_with_mqa.weight"] = a.kv_a.weight
            out[f"{name}.self_attn.kv_a_layernorm.weight"] = a.kv_norm.weight
            out[f"{name}.self_attn.kv_b_proj.weight"] = a.kv_b.weight
            out[f"{name}.self_attn.o_proj.weight"] = a.o.weight
            if isinstance(layer.mlp, SwiGLU):
                swiglu(f"{name}.mlp", layer.mlp.gate_up.weight, layer.mlp.down.weight)
                continue
            moe = layer.mlp
            out[f"{name}.mlp.gate.weight"] = moe.router
            out[f"{name}.mlp.gate.e_score_correction_bias"] = moe.bias
            swiglu(f"{name}.mlp.shared_experts", moe.shared.gate_up.weight, moe.shared.down.weight)
            for e in range(moe.E):
                swiglu(f"{name}.mlp.experts.{e}", moe.gate_up[e].T, moe.down[e].T)
        return out
