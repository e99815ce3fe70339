"""What a checkpoint's `quantization_config` says, where that is supported: compressed-tensors' INT4 groups of 32.

Which modules it covers follows that library's rules: an entry is a module's name, `re:` and a regular expression that the name
begins with, or a class; what is targeted and not ignored is packed. Knows no files of tensors and no model.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from draftwood.models.errors import ModelError
from draftwood.models.json_config import FolderConfig, Values, parse, select

KEY = "quantization_config"

_GROUP = f"{KEY}.config_groups.*."
_WEIGHTS = f"{_GROUP}weights."

_FIXED: dict[str, tuple[Any, ...]] = {
    f"{KEY}.quant_method": ("compressed-tensors",),
    f"{KEY}.format": ("pack-quantized",),
    f"{KEY}.quantization_status": ("compressed",),
    f"{KEY}.kv_cache_scheme": (None,),
    f"{KEY}.sparsity_config": (None, {}),
    f"{KEY}.moe_sparsity_config": (None, {}),
    f"{KEY}.transform_config": (None, {}),
    f"{_GROUP}format": (None, "pack-quantized"),
    f"{_GROUP}input_activations": (None,),
    f"{_GROUP}output_activations": (None,),
    f"{_WEIGHTS}num_bits": (4,),
    f"{_WEIGHTS}type": ("int",),
    f"{_WEIGHTS}symmetric": (True,),
    f"{_WEIGHTS}strategy": ("group",),
    f"{_WEIGHTS}group_size": (32,),
    f"{_WEIGHTS}dynamic": (False,),
    f"{_WEIGHTS}actorder": (None,),
    f"{_WEIGHTS}block_structure": (None,),
    f"{_WEIGHTS}scale_dtype": (None,),
    f"{_WEIGHTS}zp_dtype": (None,),
}
_REQUIRED = (f"{KEY}.format", f"{_WEIGHTS}num_bits", f"{_WEIGHTS}group_size")  # whose defaults are others
_IGNORED = {
    f"{KEY}.global_compression_ratio",  # for the reader
    f"{KEY}.version",
    f"{_WEIGHTS}observer",  # how the scales were found
    f"{_WEIGHTS}observer_kwargs",
}

_REFUSED = {
    "fp8": "FP8 blocks (as DeepSeek-V3 and Kimi K2 are published)",
    "modelopt": "NVFP4 or FP8 weights of NVIDIA's ModelOpt",
    "modelopt_fp4": "NVFP4 weights of NVIDIA's ModelOpt",
    "nvfp4-pack-quantized": "NVFP4 weights",
    "mxfp4-pack-quantized": "MXFP4 weights",
}
"""`quant_method` or `format` -> what it is."""

SUPPORTED = "bf16 to fp64, and routed experts in INT4 groups of 32 (compressed-tensors, pack-quantized)"


class Int4Groups(FolderConfig):
    """Linear modules whose weights are kept as 4-bit integers, 32 of a row to one scale."""

    targets: tuple[str, ...]
    ignore: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _patterns_compile(self) -> Self:
        for entry in (*self.targets, *self.ignore):
            try:
                re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
            except re.error as e:
                raise ValueError(f"key `{KEY}`: `{entry}` is not a regular expression: {e}") from e
        return self

    def covers(self, module: str, *, wrapped: bool) -> bool:
        """Whether a module, by the model's own name, is packed; `wrapped`: files call it `language_model.` and that."""
        names = (module, f"language_model.{module}") if wrapped else (module,)
        return _listed(names, self.targets) and not _listed(names, self.ignore)


def read_quantization(values: Values, file: Path) -> Int4Groups | None:
    """From the key `quantization_config`, if there is one. Raises `ModelError` naming what is not supported."""
    block = values.get(KEY)
    if block is None:
        return None
    if not isinstance(block, dict):
        raise ModelError(f"{file}: key `{KEY}` must be an object, got {type(block).__name__}")
    for key in ("quant_method", "format"):
        if isinstance(name := block.get(key), str) and name in _REFUSED:
            raise ModelError(
                f'{file}: key `{KEY}.{key}` is "{name}": {_REFUSED[name]} are not supported, only {SUPPORTED}'
            )
    if block.get("quant_method") != "compressed-tensors":
        raise ModelError(
            f"{file}: key `{KEY}.quant_method`: `{block.get('quant_method')}` weights are not supported, only {SUPPORTED}"
        )
    groups = block.get("config_groups")
    if (
        not isinstance(groups, dict)
        or len(groups) != 1
        or not all(isinstance(g, dict) for g in groups.values())
    ):
        raise ModelError(f"{file}: key `{KEY}.config_groups` must hold one group of modules, an object")
    (group,) = groups.values()
    flat = _flatten({**block, "config_groups": {"*": group}}, f"{KEY}.")
    for key in _REQUIRED:
        if key not in flat:
            raise ModelError(f"{file}: key `{key}` is missing")
    rest = select(flat, file, fixed=_FIXED, ignored=_IGNORED)
    targets = rest.pop(f"{_GROUP}targets", None)
    named = {key.removeprefix(f"{KEY}."): value for key, value in rest.items() if value is not None}
    return parse(Int4Groups, {"targets": targets, **named}, file, prefix=f"{KEY}.")


def _listed(names: tuple[str, ...], entries: tuple[str, ...]) -> bool:
    return any(_matches(name, entry) for entry in entries for name in names)


def _matches(name: str, entry: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], name) is not None
    return entry == name or (entry == "Linear" and _is_linear(name))


def _is_linear(module: str) -> bool:
    """Embedding, norms and the router are modules of other classes."""
    last = module.rpartition(".")[2]
    return last == "lm_head" or last.endswith(("_proj", "_proj_with_mqa"))


def _flatten(block: Values, prefix: str) -> Values:
    """Nested keys joined by dots; empty objects and `observer_kwargs` stay as they are."""
    flat: Values = {}
    for key, value in block.items():
        if isinstance(value, dict) and value and key != "observer_kwargs":
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat
