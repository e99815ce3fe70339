"""Lossless: tree, chain and plain decoding give identical tokens, greedy and sampled, in fp64."""

from __future__ import annotations

import itertools
import random

import pytest

from draftwood import LLM, SamplingParams
from support.scripted import Coverage, ScriptedDrafting
from support.tiny import TARGET, write_drafter, write_target

MODELS = [
    {},
    {"q_lora_rank": 12, "num_hidden_layers": 3},
    {"n_group": 2, "topk_group": 1, "n_routed_experts": 8, "max_position_embeddings": 128},
    {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "max_position_embeddings": 128,
    },
]
CASES_PER_ENGINE = 9


def load(tmp_path, overrides, seed, *, block=6, drafter=True, **settings) -> LLM:
    target = write_target(tmp_path / "target", seed, **overrides)
    folder = write_drafter(tmp_path / "drafter", overrides, seed + 1, block_size=block) if drafter else None
    return LLM(target, folder, dtype="float64", **settings)


def random_prompt(rng: random.Random, longest: int = 40) -> list[int]:
    return [
        rng.randrange(1, TARGET["vocab_size"]) for _ in range(rng.choice([1, 2, 3, rng.randint(4, longest)]))
    ]


def tokens(outputs) -> list[list[int]]:
    return [o.token_ids for o in outputs]


@pytest.mark.parametrize(
    ("model", "page", "block"), [*itertools.product(range(len(MODELS)), (16, 64), (3, 8))]
)
def test_greedy_modes_agree(tmp_path, model, page, block):
    """16 engines x 9 cases: random prompts, budgets, batch sizes; a real, untrained drafter."""
    llm = load(tmp_path, MODELS[model], model, page_size=page, block=block, max_batch=4)
    rng = random.Random(f"{model} {page} {block}")
    for _ in range(CASES_PER_ENGINE):
        prompts = [random_prompt(rng) for _ in range(rng.choice([1, 2, 4, 6]))]
        params = SamplingParams(max_new_tokens=rng.randint(1, 14))
        plain = llm.generate(prompts, params, mode="plain")
        budget = rng.choice([1, 2, 3, 5, 9, 16, 33, "auto"])
        assert tokens(llm.generate(prompts, params, mode="chain")) == tokens(plain)
        assert tokens(llm.generate(prompts, params, mode="tree", budget=budget)) == tokens(plain)


SAMPLERS = {
    "greedy": {},
    "greedy-penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.9},
    "unfiltered": {"temperature": 1.0},
    "hot": {"temperature": 2.5},
    "top-k": {"temperature": 0.9, "top_k": 5},
    "top-p": {"temperature": 1.1, "top_p": 0.8},
    "min-p": {"temperature": 1.0, "min_p": 0.1},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "bias": {"temperature": 0.7, "logit_bias": {3: 4.0, 5: float("-inf"), 7: -2.0}},
    "everything": {
        "temperature": 1.2,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.1,
        "presence_penalty": -0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {4: 1.0},
    },
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_sampled_modes_agree_under_one_seed(tmp_path, name):
    llm = load(tmp_path, {}, 5, max_batch=4)
    rng = random.Random(name)
    for case in range(2):
        prompts = [random_prompt(rng) for _ in range(6)]
        params = [SamplingParams(max_new_tokens=16, seed=100 * case + i, **SAMPLERS[name]) for i in range(6)]
        plain = llm.generate(prompts, params, mode="plain")
        assert tokens(llm.generate(prompts, params, mode="chain")) == tokens(plain)
        for budget in (4, 24):
            assert tokens(llm.generate(prompts, params, mode="tree", budget=budget)) == tokens(plain)
        alone = [llm.generate(p, s, mode="tree", budget=9)[0] for p, s in zip(prompts, params, strict=True)]
        assert tokens(alone) == tokens(plain)


@pytest.mark.parametrize("sampler", ["greedy", "greedy-penalties", "unfiltered", "top-p", "everything"])
def test_scripted_drafters_cover_every_path_and_lose_nothing(tmp_path, sampler):
    """A random pair accepts almost nothing; scripts make every path length and later siblings happen."""
    llm = load(tmp_path, {}, 7, drafter=False, max_batch=5)
    rng = random.Random(sampler)
    coverage, depth = Coverage(), 5
    for case in range(4):
        prompts = [random_prompt(rng) for _ in range(5)]
        params = [
            SamplingParams(max_new_tokens=24, ignore_eos=True, seed=50 * case + i, **SAMPLERS[sampler])
            for i in range(5)
        ]
        llm.config = llm.config.model_copy(update={"noise_coupled": case % 2 == 0})
        plain = llm.generate(prompts, params, mode="plain")
        texts = {o.seed: o.prompt_token_ids + o.token_ids for o in plain}
        for style in ("perfect", "adversarial", "random"):
            llm.drafting = ScriptedDrafting(texts, TARGET["vocab_size"], style, depth, seed=case)
            outputs = llm.generate(prompts, params, mode="tree", budget=rng.choice([8, 17, 40]), trace=True)
            assert tokens(outputs) == tokens(plain)
            for output in outputs:
                coverage.add(output)
                accepted = [r.accepted for r in output.rounds]
                if style == "perfect":  # an output may end early, never a path
                    assert all(a == depth for a in accepted[:-1])
                if style == "adversarial":
                    assert not any(accepted)
            if style != "random":
                chain = llm.generate(prompts, params, mode="chain")
                assert tokens(chain) == tokens(plain)
    assert coverage.lengths == set(range(1, depth + 2))
    assert coverage.later_siblings > 20


def test_seed_replays_and_is_recorded(tmp_path):
    llm = load(tmp_path, {}, 3)
    first = llm.generate([[5, 6, 7]], SamplingParams(temperature=1.0, max_new_tokens=12))[0]
    again = llm.generate([[5, 6, 7]], SamplingParams(temperature=1.0, max_new_tokens=12, seed=first.seed))[0]
    assert again.token_ids == first.token_ids
    others = {
        tuple(
            llm.generate([[5, 6, 7]], SamplingParams(temperature=1.0, max_new_tokens=12, seed=s))[0].token_ids
        )
        for s in range(8)
    }
    assert len(others) > 1


def test_chain_is_the_tree_of_width_one(tmp_path):
    """Same tokens, same rounds, same cache bytes."""
    llm = load(tmp_path, {}, 9, drafter=False)
    plain = llm.generate([[3, 4, 5]], SamplingParams(max_new_tokens=30), mode="plain")[0]
    texts = {plain.seed: plain.prompt_token_ids + plain.token_ids}
    llm.drafting = ScriptedDrafting(texts, TARGET["vocab_size"], "perfect", 4)
    runs = []
    for mode, budget in (("chain", None), ("tree", 5)):
        llm.latents.pages.zero_()
        params = SamplingParams(max_new_tokens=30, seed=plain.seed)
        output = llm.generate([[3, 4, 5]], params, mode=mode, budget=budget)[0]
        runs.append((output.token_ids, [r.accepted for r in output.rounds], llm.latents.pages.clone()))
    assert runs[0][:2] == runs[1][:2]
    assert (runs[0][2] == runs[1][2]).all()
