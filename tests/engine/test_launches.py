"""What a replayed round does between kernels and products: each operation of torch there is a launch that computes next to nothing."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from draftwood import LLM, SamplingParams
from draftwood.engine.graphs import GraphRunner
from support.tiny import write_drafter, write_target

PRODUCTS = ("models/layers.py", "models/packed.py", "models/dense_experts.py")
VIEWS = "view _unsafe_view as_strided expand flatten unflatten select slice split split_with_sizes chunk unbind unsqueeze transpose t"
ALLOWED = {"linear", "matmul", "empty", "new_empty", "detach", "alias", *VIEWS.split()}
"""Products, and what launches nothing."""
AT_TIMES = ("to", "reshape", "contiguous")
"""These launch nothing where they return what they were given."""


class Between(TorchDispatchMode):
    """Counts operations by name and file, those of kernels and products left out."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, frame = func.overloadpacket.__name__, sys._getframe()
        while "draftwood" not in (file := frame.f_code.co_filename) or "tests" in file:
            frame = frame.f_back
        result = func(*args, **kwargs or {})
        idle = "/kernels/" in file or file.endswith(PRODUCTS) or name in ALLOWED or result.numel() == 0
        idle = idle or (name in AT_TIMES and result.data_ptr() == args[0].data_ptr())
        if not idle:
            self.seen[name, file.rpartition("draftwood/")[2]] += 1
        return result


@pytest.mark.parametrize("how", [{"mode": "plain"}, {"budget": 8}], ids=str)
def test_two_additions_per_round(tmp_path, monkeypatch, how):
    llm = LLM(write_target(tmp_path / "target", 7), write_drafter(tmp_path / "drafter"), graphs=True)
    rounds, step = [], GraphRunner._step

    def counted(self, *arguments):
        with Between() as between:
            result = step(self, *arguments)
        rounds.append(between.seen)
        return result

    monkeypatch.setattr(GraphRunner, "_step", counted)
    llm.generate([[3, 4, 5]], SamplingParams(max_new_tokens=16, ignore_eos=True), **how)
    assert len(rounds) > 1
    for seen in rounds[1:]:
        assert seen == {("add", "round.py"): 2}  # the positions that `sample` wants
