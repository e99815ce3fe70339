"""Which implementation of a kernel runs: chosen once per device and use, never per call, and always with a reason.

An implementation asked for by name that cannot load raises. The automatic choice takes the first one in the
device's order that exists; a module that exists and fails to import is an error, not a reason to fall back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from draftwood.kernels.specialised import Use, is_specialised, refusal

BETWEEN_PRODUCTS = ("add_rms_norm", "mla_inputs", "silu_mul", "qk_norm_rope", "rotary")
"""Kernels of the layers that go over numbers once, between matrix products: in torch a chain of operations that has a gradient."""

KERNELS = (
    "topk_logprobs",
    "tree_build",
    "verify_attn",
    "sample",
    "tree_accept",
    "commit_kv",
    "draft_attn",
    "moe",
    "moe_int4",
    "linear",
    "embed",
    "path_features",
    "keep_features",
    "advance",
    *BETWEEN_PRODUCTS,
)

IMPLEMENTATIONS = {
    "ref": "ref",
    "torch": "torch_impl",
    "triton": "triton_impl",
    "gluon": "gluon_impl",
    "cuda": "cuda_impl",
    "hopper": "hopper_impl",
    "flash_mla": "flash_mla_impl",
    "torch_fixed": "torch_fixed",
    "triton_fixed": "triton_fixed",
}
"""Implementation name -> module in the kernel's folder, holding a function named like the kernel.

What is fixed is the order of sums: a row's result is the same bit for bit whatever other rows there are.
"""

DEPENDENT = ("verify_attn", "moe", "moe_int4", "add_rms_norm", "mla_inputs", "silu_mul", "rotary")
"""Kernels of the target with ordinary implementations whose results for a row depend on the batch. `linear` never does; the
others choose, copy or draft, and no choice depends on a draft."""

BY_ROW = tuple((kernel, "triton") for kernel in BETWEEN_PRODUCTS if kernel in DEPENDENT)
"""Ordinary implementations of these that compute every row by itself, so that they serve deterministic mode too."""

ORDER = {"cpu": ("torch",), "cuda": ("hopper", "gluon", "triton", "torch")}
"""What is chosen on a device, best first. An implementation that is not here, such as "cuda", runs only where it is asked for by name."""

_FIXED_ORDER = {"cpu": ("torch_fixed",), "cuda": ("triton_fixed", "triton", "torch_fixed")}
_FOR_HOPPER = "made for this GPU, bfloat16 and latents of 512 + 64"
_WHY = {
    ("cpu", "torch"): "runs anywhere; triton needs a GPU",
    ("cuda", "hopper"): f"{_FOR_HOPPER}: few tiles in CUDA C++, others in Gluon",
    ("cuda", "gluon"): _FOR_HOPPER,
    ("cuda", "triton"): "the fastest there is for this GPU",
    ("cuda", "torch"): "no triton implementation yet",
    ("cpu", "torch_fixed"): "deterministic: the order of sums is fixed",
    ("cuda", "triton_fixed"): "deterministic: the order of sums is fixed",
    ("cuda", "torch_fixed"): "deterministic: the order of sums is fixed; no triton implementation yet",
}

_WHY_BY_ROW = "deterministic: every row is computed by itself"


class KernelUnavailableError(RuntimeError):
    """The implementation asked for does not exist or cannot be loaded on this machine."""


@dataclass(frozen=True)
class Choice:
    """One kernel's implementation and why it was taken."""

    kernel: str
    impl: str
    reason: str
    function: Callable[..., Any] = field(repr=False)


@cache
def load(kernel: str, impl: str) -> Callable[..., Any]:
    """The function `kernel` of implementation `impl`. Raises `KernelUnavailableError` naming both."""
    if kernel not in KERNELS:
        raise KernelUnavailableError(f"unknown kernel `{kernel}`; known: {', '.join(KERNELS)}")
    if impl not in IMPLEMENTATIONS:
        raise KernelUnavailableError(
            f"unknown implementation `{impl}` for kernel `{kernel}`; known: {', '.join(IMPLEMENTATIONS)}"
        )
    if not exists(kernel, impl):
        raise KernelUnavailableError(f"kernel `{kernel}` has no implementation `{impl}`")
    try:
        module = import_module(_module(kernel, impl))
    except ImportError as e:
        raise KernelUnavailableError(f"kernel `{kernel}`, implementation `{impl}` cannot load: {e}") from e
    function: Callable[..., Any] = getattr(module, kernel)
    return function


def load_slices(kernel: str, impl: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`partial` and `merge` of a kernel that takes slices of the vocabulary. Raises as `load` does."""
    load(kernel, impl)
    module = import_module(_module(kernel, impl))
    return module.partial, module.merge


@cache
def exists(kernel: str, impl: str) -> bool:
    """Whether the package has this implementation at all (it may still fail to load here)."""
    return find_spec(_module(kernel, impl)) is not None


def choose(
    kernel: str,
    device: str,
    requested: str | None = None,
    *,
    deterministic: bool = False,
    use: Use | None = None,
) -> Choice:
    """Choose for `device` ("cpu" or "cuda"). What serves some uses only is chosen for a known `use`.

    Raises `KernelUnavailableError` if `requested` cannot be had, does not serve the use, or is not deterministic where that
    is wanted.
    """
    fixed = deterministic and kernel in DEPENDENT
    if requested is not None:
        if use is not None and (why_not := refusal(kernel, requested, use)):
            raise KernelUnavailableError(f"kernel `{kernel}`, implementation `{requested}` {why_not}")
        function = load(kernel, requested)
        if fixed and not _is_fixed(kernel, requested):
            raise KernelUnavailableError(
                f"kernel `{kernel}`, implementation `{requested}` is not deterministic; expected one of: "
                + ", ".join(impl for impl in _FIXED_ORDER["cuda"] if _is_fixed(kernel, impl))
            )
        return Choice(kernel, requested, "asked for by name", function)
    if device not in ORDER:
        raise KernelUnavailableError(f"unknown device `{device}`; expected one of: {', '.join(ORDER)}")
    refused = ""
    for impl in (_FIXED_ORDER if fixed else ORDER)[device]:
        if not exists(kernel, impl) or (fixed and not _is_fixed(kernel, impl)):
            continue
        if is_specialised(kernel, impl):
            why_not = "serves some uses only" if use is None else refusal(kernel, impl, use)
            if why_not:
                refused += f"; {impl} {why_not}"
                continue
        why = _WHY_BY_ROW if fixed and (kernel, impl) in BY_ROW else _WHY[device, impl]
        return Choice(kernel, impl, why + refused, load(kernel, impl))
    raise KernelUnavailableError(f"kernel `{kernel}` has no implementation for {device}")


def by_name_only(kernel: str) -> list[str]:
    """Its implementations for some uses that are never chosen automatically."""
    chosen = {impl for order in ORDER.values() for impl in order}
    return [impl for impl in IMPLEMENTATIONS if is_specialised(kernel, impl) and impl not in chosen]


def for_array(
    kernel: str, array: Any, impl: str | None = None, use: Callable[[], Use] | None = None
) -> Callable[..., Any]:
    """The function for a direct call on `array`: `ref` for numpy, else the choice for the tensor's device and, on a GPU, for
    the use that `use` makes known."""
    if impl is not None:
        return load(kernel, impl)
    if isinstance(array, np.ndarray):
        return load(kernel, "ref")
    known = use() if use is not None and array.device.type == "cuda" else None
    return choose(kernel, array.device.type, use=known).function


@dataclass(frozen=True)
class Kernels:
    """One chosen implementation of each kernel; the attributes are the functions."""

    topk_logprobs: Callable[..., Any]
    tree_build: Callable[..., Any]
    verify_attn: Callable[..., Any]
    sample: Callable[..., Any]
    tree_accept: Callable[..., Any]
    commit_kv: Callable[..., Any]
    draft_attn: Callable[..., Any]
    moe: Callable[..., Any]
    moe_int4: Callable[..., Any]
    linear: Callable[..., Any]
    embed: Callable[..., Any]
    path_features: Callable[..., Any]
    keep_features: Callable[..., Any]
    advance: Callable[..., Any]
    add_rms_norm: Callable[..., Any]
    mla_inputs: Callable[..., Any]
    silu_mul: Callable[..., Any]
    qk_norm_rope: Callable[..., Any]
    rotary: Callable[..., Any]
    choices: tuple[Choice, ...] = ()

    @property
    def recordable(self) -> bool:
        """Whether a CUDA graph can be recorded of them: those made of torch operations may wait for the host."""
        return not any(choice.impl.startswith("torch") for choice in self.choices)


def load_kernels(
    device: str,
    requested: Mapping[str, str] | None = None,
    *,
    deterministic: bool = False,
    use: Use | None = None,
) -> Kernels:
    """Choose every kernel for `device`; `requested` maps kernel names to implementation names, `ref` excepted.

    `use` is what the target wants of its attention. Raises `KernelUnavailableError` for an unknown name, or one that cannot be had.
    """
    requested = requested or {}
    for name in requested:
        if name not in KERNELS:
            raise KernelUnavailableError(f"unknown kernel `{name}`; known: {', '.join(KERNELS)}")
        if requested[name] == "ref":
            raise KernelUnavailableError(
                f"kernel `{name}`: the reference takes numpy arrays, an engine has tensors"
            )
    choices = tuple(
        choose(kernel, device, requested.get(kernel), deterministic=deterministic, use=use)
        for kernel in KERNELS
    )
    return Kernels(**{c.kernel: c.function for c in choices}, choices=choices)


def _is_fixed(kernel: str, impl: str) -> bool:
    return exists(kernel, impl) and (impl.endswith("_fixed") or (kernel, impl) in BY_ROW)


def _module(kernel: str, impl: str) -> str:
    return f"draftwood.kernels.{kernel}.{IMPLEMENTATIONS[impl]}"
