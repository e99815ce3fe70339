"""The fixed target: a slot's logits and latents are the same bits in any tree, batch, place and prefill chunk."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from draftwood.kernels.registry import BY_ROW, load_kernels
from draftwood.models.layers import fix, frozen
from draftwood.models.shard import Shard
from draftwood.models.target import Target, TreeBatch
from draftwood.parallel import Ranks
from draftwood.tree import from_parents
from support.tiny import write_target

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

ODD = {
    "vocab_size": 53,
    "hidden_size": 44,
    "intermediate_size": 50,
    "moe_intermediate_size": 22,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 2,
    "topk_group": 1,
}
"""Widths that fill no vector and no tile: each row has a tail, at another address than the next row's."""

PAGE, PAGES_EACH = 16, 6
PREFIXES = (0, 15, 16, 40, 63)


class Requests:
    """Requests with pages of their own, full of NaN; plain decoding of one of them says what is right."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target, self.rng = target, np.random.default_rng(seed)
        c = target.config
        n_pages = PAGES_EACH * len(PREFIXES)
        shape = (c.num_hidden_layers, n_pages, PAGE, c.latent_dim)
        self.pages = torch.full(shape, torch.nan, dtype=target.dtype, device=DEVICE)
        self.tables = torch.from_numpy(self.rng.permutation(n_pages).astype(np.int32)).view(-1, PAGES_EACH)
        self.texts = [self.rng.integers(c.vocab_size, size=n).tolist() for n in PREFIXES]

    def run(self, rows, lengths, trees):
        """Logits and latents of a batch of trees, given as (tokens, parents) per row."""
        slots = max(len(tokens) for tokens, _ in trees)
        tokens = [[*t, *[0] * (slots - len(t))] for t, _ in trees]
        parents = [[*p, *[-1] * (slots - len(p))] for _, p in trees]
        tree = from_parents(tokens, parents, [len(t) for t, _ in trees]).torch(DEVICE)
        prefix = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        batch = TreeBatch(self.tables[rows].to(DEVICE), prefix, tree.ancestors, tree.n_slots)
        with torch.inference_mode():
            out = self.target(tree.tokens, tree.depths, self.pages, batch)
            return self.target.logits(out.hidden), out.latents

    def feed(self, row, length, tokens):
        """Commit a chain; its logits [T, V] and latents [L, T, C]."""
        logits, latents = self.run([row], [length], [(tokens, range(-1, len(tokens) - 1))])
        for i in range(len(tokens)):
            page, offset = divmod(length + i, PAGE)
            self.pages[:, self.tables[row, page], offset] = latents[:, 0, i]
        return logits[0], latents[:, 0]

    def plainly(self, row, length, tokens):
        """The same one token at a time."""
        fed = [self.feed(row, length + i, [token]) for i, token in enumerate(tokens)]
        return torch.cat([f[0] for f in fed]), torch.cat([f[1] for f in fed], 1)


def load(folder, dtype, seed=3, *, fixed=True) -> Target:
    write_target(folder, seed, **ODD)
    kernels = load_kernels(DEVICE, deterministic=fixed)
    target = Target.from_folder(folder, dtype=dtype, device=DEVICE, kernels=kernels)
    if fixed:
        fix(target, kernels)
    return target


def differences(target: Target, sizes=(1, 4, 8, 13)) -> int:
    """Slots whose logits or latents are not those of plain decoding, over trees, batches, places and chunks."""
    requests, rng = Requests(target, seed=4), np.random.default_rng(5)
    differing = 0
    for row, text in enumerate(requests.texts):
        if text:
            want = requests.plainly(row, 0, text)
            cuts = sorted({0, len(text), *rng.integers(len(text), size=2).tolist()})
            chunks = [requests.feed(row, a, text[a:b]) for a, b in itertools.pairwise(cuts)]
            for got, right in zip(
                (torch.cat([c[0] for c in chunks]), torch.cat([c[1] for c in chunks], 1)), want, strict=True
            ):
                differing += not torch.equal(got, right)
    trees = {}
    for row, length in enumerate(PREFIXES):
        tokens = rng.permutation(ODD["vocab_size"])[: max(sizes)].tolist()
        parents = [-1, *(int(rng.integers(i)) for i in range(1, max(sizes)))]
        paths = []
        for i, parent in enumerate(parents):
            paths.append([*(paths[parent] if i else []), i])
        right = [requests.plainly(row, length, [tokens[i] for i in path]) for path in paths]
        trees[row] = tokens, parents, [(logits[-1], latents[:, -1]) for logits, latents in right]
    for batch in range(1, len(PREFIXES) + 1):
        for most in sizes:
            rows = rng.permutation(len(PREFIXES))[:batch].tolist()
            own = [
                most if b == 0 else int(rng.integers(1, most + 1)) for b in range(batch)
            ]  # others are padded
            cut = [(trees[row][0][:n], trees[row][1][:n]) for row, n in zip(rows, own, strict=True)]
            logits, latents = requests.run(rows, [PREFIXES[row] for row in rows], cut)
            for b, (row, n) in enumerate(zip(rows, own, strict=True)):
                for i, (right_logits, right_latents) in enumerate(trees[row][2][:n]):
                    same = torch.equal(logits[b, i], right_logits)
                    differing += not (same and torch.equal(latents[:, b, i], right_latents))
    return differing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_slot_is_the_same_wherever_it_is_computed(tmp_path, dtype):
    assert differences(load(tmp_path, dtype)) == 0


def test_without_it_the_same_test_finds_differences(tmp_path):
    assert differences(load(tmp_path, torch.float32, fixed=False)) > 0


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="the tests above run the Triton kernels where there is a GPU"
)
def test_triton_kernels_take_what_the_target_gives_them(tmp_path, monkeypatch):
    """In the interpreter, one pass over a tree; its products are numpy's, so bits are not compared."""
    monkeypatch.setattr("draftwood.models.target.matrix", frozen)  # the memory order of a GPU
    outputs = []
    for impl in ("torch", "triton"):
        own = {"linear": impl, "moe": f"{impl}_fixed", "verify_attn": f"{impl}_fixed"}
        own |= {k: impl if (k, impl) in BY_ROW else f"{impl}_fixed" for k, _ in BY_ROW}
        write_target(tmp_path, 3, **ODD)
        kernels = load_kernels("cpu", own, deterministic=True)
        target = Target.from_folder(tmp_path, dtype=torch.float32, device="cpu", kernels=kernels)
        fix(target, kernels)
        requests = Requests(target, seed=4)
        requests.feed(1, 0, requests.texts[1])
        outputs.append(requests.run([1, 0], [15, 0], [([3, 4, 5], [-1, 0, 0]), ([6], [-1])]))
    (logits, latents), (got_logits, got_latents) = outputs
    torch.testing.assert_close(got_latents[:, 0], latents[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_logits[0], logits[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got_logits[1, 0], logits[1, 0], rtol=1e-4, atol=1e-5)


def test_ranks_are_summed_in_their_order(monkeypatch):
    parts = [torch.tensor([1e8, 1.0]), torch.tensor([1.0, 1e8]), torch.tensor([-1e8, -1e8])]

    def all_gather(into, own):
        assert own is parts[1]
        for place, part in zip(into, parts, strict=True):
            place.copy_(part)

    monkeypatch.setattr("draftwood.parallel.dist.all_gather", all_gather)
    got = Ranks(Shard(1, 3)).sum_in_order(parts[1])
    assert torch.equal(got, (parts[0] + parts[1]) + parts[2])
    assert not torch.equal(got, parts[0] + (parts[1] + parts[2]))
