"""One training run from folder to folder: prompts, continuations, training, and the finished drafter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch

from draftwood import scores
from draftwood.models.config import TargetConfig
from draftwood.models.drafter import Drafter
from draftwood.models.drafter_config import DrafterConfig
from draftwood.models.folder import resolve
from draftwood.models.json_config import read_json
from draftwood.models.target import Target
from draftwood.models.tokenizer import Tokenizer
from draftwood.training.continuations import continuations
from draftwood.training.data import DataError, OnBad, read_prompts
from draftwood.training.folder import (
    default_taps,
    drafter_config,
    published_tensors,
    random_tensors,
    save_folder,
    with_layers,
)
from draftwood.training.kernels import training_kernels
from draftwood.training.report import write_card, write_plot
from draftwood.training.sampler import Sequences
from draftwood.training.settings import TrainSettings
from draftwood.training.trainer import Status, Trainer


class Show(Protocol):
    """Where progress goes."""

    def say(self, message: str) -> None: ...

    def generating(self, total: int) -> AbstractContextManager[Callable[[int], None]]: ...

    def training(self) -> AbstractContextManager[Callable[[Status], None]]: ...


def train_drafter(
    target: str | Path,
    data: Sequence[Path],
    out: Path,
    settings: TrainSettings,
    show: Show,
    *,
    on_bad: OnBad = "refuse",
    device: str = "cpu",
    stop_at: int | None = None,
) -> None:
    """Train a drafter for `target` and write it to `out`; run again, it goes on where it was.

    Args:
        data: files of prompts, see `draftwood.training.data`.
        out: becomes the drafter folder, a whole one from the first evaluation on; `out/work` holds continuations and checkpoint.
        stop_at: end at this step without finishing, as an interruption would.

    Raises:
        DataError, ModelError, ValueError: naming what is wrong, before anything is trained.
    """
    folder = resolve(target)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = Target.from_folder(folder, dtype=dtype, device=device, kernels=training_kernels(device))
    _check_length(settings, model.config)
    drafter = _drafter(folder, model, settings, out / "work" / "start", device)
    train, held = _sequences(folder, model, data, out / "work", settings, show, on_bad)
    trainer = Trainer(model, drafter, train, held, settings, out / "work" / "checkpoint.pt")
    if trainer.step:
        show.say(f"going on from step {trainer.step}")
    with show.training() as report:

        def told(status: Status) -> None:
            report(status)
            if status.evaluation is not None and status.share < 1.0:
                _write(out, str(target), trainer, len(train))

        trainer.run(told, stop_at)
    if trainer.share >= 1.0:
        _write(out, str(target), trainer, len(train))


def _check_length(settings: TrainSettings, config: TargetConfig) -> None:
    if settings.length > config.max_position_embeddings:
        raise ValueError(
            f"length: {settings.length} is beyond the target's {config.max_position_embeddings} positions"
        )
    if settings.length <= settings.block_size:
        raise ValueError(f"length: {settings.length} leaves no room for a block of {settings.block_size}")


def _drafter(folder: Path, target: Target, s: TrainSettings, start: Path, device: str) -> Drafter:
    """The drafter at its start, fp32: the folder is written first, so that one loader serves all."""
    c = target.config
    heads = s.heads or c.num_attention_heads
    config = drafter_config(
        c,
        layers=s.layers,
        block_size=s.block_size,
        mask_token_id=_mask_token(folder) if s.mask_token_id is None else s.mask_token_id,
        taps=s.taps or default_taps(s.layers, c.num_hidden_layers),
        heads=heads,
        kv_heads=s.kv_heads or (heads if heads % 2 else heads // 2),
        head_dim=s.head_dim or c.hidden_size // heads,
        intermediate_size=s.intermediate_size or c.intermediate_size,
    )
    kernels = training_kernels(device)

    def load(place: Path) -> Drafter:
        return Drafter.from_folder(place, target=target, dtype=torch.float32, device=device, kernels=kernels)

    save_folder(start, config, random_tensors(config, s.seed))
    drafter = load(start)
    if s.init is None:
        return drafter
    other = load(resolve(s.init))
    shapes = [_shape(d.config) for d in (other, drafter)]
    if different := [key for key in shapes[0] if shapes[0][key] != shapes[1][key]]:
        raise ValueError(
            f"init: {s.init} is a drafter of another shape than these settings describe: {', '.join(different)}"
        )
    theirs = other.config.num_hidden_layers
    chosen = tuple(range(theirs)) if s.init_layers is None else s.init_layers
    if len(chosen) != s.layers or max(chosen) >= theirs:
        raise ValueError(
            f"init_layers: expected {s.layers} of the layers 0..{theirs - 1} of {s.init}, got {chosen}"
        )
    save_folder(start, config, with_layers(published_tensors(other), chosen))
    return load(start)


def _shape(config: DrafterConfig) -> dict[str, Any]:
    """What drafters have in common that can start from one another: all but depth and block."""
    own = {"file", "block_size", "num_hidden_layers", "layer_types", "max_window_layers"}
    return {**config.model_dump(exclude=own), "layer_types": set(config.layers)}


def _mask_token(folder: Path) -> int:
    file = folder / "tokenizer_config.json"
    token = read_json(file).get("mask_token") if file.exists() else None
    token = token.get("content") if isinstance(token, dict) else token
    if token is None:
        raise ValueError(f"mask_token_id: not given, and {file} names no `mask_token`")
    return Tokenizer.from_folder(folder).token_id(token)


def _sequences(
    folder: Path,
    target: Target,
    data: Sequence[Path],
    work: Path,
    s: TrainSettings,
    show: Show,
    on_bad: OnBad,
) -> tuple[Sequences, Sequences]:
    """Training and held-out sequences; the last `eval_prompts` prompts are held out."""
    prompts, problems = read_prompts(
        data,
        Tokenizer.from_folder(folder).encode,
        vocab_size=target.config.vocab_size,
        max_tokens=s.length - s.block_size,
        on_bad=on_bad,
    )
    for problem in problems:
        show.say(f"skipped {problem}")
    held_out = min(s.eval_prompts, len(prompts) // 2)
    if held_out == 0:
        raise DataError(f"{len(prompts)} usable prompt; at least 2 are needed, one of them to evaluate on")
    with show.generating(len(prompts)) as progress:
        made = continuations(
            target,
            prompts,
            s.temperatures,
            folder=work / "continuations",
            length=s.length,
            batch=s.generation_batch,
            seed=s.seed,
            progress=progress,
        )
    return made.rows(slice(0, -held_out)), made.rows(slice(-held_out, None))


def _write(out: Path, target: str, trainer: Trainer, sequences: int) -> None:
    """Write the published folder as it is now, the score rule, the plot and the card: beside the old ones, then in their place."""
    config = read_json(out / "work" / "start" / "config.json")
    new = out / "work" / "new"
    save_folder(new, config, published_tensors(trainer.drafter))
    rule = trainer.fit_scores()
    (new / scores.FILE).write_text(rule.model_dump_json(indent=1) + "\n")
    history = trainer.history
    write_plot(new / "training.svg", history.losses, history.evaluations)
    parameters = sum(p.numel() for p in trainer.drafter.parameters())
    device = trainer.target.device
    facts = {
        "parameters": f"{parameters / 1e6:.2f} M",
        "training sequences": sequences,
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "torch": torch.__version__,
        "score rule": rule.model_dump_json(),
    }
    write_card(
        new / "README.md",
        target=Path(target).name,
        settings=trainer.settings.model_dump(),
        facts=facts,
        evaluations=history.evaluations,
    )
    values = {"facts": facts, "settings": trainer.settings.model_dump(), **vars(history)}
    (new / "training.json").write_text(json.dumps(values, indent=1) + "\n")
    for file in new.iterdir():
        file.replace(out / file.name)
