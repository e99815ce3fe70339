"""mla_inputs in Triton: of every row one program for the latent and the key, and one per group of heads for the queries."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.triton_rows import check_contiguous, check_rows, inverse_rms, partner, warps, wide

_TILE = 1024  # numbers of queries per program
_EACH = 8  # numbers per thread


def mla_inputs(
    q_rope: Tensor,
    k_rope: Tensor,
    latent: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_norm: Tensor,
    eps: float,
    q: Tensor,
    latents: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `draftwood.kernels.mla_inputs.mla_inputs`. Raises `ValueError` where numbers of a row or head, or all of `q` or
    `latents`, are not contiguous."""
    check_rows(q_rope=q_rope, k_rope=k_rope, latent=latent)
    check_contiguous(q=q, latents=latents)
    (N, H, P), R = q_rope.shape, latent.shape[1]
    constexprs, num_warps = _config(H, R, P)
    _fill[(N, 1 + triton.cdiv(H, constexprs["HEADS"]))](
        *(q_rope, k_rope, latent, cos.contiguous(), sin.contiguous(), kv_norm, q, latents),
        *(q_rope.stride(0), q_rope.stride(1), k_rope.stride(0), latent.stride(0)),
        **constexprs,
        EPS=eps,
        num_warps=num_warps,
    )
    return q, latents


def _config(H: int, R: int, P: int) -> tuple[dict[str, int], int]:
    """Compile-time arguments and warps."""
    P_PAD, R_PAD = triton.next_power_of_2(P), triton.next_power_of_2(R)
    heads = max(1, min(triton.next_power_of_2(H), _TILE // P_PAD))
    constexprs = {"H": H, "R": R, "P": P, "HEADS": heads, "R_PAD": R_PAD, "P_PAD": P_PAD}
    return constexprs, warps(max(R_PAD, heads * P_PAD), _EACH)


# Where a layer's latents begin depends on the number of rows: whether that is a multiple of 16 bytes must change nothing.
@triton.jit(do_not_specialize_on_alignment=["latents"])
def _fill(
    q_rope,  # [N, H, P]
    k_rope,  # [N, P]
    latent,  # [N, R]
    cos,  # [N, P]
    sin,
    kv_norm,  # [R]
    q,  # [N, H, R + P]
    latents,  # [N, R + P]
    q_rope_n,
    q_rope_h,
    k_rope_n,
    latent_n,
    H: tl.constexpr,
    R: tl.constexpr,
    P: tl.constexpr,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    R_PAD: tl.constexpr,
    P_PAD: tl.constexpr,
):
    dtype = q.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, P_PAD)
    inside = p < P
    c = tl.load(cos + n * P + p, mask=inside, other=0.0)
    s = tl.load(sin + n * P + p, mask=inside, other=0.0)
    if tl.program_id(1) == 0:
        out = latents + n * (R + P)
        k = wide(tl.load(k_rope + n * k_rope_n + p, mask=inside, other=0.0))
        k_other = wide(tl.load(k_rope + n * k_rope_n + partner(p, P), mask=inside, other=0.0))
        tl.store(out + R + p, (k * c + k_other * s).to(dtype), mask=inside)
        r = tl.arange(0, R_PAD)
        w = wide(tl.load(kv_norm + r, mask=r < R, other=0.0))
        row = wide(tl.load(latent + n * latent_n + r, mask=r < R, other=0.0))
        row = wide((row * inverse_rms(row, R, EPS)).to(dtype))
        tl.store(out + r, (row * w).to(dtype), mask=r < R)
    else:
        h = (tl.program_id(1) - 1) * HEADS + tl.arange(0, HEADS)[:, None]
        mask = (h < H) & inside[None, :]
        source = q_rope + n * q_rope_n + h * q_rope_h
        x = wide(tl.load(source + p[None, :], mask=mask, other=0.0))
        other = wide(tl.load(source + partner(p, P)[None, :], mask=mask, other=0.0))
        turned = x * c[None, :] + other * s[None, :]
        tl.store(q + (n * H + h) * (R + P) + R + p[None, :], turned.to(dtype), mask=mask)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`. The same on every chip, so two will do."""
    if capability not in (80, 90):
        return []
    H, R, P, Q = 64, 512, 64, 1536
    constexprs, num_warps = _config(H, R, P)
    tensors = ("q_rope", "k_rope", "latent", "kv_norm", "q", "latents")
    arguments: dict[str, str | int] = {**dict.fromkeys(tensors, "*bf16"), "cos": "*fp32", "sin": "*fp32"}
    arguments |= {"q_rope_n": H * 192, "q_rope_h": P, "k_rope_n": Q + R + P, "latent_n": Q + R + P}
    return [CompileCase("K2.6", _fill, arguments, {**constexprs, "EPS": 1e-6}, num_warps)]
