"""What a warpgroup does with a block in the Gluon verify_attn: scores, masks, weighted values, rescaling."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma


@gluon.jit
def _zero():
    """0, of which the compiler does not know that it is the same in every round: else it computes all operands' addresses
    before the loop and has no registers left for them."""
    zero = gl.to_tensor(0)
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [zero], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def scores(shared, phase, BLOCK: gl.constexpr, FROM: gl.constexpr, TO: gl.constexpr, s, GRAIN: gl.constexpr):
    """Issue steps FROM..TO of the nine groups of products that make a block's scores, each when its piece has come.

    The first four steps are of the half that is loaded first; `s` is overwritten by step 0.
    """
    tiles, _, barriers = shared
    queries, left, right, rope = tiles
    full = barriers[2]
    left = left._reinterpret(left.dtype, [8, 64, 64], queries.layout)
    right = right._reinterpret(right.dtype, [8, 64, 64], queries.layout)
    keys = (left, right, rope)
    z = _zero()
    for step in gl.static_range(FROM, TO):
        s = _score(
            queries,
            keys,
            full,
            phase,
            s,
            z,
            step,
            step if step == 8 else (step + 4 * BLOCK) % 8,
            BLOCK,
            GRAIN,
        )
    return s


@gluon.jit
def _score(
    queries,
    keys,
    full,
    phase,
    s,
    z,
    STEP: gl.constexpr,
    PIECE: gl.constexpr,
    BLOCK: gl.constexpr,
    GRAIN: gl.constexpr,
):
    left, right, rope = keys
    if STEP % GRAIN == 0:
        mbarrier.wait(full[BLOCK * (8 // GRAIN + 1) + PIECE // GRAIN], phase)
    if PIECE < 4:
        piece = left.index(BLOCK * 4 + PIECE + z)
    elif PIECE < 8:
        piece = right.index(BLOCK * 4 + PIECE - 4 + z)
    else:
        piece = rope.index(BLOCK + z)
    return warpgroup_mma(queries.index(PIECE + z), piece.permute((1, 0)), s, use_acc=STEP > 0, is_async=True)


@gluon.jit
def add_values(rope, half, BLOCK: gl.constexpr, acc):
    """Issue the products of a block's weights and its values."""
    z = _zero()
    return warpgroup_mma(rope.index(BLOCK + z), half.index(BLOCK + z), acc, is_async=True)


@gluon.jit
def _live_keys(i, prefix, n):
    """Keys of block `i` before the end of the prefix or the tree; any number from 64 where all are."""
    pages = (prefix + 63) // 64
    return gl.where(i < pages, prefix - i * 64, n - (i - pages) * 64)


@gluon.jit
def hide(s, i, prefix, n, word):
    """Scores with -inf where a row must not see a key; `word`: bits of the keys that it sees, per row."""
    if i >= prefix // 64:
        key = gl.arange(0, 64, layout=gl.SliceLayout(0, s.type.layout))
        low = word.to(gl.int32)
        high = (word >> 32).to(gl.int32)
        bits = gl.where((key < 32)[None, :], low[:, None], high[:, None]) >> (key % 32)[None, :]
        seen = ((bits & 1) != 0) & (key < _live_keys(i, prefix, n))[None, :]
        s = gl.where(seen, s, -float("inf"))
    return s


@gluon.jit
def clear(half, BLOCK: gl.constexpr, i, prefix, n):
    """Zero the values of keys past the end of the prefix or the tree: weights of 0 do not hide a NaN."""
    live = _live_keys(i, prefix, n)
    if live < 64:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        dead = gl.arange(0, 64, layout=gl.SliceLayout(1, layout)) >= live
        pieces = half._reinterpret(half.dtype, [8, 64, 64], half.layout)
        for j in gl.static_range(4):
            piece = pieces.index(BLOCK * 4 + j)
            piece.store(gl.where(dead[:, None], 0.0, piece.load(layout)))
        fence_async_shared()


@gluon.jit
def rescale(acc, factor, LAZY: gl.constexpr):
    """Rows of an accumulator times their factors; LAZY: a warp whose factors are all 1 skips it."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    if LAZY:
        asm: gl.constexpr = _skipping_product()
        return gl.inline_asm_elementwise(
            asm[0], asm[1], [acc, factor], dtype=gl.float32, is_pure=False, pack=64
        )
    return acc * factor


@gluon.constexpr_function
def _skipping_product():
    """PTX and constraints: 64 of a thread's numbers, alternately two of one row and two of another, times their factors."""
    n = 64
    products = " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    asm = (
        "{ .reg .pred other, any; "
        f"setp.neu.f32 other, ${2 * n}, 0f3F800000; "
        f"setp.neu.or.f32 other, ${2 * n + 2}, 0f3F800000, other; "
        f"vote.sync.any.pred any, other, -1; @!any bra same; {products} same: }}"
    )
    constraints = ["=f"] * n + [str(i) for i in range(n)] + ["f"] * n
    return asm, ",".join(constraints)
