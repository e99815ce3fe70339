"""What the comparison of ranks counts as the same."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "benchmarks" / "tensor_parallel.py"


@pytest.fixture(scope="module")
def program():
    spec = util.spec_from_file_location("tensor_parallel", FILE)
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_agreement_ends_at_the_first_difference_of_each_prompt(program):
    assert program.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)
    assert program.agreement([[1, 2]], [[1, 2]]) == 1


def test_settings_are_every_mode_with_every_sampler(program):
    names = [name for name, _, _ in program.settings()]
    assert len(set(names)) == len(program.MODES) * len(program.SAMPLERS)
