"""Does another tree of the same size catch more? Tokens per round of best-first trees against variants of them.

    python benchmarks/tree_shapes.py --out docs/results/tree_shapes.json

At every position of texts that the target chose itself (bundled pair, prompts from this package's source, which the pair was not trained on) the
drafter's candidates are recorded. Since the text does not depend on the tree, any tree can then be held against the text without a model.
"spine": the best candidate of every depth first, then best-first. "at most c": best-first with at most c children per slot.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from draftwood import LLM, SamplingParams
from draftwood.bench.generate.prompts import of_files, own_source
from draftwood.bench.stats import mean_interval
from draftwood.engine.row import Row
from draftwood.engine.runner import Runner
from draftwood.kernels.tree_build import tree_build
from draftwood.round import RoundPlan, Stages
from draftwood.tree import DraftTree

BUDGETS = (8, 16, 32, 64)
CAPS = (2, 3, 4, 8)
CANDIDATES = 32


@dataclass(frozen=True)
class Text:
    """One output and, at each of its P positions, what the drafter proposed for the D tokens after it."""

    lp: torch.Tensor  # [P, D, K]
    ids: torch.Tensor  # [P, D, K]
    following: torch.Tensor  # [P, D] the tokens that came


def record(llm: LLM, prompt: list[int], params: SamplingParams) -> Text:
    """Decode token by token, drafting at full depth before each and verifying none of it."""
    drafting = llm.drafting
    assert drafting is not None
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def topk(logits: torch.Tensor, k: int, **told: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        lp, ids = llm.kernels.topk_logprobs(logits, k, **told)
        seen.append((lp[0], ids[0]))
        return lp, ids

    stages = Stages(llm.target, llm.latents, drafting, replace(llm.kernels, topk_logprobs=topk), True)
    runner = Runner(stages, page_size=llm.config.page_size, max_context=llm.max_context, device=llm.device)
    pages = list(range(-(-(len(prompt) + params.max_new_tokens) // llm.config.page_size)))
    depth = drafting.max_depth
    plan = RoundPlan(CANDIDATES, depth, CANDIDATES, prune=root_of)
    assert params.seed is not None
    runner.prefill(prompt[:-1], 0, pages)
    runner.begin([Row(prompt, [], pages, params.seed, params, ())])
    tokens: list[int] = []
    for _ in range(params.max_new_tokens):
        tokens += runner.round(plan).rows[0].emitted
    lp, ids = (torch.stack(part) for part in zip(*seen, strict=True))
    P = len(tokens) - depth + 1
    following = torch.tensor(tokens, dtype=torch.int32).unfold(
        0, depth, 1
    )  # position p was drafted before token p
    return Text(lp[:P], ids[:P], following)


def root_of(tree: DraftTree) -> DraftTree:
    return tree.truncated(1)


def slots_of(path: torch.Tensor, lp: torch.Tensor, ids: torch.Tensor) -> np.ndarray:
    """[P, D]: in the largest best-first tree, the slot of each token of `path` [P, D] below those before it; else a large number."""
    P, D = path.shape
    whole = torch.full((P,), max(BUDGETS), dtype=torch.int32)
    least = torch.full((P,), -torch.inf)
    tree = tree_build(torch.zeros_like(whole), lp, ids, whole, least, slots=max(BUDGETS)).numpy()
    slots = np.full((P, D), np.iinfo(np.int32).max)
    for p in range(P):
        parent = 0
        for d in range(D):
            here = (tree.parents[p] == parent) & (tree.tokens[p] == int(path[p, d]))
            if not here.any():
                break
            parent = slots[p, d] = int(here.argmax())
    return slots


def best_first(text: Text, cap: int = CANDIDATES) -> dict[int, np.ndarray]:
    """Tokens per round at each position, by budget, with at most `cap` children per slot."""
    slots = slots_of(text.following, text.lp[..., :cap].contiguous(), text.ids[..., :cap].contiguous())
    return {n: 1 + (slots < n).sum(1) for n in BUDGETS}


def spine_first(text: Text) -> dict[int, np.ndarray]:
    """The same with the best candidate of every depth in the tree, whatever its score."""
    D = text.following.shape[1]
    slots = slots_of(text.following, text.lp, text.ids)
    spine = slots_of(text.ids[..., 0], text.lp, text.ids)
    on_spine = (text.ids[..., 0] == text.following).numpy().cumprod(1).astype(bool)
    before = (spine[:, None, :] < slots[:, :, None]).sum(2)  # of the spine: it is in the tree anyway
    return {
        n: 1 + np.where(on_spine, np.arange(D) < n - 1, slots - before < n - D).cumprod(1).sum(1)
        for n in BUDGETS
    }


SHAPES = {"best-first": best_first, "spine": spine_first} | {
    f"at most {c}": (lambda text, c=c: best_first(text, c)) for c in CAPS
}


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--prompts", type=int, default=32)
    p.add_argument("--prompt-tokens", type=int, default=64)
    p.add_argument("--new", type=int, default=128)
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    p.add_argument("--out", type=Path, required=True)
    args, console = p.parse_args(), Console(width=140)
    llm = LLM(max_batch=1, max_context=args.prompt_tokens + args.new + 16)
    texts = of_files(own_source(), llm.tokenizer.encode, llm.target.config.vocab_size, seed=0)
    prompts = texts.take(0, args.prompts, args.prompt_tokens)
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        for temperature in args.temperatures:
            per_text: dict[str, dict[int, list[float]]] = {s: {n: [] for n in BUDGETS} for s in SHAPES}
            for i, prompt in enumerate(track(prompts, f"temperature {temperature}", console=console)):
                params = SamplingParams(
                    temperature=temperature, seed=i, max_new_tokens=args.new, ignore_eos=True
                )
                text = record(llm, prompt, params)
                for shape, tokens in SHAPES.items():
                    for n, each in tokens(text).items():
                        per_text[shape][n].append(float(each.mean()))
            table = Table("tree", *map(str, BUDGETS), title=f"tokens per round, temperature {temperature}")
            for shape, by_budget in per_text.items():
                cells = []
                for n, values in by_budget.items():
                    mean = mean_interval(np.array(values))
                    gain = mean_interval(np.array(values) - np.array(per_text["best-first"][n]))
                    results.append(
                        {"temperature": temperature, "shape": shape, "slots": n, "tokens": mean, "gain": gain}
                    )
                    more = "" if shape == "best-first" else " ({:+.3f} [{:+.3f}, {:+.3f}])".format(*gain)
                    cells.append(f"{mean[0]:.3f}{more}")
                table.add_row(shape, *cells)
            console.print(table)
    settings = {"prompts": args.prompts, "prompt_tokens": args.prompt_tokens, "new": args.new}
    args.out.write_text(
        json.dumps({"settings": settings, "torch": torch.__version__, "results": results}) + "\n"
    )


if __name__ == "__main__":
    main()
