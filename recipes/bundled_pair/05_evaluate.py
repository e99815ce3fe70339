"""Step 5: what the pair does on held-out packages: `python 05_evaluate.py --target T --drafter D --data PACKED --out OUT`.

Tokens per round of chain and trees at several temperatures, with and without noise-coupled drafting and with the drafter's
fitted score rule (`draftwood.scores`) beside the published scores, for all outputs and for
those that do not loop; an output loops when at most 70 % of its 4-grams are distinct. Rounds are read off the target's own
text (`draftwood.training.evaluation`), which is exact; `--engine N` runs N prompts through the engine as well and holds its
tokens and rounds against that. Writes evaluation.json and samples.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from held_out import LOOPS_BELOW, held_windows
from rich.console import Console
from rich.table import Table

from draftwood import LLM, SamplingParams
from draftwood.kernels.registry import load_kernels
from draftwood.models.drafter import Drafter
from draftwood.models.target import Target
from draftwood.models.tokenizer import Tokenizer
from draftwood.scores import NEUTRAL, ScoreRule
from draftwood.training.evaluation import SIZES, accepted_at, distinct_share, tokens_per_round
from draftwood.training.kernels import training_kernels
from draftwood.training.sampler import Sampler, Sequences

SAMPLES, SAMPLES_AT = 10, 0.8
COLUMNS = ("chain", *map(str, SIZES))


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--target", type=Path, required=True)
    p.add_argument("--drafter", type=Path, required=True)
    p.add_argument("--data", type=Path, required=True, help="folder with held.xz")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--prompts", type=int, default=200)
    p.add_argument("--prompt-tokens", type=int, default=64)
    p.add_argument("--new", type=int, default=128)
    p.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.6, 0.8, 1.0])
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    p.add_argument("--engine", type=int, default=0, help="prompts to run through the engine too")
    return p.parse_args()


class Evaluation:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, device = args, args.device
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(args.dtype)
        dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
        kernels = training_kernels(device)
        self.target = Target.from_folder(args.target, dtype=dtype, device=device, kernels=kernels)
        self.drafter = Drafter.from_folder(
            args.drafter, target=self.target, dtype=dtype, device=device, kernels=kernels
        )
        self.kernels, self.rule = load_kernels(device), ScoreRule.from_folder(args.drafter)
        windows = held_windows(args.data, args.prompts, args.prompt_tokens + args.new)
        self.prompts = [w[: args.prompt_tokens] for w in windows]
        self.real = torch.tensor([w[args.prompt_tokens :] for w in windows])

    def text(self, temperature: float) -> Sequences:
        """The target's continuations, end tokens not heeded, some tokens longer than asked for: the last round may go on."""
        a, n = self.args, len(self.prompts)
        length = a.prompt_tokens + a.new + self.drafter.config.block_size
        sampler = Sampler(self.target, n, length)
        made = sampler.run(self.prompts, torch.full((n,), temperature), torch.arange(n))
        made.end = torch.full_like(made.end, length)
        return made

    def rows(self, temperature: float) -> tuple[list[dict[str, Any]], Sequences]:
        """One row per way of drafting, and the text they were measured on."""
        a, made = self.args, self.text(temperature)
        first = a.prompt_tokens
        distinct = distinct_share(made.ids[:, first : first + a.new])
        calm = distinct > LOOPS_BELOW
        anchors = torch.arange(first - 1, first - 1 + a.new, device=self.target.device)
        anchors = anchors.expand(len(made), -1)
        rows = []
        ways = [
            (coupled, rule)
            for coupled in (False, True)[: 1 + (temperature > 0)]
            for rule in (NEUTRAL, self.rule)
        ]
        for coupled, rule in ways:
            accepted = accepted_at(
                self.drafter,
                self.target,
                made.to(self.target.device),
                anchors,
                kernels=self.kernels,
                coupled=coupled,
                rule=rule,
            )
            each = {k: tokens_per_round(v, a.new).cpu() for k, v in accepted.items()}
            rows.append(
                {
                    "temperature": temperature,
                    "coupled": coupled,
                    "fitted": rule != NEUTRAL,
                    "looping": 1.0 - calm.double().mean().item(),
                    "n": len(made),
                    "all": {k: pooled(v) for k, v in each.items()},
                    "non_looping": {k: pooled(v[calm]) for k, v in each.items()} if calm.any() else None,
                    "per_prompt": {k: v.tolist() for k, v in each.items()},
                }
            )
        return rows, made

    def through_engine(self) -> list[dict[str, Any]]:
        """The first prompts through the engine: same tokens as plain decoding, and how fast on this machine."""
        a, results = self.args, []
        llm = LLM(a.target, a.drafter, device=a.device, dtype=a.dtype, max_batch=1)
        for temperature in a.temperatures:
            made: dict[str, list[list[int]]] = {}
            speed: dict[str, list[float]] = {}
            for name, mode, budget in (
                ("plain", "plain", 1),
                ("tree 32", "tree", 32),
                ("auto", "tree", "auto"),
            ):
                made[name], speed[name] = [], []
                for i, prompt in enumerate(self.prompts[: a.engine]):
                    params = SamplingParams(
                        temperature=temperature, seed=i, max_new_tokens=a.new, ignore_eos=True
                    )
                    began = time.perf_counter()
                    (output,) = llm.generate([prompt], params, mode=mode, budget=budget)
                    speed[name].append(a.new / (time.perf_counter() - began))
                    made[name].append(output.token_ids)
            results.append(
                {
                    "temperature": temperature,
                    "prompts": a.engine,
                    "identical": {
                        k: sum(x == y for x, y in zip(v, made["plain"], strict=True)) for k, v in made.items()
                    },
                    "tokens_per_s": {k: statistics.median(v) for k, v in speed.items()},
                }
            )
        return results


def pooled(per_prompt: torch.Tensor) -> float:
    """Tokens over rounds of all prompts together: the harmonic mean, since all make equally many tokens."""
    return float(1.0 / (1.0 / per_prompt).mean())


def show(rows: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "T", "drafting", "outputs", "looping", *COLUMNS, title="tokens per round, held-out packages"
    )
    for row in rows:
        way = ("noise-coupled" if row["coupled"] else "plain") + (", fitted" if row["fitted"] else "")
        for which in ("all", "non_looping"):
            if row[which] is not None:
                numbers = (f"{row[which][c]:.2f}" for c in COLUMNS)
                table.add_row(f"{row['temperature']}", way, which, f"{row['looping']:.0%}", *numbers)
    console.print(table)


def write_samples(file: Path, tokenizer: Tokenizer, made: Sequences, args: argparse.Namespace) -> None:
    parts = [f"# The first {SAMPLES} held-out prompts, temperature {SAMPLES_AT}, unpicked"]
    for i, row in enumerate(made.ids[:SAMPLES].tolist()):
        prompt, new = (
            tokenizer.decode(part)
            for part in (row[: args.prompt_tokens], row[args.prompt_tokens :][: args.new])
        )
        parts.append(
            f"## {i}\n\nPrompt:\n\n````python\n{prompt}\n````\n\nContinuation:\n\n````python\n{new}\n````"
        )
    file.write_text("\n\n".join(parts) + "\n")


def main() -> None:
    args, console = arguments(), Console(width=110)
    args.out.mkdir(parents=True, exist_ok=True)
    evaluation, rows = Evaluation(args), []
    for temperature in args.temperatures:
        found, made = evaluation.rows(temperature)
        rows += found
        if temperature == SAMPLES_AT:
            write_samples(args.out / "samples.md", Tokenizer.from_folder(args.target), made, args)
    real = 1.0 - (distinct_share(evaluation.real) > LOOPS_BELOW).double().mean().item()
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "looping_of_the_real_text": real,
        "rows": rows,
        "engine": evaluation.through_engine() if args.engine else [],
        "settings": {k: v for k, v in vars(args).items() if not isinstance(v, Path)},
    }
    (args.out / "evaluation.json").write_text(json.dumps(result) + "\n")
    show(rows, console)
    console.print(f"the real text that followed the prompts would count as looping in {real:.0%} of cases")
    for line in result["engine"]:
        console.print(line)


if __name__ == "__main__":
    main()
