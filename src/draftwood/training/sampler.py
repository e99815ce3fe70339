"""The target's own continuations, thousands at a time: one rectangle of sequences, one CUDA graph per step.

The engine serves ragged batches and reads its results every round, which costs more than these small models' arithmetic;
for 100 000 sequences this is the difference between a minute and an hour. What comes out is what the engine gives for the
same seed: same models, same noise, same rule (a test holds them together).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from draftwood.kernels.noise.torch_impl import slice_gumbel
from draftwood.models.target import Target, TargetOutput, TreeBatch

PREFILL_TOKENS = 1 << 17
"""Tokens per prefill pass at most; bounds its memory."""


@dataclass
class Sequences:
    """Rows of tokens; what lies past `end` is padding."""

    ids: Tensor  # [n, S] i32
    start: Tensor  # [n] i32, prompt tokens
    end: Tensor  # [n] i32, prompt and continuation, a closing end token included
    temperature: Tensor  # [n] f32 the continuation was sampled at
    seed: Tensor  # [n] i64

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, which: Tensor | slice) -> Self:
        return type(self)(*(t[which] for t in vars(self).values()))

    def to(self, device: torch.device | str) -> Self:
        return type(self)(*(t.to(device) for t in vars(self).values()))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        return cls(*(torch.cat(ts) for ts in zip(*(vars(p).values() for p in parts), strict=True)))


def whole(target: Target, ids: Tensor, taps: tuple[int, ...] = ()) -> TargetOutput:
    """One pass over whole sequences ids [B, S]; `target` was built with `training_kernels`."""
    B, S = ids.shape
    positions = torch.arange(S, device=ids.device, dtype=torch.int32).expand(B, -1)
    output: TargetOutput = target(
        ids, positions, _no_pages(target, B), _chain(torch.zeros_like(ids[:, 0])), taps
    )
    return output


def choose(logits: Tensor, temperature: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """[B] i64, as the kernel `sample` chooses without filters: logits [B, V] f32, temperature 0 is greedy."""
    noisy = logits / temperature.clamp(min=1e-6)[:, None] + slice_gumbel(seed, position, 0, logits.shape[1])
    return torch.where(temperature[:, None] > 0, noisy, logits).argmax(-1)


class Sampler:
    """Continues `batch` prompts at a time to `length` tokens."""

    def __init__(self, target: Target, batch: int, length: int) -> None:
        device, C = target.device, target.config.latent_dim
        self.target, self.batch, self.length = target, batch, length
        self.cache = torch.zeros(
            len(target.layers), batch, length, C, dtype=target.dtype, device=device
        )  # [L, B, S, C]: one page per sequence
        self.ids = torch.zeros(batch, length, dtype=torch.int32, device=device)
        self.start = torch.ones(batch, dtype=torch.int32, device=device)
        self.temperature = torch.zeros(batch, device=device)
        self.seed = torch.zeros(batch, dtype=torch.int64, device=device)
        self.at = torch.zeros(batch, dtype=torch.int32, device=device)  # the position that is run next
        self._replay: Callable[[], None] | None = None

    @torch.inference_mode()
    def run(self, prompts: Sequence[Sequence[int]], temperatures: Tensor, seeds: Tensor) -> Sequences:
        """Continue up to `batch` prompts, each with its temperature [n] and seed [n]."""
        n = len(prompts)
        start = torch.tensor([len(p) for p in prompts], dtype=torch.int32)
        if not 1 <= int(start.min()) <= int(start.max()) < self.length or n > self.batch:
            raise ValueError(f"expected up to {self.batch} prompts of 1..{self.length - 1} tokens")
        self.ids.zero_()
        rows = torch.zeros(n, int(start.max()), dtype=torch.int32)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        self.ids[:n, : rows.shape[1]] = rows.to(self.ids.device)
        self.start.fill_(self.length)[:n] = start.to(self.start.device)
        self.temperature[:n], self.seed[:n] = temperatures.to(self.ids.device), seeds.to(self.ids.device)
        first = int(start.min()) - 1
        self._prefill(first)
        self.at.fill_(first)
        step = self._step_function()
        for _ in range(first, self.length - 1):
            step()
        return self._result(n)

    def _prefill(self, count: int) -> None:
        """Latents of the first `count` positions; the shortest prompt has them all."""
        if count == 0:
            return
        size = max(1, PREFILL_TOKENS // count)
        for at in range(0, self.batch, size):
            part = slice(at, min(at + size, self.batch))
            if count == 1:
                output = self._next(self.ids[part, :1], part, torch.zeros_like(self.at[part]))
            else:
                output = whole(self.target, self.ids[part, :count])
            self.cache[:, part, :count] = output.latents

    def _next(self, tokens: Tensor, part: slice, at: Tensor) -> TargetOutput:
        output: TargetOutput = self.target(
            tokens, torch.zeros_like(at)[:, None], self.cache[:, part], _chain(at)
        )
        return output

    def _step(self) -> None:
        """Run position `at`, choose the token after it unless the prompt has it, advance."""
        column = self.at.long()[:, None]
        output = self._next(self.ids.gather(1, column), slice(None), self.at)
        where = column[None, :, :, None].expand(len(self.cache), -1, -1, self.cache.shape[-1])
        self.cache.scatter_(2, where, output.latents)
        logits = self.target.logits(output.hidden[:, 0])
        chosen = choose(logits, self.temperature, self.seed, self.at + 1).int()
        given = self.ids.gather(1, column + 1)[:, 0]
        token = torch.where(self.at + 1 < self.start, given, chosen)
        self.ids.scatter_(1, column + 1, token[:, None])
        self.at.add_(1)

    def _step_function(self) -> Callable[[], None]:
        if self.ids.device.type != "cuda":
            return self._step
        if self._replay is None:
            kept = self.ids.clone(), self.at.clone()
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self._step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            self.at.copy_(kept[1])
            with torch.cuda.graph(graph):
                self._step()
            self.ids.copy_(kept[0])
            self.at.copy_(kept[1])
            self._replay = graph.replay
        return self._replay

    def _result(self, n: int) -> Sequences:
        ids, start = self.ids[:n].clone().cpu(), self.start[:n].clone().cpu()
        stops = torch.zeros_like(ids, dtype=torch.bool)
        for token in self.target.config.eos_token_ids:
            stops |= ids == token
        stops &= torch.arange(self.length) >= start[:, None]
        first = torch.where(stops.any(1), stops.int().argmax(1) + 1, self.length)
        return Sequences(
            ids, start, first.int(), self.temperature[:n].clone().cpu(), self.seed[:n].clone().cpu()
        )


def _chain(prefix_len: Tensor) -> TreeBatch:
    """A batch whose tables the training kernels do not look at."""
    empty = prefix_len.new_empty(0)
    return TreeBatch(empty, prefix_len, empty, empty)


def _no_pages(target: Target, batch: int) -> Tensor:
    return torch.empty(len(target.layers), batch, 0, target.config.latent_dim, device=target.device)
