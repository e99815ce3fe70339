"""Settings of an engine, validated once; a wrong value names its field."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Mode = Literal["tree", "chain", "plain"]
"""tree: best-first draft trees; chain: the drafter's single best sequence; plain: no speculation."""

MAX_SLOTS = 128
MAX_REPLAYED_BATCH = 128

CONTEXTS = (1024, 4096)
"""Tokens per request that a replayed round may be recorded for, besides `max_context`: kernels of attention go by the most keys
there can be, and for up to so many there are faster ones."""


def table_widths(page_size: int, max_pages: int) -> list[int]:
    """Columns of the page table that rounds are recorded for, narrowest first; the last is `max_pages`, what the longest request has."""
    return sorted({max_pages, *(min(-(-context // page_size), max_pages) for context in CONTEXTS)})


Budget = Annotated[int, Field(strict=True, ge=1, le=MAX_SLOTS)] | Literal["auto"]
"""Slots per tree, root included, or "auto": what pays, by measured cost and observed acceptance."""


def parse_budget(text: str) -> int | Literal["auto"]:
    """A budget as written on a command line. Raises ValueError."""
    if text == "auto":
        return "auto"
    if not text.isdecimal() or not 1 <= int(text) <= MAX_SLOTS:
        raise ValueError(f'budget: expected "auto" or 1 to {MAX_SLOTS} slots, got "{text}"')
    return int(text)


class EngineConfig(BaseModel):
    """How an engine runs; the models bring everything else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode = "tree"
    budget: Budget = "auto"
    max_budget: int = Field(64, ge=2, le=MAX_SLOTS)
    """Largest tree that budget "auto" considers."""
    depth: int | None = Field(None, ge=1)
    """Draft depth; None takes all the drafter can (block_size - 1)."""
    max_context: int | None = Field(None, ge=2)
    """Tokens per request, prompt and output together; None takes the model's own limit, or what the whole pool holds."""
    max_batch: int = Field(8, ge=1)
    """Requests decoded together."""
    page_size: int = Field(64, ge=1)
    """Positions per cache page; kernels on a GPU take 16, 32 and 64."""
    n_pages: int | None = Field(None, ge=1)
    """Pages in the pool; None takes what max_batch requests of max_context tokens need, or what there is room for: on a GPU
    what weights and rounds leave free, on a CPU 4 GiB per rank."""
    prefill_chunk: int = Field(256, ge=1)
    """Prompt tokens per prefill pass."""
    prefill_budget: int = Field(512, ge=1)
    """Prompt tokens prefilled between two rounds, of all requests together."""
    prefix_cache: bool = True
    """Keep full pages of earlier requests, and let prompts that begin the same way use them."""
    tp: int = Field(1, ge=1)
    """Ranks that share the weights, one GPU each, or processes on a CPU."""
    expert_parallel: bool = False
    """With tp > 1: whole routed experts per rank, not a share of every expert."""
    graphs: bool | None = None
    """Replay rounds as CUDA graphs and learn their results a round late; on a CPU the same steps without graphs.

    None: on a GPU, unless a kernel runs on torch operations there, which wait for the host, or `max_batch` is too large; with
    tp > 1 only where asked for, since recorded collectives have run on no GPU yet.
    """
    deterministic: bool = False
    """A request's numbers do not depend on what runs beside it, bit for bit: see docs/deterministic.md. Slower."""
    noise_coupled: bool = True
    """At temperature > 0, rank draft candidates with the noise that the target's choice will use."""

    def with_graphs(self, *, where_open: bool) -> Self:
        """With `graphs` decided: as it was asked for, else `where_open`, within the limits that `graphs` names."""
        if self.graphs is not None:
            return self
        graphs = where_open and self.tp == 1 and self.max_batch <= MAX_REPLAYED_BATCH
        return self.model_copy(update={"graphs": graphs})

    @model_validator(mode="after")
    def _graphs_have_limits(self) -> Self:
        if self.graphs and self.max_batch > MAX_REPLAYED_BATCH:
            raise ValueError(f"max_batch: at most {MAX_REPLAYED_BATCH} with graphs, got {self.max_batch}")
        return self
