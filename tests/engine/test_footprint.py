"""What a model takes, counted without it: against published sizes, and against models and pools that were built."""

from __future__ import annotations

import json

import pytest
import torch

from draftwood.cache.pools import DraftContext, LatentPool
from draftwood.config import EngineConfig
from draftwood.engine.footprint import Layout, context_bytes, footprint, weight_lines
from draftwood.kernels.registry import load_kernels
from draftwood.models.config import TargetConfig
from draftwood.models.drafter import Drafter
from draftwood.models.drafter_config import DrafterConfig
from draftwood.models.errors import ModelError
from draftwood.models.inventory import drafter_tensors, target_tensors
from draftwood.models.shard import Shard
from draftwood.models.target import Target, TreeBatch
from draftwood.parallel import Ranks
from draftwood.tree import root_only
from support.kimi_configs import KIMI_K26, KIMI_K26_DRAFTER
from support.tiny import TARGET, drafter_shapes, target_shapes, write_drafter, write_target

GIB = 2**30
VARIANTS = {
    "plain": {},
    "q-lora": {"q_lora_rank": 12},
    "no-shared-experts": {"n_shared_experts": None},
    "all-dense": {"first_k_dense_replace": 2},
    "tied": {"tie_word_embeddings": True},
    "three-layers": {"num_hidden_layers": 3, "first_k_dense_replace": 0, "n_shared_experts": 2},
}


@pytest.fixture(scope="module")
def kimi(tmp_path_factory):
    root = tmp_path_factory.mktemp("kimi")
    configs = []
    for cls, values in ((TargetConfig, KIMI_K26), (DrafterConfig, KIMI_K26_DRAFTER)):
        (root / "config.json").write_text(json.dumps(values))
        configs.append(cls.from_folder(root))
    return configs


def total(lines, field="per_gpu"):
    return sum(getattr(line, field) for line in lines)


def line(lines, name):
    (found,) = [line for line in lines if line.name == name]
    return found


def test_kimi_k26_as_published(kimi):
    """553.4 GiB without vision, a drafter of 6.48 GiB, 70 272 and 24 576 bytes per token."""
    takes = footprint(*kimi, EngineConfig(), Layout())
    assert total(takes.target, "stored") / GIB == pytest.approx(553.4, abs=0.01)
    layer = 7168 * (2 * 8192 + 2 * 1024 + 3 * 18432) + 2 * 7168 + 2 * 128
    parameters = 6 * 7168 * 7168 + 6 * layer + 2 * 7168
    assert total(takes.drafter, "stored") == total(takes.drafter) == 2 * parameters
    assert 2 * parameters / GIB == pytest.approx(6.48, abs=0.001)
    assert (takes.latent_bytes, takes.context_bytes) == (70_272, 24_576)
    experts = line(takes.target, "routed experts, INT4")
    assert experts.per_gpu == 60 * 384 * 3 * 2048 * 7168 * 9 // 16  # four bits, and two bytes for 32 of them
    assert experts.stored == experts.per_gpu + 60 * 384 * 3 * 8  # the shapes, not kept
    assert weight_lines(target_tensors(kimi[0]), Layout()) == takes.target  # expert by expert


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_kimi_k26_on_8_gpus(kimi, expert_parallel):
    engine = EngineConfig(max_batch=4, max_budget=64, max_context=4096)
    one, takes = (footprint(*kimi, engine, Layout(n, expert_parallel)) for n in (1, 8))
    on_every = {"norms", "router", "attention, to latents"}
    for whole, share in zip((*one.target, *one.drafter), (*takes.target, *takes.drafter), strict=True):
        assert share.name == whole.name
        assert share.per_gpu == whole.per_gpu if whole.name in on_every else whole.per_gpu / 8
        assert share.stored == whole.stored
    assert (takes.latent_bytes, takes.context_bytes) == (70_272, 24_576 / 8)
    assert line(takes.scratch, "latents of the slots").per_gpu == 61 * 4 * 64 * 576 * 2
    assert line(takes.scratch, "logits").per_gpu == 4 * 64 * (163840 // 8) * (4 + 2)
    assert line(takes.scratch, "features").per_gpu == 4 * 64 * 6 * 7168 * 2
    assert line(takes.scratch, "features that wait").per_gpu == 4 * 64 * 6 * 7168 * 2
    assert line(takes.estimates, "CUDA graphs").how.startswith(
        "30 graphs"
    )  # 1, 2, 4 by 1, 8, 16, 32, 64 by 1024, 4096


def test_room_for_the_cache(kimi):
    takes = footprint(*kimi, EngineConfig(), Layout(8))
    page = 64 * (70_272 + 3_072)
    assert takes.page_bytes == page
    assert takes.pages_that_fit(takes.without_cache + 10 * page) == 10
    assert takes.pages_that_fit(takes.without_cache + 10 * page - 1) == 9
    assert takes.pages_that_fit(takes.without_cache - 1) == 0
    assert [takes.pages_per_request(n) for n in (1, 64, 65)] == [1, 1, 2]


def test_a_drafter_that_does_not_split_is_whole_everywhere(kimi):
    whole, takes = (footprint(*kimi, EngineConfig(), Layout(n)) for n in (1, 16))  # 8 heads for K/V
    assert total(takes.drafter) == total(whole.drafter)
    assert takes.context_bytes == 24_576
    assert {line.how for line in takes.drafter} == {"on every GPU"}


@pytest.mark.parametrize(
    ("changes", "layout", "message"),
    [
        ({}, Layout(3), "`num_attention_heads`: 64 .* 3 ranks"),
        ({"intermediate_size": 18436}, Layout(8), "`intermediate_size`: 18436"),
        ({"moe_intermediate_size": 2052, "quantization": None}, Layout(8), "`moe_intermediate_size`: 2052"),
        ({"moe_intermediate_size": 2048 + 32}, Layout(8), "`moe_intermediate_size`, in groups of 32: 65"),
        ({"n_routed_experts": 380}, Layout(8, expert_parallel=True), "`n_routed_experts`: 380"),
    ],
)
def test_what_does_not_divide_is_named(kimi, changes, layout, message):
    with pytest.raises(ModelError, match=message):
        footprint(kimi[0].model_copy(update=changes), None, EngineConfig(), layout)


def test_whole_experts_cut_no_group(kimi):
    odd = kimi[0].model_copy(update={"moe_intermediate_size": 2048 + 32})
    experts = line(
        footprint(odd, None, EngineConfig(), Layout(8, expert_parallel=True)).target, "routed experts, INT4"
    )
    assert experts.per_gpu == 60 * 48 * 3 * 2080 * 7168 * 9 // 16


def test_uneven_vocabularies_are_shared_all_the_same(kimi):
    odd = kimi[0].model_copy(update={"vocab_size": 163_841})
    takes = footprint(odd, None, EngineConfig(), Layout(8))
    assert line(takes.target, "head").per_gpu == 20_481 * 7168 * 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_inventory_is_what_such_folders_hold(tmp_path, variant):
    config = TARGET | VARIANTS[variant]
    folder = write_target(tmp_path, **VARIANTS[variant])
    specs = list(target_tensors(TargetConfig.from_folder(folder)))
    expected = target_shapes(config)
    if config["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    assert {spec.name: spec.shape for spec in specs} == expected
    assert len({spec.name for spec in specs}) == len(specs)


def test_the_drafters_inventory(tmp_path):
    folder = write_drafter(tmp_path, num_hidden_layers=3)
    specs = list(drafter_tensors(DrafterConfig.from_folder(folder)))
    shapes = {spec.name: spec.shape for spec in specs if not spec.optional}
    assert shapes == drafter_shapes(json.loads((folder / "config.json").read_text()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_what_each_rank_loads(tmp_path, variant):
    """41 tokens: the second rank has a row less, of the embedding and of a head of its own."""
    options = {"dtype": torch.bfloat16, "device": "cpu", "kernels": load_kernels("cpu")}
    write_target(tmp_path / "target", vocab_size=41, **VARIANTS[variant])
    layers = VARIANTS[variant].get("num_hidden_layers", 2)
    write_drafter(tmp_path / "drafter", {"vocab_size": 41, "num_hidden_layers": layers})
    config = DrafterConfig.from_folder(tmp_path / "drafter")
    row = 24 * 2
    for rank, less in ((0, 0), (1, row if variant == "tied" else 2 * row)):
        target = Target.from_folder(tmp_path / "target", ranks=Ranks(Shard(rank, 2)), **options)
        drafter = Drafter.from_folder(tmp_path / "drafter", target=target, **options)
        takes = footprint(target.config, config, EngineConfig(), Layout(2))
        assert total(takes.target) - less == sum(p.nbytes for p in target.parameters())
        assert total(takes.drafter) == sum(p.nbytes for p in drafter.parameters())
        assert takes.context_bytes == 2 * config.num_hidden_layers * drafter.n_kv_heads * config.head_dim * 2


@pytest.mark.parametrize(("dtype", "itemsize"), [(torch.bfloat16, 2), (torch.float32, 4)])
def test_equals_what_a_loaded_pair_takes(tmp_path, dtype, itemsize):
    """Parameters, pools and the largest tensors of a pass, to the byte."""
    options = {"dtype": dtype, "device": "cpu", "kernels": load_kernels("cpu")}
    target = Target.from_folder(write_target(tmp_path / "target", q_lora_rank=12), **options)
    drafter = Drafter.from_folder(write_drafter(tmp_path / "drafter"), target=target, **options)
    B, T, n_pages, page = 2, 4, 3, 16
    engine = EngineConfig(max_batch=B, max_budget=T, page_size=page, prefill_chunk=1)
    takes = footprint(target.config, drafter.config, engine, Layout(itemsize=itemsize))
    assert total(takes.target) == sum(p.nbytes for p in target.parameters())
    assert total(takes.drafter) == sum(p.nbytes for p in drafter.parameters())

    c, d = target.config, drafter.config
    kind = {"dtype": dtype, "device": "cpu"}
    latents = LatentPool.allocate(c.num_hidden_layers, n_pages, page, c.latent_dim, **kind)
    context = DraftContext.allocate(
        d.num_hidden_layers, n_pages, page, d.num_key_value_heads, d.head_dim, **kind
    )
    assert latents.pages.nbytes + context.kv.nbytes == n_pages * takes.page_bytes
    assert context.kv.nbytes == n_pages * page * context_bytes(d, Layout(itemsize=itemsize))

    tree = root_only([0] * (B * T)).torch("cpu")
    batch = TreeBatch(
        torch.zeros(B * T, 1, dtype=torch.int32), torch.zeros_like(tree.n_slots), tree.ancestors, tree.n_slots
    )
    with torch.inference_mode():
        out = target(tree.tokens, tree.depths, latents.pages, batch, d.target_layer_ids)
        logits = target.logits(out.hidden)
    assert line(takes.scratch, "latents of the slots").per_gpu == out.latents.nbytes
    assert line(takes.scratch, "features").per_gpu == out.features.nbytes
    assert line(takes.scratch, "logits").per_gpu == logits.nbytes * (4 + itemsize) // 4
