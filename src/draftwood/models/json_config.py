"""Reading `config.json`: every key is used, known not to matter, or refused by name.

A key that nobody looked at may change the maths, so an unknown one is an error. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from draftwood.models.errors import ModelError

Values = dict[str, Any]

# Written by `transformers` for every model: bookkeeping, generation and training settings.
LIBRARY_KEYS = frozenset(
    """_attn_implementation _name_or_path add_cross_attention architectures attention_dropout auto_map
    bad_words_ids begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dtype early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id id2label
    initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
    remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class
    top_k top_p torch_dtype torchscript transformers_version typical_p use_bfloat16 use_cache""".split()  # noqa: SIM905
)


class FolderConfig(BaseModel):
    """Base of what is read from a folder: immutable, no coercion between types, no unknown key."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)


Config = TypeVar("Config", bound=BaseModel)


def read_json(path: Path) -> Values:
    """The object in `path`. Raises `ModelError` if it is absent, not JSON or not an object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (
        ValueError,
        RecursionError,
    ) as e:  # bad JSON, bad UTF-8, a number of thousands of digits, too deep
        raise ModelError(f"{path}: not valid JSON: {e}") from e
    if not isinstance(values, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(values).__name__}")
    return values


def select(
    values: Values, file: Path, *, fixed: Mapping[str, Collection[Any]], ignored: Collection[str]
) -> Values:
    """`values` without the `ignored` keys and without the `fixed` ones, whose value must be one of those given."""
    for key, supported in fixed.items():
        if key in values and values[key] not in supported:
            expected = " or ".join(json.dumps(v) for v in supported)
            raise ModelError(
                f"{file}: key `{key}` is {json.dumps(values[key])}; only {expected} is supported"
            )
    return {k: v for k, v in values.items() if k not in fixed and k not in ignored}


def parse(cls: type[Config], values: Values, file: Path, prefix: str = "") -> Config:
    """`values` as a `cls`. Raises `ModelError` naming the file and a wrong key."""
    try:
        return cls.model_validate_json(json.dumps(values))
    except ValidationError as e:
        # An unknown key first: it is often a misspelling of one that is then missing.
        error = min(e.errors(), key=lambda error: error["type"] != "extra_forbidden")
        key = prefix + ".".join(str(part) for part in error["loc"])
        if error["type"] == "extra_forbidden":
            problem = "is unknown, and an unknown key may change the maths"
        elif error["type"] == "missing":
            problem = "is missing"
        elif not error["loc"]:  # a rule about several keys, which its message names
            raise ModelError(f"{file}: {error['msg'].removeprefix('Value error, ')}") from e
        else:
            problem = f"is {json.dumps(error['input'])}: {error['msg']}"
        raise ModelError(f"{file}: key `{key}` {problem}") from e
