"""What a replayed round is made of: `python benchmarks/round_profile.py --out round_profile.json`, on a GPU.

Per mode and batch: the median time of a round without a profiler, the kernels that one launches, and the sum of their own
times under the profiler. The first over the last is what is lost between kernels (target for plain decoding on layers of
K2.6's width: at most 1.1). For such layers, with random weights: `--synthetic config.json --layers 4`.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from draftwood import LLM, SamplingParams
from draftwood.bench.device import origin
from draftwood.bench.generate.prompts import Uniform
from draftwood.bench.generate.synthetic import SyntheticLLM
from draftwood.config import Mode

NAMED = 100
"""Characters of a kernel's name."""


def generate(llm: LLM, prompts: list[list[int]], mode: Mode, budget: int, new: int) -> list[float]:
    """Decode, and return the seconds of every round."""
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    outputs = llm.generate(prompts, params, mode=mode, budget=budget if mode == "tree" else None)
    return [record.seconds["replay"] for record in outputs[0].rounds]


def last_round(events: list[Any]) -> list[tuple[float, float, str]]:
    """(start us, us, name) of what ran on the device in the last whole round: between two copies to the host."""
    ran = sorted(
        (e.time_range.start, e.time_range.end - e.time_range.start, e.name)
        for e in events
        if e.device_type == DeviceType.CUDA
    )
    ends = [i for i, (_, _, name) in enumerate(ran) if "DtoH" in name]
    return ran[ends[-3] + 1 : ends[-2] + 1]


def measure(llm: LLM, mode: Mode, batch: int, budget: int, length: int, new: int) -> dict[str, Any]:
    prompts = Uniform(llm.target.config.vocab_size, 0).take(0, batch, length)
    generate(llm, prompts, mode, budget, new)  # records graphs
    seconds = [s for _ in range(3) for s in generate(llm, prompts, mode, budget, new)]
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate(llm, prompts, mode, budget, new)
        torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    ran = last_round(profiler.events())
    for _, us, name in ran:
        kernels[name[:NAMED]].append(us)
    round_us = 1e6 * float(np.median(seconds))
    total = sum(us for _, us, _ in ran)
    by_time = sorted(kernels.items(), key=lambda item: -sum(item[1]))
    return {
        "mode": mode,
        "batch": batch,
        "budget": budget if mode == "tree" else None,
        "rounds": len(seconds),
        "round_us": round_us,
        "kernels": len(ran),
        "kernels_us": total,
        "ratio": round_us / total,
        "by_kernel": [{"name": n, "count": len(us), "us": sum(us)} for n, us in by_time],
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path)
    p.add_argument("--drafter", type=Path)
    p.add_argument("--synthetic", type=Path)
    p.add_argument("--synthetic-drafter", type=Path)
    p.add_argument("--layers", type=int)
    p.add_argument("--modes", nargs="+", default=["plain", "chain", "tree"])
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    p.add_argument("--budget", type=int, default=32)
    p.add_argument("--prompt", type=int, default=64, help="tokens")
    p.add_argument("--new", type=int, default=64)
    p.add_argument("--top", type=int, default=0, help="also list so many kernels of each")
    p.add_argument("--out", type=Path, required=True)
    args, console = p.parse_args(), Console(width=140)
    settings: dict[str, Any] = {"device": "cuda", "graphs": True, "prefix_cache": False}
    settings |= {"max_batch": max(args.batches), "max_context": args.prompt + args.new}
    if args.synthetic is not None:
        llm: LLM = SyntheticLLM(args.synthetic, args.synthetic_drafter, args.layers, **settings)
    else:
        llm = LLM(args.model, args.drafter, **settings)
    rows = []
    table = Table("mode", "batch", "rounds", "round us", "kernels", "their sum, us", "ratio")
    for mode in args.modes:
        for batch in args.batches:
            row = measure(llm, mode, batch, args.budget, args.prompt, args.new)
            rows.append(row)
            cells = (row["rounds"], f"{row['round_us']:.0f}", row["kernels"], f"{row['kernels_us']:.0f}")
            table.add_row(mode, *map(str, (batch, *cells)), f"{row['ratio']:.3f}")
    model = {k: str(v) for k, v in vars(args).items() if v is not None and k != "out"}
    args.out.write_text(json.dumps({**origin("cuda"), "settings": model, "rows": rows}) + "\n")
    console.print(table)
    for row in rows if args.top else ():
        console.print(f"{row['mode']}, batch {row['batch']}")
        for kernel in row["by_kernel"][: args.top]:
            console.print(f"  {kernel['us']:8.1f} us {kernel['count']:4d} x {kernel['name']}", markup=False)


if __name__ == "__main__":
    main()
