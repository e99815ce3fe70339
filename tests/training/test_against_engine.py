"""What training computes is what the engine computes: continuations, drafts, rounds."""

import numpy as np
import pytest
import torch

from draftwood import LLM, SamplingParams
from draftwood.cache.pools import DraftContext
from draftwood.drafting import DFlashDrafting
from draftwood.kernels.registry import load_kernels
from draftwood.models.drafter import Drafter
from draftwood.training.blocks import draft
from draftwood.training.evaluation import accepted_at, tokens_per_round
from draftwood.training.kernels import attend_blocks, training_kernels
from draftwood.training.sampler import Sampler, Sequences, whole
from support.tiny import write_drafter

NEW = 40


@pytest.fixture(scope="module")
def llm(folders):
    return LLM(*folders, dtype="float64", device="cpu", max_batch=8)


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(0)
    return [rng.integers(3, 40, n).tolist() for n in (1, 3, 3, 7, 9, 12)]


TEMPERATURES = [0.0, 0.7, 1.0, 0.0, 0.5, 1.3]


@pytest.fixture(scope="module")
def sampled(pair64, prompts):
    sampler = Sampler(pair64[0], batch=8, length=12 + NEW)
    return sampler.run(prompts, torch.tensor(TEMPERATURES), torch.arange(6) + (5 << 32))


def test_the_sampler_gives_what_the_engine_gives(llm, prompts, sampled):
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=TEMPERATURES[i], seed=i + (5 << 32), max_new_tokens=12 + NEW - len(prompt)
        )
        (output,) = llm.generate([prompt], params, mode="plain")
        assert sampled.ids[i, : sampled.end[i]].tolist() == prompt + output.token_ids


def test_a_sampler_is_reusable(pair64, prompts, sampled):
    sampler = Sampler(pair64[0], batch=8, length=12 + NEW)
    earlier = sampler.run(prompts[3:], torch.ones(3), torch.arange(3))
    kept = earlier.ids.clone()
    again = sampler.run(prompts, torch.tensor(TEMPERATURES), torch.arange(6) + (5 << 32))
    torch.testing.assert_close(again.ids, sampled.ids, rtol=0, atol=0)
    torch.testing.assert_close(earlier.ids, kept, rtol=0, atol=0)


@pytest.mark.parametrize(
    "overrides",
    [{}, {"is_causal": True}, {"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 0}],
)
def test_the_training_forward_is_the_inference_forward(folders, pair64, sampled, tmp_path, overrides):
    """The same drafter over pages, one anchor at a time, as a round runs it."""
    target = pair64[0]
    folder = write_drafter(tmp_path, num_hidden_layers=2, **overrides)
    trained, engine = (
        Drafter.from_folder(folder, target=target, dtype=torch.float64, device="cpu", kernels=kernels)
        for kernels in (training_kernels("cpu"), load_kernels("cpu"))
    )
    assert trained.layers[0].attend is attend_blocks
    ids = sampled.ids[:2]
    features = whole(target, ids, trained.config.target_layer_ids).features
    anchors = torch.tensor([[0, 3, 20], [5, 6, 40]])
    hidden = draft(trained, target, ids, features, anchors)
    for row in range(2):
        for a, anchor in enumerate(anchors[row].tolist()):
            context = DraftContext.allocate(2, 4, 16, 2, 8, dtype=torch.float64, device="cpu")
            drafting = DFlashDrafting(engine, target, context, load_kernels("cpu"))
            table = torch.arange(4, dtype=torch.int32)[None]
            n = torch.tensor([anchor], dtype=torch.int32)
            if anchor:
                drafting.extend(features[row : row + 1, :anchor], table, torch.zeros_like(n), n)
            alone = engine(
                ids[row, anchor : anchor + 1], n, context.k_pages, context.v_pages, table, target.embed
            )
            torch.testing.assert_close(hidden[row, a], alone[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rounds_are_those_of_the_engine(folders, pair64, prompts, temperature, coupled):
    """Tokens per round read off the text equal those of real rounds, for a chain and for trees."""
    target, drafter = pair64
    new, n = 30, len(prompts)
    depth = drafter.config.block_size
    made = Sampler(target, n, 12 + new + depth).run(prompts, torch.full((n,), temperature), torch.arange(n))
    made = Sequences(
        made.ids, made.start, torch.full_like(made.end, made.ids.shape[1]), made.temperature, made.seed
    )
    anchors = made.start[:, None].long() - 1 + torch.arange(new)
    accepted = accepted_at(
        drafter, target, made, anchors, kernels=load_kernels("cpu"), coupled=coupled and temperature > 0
    )
    llm = LLM(*folders, dtype="float64", device="cpu", max_batch=8, noise_coupled=coupled)
    for mode, size, counts in (("chain", 1, accepted["chain"]), ("tree", 16, accepted["16"])):
        offline = tokens_per_round(counts, new)
        for i, prompt in enumerate(prompts):
            params = SamplingParams(temperature=temperature, seed=i, max_new_tokens=new, ignore_eos=True)
            (output,) = llm.generate([prompt], params, mode=mode, budget=size)
            assert len(output.rounds) == round(new / offline[i].item()), (mode, i)
