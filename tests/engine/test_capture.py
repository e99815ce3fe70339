"""A round or chunk that is recorded must not ask the host: outside of kernels nothing is read from the device or made from Python values.

Without a GPU the kernels are torch's own, which do ask; they may. What they stand for is checked where there is one.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftwood import LLM, SamplingParams
from draftwood.engine import llm as llm_module
from draftwood.engine.chunks import Chunk
from draftwood.engine.graphs import Replay
from draftwood.engine.row import Row
from draftwood.kernels import load_kernels
from draftwood.round import RoundPlan
from support.tiny import write_drafter, write_target

READS = (
    "item",
    "tolist",
    "numpy",
    "cpu",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__array__",
)
MAKES = ("tensor", "as_tensor", "from_numpy", "nonzero", "unique", "masked_select")
SYNCHRONOUS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero", "equal")


class Watch(TorchDispatchMode):
    """Within it, whatever waits for the device or copies from pageable memory raises; `aside` it may."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.watching = False
        for owner, names in ((torch.Tensor, READS), (torch, MAKES)):
            for name in names:
                monkeypatch.setattr(owner, name, self.refusing(name, getattr(owner, name)))

    def refusing(self, name, whole):
        def call(*arguments, **options):
            assert not self.watching, f"`{name}` in a round"
            return whole(*arguments, **options)

        return call

    def aside(self, kernel):
        def call(*arguments, **options):
            watching, self.watching = self.watching, False
            try:
                return kernel(*arguments, **options)
            finally:
                self.watching = watching

        return call

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        masked = (
            name.startswith("index")
            and isinstance(args[1], list | tuple)
            and any(one is not None and one.dtype == torch.bool for one in args[1])
        )
        assert not (self.watching and (masked or name in SYNCHRONOUS)), f"`{name}` in a round"
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.watching = True
        return super().__enter__()

    def __exit__(self, *exception):
        self.watching = False
        return super().__exit__(*exception)


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


@pytest.fixture
def llm(tmp_path, monkeypatch, watch):
    def watched(*arguments, **options):
        kernels = load_kernels(*arguments, **options)
        names = [f.name for f in fields(kernels) if f.name != "choices"]
        return replace(kernels, **{name: watch.aside(getattr(kernels, name)) for name in names})

    monkeypatch.setattr(llm_module, "load_kernels", watched)
    monkeypatch.setattr(llm_module, "pack", lambda model: None)  # no GPU has these forms
    folders = write_target(tmp_path / "target", 7, q_lora_rank=12), write_drafter(tmp_path / "drafter")
    return LLM(*folders, graphs=True, max_batch=2, page_size=16, budget=8)


@pytest.mark.parametrize("early", [False, True])
def test_a_round_asks_the_host_nothing(llm, watch, early):
    everything = {
        "temperature": 0.8,
        "top_p": 0.9,
        "frequency_penalty": 0.3,
        "logit_bias": {4: 1.0},
        "logprobs": 2,
    }
    for params in ({}, everything):
        runner = llm._runner(llm.drafting)
        runner._early = early  # as on a GPU
        rows = [Row([3 + i, 4], [], [2 * i, 2 * i + 1], i, SamplingParams(**params), (7,)) for i in range(2)]
        k = 2 if "logprobs" in params else None
        with torch.inference_mode():
            runner.begin(rows)
            held = runner._now
            runner._attach(held.ring)
            for plan in (RoundPlan(8, 3, 7), RoundPlan(4, 3, 1), RoundPlan(1, 0, 1)):
                runner._step(held, plan, k, 2)  # what is made once may be made now
                with watch:
                    runner._step(held, plan, k, 2)
            with watch:
                runner._drafting.empty_ring(held.state.page_table)


def test_a_chunk_asks_the_host_nothing(llm, watch):
    runner, chunk = llm._runner(llm.drafting), Chunk(16, 4, "cpu")
    with torch.inference_mode():
        for tokens, start, pages in ([3, 4, 5], 0, [1]), ([6, 7], 3, [1, 2]):
            chunk.set(tokens, start, pages)
            with watch:
                runner._fill(chunk.tokens, chunk.page_table, chunk.start, chunk.chain, chunk.count)


def test_a_question_is_noticed(llm, watch):
    for question in (
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1]),
        lambda x: x.new_ones(int(x[0])),
    ):
        with pytest.raises(AssertionError, match="in a round"), watch:
            question(torch.ones(3))


@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError])
def test_why_a_recording_failed_is_not_hidden_by_its_end(monkeypatch, error):
    class Recording:
        def __init__(self, graph, pool):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *raised):
            raise RuntimeError("a branch was not joined")

    def step():
        if error is not None:
            raise error("experts")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    with pytest.raises(error or RuntimeError, match="experts" if error else "was not joined"):
        Replay(step, "cuda", None)
