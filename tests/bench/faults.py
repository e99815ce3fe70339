"""A kernel that doubles numbers, with an implementation for every way to fail. Loaded with `--extra-module`."""

from __future__ import annotations

import ctypes
import itertools
import random
import time

import numpy as np

from draftwood.kernels.case import compare_exact, make_case, require

KERNEL = "double"
DEFAULTS = {"n": 8, "broken": 0, "dtype": "float32"}
FLOATS = ("x",)
CACHE = "warm"
CALLS = itertools.count()


def small():
    return [make_case(KERNEL, DEFAULTS, n=n) for n in (8, 16)]


def bench():
    return [make_case(KERNEL, DEFAULTS, n=n) for n in (1000, 2000, 4000)]


def make(case):
    x = case.rng.standard_normal(case["n"]).astype(np.float32)
    if case["broken"]:
        x[3] = np.nan
    return {"x": x}


def check(case, inputs):
    bad = np.flatnonzero(~np.isfinite(inputs["x"]))
    require(not len(bad), f"`x` element {bad[:1]}: must be finite")


def flops(case):
    return case["n"]


def bytes_moved(case):
    return 8 * case["n"]


def compare(case, got, want):
    compare_exact("out", got, want)


def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def ref(x):
    return x * 2


def torch_impl(x):
    busy(2e-4)
    return x * 2


def hang(x):
    while True:
        time.sleep(1)


def segfault(x):
    return ctypes.string_at(0)


def wrong(x):
    return x * 2 + (x > 1)


def unwritten(x):
    out = x.new_empty(x.shape)
    out[1:] = x[1:] * 2
    return out


def bimodal(x):
    """About 1 or about 3 ms, drawn anew every six calls: as long as a visit."""
    draw = random.Random(next(CALLS) // 6)
    busy(draw.choice((1e-3, 3e-3)) * draw.uniform(0.7, 1.4))
    return x * 2


def grows(x):
    """A thousand times dearer on one case."""
    busy(0.3 if len(x) == 4000 else 3e-4)
    return x * 2


def raises(x):
    raise RuntimeError("no such tile")


def unsupported(x):
    raise NotImplementedError("odd sizes")


IMPLEMENTATIONS = {
    "ref": ref,
    "torch": torch_impl,
    "hang": hang,
    "segfault": segfault,
    "wrong": wrong,
    "unwritten": unwritten,
    "bimodal": bimodal,
    "grows": grows,
    "raises": raises,
    "unsupported": unsupported,
}
