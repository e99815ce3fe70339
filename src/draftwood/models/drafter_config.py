"""What the engine knows about a drafter: `DrafterConfig`, read from a DFlash folder.

A DFlash config is a Qwen3 config plus a block size, a mask token and the target layers it listens to, at the
top level or in `dflash_config`. Families that only look like DFlash are refused by name.
Source: DFlash, arXiv 2602.06036.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from draftwood.models.config import TargetConfig
from draftwood.models.errors import ModelError
from draftwood.models.json_config import LIBRARY_KEYS, FolderConfig, Values, parse, read_json, select
from draftwood.models.rope import Rope, YarnRule, take_rope

ARCHITECTURE = "DFlashDraftModel"

YARN_RULES = get_args(YarnRule)

# Width, layers, block, rope base and factor of both Kimi drafters. K2.5's was published with rope type `yarn`, K2.6's
# with `deepseek_yarn`; else their configs are the same.
KIMI_SHAPE = (7168, 6, 8, 5e4, 64.0)

_OTHER_FAMILIES = {  # a key that only this family has -> the family
    "conv_kernel_size": "DFlash2",
    "conv_group_size": "DFlash2",
    "selector_rank": "DFlash2",
    "selector_top_k": "DFlash2",
}

_IGNORED = LIBRARY_KEYS | {
    "model_type",  # the architecture decides
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",  # embedding and head are the target's
    "mask_token",  # the name of `mask_token_id`
    "swa_window_size",  # only with `use_swa`
}

_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_swa": (False, None),
    "attention_sink_bias": (False, None),
    "attention_value_scale": (1, None),
    "sample_from_anchor": (False, None),
    "output_multiplier": (1, None),
    "final_logit_softcapping": (None,),
    "attention_mode": ("gqa", None),
    "projector_type": ("dflash", None),  # Domino and DSpark say so here
}


@dataclass(frozen=True)
class LayerAttention:
    """What a draft layer sees; the two arguments of the same names of `draft_attn`."""

    causal: bool
    window: int | None


class DrafterConfig(FolderConfig):
    """A DFlash drafter's numbers. `block_size` counts the anchor, so it drafts up to block_size - 1 tokens."""

    file: Path
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt = Field(multiple_of=2)
    rms_norm_eps: PositiveFloat
    max_position_embeddings: PositiveInt
    rope: Rope
    block_size: int = Field(ge=2)
    mask_token_id: NonNegativeInt
    target_layer_ids: tuple[NonNegativeInt, ...] = Field(min_length=1)
    num_target_layers: PositiveInt | None = None
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = None
    sliding_window: PositiveInt | None = None
    use_sliding_window: bool | None = None
    max_window_layers: NonNegativeInt | None = None
    is_causal: bool | None = None
    causal: bool | None = None

    @classmethod
    def from_folder(cls, path: str | Path) -> Self:
        """Read `config.json`. Raises `ModelError` naming the key, or the family if it is not DFlash."""
        file = Path(path) / "config.json"
        top = read_json(file)
        values = _merge_nested(top, file)
        _refuse_other_families(values, file)
        values = select(values, file, fixed=_FIXED, ignored=_IGNORED)
        rope, values = take_rope(values, file)
        for reserved in ("rope", "file"):
            if reserved in values:
                raise ModelError(
                    f"{file}: key `{reserved}` is unknown, and an unknown key may change the maths"
                )
        if values.get("target_layer_ids") is None:
            values["target_layer_ids"] = _default_layer_ids(values, file)
        return parse(cls, {**values, "rope": rope.model_dump(), "file": str(file)}, file)

    @model_validator(mode="after")
    def _sizes_agree(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("`num_key_value_heads` must divide `num_attention_heads`")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(
                f"`mask_token_id` {self.mask_token_id} is not below `vocab_size` {self.vocab_size}"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"`layer_types` has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )
        if any(self._slides(i) for i in range(self.num_hidden_layers)) and self.sliding_window is None:
            raise ValueError("a layer is `sliding_attention`, but `sliding_window` is not set")
        if (
            self.layer_types is not None
            and "sliding_attention" in self.layer_types
            and self.use_sliding_window is False
        ):
            raise ValueError("`layer_types` names sliding layers, but `use_sliding_window` is false")
        return self

    @property
    def layers(self) -> tuple[LayerAttention, ...]:
        """`is_causal` decides, then `causal`; without both, sliding layers are causal and full ones are not."""
        explicit = self.is_causal if self.is_causal is not None else self.causal
        return tuple(
            LayerAttention(
                causal=self._slides(i) if explicit is None else explicit,
                window=self.sliding_window if self._slides(i) else None,
            )
            for i in range(self.num_hidden_layers)
        )

    @property
    def yarn_rule(self) -> tuple[YarnRule, str]:
        """How YaRN scales cos and sin when nobody says otherwise, and why."""
        rope = self.rope
        shape = (self.hidden_size, self.num_hidden_layers, self.block_size, rope.rope_theta, rope.factor)
        if not rope.is_yarn:
            return "ratio", "the drafter has no YaRN"
        if rope.attention_factor is not None:
            return "ratio", "the config's `attention_factor` goes before any rule"
        if rope.rope_type == "yarn" and shape == KIMI_SHAPE:
            return "factor", "Kimi-K2.5-DFlash: acceptance was reported to drop with the ratio of the mscales"
        return "ratio", "the config's own numbers, as transformers and DeepSeek read them"

    def choose_yarn_rule(self, asked: YarnRule | None) -> tuple[YarnRule, str]:
        """The rule asked for, or the default, with its reason.

        Raises `ModelError` if one is asked for where no rule has a say.
        """
        if asked is None:
            return self.yarn_rule
        if asked not in YARN_RULES:
            raise ModelError(f"yarn_rule: expected {' or '.join(YARN_RULES)}, got {asked}")
        if not self.rope.is_yarn or self.rope.attention_factor is not None:
            raise ModelError(f'yarn_rule: "{asked}" was asked for, but {self.yarn_rule[1]} ({self.file})')
        return asked, "asked for"

    def choices(self, yarn_rule: YarnRule | None = None) -> dict[str, str]:
        """What was decided where engines disagree: setting -> value and reason. Empty without YaRN."""
        if not self.rope.is_yarn:
            return {}
        rule, why = self.choose_yarn_rule(yarn_rule)
        return {
            "yarn_rule": f"{rule}, so that cos and sin are scaled by {self.rope.amplitude(rule):.4g}: {why}"
        }

    def check_fits(self, target: TargetConfig) -> None:
        """Raise `ModelError` naming the key if this drafter was not made for such a target."""
        for key in ("hidden_size", "vocab_size"):
            self._require(key, getattr(self, key), getattr(target, key), key)
        if self.num_target_layers is not None:
            self._require(
                "num_target_layers", self.num_target_layers, target.num_hidden_layers, "num_hidden_layers"
            )
        highest, depth = max(self.target_layer_ids), target.num_hidden_layers
        if highest >= depth:
            raise ModelError(
                f"{self.file}: key `target_layer_ids` names layer {highest}; the target has 0..{depth - 1}"
            )

    def splits(self, n_ranks: int) -> bool:
        """Whether ranks can share the drafter; otherwise each has all of it, and does the same with it."""
        widths = (self.num_key_value_heads, self.intermediate_size, self.hidden_size)
        return all(width % n_ranks == 0 for width in widths)

    def _require(self, key: str, ours: int, theirs: int, their_key: str) -> None:
        if ours != theirs:
            raise ModelError(
                f"{self.file}: key `{key}` is {ours}, but the target's `{their_key}` is {theirs}"
            )

    def _slides(self, layer: int) -> bool:
        if self.layer_types is not None:
            return self.layer_types[layer] == "sliding_attention"
        return bool(self.use_sliding_window) and layer >= (self.max_window_layers or 0)


def _merge_nested(top: Values, file: Path) -> Values:
    """Keys of the top level and of `dflash_config` in one namespace; the same key twice must agree."""
    nested = top.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ModelError(f"{file}: key `dflash_config` must be an object, got {type(nested).__name__}")
    outer = {k: v for k, v in top.items() if k != "dflash_config"}
    for key in outer.keys() & nested.keys():
        if outer[key] != nested[key]:
            raise ModelError(f"{file}: key `{key}` is {outer[key]}, but {nested[key]} in `dflash_config`")
    return {**outer, **nested}


def _refuse_other_families(values: Values, file: Path) -> None:
    names = values.get("architectures") or [ARCHITECTURE]
    if names != [ARCHITECTURE]:
        raise ModelError(
            f'{file}: key `architectures` is {names}; only ["{ARCHITECTURE}"] drafters are supported'
        )
    for key, family in _OTHER_FAMILIES.items():
        if values.get(key) is not None:
            raise ModelError(f"{file}: key `{key}` belongs to a {family} drafter; only DFlash is supported")


def _default_layer_ids(values: Values, file: Path) -> list[int]:
    """Evenly spread from the second layer to the third last, or the middle one for a one-layer drafter."""
    n, depth = values.get("num_hidden_layers"), values.get("num_target_layers")
    if type(n) is not int or type(depth) is not int:
        raise ModelError(
            f"{file}: key `target_layer_ids` is missing, and so is what its default is made from"
        )
    if n == 1:
        return [depth // 2]
    return [round(1 + i * (depth - 4) / (n - 1)) for i in range(n)]
