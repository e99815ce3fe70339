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
    """Issue steps FROM..TO of the groups of products that make a block's scores, each when its columns have come.

    A step is GRAIN pieces of 64 columns, the last the rope. First comes the half that is loaded first; step 0 overwrites `s`.
    """
    tiles, _, barriers = shared
    queries, left, right, rope = tiles
    full = barriers[1]
    STEPS: gl.constexpr = 8 // GRAIN
    wide = queries[0]._reinterpret(left.dtype, [STEPS, 64, 64 * GRAIN], left.layout)
    left = left._reinterpret(left.dtype, [STEPS, 64, 64 * GRAIN], left.layout)
    right = right._reinterpret(right.dtype, [STEPS, 64, 64 * GRAIN], left.layout)
    z = _zero()
    for step in gl.static_range(FROM, TO):
        if step == STEPS:
            mbarrier.wait(full[BLOCK * (STEPS + 1) + STEPS], phase)
            keys = rope.index(BLOCK + z).permute((1, 0))
            s = warpgroup_mma(queries[1], keys, s, is_async=True)
        else:
            s = _score(
                wide, left, right, full, phase, s, z, step, (step + STEPS // 2 * BLOCK) % STEPS, BLOCK, STEPS
            )
    return s


@gluon.jit
def _score(
    queries,
    left,
    right,
    full,
    phase,
    s,
    z,
    STEP: gl.constexpr,
    PART: gl.constexpr,
    BLOCK: gl.constexpr,
    STEPS: gl.constexpr,
):
    mbarrier.wait(full[BLOCK * (STEPS + 1) + PART], phase)
    if PART < STEPS // 2:
        keys = left.index(BLOCK * (STEPS // 2) + PART + z)
    else:
        keys = right.index(BLOCK * (STEPS // 2) + PART - STEPS // 2 + z)
    return warpgroup_mma(queries.index(PART + z), keys.permute((1, 0)), s, use_acc=STEP > 0, is_async=True)


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
def _ancestors(tile, sizes, tree, tree_block, LAYOUT: gl.constexpr):
    """Which slots of a block of the tree each row sees, as bits; all of a block before it."""
    b, _, n, tile_row, _, _ = tile
    _, T, H, _ = sizes
    ancestors, words = tree
    row = tile_row + gl.arange(0, 64, layout=LAYOUT)
    slot = gl.minimum(row // H, T - 1)
    to = (b * T + slot).to(gl.int64) * words + tree_block
    return gl.load(ancestors + to, mask=(row < n * H) & (tree_block >= 0), other=-1)


@gluon.jit
def fetch_masks(tree, b, n, tile_row, sizes):
    """Have what `hide` will read of a tile's slots brought into L1."""
    _, T, H, _ = sizes
    ancestors, words = tree
    row = tile_row + gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    slot = gl.minimum(row // H, T - 1)
    for word in range((n + 63) // 64):
        at = ancestors + (b * T + slot).to(gl.int64) * words + word
        gl.inline_asm_elementwise(
            "prefetch.global.L1 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def hide(s, i, tile, sizes, tree):
    """Scores with -inf where a row must not see a key."""
    _, prefix, n, _, _, _ = tile
    if i >= prefix // 64:
        word = _ancestors(tile, sizes, tree, i - (prefix + 63) // 64, gl.SliceLayout(1, s.type.layout))
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
def rescale(acc, factor):
    """Rows of an accumulator times their factors; a warp whose factors are all 1 skips it."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, acc.type.layout))[:, None]
    asm: gl.constexpr = _skipped_product(64)
    return gl.inline_asm_elementwise(asm[0], asm[1], [acc, factor], dtype=gl.float32, is_pure=False, pack=64)


@gluon.jit
def exp2_less(x, less):
    """2^(x - less), less per row. Half of the powers are of x, computed before `less` is known, which is mostly 0."""
    asm: gl.constexpr = _guessed_exp2(32)
    return gl.inline_asm_elementwise(
        asm[0], asm[1], [x, less[:, None]], dtype=gl.float32, is_pure=False, pack=32
    )


@gluon.constexpr_function
def _skipped_product(n):
    return _by_rows(n, "0f3F800000", "", " ".join(f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)), "")


@gluon.constexpr_function
def _guessed_exp2(n):
    half = n // 2
    guesses = " ".join(f"ex2.approx.ftz.f32 g{i}, ${i};" for i in range(half))
    redo = " ".join(f"sub.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    again = " ".join(f"ex2.approx.ftz.f32 g{i}, ${i};" for i in range(half))
    rest = " ".join(f"ex2.approx.ftz.f32 ${i}, ${i};" for i in range(half, n))
    taken = " ".join(f"mov.f32 ${i}, g{i};" for i in range(half))
    return _by_rows(n, "0f00000000", f".reg .f32 g<{half}>; {guesses}", f"{redo} {again}", f"{rest} {taken}")


@gluon.constexpr_function
def _by_rows(n, neutral, before, unless_neutral, after):
    """PTX and constraints: n numbers of a thread, changed in place ($i), and as many operands of their rows ($(2n + i)).

    `unless_neutral` is skipped by a warp whose operands are all neutral. Pairs of numbers belong alternately to two rows.
    """
    asm = (
        f"{{ .reg .pred other, any; {before} "
        f"setp.neu.f32 other, ${2 * n}, {neutral}; setp.neu.or.f32 other, ${2 * n + 2}, {neutral}, other; "
        f"vote.sync.any.pred any, other, -1; @!any bra same; {unless_neutral} same: {after} }}"
    )
    constraints = ["=f"] * n + [str(i) for i in range(n)] + ["f"] * n
    return asm, ",".join(constraints)
