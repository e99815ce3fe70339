"""Packed models compute what the unpacked ones do, and are packed only where that holds."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftwood.kernels.registry import load_kernels
from draftwood.models.dense_experts import LARGEST, most_rows
from draftwood.models.drafter import Drafter
from draftwood.models.layers import Matrix, pack
from draftwood.models.packed import PackedMatrix
from draftwood.models.target import MoE, Target, TreeBatch
from draftwood.tree import root_only
from support.tiny import write_drafter, write_target

KERNELS = load_kernels("cpu")

needs_fbgemm = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("fbgemm", "x86"), reason="torch has no FBGEMM on this processor"
)


def bf16(*shape, seed=0, std=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (std * torch.randn(shape, generator=generator)).bfloat16().float()


@needs_fbgemm
@pytest.mark.parametrize("std", [1e-20, 0.02, 3e6])
@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (33, 48), (656, 384)])
def test_products_of_any_number_of_rows(shape, std):
    weight = bf16(*shape, std=std)
    packed = PackedMatrix.of(weight)
    for rows in (1, 2, 3, 7, 8, 40):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
        want = x.double() @ weight.double().T
        torch.testing.assert_close(packed(x).double(), want, rtol=1e-5, atol=2e-6 * std * shape[1] ** 0.5)


@needs_fbgemm
def test_leading_axes_and_strides():
    packed, x = PackedMatrix.of(bf16(6, 8)), torch.randn(3, 8, 5).transpose(1, 2)
    torch.testing.assert_close(packed(x), x @ bf16(6, 8).T)


@needs_fbgemm
def test_nan_and_infinity_stay_in_their_row():
    packed, x = PackedMatrix.of(bf16(48, 33)), torch.randn(9, 33)
    want = packed(x)
    x[2, 5], x[6, 0] = torch.nan, torch.inf
    got = packed(x)
    others = [0, 1, 3, 4, 5, 7, 8]
    assert torch.equal(got[others], want[others])
    assert got[2].isnan().all()
    assert not got[6].isfinite().any()


def test_what_half_precision_would_round_is_not_packed():
    weight = bf16(4, 4)
    weight[1, 2] = 1 + 2**-12  # 13 significant bits
    assert PackedMatrix.of(weight) is None
    weight[1, 2] = weight.abs().max() * 2**-40  # below the range, wherever the largest is put
    assert PackedMatrix.of(weight) is None
    matrix = Matrix(weight)
    matrix.pack()
    assert torch.equal(matrix(torch.eye(4)), weight.T)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_are_not_packed(dtype):
    assert PackedMatrix.of(bf16(4, 4).to(dtype)) is None


@needs_fbgemm
def test_zeros_are_packed():
    assert torch.equal(PackedMatrix.of(torch.zeros(3, 4))(torch.ones(2, 4)), torch.zeros(2, 3))


def test_experts_are_all_computed_only_where_that_is_cheaper():
    assert most_rows(8, 2) >= 32
    assert most_rows(384, 8) == 0
    assert most_rows(2, 2) == LARGEST


def rounded(folder):
    """The folder with its tensors rounded to bf16, kept as fp32."""
    file = folder / "model.safetensors"
    save_file({k: v.bfloat16().float() for k, v in load_file(file).items()}, file)
    return folder


VARIANTS = {
    "plain": {},
    "no shared experts": {"n_shared_experts": None},
    "two shared experts": {"n_shared_experts": 2},
    "query lora": {"q_lora_rank": 12},
    "tied": {"tie_word_embeddings": True},
}


@needs_fbgemm
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rows", [1, 2, 9])
def test_a_packed_target_computes_the_same(tmp_path, variant, rows):
    folder = rounded(write_target(tmp_path, **VARIANTS[variant]))
    tree = root_only(range(rows)).torch()
    batch = TreeBatch(
        torch.zeros(rows, 1, dtype=torch.int32), torch.zeros_like(tree.n_slots), tree.ancestors, tree.n_slots
    )
    outputs = []
    for packed in (False, True):
        target = Target.from_folder(folder, dtype=torch.float32, device="cpu", kernels=KERNELS)
        if packed:
            pack(target)
            moe = next(m for m in target.modules() if isinstance(m, MoE))
            assert moe.dense is not None
            assert not hasattr(target.layers[0].attention.o, "weight")
        pages = torch.zeros(len(target.layers), 1, 16, target.config.latent_dim)
        output = target(tree.tokens, tree.depths, pages, batch, (0, 1))
        outputs.append((output.hidden, output.latents, output.features, target.logits(output.hidden)))
    for got, want in zip(outputs[1], outputs[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@needs_fbgemm
def test_a_packed_drafter_computes_the_same(tmp_path):
    target = Target.from_folder(
        write_target(tmp_path / "target"), dtype=torch.float32, device="cpu", kernels=KERNELS
    )
    folder = rounded(write_drafter(tmp_path / "drafter"))
    results = []
    for packed in (False, True):
        drafter = Drafter.from_folder(
            folder, target=target, dtype=torch.float32, device="cpu", kernels=KERNELS
        )
        if packed:
            pack(drafter)
            assert not hasattr(drafter.qkv, "weight")
        generator = torch.Generator().manual_seed(3)
        features = torch.randn(1, 10, 2 * target.config.hidden_size, generator=generator)
        k, v = drafter.context(features, torch.zeros(1, dtype=torch.int32)).unbind(3)
        pages = [torch.zeros(len(k), 1, 16, *k.shape[3:]) for _ in "kv"]
        pages[0][:, :, :10], pages[1][:, :, :10] = k, v
        one = torch.ones(1, dtype=torch.int32)
        hidden = drafter(3 * one, 10 * one, *pages, torch.zeros(1, 1, dtype=torch.int32), target.embed)
        results.append((k, v, hidden))
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
