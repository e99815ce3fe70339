"""Prompts -> the target's continuations, kept on disk in parts so that an interrupted run goes on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from draftwood.models.target import Target
from draftwood.training.sampler import Sampler, Sequences


def continuations(
    target: Target,
    prompts: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    *,
    folder: Path,
    length: int,
    batch: int,
    seed: int,
    progress: Callable[[int], None] = lambda n: None,
) -> Sequences:
    """One continuation per prompt, temperatures taken in turn, in the prompts' order.

    Parts of `batch` prompts are made from prompts of like length and stored under `folder`, named after what they are made
    from; `progress` is called with the prompts done so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    temperature = torch.tensor(temperatures)[torch.arange(len(prompts)) % len(temperatures)]
    seeds = torch.arange(len(prompts)) + (seed << 32)
    sampler: Sampler | None = None
    parts = []
    for at in range(0, len(order), batch):
        rows = order[at : at + batch]
        mine = [list(prompts[i]) for i in rows]
        key = json.dumps([mine, temperature[rows].tolist(), seeds[rows].tolist(), length])
        file = folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
        if not file.exists():
            if sampler is None:
                sampler = Sampler(target, min(batch, len(prompts)), length)
            made = sampler.run(mine, temperature[rows], seeds[rows])
            torch.save(vars(made), file.with_suffix(".part"))
            file.with_suffix(".part").rename(file)
        parts.append(Sequences(**torch.load(file)))
        progress(at + len(rows))
    return Sequences.joined(parts).rows(torch.tensor(order).argsort())
