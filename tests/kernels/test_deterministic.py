"""The fixed kernels, bit for bit: whatever other rows there are, and wherever a slot's keys lie.

On a GPU in Triton at all sizes; elsewhere in torch, and in Triton's interpreter at a few.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from draftwood.kernels.linear.torch_impl import linear
from draftwood.kernels.registry import load
from draftwood.kernels.verify_attn import triton_fixed
from draftwood.tree import from_parents

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture
def dots_in_order(monkeypatch):
    """The interpreter multiplies tiles by numpy, which treats edges differently; a GPU adds up every number in one way."""
    if ON_GPU:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self, a, b, d, *_):
        acc = d.data.copy()
        for k in range(a.data.shape[1]):
            acc += a.data[:, k : k + 1].astype(acc.dtype) * b.data[k].astype(acc.dtype)
        return TensorHandle(acc, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def numbers(seed, *shape, dtype="float32", scale=1.0):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return drawn.to(DEVICE, getattr(torch, dtype))


def assert_rows_stand_alone(function, x, counts, checked=130):
    """Batches of many sizes, of rows in other places among others: each row, or `checked` of them, as it is alone."""
    alone = {}
    generator = torch.Generator().manual_seed(1)
    for n in counts:
        rows = torch.randperm(len(x), generator=generator)[:n].to(x.device)
        got = function(x[rows])
        for place in sorted({n - 1, *range(0, n, -(-n // checked))}):
            row = int(rows[place])
            if row not in alone:
                alone[row] = function(x[row : row + 1])[0]
            assert torch.equal(got[place], alone[row]), f"row {place} of {n}"


@pytest.mark.parametrize(
    ("dtype", "threads"), [("float32", 1), ("float64", 1), ("bfloat16", 1), ("float32", 2)]
)
def test_linear_in_torch_for_1_to_130_rows(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    shapes = ((384, 576), (384, 8), (48, 128), (33, 57), (100, 101), (2, 1))
    try:
        for K, M in shapes[:: 1 if threads == 1 else 3]:
            weight = numbers(K, M, K, dtype=dtype)
            for layout in (weight, weight.mT.contiguous().mT):
                x = numbers(M, 130, K, dtype=dtype)
                counts = range(1, 131) if K == 48 and threads == 1 else (2, 15, 16, 17, 130)
                assert_rows_stand_alone(lambda rows, w=layout: linear(rows, w), x, counts)
    finally:
        torch.set_num_threads(before)


def test_linear_in_torch_sees_through_a_library_that_treats_rows_differently(monkeypatch):
    """Edge rows of a block that are added up backwards: such a library's rows go one by one."""

    def uneven(x, weight):
        y = x @ weight.t()
        if len(x) > 1:
            y[-1] = (x[-1:].flip(1).double() @ weight.flip(1).double().t()).to(y.dtype)[0]
        return y

    monkeypatch.setattr("draftwood.kernels.linear.torch_impl.F", SimpleNamespace(linear=uneven))
    monkeypatch.setattr("draftwood.kernels.linear.torch_impl._sizes", {})
    weight = numbers(0, 19, 77)
    assert_rows_stand_alone(lambda rows: linear(rows, weight), numbers(1, 40, 77), (1, 2, 17, 40))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if ON_GPU else ["float32", "float16"])
@pytest.mark.parametrize("groups", [0, 2])
def test_linear_in_triton(dtype, groups, dots_in_order):
    shapes = ((7168, 2112), (512, 7168), (257, 131)) if ON_GPU else ((70, 37),)
    for K, M in shapes:
        some = (groups,) if groups else ()
        weight = numbers(K, *some, K, M, dtype=dtype, scale=K**-0.5).mT  # as W_UK lies
        x = numbers(M, 130, *some, K, dtype=dtype)

        def product(rows, w=weight):
            y = load("linear", "triton")(rows.transpose(0, 1) if groups else rows, w)
            return y.transpose(0, 1) if groups else y

        assert_rows_stand_alone(product, x, *((range(1, 131),) if ON_GPU else ((2, 17, 36), 3)))


def test_linear_in_triton_of_a_part_of_a_wider_row(dots_in_order):
    wide, weight = numbers(0, 3, 50), numbers(1, 20, 31)
    linear_ = load("linear", "triton")
    assert torch.equal(linear_(wide[1:2, 3:34], weight), linear_(wide[:, 3:34], weight)[1:2])


@pytest.mark.parametrize(
    ("kernel", "impl"),
    [
        ("moe", "torch_fixed"),
        ("moe", "triton_fixed"),
        ("moe_int4", "torch_fixed"),
        ("moe_int4", "triton_fixed"),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if ON_GPU else ["float32"])
def test_experts(kernel, dtype, impl, dots_in_order):
    E, d, I, top_k = (64, 2048, 1408, 4) if ON_GPU else (4, 32, 32, 2)
    router, bias = numbers(0, E, d, scale=d**-0.5), numbers(1, E, scale=0.1)
    if kernel == "moe":
        experts = (
            numbers(2, E, 2 * I, d, dtype=dtype, scale=d**-0.5),
            numbers(3, E, d, I, dtype=dtype, scale=I**-0.5),
        )
    else:
        words = lambda seed, *shape: (
            torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed))
            .int()
            .to(DEVICE)
        )
        experts = (
            *(words(2, E, 2 * I, d // 8), numbers(3, E, 2 * I, d // 32, dtype="bfloat16", scale=0.02)),
            *(words(4, E, d, I // 8), numbers(5, E, d, I // 32, dtype="bfloat16", scale=0.02)),
        )
    routing = {"top_k": top_k, "n_group": 2, "topk_group": 1, "scaling": 1.5}
    fixed = load(kernel, impl)

    def run(x):
        return fixed(x, router.to(x.dtype) if impl == "triton_fixed" else router, bias, *experts, **routing)

    x = numbers(6, 50, d, dtype=dtype)
    few = not ON_GPU and impl == "triton_fixed"
    assert_rows_stand_alone(run, x, (2, 37) if few else (2, 7, 16, 33, 50), checked=3 if few else 50)


@pytest.mark.parametrize("impl", ["torch_fixed", "triton_fixed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"] if ON_GPU else ["float32"])
def test_attention_of_a_path_is_the_same_in_pages_and_in_trees(impl, dtype, dots_in_order, monkeypatch):
    """Slots at every depth against the same path committed slot by slot, across pages, splits and batches."""
    if not ON_GPU:
        monkeypatch.setattr(triton_fixed, "SPLIT", 32)
    H, R, P = (64, 512, 64) if ON_GPU else (2, 16, 4)
    page, prefixes = (64, (0, 1, 63, 1020, 2050)) if ON_GPU else (16, (0, 14, 29))
    T = 33 if ON_GPU else 6
    attend = load("verify_attn", impl)
    B, M = len(prefixes), -(-(max(prefixes) + T) // page)
    table = torch.arange(B * M, dtype=torch.int32, device=DEVICE).view(B, M).flip(0)
    keys, nodes = numbers(0, B, M * page, R + P, dtype=dtype), numbers(1, B, T, R + P, dtype=dtype)
    q = numbers(2, B, T, H, R + P, dtype=dtype)
    parents = [-1, *((i - 1) // 2 if i % 3 else i - 1 for i in range(1, T))]
    tree = from_parents([range(1, T + 1)] * B, [parents] * B, [T] * B).torch(DEVICE)

    def run(rows, lengths, own_keys, own_q, own_nodes, shape):
        pages = torch.full((B * M, page, R + P), torch.nan, dtype=q.dtype, device=DEVICE)
        for row, length, k in zip(rows, lengths, own_keys, strict=True):
            pages[table[row].long()] = torch.where(
                torch.arange(M * page, device=DEVICE)[:, None] < length, k, torch.nan
            ).view(M, page, -1)
        prefix = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        tables, n_slots = table[rows], torch.full_like(prefix, own_q.shape[1])
        return attend(own_q, pages, tables, prefix, own_nodes, shape, n_slots, 0.1, value_dim=R)

    o, lse = run(list(range(B)), prefixes, keys, q, nodes, tree.ancestors)
    alone = from_parents([[1]], [[-1]], [1]).torch(DEVICE).ancestors
    for t in range(T):
        path, at = [], t
        while at >= 0:
            path, at = [at, *path], parents[at]
        committed = keys.clone()
        for row, prefix in enumerate(prefixes):
            committed[row, prefix : prefix + len(path) - 1] = nodes[row, path[:-1]]
        for row in range(B) if t % 4 == 0 else [t % B]:
            length = prefixes[row] + len(path) - 1
            got = run(
                [row],
                [length],
                committed[row : row + 1],
                q[row : row + 1, t : t + 1],
                nodes[row : row + 1, t : t + 1],
                alone,
            )
            assert torch.equal(got[0][0, 0], o[row, t])
            assert torch.equal(got[1][0, 0], lse[row, t])
