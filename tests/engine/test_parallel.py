"""Several ranks on a CPU give what one gives; and when one of them is lost, all end, saying why."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import fields

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood import LLM, SamplingParams, bundled
from draftwood.engine import parallel_runner
from draftwood.engine.world import RankError, World
from draftwood.models.config import TargetConfig
from draftwood.models.errors import ModelError
from draftwood.models.shard import Shard
from draftwood.parallel import _widened, packed, unpacked
from draftwood.tree import from_parents
from support.tiny import write_drafter, write_target

SAMPLERS = {
    "greedy": {"logprobs": 4},
    "greedy, penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    "sampled": {"temperature": 1.0, "logprobs": 2},
    "everything": {
        "temperature": 1.2,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.2,
        "logit_bias": {4: 1.0, 39: 2.0, 40: float("-inf")},
        "logprobs": 0,
    },
    "top-p": {"temperature": 1.1, "top_p": 0.8},
}
PROMPTS = [[3, 30, 7, 21], [39, 2]]
PATIENCE = 240.0
"""Seconds for what takes one or two on a quiet machine."""


def plant_ties(folder):
    """Every token of the upper half has a twin in the lower one, most of them in another rank's slice.

    The first ten are equal, the next few units in the last place away.
    """
    tensors = load_file(folder / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):  # the second is the head of tied models
        tensors[name][20:40] = tensors[name][:20]
        tensors[name][30:40] *= 1 + 2.0**-22
    save_file(tensors, folder / "model.safetensors")


def write_pair(tmp_path_factory, **overrides):
    root = tmp_path_factory.mktemp("pair")
    target = write_target(root / "target", 3, vocab_size=41, **overrides)
    plant_ties(target)
    return target, write_drafter(root / "drafter", {"vocab_size": 41}, 4)


def outputs(llm, *, modes=("plain", "chain", "tree"), samplers=SAMPLERS, n=8):
    """Tokens and logprobs of every sampler in every mode."""
    found = {}
    for mode, (name, sampler) in itertools.product(modes, samplers.items()):
        params = [SamplingParams(max_new_tokens=n, seed=s, ignore_eos=True, **sampler) for s in (5, 6)]
        budget = 7 if mode == "tree" else None
        found[mode, name] = llm.generate(PROMPTS, params, mode=mode, budget=budget)
    return found


def assert_equal(got, want):
    assert got.keys() == want.keys()
    for case in want:
        for a, b in zip(got[case], want[case], strict=True):
            assert a.token_ids == b.token_ids, case
            assert (a.logprobs is None) == (b.logprobs is None)
            for x, y in zip(a.logprobs or (), b.logprobs or (), strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=1e-5)
                assert [token for token, _ in x.top] == [token for token, _ in y.top]


def agree(llm):
    llm._runner(llm.drafting).check_ranks_agree()


def lose(llm, cause):
    """Start a request, let `cause` happen, and give the error that ends it, and the seconds it took."""
    events = llm.stream([PROMPTS[0]], SamplingParams(max_new_tokens=200, ignore_eos=True), mode="plain")
    next(events)
    cause()
    started = time.monotonic()
    with pytest.raises(RankError) as error:
        list(events)
    assert time.monotonic() - started < PATIENCE
    assert_gone(llm.world.pids.values())
    with pytest.raises(RankError, match="closed"):
        llm.generate([[1]])
    return error.value


def assert_gone(pids):
    until = time.monotonic() + PATIENCE
    for pid in pids:
        while _lives(pid):
            assert time.monotonic() < until, f"process {pid} goes on"
            time.sleep(0.05)


def _lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


class TestTwoRanks:
    """fp64, 41 tokens: slices of 21 and 20."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, tmp_path_factory):
        return write_pair(tmp_path_factory, q_lora_rank=12)

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, pair):
        with LLM(*pair, dtype="float64", tp=2, max_batch=2, page_size=16) as llm:
            yield llm

    def test_equal_one_rank(self, pair, llm):
        want = outputs(LLM(*pair, dtype="float64", max_batch=2, page_size=16))
        twins = {t for o in want["plain", "sampled"] for t in o.token_ids if t >= 20}
        assert twins, "sampling must reach the second slice"
        assert_equal(outputs(llm), want)
        agree(llm)

    def test_budget_auto_prunes_on_the_first_rank_alone(self, llm):
        params = SamplingParams(max_new_tokens=24, ignore_eos=True)
        plain = llm.generate(PROMPTS, params, mode="plain")
        auto = llm.generate(PROMPTS, params, mode="tree", budget="auto")
        assert [o.token_ids for o in auto] == [o.token_ids for o in plain]
        agree(llm)

    def test_requests_interleave_and_long_messages_arrive(self, llm):
        long = [[1 + i % 40 for i in range(200)]] * 2  # more than one broadcast of a message
        params = SamplingParams(max_new_tokens=4, ignore_eos=True)
        alone = [
            llm.generate(p, params, mode=m)[0].token_ids
            for p, m in ((long[0], "tree"), (PROMPTS[0], "plain"))
        ]
        streams = [llm.stream([long[0]], params, mode="tree"), llm.stream([PROMPTS[0]], params, mode="plain")]
        events = [event for pair in itertools.zip_longest(*streams) for event in pair]
        got = [[e.output.token_ids for e in events[i::2] if e][-1] for i in (0, 1)]
        assert got == alone
        agree(llm)

    def test_an_interrupt_waits_for_the_round_and_ends_nothing(self, llm):
        reached = []

        def interrupted():
            with llm.world.together():
                signal.raise_signal(signal.SIGINT)
                reached.append(True)

        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert reached
        assert llm.generate([PROMPTS[0]], SamplingParams(max_new_tokens=2), mode="plain")[0].token_ids

    def test_one_engine_with_ranks_at_a_time(self, pair, llm):
        with pytest.raises(ValueError, match=r"tp: torch\.distributed is in use"):
            LLM(*pair, tp=2)

    def test_a_rank_that_raises_is_named_with_its_error(self, llm, monkeypatch):  # last: it ends the engine
        def raise_there():
            send = llm.world.send
            monkeypatch.setattr(
                llm.world, "send", lambda call: send(parallel_runner.replace(call, method="no_such_call"))
            )

        threads = llm.world._threads
        assert torch.get_num_threads() == max(1, threads // 2)
        error = lose(llm, raise_there)
        assert torch.get_num_threads() == threads
        assert "rank 1 of 2: AttributeError" in str(error)
        assert "no_such_call" in str(error)
        assert "parallel_runner.py" in error.__notes__[0]


class TestTwoRanksReplayed:
    """Rounds and prefill a round ahead of the host, on both ranks."""

    def test_equal_one_rank_and_end_with_a_lost_one(self, tmp_path_factory):
        pair = write_pair(tmp_path_factory)
        settings = {"dtype": "float64", "max_batch": 2, "page_size": 16}
        samplers = {name: SAMPLERS[name] for name in ("greedy", "sampled", "everything")}
        params = [SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (9, 24)]
        alone = LLM(*pair, **settings)
        want = outputs(alone, samplers=samplers)
        with LLM(*pair, **settings, tp=2, graphs=True) as llm:
            assert_equal(outputs(llm, samplers=samplers), want)
            assert_equal({0: llm.generate(PROMPTS, params)}, {0: alone.generate(PROMPTS, params)})  # auto
            agree(llm)
            (pid,) = llm.world.pids.values()
            runners = llm._graph_runners.values()
            assert any(runner._held for runner in runners)
            assert "rank 1 of 2 was killed by signal 9" in str(
                lose(llm, lambda: os.kill(pid, signal.SIGKILL))
            )
            assert not any(runner._held for runner in runners), "NCCL would wait for these recordings"


class TestFourRanks:
    """fp64; whole experts per rank, the drafter on every rank, embedding and head one matrix, slices of 11, 11, 11, 8."""

    @pytest.fixture(scope="class")
    @classmethod
    def pair(cls, tmp_path_factory):
        sizes = {"num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "n_group": 2}
        return write_pair(tmp_path_factory, tie_word_embeddings=True, **sizes)

    @pytest.fixture(scope="class")
    @classmethod
    def llm(cls, pair):
        with LLM(*pair, dtype="float64", tp=4, expert_parallel=True, max_batch=2) as llm:
            yield llm

    def test_equal_one_rank(self, pair, llm):
        assert not llm.drafting.drafter.config.splits(4)
        some = {"modes": ("plain", "tree"), "n": 4}
        some["samplers"] = {name: SAMPLERS[name] for name in ("greedy", "everything")}
        assert_equal(outputs(llm, **some), outputs(LLM(*pair, dtype="float64", max_batch=2), **some))
        agree(llm)

    def test_a_killed_rank_is_named(self, llm):  # last: it ends the engine
        error = lose(llm, lambda: os.kill(llm.world.pids[2], signal.SIGKILL))
        assert "rank 2 of 4 was killed by signal 9 (Killed)" in str(error)


def test_torchrun():
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
    ]
    command = [sys.executable, "-c", "from draftwood.cli import main; main()", "generate", "def add(a, b):"]
    options = ["--tp", "2", "--max-new-tokens", "6", "--mode", "chain", "--json"]
    run = subprocess.run(
        [*launch, *command, *options], check=False, capture_output=True, text=True, timeout=600
    )
    assert run.returncode == 0, run.stderr
    want = LLM(max_batch=1).generate("def add(a, b):", SamplingParams(max_new_tokens=6), mode="plain")[0]
    assert json.loads(run.stdout)["token_ids"] == want.token_ids


BUNDLED = """
import json, os, signal
from draftwood import LLM, SamplingParams

llm = LLM(tp=2, max_batch=1, max_context=128)
pairs = []
for sampler in ({}, {"temperature": 0.8, "top_p": 0.9, "seed": 1}):
    params = SamplingParams(max_new_tokens=16, ignore_eos=True, **sampler)
    plain = llm.generate("def add(a, b):", params, mode="plain")[0]
    tree = llm.generate("def add(a, b):", params, mode="tree", budget=16)[0]
    pairs.append((plain.token_ids, tree.token_ids, tree.tokens_per_round))
    llm._runner(llm.drafting).check_ranks_agree()
print(json.dumps({"pids": list(llm.world.pids.values()), "pairs": pairs}), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_bundled_pair_is_lossless_and_ranks_end_with_a_first_that_is_killed():
    """fp32, packed weights and dense experts; drafts are accepted."""
    command = [sys.executable, "-c", BUNDLED]
    run = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=600)
    assert run.returncode == -signal.SIGKILL
    found = json.loads(run.stdout)
    for plain, tree, tokens_per_round in found["pairs"]:
        assert tree == plain
        assert tokens_per_round > 1.2
    assert len(found["pids"]) == 1
    assert_gone(found["pids"])


@pytest.mark.parametrize("T", [1, 5, 64, 65])
def test_records_travel_whole(T):
    tree = from_parents([[7] * T], [range(-1, T - 1)], [T]).torch()
    wide = _widened(tree, 70)
    again = unpacked(wide, packed(wide)).truncated(T)
    for field in fields(tree):
        assert torch.equal(getattr(again, field.name), getattr(tree, field.name))
    odd = from_parents([[7]], [[-1]], [1]).torch()
    odd = type(odd)(
        *(getattr(odd, f.name).expand(3, *getattr(odd, f.name).shape[1:])[::2] for f in fields(odd))
    )
    for field in fields(odd):
        assert torch.equal(getattr(unpacked(odd, packed(odd)), field.name), getattr(odd, field.name))


@pytest.mark.parametrize(
    ("ranks", "options", "key"),
    [
        (3, {}, "num_attention_heads"),
        (8, {}, "moe_intermediate_size"),
        (2, {"expert_parallel": True}, "n_routed_experts"),
        (4, {}, "vocab_size"),
    ],
)
def test_what_cannot_be_shared_is_named(tmp_path, ranks, options, key):
    sizes = {"num_attention_heads": 8, "moe_intermediate_size": 12, "n_routed_experts": 5, "vocab_size": 9}
    sizes |= {"num_key_value_heads": 8, "topk_group": 1, "num_experts_per_tok": 2}
    config = TargetConfig.from_folder(write_target(tmp_path / "t", **sizes))
    with pytest.raises(ModelError, match=f"key `{key}`.*{ranks}"):
        config.check_ranks(Shard(ranks - 1, ranks), **options)


def test_wrong_numbers_of_ranks_are_named(monkeypatch):
    with pytest.raises(ValueError, match="tp\n"):
        LLM(tp=0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="tp: 2 was asked for, but torchrun started 4 ranks"):
        World.open(2, "cpu", bundled.pair)
