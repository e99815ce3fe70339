"""The score rule is the formula it says, and with its defaults no rule at all."""

import pytest
import torch

from draftwood.kernels.noise.torch_impl import slice_gumbel
from draftwood.kernels.registry import load_kernels
from draftwood.models.errors import ModelError
from draftwood.scores import ScoreRule

B, D, V = 3, 4, 24
TEMPERATURE = torch.tensor([0.0, 0.3, 0.9])
SEED = torch.arange(B)
POSITION = torch.arange(B * D, dtype=torch.int32).view(B, D)
RULE = ScoreRule(sharpness=1.4, noise=(1.2, 0.7), coldest=0.5)


def candidates(rule, logits, coupled, k=V):
    topk = load_kernels("cpu").topk_logprobs
    noise = {"temperature": TEMPERATURE, "seed": SEED, "position": POSITION} if coupled else {}
    scoring = rule.at(TEMPERATURE, D, coupled=coupled)
    lp, ids = topk(logits, k, **noise, **scoring.of(D))
    return lp, ids


@pytest.mark.parametrize("coupled", [False, True])
def test_the_formula(coupled):
    logits = 2 * torch.randn(B, D, V)
    lp, ids = candidates(RULE, logits, coupled)
    x = 1.4 * logits / TEMPERATURE.clamp(min=0.5)[:, None, None]
    if coupled:
        gamma = torch.tensor([1.2, 0.7, 0.7, 0.7])
        x = x + TEMPERATURE[:, None, None] * gamma[:, None] * slice_gumbel(
            SEED[:, None].expand(B, D), POSITION, 0, V
        )
    expected, order = x.log_softmax(-1).sort(-1, descending=True)
    assert torch.equal(ids.long(), order)
    torch.testing.assert_close(lp, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("coupled", [False, True])
def test_the_default_is_no_rule(coupled):
    logits = 2 * torch.randn(B, D, V)
    topk = load_kernels("cpu").topk_logprobs
    noise = {"temperature": TEMPERATURE, "seed": SEED, "position": POSITION} if coupled else {}
    lp, ids = candidates(ScoreRule(), logits, coupled)
    plain, order = topk(logits, V, **noise)
    assert torch.equal(ids, order)
    torch.testing.assert_close(lp, plain)


def test_scores_stay_sound_where_tokens_are_impossible():
    """Never positive, descending, -inf where the logits are, no NaN in a row without any candidate."""
    logits = 30 * torch.randn(B, D, V)
    logits[1, 2] = -torch.inf
    logits[2, :, 5:] = -torch.inf
    lp, ids = candidates(RULE, logits, True, k=8)
    assert (lp <= 0).all()
    assert (lp[..., 1:] <= lp[..., :-1]).all()
    assert (lp[1, 2] == -torch.inf).all()
    assert (lp[2, :, 5:] == -torch.inf).all()
    assert (ids[2, :, :5] < 5).all()


def test_a_rule_comes_from_the_drafters_folder(tmp_path):
    assert ScoreRule.from_folder(tmp_path) == ScoreRule()
    (tmp_path / "scores.json").write_text(RULE.model_dump_json())
    assert ScoreRule.from_folder(tmp_path) == RULE
    for text, said in (
        ('{"sharpness": 0}', "key `sharpness`"),
        ('{"noise": [1, "x"]}', "key `noise.1`"),
        ("{", "JSON"),
    ):
        (tmp_path / "scores.json").write_text(text)
        with pytest.raises(ModelError, match=said):
            ScoreRule.from_folder(tmp_path)
