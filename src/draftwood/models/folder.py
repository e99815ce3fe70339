"""Where a model is: a folder, or a repository id of the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from draftwood.models.errors import ModelError
from draftwood.models.json_config import read_json

PATTERNS = ["*.json", "*.safetensors", "*.model", "*.jinja"]

_REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")


def resolve(path_or_repo_id: str | Path, patterns: Sequence[str] = PATTERNS) -> Path:
    """The folder itself, or the local copy of a repository, of which what matches `patterns` is downloaded if need be.

    Raises `ModelError` if it is neither a folder with a `config.json` nor a repository that can be had.
    """
    path = Path(path_or_repo_id)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelError(f"{path}: holds no config.json, so it is not a model folder")
        return path
    name = str(path_or_repo_id)
    if path.exists() or not _REPO_ID.fullmatch(name):
        raise ModelError(f"{name}: neither a folder nor a repository id of the form `owner/name`")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        raise ModelError(f"{name}: no such folder, and the repository cannot be had: {e}") from e


def is_drafter(folder: str | Path) -> bool:
    """Whether the folder's config is a block drafter's, of a supported family or not."""
    config = read_json(Path(folder) / "config.json")
    architectures = config.get("architectures") or []
    return "dflash_config" in config or any("Draft" in str(name) for name in architectures)
