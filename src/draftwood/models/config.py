"""What the engine knows about a target: `TargetConfig`, read from a Hugging Face folder.

DeepSeek-V3 and Kimi K2 (`deepseek_v3`, `kimi_k2`), plain or inside the `kimi_k25` wrapper of K2.5 and K2.6.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from draftwood.models.errors import ModelError
from draftwood.models.json_config import LIBRARY_KEYS, FolderConfig, Values, parse, read_json, select
from draftwood.models.quantization import KEY, Int4Groups, read_quantization
from draftwood.models.rope import Rope, take_rope
from draftwood.models.shard import Shard

InnerNormEps = float | Literal["reference", "config"]
"""Epsilon of the two norms inside the attention. The HF code builds them with its class default, whatever
`rms_norm_eps` says ("reference", what the published weights were exported with); most serving engines use
`rms_norm_eps` ("config")."""

REFERENCE_INNER_NORM_EPS = 1e-6

# K2 files name only one of [EOS] and <|im_end|>, not always the one the model ends its turn with.
KIMI_VOCAB_SIZE, KIMI_EOS = 163840, (163585, 163586)

_IGNORED = LIBRARY_KEYS | {
    "aux_loss_alpha",  # training losses
    "seq_aux",
    "router_aux_loss_coef",
    "output_router_logits",
    "ep_size",  # how the trainer spread the experts
    "head_dim",  # derived from the qk_* sizes
    "qk_head_dim",
}

_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "moe_layer_freq": (1,),
    "rope_interleave": (True,),
}

_WRAPPER_IGNORED = LIBRARY_KEYS | {
    "vision_config",  # text only: the vision tower's tensors are skipped too
    "ignore_index",
    "media_placeholder_token_id",
    "use_unified_vision_chunk",
    "video_placeholder",
    "image_token_id",
}


class TargetConfig(FolderConfig):
    """A DeepSeek-V3 model's numbers, all of them from the folder. Sizes are counts of elements."""

    model_type: Literal["deepseek_v3", "kimi_k2"]
    wrapped: bool = False  # inside kimi_k25: tensors carry the prefix `language_model.`
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt | None = None
    q_lora_rank: PositiveInt | None
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt = Field(multiple_of=2)
    v_head_dim: PositiveInt
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    first_k_dense_replace: NonNegativeInt
    n_routed_experts: PositiveInt
    n_shared_experts: NonNegativeInt | None
    num_experts_per_tok: PositiveInt
    n_group: PositiveInt
    topk_group: PositiveInt
    norm_topk_prob: bool
    routed_scaling_factor: PositiveFloat
    rms_norm_eps: PositiveFloat
    inner_norm_eps: PositiveFloat = REFERENCE_INNER_NORM_EPS  # q_a_layernorm and kv_a_layernorm
    rope: Rope
    max_position_embeddings: PositiveInt
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: NonNegativeInt = 0  # MTP layers, not loaded: DFlash drafts instead
    bos_token_id: NonNegativeInt | None = None
    eos_token_ids: tuple[NonNegativeInt, ...] = ()
    quantization: Int4Groups | None = None  # of the routed experts, and of nothing else

    @classmethod
    def from_folder(cls, path: str | Path, *, inner_norm_eps: InnerNormEps = "reference") -> Self:
        """Read `config.json` and, if there, `generation_config.json`. Raises `ModelError` naming the key."""
        file = Path(path) / "config.json"
        top = read_json(file)
        wrapped = top.get("model_type") == "kimi_k25"
        values = _unwrap(top, file) if wrapped else top
        quantization = read_quantization(values, file)
        eos = _token_ids(top, file) + _token_ids(values, file)
        generation = Path(path) / "generation_config.json"
        if generation.exists():
            eos += _token_ids(read_json(generation), generation)
        if values.get("vocab_size") == KIMI_VOCAB_SIZE:
            eos += KIMI_EOS
        values = select(values, file, fixed=_FIXED, ignored=_IGNORED | {"eos_token_id", KEY})
        rope, values = take_rope(values, file)
        if "num_mtp_layers" in values:
            values.setdefault("num_nextn_predict_layers", values.pop("num_mtp_layers"))
        for reserved in ("rope", "wrapped", "inner_norm_eps", "eos_token_ids", "quantization"):
            if reserved in values:
                raise ModelError(
                    f"{file}: key `{reserved}` is unknown, and an unknown key may change the maths"
                )
        added = {
            "wrapped": wrapped,
            "rope": rope.model_dump(),
            "inner_norm_eps": _inner_norm_eps(inner_norm_eps, values),
            "eos_token_ids": sorted(set(eos)),
            "quantization": None if quantization is None else quantization.model_dump(),
        }
        return parse(cls, {**values, **added}, file)

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        E, groups = self.n_routed_experts, self.n_group
        if self.num_key_value_heads not in (None, self.num_attention_heads):
            raise ValueError(
                "`num_key_value_heads` must equal `num_attention_heads`: MLA has no grouped heads"
            )
        if E % groups or self.topk_group > groups:
            raise ValueError(
                "`n_group` must divide `n_routed_experts`, and `topk_group` not exceed `n_group`"
            )
        if groups > 1 and E // groups < 2:
            raise ValueError("a group needs two experts at least: its score is the sum of its best two")
        if self.num_experts_per_tok > self.topk_group * (E // groups):
            raise ValueError("`num_experts_per_tok` exceeds the experts in `topk_group` groups")
        for token in (*self.eos_token_ids, self.bos_token_id or 0):
            if token >= self.vocab_size:
                raise ValueError(f"token id {token} (bos or eos) is not below `vocab_size` {self.vocab_size}")
        return self

    @model_validator(mode="after")
    def _only_experts_are_packed(self) -> Self:
        if self.quantization is None:
            return self
        for key in ("hidden_size", "moe_intermediate_size"):
            if getattr(self, key) % 32:
                raise ValueError(f"key `{key}` must be a multiple of 32, the group of INT4 experts")
        for module in self._modules():
            if self.is_packed(module) != (".mlp.experts." in module):
                raise ValueError(
                    f"key `{KEY}`: by its targets and ignore list `{module}` is "
                    f"{'packed' if self.is_packed(module) else 'not packed'}; "
                    "supported are packed routed experts, and nothing else packed"
                )
        return self

    def check_ranks(self, shard: Shard, *, expert_parallel: bool = False) -> None:
        """Raise `ModelError` naming a key whose number cannot be shared by this many ranks."""
        keys = ["num_attention_heads"]
        if self.first_k_dense_replace > 0:
            keys.append("intermediate_size")
        if self.first_k_dense_replace < self.num_hidden_layers:
            keys.append("moe_intermediate_size")
        for key in keys:
            shard.bounds(getattr(self, key), what=f"key `{key}`")
        if expert_parallel:
            shard.bounds(self.n_routed_experts, what="key `n_routed_experts`")
        elif self.quantization is not None:
            shard.bounds(
                self.moe_intermediate_size // 32, what="key `moe_intermediate_size`, in groups of 32"
            )
        if shard.uneven(self.vocab_size)[0] >= self.vocab_size:
            raise ModelError(
                f"key `vocab_size`: {self.vocab_size} tokens leave rank {shard.rank} of {shard.size} with none"
            )

    @property
    def latent_dim(self) -> int:
        """C: numbers cached per token and layer, the latent (R) and then the rope key (P)."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """(dn + dr)^-1/2, times m(mscale_all_dim)^2 under YaRN: without it K2's scores are off by a factor 2."""
        scale: float = (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        return scale * self.rope.mscale_for(self.rope.mscale_all_dim or 0.0) ** 2

    @property
    def choices(self) -> dict[str, str]:
        """What was decided where the file and the code it was exported with differ: setting -> value and reason."""
        if self.inner_norm_eps == self.rms_norm_eps:
            return {}
        why = "the reference code's" if self.inner_norm_eps == REFERENCE_INNER_NORM_EPS else "asked for"
        return {"inner_norm_eps": f"{self.inner_norm_eps:g}, {why}; `rms_norm_eps` is {self.rms_norm_eps:g}"}

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace

    def is_packed(self, module: str) -> bool:
        """Whether the weight of a module, by the model's own name, is kept as INT4."""
        return self.quantization is not None and self.quantization.covers(module, wrapped=self.wrapped)

    def _modules(self) -> Iterator[str]:
        """One of each kind that has a weight, in the first and last layer with and without experts."""
        yield from ("model.embed_tokens", "model.norm", "lm_head")
        dense = [i for i in range(self.num_hidden_layers) if not self.is_moe(i)]
        moe = [i for i in range(self.num_hidden_layers) if self.is_moe(i)]
        q = ("q_a_proj", "q_a_layernorm", "q_b_proj") if self.q_lora_rank else ("q_proj",)
        attention = (*q, "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")
        blocks = ["shared_experts.", "experts.0.", f"experts.{self.n_routed_experts - 1}."]
        for layers, inner in ((dense, [""]), (moe, blocks if self.n_shared_experts else blocks[1:])):
            for i in {*layers[:1], *layers[-1:]}:
                layer = f"model.layers.{i}."
                yield from (layer + name for name in ("input_layernorm", "post_attention_layernorm"))
                yield from (f"{layer}self_attn.{name}" for name in attention)
                yield from (
                    f"{layer}mlp.{block}{name}_proj" for block in inner for name in ("gate", "up", "down")
                )
                if layers is moe:
                    yield f"{layer}mlp.gate"


def _inner_norm_eps(asked: InnerNormEps, values: Values) -> Any:
    if asked == "config":
        return values.get("rms_norm_eps")
    if isinstance(asked, str) and asked != "reference":
        raise ModelError(f"inner_norm_eps: expected reference, config or a number, got {asked}")
    return REFERENCE_INNER_NORM_EPS if asked == "reference" else asked


def _unwrap(top: Values, file: Path) -> Values:
    """The text model's keys of a `kimi_k25` file; nothing beside them may be unknown."""
    text = top.get("text_config")
    if not isinstance(text, dict):
        raise ModelError(f"{file}: key `text_config` must be an object in a `kimi_k25` model")
    known = _WRAPPER_IGNORED | {
        "model_type",
        "text_config",
        "eos_token_id",
        "bos_token_id",
        "tie_word_embeddings",
        KEY,
    }
    for key in top:
        if key not in known:
            raise ModelError(f"{file}: key `{key}` is unknown, and an unknown key may change the maths")
    shared: Values = {}
    for key in ("tie_word_embeddings", KEY):
        said = [block[key] for block in (top, text) if block.get(key) is not None]
        if any(value != said[0] for value in said):
            raise ModelError(f"{file}: key `{key}` differs between the top level and `text_config`")
        if said:
            shared[key] = said[0]
    return text | shared


def _token_ids(values: Values, file: Path) -> tuple[int, ...]:
    """`eos_token_id`: null, one id or a list."""
    ids = values.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int for i in ids):
        raise ModelError(f"{file}: key `eos_token_id` must be a token id or a list of them, got {ids}")
    return tuple(ids)
