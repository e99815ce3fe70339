"""How long the device idles between two replayed rounds: `python benchmarks/round_gap.py --out round_gap.json`, on a GPU.

A gap is the time from the end of a round's copy to the host to the start of the next round, by events on the device. Rounds that follow
a change of the batch are left out. Target, for a batch of one: the larger of 10 us and 3 % of the round.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from draftwood import LLM, SamplingParams
from draftwood.bench.device import origin
from draftwood.config import Mode, parse_budget
from draftwood.engine.engine import Engine
from draftwood.engine.graphs import Flight, GraphRunner
from draftwood.engine.runner import RoundOutcome

PROMPT = "class Node:\n    def __init__(self, value):\n"


class WatchedRunner(GraphRunner):
    """Keeps the moments of every round; None stands for a change of the batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.flights: list[Flight | None] = []

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self.flights.append(None)

    def collect(self, flight: Flight, *, trace: bool = False) -> RoundOutcome:
        self.flights.append(flight)
        return super().collect(flight, trace=trace)


def milliseconds(earlier: Any, later: Any) -> float:
    return float(earlier.elapsed_time(later))


def measure(llm: LLM, batch: int, budget: int | Literal["auto"], new: int) -> dict[str, Any]:
    mode: Mode = "plain" if budget == 1 else "tree"
    engine = llm.engine(mode=mode, budget=budget if budget != 1 else None)
    local = engine.runner
    assert isinstance(local, GraphRunner)
    runner = WatchedRunner(
        local.stages, page_size=local.page_size, max_context=local.max_context, device=llm.device
    )
    for _ in range(2):  # the first records graphs
        runner.flights.clear()
        watched = Engine(
            runner,
            engine.speculation,
            llm.cache,
            max_batch=batch,
            prefill_chunk=llm.config.prefill_chunk,
            prefill_budget=llm.config.prefill_budget,
        )
        for i in range(batch):
            params = SamplingParams(max_new_tokens=new, temperature=0.8, seed=i, ignore_eos=True)
            watched.add(llm.request(PROMPT, params, index=i))
        while watched.has_work():
            watched.step()
    torch.cuda.synchronize()
    pairs = [
        (a, b)
        for a, b in zip(runner.flights, runner.flights[1:], strict=False)
        if a is not None and b is not None
    ]
    gaps = np.array([milliseconds(a.span.ended, b.span.began) for a, b in pairs]) * 1e3
    rounds = np.array([milliseconds(a.span.began, a.span.ended) for a, _ in pairs]) * 1e3
    limit = max(10.0, 0.03 * float(np.median(rounds)))
    return {
        "batch": batch,
        "budget": budget,
        "rounds": len(gaps),
        "round_us": float(np.median(rounds)),
        "gap_us": [float(q) for q in np.quantile(gaps, (0.5, 0.9, 0.99))],
        "limit_us": limit,
        "within": float((gaps <= limit).mean()),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", type=Path)
    p.add_argument("--drafter", type=Path)
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    p.add_argument("--budgets", nargs="+", default=["1", "8", "32", "auto"])
    p.add_argument("--new", type=int, default=256)
    p.add_argument("--out", type=Path, required=True)
    args, console = p.parse_args(), Console(width=120)
    llm = LLM(
        args.model,
        args.drafter,
        device="cuda",
        graphs=True,
        max_batch=max(args.batches),
        max_context=args.new + 64,
        prefix_cache=False,
    )
    rows = [measure(llm, batch, parse_budget(b), args.new) for batch in args.batches for b in args.budgets]
    table = Table(
        "batch", "budget", "rounds", "round us", "gap us, median", "90 %", "99 %", "limit", "within"
    )
    for r in rows:
        gaps = (f"{g:.1f}" for g in r["gap_us"])
        table.add_row(
            *(str(r["batch"]), str(r["budget"]), str(r["rounds"]), f"{r['round_us']:.0f}"),
            *(*gaps, f"{r['limit_us']:.0f}", f"{r['within']:.0%}"),
        )
    args.out.write_text(json.dumps({**origin("cuda"), "rows": rows}) + "\n")
    console.print(table)


if __name__ == "__main__":
    main()
