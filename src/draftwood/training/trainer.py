"""The training loop of a drafter: schedule, steps, checkpoints, evaluations. It knows tensors, not files of prompts.

Every random choice is a function of the seed and the step, so a run that was interrupted goes on exactly as it would have.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood.kernels.registry import load_kernels
from draftwood.models.drafter import Drafter
from draftwood.models.target import Target
from draftwood.scores import ScoreRule
from draftwood.training.blocks import accept_length, batch_loss, make_batch, pick_anchors
from draftwood.training.evaluation import accepted_at, drafts_at, spread_anchors
from draftwood.training.sampler import Sequences
from draftwood.training.scoring import fit_rule, joined
from draftwood.training.settings import TrainSettings

EVAL_ANCHORS = 8
SYNC_EVERY = 10
"""Steps between reads of the device; a queue no longer than this keeps the clock honest."""


@dataclass
class History:
    """What the plot and the card are made from."""

    losses: list[tuple[float, float]] = field(default_factory=list)  # (step, mean loss since the last entry)
    evaluations: list[dict[str, float]] = field(default_factory=list)  # step, chain, 8, 16, 32, 64


@dataclass(frozen=True)
class Status:
    """How far a run is, for whoever shows it."""

    step: int
    steps: int
    share: float  # of the schedule, by steps or by the clock
    loss: float
    accept: float  # chain, on training blocks
    tokens_per_s: float  # tokens of the sequences seen
    seconds: float
    evaluation: dict[str, float] | None


def learning_rate(share: float, settings: TrainSettings) -> float:
    """Linear warm-up, then a cosine to zero."""
    if share < settings.warmup:
        return settings.lr * (share / settings.warmup)
    done = (share - settings.warmup) / (1.0 - settings.warmup)
    return settings.lr * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))


class Trainer:
    """Trains `drafter` in place; both models were built with `training_kernels`."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        train: Sequences,
        held: Sequences,
        settings: TrainSettings,
        checkpoint: Path,
    ) -> None:
        device = target.device
        self.target, self.drafter, self.settings = target, drafter, settings
        self.train, self.held, self.checkpoint = train.to(device), held.to(device), checkpoint
        self.batch = min(settings.batch, len(train))
        self.per_epoch = len(train) // self.batch
        self.steps = max(1, round(settings.epochs * self.per_epoch))
        drafter.requires_grad_(True)
        self.optimiser = torch.optim.AdamW(drafter.parameters(), lr=settings.lr, weight_decay=0.0)
        self.step, self.seconds, self.history = 0, 0.0, History()
        self._loss = torch.compile(batch_loss, dynamic=False) if settings.compile else batch_loss
        self._order = (-1, torch.empty(0))
        self._rng = torch.Generator(device)
        if checkpoint.exists():
            self._restore()

    @property
    def share(self) -> float:
        clock = self.seconds / self.settings.seconds if self.settings.seconds else 0.0
        return max(self.step / self.steps, clock)

    def run(self, report: Callable[[Status], None] = lambda s: None, stop_at: int | None = None) -> None:
        """Train to the end of the schedule, or until step `stop_at`, leaving a checkpoint."""
        started, before, first = time.perf_counter(), self.seconds, self.step
        losses, lengths, since = 0.0, 0.0, 0
        pending: list[tuple[Tensor, Tensor]] = []
        while self.share < 1.0 and (stop_at is None or self.step < stop_at):
            pending.append(self._one_step())
            if self.step == first + 1:
                pending[0][0].item()
                started = time.perf_counter()  # compilation is over
            over = self.step % SYNC_EVERY == 0
            self.seconds = before + time.perf_counter() - started
            if not over and self.share < 1.0:
                continue
            losses += sum(loss.item() for loss, _ in pending)
            lengths += sum(length.item() for _, length in pending)
            since, pending = since + len(pending), []
            self.seconds = before + time.perf_counter() - started
            self.history.losses.append((float(self.step), losses / since))
            evaluation = None
            if self.step % self.settings.eval_every == 0 or self.share >= 1.0:
                evaluation = self.evaluate()
            rate = (
                (self.step - first) * self.batch * self.train.ids.shape[1] / max(self.seconds - before, 1e-9)
            )
            report(
                Status(
                    self.step,
                    self.steps,
                    self.share,
                    losses / since,
                    lengths / since,
                    rate,
                    self.seconds,
                    evaluation,
                )
            )
            losses, lengths, since = 0.0, 0.0, 0
            if self.step % self.settings.checkpoint_every == 0:
                self.save()
        self.save()

    def _one_step(self) -> tuple[Tensor, Tensor]:
        s = self.settings
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(max(self.share, 0.5 / self.steps), s)
        sequences = self.train.rows(self._rows())
        self._rng.manual_seed((s.seed << 32) + self.step)
        anchors, used = pick_anchors(sequences, s.anchors, self._rng)
        batch = make_batch(
            self.target,
            self.drafter.config.target_layer_ids,
            sequences,
            anchors,
            used,
            s.block_size - 1,
            s.gamma,
            soft=s.labels == "soft",
        )
        device = self.target.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss, right = self._loss(self.drafter, self.target, batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), s.clip)
        self.optimiser.step()
        self.step += 1
        return loss.detach(), accept_length(right, batch.blocks.weights)

    def _rows(self) -> Tensor:
        """The sequences of this step: each epoch in a random order of its own."""
        epoch, place = divmod(self.step, self.per_epoch)
        if epoch != self._order[0]:
            rng = torch.Generator().manual_seed((self.settings.seed << 32) + (1 << 31) + epoch)
            self._order = (epoch, torch.randperm(len(self.train), generator=rng).to(self.target.device))
        return self._order[1][place * self.batch : (place + 1) * self.batch]

    def evaluate(self) -> dict[str, float]:
        """Mean tokens per round on held-out text, at anchors spread over each sequence."""
        device = self.target.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            accepted = accepted_at(
                self.drafter,
                self.target,
                self.held,
                spread_anchors(self.held, EVAL_ANCHORS),
                kernels=load_kernels(device),
                coupled=False,
            )
        values = {name: counts.float().mean().item() for name, counts in accepted.items()}
        self.history.evaluations.append({"step": float(self.step), **values})
        return values

    @torch.inference_mode()
    def fit_scores(self) -> ScoreRule:
        """The score rule that serves this drafter best on the held-out text."""
        device = self.target.device.type
        anchors = spread_anchors(self.held, EVAL_ANCHORS)
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            drafts = [
                drafts_at(self.drafter, self.target, self.held.rows(slice(i, i + 16)), anchors[i : i + 16])
                for i in range(0, len(self.held), 16)
            ]
        return fit_rule(joined(drafts), load_kernels(device))

    def save(self) -> None:
        self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {
            "settings": self.settings.model_dump(),
            "drafter": self.drafter.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "history": vars(self.history),
        }
        part = self.checkpoint.with_suffix(".part")
        torch.save(state, part)
        part.rename(self.checkpoint)

    def _restore(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.target.device)
        settings = TrainSettings(**state["settings"])  # what is newer than the checkpoint had its default
        theirs, ours = settings.model_dump(), self.settings.model_dump()
        if changed := [k for k in ours if theirs[k] != ours[k]]:
            raise ValueError(f"{self.checkpoint}: made with other settings: {', '.join(changed)}")
        self.drafter.load_state_dict(state["drafter"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.history = History(**state["history"])
