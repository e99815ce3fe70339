"""Generated folders: the published layout, every family loads from its own, nothing in a folder runs, little memory."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from draftwood import LLM, SamplingParams
from draftwood.kernels.registry import load_kernels
from draftwood.models import miniature
from draftwood.models.config import TargetConfig
from draftwood.models.drafter import Drafter
from draftwood.models.drafter_config import DrafterConfig
from draftwood.models.errors import ModelError
from draftwood.models.inventory import drafter_tensors, target_tensors
from draftwood.models.miniature_config import FAMILIES, drafter_config, target_config
from draftwood.models.target import Target
from draftwood.models.weights import SIZES
from support.deepseek import Paged
from support.kimi_configs import INT4, KIMI_TEXT

KERNELS = load_kernels("cpu")
OPTIONS = {"shard_bytes": 2_000_000, "seed": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Family -> folder of the target; the drafter's is `draft` beside it."""
    made = {}

    def folder(family):
        if family not in made:
            root = tmp_path_factory.mktemp("made")
            config = target_config(family, layers=3, experts=16, vocab_size=768)
            miniature.write_target(root / "target", config, **OPTIONS)
            miniature.write_drafter(root / "draft", drafter_config(family, config), **OPTIONS)
            made[family] = root / "target"
        return made[family]

    return folder


def headers(folder):
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 - not a dict
                part = f.get_slice(name)
                found[name] = (part.get_dtype(), tuple(part.get_shape()), file.name)
    return found


def test_the_layout_of_k26(folders):
    folder = folders("k2.6")
    found = headers(folder)
    layer, d = "language_model.model.layers.", 256
    expected = {
        "language_model.model.embed_tokens.weight": ("BF16", (768, d)),
        "language_model.lm_head.weight": ("BF16", (768, d)),
        "language_model.model.norm.weight": ("BF16", (d,)),
        f"{layer}0.mlp.down_proj.weight": ("BF16", (d, 512)),
        f"{layer}2.self_attn.q_b_proj.weight": ("BF16", (8 * 64, 96)),
        f"{layer}2.self_attn.kv_a_proj_with_mqa.weight": ("BF16", (160, d)),
        f"{layer}2.self_attn.kv_b_proj.weight": ("BF16", (8 * 64, 128)),
        f"{layer}2.mlp.gate.weight": ("BF16", (16, d)),
        f"{layer}2.mlp.gate.e_score_correction_bias": ("F32", (16,)),
        f"{layer}2.mlp.shared_experts.up_proj.weight": ("BF16", (256, d)),
        f"{layer}2.mlp.experts.15.up_proj.weight_packed": ("I32", (256, d // 8)),
        f"{layer}2.mlp.experts.15.down_proj.weight_scale": ("BF16", (d, 256 // 32)),
        f"{layer}2.mlp.experts.15.down_proj.weight_shape": ("I32", (2,)),
    }
    assert {name: found[name][:2] for name in expected} == expected
    assert len(found) == 3 + 3 * (2 + 7) + 3 + 2 * (2 + 3 + 16 * 9) + 3
    assert {name.split(".")[0] for name in found} == {"language_model", "vision_tower", "mm_projector"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {name: file for name, (_, _, file) in found.items()}
    assert index["metadata"]["total_size"] == sum(
        SIZES[dtype] * math.prod(shape) for dtype, shape, _ in found.values()
    )
    assert len(list(folder.glob("model-0000?-of-00000?.safetensors"))) > 2
    assert all(file.stat().st_size < 2_100_000 for file in folder.glob("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModel"].startswith("modeling_kimi_k25.")
    assert config["text_config"]["quantization_config"]["format"] == "pack-quantized"
    assert config["eos_token_id"] == 768 - 254


def test_true_width_has_the_published_sizes(tmp_path):
    config = target_config("k2.6", true_width=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    read = TargetConfig.from_folder(tmp_path)
    assert read.eos_token_ids == (163585, 163586)
    assert config["media_placeholder_token_id"] == 163605
    text = config["text_config"]
    left_to_the_library = {"bad_words_ids", "id2label"}
    assert {k: text.get(k) for k in KIMI_TEXT.keys() - left_to_the_library} == {
        k: v for k, v in KIMI_TEXT.items() if k not in left_to_the_library
    }
    assert text["quantization_config"] == INT4
    size = sum(spec.numel * SIZES[spec.dtype] for spec in target_tensors(read))
    assert 553.3 < size / 2**30 < 553.7  # 554.3 with the vision tower
    values = drafter_config("k2.6", config)
    assert values["dflash_config"] == {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]}
    (tmp_path / "config.json").write_text(json.dumps(values))
    drafter = DrafterConfig.from_folder(tmp_path)
    drafter.check_fits(read)
    specs = [spec for spec in drafter_tensors(drafter) if not spec.optional]
    assert len(specs) == 69
    assert round(sum(2 * spec.numel for spec in specs) / 2**30, 2) == 6.48


def load(folder, dtype=torch.bfloat16):
    return Target.from_folder(folder, dtype=dtype, device="cpu", kernels=KERNELS)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_loads_and_says_something(folders, family):
    target = load(folders(family))
    assert (target.config.quantization is not None) == FAMILIES[family].packed
    tokens = torch.randint(0, 768, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    logits = target.logits(Paged(target, 16).feed(tokens).hidden[0])
    assert logits.isfinite().all()
    assert 1 < logits.std() < 9
    assert logits.argmax(-1).unique().numel() > 20
    kimi = {768 - 254} if family == "k2.6" else {768 - 255, 768 - 254}
    assert set(target.config.eos_token_ids) == kimi
    options = {"dtype": torch.bfloat16, "device": "cpu", "kernels": KERNELS}
    drafter = Drafter.from_folder(folders(family).parent / "draft", target=target, **options)
    assert drafter.config.mask_token_id == 766


def test_speculation_is_lossless_on_int4(folders):
    folder = folders("k2.6")
    llm = LLM(folder, folder.parent / "draft", budget=8, max_batch=1)
    params = SamplingParams(max_new_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    (drafted,) = llm.generate("some text", params, mode="tree")
    (plain,) = llm.generate("some text", params, mode="plain")
    assert drafted.token_ids == plain.token_ids
    assert len(set(drafted.token_ids)) > 3


def test_nothing_in_a_folder_is_executed(folders):
    folder, ran = folders("k2.5"), folders("k2.5").parent / "ran"
    trap = f"open({str(ran)!r}, 'w'); raise SystemExit"
    for place in (folder, folder.parent / "draft"):
        for name in (
            "modeling_kimi_k25",
            "configuration_kimi_k25",
            "tokenization_kimi",
            "dflash",
            "sitecustomize",
        ):
            (place / f"{name}.py").write_text(trap)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    llm = LLM(folder, folder.parent / "draft", budget=8, max_batch=1)
    (output,) = llm.generate("a", SamplingParams(max_new_tokens=2))
    assert output.error is None
    assert not ran.exists()


def test_the_seed_and_the_name_decide(tmp_path):
    config = target_config("k2.6", layers=2, experts=16, vocab_size=512)
    for name, shard_bytes, seed in (("a", 10**6, 1), ("b", 10**9, 1), ("c", 10**9, 2)):
        miniature.write_target(tmp_path / name, config, shard_bytes=shard_bytes, seed=seed)
    a, b, c = (load(tmp_path / name).state_dict() for name in "abc")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not any(torch.equal(a[name], c[name]) for name in a)


@pytest.mark.parametrize("damage", ["truncated", "removed"])
def test_a_damaged_shard_is_named(folders, tmp_path, damage):
    for file in folders("k2").iterdir():
        (tmp_path / file.name).symlink_to(file)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    shard.unlink()
    if damage == "truncated":
        shard.write_bytes(data[:-1000])
    with pytest.raises(
        ModelError, match=rf"{shard.name}: {'truncated' if damage == 'truncated' else 'no such file'}"
    ):
        load(tmp_path)


PEAK = """
import resource, sys
import torch
from draftwood.kernels.registry import load_kernels
from draftwood.models.target import Target

def load(folder):
    return Target.from_folder(folder, dtype=torch.bfloat16, device="cpu", kernels=load_kernels("cpu"))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

load(sys.argv[1])
before = peak()
target = load(sys.argv[2])
print(peak() - before - sum(p.nbytes for p in target.parameters()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss has another unit elsewhere")
def test_memory_while_loading(folders, tmp_path):
    """Beyond the model no more than two shards, where a file that stays mapped would count whole."""
    config = target_config("k2.6", layers=3, experts=192, vocab_size=512)
    miniature.write_target(tmp_path / "large", config, shard_bytes=8_000_000, seed=0)
    size = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    command = [sys.executable, "-c", PEAK, str(folders("k2.6")), str(tmp_path / "large")]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    assert size > 45_000_000
    assert int(out.stdout) < 2 * 8_000_000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(Path(__file__).parent)], "is there already"),
        (["new", "--experts", "4"], "experts: expected at least 8"),
        (["new", "--family", "deepseek-v3", "--experts", "20"], "at least 16 and a multiple of 8, got 20"),
        (["new", "--layers", "1"], "layers: expected at least 2, got 1"),
        (["new", "--vocab", "300"], "vocab: expected at least 512, got 300"),
    ],
)
def test_the_command_names_a_wrong_argument(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    app = miniature.typer.Typer()
    app.command()(miniature.main)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not list(tmp_path.glob("new/*.safetensors"))
