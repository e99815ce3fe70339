"""Where outputs part: greedy trees and plain decoding at two batch sizes, on the same prompts.

    python benchmarks/divergence.py --device cuda --prompts 1000 --out divergence.json

In bfloat16 a product's rounding depends on its shape, so a batch size or a tree may tip a near tie. Every prompt is continued four
ways. A pair of ways is described by the share of prompts whose outputs differ, and every difference by the first position where
they do: both ways have read the same tokens there, and an fp32 copy of the model tells how far apart the two tokens were
("gap", in nats). What rounding does to such a gap is measured beside it, at all positions: the fp32 copy against the model, token
for token ("rounding": the 99.9 % quantile). A gap beyond that needs a tipped router: "router" is the least lead of an expert that
was chosen over one that was not, in any layer and position up to there, against the same quantile for routers. Of many leads
one is nearly always that small, so it says only that the router may be the reason.

With `--deterministic` nothing may differ; anything that does makes the exit status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from draftwood import LLM, SamplingParams
from draftwood.bench.device import origin
from draftwood.bench.generate.prompts import of_files, own_source
from draftwood.bench.stats import mean_interval
from draftwood.config import Mode
from draftwood.models.target import MoE, TreeBatch
from draftwood.tree import from_parents

Way = tuple[Mode, int]
"""A mode and a batch size."""

ROUNDING = 0.999


class Reader:
    """What a model makes of a text that is given: its logits, and by how much its routers decided."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._leads: list[Tensor] = []
        for module in llm.target.modules():
            if isinstance(module, MoE):
                vars(module)["addends"] = partial(self._listening, module, module.addends)

    def _listening(
        self, module: MoE, addends: Callable[[Tensor], tuple[Tensor, ...]], x: Tensor
    ) -> tuple[Tensor, ...]:
        router = module.router
        scores = (x.to(router.dtype) @ router.T).sigmoid() + module.bias
        k = module.routing["top_k"]
        best = scores.topk(min(k + 1, len(router)), -1).values
        self._leads.append(best[:, k - 1] - best[:, -1])
        return addends(x)

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """Log-probabilities [N, V] fp32 after each token, and the routers' leads [layers, N]."""
        n, target, device = len(tokens), self.llm.target, self.llm.device
        tree = from_parents(np.array([tokens]), np.arange(-1, n - 1)[None], [n]).torch(device)
        batch = TreeBatch(
            torch.zeros(1, 1, dtype=torch.int32, device=device),
            torch.zeros(1, dtype=torch.int32, device=device),
            tree.ancestors,
            tree.n_slots,
        )
        self._leads.clear()
        hidden = target(tree.tokens, tree.depths, self.llm.latents.pages, batch).hidden
        leads = torch.stack(self._leads) if self._leads else torch.full((1, n), torch.inf, device=device)
        return target.logits(hidden)[0].log_softmax(-1), leads


def continued(llm: LLM, prompts: Sequence[list[int]], way: Way, budget: int, new: int) -> list[list[int]]:
    mode, size = way
    params = SamplingParams(max_new_tokens=new, ignore_eos=True)
    outputs: list[list[int]] = []
    for i in range(0, len(prompts), size):
        some = llm.generate(
            prompts[i : i + size], params, mode=mode, budget=budget if mode == "tree" else None
        )
        outputs += [output.token_ids for output in some]
    return outputs


def rounding(model: Reader, precise: Reader, texts: Sequence[list[int]]) -> tuple[float, float]:
    """What is off by rounding, as a quantile: the lead of the best token over the second, and a router's lead."""
    tokens, routers = [], []
    for text in texts:
        (lp, lead), (true, true_lead) = model(text), precise(text)
        first, second = true.topk(2).indices[..., None].unbind(1)
        gap, true_gap = ((x.gather(1, first) - x.gather(1, second)).flatten() for x in (lp, true))
        tokens.append((gap - true_gap).abs())
        routers.append((lead - true_lead).abs().flatten())
    return tuple(float(np.quantile(torch.cat(x).cpu().numpy(), ROUNDING)) for x in (tokens, routers))  # type: ignore[return-value]


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def explained(
    prompts: Sequence[list[int]], a: list[list[int]], b: list[list[int]], precise: Reader
) -> list[dict[str, Any]]:
    """Every output of `a` that differs in `b`: where, and what the precise model says about that place."""
    found = []
    for number, (prompt, x, y) in enumerate(zip(prompts, a, b, strict=True)):
        at = first_difference(x, y)
        if at is None:
            continue
        lp, leads = precise(prompt + x[:at])
        gap = float((lp[-1, x[at]] - lp[-1, y[at]]).abs())
        found.append({"prompt": number, "at": at, "gap": gap, "router": float(leads.min())})
    return found


def cells(
    found: Sequence[dict[str, Any]], share: Sequence[float], noise: Mapping[str, float]
) -> Iterator[str]:
    """What the table says of a pair of ways."""
    gaps = [f["gap"] for f in found]
    beyond = [f for f in found if f["gap"] > noise["gap"]]
    yield from (f"{share[0]:.1%}", f"{share[1]:.1%} to {share[2]:.1%}")
    yield from (f"{np.median(gaps):.3f}", f"{max(gaps):.3f}") if gaps else ("-", "-")
    yield from (str(len(beyond)), str(sum(f["router"] <= noise["router"] for f in beyond)))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path)
    p.add_argument("--drafter", type=Path)
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--prompts", type=int, default=1000)
    p.add_argument("--length", type=int, default=64, help="tokens of a prompt")
    p.add_argument("--new", type=int, default=64)
    p.add_argument("--batches", type=int, nargs=2, default=[8, 32])
    p.add_argument("--budget", type=int, default=32)
    p.add_argument("--graphs", action=argparse.BooleanOptionalAction)
    p.add_argument("--deterministic", action="store_true")
    p.add_argument("--out", type=Path, required=True)
    return p.parse_args()


def main() -> int:
    args, console = arguments(), Console(width=140)
    folders = (args.model, args.drafter)
    common = {"device": args.device, "max_context": args.length + args.new, "prefix_cache": False}
    llm = LLM(
        *folders,
        **common,
        dtype=args.dtype,
        max_batch=max(args.batches),
        graphs=args.graphs,
        deterministic=args.deterministic,
    )
    vocab = llm.target.config.vocab_size
    prompts = of_files(own_source(), llm.tokenizer.encode, vocab, 0).take(0, args.prompts, args.length)
    small, large = args.batches
    ways: list[Way] = [("plain", small), ("plain", large), ("tree", small), ("tree", large)]
    plain, other, tree, other_tree = ways
    outputs = {way: continued(llm, prompts, way, args.budget, args.new) for way in ways}

    precise = Reader(LLM(*folders, **common, dtype="float32", max_batch=1))
    texts = [p + x for p, x in zip(prompts[:100], outputs[plain], strict=False)]
    noise = dict(zip(("gap", "router"), rounding(Reader(llm), precise, texts), strict=True))
    table = Table(
        "a", "b", "differ", "95 %", "gap: median", "largest", "beyond rounding", "of these, router within"
    )
    rows, differs = [], {}
    for a, b in ((plain, other), (plain, tree), (other, other_tree), (tree, other_tree)):
        found = explained(prompts, outputs[a], outputs[b], precise)
        numbers = {f["prompt"] for f in found}
        differs[a, b] = np.array([i in numbers for i in range(len(prompts))], float)
        share = mean_interval(differs[a, b])
        rows.append({"a": a, "b": b, "differ": share, "found": found})
        names = (f"{mode}, batch {size}" for mode, size in (a, b))
        table.add_row(*names, *cells(found, share, noise))
    more = mean_interval(differs[plain, tree] - differs[plain, other])
    args.out.write_text(
        json.dumps(
            {
                **origin(llm.device),
                "settings": {k: str(v) for k, v in vars(args).items() if k != "out"},
                "rounding": noise,
                "tree_less_plain": more,
                "pairs": rows,
            }
        )
        + "\n"
    )
    console.print(table)
    console.print(
        f"rounding, {ROUNDING:.1%}: gap {noise['gap']:.3f} nats, router {noise['router']:.2g}. Trees differ from plain decoding "
        f"{more[0]:+.1%} [{more[1]:+.1%}, {more[2]:+.1%}] more often than batch {large} from batch {small}."
    )
    return int(args.deterministic and any(d.any() for d in differs.values()))


if __name__ == "__main__":
    sys.exit(main())
