"""The target against `transformers`: prefill, decode, trees, taps, and every layout of the same weights."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.kernels.registry import load_kernels
from draftwood.models.target import Target, TreeBatch
from draftwood.tree import from_parents
from support.deepseek import ROPE, YARN, Paged, make_model, save

VARIANTS = {
    "plain": {},
    "all-dense": {"first_k_dense_replace": 3},
    "q-lora,groups,yarn": {"rope": YARN, "q_lora_rank": 12, "n_group": 4, "topk_group": 2},
    "yarn-amplitude,tied,raw-weights": {
        "rope": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
        "tie_word_embeddings": True,
        "norm_topk_prob": False,
        "n_shared_experts": 2,
    },
    "yarn-without-mscale": {"rope": {k: v for k, v in YARN.items() if "mscale" not in k}, "q_lora_rank": 12},
}
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPT = torch.randint(0, 61, (100,), generator=torch.Generator().manual_seed(1)).tolist()


@cache
def oracle(variant):
    return make_model(**VARIANTS[variant])


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """Variant -> its saved folder."""
    return cache(lambda variant: save(oracle(variant), tmp_path_factory.mktemp("target")))


def load(folder, dtype=torch.float32, **options):
    return Target.from_folder(folder, dtype=dtype, device="cpu", kernels=load_kernels("cpu"), **options)


@pytest.fixture(scope="session")
def targets(folders):
    return cache(lambda variant: load(folders(variant)))


@cache
def expected(variant, tokens):
    """Logits [N, V] and the hidden states of all layers, from one plain forward."""
    with torch.inference_mode():
        out = oracle(variant)(torch.tensor([tokens]), output_hidden_states=True)
    return out.logits[0], out.hidden_states


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("page", "chunks"), [(64, [100]), (16, [1, 30, 2, 67]), (32, [33] * 3 + [1])])
def test_chunked_prefill(targets, variant, page, chunks):
    target, at, got = targets(variant), 0, []
    state = Paged(target, page)
    for n in chunks:
        got.append(target.logits(state.feed(PROMPT[at : at + n]).hidden[0]))
        at += n
    torch.testing.assert_close(torch.cat(got), expected(variant, tuple(PROMPT))[0], **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode_step_by_step(targets, variant):
    target = targets(variant)
    state = Paged(target, 16)
    state.feed(PROMPT[:60])
    got = torch.cat([target.logits(state.feed([token]).hidden[0]) for token in PROMPT[60:80]])
    torch.testing.assert_close(got, expected(variant, tuple(PROMPT))[0][60:80], **CLOSE)


def random_tree(n, seed):
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(max(0, i - 6), i)) for i in range(1, n))]
    return rng.permutation(61)[np.arange(n) % 61], parents


def path_to(slot, parents):
    return [] if slot < 0 else [*path_to(parents[slot], parents), slot]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tree_slot_equals_its_own_path(targets, variant):
    """70 slots: the ancestors need two words."""
    target, n = targets(variant), 70
    tokens, parents = random_tree(n, seed=3)
    tree = from_parents([tokens], [parents], [n]).torch()
    state = Paged(target, 16)
    state.feed(PROMPT[:37])
    out = state.tree(tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.n_slots)
    logits = target.logits(out.hidden[0])
    leaves = set(range(n)) - set(parents)
    assert len(leaves) > 10
    for leaf in leaves:
        path = path_to(leaf, parents)
        text = (*PROMPT[:37], *(int(tokens[s]) for s in path))
        torch.testing.assert_close(logits[path], expected(variant, text)[0][37:], **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_tree_equals_transformers_with_a_tree_mask(targets, variant):
    target, prefix, n = targets(variant), 41, 24
    tokens, parents = random_tree(n, seed=4)
    tree = from_parents([tokens], [parents], [n]).torch()
    state = Paged(target, 32)
    state.feed(PROMPT[:prefix])
    got = target.logits(
        state.tree(tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.n_slots).hidden[0]
    )

    sees = torch.ones(n, prefix + n, dtype=torch.bool)
    sees[:, prefix:] = torch.tensor([[j in path_to(i, parents) for j in range(n)] for i in range(n)])
    mask = torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]
    model = oracle(variant)
    with torch.inference_mode():
        filled = model(torch.tensor([PROMPT[:prefix]]), use_cache=True).cache
        want = model(
            tree.tokens.long(),
            attention_mask=mask,
            position_ids=prefix + tree.depths.long(),
            cache=filled,
        ).logits[0]
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_taps_are_the_residual_stream_after_a_layer(targets, variant):
    taps = (1, 0, 1)
    out = Paged(targets(variant), 16).feed(PROMPT, taps)
    _, hidden = expected(variant, tuple(PROMPT))
    want = torch.cat([hidden[t + 1][0] for t in taps], -1)
    torch.testing.assert_close(out.features[0], want, **CLOSE)
    assert Paged(targets(variant), 16).feed(PROMPT).features is None


def test_the_last_tap_is_before_the_final_norm(targets):
    target = targets("plain")
    out = Paged(target, 16).feed(PROMPT, (2,))
    normed = torch.nn.functional.rms_norm(out.features, (32,), target.norm, 1e-5)
    torch.testing.assert_close(normed, out.hidden)


def test_rows_of_a_batch_do_not_meet(targets):
    """Two rows of unequal prefix and size, the shorter padded: as each alone."""
    target = targets("q-lora,groups,yarn")
    rows = []
    for seed, prefix, n in ((5, 50, 20), (6, 3, 7)):
        state = Paged(target, 16, seed=seed)
        state.feed(PROMPT[seed : seed + prefix])
        rows.append((state, from_parents([random_tree(n, seed)[0]], [random_tree(n, seed)[1]], [n]).torch()))
    (a, ta), (b, tb) = rows
    n_pages, T = a.pages.shape[1], 20
    pages = torch.cat((a.pages, b.pages), 1)
    padded = from_parents(
        np.stack([ta.tokens[0], np.pad(tb.tokens[0], (0, 13), constant_values=9)]),
        np.stack([ta.parents[0], np.pad(tb.parents[0], (0, 13))]),
        [20, 7],
    ).torch()
    batch = TreeBatch(
        torch.cat((a.table, b.table + n_pages)),
        torch.tensor([a.length, b.length], dtype=torch.int32),
        padded.ancestors,
        padded.n_slots,
    )
    out = target(padded.tokens, padded.depths, pages, batch, (1,))
    assert out.hidden.shape == (2, T, 32)
    for row, (state, tree) in enumerate(rows):
        alone = state.tree(tree.tokens, tree.parents, tree.depths, tree.ancestors, tree.n_slots, (1,))
        n = tree.T
        torch.testing.assert_close(out.hidden[row, :n], alone.hidden[0])
        torch.testing.assert_close(out.latents[:, row, :n], alone.latents[:, 0])
        torch.testing.assert_close(out.features[row, :n], alone.features[0])


def test_double_precision_is_kept(folders):
    """Chunking changes nothing but rounding: in fp64, nothing beyond 1e-12."""
    target = load(folders("q-lora,groups,yarn"), torch.float64)
    whole, parts = Paged(target, 64), Paged(target, 16)
    want = whole.feed(PROMPT)
    got = torch.cat([parts.feed(PROMPT[:13]).hidden, parts.feed(PROMPT[13:]).hidden], 1)
    assert want.hidden.dtype == want.latents.dtype == torch.float64
    torch.testing.assert_close(got, want.hidden, rtol=0, atol=1e-12)


def test_bfloat16_stays_near(folders):
    target = load(folders("plain"), torch.bfloat16)
    out = Paged(target, 64).feed(PROMPT)
    logits = target.logits(out.hidden[0])
    assert out.latents.dtype == torch.bfloat16
    assert logits.dtype == torch.float32
    want = expected("plain", tuple(PROMPT))[0]
    agree = torch.nn.functional.cosine_similarity(logits, want, dim=-1)
    assert agree.median() > 0.995


def test_the_router_stays_precise(folders):
    """As stored, in fp32, whatever the model runs in."""
    source = load_file(folders("plain") / "model.safetensors")
    moe = load(folders("plain"), torch.bfloat16).layers[1].mlp
    assert moe.gate_up.dtype == torch.bfloat16
    assert torch.equal(moe.router, source["model.layers.1.mlp.gate.weight"])
    assert torch.equal(moe.bias, source["model.layers.1.mlp.gate.e_score_correction_bias"])


def test_inner_norm_eps_is_a_switch(folders):
    model = make_model(**VARIANTS["q-lora,groups,yarn"])
    for layer in model.model.layers:
        layer.self_attn.q_a_layernorm.variance_epsilon = layer.self_attn.kv_a_layernorm.variance_epsilon = 0.5
    with torch.inference_mode():
        want = model(torch.tensor([PROMPT])).logits[0]
    target = load(folders("q-lora,groups,yarn"), inner_norm_eps=0.5)
    torch.testing.assert_close(target.logits(Paged(target, 64).feed(PROMPT).hidden[0]), want, **CLOSE)
    assert load(folders("plain")).config.inner_norm_eps == 1e-6


def rewrite(source, folder, rename, config=None, extra=None):
    """A copy of a folder with tensors renamed (and added) and its config replaced."""
    tensors = {rename(name): t for name, t in load_file(source / "model.safetensors").items()}
    folder.mkdir(exist_ok=True)
    save_file(tensors | (extra or {}), folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps(config or json.loads((source / "config.json").read_text()))
    )
    return folder


def same_output(target, variant):
    got = target.logits(Paged(target, 64).feed(PROMPT).hidden[0])
    torch.testing.assert_close(got, expected(variant, tuple(PROMPT))[0], **CLOSE)


@pytest.mark.parametrize("inner_prefix", [True, False], ids=["published", "without-inner-prefix"])
def test_kimi_k25_wrapper(folders, tmp_path, inner_prefix):
    source = folders("q-lora,groups,yarn")
    text = json.loads((source / "config.json").read_text()) | {"model_type": "kimi_k2"}
    text["rope_scaling"] = {
        "type" if k == "rope_type" else k: v
        for k, v in text.pop("rope_parameters").items()
        if k != "rope_theta"
    }
    text["rope_theta"] = YARN["rope_theta"]
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "eos_token_id": 7,
        "media_placeholder_token_id": 5,
        "text_config": text,
        "vision_config": {"vt_hidden_size": 8},
        "tie_word_embeddings": False,
    }

    def rename(name):
        return "language_model." + (name if inner_prefix else name.removeprefix("model."))

    vision = {"vision_tower.patch.weight": torch.ones(2, 2), "mm_projector.proj.0.bias": torch.ones(2)}
    target = load(rewrite(source, tmp_path / "k25", rename, config, vision))
    assert target.config.eos_token_ids == (1, 7)
    same_output(target, "q-lora,groups,yarn")


def test_shards(tmp_path):
    folder = save(oracle("plain"), tmp_path, max_shard_size="60KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    seen = []
    same_output(load(folder, progress=lambda done, total: seen.append((done, total))), "plain")
    done, totals = zip(*seen, strict=True)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(totals) == {index["metadata"]["total_size"]} == {done[-1]}
    assert list(done) == sorted(set(done))


def test_mtp_layers_are_left_out(folders, tmp_path):
    source = folders("plain")
    config = json.loads((source / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    mtp = {
        "model.layers.3.eh_proj.weight": torch.ones(2),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3),
    }
    same_output(load(rewrite(source, tmp_path / "mtp", str, config, mtp)), "plain")


def test_tied_weights_share_memory(targets, folders, tmp_path):
    source = folders("yarn-amplitude,tied,raw-weights")
    target = targets("yarn-amplitude,tied,raw-weights")
    assert target.head.weight is target.embedding
    copy = rewrite(source, tmp_path / "copy", str, extra={"lm_head.weight": torch.zeros(61, 32)})
    same_output(load(copy), "yarn-amplitude,tied,raw-weights")


def test_rope_layouts_agree(folders, tmp_path):
    """transformers 4 wrote `rope_scaling: null` and `rope_theta` where 5 writes `rope_parameters`."""
    source = folders("plain")
    config = json.loads((source / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_scaling": None, "rope_theta": ROPE["rope_theta"]}
    same_output(load(rewrite(source, tmp_path / "v4", str, config)), "plain")
