"""Deterministic mode: tree, chain and plain decoding give identical tokens in fp32, where last bits decide."""

from __future__ import annotations

import itertools

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood import LLM, SamplingParams
from draftwood.kernels import KernelUnavailableError
from support.scripted import ScriptedDrafting
from support.tiny import TARGET, write_target

PROMPTS = [[3, 4, 5], [6], [7 + i % 30 for i in range(37)], [8, 9] * 9, [30, 20, 10]]
NEW = 9

SAMPLERS = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "filtered": {"temperature": 1.3, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1},
}


def write_near_ties(folder, seed=11):
    """A target whose odd tokens have the logits of the even ones, up to the order of a sum."""
    write_target(folder, seed, hidden_size=40, moe_intermediate_size=20, n_routed_experts=8)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["lm_head.weight"]
    head[1::2] = head[::2]
    head[1::2, :20] = torch.nextafter(head[1::2, :20], torch.tensor(torch.inf))
    head[1::2, 20:] = torch.nextafter(head[1::2, 20:], torch.tensor(-torch.inf))
    save_file(tensors, file)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_near_ties(tmp_path_factory.mktemp("ties"))


def tokens(outputs):
    return {tuple(o.prompt_token_ids): o.token_ids for o in outputs}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_modes_batches_and_join_orders_agree_bit_for_bit(folder, sampler):
    settings = {"dtype": "float32", "page_size": 16, "deterministic": True}
    params = [
        SamplingParams(max_new_tokens=NEW + 2 * i, seed=i, ignore_eos=True, **SAMPLERS[sampler])
        for i in range(len(PROMPTS))
    ]
    jobs = list(zip(PROMPTS, params, strict=True))
    alone = LLM(folder, max_batch=1, prefill_chunk=5, **settings).generate(PROMPTS, params, mode="plain")
    want = tokens(alone)
    texts = {o.seed: o.prompt_token_ids + o.token_ids for o in alone}
    orders = itertools.cycle([jobs, jobs[::-1], jobs[2:] + jobs[:2]])
    for max_batch, chunk in ((1, 64), (2, 7), (3, 256), (4, 16)):
        llm = LLM(folder, max_batch=max_batch, prefill_chunk=chunk, **settings)
        for mode, budget, style in (
            ("plain", None, "random"),
            ("chain", None, "random"),
            ("tree", 8, "random"),
            ("tree", 13, "perfect"),
        ):
            llm.drafting = ScriptedDrafting(texts, TARGET["vocab_size"], style, 4, seed=max_batch)
            prompts, own = zip(*next(orders), strict=True)
            assert tokens(llm.generate(list(prompts), list(own), mode=mode, budget=budget)) == want


def test_an_implementation_that_is_not_deterministic_is_refused(folder):
    with pytest.raises(
        KernelUnavailableError, match="kernel `moe`, implementation `torch` is not deterministic"
    ):
        LLM(folder, deterministic=True, kernels={"moe": "torch"})
