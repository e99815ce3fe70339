"""A target from a config.json alone, and a drafter whose acceptance is imposed: cost and acceptance, each for itself.

The weights are random, but for one thing: the embedding dominates the residual stream and the head answers token t with t + 1, by a
margin that neither rounding nor sampling noise closes. So the target's coming choices are known without running it, in
any dtype, and a drafter can be right as often as it is told to. What a pass costs does not depend on the numbers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draftwood.drafting import ReplayableDrafting, Ring
from draftwood.engine.llm import LLM
from draftwood.kernels.moe_int4 import GROUP
from draftwood.models.config import InnerNormEps, TargetConfig
from draftwood.models.drafter import Drafter
from draftwood.models.drafter_config import DrafterConfig
from draftwood.models.json_config import read_json
from draftwood.models.layers import pack
from draftwood.models.rope import YarnRule
from draftwood.models.shard import WHOLE
from draftwood.models.target import Target
from draftwood.models.tokenizer import Tokenizer
from draftwood.models.weights import DTYPES, Header, Take, Weights
from draftwood.round import Drafting, RoundState
from draftwood.scores import NEUTRAL, ScoreRule

MARGIN = 100.0
"""Logit of the token that follows; those of others are about 0."""

NIBBLE_STD = 4.6
"""Standard deviation of random 4-bit integers."""

NEXT_RANK = 0.5
"""Of the chance that a candidate and all before it are wrong, the share that the next one has, at least."""

CANDIDATES = 32
DEPTH = 7
"""Tokens drafted without a drafter config: those of Kimi's drafters, of block size 8."""

MANY = 2**30
"""Room of a ring for features that nobody wants."""

TABLE = 1024
"""Requests and positions after which the luck of the draw repeats itself."""


class SyntheticLLM(LLM):
    """An `LLM` of a config, with `imposed` as its drafter. Without a drafter config, drafting costs next to nothing.

    Raises `ModelError` as a folder with this config would.
    """

    def __init__(
        self, config: str | Path, drafter_config: str | Path | None, layers: int | None, **settings: Any
    ) -> None:
        self._layers = layers
        # Coupled noise would reorder candidates whose order is imposed.
        super().__init__(config, drafter_config, noise_coupled=False, **settings)
        self.imposed = ImposedDrafting(self.target.config.vocab_size, self.drafting, self.device)
        self.drafting = self.imposed

    def _target_config(self, model: str | Path, inner_norm_eps: InnerNormEps) -> tuple[Path, TargetConfig]:
        """A file instead of a folder, and its config."""
        return Path(model), read_target_config(Path(model), self._layers, inner_norm_eps)

    def _load_target(self, folder: Path, inner_norm_eps: InnerNormEps) -> tuple[Tokenizer, Target]:
        _, config = self._target_config(folder, inner_norm_eps)
        weights = RandomWeights(config, self.dtype, torch.device(self.device))
        target = Target(config, Take(weights), kernels=self.kernels, device=weights.device)
        return NoText(config.vocab_size), target

    def _load_drafter(self, path: str | Path, yarn_rule: YarnRule | None) -> tuple[Drafter, ScoreRule]:
        target = self.target.config
        values = read_json(Path(path))
        with _as_folder(values) as folder:
            taps = DrafterConfig.from_folder(folder).target_layer_ids
        nested = values.get("dflash_config") or values
        nested["target_layer_ids"] = [min(i, target.num_hidden_layers - 1) for i in taps]  # that are left
        if "num_target_layers" in values:
            values["num_target_layers"] = target.num_hidden_layers
        with _as_folder(values) as folder:
            config = DrafterConfig.from_folder(folder)
        config.check_fits(target)
        weights = RandomWeights(target, self.dtype, torch.device(self.device))
        drafter = Drafter(config, Take(weights), kernels=self.kernels, device=weights.device)
        pack(drafter)
        return drafter, NEUTRAL


def read_target_config(
    file: Path, layers: int | None, inner_norm_eps: InnerNormEps = "reference"
) -> TargetConfig:
    """The config in a file of any name, with so many layers, and with a head of its own: the weights need one."""
    values = read_json(file)
    blocks = [values, text] if isinstance(text := values.get("text_config"), dict) else [values]
    for block in blocks:
        if "tie_word_embeddings" in block:
            block["tie_word_embeddings"] = False
    if layers is not None:
        blocks[-1]["num_hidden_layers"] = layers
    with _as_folder(values) as folder:
        return TargetConfig.from_folder(folder, inner_norm_eps=inner_norm_eps)


class _as_folder(tempfile.TemporaryDirectory[str]):  # noqa: N801 - used as a function
    """A folder that holds a config.json with these values, for as long as it is entered."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__()
        (Path(self.name) / "config.json").write_text(json.dumps(values))


class NoText(Tokenizer):
    """A vocabulary whose tokens mean nothing: prompts are token ids, and every token's text is a dot."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__([b"."] * vocab_size, (), {}, None)

    def token_id(self, token: str) -> int:
        raise KeyError(token)

    def _encode(self, parts: Sequence[str | int]) -> list[int]:
        raise ValueError("a synthetic model has no text; give token ids")


class RandomWeights(Weights):
    """`Weights` without files: whatever tensor is asked for, of the scale that trained ones have.

    Numbers are those that bf16 has, as published weights are; INT4 words are uniform.
    """

    def __init__(self, config: TargetConfig, dtype: torch.dtype, device: torch.device, seed: int = 0) -> None:
        self.config, self.dtype, self.device, self.shard = config, dtype, device, WHOLE
        self._loud = 8.0 * config.num_hidden_layers**0.5  # of the embedding: the layers add about 1 each
        self._generator = torch.Generator(device).manual_seed(seed)
        self._embedding: Tensor | None = None

    def __contains__(self, name: str) -> bool:
        return not name.endswith("mask_embedding")

    def header(self, name: str, *shape: int) -> Header:
        scale = "BF16" if self.dtype == torch.bfloat16 else "F32"
        return Header(f"tensor `{name}`", scale, shape)

    def take(
        self,
        name: str,
        *shape: int,
        dtype: torch.dtype | None = None,
        part: tuple[slice, ...] = (),
        stored: Collection[str] = DTYPES,
    ) -> Tensor:
        """As of files; `part` is all of it, for there is one rank, and `stored` is what it would be stored as."""
        return self._make(name, shape).to(self.device, dtype or self.dtype)

    def _make(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("weight_shape"):
            sides = self.config.moe_intermediate_size, self.config.hidden_size
            return torch.tensor(sides[::-1] if "down_proj" in name else sides)
        if name.endswith("weight_packed"):
            words = torch.empty(shape, dtype=torch.int32, device=self.device)
            return words.random_(-(2**31), 2**31, generator=self._generator)
        if name.endswith("weight_scale"):
            return torch.full(shape, (GROUP * shape[-1]) ** -0.5 / NIBBLE_STD, device=self.device)
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=self.device)
        if name.endswith("correction_bias"):
            return torch.zeros(shape, device=self.device)
        if name.endswith("embed_tokens.weight"):
            rows = torch.nn.functional.normalize(
                self._noise(shape, 1.0), dim=-1
            )  # in place of long and short ones
            self._embedding = rows * (self._loud * shape[-1] ** 0.5)
            return self._embedding
        if name == "lm_head.weight":
            assert self._embedding is not None
            return self._embedding.roll(1, 0).mul_(MARGIN / self._loud / shape[-1])
        return self._noise(shape, shape[-1] ** -0.5)

    def _noise(self, shape: tuple[int, ...], std: float) -> Tensor:
        noise = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
        return noise.normal_(0, std, generator=self._generator)


class ImposedDrafting:
    """`Drafting` that is right as often as it is told, see `impose`; replayable if the drafter inside it is, or there is none.

    Its candidates say how likely they are, so trees get the scores of a drafter that knows itself. Whether it is right at a
    position of a request is drawn once: all modes have the same luck.
    """

    rule = NEUTRAL

    def __init__(self, vocab_size: int, inner: Drafting | None, device: str) -> None:
        self.inner, self.device, self.V = inner, device, vocab_size
        self.taps: tuple[int, ...] = (0,) if inner is None else inner.taps
        self.max_depth: int = DEPTH if inner is None else inner.max_depth
        self.K = min(CANDIDATES, vocab_size - 1)
        self.room: int = getattr(inner, "room", MANY)
        self._ring: Ring | None = None
        luck = torch.rand(TABLE, TABLE, generator=torch.Generator().manual_seed(0))
        self.luck = luck.to(device)
        self.lp = torch.empty(self.max_depth, self.K, device=device)
        self.until = torch.empty_like(self.lp)
        self.impose((1.0,))

    def impose(self, rates: Sequence[float]) -> None:
        """The chance that the first candidate is right at depth 1, 2, ...; the last rate holds for all deeper."""
        each = [rates[min(d, len(rates) - 1)] for d in range(self.max_depth)]
        chances = torch.tensor([ranks(rate, self.K) for rate in each], dtype=torch.float64)  # [D, K]
        self.lp.copy_(chances.log())  # in place: recorded rounds read them
        self.until.copy_(chances.cumsum(-1))

    def logits(self, state: RoundState, depth: int) -> Tensor:
        """[B, depth, V] f32: log-probabilities of the candidates, -inf for all other tokens."""
        B = len(state.root)
        if self.inner is None:
            out = torch.full((B, depth, self.V), -torch.inf, device=self.device)
        else:
            out = self.inner.logits(state, depth).fill_(-torch.inf)
        ahead = torch.arange(1, depth + 1, device=self.device)
        true = state.root.long()[:, None] + ahead  # [B, D]
        position = state.prefix_len.long()[:, None] + ahead
        luck = self.luck[state.seed[:, None] % TABLE, position % TABLE]
        right = (luck[..., None] >= self.until[:depth, :-1]).sum(-1, keepdim=True)  # [B, D, 1], a rank
        rank = torch.arange(self.K, device=self.device).expand(B, depth, -1)
        tokens = torch.where(rank == right, true[..., None], true[..., None] + 1 + rank) % self.V
        lp = self.lp[:depth].expand(B, -1, -1)
        out.scatter_(2, tokens, lp)
        return out

    def extend(self, features: Tensor, page_table: Tensor, start: Tensor, count: Tensor) -> None:
        if self.inner is not None:
            self.inner.extend(features, page_table, start, count)

    @property
    def ring(self) -> Ring | None:
        return self._ring

    @ring.setter
    def ring(self, ring: Ring | None) -> None:
        self._ring = ring
        if isinstance(self.inner, ReplayableDrafting):
            self.inner.ring = ring

    def new_ring(self, rows: int) -> Ring:
        if isinstance(self.inner, ReplayableDrafting):
            return self.inner.new_ring(rows)
        nothing = torch.zeros(rows, dtype=torch.int32, device=self.device)
        return Ring(torch.zeros(rows, 1, 0, device=self.device), nothing, nothing.clone())

    def empty_ring(self, page_table: Tensor) -> None:
        if isinstance(self.inner, ReplayableDrafting):
            self.inner.empty_ring(page_table)

    def catch_up(self) -> None:
        if self.inner is not None:
            self.inner.catch_up()

    def copy_page(self, source: int, target: int) -> None:
        if self.inner is not None:
            self.inner.copy_page(source, target)


def ranks(rate: float, K: int) -> list[float]:
    """The chance of each of K candidates to be right: `rate`, then what is left in halves, in smaller parts for low rates.

    Descending, so that candidates keep their order; sums to 1.
    """
    rest = max(NEXT_RANK, 1 - 0.9 * rate / (1 - rate)) if rate < 1 else NEXT_RANK
    tail = [rest**r for r in range(K - 1)]
    return [rate, *((1 - rate) * t / sum(tail) for t in tail)]
