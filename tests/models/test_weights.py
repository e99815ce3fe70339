"""Tensors of a folder: shards, dtypes, and every way in which files can be wrong."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from draftwood.models.errors import ModelError
from draftwood.models.weights import Take, Weights

CPU = torch.device("cpu")


def shards(folder, tensors=None, index=None):
    """Two shards with an index; `index` replaces entries of it (None removes)."""
    tensors = tensors or {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4), "c": torch.zeros(1)}
    names = sorted(tensors)
    where = {name: f"model-{1 + (i > 0)}.safetensors" for i, name in enumerate(names)}
    for shard in set(where.values()):
        save_file({n: tensors[n] for n in names if where[n] == shard}, folder / shard)
    weight_map = {k: v for k, v in {**where, **(index or {})}.items() if v is not None}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read(folder, rename=lambda name: name, dtype=torch.float32):
    return Weights(folder, rename, dtype, CPU)


def test_lazily_from_shards(tmp_path):
    weights = read(shards(tmp_path))
    assert torch.equal(weights.take("a", 2, 3), torch.arange(6.0).view(2, 3))
    assert weights.take("b", 4, dtype=torch.float64).dtype == torch.float64
    with pytest.raises(
        ModelError, match=r"model-2\.safetensors: tensor `c` has no place in this model \(1 such\)"
    ):
        weights.finish()
    weights.take("c", 1)
    weights.finish()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes_are_converted(tmp_path, dtype):
    values = torch.tensor([0.5, -2.0, 3.0])
    save_file({"a": values.to(dtype)}, tmp_path / "model.safetensors")
    got = read(tmp_path, dtype=torch.float64).take("a", 3)
    assert torch.equal(got, values.double())


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_other_dtypes_are_refused(tmp_path, dtype):
    save_file({"a": torch.ones(3).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"model\.safetensors: tensor `a` is (I32|F8_E4M3), expected one of BF16"
    ):
        read(tmp_path).take("a", 3)


def test_names_can_be_mapped_and_skipped(tmp_path):
    weights = read(shards(tmp_path), {"a": "x", "b": None, "c": "y"}.get)
    assert Take(weights).under("x")  # a view, nothing is read yet
    weights.take("x", 2, 3)
    weights.take("y", 1)
    weights.finish()
    with pytest.raises(ModelError, match="`a` and `b` both mean `z`"):
        read(tmp_path, lambda name: "z")


def test_missing_and_misshapen(tmp_path):
    weights = read(shards(tmp_path))
    with pytest.raises(ModelError, match=r"tensor `layers.0.d` \[2\] is missing"):
        Take(weights).under("layers").under("0")("d", 2)
    with pytest.raises(
        ModelError, match=r"model-1\.safetensors: tensor `a` has shape \[2, 3\], expected \[3, 2\]"
    ):
        weights.take("a", 3, 2)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"d": "model-1.safetensors"}, r"model-1\.safetensors: tensor `d` is missing, but .* names it"),
        ({"a": "model-2.safetensors"}, r"model-2\.safetensors: tensor `a` is missing"),
        ({"d": "model-3.safetensors"}, r"model-3\.safetensors: no such file"),
        ({"b": None}, r"model-2\.safetensors: tensor `b` is there, but .* does not name it"),
        ({"d": "../model.safetensors"}, r"file name `\.\./model\.safetensors` must .* not hold a path"),
        ({"d": ".."}, r"file name `\.\.` must be that of a \.safetensors file"),
        ({"d": ""}, r"file name `` must be that of a \.safetensors file"),
        ({"d": "folder.safetensors"}, r"folder\.safetensors: cannot be opened"),
        ({"d": 1}, "`weight_map` must map"),
    ],
)
def test_index_and_shards_must_agree(tmp_path, index, message):
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(ModelError, match=message):
        read(shards(tmp_path, index=index))


def test_an_index_without_a_map(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match=r"index\.json: key `weight_map` must map"):
        read(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 40, -1])
def test_truncated_files(tmp_path, keep):
    save_file({"a": torch.ones(100)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: truncated, or not a safetensors file"):
        read(tmp_path)


def test_no_weights_at_all(tmp_path):
    with pytest.raises(ModelError, match="holds neither"):
        read(tmp_path)
