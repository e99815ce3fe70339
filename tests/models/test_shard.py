"""Slices of tensors: every rank's together are the whole, and only their own bytes are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draftwood.models.errors import ModelError
from draftwood.models.shard import Shard
from draftwood.models.weights import Take, Weights

CPU = torch.device("cpu")


def takes(folder, size, dtype=torch.float32):
    return [
        Take(Weights(folder, str, dtype, CPU, shard=Shard(rank, size))).under("layer") for rank in range(size)
    ]


@pytest.fixture
def folder(tmp_path):
    tensors = {"layer.a": torch.arange(48.0).view(6, 8), "layer.v": torch.arange(6.0)}
    save_file({name: t.bfloat16() for name, t in tensors.items()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2])
def test_slices_make_up_the_whole(folder, size, dtype):
    ranks = takes(folder, size, dtype)
    whole = torch.arange(48.0).view(6, 8).to(dtype)
    rows = [take.rows("a", 6, 8) for take in ranks]
    columns = [take.columns("a", 6, 8) for take in ranks]
    assert torch.equal(torch.cat(rows), whole)
    assert torch.equal(torch.cat(columns, 1), whole)
    assert columns[0].is_contiguous()
    assert torch.equal(torch.cat([take.rows("v", 6) for take in ranks]), torch.arange(6.0).to(dtype))
    assert torch.equal(torch.cat([take.columns("v", 6) for take in ranks]), torch.arange(6.0).to(dtype))
    for take in ranks:
        assert torch.equal(take("a", 6, 8), whole)


def test_vocabulary_rows_need_not_divide(folder):
    whole = torch.arange(48.0).view(6, 8)
    for size in (1, 4, 5, 7):
        parts = [take.vocabulary("a", 6, 8) for take in takes(folder, size)]
        assert torch.equal(torch.cat(parts), whole)
    assert [Shard(r, 4).uneven(6) for r in range(4)] == [(0, 2), (2, 4), (4, 6), (6, 6)]


def test_what_does_not_divide_is_named(folder):
    take = takes(folder, 4)[0]
    with pytest.raises(ModelError, match=r"rows of tensor `layer\.a`: 6 cannot be split .* over 4 ranks"):
        take.rows("a", 6, 8)
    with pytest.raises(ModelError, match=r"columns of tensor `layer\.v`: 6 cannot be split"):
        take.columns("v", 6)
    with pytest.raises(ModelError, match=r"tensor `layer\.a` has shape \[6, 8\], expected \[3, 8\]"):
        take.columns("a", 3, 8)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1 of 2 ranks, got 2"):
        Shard(2, 2)


def test_only_the_slice_is_read(tmp_path):
    """Of a sparse file of 256 MiB, whose pages would be resident once touched."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("no /proc here")
    n = 1 << 28
    header = json.dumps({"layer.a": {"dtype": "F32", "shape": [1 << 13, 1 << 13], "data_offsets": [0, n]}})
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + n)

    def resident():
        return 1024 * sum(map(int, re.findall(r"(?:RssFile|RssAnon):\s+(\d+) kB", status.read_text())))

    take = takes(tmp_path, 64)[3]
    before = resident()
    assert take.rows("a", 1 << 13, 1 << 13).sum() == 0
    assert resident() - before < n / 8
