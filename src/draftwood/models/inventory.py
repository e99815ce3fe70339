"""Every tensor that a config implies: its name, shape, what it is part of and how ranks share it.

Names are the models' own, as `own_name` makes them of those in the files. `found` holds a folder against such a
list; no tensor is read and no model is built.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal

import torch

from draftwood.kernels.moe_int4 import GROUP, PER_WORD
from draftwood.models.config import TargetConfig
from draftwood.models.drafter_config import DrafterConfig
from draftwood.models.errors import ModelError
from draftwood.models.int4_experts import SCALES, SHAPES
from draftwood.models.weights import DTYPES, INDEX, Header, Rename, Weights, read_index

Split = Literal["heads", "kv heads", "columns", "experts", "vocabulary", "replicated"]
"""What ranks share a tensor by; `columns` are those of an inner width, `experts` either those of each or whole ones."""

Memory = Literal["converted", "fp32", "as stored", "dropped"]
"""What becomes of it in memory: the engine's own type, fp32 whatever that is, the stored bytes, or nothing."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor; `shape` is the whole one's, as the files have it, whatever ranks share."""

    name: str
    shape: tuple[int, ...]
    part: str
    split: Split = "replicated"
    memory: Memory = "converted"
    dtype: str = "BF16"  # in the files, under their own name for it; assumed until seen
    optional: bool = False  # only some exports have it
    copies: int = 1  # tensors like this one: it stands for the same one of every expert

    @property
    def numel(self) -> int:
        """Numbers in it and its copies."""
        return prod(self.shape) * self.copies


def target_tensors(c: TargetConfig, *, one_expert: bool = False) -> Iterator[TensorSpec]:
    """The target's tensors, without the vision tower and MTP layers, which are not loaded.

    With `one_expert`, a layer's first routed expert stands for all of them.
    """
    d = c.hidden_size
    yield TensorSpec("model.embed_tokens.weight", (c.vocab_size, d), "embedding", "vocabulary")
    for i in range(c.num_hidden_layers):
        layer = f"model.layers.{i}."
        yield TensorSpec(layer + "input_layernorm.weight", (d,), "norms")
        yield TensorSpec(layer + "post_attention_layernorm.weight", (d,), "norms")
        yield from _mla(c, layer + "self_attn.")
        if c.is_moe(i):
            yield from _moe(c, layer + "mlp.", one_expert)
        else:
            yield from _mlp(layer + "mlp.", d, c.intermediate_size, "dense MLP")
    yield TensorSpec("model.norm.weight", (d,), "norms")
    if not c.tie_word_embeddings:
        yield TensorSpec("lm_head.weight", (c.vocab_size, d), "head", "vocabulary")


def drafter_tensors(c: DrafterConfig) -> Iterator[TensorSpec]:
    """The drafter's tensors."""
    d, hd = c.hidden_size, c.head_dim
    q, kv = c.num_attention_heads * hd, c.num_key_value_heads * hd
    yield TensorSpec("fc.weight", (d, len(c.target_layer_ids) * d), "context projection", "columns")
    yield TensorSpec("hidden_norm.weight", (d,), "norms")
    yield TensorSpec("norm.weight", (d,), "norms")
    yield TensorSpec("mask_embedding", (d,), "norms", optional=True)
    for i in range(c.num_hidden_layers):
        layer = f"layers.{i}."
        yield TensorSpec(layer + "input_layernorm.weight", (d,), "norms")
        yield TensorSpec(layer + "post_attention_layernorm.weight", (d,), "norms")
        for name, shape in (("q", (q, d)), ("k", (kv, d)), ("v", (kv, d)), ("o", (d, q))):
            yield TensorSpec(f"{layer}self_attn.{name}_proj.weight", shape, "attention", "kv heads")
        yield TensorSpec(layer + "self_attn.q_norm.weight", (hd,), "norms")
        yield TensorSpec(layer + "self_attn.k_norm.weight", (hd,), "norms")
        yield from _mlp(layer + "mlp.", d, c.intermediate_size, "MLP")


def found(specs: Iterable[TensorSpec], folder: Path, rename: Rename) -> tuple[list[TensorSpec] | None, str]:
    """The specs with their types as the folder's files have them, and what is known from where.

    None without any safetensors file: names are then held against the index, if there is one.
    Raises `ModelError` naming the first tensor that is missing, misshapen, of a wrong type or without a place, or the
    file that is missing or truncated.
    """
    if any(folder.glob("*.safetensors")):
        weights = Weights(folder, rename, torch.bfloat16, torch.device("cpu"))
        return list(_as_stored(specs, weights.headers(), folder)), "sizes from the headers of the files"
    sizes = "sizes from config.json, of 16-bit numbers where it says nothing else"
    if not (folder / INDEX).exists():
        return None, f"no weight files: {sizes}"
    stored = {own: name for name in read_index(folder) if (own := rename(name)) is not None}
    for spec in specs:
        if stored.pop(spec.name, None) is None and not spec.optional:
            raise ModelError(f"{folder / INDEX}: tensor `{spec.name}` {list(spec.shape)} is missing")
    if stored:
        name = min(stored.values())
        raise ModelError(f"{folder / INDEX}: tensor `{name}` has no place in this model ({len(stored)} such)")
    return None, f"no weight files: names from their index, {sizes}"


def _as_stored(
    specs: Iterable[TensorSpec], headers: Mapping[str, Header], folder: Path
) -> Iterator[TensorSpec]:
    left = dict(headers)
    for spec in specs:
        header = left.pop(spec.name, None)
        if header is None and spec.optional:
            continue
        if header is None:
            raise ModelError(f"{folder}: tensor `{spec.name}` {list(spec.shape)} is missing")
        if header.shape != spec.shape:
            raise ModelError(f"{header.where} has shape {list(header.shape)}, expected {list(spec.shape)}")
        types = _types(spec)
        if header.dtype not in types:
            raise ModelError(f"{header.where} is {header.dtype}, expected {' or '.join(sorted(types))}")
        yield spec if header.dtype == spec.dtype else replace(spec, dtype=header.dtype)
    if left:
        where = min(header.where for header in left.values())
        raise ModelError(f"{where} has no place in this model ({len(left)} such)")


def _types(spec: TensorSpec) -> Collection[str]:
    """Those that the loader takes."""
    if spec.dtype == "I32":
        return SHAPES if spec.memory == "dropped" else ("I32",)
    return SCALES if spec.memory == "as stored" else DTYPES


def _mla(c: TargetConfig, prefix: str) -> Iterator[TensorSpec]:
    H, R, P = c.num_attention_heads, c.kv_lora_rank, c.qk_rope_head_dim
    N, V, d, Q = c.qk_nope_head_dim, c.v_head_dim, c.hidden_size, c.q_lora_rank
    latent, heads = "attention, to latents", "attention, per head"
    if Q is None:
        yield TensorSpec(prefix + "q_proj.weight", (H * (N + P), d), heads, "heads")
    else:
        yield TensorSpec(prefix + "q_a_proj.weight", (Q, d), latent)
        yield TensorSpec(prefix + "q_a_layernorm.weight", (Q,), "norms")
        yield TensorSpec(prefix + "q_b_proj.weight", (H * (N + P), Q), heads, "heads")
    yield TensorSpec(prefix + "kv_a_proj_with_mqa.weight", (R + P, d), latent)
    yield TensorSpec(prefix + "kv_a_layernorm.weight", (R,), "norms")
    yield TensorSpec(prefix + "kv_b_proj.weight", (H * (N + V), R), heads, "heads")
    yield TensorSpec(prefix + "o_proj.weight", (d, H * V), heads, "heads")


def _mlp(prefix: str, d: int, inner: int, part: str, split: Split = "columns") -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate_proj.weight", (inner, d), part, split)
    yield TensorSpec(prefix + "up_proj.weight", (inner, d), part, split)
    yield TensorSpec(prefix + "down_proj.weight", (d, inner), part, split)


def _moe(c: TargetConfig, prefix: str, one_expert: bool) -> Iterator[TensorSpec]:
    E, d, inner = c.n_routed_experts, c.hidden_size, c.moe_intermediate_size
    yield TensorSpec(prefix + "gate.weight", (E, d), "router", memory="fp32")
    yield TensorSpec(prefix + "gate.e_score_correction_bias", (E,), "router", memory="fp32", dtype="F32")
    if c.n_shared_experts:
        yield from _mlp(prefix + "shared_experts.", d, inner * c.n_shared_experts, "shared experts")
    for e in range(1 if one_expert else E):
        for weight in _mlp(f"{prefix}experts.{e}.", d, inner, "routed experts", "experts"):
            weight = replace(weight, copies=E) if one_expert else weight
            yield from [weight] if c.quantization is None else _int4(weight)


def _int4(weight: TensorSpec) -> Iterator[TensorSpec]:
    """compressed-tensors `pack-quantized`: eight numbers to a word, a scale per group of a row, the shape."""
    (out, columns), name = weight.shape, weight.name
    weight = replace(weight, part="routed experts, INT4", memory="as stored")
    yield replace(weight, name=name + "_packed", shape=(out, columns // PER_WORD), dtype="I32")
    yield replace(weight, name=name + "_scale", shape=(out, columns // GROUP))
    yield replace(weight, name=name + "_shape", shape=(2,), dtype="I32", memory="dropped")
