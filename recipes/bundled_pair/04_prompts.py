"""Step 4: prompts for the drafter: `python 04_prompts.py --data PACKED --count N --out prompts.jsonl`.

Windows of training text at random places, of several lengths; the last EVAL ones, which training holds out, come
from the held-out packages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from packed import read_tokens


def windows(tokens: np.ndarray, count: int, lengths: list[int], rng: np.random.Generator) -> list[list[int]]:
    """`count` windows that cross no document border."""
    found: list[list[int]] = []
    while len(found) < count:
        for at in rng.integers(0, len(tokens) - max(lengths), count - len(found)):
            window = tokens[at : at + lengths[len(found) % len(lengths)]]
            if (window > 1).all():
                found.append(window.tolist())
    return found


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--data", type=Path, nargs="+", required=True)
    p.add_argument("--count", type=int, required=True)
    p.add_argument("--eval", type=int, default=128)
    p.add_argument("--lengths", type=int, nargs="+", default=[32, 64, 64, 96, 128])
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    rng = np.random.default_rng(0)
    rows = windows(read_tokens(args.data, "train"), args.count, args.lengths, rng)
    rows += windows(read_tokens(args.data, "held"), args.eval, [64], rng)
    args.out.write_text("".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in rows))


if __name__ == "__main__":
    main()
