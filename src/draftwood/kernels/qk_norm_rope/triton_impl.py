"""qk_norm_rope in Triton: a program per layer, row and group of heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftwood.kernels.compile_case import CompileCase
from draftwood.kernels.triton_rows import check_rows, inverse_rms, partner, warps, wide

_TILE = 1024  # numbers per program
_EACH = 8  # numbers per thread


def qk_norm_rope(
    x: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    eps: float,
    n_q: int,
    *,
    n_v: int = 0,
) -> Tensor:
    """See `draftwood.kernels.qk_norm_rope.qk_norm_rope`. Raises `ValueError` where the numbers of a head are not contiguous."""
    check_rows(x=x)
    L, N, H, hd = x.shape
    out = torch.empty((L, N, H, hd), dtype=x.dtype, device=x.device)
    constexprs, num_warps = _config(H, hd, n_q, n_v)
    k_norm = k_norm.contiguous()
    weights = k_norm if q_norm is None else q_norm, k_norm
    _norm_and_rotate[(N, L, triton.cdiv(H, constexprs["HEADS"]))](
        *(x, *weights, cos.contiguous(), sin.contiguous(), out, N, *x.stride()[:3]),
        **constexprs,
        EPS=eps,
        num_warps=num_warps,
    )
    return out


def _config(H: int, hd: int, n_q: int, n_v: int) -> tuple[dict[str, int], int]:
    """Compile-time arguments and warps."""
    pad = triton.next_power_of_2(hd)
    heads = max(1, min(triton.next_power_of_2(H), _TILE // pad))
    return {"H": H, "HD": hd, "N_Q": n_q, "N_V": n_v, "HEADS": heads, "HD_PAD": pad}, warps(
        heads * pad, _EACH
    )


@triton.jit(do_not_specialize=["N"])
def _norm_and_rotate(
    x,  # [L, N, H, HD]
    q_norm,  # [HD]
    k_norm,  # [L, HD]
    cos,  # [N, HD]
    sin,
    out,  # [L, N, H, HD]
    N,
    x_l,
    x_n,
    x_h,
    H: tl.constexpr,
    HD: tl.constexpr,
    N_Q: tl.constexpr,
    N_V: tl.constexpr,
    EPS: tl.constexpr,
    HEADS: tl.constexpr,
    HD_PAD: tl.constexpr,
):
    dtype = out.dtype.element_ty
    n = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    h = tl.program_id(2) * HEADS + tl.arange(0, HEADS)[:, None]
    p = tl.arange(0, HD_PAD)[None, :]
    other = partner(p, HD)
    inside = p < HD
    mask = (h < H) & inside
    c = tl.load(cos + n * HD + p, mask=inside, other=0.0)
    s = tl.load(sin + n * HD + p, mask=inside, other=0.0)
    keys = k_norm + layer * HD
    w = wide(tl.load(keys + p, mask=inside, other=0.0))
    w_other = wide(tl.load(keys + other, mask=inside, other=0.0))
    if N_Q > 0:
        is_q = h < N_Q
        w = tl.where(is_q, wide(tl.load(q_norm + p, mask=inside, other=0.0)), w)
        w_other = tl.where(is_q, wide(tl.load(q_norm + other, mask=inside, other=0.0)), w_other)
    source = x + layer * x_l + n * x_n + h * x_h
    own = wide(tl.load(source + p, mask=mask, other=0.0))
    paired = wide(tl.load(source + other, mask=mask, other=0.0))
    scale = inverse_rms(own, HD, EPS)
    own = wide((wide((own * scale).to(dtype)) * w).to(dtype))
    paired = wide((wide((paired * scale).to(dtype)) * w_other).to(dtype))
    place = out + ((layer * N + n) * H + h) * HD + p
    turned = (own * c + paired * s).to(dtype)
    if N_V > 0:
        turned = tl.where(h < H - N_V, turned, tl.load(source + p, mask=mask, other=0.0))
    tl.store(place, turned, mask=mask)


def compile_cases(capability: int) -> list[CompileCase]:
    """See `draftwood.kernels.compile_case`. The same on every chip, so two will do."""
    if capability not in (80, 90):
        return []
    n_q, n_kv, hd = 64, 8, 128
    constexprs, num_warps = _config(n_q + n_kv, hd, n_q, 0)
    arguments: dict[str, str | int] = {**dict.fromkeys(("x", "q_norm", "k_norm", "out"), "*bf16")}
    arguments |= {"cos": "*fp32", "sin": "*fp32", "N": "i32"}
    width = (n_q + 2 * n_kv) * hd
    arguments |= {"x_l": 8 * width, "x_n": width, "x_h": hd}
    return [CompileCase("K2.6", _norm_and_rotate, arguments, {**constexprs, "EPS": 1e-6}, num_warps)]
