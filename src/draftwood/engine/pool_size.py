"""How many cache pages an engine has: all that its requests can need, or what memory leaves for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftwood.config import EngineConfig
from draftwood.engine.footprint import Layout, context_bytes, estimate_lines, scratch_lines
from draftwood.models.config import TargetConfig
from draftwood.models.drafter_config import DrafterConfig
from draftwood.parallel import Ranks

CPU_BYTES = 4 * 2**30
"""What the cache takes on a CPU at most, per rank, unless `n_pages` says otherwise."""


@dataclass(frozen=True)
class Room:
    size: Tensor  # [1] i64, bytes


def choose_n_pages(
    target: TargetConfig,
    drafter: DrafterConfig | None,
    config: EngineConfig,
    *,
    max_context: int,
    ranks: Ranks,
    dtype: torch.dtype,
    device: str,
) -> int:
    """Pages of the pool, the same on all ranks; to be called when the weights are in place.

    `config.n_pages` if it is given; else enough for `max_batch` requests of `max_context` tokens, or as many as there is
    room for: on a GPU what is free beside a round's own tensors, on a CPU `CPU_BYTES`.

    Raises ValueError naming `n_pages` if the GPU has no room for that many, `max_context` if one was asked for and there is
    no room for a single such request, and `page_size` if there is none for one page.
    """
    layout = Layout(ranks.size, config.expert_parallel, dtype.itemsize)
    latents = target.num_hidden_layers * target.latent_dim * dtype.itemsize
    page = config.page_size * (latents + (0 if drafter is None else context_bytes(drafter, layout)))
    each = -(-max_context // config.page_size)
    if device != "cuda":
        return config.n_pages or _fitting(config, each, page, CPU_BYTES)
    torch.cuda.empty_cache()
    free = _least(ranks, torch.cuda.mem_get_info()[0])
    if config.n_pages is None:
        lines = scratch_lines(target, drafter, config, layout)
        runtime, graphs = estimate_lines(target, drafter, config)
        lines += (runtime, *((graphs,) if config.graphs else ()))
        return _fitting(config, each, page, free - sum(line.per_gpu for line in lines))
    if config.n_pages * page > free:
        raise ValueError(
            f"n_pages: {config.n_pages} pages take {_gib(config.n_pages * page)} of a GPU, and {_gib(free)} are free"
        )
    return config.n_pages


def _fitting(config: EngineConfig, each: int, page: int, room: int) -> int:
    """Pages for `max_batch` requests of `each`, or what fits; a page takes `page` bytes."""
    n = min(config.max_batch * each, max(0, room) // page)
    if n == 0:
        raise ValueError(
            f"page_size: a page of {config.page_size} tokens takes {_gib(page)}; there is room for {_gib(max(0, room))}"
        )
    if n < each and config.max_context is not None:
        raise ValueError(
            f"max_context: a request of {config.max_context} tokens takes {_gib(each * page)} of cache, and there is "
            f"room for {_gib(room)}: ask for less, or set n_pages"
        )
    return n


def _least(ranks: Ranks, size: int) -> int:
    """The smallest number of all ranks."""
    rooms = ranks.gather(Room(torch.tensor([size], device="cuda")))
    return min(int(room.size) for room in rooms)


def _gib(n: int) -> str:
    return f"{n / 2**30:.2f} GiB"
