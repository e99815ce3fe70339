"""`draftwood doctor --model`: from configs and headers alone, and what it says about folders that are wrong."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from draftwood import bundled
from draftwood.cli import app
from draftwood.models.config import TargetConfig
from draftwood.models.inventory import target_tensors
from draftwood.models.weights import INDEX
from support.kimi_configs import INT4, KIMI_K26, KIMI_K26_DRAFTER
from support.tiny import write_drafter, write_target

TYPES = {"BF16": torch.bfloat16, "F32": torch.float32, "I32": torch.int32}


def doctor(*args):
    """(exit code, stdout, stderr), the output with single spaces and without table rules."""
    result = CliRunner().invoke(app, ["doctor", *map(str, args)], env={"COLUMNS": "300"})
    return result.exit_code, *(re.sub(r"[\s│]+", " ", text) for text in (result.stdout, result.stderr))


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    """Configs of K2.6 and its drafter, no weights."""
    root = tmp_path_factory.mktemp("kimi")
    for name, values in (("target", KIMI_K26), ("drafter", KIMI_K26_DRAFTER)):
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(values))
    return "--model", root / "target", "--drafter", root / "drafter"


@pytest.fixture
def pair(tmp_path):
    return write_target(tmp_path / "target"), write_drafter(tmp_path / "drafter")


def test_kimi_k26_from_its_configs(kimi):
    code, out, _ = doctor(*kimi, "--gpus", 8, "--gpu-memory-gib", 139, "--max-context", 32768)
    assert code == 0
    for said in (
        "no weight files: sizes from config.json",
        "yarn_rule: ratio, so that cos and sin are scaled by 1",
        "inner_norm_eps: 1e-06, the reference code's",
        "each of 8 GPUs",
        "target 553.40 GiB 71.26 GiB",
        "routed experts, INT4 531.56 GiB 66.45 GiB columns of every expert shared",
        "attention, to latents 1.72 GiB 1.72 GiB on every GPU",
        "drafter 6.48 GiB 0.81 GiB",
        "70,272 B latents + 3,072 B drafter context",
        "memory 139.00 GiB, as given",
        "fits, with",
    ):
        assert said in out, out
    assert re.search(r"CUDA graphs .* 60 graphs: an estimate", out)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (("--gpus", 4, "--gpu-memory-gib", 139), "without any cache .* are missing"),
        (
            ("--gpus", 8, "--gpu-memory-gib", 139),
            "the cache lacks .*; 1[0-9]{2},[0-9]{3} tokens per request fit",
        ),
    ],
)
def test_what_does_not_fit_exits_with_1(kimi, args, why):
    code, out, _ = doctor(*kimi, *args)
    assert code == 1
    assert re.search(f"does not fit: {why}", out), out


def test_the_memory_assumed_is_named(kimi, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, out, _ = doctor(*kimi[:2], "--gpus", 8, "--max-batch", 1)
    assert code == 0
    assert "139.29 GiB, assumed: an NVIDIA H200 (141 GB), as torch finds no GPU here" in out
    assert "0 B drafter context" in out


def test_the_bundled_pair_without_reading_a_tensor(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a model was built or a tensor read")

    for where in ("models.target.Target", "models.drafter.Drafter"):
        monkeypatch.setattr(f"draftwood.{where}.__init__", refuse)
    monkeypatch.setattr("draftwood.models.weights.Weights.take", refuse)
    target, drafter = bundled.pair()
    code, out, err = doctor("--model", target, "--drafter", drafter, "--gpu-memory-gib", 2)
    assert code == 0, err
    assert out.count("sizes from the headers of the files") == 2
    stored = sum(t.nbytes for file in target.glob("*.safetensors") for t in load_file(file).values())
    assert f"target {stored / 2**20:.2f} MiB" in out


def tamper(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: t.update({"model.norm.weight": torch.ones(23)}),
            "`model.norm.weight` has shape [23], expected [24]",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.ones(40, 24, dtype=torch.int8)}),
            "`lm_head.weight` is I8, expected BF16 or F16 or F32 or F64",
        ),
        (
            lambda t: t.pop("model.layers.1.mlp.experts.3.up_proj.weight"),
            "`model.layers.1.mlp.experts.3.up_proj.weight` [16, 24] is missing",
        ),
        (lambda t: t.update({"extra": torch.ones(1)}), "`extra` has no place in this model (1 such)"),
    ],
)
def test_a_wrong_tensor_is_named(pair, change, message):
    tamper(pair[0], change)
    code, out, err = doctor("--model", pair[0])
    assert (code, out) == (2, "")
    assert message in err


def test_a_wrong_tensor_of_the_drafter_is_named(pair):
    tamper(pair[1], lambda t: t.update({"fc.weight": torch.ones(24, 24)}))
    code, _, err = doctor("--model", pair[0], "--drafter", pair[1])
    assert code == 2
    assert "drafter/model.safetensors: tensor `fc.weight` has shape [24, 24], expected [24, 48]" in err


def test_a_mask_embedding_counts(pair):
    tamper(pair[1], lambda t: t.update({"mask_embedding": torch.ones(24)}))
    assert doctor("--model", pair[0], "--drafter", pair[1], "--gpu-memory-gib", 2)[0] == 0


def test_a_truncated_file_is_named(pair):
    file = pair[0] / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    code, _, err = doctor("--model", pair[0])
    assert code == 2
    assert "model.safetensors: truncated" in err


def test_an_index_without_its_files(pair):
    """As after a download of a repository's configs: names are checked, and no file is taken for granted."""
    file = pair[0] / "model.safetensors"
    names = dict.fromkeys(load_file(file), "model-1.safetensors")
    file.unlink()
    (pair[0] / INDEX).write_text(json.dumps({"weight_map": names}))
    code, out, _ = doctor("--model", pair[0], "--gpu-memory-gib", 2)
    assert code == 0
    assert "no weight files: names from their index" in out
    (pair[0] / INDEX).write_text(
        json.dumps({"weight_map": names | {"model.layers.9.mlp.up": "x.safetensors"}})
    )
    code, _, err = doctor("--model", pair[0])
    assert code == 2
    assert f"{INDEX}: tensor `model.layers.9.mlp.up` has no place in this model (1 such)" in err
    del names["model.embed_tokens.weight"]
    (pair[0] / INDEX).write_text(json.dumps({"weight_map": names}))
    code, _, err = doctor("--model", pair[0])
    assert code == 2
    assert f"{INDEX}: tensor `model.embed_tokens.weight` [40, 24] is missing" in err


def test_int4_experts(tmp_path):
    """Stored words and scales stay as they are; a matrix that was not packed is missing its words."""
    folder = write_target(tmp_path, hidden_size=64, moe_intermediate_size=32, quantization_config=INT4)
    config = TargetConfig.from_folder(folder)
    specs = list(target_tensors(config))
    save_file(
        {s.name: torch.zeros(s.shape, dtype=TYPES[s.dtype]) for s in specs}, folder / "model.safetensors"
    )
    tamper(
        folder,
        lambda t: t.update({n: s.long() for n, s in t.items() if n.endswith("3.up_proj.weight_shape")}),
    )
    code, out, err = doctor("--model", folder, "--gpu-memory-gib", 2)
    assert code == 0, err
    in_memory = 4 * 3 * 32 * 64 * 9 // 16
    stored = in_memory + 4 * 3 * 8 + 8  # a shape of i64
    assert f"routed experts, INT4 {stored / 2**20:.2f} MiB {in_memory / 2**20:.2f} MiB" in out
    name = "model.layers.1.mlp.experts.0.down_proj.weight"
    tamper(
        folder,
        lambda t: t.update({name: torch.zeros(64, 32), f"{name}_packed": None}) or t.pop(f"{name}_packed"),
    )
    code, _, err = doctor("--model", folder)
    assert code == 2
    assert f"`{name}_packed` [64, 4] is missing" in err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--gpus", 2), "--model: needed"),
        (("--max-batch", 2), "--model: needed"),
        (("--expert-parallel",), "--model: needed"),
        (
            ("--model", "TARGET", "--gpus", 3),
            "key `num_attention_heads`: 2 cannot be split evenly over 3 ranks",
        ),
        (("--model", "TARGET", "--gpu-memory-gib", 0), "--gpu-memory-gib: expected a positive number"),
        (("--model", "TARGET", "--max-batch", 0), "max_batch"),
        (("--model", "TARGET", "--max-context", 257), "max_context: 257 is beyond the model's 256 positions"),
        (("--model", "TARGET", "--drafter", "TARGET"), "`architectures`"),
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_wrong_arguments_exit_with_2_and_name_the_field(pair, args, message):
    code, _, err = doctor(*(pair[0] if arg == "TARGET" else arg for arg in args))
    assert code == 2
    assert message in err


def test_only_configs_are_downloaded(monkeypatch, kimi):
    import huggingface_hub

    asked = []

    def snapshot(name, allow_patterns):
        asked.append((name, allow_patterns))
        return str(kimi[1])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert doctor("--model", "some/thing", "--gpus", 8, "--max-batch", 1)[0] == 0
    assert asked == [("some/thing", ["*.json"])]
