"""Bytes that a target, its drafter and their caches take on each of N GPUs: pure arithmetic on configs and settings.

Ranks share heads, the columns of MLPs (or whole experts) and rows of the vocabulary; the rest is on every GPU. Weights
and caches are exact. Scratch is what a round's largest tensors take; runtime and CUDA graphs are estimates that
nothing here has measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from draftwood.config import EngineConfig, table_widths
from draftwood.drafting import MOST_WAITING
from draftwood.models.config import TargetConfig
from draftwood.models.drafter_config import DrafterConfig
from draftwood.models.inventory import Split, TensorSpec, drafter_tensors, target_tensors
from draftwood.models.shard import Shard
from draftwood.models.weights import SIZES

TREE_BUCKETS = (1, 8, 16, 32, 64, 128)
"""Slots per tree for which rounds are captured, root included."""

RUNTIME_BYTES = 3 * 2**29
"""CUDA context, matmul workspaces, NCCL buffers, allocator waste: an estimate."""

GRAPH_BYTES_PER_LAYER = 2**19
"""What a captured round keeps per layer, target's and drafter's, beside the scratch that all share: an estimate."""


@dataclass(frozen=True)
class Layout:
    """How the model lies on the GPUs: `itemsize` is that of the type it runs in."""

    gpus: int = 1
    expert_parallel: bool = False
    itemsize: int = 2

    def ceil(self, n: int) -> int:
        return -(-n // self.gpus)


@dataclass(frozen=True)
class Line:
    """One part: bytes in the files (0 if it is not from there), bytes on each GPU, and how they come about."""

    name: str
    per_gpu: int
    how: str = ""
    stored: int = 0


@dataclass(frozen=True)
class Footprint:
    """What a model pair takes; `latent_bytes` and `context_bytes` are per token and GPU."""

    target: tuple[Line, ...]
    drafter: tuple[Line, ...]
    scratch: tuple[Line, ...]
    estimates: tuple[Line, ...]
    latent_bytes: int
    context_bytes: int
    page_size: int

    @property
    def without_cache(self) -> int:
        """Bytes per GPU of everything but the cache."""
        parts = (self.target, self.drafter, self.scratch, self.estimates)
        return sum(line.per_gpu for part in parts for line in part)

    @property
    def page_bytes(self) -> int:
        return self.page_size * (self.latent_bytes + self.context_bytes)

    def pages_per_request(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def pages_that_fit(self, memory: int) -> int:
        """Pages in what `memory` bytes per GPU leave for the cache."""
        return max(0, memory - self.without_cache) // self.page_bytes


def footprint(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    engine: EngineConfig,
    layout: Layout,
    *,
    target_specs: Iterable[TensorSpec] | None = None,
    drafter_specs: Iterable[TensorSpec] | None = None,
) -> Footprint:
    """The bytes of both models under these settings.

    Args:
        target_specs, drafter_specs: the tensors as their files have them, see `inventory.found`; None takes what the
            configs imply.

    Raises:
        ModelError: the ranks cannot share something evenly; it names the key.
    """
    check_divides(target, layout)
    drafter_lines: tuple[Line, ...] = ()
    if drafter is not None:
        specs = drafter_specs or (spec for spec in drafter_tensors(drafter) if not spec.optional)
        drafter_lines = weight_lines(specs, layout, shared=drafter.splits(layout.gpus))
    return Footprint(
        target=weight_lines(target_specs or target_tensors(target, one_expert=True), layout),
        drafter=drafter_lines,
        scratch=scratch_lines(target, drafter, engine, layout),
        estimates=estimate_lines(target, drafter, engine),
        latent_bytes=target.num_hidden_layers * target.latent_dim * layout.itemsize,
        context_bytes=0 if drafter is None else context_bytes(drafter, layout),
        page_size=engine.page_size,
    )


def check_divides(c: TargetConfig, layout: Layout) -> None:
    """Raise `ModelError` naming a key of the target's config that the ranks cannot share evenly."""
    last = Shard(layout.gpus - 1, layout.gpus)
    if layout.expert_parallel:
        last.bounds(c.n_routed_experts, what="key `n_routed_experts`")
        c = c.model_copy(update={"quantization": None})  # no group is cut where experts stay whole
    c.check_ranks(last)


def context_bytes(c: DrafterConfig, layout: Layout) -> int:
    """Drafter context per token and GPU: keys and values of every layer."""
    heads = c.num_key_value_heads // (layout.gpus if c.splits(layout.gpus) else 1)
    return 2 * c.num_hidden_layers * heads * c.head_dim * layout.itemsize


def weight_lines(specs: Iterable[TensorSpec], layout: Layout, *, shared: bool = True) -> tuple[Line, ...]:
    """One line for each part and way of sharing, in the order in which they first come; unless `shared`, every GPU has all."""
    sums: dict[tuple[str, Split], list[int]] = {}
    for spec in specs:
        stored = spec.numel * SIZES[spec.dtype]
        split: Split = spec.split if shared else "replicated"
        total = sums.setdefault((spec.part, split), [0, 0])
        total[0] += stored
        total[1] += _resident(spec, stored, split, layout)
    return tuple(
        Line(part, per_gpu, _how(split, layout), stored) for (part, split), (stored, per_gpu) in sums.items()
    )


def _resident(spec: TensorSpec, stored: int, split: Split, layout: Layout) -> int:
    """Bytes of a tensor on each GPU."""
    if spec.memory == "dropped":
        return 0
    itemsize = 4 if spec.memory == "fp32" else layout.itemsize
    if split == "vocabulary":
        return layout.ceil(spec.shape[0]) * prod(spec.shape[1:]) * itemsize
    whole = stored if spec.memory == "as stored" else spec.numel * itemsize
    return whole if split == "replicated" else whole // layout.gpus


def _how(split: Split, layout: Layout) -> str:
    if layout.gpus == 1:
        return ""
    if split == "experts":
        return "whole experts shared" if layout.expert_parallel else "columns of every expert shared"
    return {"replicated": "on every GPU", "vocabulary": "rows shared"}.get(split, f"{split} shared")


def scratch_lines(
    target: TargetConfig, drafter: DrafterConfig | None, engine: EngineConfig, layout: Layout
) -> tuple[Line, ...]:
    """The largest tensors of a round with full batch and tree, or of a prefill chunk where that is more."""
    B, size, d = engine.max_batch, layout.itemsize, target.hidden_size
    T = 1 if drafter is None else engine.max_budget
    rows, V = max(B * T, engine.prefill_chunk), layout.ceil(target.vocab_size)
    latents = target.num_hidden_layers * rows * target.latent_dim * size
    lines = [
        Line("latents of the slots", latents, f"{rows} slots, all layers"),
        Line("logits", B * T * V * (4 + size), f"{B * T} rows of {V}, fp32 and the product before"),
        Line("activations of a layer", rows * _widest(target, layout) * size, f"{rows} slots"),
    ]
    if drafter is not None:
        taps, drafted = len(drafter.target_layer_ids), B * (drafter.block_size - 1)
        lines += [
            Line("features", rows * taps * d * size, f"{rows} slots, {taps} layers"),
            Line(
                "features that wait",
                B * MOST_WAITING * taps * d * size,
                f"of {MOST_WAITING} rounds without a draft",
            ),
            Line("draft logits", drafted * V * (4 + size), f"{drafted} rows of {V}"),
        ]
    return tuple(lines)


def _widest(c: TargetConfig, layout: Layout) -> int:
    """Numbers per slot that are alive at once in the widest part of a layer."""
    heads = c.num_attention_heads // layout.gpus
    head = c.qk_nope_head_dim + c.qk_rope_head_dim + c.latent_dim + c.kv_lora_rank + c.v_head_dim
    experts = c.num_experts_per_tok * (3 * layout.ceil(c.moe_intermediate_size) + c.hidden_size)
    shared = 3 * layout.ceil(c.moe_intermediate_size * (c.n_shared_experts or 0))
    dense = 3 * layout.ceil(c.intermediate_size) if c.first_k_dense_replace else 0
    return 3 * c.hidden_size + max(heads * head, experts + shared, dense)


def estimate_lines(
    target: TargetConfig, drafter: DrafterConfig | None, engine: EngineConfig
) -> tuple[Line, ...]:
    """What no config says: the runtime, and a CUDA graph for every batch, tree bucket and context."""
    trees = 1 if drafter is None else 1 + sum(size < engine.max_budget for size in TREE_BUCKETS)
    batches = (engine.max_batch - 1).bit_length() + 1
    layers = target.num_hidden_layers + (0 if drafter is None else drafter.num_hidden_layers)
    longest = engine.max_context or target.max_position_embeddings
    graphs = batches * trees * len(table_widths(engine.page_size, -(-longest // engine.page_size)))
    return (
        Line("runtime", RUNTIME_BYTES, "CUDA context, workspaces, NCCL: an estimate"),
        Line("CUDA graphs", graphs * layers * GRAPH_BYTES_PER_LAYER, f"{graphs} graphs: an estimate"),
    )
