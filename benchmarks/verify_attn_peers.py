"""`verify_attn` beside FlashMLA's dense decode, in one run: sixty shapes, ratios of medians with their intervals.

    python benchmarks/verify_attn_peers.py --flashmla libflashmla.so --cache warm --out warm.jsonl

Both get chains, of which FlashMLA's causal mask is the ancestor mask, so both outputs are checked. Both run in CUDA graphs, in turns;
what a pass prepares for all its layers is done beforehand, FlashMLA's planning kernel and our workspace alike. The run is stored as
`draftwood bench` stores its own; `peers/flashmla.py` says what the library must hold. Without `--flashmla`: our implementations.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from math import exp, log
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwood.bench import store
from draftwood.bench.catalog import Catalog, Job
from draftwood.bench.countdown import Countdown
from draftwood.bench.live import Live
from draftwood.bench.planner import MIN_VISITS
from draftwood.bench.state import Options
from draftwood.bench.suite import Suite
from draftwood.bench.supervisor import worker_of
from draftwood.kernels.case import make_case
from draftwood.kernels.verify_attn.cases import DEFAULTS, KERNEL

PEER = Path(__file__).parent / "peers" / "flashmla.py"
OWN = ("gluon", "triton")

Shape = tuple[int, int, int, int]
"""B, T, H and prefix."""

GROUPS: Mapping[str, tuple[Shape, ...]] = {
    "large": (
        (8, 33, 64, 4096),
        (1, 33, 64, 16384),
        (1, 129, 64, 4096),
        (1, 33, 64, 65536),
        (1, 33, 64, 131072),
    ),
    "one rank of eight": ((8, 32, 8, 4096), (1, 32, 8, 16384), (32, 16, 8, 4096)),
    "a tree's own": tuple(
        (1, T, H, prefix) for T in (8, 9, 16, 17, 32, 33) for prefix in (256, 512, 1024) for H in (8, 64)
    ),
    "batches": tuple(
        (B, T, H, prefix) for B in (4, 16) for T in (8, 32) for prefix in (1024, 4096) for H in (8, 64)
    ),
}


def jobs_of(impls: tuple[str, ...], cache: str, groups: list[str]) -> list[Job]:
    """The groups in turns, so that a short budget still sees each of them."""
    shapes = sorted((i / len(GROUPS[g]), shape) for g in groups for i, shape in enumerate(GROUPS[g]))
    cases = [
        make_case(KERNEL, DEFAULTS, B=B, T=T, H=H, prefix=prefix, tree="chain")
        for _, (B, T, H, prefix) in shapes
    ]
    return [Job(case, impl, cache) for case in cases for impl in impls]  # type: ignore[arg-type]


def lines_of(group: str, suite: Suite, base: str) -> Iterator[tuple[str, ...]]:
    """Per shape: medians, how many times as fast as the base we are, and as the portable kernel."""
    ratios = []
    for shape in GROUPS[group]:
        rows = {row["impl"]: row for row in suite.rows if shape_of(row) == shape}
        if not rows:
            continue
        us = {impl: row["median_us"] for impl, row in rows.items() if row.get("median_us") is not None}
        beside = next((v for v in suite.versus if v["impl"] == OWN[0] and shape_of(v) == shape), None)
        ratio = portable = ""
        if beside is not None:
            ratios.append(1 / beside["ratio"])
            ratio = f"{1 / beside['ratio']:.2f} [{1 / beside['high']:.2f}, {1 / beside['low']:.2f}]"
        if us.keys() >= set(OWN):
            portable = f"{us[OWN[1]] / us[OWN[0]]:.2f}"
        troubles = sorted({f"{i} {r['status']}" for i, r in rows.items() if r["status"] != "ok"})
        share = rows.get(OWN[0], {}).get("ceiling_share")
        yield (
            "x".join(map(str, shape[:3])) + f" {shape[3]}",
            *(f"{us[i]:.1f}" if i in us else "" for i in dict.fromkeys((*OWN, base))),
            ratio,
            portable,
            f"{share:.0%}" if share else "",
            ", ".join(troubles),
        )
    if ratios:
        mean = exp(sum(map(log, ratios)) / len(ratios))
        yield (
            f"{group}: worst, mean",
            *[""] * len({*OWN, base}),
            f"{min(ratios):.2f}, {mean:.2f}",
            "",
            "",
            "",
        )


def shape_of(row: Mapping[str, Any]) -> Shape:
    return row["case"]["B"], row["case"]["T"], row["case"]["H"], row["case"]["prefix"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--flashmla", type=Path, help="shared library, see peers/flashmla.py")
    parser.add_argument("--cache", choices=("warm", "cold"), default="warm")
    parser.add_argument("--group", action="append", choices=tuple(GROUPS), help="repeat for several")
    parser.add_argument("--budget", type=float, default=80.0, help="seconds of the whole command")
    parser.add_argument("--target", type=float, default=1.0, help="half-width of an interval, in per cent")
    parser.add_argument("--out", type=Path, default=Path("verify_attn_peers.jsonl"))
    options = parser.parse_args()
    peers = []
    if options.flashmla is not None:
        if not options.flashmla.is_file():
            parser.error(f"--flashmla: no file `{options.flashmla}`")
        os.environ["FLASHMLA"] = str(options.flashmla.resolve())
        peers = [PEER]
    catalog = Catalog.of_files(peers)
    impls = (*OWN, *catalog.peers)
    base = impls[-1]
    groups = options.group or list(GROUPS)
    countdown = Countdown(options.budget)
    asked = Options("cuda", options.budget, options.target / 100, vs=base, argv=tuple(sys.argv[1:]))
    with Live(countdown, MIN_VISITS, full_plan=False) as live:
        suite = Suite(
            jobs_of(impls, options.cache, groups),
            catalog,
            asked,
            worker_of("cuda", peers, ()),
            countdown,
            store.Store(options.out),
            live,
        )
        code = suite.run()
    own_base = dict.fromkeys((*OWN, base))
    headers = ("B x T x H prefix", *(f"{i} us" for i in own_base), f"x {base}", f"x {OWN[1]}", "ceiling", "")
    table = Table(*headers, title=f"verify_attn, {options.cache} L2", title_justify="left")
    for group in groups:
        for line in lines_of(group, suite, base):
            table.add_row(*line)
        table.add_section()
    Console(width=150, highlight=False).print(table)
    print(f"{options.out}; {countdown.used():.0f} s")
    return 0 if code == 1 else code  # slower somewhere is a finding


if __name__ == "__main__":
    sys.exit(main())
