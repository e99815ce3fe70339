"""The command line, through its own process boundary where that matters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from draftwood.cli import _errors_named, app

FIELDS = {
    "text",
    "token_ids",
    "finish_reason",
    "seed",
    "prompt_tokens",
    "completion_tokens",
    "rounds",
    "tokens_per_round",
    "tokens_per_second",
    "stage_seconds",
}


def run(*args: str):
    return CliRunner().invoke(app, ["generate", *args])


def test_json_is_one_object_and_nothing_else():
    result = run("def f(x):", "--json", "--max-new-tokens", "6", "--budget", "8")
    assert result.exit_code == 0, result.output
    out = json.loads(result.stdout)
    assert set(out) == FIELDS | {"choices"}
    assert out["choices"] == {}  # nothing about the bundled pair is open
    assert out["completion_tokens"] == len(out["token_ids"]) <= 6
    assert out["rounds"] <= out["completion_tokens"]


@pytest.mark.parametrize("sampling", [[], ["--temperature", "0.8", "--top-p", "0.9"]])
def test_compare_says_identical(sampling):
    result = run("def f(x):", "--json", "--compare", "--max-new-tokens", "8", "--dtype", "float64", *sampling)
    assert result.exit_code == 0, result.output
    out = json.loads(result.stdout)
    assert out["identical"] is True
    assert out["plain"]["token_ids"] == out["token_ids"]
    assert out["plain"]["rounds"] == len(out["token_ids"])


def test_a_difference_exits_with_1(monkeypatch):
    monkeypatch.setattr("draftwood.engine.llm.LLM.generate", _other_text)
    result = run("def f(x):", "--compare", "--max-new-tokens", "4")
    assert result.exit_code == 1
    assert "the texts differ from output token 0 on" in result.stderr


def _other_text(self, prompts, params=None, **kwargs):
    from draftwood.engine.outputs import RequestOutput

    return [RequestOutput([1], 0, "?", [-1], "length")]


def test_text_on_stdout_summary_on_stderr():
    result = run("def f(x):", "--max-new-tokens", "4", "--mode", "chain", "--compare")
    assert result.exit_code == 0
    assert "identical text" in result.stderr
    assert "identical" not in result.stdout


def test_trace_page(tmp_path):
    page = tmp_path / "run.html"
    assert run("import os", "--max-new-tokens", "4", "--trace", str(page)).exit_code == 0
    assert "<html" in page.read_text()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--budget", "0"], "budget: expected"),
        (["--budget", "999"], "budget: expected"),
        (["--budget", "many"], "budget: expected"),
        (["--temperature", "-1"], "temperature"),
        (["--top-p", "0"], "top_p"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--model", "/nowhere/at/all"], "/nowhere/at/all"),
        (["--dtype", "int3"], "dtype: expected"),
        (["--device", "tpu"], "device: expected"),
        (["--trace", "/nowhere/run.html"], "--trace: /nowhere/run.html cannot be written"),
        (["--mode", "plain", "--compare"], "--compare"),
        (["--yarn-rule", "factor"], "the drafter has no YaRN"),
    ],
)
def test_wrong_arguments_exit_with_2_and_name_the_field(args, message):
    result = run("x", *args)
    assert result.exit_code == 2, result.output
    assert message in result.stderr.replace("\n", " ")
    assert result.stdout == ""


def test_an_empty_prompt_is_refused():
    result = run("", "--max-new-tokens", "4")
    assert result.exit_code == 2
    assert "prompt 0 is empty" in result.stderr


def test_stdin_and_a_closed_pipe():
    draftwood = f"{sys.executable} -c 'from draftwood.cli import main; main()'"
    command = f"printf 'def f' | {draftwood} generate - --max-new-tokens 200 | head -c 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert len(done.stdout) == 1
    assert "Traceback" not in done.stderr
    assert "Broken pipe" not in done.stderr


def test_doctor_names_every_kernel_and_a_reason():
    result = CliRunner().invoke(app, ["doctor"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for kernel in ("topk_logprobs", "tree_build", "verify_attn", "sample", "tree_accept", "commit_kv", "moe"):
        assert kernel in result.stdout
    assert "runs anywhere; triton needs a GPU" in result.stdout


def test_an_error_does_not_drive_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with pytest.raises(typer.Exit), _errors_named():
        raise ValueError("config.json: key `\x1b[2J[/red]` is unknown")
    assert "config.json: key `␛[2J[/red]` is unknown" in capsys.readouterr().err
