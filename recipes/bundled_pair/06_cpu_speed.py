"""Step 6: speed on this CPU, budget "auto" against plain: `python 06_cpu_speed.py --data PACKED`.

Held-out prompts, 128 new tokens each, greedy and at temperature 0.8, plain and auto in turn within one process. A prompt's
speed-up is the ratio of its tokens per second over the whole call, prompt included, the best of the repeats of each.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from held_out import LOOPS_BELOW, held_windows
from rich.console import Console
from rich.progress import track
from rich.table import Table

from draftwood import LLM, SamplingParams
from draftwood.bundled import pair
from draftwood.engine.outputs import RequestOutput
from draftwood.training.evaluation import distinct_share

SLOWER_BELOW = 0.97
"""Ratios under this count as slower than plain decoding; nearer to 1 is noise."""
MODES: dict[str, dict[str, Any]] = {
    "plain": {"mode": "plain"},
    "auto": {"mode": "tree", "budget": "auto"},
}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    target, drafter = pair()
    p.add_argument("--target", type=Path, default=target)
    p.add_argument("--drafter", type=Path, default=drafter)
    p.add_argument("--data", type=Path, required=True, help="folder with held.xz")
    p.add_argument("--out", type=Path, default=Path("docs/results/pair_cpu_speed.json"))
    p.add_argument("--prompts", type=int, default=200)
    p.add_argument("--prompt-tokens", type=int, default=64)
    p.add_argument("--new", type=int, default=128)
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    p.add_argument("--repeats", type=int, default=2)
    return p.parse_args()


def timed(llm: LLM, prompt: list[int], params: SamplingParams, mode: str) -> tuple[float, RequestOutput]:
    """Seconds of the whole call, and its output."""
    began = time.perf_counter()
    (output,) = llm.generate([prompt], params, **MODES[mode])
    return time.perf_counter() - began, output


def measure(llm: LLM, prompt: list[int], params: SamplingParams, repeats: int) -> dict[str, Any]:
    """One prompt, the modes in turn; the order changes with every repeat."""
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    outputs: dict[str, RequestOutput] = {}
    for repeat in range(repeats):
        for mode in sorted(MODES, reverse=repeat % 2 == 0):
            took, outputs[mode] = timed(llm, prompt, params, mode)
            seconds[mode].append(took)
    rate = {mode: params.max_new_tokens / min(took) for mode, took in seconds.items()}
    tokens = torch.tensor([outputs["auto"].token_ids])
    return {
        "tokens_per_s": rate,
        "ratio": rate["auto"] / rate["plain"],
        "tokens_per_round": len(outputs["auto"].token_ids) / len(outputs["auto"].rounds),
        "loops": bool(distinct_share(tokens).item() <= LOOPS_BELOW),
        "same_text": outputs["auto"].token_ids == outputs["plain"].token_ids,
    }


def median_interval(values: np.ndarray) -> tuple[float, float, float]:
    """The median and its 95 % bootstrap interval over prompts."""
    draws = np.random.default_rng(0).choice(values, (10_000, len(values)))
    low, high = np.quantile(np.median(draws, 1), (0.025, 0.975))
    return float(np.median(values)), float(low), float(high)


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    ratio = np.array([row["ratio"] for row in rows])
    calm = np.array([not row["loops"] for row in rows])
    return {
        "ratio": median_interval(ratio),
        "ratio_non_looping": median_interval(ratio[calm]) if calm.any() else None,
        "slowest": float(ratio.min()),
        "slower": float((ratio < SLOWER_BELOW).mean()),
        "looping": float(1 - calm.mean()),
        "same_text": float(np.mean([row["same_text"] for row in rows])),
        "tokens_per_s": {m: float(np.median([row["tokens_per_s"][m] for row in rows])) for m in MODES},
        "tokens_per_round": float(np.median([row["tokens_per_round"] for row in rows])),
    }


def show(results: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        *(
            "T",
            "n",
            "auto / plain",
            "not looping",
            "slowest",
            f"below {SLOWER_BELOW}",
            "looping",
            "same text",
        ),
        *("plain tok/s", "auto tok/s", "tok/round"),
    )
    for result in results:
        s = result["summary"]
        ratios = (
            "{:.2f} [{:.2f}, {:.2f}]".format(*s[k]) if s[k] else "-" for k in ("ratio", "ratio_non_looping")
        )
        shares = (f"{s[k]:.0%}" for k in ("slower", "looping", "same_text"))
        speeds = (f"{s['tokens_per_s'][m]:.0f}" for m in MODES)
        table.add_row(
            *(f"{result['temperature']}", f"{len(result['prompts'])}", *ratios, f"{s['slowest']:.2f}"),
            *(*shares, *speeds, f"{s['tokens_per_round']:.2f}"),
        )
    console.print(table)


def main() -> None:
    args, console = arguments(), Console(width=140)
    prompts = held_windows(args.data, args.prompts, args.prompt_tokens)
    llm = LLM(args.target, args.drafter, device="cpu", max_batch=1)
    results = []
    for temperature in args.temperatures:
        rows = []
        for mode in MODES:
            timed(llm, prompts[0], SamplingParams(temperature=temperature, seed=0), mode)  # warm
        for i, prompt in enumerate(track(prompts, f"temperature {temperature}", console=console)):
            params = SamplingParams(temperature=temperature, seed=i, max_new_tokens=args.new, ignore_eos=True)
            rows.append(measure(llm, prompt, params, args.repeats))
        results.append({"temperature": temperature, "summary": summary(rows), "prompts": rows})
    result = {
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result) + "\n")
    show(results, console)


if __name__ == "__main__":
    main()
