"""Tokens per second of whole generation: draft trees as public code decodes them with `transformers`, and this engine.

    python benchmarks/ddtree_generate.py --out ddtree_generate.json

The loop is a reimplementation that follows the DDTree authors' public one (arXiv 2604.12989), not their program: a target of
`transformers` over a `DynamicCache`, a DFlash drafter of torch modules with a cache that grows, the heap of `ddtree_loop.py`, the tree and
its prefix in one pass under an additive mask, a walk on the host, and a cache compacted layer by layer. Where it is not theirs:
the drafter attends through torch's `scaled_dot_product_attention`, theirs through flash-attn; compaction is Python, theirs may be a C++
extension; their stage timers, which wait for the device, are left out; a tap of the last layer is taken before the final norm, as
the bundled drafter was trained.

Both sides have the same weights, prompts and slots, a batch of one, greedy choices, and go on past stop tokens. They take turns. The
clock of decoding runs from the end of the first round to the end of the last, so that prefill is left out on both sides alike.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from ddtree_loop import loop_accept, loop_build
from draftwood import LLM, SamplingParams, bundled
from draftwood.bench.countdown import Countdown
from draftwood.bench.device import describe
from draftwood.bench.generate.prompts import of_files, own_source
from draftwood.bench.stats import compare_pairs, median_interval
from draftwood.bench.store import commit, versions
from draftwood.models.drafter_config import DrafterConfig
from draftwood.scores import NEUTRAL


class Attention(nn.Module):
    """A block attends to itself and to the context: new context tokens enter as keys and values, older ones are cached."""

    def __init__(self, config: DrafterConfig, index: int) -> None:
        super().__init__()
        d, self.head_dim, self.index = config.hidden_size, config.head_dim, index
        queries, keys = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(d, queries, bias=False)
        self.k_proj = nn.Linear(d, keys, bias=False)
        self.v_proj = nn.Linear(d, keys, bias=False)
        self.o_proj = nn.Linear(queries, d, bias=False)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, cache: DynamicCache) -> Tensor:
        """x [1, S, d] and context [1, N, d] at successive positions; cos, sin [1, N + S, hd]. Gives [1, S, d]."""
        S = x.shape[1]
        q = self.q_norm(self.q_proj(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        k = torch.cat((self.k_proj(context), self.k_proj(x)), 1).unflatten(-1, (-1, self.head_dim))
        v = torch.cat((self.v_proj(context), self.v_proj(x)), 1).unflatten(-1, (-1, self.head_dim))
        q, k = turned(q, cos[:, -S:], sin[:, -S:]), turned(self.k_norm(k).transpose(1, 2), cos, sin)
        k, v = cache.update(k, v.transpose(1, 2), self.index)
        o = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        out: Tensor = self.o_proj(o.transpose(1, 2).flatten(2))
        return out


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on x [1, H, N, hd]."""
    half: Tensor = rotate_half(x)
    return x * cos[:, None] + half * sin[:, None]


class DraftLayer(nn.Module):
    def __init__(self, config: DrafterConfig, qwen: Qwen3Config, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, index)
        self.mlp = Qwen3MLP(qwen)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, cos: Tensor, sin: Tensor, cache: DynamicCache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DFlash(nn.Module):
    """A DFlash drafter (arXiv 2602.06036) of torch modules, named as its tensors are published.

    `qwen` is its config as `transformers` reads it.
    """

    def __init__(self, config: DrafterConfig, qwen: Qwen3Config, dtype: torch.dtype) -> None:
        super().__init__()
        d = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * d, d, bias=False)
        self.hidden_norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config, qwen, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(d, eps=config.rms_norm_eps)
        self.to(dtype)
        self.rotary = Qwen3RotaryEmbedding(qwen)  # its frequencies stay fp32

    @classmethod
    def from_folder(cls, folder: Path, dtype: torch.dtype, device: str) -> DFlash:
        """Raises ValueError for a drafter that is not fully attentive, RuntimeError naming tensors that do not fit."""
        config = DrafterConfig.from_folder(folder)
        if any(layer.causal or layer.window is not None for layer in config.layers):
            raise ValueError(f"{folder}: the loop takes drafters without causal or sliding layers only")
        drafter = cls(config, Qwen3Config.from_pretrained(folder), dtype)
        drafter.load_state_dict(load_file(folder / "model.safetensors"))
        return drafter.to(device).eval()

    def forward(self, block: Tensor, features: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
        """block [1, S, d], features [1, N, taps d] of tokens not yet cached, positions [1, N + S] -> [1, S, d]."""
        context = self.hidden_norm(self.fc(features))
        cos, sin = self.rotary(block, positions)
        for layer in self.layers:
            block = layer(block, context, cos, sin, cache)
        hidden: Tensor = self.norm(block)
        return hidden


@dataclass(frozen=True)
class Generated:
    """What a call gave: all its tokens, and of every round when it ended, in seconds after the call, and what it brought."""

    tokens: list[int]
    ended: list[float]
    brought: list[int]

    @property
    def rate(self) -> float:
        """Tokens per second after the first round."""
        return sum(self.brought[1:]) / (self.ended[-1] - self.ended[0])

    @property
    def rate_with_prefill(self) -> float:
        return len(self.tokens) / self.ended[-1]


class Loop:
    """The public loop for one pair and `slots` per tree, the root included."""

    def __init__(self, model: Path, drafter: Path, dtype: torch.dtype, device: str, slots: int) -> None:
        config = DrafterConfig.from_folder(drafter)
        self.block_size, self.mask_token = config.block_size, config.mask_token_id
        self.taps, self.slots = config.target_layer_ids, slots
        self.drafter = DFlash.from_folder(drafter, dtype, device)
        target: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa")
        self.target = target.to(device).eval()
        self.embed, self.head = target.get_input_embeddings(), target.get_output_embeddings()
        # renamed between transformers 5.17 and 5.24
        parameters = inspect.signature(target.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.residual = torch.empty(0)
        target.model.norm.register_forward_pre_hook(self._keep_residual)

    def _keep_residual(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.residual = inputs[0]

    @torch.inference_mode()
    def __call__(self, prompt: Sequence[int], new: int) -> Generated:
        """`new` tokens after `prompt`."""
        started = time.perf_counter()
        device, start, end = self.target.device, len(prompt), len(prompt) + new
        text = torch.full((1, end + self.block_size), self.mask_token, device=device)
        text[0, :start] = torch.tensor(prompt, device=device)
        positions = torch.arange(text.shape[1], device=device)[None]
        mask = torch.zeros(1, 1, self.slots, end + self.slots, dtype=self.target.dtype, device=device)
        seen, drafted = DynamicCache(), DynamicCache()
        logits, features = self._read(text[:, :start], positions[:, :start], seen, logits_to_keep=1)
        text[0, start] = root = int(logits[0, -1].argmax())
        ended, brought = [], []
        while start + 1 < end:  # the root is at `start`, and all before it is cached
            block = slice(start, start + self.block_size)
            where = positions[:, drafted.get_seq_length() : block.stop]
            hidden = self.drafter(self.embed(text[:, block]), features, where, drafted)
            drafted.crop(-self.block_size)
            draft = self.head(hidden[:, 1:])[0]
            tree = loop_build(draft, root, self.slots, min(self.slots - 1, draft.shape[-1]))
            T = len(tree.tokens)
            own = mask[0, 0, :T, start : start + T]
            own.fill_(torch.finfo(mask.dtype).min).masked_fill_(tree.visible, 0)
            slots, at = tree.tokens[None], start + tree.depths[None]
            logits, features = self._read(slots, at, seen, attention_mask=mask[:, :, :T, : start + T])
            own.zero_()
            path, root = loop_accept(tree, logits[0].argmax(-1))
            ended.append(time.perf_counter() - started)
            brought.append(min(len(path), end - start - 1))
            compact(seen, start, path)
            features = features.index_select(1, path)
            text[0, start : start + len(path)] = tree.tokens[path]
            start += len(path)
            text[0, start] = root
        return Generated(text[0, len(prompt) : end].tolist(), ended, brought)

    def _read(
        self, tokens: Tensor, positions: Tensor, cache: DynamicCache, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Logits [1, T, V] and features [1, T, taps d] of tokens [1, T], which join the cache."""
        options[self.cache_name] = cache
        out = self.target(
            tokens, position_ids=positions, use_cache=True, output_hidden_states=True, **options
        )
        after = (*out.hidden_states[1:-1], self.residual)  # the last one there has passed the final norm
        return out.logits, torch.cat([after[i] for i in self.taps], -1)


def compact(cache: Any, start: int, path: Tensor) -> None:
    """Keep of the tree, which lies in the cache from `start` on, the slots `path`."""
    end = start + len(path)
    for layer in cache.layers:
        for stored in (layer.keys, layer.values):
            stored[..., start:end, :] = stored[..., start:, :].index_select(-2, path)
    if unused := cache.get_seq_length() - end:
        cache.crop(-unused)


def ours(llm: LLM, prompt: Sequence[int], new: int) -> Generated:
    ended, brought, tokens = [], [], []
    started = time.perf_counter()
    for event in llm.stream(list(prompt), SamplingParams(max_new_tokens=new, ignore_eos=True)):
        if event.token_ids:
            ended.append(time.perf_counter() - started)
            brought.append(len(event.token_ids))
            tokens += event.token_ids
    return Generated(tokens, ended, brought)


def contest(
    llm: LLM, loop: Loop, prompts: Sequence[Sequence[int]], new: int, seconds: float
) -> list[dict[str, Generated]]:
    """Both sides on the prompts, in turns, as far as `seconds` since the start of the process allow.

    The last prompt warms both up and is not counted.
    """
    if new <= loop.block_size + 1:
        raise ValueError(f"--new: {new} tokens may be one round; give more than {loop.block_size + 1}")
    countdown, pairs = Countdown(seconds), []
    sides = {"ours": lambda p: ours(llm, p, new), "loop": lambda p: loop(p, new)}
    for i, prompt in enumerate([prompts[-1], *prompts[:-1]]):
        began = countdown.used()
        pair = {}
        for name in list(sides)[:: 1 if i % 2 else -1]:
            if llm.device == "cuda":
                torch.cuda.synchronize()
            pair[name] = sides[name](prompt)
        pairs.append(pair)
        expected = countdown.used() - began if i else 0.0  # warming up costs more than what follows
        if countdown.left() <= expected:
            break
    return pairs[1:]


def summary(pairs: Sequence[dict[str, Generated]]) -> dict[str, Any]:
    """Medians over prompts with their 95 % intervals; below 6 prompts these are [min, max]. Last rounds are cut short, so
    tokens per round leave them out."""
    found: dict[str, Any] = {"prompts": len(pairs)}
    for name in ("ours", "loop"):
        runs = [pair[name] for pair in pairs]
        whole = [n for run in runs for n in run.brought[:-1]]
        found[name] = {
            "tokens_per_s": interval([run.rate for run in runs]),
            "tokens_per_s_with_prefill": interval([run.rate_with_prefill for run in runs]),
            "ms_per_round": interval([1e3 * (r.ended[-1] - r.ended[0]) / (len(r.ended) - 1) for r in runs]),
            "tokens_per_round": sum(whole) / len(whole),
        }
    for figure in ("rate", "rate_with_prefill"):
        rates = ([getattr(pair[name], figure) for pair in pairs] for name in ("ours", "loop"))
        c = compare_pairs(*rates)
        found[f"ratio_{figure}"] = {"median": c.ratio, "low": c.low, "high": c.high, "p": c.p}
    found["equal"] = sum(pair["ours"].tokens == pair["loop"].tokens for pair in pairs) / len(pairs)
    return found


def interval(values: Sequence[float]) -> dict[str, float]:
    low, high = median_interval(values)
    return {"median": median(values), "low": low, "high": high}


def show(found: dict[str, Any], console: Console) -> None:
    table = Table("", "tok/s", "95 %", "with prefill", "95 %", "ms/round", "tokens/round")
    for name in ("ours", "loop"):
        side = found[name]
        cells = []
        for figure in ("tokens_per_s", "tokens_per_s_with_prefill"):
            value = side[figure]
            cells += [f"{value['median']:.1f}", f"{value['low']:.1f} to {value['high']:.1f}"]
        table.add_row(
            name, *cells, f"{side['ms_per_round']['median']:.2f}", f"{side['tokens_per_round']:.2f}"
        )
    console.print(table)
    texts = [
        "{median:.2f} times [{low:.2f}, {high:.2f}]".format(**found[f"ratio_{figure}"])
        for figure in ("rate", "rate_with_prefill")
    ]
    console.print(
        f"ours over the loop, prompt by prompt: {texts[0]}; with prefill {texts[1]}. "
        f"{found['prompts']} prompts, {found['equal']:.0%} of the outputs equal."
    )


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", type=Path, help="target folder; the bundled pair without it")
    p.add_argument("--drafter", type=Path)
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--length", type=int, default=64, help="tokens of a prompt")
    p.add_argument("--new", type=int, default=48, help="tokens to generate")
    p.add_argument("--budget", type=int, default=32, help="slots per tree, root included, on both sides")
    p.add_argument("--plain-scores", action="store_true", help="leave the drafter's scores.json aside")
    p.add_argument("--device", default="auto")
    p.add_argument("--dtype", default="auto")
    p.add_argument("--seconds", type=float, default=600, help="of the whole command; ends with what there is")
    p.add_argument("--out", type=Path, required=True)
    args = p.parse_args()
    if (args.model is None) != (args.drafter is None):
        p.error("--model and --drafter: give both or neither")
    if args.prompts < 1 or args.budget < 2:
        p.error("--prompts takes 1 or more, --budget 2 or more")
    model, drafter = bundled.pair() if args.model is None else (args.model, args.drafter)
    llm = LLM(
        model,
        drafter,
        device=args.device,
        dtype=args.dtype,
        max_batch=1,
        budget=args.budget,
        max_context=args.length + args.new,
        prefix_cache=False,
    )
    if args.plain_scores:
        assert llm.drafting is not None
        llm.drafting.rule = NEUTRAL
    loop = Loop(model, drafter, llm.dtype, llm.device, args.budget)
    windows = of_files(own_source(), llm.tokenizer.encode, llm.target.config.vocab_size, 0)
    prompts = windows.take(0, args.prompts + 1, args.length)
    pairs = contest(llm, loop, prompts, args.new, args.seconds)
    if not pairs:
        sys.exit(f"--seconds: all {args.seconds:.0f} s went on loading and warming up")
    found = summary(pairs)
    settings = {k: str(v) for k, v in vars(args).items() if k != "out"}
    written = {
        "device": describe(llm.device),
        "dtype": str(llm.dtype),
        "versions": {**versions(), "transformers": transformers.__version__},
        "commit": commit(),
        "settings": settings,
        "summary": found,
        "pairs": [{name: asdict(run) for name, run in pair.items()} for pair in pairs],
    }
    args.out.write_text(json.dumps(written) + "\n")
    show(found, Console(width=120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
