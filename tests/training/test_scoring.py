"""The fit finds the rule that made the data."""

import torch

from draftwood.kernels.noise.torch_impl import slice_gumbel
from draftwood.kernels.registry import load_kernels
from draftwood.scores import ScoreRule
from draftwood.training.evaluation import Drafts, emitted
from draftwood.training.scoring import fit_rule


def drafts(rows=200, depth=3, vocab=40):
    """Choices that follow the logits, twice as sharp as they are, and the noise, weaker after the first depth."""
    rng = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(rows, depth, vocab, generator=rng)
    temperature = torch.tensor([0.0, 1.0]).repeat(rows // 2)
    seed = torch.arange(rows)
    position = torch.arange(depth, dtype=torch.int32).expand(rows, -1) + 5
    noise = slice_gumbel(seed[:, None].expand(-1, depth), position, 0, vocab)
    hidden = (
        torch.rand(rows, depth, vocab, generator=rng).log().neg().log().neg()
    )  # what the drafter cannot know
    unsure = torch.tensor([0.3, 1.0, 1.0])[:, None]
    true = (2 * logits + temperature[:, None, None] * noise + unsure * hidden).argmax(-1)
    return Drafts(logits, true.int(), position, temperature, seed)


def test_a_fitted_rule_accepts_more_and_is_the_published_one_at_worst():
    kernels, d, gained = load_kernels("cpu"), drafts(), 0.0
    rule = fit_rule(d, kernels)
    for which in (d.temperature == 0, d.temperature > 0):
        rows = Drafts(*(t[which] for t in vars(d).values()))
        before, after = (
            emitted(rows, kernels, coupled=True, rule=r)["32"].double().mean() for r in (ScoreRule(), rule)
        )
        assert after >= before
        gained += after - before
    assert gained > 0
    assert rule.noise is not None
    assert rule.sharpness > 1


def test_without_warm_rows_only_the_coldest_temperature_is_fitted():
    d = drafts()
    cold = Drafts(*(t[d.temperature == 0] for t in vars(d).values()))
    rule = fit_rule(cold, load_kernels("cpu"))
    assert rule.noise is None
    assert rule.sharpness == 1.0
