"""Finding model folders, and the pair in the package."""

from __future__ import annotations

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError

from draftwood import bundled
from draftwood.kernels.registry import load_kernels
from draftwood.models.config import TargetConfig
from draftwood.models.drafter import Drafter
from draftwood.models.drafter_config import DrafterConfig
from draftwood.models.errors import ModelError
from draftwood.models.folder import is_drafter, resolve
from draftwood.models.target import Target
from draftwood.models.tokenizer import Tokenizer


def test_a_folder_is_itself():
    target, drafter = bundled.pair()
    assert resolve(target) == target
    assert resolve(str(drafter)) == drafter
    assert not is_drafter(target)
    assert is_drafter(drafter)


def test_not_a_model(tmp_path):
    with pytest.raises(ModelError, match=r"holds no config\.json"):
        resolve(tmp_path)
    for name in ("no such folder", "/no/such/folder", "a/b/c", __file__):
        with pytest.raises(ModelError, match="neither a folder nor a repository id"):
            resolve(name)


def test_a_repository_id_is_looked_up(tmp_path, monkeypatch):
    asked = []

    def snapshot(name, **options):
        asked.append(name)
        if name == "some/thing":
            return str(tmp_path)
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert resolve("some/thing") == tmp_path
    with pytest.raises(ModelError, match=r"other/thing: .*cannot be had: offline"):
        resolve("other/thing")
    assert asked == ["some/thing", "other/thing"]


def test_the_bundled_pair_fits():
    target, drafter = bundled.pair()
    config = TargetConfig.from_folder(target)
    DrafterConfig.from_folder(drafter).check_fits(config)
    tokenizer = Tokenizer.from_folder(target)
    assert tokenizer.vocab_size == config.vocab_size
    assert config.eos_token_ids == (tokenizer.token_id("<|end|>"),)
    assert DrafterConfig.from_folder(drafter).mask_token_id == tokenizer.token_id("<|mask|>")
    size = sum(f.stat().st_size for folder in (target, drafter) for f in folder.iterdir())
    assert size < 60e6
    assert all(f.stat().st_size < 16e6 for folder in (target, drafter) for f in folder.iterdir())


def test_the_bundled_pair_loads():
    target, drafter = bundled.pair()
    options = {"dtype": torch.bfloat16, "device": "cpu", "kernels": load_kernels("cpu")}
    loaded = Target.from_folder(target, **options)
    assert Drafter.from_folder(drafter, target=loaded, **options).config.block_size == 8
