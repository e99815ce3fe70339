"""One rank against several, on the bundled pair or one's own: the same tokens, and how many a second.

    python benchmarks/tensor_parallel.py --tp 2 --out tensor_parallel.json

Tokens are compared in fp64 through the torch kernels, where they must be equal; a difference ends the program with 1. Then every
setting is timed in the device's own type: `--runs` times after one run that does not count, the share of tokens before the
first difference from one rank beside it (rounding may turn a near tie). `--timed-only` is for models too large for fp64. With
`--kill` a rank is killed in the midst of a request, and the seconds until the error are reported. Only one engine runs at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from draftwood import LLM, SamplingParams
from draftwood.bench.device import origin
from draftwood.config import Mode
from draftwood.engine.world import RankError
from draftwood.kernels import KERNELS

PROMPTS = ("def fibonacci(n):", "class Node:\n    def __init__(self", "import os\n\ndef walk(path):")
SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 1},
    "filtered": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 1},
}
MODES: tuple[Mode, ...] = ("plain", "chain", "tree")


def settings() -> Iterator[tuple[str, Mode, str]]:
    """(name, mode, sampler)."""
    for mode in MODES:
        for sampler in SAMPLERS:
            yield f"{mode}, {sampler}", mode, sampler


def generate(llm: LLM, mode: Mode, sampler: str, tokens: int) -> tuple[list[list[int]], float]:
    """Tokens of every prompt, one prompt at a time, and the tokens per second of the rounds."""
    params = SamplingParams(max_new_tokens=tokens, ignore_eos=True, **SAMPLERS[sampler])
    budget = 16 if mode == "tree" else None
    outputs = [llm.generate(prompt, params, mode=mode, budget=budget)[0] for prompt in PROMPTS]
    seconds = sum(sum(r.seconds.values()) for output in outputs for r in output.rounds)
    return [o.token_ids for o in outputs], sum(len(o.token_ids) for o in outputs) / seconds


def exact(pair: list[Path], device: str, tokens: int, **ranks: Any) -> dict[str, list[list[int]]]:
    """Tokens in fp64, by setting."""
    kernels = dict.fromkeys(KERNELS, "torch")
    found, began = {}, time.perf_counter()
    with LLM(*pair, dtype="float64", device=device, kernels=kernels, max_batch=1, **ranks) as llm:
        for name, mode, sampler in settings():
            found[name] = generate(llm, mode, sampler, tokens)[0]
            print(
                f"fp64, {ranks.get('tp', 1)} ranks: {name}, {time.perf_counter() - began:.1f} s", flush=True
            )
    return found


def timed(
    pair: list[Path], device: str, tokens: int, runs: int, **ranks: Any
) -> Iterator[tuple[str, list[list[int]], dict[str, Any]]]:
    """Setting, tokens, and their rate in the device's own type."""
    with LLM(*pair, device=device, max_batch=1, **ranks) as llm:
        for name, mode, sampler in settings():
            generate(llm, mode, sampler, tokens)
            results = [generate(llm, mode, sampler, tokens) for _ in range(runs)]
            rates = sorted(rate for _, rate in results)
            rate = statistics.median(rates)
            print(f"{ranks.get('tp', 1)} ranks: {name}, {rate:.1f} tokens/s", flush=True)
            ends = {"slowest": rates[0], "fastest": rates[-1]}
            yield name, results[0][0], {"tokens_per_second": rate, **ends, "runs": runs}


def agreement(a: list[list[int]], b: list[list[int]]) -> float:
    """Share of tokens before each prompt's first difference."""
    same = 0
    for x, y in zip(a, b, strict=True):
        pairs = zip(x, y, strict=True)
        same += next((i for i, (s, t) in enumerate(pairs) if s != t), len(x))
    return same / sum(map(len, a))


def kill(pair: list[Path], device: str, **ranks: Any) -> dict[str, Any]:
    """What comes of a rank that is killed between two rounds."""
    with LLM(*pair, device=device, max_batch=1, **ranks) as llm:
        params = SamplingParams(max_new_tokens=400, ignore_eos=True)
        events = llm.stream(PROMPTS[0], params, mode="plain")
        next(events)
        last = max(llm.world.pids)
        os.kill(llm.world.pids[last], signal.SIGKILL)
        started = time.perf_counter()
        try:
            for _ in events:
                pass
        except RankError as e:
            return {"rank": last, "error": str(e), "seconds": time.perf_counter() - started}
    raise SystemExit(f"rank {last} was killed, and nothing was said")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--expert-parallel", action="store_true")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--pair", type=Path, nargs=2, default=[], metavar=("TARGET", "DRAFTER"))
    parser.add_argument("--tokens", type=int, default=64, help="per prompt")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--graphs", action="store_true", help="replay rounds in what is timed and killed")
    parser.add_argument("--timed-only", action="store_true", help="do not compare tokens in fp64")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    several = {"tp": options.tp, "expert_parallel": options.expert_parallel}
    where = (options.pair, options.device, options.tokens)

    different = None
    if not options.timed_only:
        one, many = exact(*where), exact(*where, **several)
        different = [name for name in one if one[name] != many[name]]
    result: dict[str, Any] = {
        **origin(options.device),
        "pair": [str(folder) for folder in options.pair],
        "graphs": options.graphs,
        **several,
        "different_in_fp64": different,
        "timed": {},
    }

    def store() -> None:
        """After every setting that is timed: a run that is cut off has what it has."""
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    store()
    if options.runs:
        alone = {}
        for name, tokens, a in timed(*where, options.runs, graphs=options.graphs):
            alone[name], result["timed"][name] = tokens, {"1": a}
            store()
        for name, tokens, b in timed(*where, options.runs, graphs=options.graphs, **several):
            line, same = result["timed"][name], agreement(alone[name], tokens)
            line.update({str(options.tp): b, "agreement": same})
            store()
            rates = f"{line['1']['tokens_per_second']:8.1f} {b['tokens_per_second']:8.1f} tokens/s"
            print(f"{name:20} {rates}, {same:.0%} of the tokens the same", flush=True)
    if options.kill:
        result["kill"] = kill(options.pair, options.device, **several, graphs=options.graphs)
        print("{error}, after {seconds:.2f} s".format(**result["kill"]), flush=True)
        store()
    if different:
        raise SystemExit(f"in fp64 {options.tp} ranks differ from one in: {', '.join(different)}")
    if different is not None:
        print(f"{options.tp} ranks give what one gives in {len(list(settings()))} settings, in fp64")


if __name__ == "__main__":
    main()
