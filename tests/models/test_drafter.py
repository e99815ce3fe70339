"""The drafter against a plain second implementation, and the rules that DFlash drafters are got wrong by."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.kernels.registry import BETWEEN_PRODUCTS, load_kernels
from draftwood.models.drafter import Drafter
from draftwood.models.errors import ModelError
from draftwood.models.target import Target
from support.dflash import PlainDFlash
from support.tiny import write_drafter, write_target

DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e3,
    "factor": 16.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
SLIDING = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
}


def everything(layer, i, j):
    return True


def causal(layer, i, j):
    return j <= i


def slides(layer):
    return SLIDING["layer_types"][layer] == "sliding_attention"


def causal_sliding(layer, i, j):
    return not slides(layer) or i - 7 < j <= i


def symmetric_sliding(layer, i, j):
    return not slides(layer) or abs(i - j) < 7


def all_causal(layer, i, j):
    return j <= i and (not slides(layer) or i - 7 < j)


VARIANTS = {
    "full": ({"rope_parameters": DEFAULT}, everything),
    "three-layers": ({"rope_parameters": DEFAULT, "num_hidden_layers": 3}, everything),
    "one-kv-head": ({"rope_parameters": DEFAULT, "num_key_value_heads": 1}, everything),
    "yarn": ({"rope_parameters": YARN, "num_hidden_layers": 2}, everything),
    "deepseek_yarn": ({"rope_parameters": YARN | {"rope_type": "deepseek_yarn"}}, everything),
    "yarn-plain-amplitude": (
        {"rope_parameters": {k: v for k, v in YARN.items() if "mscale" not in k}},
        everything,
    ),
    "yarn-attention-factor": ({"rope_parameters": YARN | {"attention_factor": 1.3}}, everything),
    "sliding-is-causal": ({"rope_parameters": DEFAULT, **SLIDING}, causal_sliding),
    "is_causal-false": ({"rope_parameters": DEFAULT, **SLIDING, "is_causal": False}, symmetric_sliding),
    "causal-false": ({"rope_parameters": DEFAULT, **SLIDING, "causal": False}, symmetric_sliding),
    "is_causal-true": ({"rope_parameters": DEFAULT, **SLIDING, "is_causal": True}, all_causal),
    "causal": ({"rope_parameters": DEFAULT, "causal": True}, causal),
    "is_causal-beats-causal": ({"rope_parameters": DEFAULT, "is_causal": False, "causal": True}, everything),
}
D, TAPS, BLOCK = 24, 2, 6


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    folder = write_target(tmp_path_factory.mktemp("target"))
    return Target.from_folder(folder, dtype=torch.float64, device="cpu", kernels=load_kernels("cpu"))


def write(folder, overrides):
    nested = {"mask_token_id": 2, "target_layer_ids": [0, 1]}
    overrides = dict(overrides)
    if "causal" in overrides:
        nested["causal"] = overrides.pop("causal")
    write_drafter(folder, **overrides, dflash_config=nested)
    config = json.loads((folder / "config.json").read_text())
    if "rope_parameters" in overrides:
        del config["rope_theta"]  # of the defaults; now inside `rope_parameters`
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder, target, **options):
    return Drafter.from_folder(
        folder, target=target, dtype=torch.float64, device="cpu", kernels=load_kernels("cpu"), **options
    )


def features(n, seed=0):
    return torch.randn(n, TAPS * D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def i32(*values):
    return torch.tensor(values, dtype=torch.int32)


def paged(k, page, order):
    """[Ld, N, Hkv, hd] -> pages in the given order, NaN elsewhere."""
    pages = torch.full((k.shape[0], max(order) + 2, page, *k.shape[2:]), torch.nan, dtype=k.dtype)
    for at in range(k.shape[1]):
        pages[:, order[at // page], at % page] = k[:, at]
    return pages


def draft(drafter, target, rows, anchors, page=16, depth=None):
    """Draft for rows of context K/V given as (k, v) [Ld, N, Hkv, hd] each."""
    table, k_pages, v_pages, used = torch.zeros(len(rows), 4, dtype=torch.int32), [], [], 0
    for b, (k, v) in enumerate(rows):
        order = list(range(-(-k.shape[1] // page)))[::-1] or [0]
        k_pages.append(paged(k, page, order))
        v_pages.append(paged(v, page, order))
        table[b, : len(order)] = torch.tensor(order) + used
        used += k_pages[-1].shape[1]
    lengths = i32(*(k.shape[1] for k, _ in rows))
    with torch.inference_mode():
        return drafter(
            i32(*anchors), lengths, torch.cat(k_pages, 1), torch.cat(v_pages, 1), table, target.embed, depth
        )


def context(drafter, x, start=0):
    k, v = drafter.context(x[None], i32(start)).unbind(3)
    return k[:, 0], v[:, 0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_plain_drafter(target, tmp_path, variant):
    overrides, sees = VARIANTS[variant]
    folder = write(tmp_path, overrides)
    drafter, plain = load(folder, target), PlainDFlash(folder)
    xs, anchors = [features(29, 1), features(5, 2), features(0)], [7, 0, 2]
    got = draft(drafter, target, [context(drafter, x) for x in xs], anchors)
    assert got.shape == (3, BLOCK - 1, D)
    for row, (x, anchor) in enumerate(zip(xs, anchors, strict=True)):
        want = plain.hidden(x, anchor, target.embedding, sees)
        # transformers makes YaRN's frequencies in fp32
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs on CPU in its interpreter only")
def test_triton_kernels_take_what_the_drafter_gives_them(target, tmp_path):
    folder = write(tmp_path, VARIANTS["yarn"][0])
    kernels = load_kernels("cpu", dict.fromkeys(BETWEEN_PRODUCTS, "triton"))
    drafters = [
        Drafter.from_folder(folder, target=target, dtype=torch.float64, device="cpu", kernels=k)
        for k in (kernels, load_kernels("cpu"))
    ]
    xs = [features(9, 1), features(5, 2)]
    contexts = [[context(drafter, x) for x in xs] for drafter in drafters]
    torch.testing.assert_close(contexts[0], contexts[1], rtol=1e-10, atol=1e-10)
    got, want = (draft(drafter, target, contexts[0], [7, 0]) for drafter in drafters)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_a_smaller_block_than_trained(target, tmp_path, depth):
    folder = write(tmp_path, VARIANTS["full"][0])
    drafter, plain = load(folder, target), PlainDFlash(folder)
    x = features(20)
    got = draft(drafter, target, [context(drafter, x)], [3], depth=depth)[0]
    torch.testing.assert_close(got, plain.hidden(x, 3, target.embedding, everything, size=depth + 1))


@pytest.mark.parametrize("depth", [0, 6, -1])
def test_depth_must_fit_the_block(target, tmp_path, depth):
    drafter = load(write(tmp_path, VARIANTS["full"][0]), target)
    with pytest.raises(ValueError, match=r"1\.\.5"):
        draft(drafter, target, [context(drafter, features(4))], [3], depth=depth)


def test_chunks_of_context_make_the_same_rows(target, tmp_path):
    drafter = load(write(tmp_path, VARIANTS["three-layers"][0]), target)
    x = features(40)
    parts = [context(drafter, x[a:b], a) for a, b in ((0, 1), (1, 18), (18, 40))]
    for whole, *chunks in zip(context(drafter, x), *parts, strict=True):
        torch.testing.assert_close(torch.cat(chunks, 1), whole, rtol=0, atol=1e-13)


def test_slot_0_is_the_anchor_and_the_others_are_masks(target, tmp_path):
    """The embedding sees exactly [anchor, mask, ...], and another anchor drafts otherwise."""
    drafter = load(write(tmp_path, VARIANTS["full"][0]), target)
    kv = context(drafter, features(12))
    seen = []

    class Spy:
        def embed(self, tokens, block, filler):
            x = target.embed(tokens, block=block, filler=filler)
            seen.extend([torch.cdist(x, target.embedding).argmin(1).tolist()])
            return x

    one = draft(drafter, Spy(), [kv, kv], [9, 30])
    assert seen == [[9, 2, 2, 2, 2, 2, 30, 2, 2, 2, 2, 2]]
    assert not torch.allclose(one[0], one[1], atol=1e-3)


def test_keys_older_than_the_window_do_not_matter(target, tmp_path):
    """All layers slide: 7 positions, the query's own included, so from the anchor's on 6 of context."""
    types = ["sliding_attention"] * 2
    overrides = SLIDING | {"num_hidden_layers": 2, "layer_types": types, "rope_parameters": DEFAULT}
    drafter = load(write(tmp_path, overrides), target)
    k, v = context(drafter, features(30))
    before = draft(drafter, target, [(k, v)], [4])
    old, edge = (k.clone(), v.clone()), (k.clone(), v.clone())
    for t in old:
        t[:, : 30 - 6] += 5
    for t in edge:
        t[:, : 30 - 5] += 5
    assert torch.equal(draft(drafter, target, [old], [4]), before)
    assert not torch.allclose(draft(drafter, target, [edge], [4]), before)


@pytest.mark.parametrize("use", [True, False])
def test_window_by_layer_index(target, tmp_path, use):
    """Without `layer_types`, Qwen3 slides from `max_window_layers` on, if `use_sliding_window`."""
    overrides = {
        "num_hidden_layers": 2,
        "sliding_window": 7,
        "use_sliding_window": use,
        "max_window_layers": 1,
    }
    drafter = load(write(tmp_path, overrides), target)
    assert [layer.window for layer in drafter.config.layers] == [None, 7 if use else None]
    assert [layer.causal for layer in drafter.config.layers] == [False, use]


def test_yarn_amplitude_is_a_switch_with_a_reason(target, tmp_path):
    folder = write(tmp_path, {"rope_parameters": YARN})
    as_published, as_some_engines = load(folder, target), load(folder, target, yarn_rule="factor")
    assert as_published.yarn_rule == "ratio"
    assert as_published.yarn_reason
    assert as_some_engines.yarn_reason == "asked for"
    x = features(20)
    amplitude = 1 + 0.1 * torch.log(torch.tensor(16.0)).item()
    want = PlainDFlash(folder, amplitude).hidden(x, 3, target.embedding, everything)
    got = draft(as_some_engines, target, [context(as_some_engines, x)], [3])[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    other = draft(as_published, target, [context(as_published, x)], [3])[0]
    assert not torch.allclose(got, other, atol=1e-3)
    with pytest.raises(ModelError, match="yarn_rule: expected ratio or factor, got both"):
        load(folder, target, yarn_rule="both")


@pytest.mark.parametrize(
    ("rope", "why"),
    [(DEFAULT, "the drafter has no YaRN"), (YARN | {"attention_factor": 1.3}, "`attention_factor`")],
)
def test_a_yarn_rule_without_a_say_is_refused(target, tmp_path, rope, why):
    folder = write(tmp_path, {"rope_parameters": rope})
    assert why in load(folder, target).yarn_reason
    with pytest.raises(ModelError, match=f'yarn_rule: "factor" was asked for, but .*{why}'):
        load(folder, target, yarn_rule="factor")


@pytest.mark.parametrize(
    "rename",
    [
        lambda name: f"model.{name}",
        lambda name: {
            "fc.weight": "encoder.fc.weight",
            "hidden_norm.weight": "encoder.output_norm_enc.weight",
        }.get(name, name),
    ],
    ids=["model-prefix", "encoder"],
)
def test_other_exports_names(target, tmp_path, rename):
    folder = write(tmp_path, VARIANTS["full"][0])
    before = load(folder, target)
    file = folder / "model.safetensors"
    save_file({rename(name): t for name, t in load_file(file).items()}, file)
    after = load(folder, target)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_a_mask_embedding_of_its_own(target, tmp_path):
    """It takes the place of the target's row in every slot but the anchor's."""
    folder = write(tmp_path, VARIANTS["full"][0])
    without = load(folder, target)
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"mask_embedding": torch.linspace(-1, 1, D)}, file)
    drafter, x = load(folder, target), features(11)
    got = draft(drafter, target, [context(drafter, x)], [5])[0]
    torch.testing.assert_close(got, PlainDFlash(folder).hidden(x, 5, target.embedding, everything))
    assert not torch.allclose(got, draft(without, target, [context(without, x)], [5])[0], atol=1e-3)


def test_a_drafter_for_another_target_is_refused(target, tmp_path):
    folder = write_drafter(tmp_path, {"hidden_size": 32})
    with pytest.raises(ModelError, match=r"`hidden_size` is 32.*24"):
        load(folder, target)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("mask_embedding", torch.ones(1, D), r"`mask_embedding` has shape \[1, 24\], expected \[24\]"),
        ("layers.1.input_layernorm.weight", torch.ones(D), "`layers.1.input_layernorm.weight` has no place"),
        ("layers.0.self_attn.q_proj.bias", torch.ones(32), "`layers.0.self_attn.q_proj.bias` has no place"),
        ("fc.weight", torch.ones(D, D), r"`fc.weight` has shape \[24, 24\], expected \[24, 48\]"),
        ("hidden_norm.weight", None, "`hidden_norm.weight`.* is missing"),
    ],
)
def test_tensors_are_checked(target, tmp_path, name, tensor, message):
    folder = write(tmp_path, VARIANTS["full"][0])
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    save_file(tensors, file)
    with pytest.raises(ModelError, match=message):
        load(folder, target)
