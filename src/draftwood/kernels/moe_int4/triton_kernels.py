"""The Triton kernels of moe_int4: products with words that are unpacked in registers.

A word is taken as two 16-bit halves of four nibbles. Nibbles at one place, `plane` j of 4, of consecutive halves are numbers
j, 4 + j, 8 + j, ... of a row. So a tile of halves [rows, n] is four tiles of weights of that very shape, each multiplied with the
activations of its plane, and no number moves between threads. Activations come by planes: [4, width / 4] where a row was [width].
"""

from __future__ import annotations

import triton
import triton.language as tl

from draftwood.kernels.moe.triton_kernels import pairs_of_tile
from draftwood.kernels.triton_overlap import await_previous, begin_next

PER_HALF = tl.constexpr(4)
"""Numbers in 16 bits, and planes."""
HALVES_PER_GROUP = tl.constexpr(8)


def _unpack(kind: str, magic: int, one: int, minus: int) -> tl.constexpr:
    """PTX: two halves $4 and their scale, twice, $5 -> planes $0..$3 of two numbers each.

    The bits of a nibble below those of a power of two, `magic`, are that power plus the nibble; `minus` is minus the power, less
    8. Their sum is exact, so the product is rounded once: to it minus zero is added, which changes nothing.
    """
    planes = range(PER_HALF.value)
    lines = [
        *(f"shr.u32 ${j}, $4, {4 * j};" for j in planes),
        *(f"lop3.b32 ${j}, ${j}, 0x000f000f, 0x{magic:04x}{magic:04x}, 0xea;" for j in planes),
        *(
            f"mov.b32 {name}, 0x{bits:04x}{bits:04x};"
            for name, bits in (("one", one), ("minus", minus), ("zero", 0x8000))
        ),
        *(f"fma.rn.{kind} ${j}, ${j}, one, minus;" for j in planes),
        *(f"fma.rn.{kind} ${j}, ${j}, $5, zero;" for j in planes),
    ]
    return tl.constexpr("{ .reg .b32 one, minus, zero; " + " ".join(lines) + " }")


_BF16 = _unpack("bf16x2", magic=0x4300, one=0x3F80, minus=0xC308)
_FP16 = _unpack("f16x2", magic=0x6400, one=0x3C00, minus=0xE408)


@triton.jit
def _weights(halves, scale, dtype: tl.constexpr, IN_PAIRS: tl.constexpr):
    """Halves [rows, n] i16 and scales [rows, n / 8] -> four planes [rows, n] of weights, rounded once to `dtype`."""
    rows: tl.constexpr = scale.shape[0]
    groups: tl.constexpr = scale.shape[1]
    scale = tl.broadcast_to(scale[:, :, None], [rows, groups, HALVES_PER_GROUP])
    scale = tl.reshape(scale, [rows, groups * HALVES_PER_GROUP])
    if IN_PAIRS:
        asm: tl.constexpr = _BF16 if scale.dtype == tl.bfloat16 else _FP16
        return tl.inline_asm_elementwise(
            asm, "=&r,=&r,=&r,=&r,r,r", [halves, scale], (scale.dtype,) * 4, is_pure=True, pack=2
        )
    else:
        wide = scale.to(tl.float32)
        return (
            (((halves & 15) - 8).to(tl.float32) * wide).to(dtype),
            ((((halves >> 4) & 15) - 8).to(tl.float32) * wide).to(dtype),
            ((((halves >> 8) & 15) - 8).to(tl.float32) * wide).to(dtype),
            ((((halves >> 12) & 15) - 8).to(tl.float32) * wide).to(dtype),
        )


@triton.jit
def _step(acc, halves, scale, a0, a1, a2, a3, IN_PAIRS: tl.constexpr):
    """acc [rows, tokens] and the products of a tile of weights [rows, 4 n] with activations, four planes [tokens, n]."""
    w0, w1, w2, w3 = _weights(halves, scale, a0.dtype, IN_PAIRS)
    acc = tl.dot(w0, tl.trans(a0), acc, input_precision="ieee")
    acc = tl.dot(w1, tl.trans(a1), acc, input_precision="ieee")
    acc = tl.dot(w2, tl.trans(a2), acc, input_precision="ieee")
    return tl.dot(w3, tl.trans(a3), acc, input_precision="ieee")


@triton.jit
def _planes(at, plane_size: tl.constexpr, mask):
    """The four planes of a tile of activations."""
    a0 = tl.load(at, mask=mask, other=0.0)
    a1 = tl.load(at + plane_size, mask=mask, other=0.0)
    a2 = tl.load(at + 2 * plane_size, mask=mask, other=0.0)
    return a0, a1, a2, tl.load(at + 3 * plane_size, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["pairs"])
def gate_up(
    x,  # [N, 4, d / 4], by planes
    packed,  # [E, 2 I, d / 4] i16, gate rows first
    scale,  # [E, 2 I, d / 32]
    hidden,  # [pairs, 4, I / 4], by planes
    parts,  # [SPLITS, pairs, 2, I] fp32
    order,
    tile_expert,
    pairs,
    d: tl.constexpr,
    I: tl.constexpr,
    TOP_K: tl.constexpr,
    ALONE: tl.constexpr,
    SPLITS: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides I
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """hidden = silu(x gate^T) * (x up^T) for one tile of pairs and BLOCK_N of the I rows.

    With several SPLITS: both products' sums over one of as many parts of d, into `parts`.
    """
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    QUARTER: tl.constexpr = d // PER_HALF
    GROUPS: tl.constexpr = QUARTER // HALVES_PER_GROUP
    STEP: tl.constexpr = BLOCK_K // PER_HALF
    PART: tl.constexpr = (QUARTER + STEP * SPLITS - 1) // (STEP * SPLITS) * STEP
    e = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if e >= 0:
        pair = pairs_of_tile(order, pairs, ALONE, BLOCK_M)
        i = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = x + (pair // TOP_K).to(tl.int64)[:, None] * d
        gates = packed + e * (2 * I * QUARTER) + i[:, None] * QUARTER
        scales = scale + e * (2 * I * GROUPS) + i[:, None] * GROUPS
        gate = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        start = tl.program_id(2) * PART
        for k0 in range(start, tl.minimum(start + PART, QUARTER), STEP):
            k = k0 + tl.arange(0, STEP)[None, :]
            g = k0 // HALVES_PER_GROUP + tl.arange(0, STEP // HALVES_PER_GROUP)[None, :]
            a0, a1, a2, a3 = _planes(rows + k, QUARTER, (pair < pairs)[:, None] & (k < QUARTER))
            halves = tl.load(gates + k, mask=k < QUARTER, other=0)
            group = tl.load(scales + g, mask=g < GROUPS, other=0.0)
            gate = _step(gate, halves, group, a0, a1, a2, a3, IN_PAIRS)
            halves = tl.load(gates + I * QUARTER + k, mask=k < QUARTER, other=0)
            group = tl.load(scales + I * GROUPS + g, mask=g < GROUPS, other=0.0)
            up = _step(up, halves, group, a0, a1, a2, a3, IN_PAIRS)
        pair = pair.to(tl.int64)[None, :]
        if SPLITS == 1:
            out = gate / (1 + tl.exp(-gate)) * up
            to = hidden + pair * I + _by_planes(i, I)[:, None]
            tl.store(to, out.to(hidden.dtype.element_ty), mask=pair < pairs)
        else:
            to = parts + (tl.program_id(2) * pairs + pair) * (2 * I) + i[:, None]
            tl.store(to, gate, mask=pair < pairs)
            tl.store(to + I, up, mask=pair < pairs)


@triton.jit(do_not_specialize=["pairs"])
def activate(
    parts,  # [SPLITS, pairs, 2, I] fp32
    hidden,  # [pairs, 4, I / 4], by planes
    pairs,
    I: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """hidden = silu(gate) * up of one pair, of the sums of their parts, added up in order."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    pair = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.zeros([BLOCK], tl.float32)
    up = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        at = parts + (split * pairs + pair) * (2 * I) + i
        gate += tl.load(at, mask=i < I, other=0.0)
        up += tl.load(at + I, mask=i < I, other=0.0)
    out = gate / (1 + tl.exp(-gate)) * up
    tl.store(hidden + pair * I + _by_planes(i, I), out.to(hidden.dtype.element_ty), mask=i < I)


@triton.jit(do_not_specialize=["pairs"])
def down(
    hidden,  # [pairs, 4, I / 4], by planes
    packed,  # [E, d, I / 4] i16
    scale,  # [E, d, I / 32]
    routing,  # [pairs] fp32
    outputs,  # [pairs, d] fp32
    order,
    tile_expert,
    pairs,
    d: tl.constexpr,
    I: tl.constexpr,
    ALONE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,  # divides d
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """outputs = routing weight * hidden down^T for one tile of pairs and BLOCK_N of the d rows."""
    await_previous(OVERLAP)
    begin_next(OVERLAP)
    QUARTER: tl.constexpr = I // PER_HALF
    GROUPS: tl.constexpr = QUARTER // HALVES_PER_GROUP
    STEP: tl.constexpr = BLOCK_K // PER_HALF
    e = tl.load(tile_expert + tl.program_id(0)).to(tl.int64)
    if e >= 0:
        pair = pairs_of_tile(order, pairs, ALONE, BLOCK_M)
        c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        rows = hidden + pair.to(tl.int64)[:, None] * I
        downs = packed + e * (d * QUARTER) + c[:, None] * QUARTER
        scales = scale + e * (d * GROUPS) + c[:, None] * GROUPS
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for k0 in range(0, QUARTER, STEP):
            k = k0 + tl.arange(0, STEP)[None, :]
            g = k0 // HALVES_PER_GROUP + tl.arange(0, STEP // HALVES_PER_GROUP)[None, :]
            a0, a1, a2, a3 = _planes(rows + k, QUARTER, (pair < pairs)[:, None] & (k < QUARTER))
            halves = tl.load(downs + k, mask=k < QUARTER, other=0)
            group = tl.load(scales + g, mask=g < GROUPS, other=0.0)
            acc = _step(acc, halves, group, a0, a1, a2, a3, IN_PAIRS)
        acc = acc * tl.load(routing + pair, mask=pair < pairs, other=0.0)[None, :]
        to = outputs + pair.to(tl.int64)[None, :] * d + c[:, None]
        tl.store(to, acc, mask=(pair < pairs)[None, :])


@triton.jit
def _by_planes(i, width: tl.constexpr):
    """Where number i of a row is when the row is kept by planes."""
    return i % PER_HALF * (width // PER_HALF) + i // PER_HALF
