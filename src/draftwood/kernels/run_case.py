"""Run one case through one implementation, and say whether it agrees with the reference.

The only place where cases become tensors and outputs become arrays; tests, benches and debug mode call it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import numpy as np

from draftwood.kernels.case import Case
from draftwood.kernels.registry import load
from draftwood.kernels.rounding import Repeated
from draftwood.kernels.specialised import is_specialised, refusal

IN_PLACE = {
    "commit_kv": ("pages",),
    "keep_features": ("ring", "first", "count"),
    "advance": ("root", "prefix_len", "max_new", "context_left", "live"),
}
"""Kernels that write some of their inputs: those, then what is returned if anything is, are the outputs compared."""


def cases_of(kernel: str) -> ModuleType:
    """The kernel's `cases` module (see `draftwood.kernels.case` for what it offers)."""
    return import_module(f"draftwood.kernels.{kernel}.cases")


def refused(case: Case, impl: str, capability: int) -> str | None:
    """Why an implementation does not serve a case on a chip; None if it does."""
    cases = cases_of(case.kernel) if is_specialised(case.kernel, impl) else None
    return None if cases is None else refusal(case.kernel, impl, cases.use(case, capability))


def to_torch(value: Any, device: str, dtype: str | None = None) -> Any:
    """Numpy arrays, and dataclasses of them, as tensors on `device`; floats are cast to `dtype` if given."""
    import torch

    if isinstance(value, Repeated):
        return whole(parts_to_torch(value, device, dtype))
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: to_torch(getattr(value, f.name), device) for f in fields(value)})
    if not isinstance(value, np.ndarray):
        return value
    tensor = torch.from_numpy(np.ascontiguousarray(value)).to(device)
    if dtype is not None:
        tensor = tensor.to(getattr(torch, dtype))
    # in-place kernels must not write the case's own arrays
    return tensor.clone() if tensor.data_ptr() == value.ctypes.data else tensor


def parts_to_torch(value: Repeated, device: str, dtype: str | None = None) -> Repeated:
    """The same of tensors, still in parts."""
    assigned = ((to_torch(mask, device), to_torch(row, device, dtype)) for mask, row in value.assigned)
    return Repeated(to_torch(value.block, device, dtype), value.shape, tuple(assigned))


def whole(parts: Repeated) -> Any:
    """The tensor, on the device where its parts are."""
    size = math.prod(parts.shape)
    out = parts.block.repeat(-(-size // len(parts.block)))[:size].view(parts.shape)
    for mask, row in parts.assigned:
        out[mask] = row
    return out


def arrays_of(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs for the reference: whole, and its own."""
    return {k: np.array(v) if isinstance(v, np.ndarray | Repeated) else v for k, v in inputs.items()}


def to_numpy(value: Any) -> Any:
    """The reverse; bf16 and fp16 become f32, which is exact."""
    if is_dataclass(value) and not isinstance(value, type):
        return type(value)(**{f.name: to_numpy(getattr(value, f.name)) for f in fields(value)})
    if isinstance(value, tuple):
        return tuple(to_numpy(v) for v in value)
    if hasattr(value, "cpu"):
        value = value.detach().cpu()
        return (value.float() if value.element_size() == 2 and value.is_floating_point() else value).numpy()
    return value


def torch_inputs(case: Case, inputs: Mapping[str, Any], device: str) -> dict[str, Any]:
    """The case's inputs as tensors, those named in FLOATS in the case's dtype."""
    cases = cases_of(case.kernel)
    axes = dict(case.axes)
    dtype = str(axes["dtype"]) if "dtype" in axes else None
    return {k: to_torch(v, device, dtype if k in cases.FLOATS else None) for k, v in inputs.items()}


def run(case: Case, inputs: Mapping[str, Any], impl: str, device: str = "cpu") -> Any:
    """Outputs as numpy, of `impl` on `inputs`; the reference always runs on numpy. Inputs are left unchanged."""
    function = load(case.kernel, impl)
    if impl == "ref":
        arguments = arrays_of(inputs)
        out = function(**arguments)
    else:
        arguments = torch_inputs(case, inputs, device)
        with poisoned_memory():
            out = function(**arguments)
    return to_numpy(outputs(case.kernel, arguments, out))


def outputs(kernel: str, arguments: Mapping[str, Any], returned: Any) -> Any:
    """What a call has written and returned, one output or a tuple."""
    if kernel not in IN_PLACE:
        return returned
    every = (*(arguments[name] for name in IN_PLACE[kernel]), *(() if returned is None else (returned,)))
    return every if len(every) > 1 else every[0]


def verify(case: Case, impl: str, device: str = "cpu") -> None:
    """Raise `CaseError` if the inputs are unsound, `Mismatch` if `impl` differs from the reference."""
    cases = cases_of(case.kernel)
    inputs = cases.make(case)
    cases.check(case, inputs)
    cases.compare(case, run(case, inputs, impl, device), run(case, inputs, "ref"))


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` and relatives return NaN or a large number, so that an output left unwritten shows."""
    import torch

    names = ("empty", "empty_like", "empty_strided")
    originals = {name: getattr(torch, name) for name in names}
    new_empty = torch.Tensor.new_empty

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return tensor.fill_(float("nan"))
        return tensor.fill_(True if tensor.dtype == torch.bool else torch.iinfo(tensor.dtype).max - 7)

    try:
        for name, original in originals.items():
            setattr(torch, name, lambda *a, _f=original, **k: poison(_f(*a, **k)))
        torch.Tensor.new_empty = lambda *a, **k: poison(new_empty(*a, **k))  # type: ignore[method-assign]
        yield
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)
        torch.Tensor.new_empty = new_empty  # type: ignore[method-assign]
