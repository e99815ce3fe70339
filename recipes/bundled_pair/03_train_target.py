"""Step 3: train the target for a given wall-clock time: `python 03_train_target.py --data PACKED --work WORK --out OUT`.

The schedule follows the clock, so a run ends in time on any GPU. WORK keeps the full state; run again with the same arguments, it
goes on where it was. OUT gets the published-format folder (shards under 16 MB), log.jsonl and run.json.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from packed import read_tokens
from target_model import CONFIG, TINY, TrainableTarget
from torch import Tensor

from draftwood.training.folder import save_folder

GENERATION = {"eos_token_id": 0, "do_sample": True, "temperature": 0.8, "max_length": 1024}
"""No top_p: without the tail of the distribution more outputs loop."""
TOKENIZER = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "eos_token": "<|end|>",
    "mask_token": "<|mask|>",
    "clean_up_tokenization_spaces": False,
}


def arguments() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument(
        "--data", type=Path, nargs="+", required=True, help="folders with train.*.xz, held.xz, ..."
    )
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--seconds", type=float, default=450, help="of training, compilation not counted")
    p.add_argument("--batch", type=int, default=128, help="sequences per step")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--lr", type=float, default=2.5e-3)
    p.add_argument("--capacity", type=float, default=1.5, help="rows per expert over an equal share")
    p.add_argument("--init", type=Path, help="target folder to start from, instead of random weights")
    p.add_argument("--drop-repeats", type=float, default=0.0, help="share of repeated 10-grams without loss")
    p.add_argument("--device", default="cuda")
    p.add_argument("--no-compile", action="store_true")
    p.add_argument("--tiny", action="store_true", help="a rehearsal: the same code, a tiny model")
    p.add_argument("--stop-after", type=float, help="stop early after so many seconds, to resume later")
    return p.parse_args()


GRAM, BACK = 10, 256


def repeats(tokens: Tensor) -> Tensor:
    """[n] bool: the GRAM tokens that end here also ended at one of the BACK positions before.

    What goes on after a long match is nearly always more of the same, so a model learns to go on for ever. Leaving
    out most of these labels, and none of those where a repetition ends, teaches it to end one.
    """
    code = torch.zeros(len(tokens) - GRAM + 1, dtype=torch.int64, device=tokens.device)
    for i in range(GRAM):
        code = code * 1_000_003 + tokens[i : i + len(code)]
    found = torch.zeros(len(tokens), dtype=torch.bool, device=tokens.device)
    for back in range(1, BACK + 1):
        found[GRAM - 1 + back :] |= code[back:] == code[:-back]
    return found


class Windows:
    """Windows of T + 1 tokens; each epoch shifts their grid and their order, a function of the step alone."""

    def __init__(self, tokens: Tensor, batch: int, context: int, unlearnt: Tensor | None = None) -> None:
        self.tokens, self.batch, self.context, self.unlearnt = tokens, batch, context, unlearnt
        self.per_epoch = (len(tokens) - 2 * context) // context // batch
        if self.per_epoch < 1:
            raise SystemExit(f"{len(tokens)} tokens are fewer than one batch of {batch} x {context}")
        self.epoch, self.starts = -1, torch.empty(0)

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels, each [batch, context] int64; a label that carries no loss is -100."""
        epoch, row = divmod(step, self.per_epoch)
        if epoch != self.epoch:
            rng = torch.Generator().manual_seed(epoch)
            offset = int(torch.randint(self.context, (1,), generator=rng))
            n = self.per_epoch * self.batch
            self.starts = (torch.randperm(n, generator=rng) * self.context + offset).to(self.tokens.device)
            self.epoch = epoch
        starts = self.starts[row * self.batch : (row + 1) * self.batch, None]
        where = starts + torch.arange(self.context + 1, device=starts.device)
        ids = self.tokens[where].long()
        labels = ids[:, 1:]
        if self.unlearnt is not None:
            labels = labels.masked_fill(self.unlearnt[where[:, 1:]], -100)
        return ids[:, :-1], labels


def half(device: str) -> torch.autocast:
    """bf16 on a GPU; CPUs of the common kind emulate it, slowly."""
    return torch.autocast(device, torch.bfloat16, enabled=device != "cpu")


def lr_share(done: float) -> float:
    """Warm-up over 2 % of the time, then a straight line to zero."""
    return min(done / 0.02 + 0.01, 1.0) * (1.0 - done)


@torch.no_grad()
def held_loss(model: TrainableTarget, tokens: Tensor, context: int, most: int, device: str) -> float:
    """Nats per token over the first `most` windows, no token dropped by any expert."""
    rows = tokens[: (len(tokens) - 1) // context * context + 1].unfold(0, context + 1, context)[:most]
    total = 0.0
    for part in rows.split(16):
        with half(device), torch.compiler.set_stance("force_eager"):
            part = part.long()
            loss, _ = model.loss(part[:, :-1], part[:, 1:], model.exact_capacity())
            total += loss.item() * len(part)
    return total / len(rows)


def optimiser(model: TrainableTarget, lr: float) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)


class Run:
    """Model, optimiser and how far they are; saved and restored as one."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.model = TrainableTarget(TINY if args.tiny else CONFIG).to(args.device)
        if args.init:
            self.model.load_published(args.init)
        self.model.stream = torch.bfloat16 if args.device == "cuda" else None
        self.optimiser = optimiser(self.model, args.lr)
        self.step, self.seconds = 0, 0.0
        self.state = args.work / "target.pt"
        if self.state.exists():
            saved = torch.load(self.state, map_location=args.device)
            self.model.load_state_dict(saved["model"])
            self.optimiser.load_state_dict(saved["optimiser"])
            self.step, self.seconds = saved["step"], saved["seconds"]
            print(f"resumed at step {self.step}, {self.seconds:.0f} s", flush=True)

    def save(self) -> None:
        saved = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict()}
        part = self.state.with_suffix(".part")
        torch.save(saved | {"step": self.step, "seconds": self.seconds}, part)
        part.rename(self.state)

    def export(self) -> None:
        folder = self.args.out / "target"
        save_folder(folder, self.model.c, self.model.published())
        (folder / "generation_config.json").write_text(json.dumps(GENERATION, indent=2) + "\n")
        tokenizer = next(f / "tokenizer.json" for f in self.args.data if (f / "tokenizer.json").exists())
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
        values = TOKENIZER | {"model_max_length": self.model.c["max_position_embeddings"]}
        (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2) + "\n")


def train(run: Run, windows: Windows, report: Callable[[dict], None]) -> None:
    """Step until the schedule, or `--stop-after`, is over. The clock starts after the first step, once compiled."""
    args, model = run.args, run.model
    if not args.no_compile:
        model.compile_parts()
    wait = torch.cuda.synchronize if args.device == "cuda" else lambda: None
    before, started, first = run.seconds, time.perf_counter(), run.step
    ends, reported, saved = min(args.seconds, before + (args.stop_after or math.inf)), 0.0, 0.0
    loss_sum, since = torch.zeros((), device=args.device), 0
    while run.seconds < ends:
        for group in run.optimiser.param_groups:
            group["lr"] = args.lr * lr_share(run.seconds / args.seconds)
        with half(args.device):
            loss, loads = model.loss(*windows.at(run.step), args.capacity)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.optimiser.step()
        run.optimiser.zero_grad(set_to_none=True)
        model.balance(loads, 1e-3 * lr_share(run.seconds / args.seconds))
        loss_sum, since = loss_sum + loss.detach(), since + 1
        run.step += 1
        if run.step == first + 1:
            wait()
            print(f"first step after {time.perf_counter() - started:.0f} s", flush=True)
            started = time.perf_counter()
        if run.step % 10 == 0:
            wait()
        run.seconds = before + time.perf_counter() - started
        if run.seconds - reported > 10:
            rate = (run.step - first - 1) * args.batch * args.context / (run.seconds - before)
            dropped = (loads - args.capacity).clamp(min=0).mean().item()
            values = {
                "step": run.step,
                "seconds": run.seconds,
                "loss": loss_sum.item() / since,
                "tokens_per_s": rate,
            }
            report(values | {"busiest": loads.max().item(), "dropped": dropped})
            reported, loss_sum, since = run.seconds, torch.zeros_like(loss_sum), 0
        if run.seconds - saved > 120:
            run.save()
            run.export()
            saved = run.seconds


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    tokens, held = (
        torch.from_numpy(read_tokens(args.data, n).astype(np.int16)).to(args.device)
        for n in ("train", "held")
    )
    facts = json.loads(next(f / "facts.json" for f in args.data if (f / "facts.json").exists()).read_text())
    run, unlearnt = Run(args), None
    if args.drop_repeats > 0:
        rng = torch.Generator(args.device).manual_seed(0)
        chance = torch.rand(len(tokens), generator=rng, device=args.device)
        unlearnt = repeats(tokens) & (chance < args.drop_repeats)
        print(f"{unlearnt.double().mean().item():.1%} of the tokens carry no loss")
    windows = Windows(tokens, args.batch, args.context, unlearnt)
    size = sum(p.numel() for p in run.model.parameters()) / 1e6
    print(
        f"{size:.1f} M parameters, {len(tokens) / 1e6:.1f} M tokens, {time.perf_counter() - began:.0f} s to load"
    )
    with open(args.out / "log.jsonl", "a") as log:

        def report(values: dict) -> None:
            print(" ".join(f"{k} {v:.4g}" for k, v in values.items()), flush=True)
            log.write(json.dumps(values) + "\n")
            log.flush()

        train(run, windows, report)
    run.save()
    run.export()
    loss = held_loss(run.model, held, args.context, 1024, args.device)
    seen = run.step * args.batch * args.context
    result = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor(),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "steps": run.step,
        "seconds": run.seconds,
        "seconds_of_process": time.perf_counter() - began,
        "tokens_seen": seen,
        "epochs": seen / len(tokens),
        "held_out_loss": loss,
        "held_out_bits_per_byte": loss / math.log(2) / facts["held_bytes_per_token"],
        "settings": {k: str(v) for k, v in vars(args).items()},
    }
    (args.out / "run.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
