"""The law of sampled output: 3-token texts over a 6-token vocabulary against exact enumeration."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from draftwood import LLM, SamplingParams
from support.tiny import write_drafter, write_target

V, PROMPT = 6, [3]  # one token: nothing to prefill
VOCAB = {"vocab_size": V, "eos_token_id": 5}


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
def test_empirical_law_matches_enumeration(tmp_path, mode, n, filters):
    target = write_target(tmp_path / "t", 11, scale=0.35, **VOCAB)
    drafter = write_drafter(tmp_path / "d", VOCAB, block_size=4)
    llm = LLM(target, drafter, dtype="float64", max_batch=1000, max_context=16, page_size=16, budget=10)
    law = exact_law(llm, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} | filters))
    assert sum(law.values()) == pytest.approx(1.0)
    counts = dict.fromkeys(law, 0)
    accepted = 0
    for start in range(0, n, 10_000):
        params = [
            SamplingParams(max_new_tokens=3, ignore_eos=True, seed=s, **filters)
            for s in range(start, start + 10_000)
        ]
        for output in llm.generate([PROMPT] * 10_000, params, mode=mode):
            counts[tuple(output.token_ids)] += 1  # KeyError: a text of probability zero
            accepted += sum(r.accepted for r in output.rounds)
    assert accepted > n / 10  # trees took part
    expected = np.array([n * law[k] for k in law])
    seen = np.array([counts[k] for k in law], float)
    rare = expected < 5
    if rare.any():
        expected = np.append(expected[~rare], expected[rare].sum())
        seen = np.append(seen[~rare], seen[rare].sum())
    assert chisquare(seen, expected).pvalue > 1e-3
