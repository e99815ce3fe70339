"""What the comparison of ranks counts as the same."""

from __future__ import annotations

import pytest

import tensor_parallel as program


def test_agreement_ends_at_the_first_difference_of_each_prompt():
    assert program.agreement([[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]) == pytest.approx(4 / 6)
    assert program.agreement([[1, 2]], [[1, 2]]) == 1


def test_settings_are_every_mode_with_every_sampler():
    names = [name for name, _, _ in program.settings()]
    assert len(set(names)) == len(program.MODES) * len(program.SAMPLERS)
