"""The Triton kernels of moe: router products, the choice of experts, pairs in expert order, expert products, sums."""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.triton_overlap import await_previous, begin_next


@triton.jit(do_not_specialize=["N"])
def logits(
    x,  # [N, d]
    router,  # [E, d]
    parts,  # [splits, N, E] fp32
    N,
    E,
    d,
    x_n,
    router_e,
    d_split,  # numbers of d per split, a multiple of BLOCK_K
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """x router^T over one part of d."""
    begin_next(OVERLAP)
    n = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    e = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    start = tl.program_id(2) * d_split
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k0 in tl.range(start, tl.minimum(start + d_split, d), BLOCK_K):
        k = k0 + tl.arange(0, BLOCK_K)
        x_at = x + n.to(tl.int64)[:, None] * x_n + k[None, :]
        a = tl.load(x_at, mask=(n < N)[:, None] & (k < d)[None, :], other=0.0)
        w_at = router + e.to(tl.int64)[:, None] * router_e + k[None, :]
        w = tl.load(w_at, mask=(e < E)[:, None] & (k < d)[None, :], other=0.0)
        if a.dtype == w.dtype or a.dtype == tl.float32:
            acc = tl.dot(a, tl.trans(w.to(a.dtype)), acc, input_precision="ieee")
        else:  # TF32 holds 16 bits, and fp32 in two parts but for 2^-20 of it
            a, w = a.to(tl.float32), tl.trans(w.to(tl.float32))
            high = (w.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            acc = tl.dot(a, high, acc, input_precision="tf32")
            acc = tl.dot(a, w - high, acc, input_precision="tf32")
    to = (tl.program_id(2).to(tl.int64) * N + n)[:, None] * E + e[None, :]
    tl.store(parts + to, acc, mask=(n < N)[:, None] & (e < E)[None, :])


@triton.jit(do_not_specialize=["N"])
def select(
    parts,  # [splits, N, E]
    bias,  # [E]
    weights,  # [N, top_k] fp32
    experts,  # [N, top_k]
    N,
    E,
    scaling,
    SPLITS: tl.constexpr,
    TOP_K: tl.constexpr,
    N_GROUP: tl.constexpr,
    TOPK_GROUP: tl.constexpr,
    NORM: tl.constexpr,
    G_PAD: tl.constexpr,
    S_PAD: tl.constexpr,  # at least E / N_GROUP
    K_PAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One token's experts, by biased score descending, equal ones by index. NaN counts as -inf."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    n = tl.program_id(0).to(tl.int64)
    size = E // N_GROUP
    g = tl.arange(0, G_PAD)
    s = tl.arange(0, S_PAD)
    real = (g < N_GROUP)[:, None] & (s < size)[None, :]
    index = g[:, None] * size + s[None, :]  # [G_PAD, S_PAD]
    logit = tl.zeros([G_PAD, S_PAD], tl.float32)
    for split in tl.static_range(SPLITS):
        logit += tl.load(parts + (split * N + n) * E + index, mask=real, other=0.0)
    score = 1 / (1 + tl.exp(-logit))
    biased = score + tl.load(bias + index, mask=real, other=0.0).to(tl.float32)
    biased = tl.where(real & (biased >= -float("inf")), biased, -float("inf"))
    if N_GROUP > 1:
        best = tl.max(biased, 1)
        first = tl.min(tl.where(biased == best[:, None], s[None, :], S_PAD), 1)
        second = tl.max(tl.where(s[None, :] == first[:, None], -float("inf"), biased), 1)
        group = tl.where(g < N_GROUP, best + second, -float("inf"))
        kept = g < 0
        for _ in tl.static_range(TOPK_GROUP):
            best_group = tl.max(tl.where(kept, -float("inf"), group), 0)
            kept |= g == tl.min(tl.where((group == best_group) & (kept == 0), g, G_PAD), 0)
        biased = tl.where(kept[:, None], biased, -float("inf"))
    k = tl.arange(0, K_PAD)
    chosen = tl.zeros([K_PAD], tl.int32)
    weight = tl.zeros([K_PAD], tl.float32)
    for rank in tl.static_range(TOP_K):
        top = tl.max(tl.max(biased, 1), 0)
        e = tl.min(tl.min(tl.where(biased == top, index, E - 1), 1), 0)
        here = index == e
        chosen = tl.where(k == rank, e, chosen)
        weight = tl.where(k == rank, tl.sum(tl.sum(tl.where(here & real, score, 0.0), 1), 0), weight)
        biased = tl.where(here, -float("inf"), biased)
    if NORM:
        weight = weight / (tl.sum(weight, 0) + 1e-20)
    tl.store(weights + n * TOP_K + k, weight * scaling, mask=k < TOP_K)
    tl.store(experts + n * TOP_K + k, chosen, mask=k < TOP_K)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def align(
    experts,  # [pairs], -1 for one to leave out
    order,  # [tiles * BLOCK_M]: the pairs in expert order, each expert's from a new tile on; `pairs` fills up
    tile_expert,  # [tiles]: -1 for a tile not needed
    pairs,
    tiles,
    BLOCK_M: tl.constexpr,
    E_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program e places expert e's pairs; every program counts all experts' for itself."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    e = tl.program_id(0)
    bins = tl.arange(0, E_PAD)
    offset = tl.arange(0, CHUNK)
    loads = tl.zeros([E_PAD], tl.int32)
    for start in range(0, pairs, CHUNK):
        chosen = tl.load(experts + start + offset, mask=start + offset < pairs, other=-1)
        loads += tl.histogram(tl.maximum(chosen, 0), E_PAD, mask=chosen >= 0)
    needed = (loads + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(bins < e, needed, 0), 0)
    last = tl.sum(tl.where(bins <= e, needed, 0), 0)
    placed = 0
    for start in range(0, pairs, CHUNK):
        mine = tl.load(experts + start + offset, mask=start + offset < pairs, other=-1) == e
        rank = placed + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + first * BLOCK_M + rank, start + offset, mask=mine)
        placed += tl.sum(mine.to(tl.int32), 0)
    rest = first * BLOCK_M + placed + tl.arange(0, BLOCK_M)
    tl.store(order + rest, pairs + tl.zeros_like(rest), mask=rest < last * BLOCK_M)
    for tile in range(first, last):
        tl.store(tile_expert + tile, e)
    if e == tl.num_programs(0) - 1:
        for tile in range(last, tiles):
            tl.store(tile_expert + tile, -1)


@triton.jit
def pairs_of_tile(order, pairs, ALONE: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's pairs, `pairs` where there is none; with one token every tile has one pair, in the order of ranks."""
    offset = tl.arange(0, BLOCK_M)
    if ALONE:
        return tl.where(offset == 0, tl.program_id(0), pairs)
    else:
        return tl.load(order + tl.program_id(0) * BLOCK_M + offset)


@triton.jit(do_not_specialize=["pairs"])
def gate_up(
    x,  # [N, d]
    weight,  # [E, 2 I, d], gate rows first
    hidden,  # [pairs, I]
    order,
    tile_expert,
    pairs,
    d,
    I,
    x_n,
    weight_e,
    weight_i,
    TOP_K: tl.constexpr,
    ALONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """hidden = silu(x gate^T) * (x up^T) for one tile of pairs and BLOCK_N of the I rows."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    e = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if e >= 0:
        pair = pairs_of_tile(order, pairs, ALONE, BLOCK_M)
        i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = x + (pair // TOP_K).to(tl.int64)[:, None] * x_n
        gates = weight + e * weight_e + i.to(tl.int64)[:, None] * weight_i
        ups = weight + e * weight_e + (I + i).to(tl.int64)[:, None] * weight_i
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, d, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)[None, :]
            a = tl.load(rows + k, mask=(pair < pairs)[:, None] & (k < d), other=0.0)
            mask = (i < I)[:, None] & (k < d)
            gate = tl.dot(a, tl.trans(tl.load(gates + k, mask=mask, other=0.0)), gate, input_precision="ieee")
            up = tl.dot(a, tl.trans(tl.load(ups + k, mask=mask, other=0.0)), up, input_precision="ieee")
        out = gate / (1 + tl.exp(-gate)) * up
        to = hidden + pair.to(tl.int64)[:, None] * I + i[None, :]
        tl.store(to, out.to(hidden.dtype.element_ty), mask=(pair < pairs)[:, None] & (i < I)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def down(
    hidden,  # [pairs, I]
    weight,  # [E, d, I]
    routing,  # [pairs] fp32
    outputs,  # [pairs, d] fp32
    order,
    tile_expert,
    pairs,
    d,
    I,
    weight_e,
    weight_d,
    ALONE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """outputs = routing weight * hidden down^T for one tile of pairs and BLOCK_N of the d rows."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    e = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if e >= 0:
        pair = pairs_of_tile(order, pairs, ALONE, BLOCK_M)
        c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = hidden + pair.to(tl.int64)[:, None] * I
        downs = weight + e * weight_e + c.to(tl.int64)[:, None] * weight_d
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k0 in range(0, I, BLOCK_K):
            k = k0 + tl.arange(0, BLOCK_K)[None, :]
            a = tl.load(rows + k, mask=(pair < pairs)[:, None] & (k < I), other=0.0)
            w = tl.load(downs + k, mask=(c < d)[:, None] & (k < I), other=0.0)
            acc = tl.dot(a, tl.trans(w), acc, input_precision="ieee")
        acc = acc * tl.load(routing + pair, mask=pair < pairs, other=0.0)[:, None]
        to = outputs + pair.to(tl.int64)[:, None] * d + c[None, :]
        tl.store(to, acc, mask=(pair < pairs)[:, None] & (c < d)[None, :])


@triton.jit
def combine(
    outputs,  # [N, TOP_K, d] fp32
    out,  # [N, d]
    d,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """A token's sum over its experts, in the order of their ranks."""
    await_previous(OVERLAP)
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(TOP_K):
        acc += tl.load(outputs + (n * TOP_K + rank) * d + c, mask=c < d, other=0.0)
    tl.store(out + n * d + c, acc.to(out.dtype.element_ty), mask=c < d)
