"""Every Triton configuration compiles for every chip, fits its shared memory and keeps its values in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftwood.kernels.compile_case import CAPABILITIES, SHARED_LIMIT
from draftwood.kernels.registry import BETWEEN_PRODUCTS, KERNELS, exists

SCRIPT = Path(__file__).parents[1] / "support" / "triton_compile.py"


@pytest.mark.parametrize(
    ("kernel", "impl"),
    [
        *((k, "triton") for k in KERNELS if exists(k, "triton") and k not in BETWEEN_PRODUCTS),
        (",".join(BETWEEN_PRODUCTS), "triton"),  # small ones: starting takes longer than compiling
        pytest.param("verify_attn", "triton_fixed", marks=pytest.mark.slow),
    ],
)
def test_fits_every_chip(kernel, impl, tmp_path):
    facts = compiled(tmp_path, kernel, impl)
    assert {f["capability"] for f in facts} == set(CAPABILITIES)
    assert_fits(facts)


@pytest.mark.slow
def test_gluon_fits_hopper(tmp_path):
    facts = compiled(tmp_path, "verify_attn", "gluon")
    assert {f["capability"] for f in facts} == {90}
    assert_fits(facts)
    assert [f for f in facts if f["serialised"]] == []


def compiled(cache, *arguments):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_fits(facts):
    assert [f for f in facts if f["shared"] > SHARED_LIMIT[f["capability"]]] == []
    assert [f for f in facts if f["stack"] > 0 and (not f["hot"] or any(map(spills, f["hot"])))] == []
    for fault in ("register_a", "one_address", "one_buffer"):
        assert [f for f in facts if f[fault]] == []


def spills(loop):
    """A hot loop may reload a few values that do not change in it, and stores none."""
    return loop["spills"] > 0 or loop["reloads"] > loop["instructions"] / 50
