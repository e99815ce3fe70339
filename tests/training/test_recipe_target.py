"""The recipe's trainable target and the engine's target are one function; its export round-trips."""

import sys
from pathlib import Path

import pytest
import torch

from draftwood.kernels.registry import load_kernels
from draftwood.models.target import Target, TreeBatch
from draftwood.training.folder import save_folder
from draftwood.tree import from_parents

RECIPE = Path(__file__).parents[2] / "recipes" / "bundled_pair"
sys.path.insert(0, str(RECIPE))
from target_model import TINY, TrainableTarget


@pytest.fixture(scope="module")
def model():
    model = TrainableTarget(TINY, seed=3).double()
    for name, p in list(model.named_parameters()) + list(model.named_buffers()):
        if p.ndim == 1:  # norms and router biases away from their start
            p.data += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
    for p in model.parameters():  # bf16 values, so that the file holds them exactly
        p.data = p.data.bfloat16().double()
    for b in model.buffers():
        b.data = b.data.float().double()
    return model


@pytest.fixture(scope="module")
def engine(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_folder(folder, TINY, model.published())
    return Target.from_folder(folder, dtype=torch.float64, device="cpu", kernels=load_kernels("cpu"))


def test_the_trained_function_is_the_engines(model, engine):
    ids = torch.randint(TINY["vocab_size"], (2, 9))
    hidden, _ = model(ids, model.exact_capacity())
    tree = from_parents(ids.numpy(), [list(range(-1, 8))] * 2, [9, 9]).torch("cpu")
    batch = TreeBatch(
        torch.zeros(2, 1, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), tree.ancestors, tree.n_slots
    )
    pages = torch.zeros(TINY["num_hidden_layers"], 1, 16, engine.config.latent_dim, dtype=torch.float64)
    out = engine(tree.tokens, tree.depths, pages, batch)
    torch.testing.assert_close(model.head(hidden).float(), engine.logits(out.hidden), rtol=0, atol=2e-5)


def test_gathers_have_the_gradient_of_the_dense_mixture(model):
    """Dispatch and combine against a sum over all experts, gradients of input, router and experts included."""
    moe = model.layers[1].mlp
    x = torch.randn(2, 16, TINY["hidden_size"], dtype=torch.float64)

    def dense(x):
        scores = (x @ moe.router.T).sigmoid()
        chosen = (scores + moe.bias).topk(moe.k, -1).indices
        w = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
        w = w / w.sum(-1, keepdim=True)
        gate, up = torch.einsum("btd,edf->btef", x, moe.gate_up).chunk(2, -1)
        y = torch.einsum("btef,efd->bted", torch.nn.functional.silu(gate) * up, moe.down)
        return (y * w[..., None]).sum(-2) + moe.shared(x)

    grads = []
    for fn in (lambda x: moe(x, model.exact_capacity())[0], dense):
        moe.zero_grad()
        leaf = x.clone().requires_grad_()
        fn(leaf).square().sum().backward()
        grads.append([leaf.grad, moe.router.grad.clone(), moe.gate_up.grad.clone(), moe.down.grad.clone()])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * b.abs().max().item())


def test_a_full_expert_drops_what_does_not_fit(model):
    moe = model.layers[1].mlp
    x = torch.randn(1, 512, TINY["hidden_size"], dtype=torch.float64)
    x = x[:, :1].expand(-1, 512, -1)  # all tokens want the same two experts
    y, load = moe(x, 1.0)
    kept = (y - moe.shared(x)).abs().sum(-1) > 0
    assert kept.sum() == 256  # 512 tokens x 2 choices over 4 experts, an equal share each
    assert load.max() == 2.0


def test_a_saved_folder_can_be_gone_on_from(model, tmp_path):
    save_folder(tmp_path, TINY, model.published())
    again = TrainableTarget(TINY, seed=9).double()
    again.load_published(tmp_path)
    states = model.state_dict(), again.state_dict()
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])
