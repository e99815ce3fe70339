"""`verify_attn` beside FlashMLA's dense decode and FlashAttention-3, in one run: sixty shapes, ratios of medians with their intervals.

    python benchmarks/verify_attn_peers.py --flashmla libflashmla.so --flash-attention-3 libflashattention3.so --out peers.jsonl

All get chains, of which the peers' causal mask is the ancestor mask, so all outputs are checked. They run in CUDA graphs, in turns, with
warm L2 and most shapes with cold L2 as well; what a pass prepares for all its layers is done beforehand, a peer's planning kernel and our workspace
alike. The run is stored as `draftwood bench` stores its own; `peers/*.py` say what the libraries must hold. Without libraries: our implementations.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from rich.console import Console
from rich.table import Table

from draftwood.bench import store
from draftwood.bench.catalog import Cache, Catalog, Job
from draftwood.bench.countdown import Countdown
from draftwood.bench.live import Live
from draftwood.bench.planner import MIN_VISITS
from draftwood.bench.state import Options
from draftwood.bench.suite import Suite
from draftwood.bench.supervisor import WorkerLost, worker_of
from draftwood.kernels.case import Case, make_case
from draftwood.kernels.verify_attn.cases import DEFAULTS, KERNEL

PEERS = {"flashmla": "FLASHMLA", "flash_attention_3": "FLASH_ATTENTION_3"}
"""File in `peers/`: the environment variable that names its library. The option for it has the file's name."""

OURS, PORTABLE = "hopper", "triton"

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
        (B, T, H, prefix) for B in (4, 16) for T in (1, 32) for prefix in (1024, 4096) for H in (8, 64)
    ),
}


ALSO_COLD = tuple(GROUPS)[:3]
CACHES: tuple[Cache, ...] = ("warm", "cold")


def jobs_of(impls: tuple[str, ...], groups: Sequence[str]) -> list[Job]:
    """The most telling first, for time may end: warm, then cold without the portable kernel, then the other groups."""

    def jobs(groups: Sequence[str], impls: Sequence[str], cache: Cache) -> list[Job]:
        turns = sorted((i / len(GROUPS[g]), shape) for g in groups for i, shape in enumerate(GROUPS[g]))
        return [Job(case_of(shape), impl, cache) for _, shape in turns for impl in impls]

    asked = [g for g in groups if g in ALSO_COLD]
    others = [g for g in groups if g not in ALSO_COLD]
    without_portable = [impl for impl in impls if impl != PORTABLE] if len(impls) > 2 else impls
    return jobs(asked, impls, "warm") + jobs(asked, without_portable, "cold") + jobs(others, impls, "warm")


def case_of(shape: Shape) -> Case:
    B, T, H, prefix = shape
    return make_case(KERNEL, DEFAULTS, B=B, T=T, H=H, prefix=prefix, tree="chain")


def lines_of(group: str, suite: Suite, rivals: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Per shape, warm and cold: medians, and how many times as fast we are; then the worst and the geometric mean."""
    ratios: dict[tuple[str, str], list[float]] = {(c, rival): [] for c in CACHES for rival in rivals}
    for shape in GROUPS[group]:
        rows = {(row["cache"], row["impl"]): row for row in suite.rows if shape_of(row) == shape}
        us = {key: row["median_us"] for key, row in rows.items() if row.get("median_us") is not None}
        found = {(v["cache"], v["impl"]): v for v in suite.versus if shape_of(v) == shape}
        cells = []
        for cache in CACHES:
            cells.append(f"{us[cache, OURS]:.1f}" if (cache, OURS) in us else "")
            for key in ((cache, rival) for rival in rivals):
                ratios[key] += [found[key]["ratio"]] if key in found else []
                cells.append(f"{us[key]:.1f}" if key in us else "")
                cells.append(
                    "{ratio:.2f} [{low:.2f}, {high:.2f}]".format(**found[key]) if key in found else ""
                )
        portable = us.get(("warm", PORTABLE))
        share = rows.get(("warm", OURS), {}).get("ceiling_share")
        trouble = sorted(
            {f"{impl} {row['status']}" for (_, impl), row in rows.items() if row["status"] != "ok"}
        )
        yield (
            f"{shape[0]} x {shape[1]} x {shape[2]}, {shape[3]}",
            *cells,
            f"{portable:.1f}" if portable else "",
            f"{portable / us['warm', OURS]:.2f}" if portable and ("warm", OURS) in us else "",
            f"{share:.0%}" if share else "",
            ", ".join(trouble),
        )
    worst = {key: f"{min(r):.2f}, {geometric_mean(r):.2f}" if r else "" for key, r in ratios.items()}
    both = [cell for c in CACHES for cell in ("", *(x for rival in rivals for x in ("", worst[c, rival])))]
    yield (f"{group}: worst, mean", *both, "", "", "", "")


def shape_of(row: Mapping[str, Any]) -> Shape:
    return row["case"]["B"], row["case"]["T"], row["case"]["H"], row["case"]["prefix"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name in PEERS:
        option = "--" + name.replace("_", "-")
        parser.add_argument(option, type=Path, metavar="LIB.so", help=f"shared library, see peers/{name}.py")
    parser.add_argument("--group", action="append", choices=tuple(GROUPS), help="repeat for several")
    parser.add_argument("--budget", type=float, default=45.0, help="seconds of the whole command")
    parser.add_argument("--target", type=float, default=1.0, help="half-width of an interval, in per cent")
    parser.add_argument("--out", type=Path, default=Path("verify_attn_peers.jsonl"))
    options = parser.parse_args()
    peers = []
    for name, variable in PEERS.items():
        library = getattr(options, name)
        if library is not None:
            if not library.is_file():
                parser.error(f"--{name.replace('_', '-')}: no file `{library}`")
            os.environ[variable] = str(library.resolve())
            peers.append(Path(__file__).parent / "peers" / f"{name}.py")
    catalog = Catalog.of_files(peers)
    impls = (OURS, PORTABLE, *catalog.peers)
    rivals = tuple(catalog.peers) or (PORTABLE,)
    groups = options.group or list(GROUPS)
    countdown = Countdown(options.budget)
    asked = Options("cuda", options.budget, options.target / 100, vs=OURS, argv=tuple(sys.argv[1:]))
    with Live(countdown, MIN_VISITS, full_plan=False) as live:
        suite = Suite(
            jobs_of(impls, groups),
            catalog,
            asked,
            worker_of("cuda", peers, ()),
            countdown,
            store.Store(options.out),
            live,
        )
        try:
            code = suite.run()
        except WorkerLost as e:
            sys.exit(f"error: {e}")
    both = (f"{OURS} us", *(h for rival in rivals for h in (f"{rival} us", f"x {rival}")))
    headers = (
        "B x T x H, prefix",
        *both,
        *(f"cold {h}" for h in both),
        f"{PORTABLE} us",
        f"x {PORTABLE}",
        "ceiling",
        "",
    )
    table = Table(*headers, title="verify_attn, warm L2 and cold", title_justify="left")
    for group in groups:
        for line in lines_of(group, suite, rivals):
            table.add_row(*line)
        table.add_section()
    Console(width=90 + 80 * len(rivals), highlight=False).print(table)
    print(f"{options.out}; {countdown.used():.0f} s")
    return 0 if code == 1 else code  # that something is slower than we are is no failure


if __name__ == "__main__":
    sys.exit(main())
