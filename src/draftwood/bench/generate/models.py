"""The engine to be measured, for the largest of a run's cases, and its prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftwood import bundled
from draftwood.bench.catalog import Job
from draftwood.bench.generate import prompts as prompts_
from draftwood.bench.generate.cases import Models
from draftwood.bench.generate.prompts import Prompts
from draftwood.bench.generate.synthetic import SyntheticLLM, read_target_config
from draftwood.engine.llm import LLM
from draftwood.models.config import TargetConfig
from draftwood.models.folder import resolve
from draftwood.models.tokenizer import Tokenizer

EXACT = ("float32", "float64")
"""Dtypes in which speculation must give plain decoding's tokens; with fewer bits near ties fall as rounding has it."""


def load(models: Models, jobs: Sequence[Job]) -> tuple[LLM, Prompts]:
    """Raises `ModelError` or ValueError as `LLM` does, `UsageError` for prompts."""
    seed = jobs[0].case.seed
    settings: dict[str, Any] = {"device": models.device, "dtype": models.dtype, "graphs": models.graphs}
    settings["prefix_cache"] = False  # prompts come again at every visit, and prefill is timed
    settings["max_batch"] = max(job.case["batch"] for job in jobs)
    if models.synthetic:
        config = read_target_config(Path(models.synthetic), models.layers)
        prompts: Prompts = prompts_.Uniform(config.vocab_size, seed)
        settings["max_context"] = _context(jobs, prompts, config)
        return SyntheticLLM(models.synthetic, models.synthetic_drafter, models.layers, **settings), prompts
    model, drafter = folders(models)
    config = TargetConfig.from_folder(model)
    if models.random_text:
        prompts = prompts_.Uniform(config.vocab_size, seed)
    else:
        files = [Path(p) for p in models.prompts] or prompts_.own_source()
        encode = Tokenizer.from_folder(model).encode
        prompts = prompts_.of_files(files, encode, config.vocab_size, seed)
    settings["max_context"] = _context(jobs, prompts, config)
    return LLM(model, drafter, **settings), prompts


def folders(models: Models) -> tuple[Path, Path]:
    """(target, drafter), downloaded if need be."""
    if models.model is None or models.drafter is None:
        return bundled.pair()
    return resolve(models.model), resolve(models.drafter)


def describe(models: Models, llm: LLM) -> dict[str, Any]:
    """What rows say of the model: its name, a digest of what it is made of, and its dtype."""
    dtype = str(llm.dtype).removeprefix("torch.")
    facts: dict[str, Any] = {"dtype": dtype, "exact": dtype in EXACT, "choices": llm.choices}
    facts["graphs"] = llm.config.graphs
    if models.synthetic:
        configs = [Path(p) for p in (models.synthetic, models.synthetic_drafter) if p]
        name = f"synthetic {configs[0].parent.name}/{configs[0].name}, layers={llm.target.config.num_hidden_layers}"
        name += "" if models.synthetic_drafter else ", no drafter cost"
        parts = [p.read_bytes() for p in configs]
    else:
        target, drafter = folders(models)
        name = "bundled pair" if models.model is None else f"{target.name} + {drafter.name}"
        files = sorted(p for folder in (target, drafter) for p in folder.iterdir() if p.is_file())
        parts = [
            p.read_bytes()
            if p.suffix == ".json"
            else f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}".encode()
            for p in files
        ]
    parts += [Path(p).read_bytes() for p in models.prompts]
    return {**facts, "model": name, "digest": hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]}


def _context(jobs: Sequence[Job], prompts: Prompts, config: TargetConfig) -> int:
    """Positions for the longest case, or all that the model has; a case that needs more is skipped."""
    need = max(prompts.longest(job.case["prompt"]) + job.case["new"] for job in jobs)
    return int(min(max(need, 2), config.max_position_embeddings))
