"""The law of sampled output: 3-token texts over a 6-token vocabulary against exact enumeration.

The texts come from the engine's rounds without its queue and text; some are held against what the engine gives.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from draftwood import LLM, SamplingParams
from draftwood.engine.row import Row
from draftwood.kernels.noise import torch_impl
from draftwood.round import RoundPlan
from support.tiny import write_drafter, write_target

V, PROMPT = 6, [3]  # one token: nothing to prefill
VOCAB = {"vocab_size": V, "eos_token_id": 5}
BATCH = 2000
PLANS = {"tree": RoundPlan(8, 2, V), "chain": RoundPlan(3, 2, 1)}
"""Rounds as deep as a text of 3 tokens, which ends with the target's own, can use."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    root = tmp_path_factory.mktemp("pair")
    target = write_target(root / "target", 11, scale=0.35, **VOCAB)
    drafter = write_drafter(root / "drafter", VOCAB, block_size=4)
    return LLM(target, drafter, dtype="float64", max_batch=BATCH, max_context=16, page_size=16, budget=8)


def exact_law(
    llm: LLM, temperature: float, top_k: int, top_p: float, min_p: float
) -> dict[tuple[int, ...], float]:
    """P(text) by multiplying filtered conditionals, from one forward pass per context."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown = {}
        for text, p in law.items():
            for token, q in enumerate(conditional(llm, text, temperature, top_k, top_p, min_p)):
                if q > 0:
                    grown[(*text, token)] = p * q
        law = grown
    return law


def conditional(llm, text, temperature, top_k, top_p, min_p) -> np.ndarray:
    params = SamplingParams(max_new_tokens=1, ignore_eos=True, logprobs=V, seed=0)
    row = llm.generate([[*PROMPT, *text]], params, mode="plain")[0].logprobs[0].top
    logp = np.full(V, -np.inf)
    logp[[t for t, _ in row]] = [lp for _, lp in row]
    p = np.exp(logp / temperature)
    order = np.argsort(-p, kind="stable")
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
    p[order[before >= top_p]] = 0
    p[p < min_p * p.max()] = 0
    return p / p.sum()


def sampled(llm: LLM, plan: RoundPlan, params: SamplingParams, seeds: range) -> tuple[list[list[int]], int]:
    """The texts of these seeds, in order, and how many drafted tokens they took."""
    runner, accepted = llm._runner(llm.drafting), 0
    texts: dict[int, list[int]] = {seed: [] for seed in seeds}
    going = seeds
    while going:
        runner.begin([Row(PROMPT, texts[s], [s - seeds.start], s, params, ()) for s in going])
        for seed, row in zip(going, runner.round(plan).rows, strict=True):
            texts[seed] += row.emitted
            accepted += len(row.emitted) - 1
        going = [seed for seed in going if len(texts[seed]) < 3]
    return list(texts.values()), accepted


@pytest.mark.parametrize(
    ("mode", "n", "filters"),
    [
        ("tree", 100_000, {"temperature": 1.0}),
        ("tree", 20_000, {"temperature": 0.8, "top_p": 0.85}),
        ("tree", 20_000, {"temperature": 1.3, "top_k": 3}),
        ("tree", 20_000, {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.05}),
        ("chain", 20_000, {"temperature": 1.0}),
    ],
)
@torch.inference_mode()
def test_empirical_law_matches_enumeration(llm, monkeypatch, mode, n, filters):
    law = exact_law(llm, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters))
    assert sum(law.values()) == pytest.approx(1.0)
    params = SamplingParams(max_new_tokens=3, ignore_eos=True, **filters)
    counts = dict.fromkeys(law, 0)
    accepted = 0
    for start in range(0, n, BATCH):
        monkeypatch.setattr(
            torch_impl, "_recent", torch_impl.RecentRows(2**40)
        )  # as good as new, and never full
        texts, drafted = sampled(llm, PLANS[mode], params, range(start, start + BATCH))
        accepted += drafted
        for text in texts:
            counts[tuple(text)] += 1  # KeyError: a text of probability zero
        if start == 0:
            seeded = [params.model_copy(update={"seed": seed}) for seed in range(100)]
            outputs = llm.generate([PROMPT] * 100, seeded, mode=mode)
            assert [output.token_ids for output in outputs] == texts[:100]
    assert accepted > n / 10  # drafts took part
    expected = np.array([n * law[k] for k in law])
    seen = np.array([counts[k] for k in law], float)
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        seen = np.append(seen[~rare], seen[rare].sum())
    assert chisquare(seen, expected).pvalue > 1e-3
