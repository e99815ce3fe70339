"""Requests come, go, share prompts and crowd each other for thousands of rounds, on a pool that is too small for them.

    python benchmarks/soak.py --rounds 20000 --device cuda

After every step the pages are counted. Finished outputs (`--checked` of them) are compared with what the same request
gives alone, decoded plainly without prefix reuse; a cancelled one must be the beginning of that. In float64 with the
torch kernels (the default), or with `--deterministic`, one difference is a failure; else a near tie may fall either way,
and differences are counted. Memory must not grow after the first half.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from draftwood import LLM, SamplingParams
from draftwood.bench.device import origin
from draftwood.engine.request import Request
from draftwood.kernels import KERNELS

CROWD = 12
"""Requests that wait or run at the same time, about."""


@dataclass
class Tally:
    steps: int = 0
    rounds: int = 0
    finished: int = 0
    cancelled: int = 0
    refused: int = 0
    at_limit: int = 0
    """Ended by a full context."""
    preempted: int = 0
    reused_tokens: int = 0
    checked: int = 0
    different: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


class Soak:
    """One long run over `llm`; `alone` is the same model, which decodes what is to be compared with.

    Args:
        vocab: token ids of prompts are below it.
        longest: tokens of a long prompt or output; some reach the context limit instead.
        checked: share of the finished outputs that is compared.
        at_limit: share of prompts that nearly fill the context, or do.
    """

    def __init__(
        self,
        llm: LLM,
        alone: LLM,
        *,
        vocab: int,
        longest: int,
        seed: int = 0,
        checked: float = 1.0,
        at_limit: float = 0.01,
    ) -> None:
        self.llm, self.alone, self.vocab, self.longest, self.checked = llm, alone, vocab, longest, checked
        self.at_limit, self.random = at_limit, random.Random(seed)
        self.engine = llm.engine()
        self.stems = [self._tokens(3 * llm.config.page_size) for _ in range(4)]
        self.live: dict[Request, None] = {}
        self.tally = Tally()
        self.differences: list[str] = []

    def step(self) -> None:
        """Some may join or leave; then one step of the engine, and the count of its pages."""
        if len(self.live) < CROWD and self.random.random() < 0.4:
            self._join()
        if self.live and self.random.random() < 0.04:
            self._leave()
        if not self.engine.has_work():
            return
        events = self.engine.step()
        self.engine.check_integrity()
        self.tally.steps += 1
        self.tally.rounds += bool(events)
        for request in [request for request in self.live if request.finished]:
            del self.live[request]
            self._settle(request)

    def drain(self) -> None:
        """Let the rest finish."""
        while self.engine.has_work():
            self.engine.step()
            self.engine.check_integrity()
        for request in self.live:
            self._settle(request)
        self.live.clear()
        self.llm.cache.check_integrity([])

    def _tokens(self, n: int) -> list[int]:
        return [self.random.randrange(1, self.vocab) for _ in range(n)]

    def _join(self) -> None:
        r = self.random
        stem = r.choice(self.stems)[: r.randrange(3 * self.llm.config.page_size)]
        prompt = [*stem, *self._tokens(r.randint(1, self.longest))]
        longest = self.longest
        if r.random() < self.at_limit:  # ends at the context limit, or is refused
            prompt, longest = self._tokens(self.llm.max_context - r.randint(0, 3)), 10
        hot = r.random() < 0.6
        words = (self.llm.tokenizer.decode([token]) for token in self._tokens(r.choice([0, 0, 0, 1])))
        params = SamplingParams(
            n=r.choice([1, 1, 1, 2, 3]),
            max_new_tokens=r.randint(1, longest),
            temperature=r.choice([0.5, 1.0, 2.0]) if hot else 0.0,
            top_p=r.choice([1.0, 0.9]),
            repetition_penalty=r.choice([1.0, 1.0, 1.2]),
            seed=r.randrange(2**40),
            ignore_eos=r.random() < 0.7,
            stop_token_ids=tuple(self._tokens(r.choice([0, 0, 1]))),
            stop=tuple(word for word in words if word),
            logprobs=r.choice([None, None, 2]),
        )
        request = self.llm.request(prompt, params)
        try:
            self.engine.add(request)
        except ValueError:
            self.tally.refused += 1
            return
        self.live |= dict.fromkeys([request, *request.followers])

    def _leave(self) -> None:
        self.engine.cancel(self.random.choice(list(self.live)))

    def _settle(self, request: Request) -> None:
        """Compare a request that has ended with its solo run."""
        out, tally = request.output, self.tally
        reason = str(out.finish_reason)
        tally.reasons[reason] = tally.reasons.get(reason, 0) + 1
        tally.finished += reason != "cancelled"
        tally.cancelled += reason == "cancelled"
        tally.at_limit += len(out.prompt_token_ids) + len(out.token_ids) == self.llm.max_context
        tally.preempted += out.preemptions
        tally.reused_tokens += out.cached_tokens
        if self.random.random() >= self.checked or not out.token_ids:
            return
        tally.checked += 1
        params = request.params.model_copy(update={"n": 1, "seed": out.seed})
        (want,) = self.alone.generate([out.prompt_token_ids], params, mode="plain")
        if reason == "cancelled":
            same = out.token_ids == want.token_ids[: len(out.token_ids)]
        else:
            have, due = (
                (o.token_ids, o.text, o.finish_reason, o.stop_reason, len(o.logprobs or ()))
                for o in (out, want)
            )
            same = have == due
        if not same:
            tally.different += 1
            self.differences.append(
                f"seed {out.seed}, prompt {out.prompt_token_ids}: {out.token_ids} {reason}, "
                f"alone {want.token_ids} {want.finish_reason}"
            )


def memory(device: str) -> int:
    """Bytes allocated on a GPU; on a CPU the number of tensors alive, but for the rows of noise kept there."""
    gc.collect()
    if device == "cuda":
        return torch.cuda.memory_allocated()
    return sum(type(o) is torch.Tensor and o.ndim > 1 for o in gc.get_objects())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20_000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--kernels", default="torch", choices=("torch", "auto"))
    parser.add_argument("--model", help="target folder; default: the bundled pair")
    parser.add_argument("--drafter")
    parser.add_argument("--mode", default="tree", choices=("tree", "chain", "plain"))
    parser.add_argument("--budget", default="16", help="slots per tree, or auto")
    parser.add_argument("--graphs", action="store_true", help="replay rounds; needs --kernels auto on a GPU")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--checked", type=float, default=0.05, help="share of outputs compared")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="end after so long, with what there is"
    )
    parser.add_argument("--out", type=Path, help="store the tally here, as JSON")
    return parser.parse_args()


def main() -> None:
    a = arguments()
    kernels = dict.fromkeys(KERNELS, "torch") if a.kernels == "torch" else None
    common = {
        "dtype": a.dtype,
        "device": a.device,
        "kernels": kernels,
        "page_size": 16,
        "max_context": 512,
        "deterministic": a.deterministic,
    }
    llm = LLM(
        a.model,
        a.drafter,
        **common,
        max_batch=8,
        n_pages=34,
        prefill_budget=64,
        mode=a.mode,
        budget=a.budget if a.budget == "auto" else int(a.budget),
        graphs=a.graphs,
    )
    alone = LLM(a.model, a.drafter, **common, max_batch=1, prefix_cache=False)
    soak = Soak(llm, alone, vocab=llm.target.config.vocab_size, longest=96, seed=a.seed, checked=a.checked)
    levels: list[int] = []
    started = shown = time.monotonic()
    while soak.tally.rounds < a.rounds and time.monotonic() - started < a.seconds:
        soak.step()
        if soak.tally.steps % 500 == 0:
            levels.append(memory(a.device))
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            rate = soak.tally.rounds / (shown - started)
            print(f"{soak.tally.rounds} rounds, {rate:.0f}/s, {soak.tally}", file=sys.stderr)
    soak.drain()
    result = asdict(soak.tally) | {"seconds": round(time.monotonic() - started, 1), "memory": levels}
    print(result)
    if a.out is not None:
        settings = {name: str(value) for name, value in vars(a).items() if name != "out"}
        a.out.write_text(json.dumps({**origin(a.device), "settings": settings, **result}) + "\n")
    for line in soak.differences[:10]:
        print(line, file=sys.stderr)
    exact = a.deterministic or (a.dtype == "float64" and a.kernels == "torch")
    half = len(levels) // 2
    grown = half > 0 and max(levels[half:]) > 1.02 * max(levels[:half])
    if grown:
        print("memory grew", file=sys.stderr)
    raise SystemExit(int(grown or (exact and soak.tally.different > 0)))


if __name__ == "__main__":
    main()
