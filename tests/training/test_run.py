"""`draftwood train drafter` from files to a folder that the engine loads."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from draftwood import LLM, SamplingParams
from draftwood.scores import ScoreRule
from draftwood.training.cli import app
from support.tiny import drafter_shapes

SMALL = [
    "--layers",
    "2",
    "--taps",
    "0,1",
    "--length",
    "32",
    "--mask-token-id",
    "2",
    "--temperatures",
    "0,0.8",
    "--eval-prompts",
    "4",
    "--generation-batch",
    "16",
    "--batch",
    "8",
    "--anchors",
    "4",
    "--epochs",
    "4",
    "--eval-every",
    "5",
    "--checkpoint-every",
    "3",
    "--labels",
    "soft",
    "--device",
    "cpu",
    "--lr",
    "3e-3",
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("data") / "prompts.txt"
    file.write_text("".join(f"t{3 + i} t{5 + i} t{4 + i % 7}\n" for i in range(28)))
    return file


def train(folders, prompts, out, *more):
    command = [
        "drafter",
        "--target",
        str(folders[0]),
        "--data",
        str(prompts),
        "--out",
        str(out),
        *SMALL,
        *more,
    ]
    return CliRunner().invoke(app, command)


@pytest.fixture(scope="module")
def trained(folders, prompts, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    result = train(folders, prompts, out)
    assert result.exit_code == 0, result.output
    return out, result.output


def test_the_folder_has_the_published_names_and_the_engine_loads_it(folders, trained):
    out, _ = trained
    config = json.loads((out / "config.json").read_text())
    tensors = load_file(out / "model.safetensors")
    assert {k: tuple(v.shape) for k, v in tensors.items()} == drafter_shapes(config)
    assert all(t.dtype == torch.bfloat16 for t in tensors.values())
    assert config["architectures"] == ["DFlashDraftModel"]
    assert (out / "scores.json").exists()
    assert (
        json.loads((out / "training.json").read_text())["facts"]["score rule"]
        == ScoreRule.from_folder(out).model_dump_json()
    )
    assert config["dflash_config"] == {"mask_token_id": 2, "target_layer_ids": [0, 1]}
    params = SamplingParams(max_new_tokens=10)
    (drafted,) = LLM(folders[0], out, device="cpu").generate(["t3 t5"], params, mode="tree", budget=8)
    (plain,) = LLM(folders[0], device="cpu", drafter=out).generate(["t3 t5"], params, mode="plain")
    assert drafted.token_ids == plain.token_ids


def test_it_learns_and_says_so(trained):
    out, said = trained
    run = json.loads((out / "training.json").read_text())
    losses = [loss for _, loss in run["losses"]]
    assert losses[-1] < 0.9 * losses[0]
    assert {"chain", "8", "16", "32", "64"} < set(run["evaluations"][-1])
    assert "held-out tokens per round: chain" in said
    card, plot = (out / "README.md").read_text(), (out / "training.svg").read_text()
    assert "| step | chain | 8 | 16 | 32 | 64 |" in card
    assert plot.count("<polyline") == 6


@pytest.mark.parametrize("stop", [3, 11])
def test_interrupted_and_resumed_is_uninterrupted(folders, prompts, trained, tmp_path, stop):
    """Bit for bit; step 11 lies between two checkpoints, which an interruption writes too, and after an evaluation, which leaves a drafter."""
    assert train(folders, prompts, tmp_path, "--stop-at", str(stop)).exit_code == 0
    assert (tmp_path / "config.json").exists() == (stop > 10)
    if stop > 10:
        assert LLM(folders[0], tmp_path, device="cpu").drafting is not None
    result = train(folders, prompts, tmp_path)
    assert result.exit_code == 0, result.output
    assert f"going on from step {stop}" in result.output
    once, twice = (load_file(f / "model.safetensors") for f in (trained[0], tmp_path))
    assert all(torch.equal(once[k], twice[k]) for k in once)
    states = [torch.load(f / "work" / "checkpoint.pt") for f in (trained[0], tmp_path)]
    for a, b in zip(*(s["optimiser"]["state"].values() for s in states), strict=True):
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_a_run_can_start_from_a_drafter(folders, prompts, trained, tmp_path):
    """And does better at once than the first one did; one of another shape is refused."""
    result = train(folders, prompts, tmp_path / "a", "--init", str(trained[0]))
    assert result.exit_code == 0, result.output
    first, second = (
        json.loads((f / "training.json").read_text())["losses"][0][1] for f in (trained[0], tmp_path / "a")
    )
    assert second < 0.9 * first
    result = train(folders, prompts, tmp_path / "b", "--init", str(trained[0]), "--intermediate-size", "16")
    assert result.exit_code == 2
    assert "than these settings describe: intermediate_size" in " ".join(result.output.split())


def test_a_run_can_start_from_some_layers_of_a_drafter(folders, prompts, trained, tmp_path):
    """With another block size too; as many layers as were asked for, and ones that there are."""
    shorter = ("--init", str(trained[0]), "--layers", "1", "--block-size", "6", "--stop-at", "1")
    result = train(folders, prompts, tmp_path / "a", *shorter, "--init-layers", "1")
    assert result.exit_code == 0, result.output
    whole, start = (load_file(f / "model.safetensors") for f in (trained[0], tmp_path / "a/work/start"))
    assert json.loads((tmp_path / "a/work/start/config.json").read_text())["block_size"] == 6
    own = {k.replace("layers.0.", "layers.1."): v for k, v in start.items()}
    assert own.keys() == {k for k in whole if not k.startswith("layers.0.")}
    assert all(torch.equal(whole[k], v) for k, v in own.items())
    for layers in ("0,1", "2"):
        result = train(folders, prompts, tmp_path / "b", *shorter, "--init-layers", layers)
        assert result.exit_code == 2
        assert "init_layers: expected 1 of the layers 0..1" in " ".join(result.output.split())

    result = train(folders, prompts, tmp_path / "b", "--init-layers", "1")
    assert result.exit_code == 2
    assert "init_layers: expected `init` too" in " ".join(result.output.split())


def test_other_settings_do_not_resume(folders, prompts, trained):
    result = train(folders, prompts, trained[0], "--lr", "0.1")
    assert result.exit_code == 2
    assert "made with other settings: lr" in result.output


def test_a_checkpoint_of_before_a_setting_existed_resumes(folders, prompts, tmp_path):
    assert train(folders, prompts, tmp_path, "--stop-at", "3").exit_code == 0
    checkpoint = tmp_path / "work" / "checkpoint.pt"
    state = torch.load(checkpoint)
    del state["settings"]["init_layers"]
    torch.save(state, checkpoint)
    result = train(folders, prompts, tmp_path, "--stop-at", "4")
    assert result.exit_code == 0, result.output
    assert "going on from step 3" in result.output


def test_bad_data_is_refused_or_skipped(folders, prompts, tmp_path):
    bad = tmp_path / "bad.txt"
    bad.write_text("t3 t4\n" + "t5 " * 40 + "\n")
    refused = train(folders, prompts, tmp_path / "a", str(bad))
    assert refused.exit_code == 2
    assert f"{bad}:2: the prompt has 40 tokens" in refused.output
    skipped = train(folders, prompts, tmp_path / "b", str(bad), "--on-bad", "skip", "--stop-at", "1")
    assert skipped.exit_code == 0, skipped.output
    assert f"skipped {bad}:2" in skipped.output


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--length", "300"], "beyond the target's 256 positions"),
        (["--length", "8"], "no room for a block of 8"),
        (["--batch", "0"], "--batch: Input should be greater than 0"),
        (["--taps", "0,9"], "names layer 9"),
        (["--taps", "x"], "expected numbers"),
        (["--on-bad", "ignore"], "expected skip or refuse"),
    ],
)
def test_wrong_settings_are_named(folders, prompts, tmp_path, more, said):
    result = train(folders, prompts, tmp_path, *more)
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())
