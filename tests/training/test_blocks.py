"""Anchors, labels, weights and losses."""

import math

import pytest
import torch

from draftwood.training.blocks import Blocks, accept_length, hard_loss, make_blocks, pick_anchors, soft_loss
from draftwood.training.sampler import Sequences


def sequences():
    ids = torch.arange(40, dtype=torch.int32).view(2, 20)
    return Sequences(ids, torch.tensor([4, 10]), torch.tensor([20, 13]), torch.zeros(2), torch.arange(2))


def test_anchors_are_distinct_ascending_and_inside_the_continuation():
    s = sequences()
    seen = set()
    for seed in range(50):
        anchors, used = pick_anchors(s, 6, torch.Generator().manual_seed(seed))
        assert used[0].all()
        assert used[1].sum() == 3  # positions 9, 10, 11
        for row, (low, high) in enumerate(((3, 18), (9, 11))):
            chosen = anchors[row][used[row]]
            assert (chosen.diff() > 0).all()
            assert ((chosen >= low) & (chosen <= high)).all()
        seen |= set(anchors[0].tolist())
    assert seen == set(range(3, 19))


def test_labels_and_weights_of_a_block():
    s = sequences()
    blocks = make_blocks(
        s, torch.tensor([[3, 17], [9, 19]]), torch.tensor([[True, True], [True, False]]), 4, 2.0
    )
    assert blocks.labels[0, 0].tolist() == [4, 5, 6, 7]
    decay = [math.exp(-k / 2.0) for k in range(4)]
    torch.testing.assert_close(blocks.weights[0, 0], torch.tensor(decay))
    torch.testing.assert_close(blocks.weights[0, 1], torch.tensor([*decay[:2], 0.0, 0.0]))
    torch.testing.assert_close(blocks.weights[1, 0], torch.tensor([*decay[:3], 0.0]))
    assert blocks.weights[1, 1].sum() == 0


def blocks_of(n, A, D, V):
    weights = torch.rand(n, A, D, dtype=torch.float64) * (torch.rand(n, A, D) > 0.3)
    return Blocks(torch.zeros(n, A, dtype=torch.int64), torch.randint(V, (n, A, D)), weights)


def test_hard_loss_is_the_weighted_mean():
    blocks, logits = blocks_of(2, 3, 4, 5), torch.randn(2, 3, 4, 5, dtype=torch.float64)
    expected = total = 0.0
    for i in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(4)).tolist():
        w = blocks.weights[*i].item()
        expected -= w * logits[*i].log_softmax(-1)[blocks.labels[*i]].item()
        total += w
    assert hard_loss(logits, blocks).item() == pytest.approx(expected / total, rel=1e-12)


def test_soft_loss_is_the_expected_hard_loss_at_the_temperature():
    blocks = blocks_of(1, 1, 1, 6)
    logits, teacher = torch.randn(2, 1, 1, 1, 6, dtype=torch.float64)
    T = 0.8
    p = (teacher / T).softmax(-1).flatten()
    expected = sum(
        p[v] * hard_loss(logits / T, Blocks(blocks.anchors, torch.full((1, 1, 1), v), torch.ones(1, 1, 1)))
        for v in range(6)
    )
    blocks = Blocks(blocks.anchors, blocks.labels, torch.ones(1, 1, 1))
    torch.testing.assert_close(
        soft_loss(logits, teacher, torch.tensor([T]), blocks), expected, rtol=1e-6, atol=0
    )


def test_accept_length_counts_the_bonus_and_stops_at_the_first_wrong_token():
    right = torch.tensor([[[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]]], dtype=torch.bool)
    weights = torch.ones(1, 3, 4)
    weights[0, 2] = 0  # an unused block
    assert accept_length(right, weights).item() == pytest.approx((3 + 1) / 2)
