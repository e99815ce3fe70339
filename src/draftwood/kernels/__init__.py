"""The kernels of one decoding round, a folder each: contract, numpy reference, implementations, cases.

`load_kernels` chooses one implementation of each kernel for a device, once; the engine passes the result around.
"""

from draftwood.kernels.registry import (
    IMPLEMENTATIONS,
    KERNELS,
    Choice,
    Kernels,
    KernelUnavailableError,
    load_kernels,
)

__all__ = ["IMPLEMENTATIONS", "KERNELS", "Choice", "KernelUnavailableError", "Kernels", "load_kernels"]
