"""CUDA C++ compiled at run time: source to cubin with NVRTC, kept where Triton keeps its kernels, and launches of it.

`cuda.bindings` and NVRTC come with torch's wheels for CUDA. What is here is what a launch with clusters, tensor maps and programmatic
dependence needs; it knows no kernel.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from torch import Tensor
from triton.runtime.cache import get_cache_manager


class CudaError(RuntimeError):
    """What the driver or the compiler says."""


@cache
def compile_cubin(sources: tuple[Path, ...], options: tuple[str, ...]) -> bytes:
    """Machine code of files one after another, which include no others. Raises `CudaError` with the compiler's log."""
    text = joined(sources)
    key = hashlib.sha256(repr((text, options, version())).encode()).hexdigest()
    kept = get_cache_manager(key)
    path = kept.get_file("kernel.cubin")
    if path is not None:
        return Path(path).read_bytes()
    cubin, _ = compile_logged(text, sources[-1].name, options)
    kept.put(cubin, "kernel.cubin")
    return cubin


def joined(sources: Sequence[Path]) -> bytes:
    """Text of files one after another, in which the compiler's messages name each."""
    return b"\n".join(b'#line 1 "%s"\n%s' % (path.name.encode(), path.read_bytes()) for path in sources)


def version() -> tuple[int, int]:
    """Of NVRTC. Raises `RuntimeError` where it isn't to be found."""
    return checked(nvrtc.nvrtcVersion())  # type: ignore[no-any-return]


def compile_logged(text: bytes, name: str, options: Sequence[str]) -> tuple[bytes, str]:
    """Machine code and the compiler's log. Raises `CudaError` with that."""
    program = checked(nvrtc.nvrtcCreateProgram(text, name.encode(), 0, [], []))
    try:
        flags = [option.encode() for option in options]
        failed = nvrtc.nvrtcCompileProgram(program, len(flags), flags)[0]
        log = _bytes(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode().rstrip("\0")
        if failed:
            raise CudaError(f"{name} {' '.join(options)}: {log}")
        return _bytes(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log
    finally:
        checked(nvrtc.nvrtcDestroyProgram(program))


def _bytes(size: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
    to = bytes(checked(size(program)))  # filled in place, as `cuda.bindings` has it
    checked(get(program, to))
    return to


@contextmanager
def context_of(device: torch.device) -> Iterator[None]:
    """Make a device's primary context current. torch leaves that to its own first launch in a thread; the driver asks for it."""
    with torch.cuda.device(device):
        if not int(checked(driver.cuCtxGetCurrent())):
            checked(driver.cuCtxSetCurrent(checked(driver.cuDevicePrimaryCtxRetain(device.index))))
        yield


class CudaKernel:
    """A kernel of one device's context, with `shared` bytes of shared memory, in clusters of any size."""

    def __init__(self, cubin: bytes, name: str, threads: int, shared: int) -> None:
        self._module = checked(driver.cuModuleLoadData(cubin))
        self._function = checked(driver.cuModuleGetFunction(self._module, name.encode()))
        self.threads, self.shared = threads, shared
        attributes = driver.CUfunction_attribute
        for attribute, value in (
            (attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared),
            (attributes.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1),
        ):
            checked(driver.cuFuncSetAttribute(self._function, attribute, value))

    def resident_clusters(self, cluster: int) -> int:
        """How many clusters of a size the chip holds at once."""
        config = self._config((cluster, 1), cluster, 0)
        return int(checked(driver.cuOccupancyMaxActiveClusters(self._function, config)))

    def launch(self, blocks: tuple[int, int], cluster: int, arguments: Sequence[Any]) -> None:
        """Launch on torch's current stream; ahead of what precedes it there, for which the kernel itself waits.

        Arguments are tensors, tensor maps and numbers of `ctypes`.
        """
        held = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, Tensor) else a for a in arguments]
        addresses = [a.getPtr() if isinstance(a, driver.CUtensorMap) else ctypes.addressof(a) for a in held]
        parameters = (ctypes.c_void_p * len(addresses))(*addresses)
        config = self._config(blocks, cluster, torch.cuda.current_stream().cuda_stream)
        checked(driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(parameters), 0))

    def _config(self, blocks: tuple[int, int], cluster: int, stream: int) -> driver.CUlaunchConfig:
        ids = driver.CUlaunchAttributeID
        size, ahead = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        size.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size.value.clusterDim.x, size.value.clusterDim.y, size.value.clusterDim.z = cluster, 1, 1
        ahead.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        ahead.value.programmaticStreamSerializationAllowed = 1
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *blocks, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = self.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.shared, stream
        config.attrs, config.numAttrs = [size, ahead], 2
        return config


def tensor_map(rows: Tensor, box_rows: int, box_chunks: int) -> driver.CUtensorMap:
    """Of bf16 `rows` [n, columns] as chunks of 64 columns: boxes of chunks x rows x 64, swizzled by 128 bytes; zeros past the end.

    It holds an address, and keeps no memory alive. Raises `TypeError` for another dtype.
    """
    if rows.dtype != torch.bfloat16:
        raise TypeError(f"tensor map: expected bfloat16, got {rows.dtype}")
    n, columns = rows.shape
    return checked(
        driver.cuTensorMapEncodeTiled(
            driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            3,
            rows.data_ptr(),
            [driver.cuuint64_t(x) for x in (64, n, columns // 64)],
            [driver.cuuint64_t(x) for x in (2 * columns, 128)],
            [driver.cuuint32_t(x) for x in (64, box_rows, box_chunks)],
            [driver.cuuint32_t(1)] * 3,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )


def checked(answer: tuple[Any, ...]) -> Any:
    """What a call of `cuda.bindings` returned. Raises `CudaError` where that is an error."""
    error, *values = answer
    if error:
        raise CudaError(f"{error!r}")
    return values[0] if len(values) == 1 else tuple(values)
