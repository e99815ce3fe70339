"""Implementations made for some uses only: which ones, and why not others. Imports neither torch nor Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Use:
    """What a target's attention is wanted for, and on which chip."""

    capability: int  # as Triton writes it: 90 for compute capability 9.0
    dtype: str  # as torch names it: "bfloat16"
    value_dim: int
    rope_dim: int
    page: int


def refusal(kernel: str, impl: str, use: Use) -> str | None:
    """Why an implementation does not serve a use; None if it does, as do all that are made for any use."""
    rule = _RULES.get((kernel, impl))
    return None if rule is None else rule(use)


def is_specialised(kernel: str, impl: str) -> bool:
    return (kernel, impl) in _RULES


def _hopper(use: Use, dtypes: tuple[str, ...] = ("bfloat16",)) -> str | None:
    """What all attention made for Hopper asks for."""
    if use.capability != 90:
        return f"needs compute capability 9.0, this is {use.capability / 10}"
    if use.dtype not in dtypes:
        return f"takes {' and '.join(dtypes)}, not {use.dtype}"
    if (use.value_dim, use.rope_dim) != (512, 64):
        return f"takes latents of 512 + 64, not {use.value_dim} + {use.rope_dim}"
    if use.page not in (16, 32, 64):
        return f"takes pages of 16, 32 and 64, not {use.page}"
    return None


def _gluon_attention(use: Use) -> str | None:
    triton = _version("triton") or "not installed"
    other = f"is written for Triton 3.6, whose Gluon others do not understand; this is {triton}"
    return _hopper(use) or (None if triton == "3.6" else other)


def _cuda_attention(use: Use) -> str | None:
    missing = "needs the package cuda-bindings, which torch's wheels for CUDA bring along"
    return _hopper(use) or (_missing_compiler() if _version("cuda-bindings") else missing)


def _attention_by_shape(use: Use) -> str | None:
    for impl, rule in (("cuda", _cuda_attention), ("gluon", _gluon_attention)):
        if why_not := rule(use):
            return f"is cuda or gluon by shape, and {impl} {why_not}"
    return None


def _flash_mla(use: Use) -> str | None:
    """Its dense decode, that is; what it has for other chips is for sparse attention."""
    if use.page != 64:
        return f"takes pages of 64, not {use.page}"
    missing = "needs the package flash_mla, built from deepseek-ai/FlashMLA"
    return _hopper(use, ("bfloat16", "float16")) or (None if _version("flash_mla") else missing)


_RULES: Mapping[tuple[str, str], Callable[[Use], str | None]] = {
    ("verify_attn", "gluon"): _gluon_attention,
    ("verify_attn", "cuda"): _cuda_attention,
    ("verify_attn", "hopper"): _attention_by_shape,
    ("verify_attn", "flash_mla"): _flash_mla,
}


@cache
def _missing_compiler() -> str | None:
    """Why nothing can be compiled at run time, if so."""
    try:
        from cuda.bindings import nvrtc

        error, *_ = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as e:  # the bindings are there without their library
        return f"needs NVRTC: {e}"
    return f"needs NVRTC: {error!r}" if error else None


@cache
def _version(package: str) -> str | None:
    """Of an installed package, without what comes after the second number."""
    try:
        return ".".join(version(package).split(".")[:2])
    except PackageNotFoundError:
        return None
