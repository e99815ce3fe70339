"""Write models with random weights in the published layout, to try a deployment before the real files are there.

python -m draftwood.models.miniature OUT [--drafter OUT2] [--family k2.6] [--layers 2] [--true-width]

Names, shapes, types, shards and config files are those of the real folders, see `docs/checkpoints.md`; the text is noise. Written
shard by shard: no more than one is ever in memory.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from safetensors.torch import save_file
from torch import Tensor

from draftwood.byte_bar import byte_bar
from draftwood.kernels.moe_int4 import GROUP, PER_WORD
from draftwood.models.config import TargetConfig
from draftwood.models.drafter_config import DrafterConfig
from draftwood.models.inventory import TensorSpec, drafter_tensors, target_tensors
from draftwood.models.miniature_config import Config, Name, drafter_config, generation_config, target_config
from draftwood.models.miniature_tokenizer import MIN_VOCAB_SIZE, write_tokenizer
from draftwood.models.weights import INDEX, SINGLE, SIZES, Progress

INT4_RMS = math.sqrt(21.5)
"""Of numbers drawn from -8..7."""

VISION = {
    "vision_tower.patch_embed.proj.weight": (16, 3, 14, 14),
    "vision_tower.encoder.final_layernorm.weight": (16,),
    "mm_projector.proj.0.weight": (64, 64),
}
"""Stand-ins for the vision tower, whose names begin like this; text models skip them."""

_DTYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32}


@dataclass(frozen=True)
class Stored:
    """A tensor as a file has it."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "BF16"
    value: tuple[int, ...] | None = None  # what it says, if that is not random

    @property
    def nbytes(self) -> int:
        return SIZES[self.dtype] * math.prod(self.shape)


def write_target(
    folder: Path, config: Config, *, shard_bytes: int, seed: int, progress: Progress | None = None
) -> None:
    """A target folder: configs, tokenizer, shards and their index. `folder` must be empty or absent.

    Raises `ValueError` for a vocabulary that has no room for the special tokens, `ModelError` for a config that cannot be.
    """
    vocab_size = config.get("text_config", config)["vocab_size"]
    if vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(f"vocab: expected at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    _write_json(_empty(folder) / "config.json", config)
    _write_json(folder / "generation_config.json", generation_config(config))
    write_tokenizer(folder, vocab_size, seed)
    read = TargetConfig.from_folder(folder)
    prefix = "language_model." if read.wrapped else ""
    tensors = list(_stored(target_tensors(read), prefix))
    if read.wrapped:
        tensors += [Stored(name, shape) for name, shape in VISION.items()]
    tensors += [
        tensor
        for i in range(read.num_nextn_predict_layers)
        for tensor in _mtp(f"{prefix}model.layers.{read.num_hidden_layers + i}.", read.hidden_size)
    ]
    _write_shards(folder, tensors, shard_bytes, seed, progress, single=False)


def write_drafter(
    folder: Path, config: Config, *, shard_bytes: int, seed: int, progress: Progress | None = None
) -> None:
    """A DFlash drafter's folder; one file without an index if it fits into a shard."""
    _write_json(_empty(folder) / "config.json", config)
    specs = drafter_tensors(DrafterConfig.from_folder(folder))
    tensors = list(_stored((spec for spec in specs if not spec.optional), ""))
    _write_shards(folder, tensors, shard_bytes, seed, progress, single=True)


def _stored(specs: Iterable[TensorSpec], prefix: str) -> Iterator[Stored]:
    unpacked: tuple[int, ...] = ()
    for spec in specs:
        if spec.name.endswith("weight_packed"):
            unpacked = (spec.shape[0], spec.shape[1] * PER_WORD)
        value = unpacked if spec.name.endswith("weight_shape") else None
        yield Stored(prefix + spec.name, spec.shape, spec.dtype, value)


def _mtp(layer: str, d: int) -> list[Stored]:
    """What a multi-token-prediction layer adds to a layer; such layers are skipped."""
    norms = [Stored(f"{layer}{name}.weight", (d,)) for name in ("enorm", "hnorm", "shared_head.norm")]
    return [*norms, Stored(layer + "eh_proj.weight", (d, 2 * d))]


def _write_shards(
    folder: Path,
    tensors: Sequence[Stored],
    shard_bytes: int,
    seed: int,
    progress: Progress | None,
    *,
    single: bool,
) -> None:
    shards = _split(tensors, shard_bytes)
    where: dict[str, str] = {}
    total, done = sum(t.nbytes for t in tensors), 0
    alone = single and len(shards) == 1
    for i, shard in enumerate(shards, 1):
        file = SINGLE if alone else f"model-{i:05d}-of-{len(shards):06d}.safetensors"
        held: dict[str, Tensor] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # one generator fills a tensor with one thread
            for tensor, numbers in zip(shard, pool.map(partial(_random, seed=seed), shard), strict=True):
                held[tensor.name] = numbers
                done += tensor.nbytes
                if progress is not None:
                    progress(done, total)
        save_file(held, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(held, file)
    if not alone:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _split(tensors: Iterable[Stored], shard_bytes: int) -> list[list[Stored]]:
    """In order, into shards of at most `shard_bytes`; a larger tensor has its own."""
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _random(tensor: Stored, seed: int) -> Tensor:
    """Numbers that keep activations near 1 and make logits differ; they depend on the seed and the name alone."""
    dtype = _DTYPES[tensor.dtype]
    if tensor.value is not None:
        return torch.tensor(tensor.value, dtype=dtype)
    out = torch.empty(tensor.shape, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed} {tensor.name}".encode()))
    if dtype == torch.int32:
        return out.random_(-(2**31), 2**31, generator=generator)
    name, per_root = tensor.name, tensor.shape[-1] ** -0.5
    if name.endswith("weight_scale"):
        size = (tensor.shape[-1] * GROUP) ** -0.5 / INT4_RMS
        return out.uniform_(0.7 * size, 1.3 * size, generator=generator)
    if name.endswith("norm.weight"):
        return out.normal_(1, 0.1, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return out.normal_(0, 0.1, generator=generator)
    if name.endswith("embed_tokens.weight"):
        return out.normal_(0, 1, generator=generator)
    return out.normal_(0, 3 * per_root if name.endswith("lm_head.weight") else per_root, generator=generator)


def _empty(folder: Path) -> Path:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder}: is there already; give the name of a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_json(path: Path, values: Config) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def main(
    out: Annotated[Path, typer.Argument(help="Folder of the target, new or empty.")],
    drafter: Annotated[Path | None, typer.Option(help="Write a DFlash drafter for it, there.")] = None,
    family: Annotated[Name, typer.Option(help="Whose layout.")] = "k2.6",
    layers: Annotated[int | None, typer.Option(help="Default: 4, at true width as published.")] = None,
    experts: Annotated[int | None, typer.Option(help="Per layer; default: 16, or as published.")] = None,
    vocab: Annotated[int | None, typer.Option(help="Default: 2048, or as published.")] = None,
    true_width: Annotated[bool, typer.Option("--true-width", help="Every size as published.")] = False,
    quantized: Annotated[
        bool | None, typer.Option(help="INT4 experts; default: where the family is published with them.")
    ] = None,
    shard_mb: Annotated[
        int, typer.Option(min=1, help="Largest file in MB, as published about 10000.")
    ] = 5000,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
) -> None:
    """Write a model with random weights in the published layout."""
    console = Console(stderr=True, highlight=False)
    shard_bytes = shard_mb * 10**6
    try:
        config = target_config(
            family,
            true_width=true_width,
            layers=layers,
            experts=experts,
            vocab_size=vocab,
            quantized=quantized,
        )
        with byte_bar(f"writing {out}", console) as progress:
            write_target(out, config, shard_bytes=shard_bytes, seed=seed, progress=progress)
        if drafter is not None:
            with byte_bar(f"writing {drafter}", console) as progress:
                values = drafter_config(family, config)
                write_drafter(drafter, values, shard_bytes=shard_bytes, seed=seed, progress=progress)
    except (ValueError, OSError) as e:
        console.print(f"error: {e}", style="red", markup=False)
        raise typer.Exit(2) from e


if __name__ == "__main__":
    typer.run(main)
