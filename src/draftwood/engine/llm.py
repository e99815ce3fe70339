"""`LLM`: the one-line API. Loads a target and its drafter, turns prompts into outputs.

from draftwood import LLM, SamplingParams
LLM().generate(["def fibonacci(n):"], SamplingParams(max_new_tokens=64))
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar, cast

import torch

from draftwood import bundled
from draftwood.cache.pages import PageAllocator
from draftwood.cache.pools import DraftContext, LatentPool
from draftwood.cache.prefix import PrefixCache
from draftwood.config import Budget, EngineConfig, Mode
from draftwood.drafting import DFlashDrafting, RingDrafting
from draftwood.engine.buckets import BucketController
from draftwood.engine.budget import BudgetController, CostTable
from draftwood.engine.devices import attention_use, choose_device, choose_dtype
from draftwood.engine.engine import PLAIN, Controller, Engine, Speculation, is_out_of_memory
from draftwood.engine.graphs import GraphRunner
from draftwood.engine.intake import Prompt, make_request, make_requests
from draftwood.engine.outputs import RequestOutput, StreamEvent
from draftwood.engine.parallel_runner import ParallelRunner, serve
from draftwood.engine.pool_size import choose_n_pages
from draftwood.engine.request import Request
from draftwood.engine.runner import Runner
from draftwood.engine.sampling_params import SamplingParams
from draftwood.engine.world import World
from draftwood.kernels import load_kernels
from draftwood.models.config import InnerNormEps, TargetConfig
from draftwood.models.drafter import Drafter
from draftwood.models.folder import resolve
from draftwood.models.layers import fix, pack
from draftwood.models.rope import YarnRule
from draftwood.models.target import Target
from draftwood.models.tokenizer import Tokenizer
from draftwood.models.weights import Progress
from draftwood.parallel import over_vocabulary
from draftwood.round import Drafting, RoundPlan, Stages
from draftwood.scores import ScoreRule

log = logging.getLogger(__name__)

AnyRunner = TypeVar("AnyRunner", bound=Runner)

TIMED_ROWS = (1, 2, 4, 6, 7, 8, 12, 13, 16, 18, 24, 32, 48, 64, 96, 128)
"""Sizes of the passes timed for budget "auto": closer where products have steps, every 6 rows on some CPUs."""


class LLM:
    """A target with its drafter, ready to generate.

    Args:
        model: Hugging Face folder (or repo id) of the target; None takes the bundled pair.
        drafter: folder of its DFlash drafter; only mode "plain" works without one.
        dtype: "float32", "bfloat16", "float64" or "auto" (bfloat16 on a GPU, float32 elsewhere).
        device: "cpu", "cuda" or "auto".
        kernels: implementation per kernel name, e.g. {"verify_attn": "torch"}; the rest is chosen for the device.
        inner_norm_eps: of the target, see `InnerNormEps`.
        yarn_rule: of the drafter, see `YarnRule`; None takes what `DrafterConfig.yarn_rule` decides.
        progress: called with (bytes, bytes in all) while the target's tensors are read.
        settings: fields of `EngineConfig`.

    Raises:
        ModelError: a folder is unsound or the drafter does not fit. ValueError: a setting is wrong.
        KernelUnavailableError: a kernel asked for by name cannot be had.

    With `tp` ranks this process is the first and starts the others, unless torchrun has: then an engine built on another
    rank serves the first, and never returns. `close`, a `with` block, or the end of the program ends the others.

    `choices` says how the checkpoints were read where that was open, and why; empty for most.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        drafter: str | Path | None = None,
        *,
        dtype: str = "auto",
        device: str = "auto",
        kernels: Mapping[str, str] | None = None,
        inner_norm_eps: InnerNormEps = "reference",
        yarn_rule: YarnRule | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        again = partial(
            type(self),
            model,
            drafter,
            dtype=dtype,
            device=device,
            kernels=kernels,
            inner_norm_eps=inner_norm_eps,
            yarn_rule=yarn_rule,
            **settings,
        )
        self.config = EngineConfig(**settings)
        if model is None:
            if drafter is not None:
                raise ValueError("drafter: given without `model`; the bundled target has its own drafter")
            model, drafter = bundled.pair()
        if drafter is None and yarn_rule is not None:
            raise ValueError("yarn_rule: given without a drafter, whose positions it is about")
        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        if self.config.deterministic and self.dtype == torch.float64 and self.device == "cuda":
            raise ValueError("deterministic: on a GPU in float32 and bfloat16, not in float64")
        self.world = World.open(self.config.tp, self.device, again)
        weakref.finalize(self, self.world.close)
        self._progress = progress
        with self.world.together(interruptible=True):
            self._load(model, drafter, kernels, inner_norm_eps, yarn_rule)
            self.world.wait_for_all()
        if not self.world.is_first:
            self._serve()

    def _serve(self) -> NoReturn:
        """Do as the first rank says until it closes its engine, and end this process."""
        with self.world.together(), torch.inference_mode():
            serve(self.world, self._counterpart)
        self.world.close()
        raise SystemExit(0)

    def _counterpart(self, drafts: bool, noise_coupled: bool) -> Runner:
        kind = GraphRunner if self.config.graphs else Runner
        return self._local_runner(self.drafting if drafts else None, noise_coupled, kind)

    def close(self) -> None:
        """End the processes of the other ranks; an engine of one rank has nothing to close."""
        self.world.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _load(
        self,
        model: str | Path,
        drafter: str | Path | None,
        kernels: Mapping[str, str] | None,
        inner_norm_eps: InnerNormEps,
        yarn_rule: YarnRule | None,
    ) -> None:
        deterministic = self.config.deterministic
        folder, config = self._target_config(model, inner_norm_eps)
        use = attention_use(config, self.dtype, self.device, self.config.page_size)
        chosen = load_kernels(self.device, kernels, deterministic=deterministic, use=use)
        self.kernels = over_vocabulary(chosen, self.world.ranks)
        self.config = self.config.with_graphs(where_open=self.device == "cuda" and chosen.recordable)
        self.tokenizer, self.target = self._load_target(folder, inner_norm_eps)
        if deterministic:
            fix(self.target, self.kernels)
        else:
            pack(self.target)
        self.choices = self.target.config.choices
        self.max_context = self._max_context()
        drafting = None if drafter is None else self._load_drafter(drafter, yarn_rule)
        n_pages = choose_n_pages(
            self.target.config,
            None if drafting is None else drafting[0].config,
            self.config,
            max_context=self.max_context,
            ranks=self.world.ranks,
            dtype=self.dtype,
            device=self.device,
        )
        if self.config.n_pages is None and n_pages * self.config.page_size < self.max_context:
            limit, self.max_context = self.max_context, n_pages * self.config.page_size
            log.warning(
                "the cache has room for %d tokens of the model's %d: that is max_context",
                self.max_context,
                limit,
            )
        self.allocator = PageAllocator(n_pages)
        self.cache = PrefixCache(self.allocator, self.config.page_size, enabled=self.config.prefix_cache)
        self.latents = LatentPool.allocate(
            self.target.config.num_hidden_layers,
            n_pages,
            self.config.page_size,
            self.target.config.latent_dim,
            dtype=self.dtype,
            device=self.device,
        )
        self.drafting: Drafting | None = None if drafting is None else self._drafting_of(*drafting)
        self._controller: Controller | None = None
        self._graph_runners: dict[bool, GraphRunner] = {}

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        mode: Mode | None = None,
        budget: Budget | None = None,
        trace: bool = False,
    ) -> list[RequestOutput]:
        """Outputs in the order of the prompts; arguments as for `stream`."""
        requests = self._requests(prompts, params)
        for _ in self._decode(self._filled_engine(requests, mode, budget, trace)):
            pass
        return [request.output for request in requests]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        mode: Mode | None = None,
        budget: Budget | None = None,
        trace: bool = False,
    ) -> Iterator[StreamEvent]:
        """Decode and yield every request's new text and tokens, round by round.

        Args:
            prompts: text or token ids, one or several.
            params: one for all, or one per prompt; None takes the defaults.
            mode, budget: override the engine's own for this call.
            trace: keep every round's tree in the outputs.

        Raises:
            ValueError: a prompt is empty or too long, or a parameter is wrong; at the call, before anything runs.
        """
        return self._decode(self._filled_engine(self._requests(prompts, params), mode, budget, trace))

    def engine(
        self, *, mode: Mode | None = None, budget: Budget | None = None, trace: bool = False
    ) -> Engine:
        """An engine to be stepped by hand, as a server does: requests join and leave between any two steps.

        engine = llm.engine()
        engine.add(llm.request("import os", SamplingParams(n=2), index=7))
        while engine.has_work():
            for event in engine.step(): ...
        """
        overrides = {k: v for k, v in (("mode", mode), ("budget", budget)) if v is not None}
        config = EngineConfig(**(self.config.model_dump() | overrides))
        return Engine(
            self._runner(None if config.mode == "plain" else self.drafting),
            self._speculation(config.mode, config.budget),
            self.cache,
            max_batch=config.max_batch,
            prefill_chunk=config.prefill_chunk,
            prefill_budget=config.prefill_budget,
            trace=trace,
        )

    def request(self, prompt: Prompt, params: SamplingParams | None = None, *, index: int = 0) -> Request:
        """A request for `Engine.add`; its events carry `index`. With n > 1 it brings its `followers`, samples 1 to n - 1.

        Raises ValueError naming what is wrong with the prompt or the parameters.
        """
        return make_request(prompt, params or SamplingParams(), index, self.tokenizer, self.target.config)

    def _requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        return make_requests(prompts, params, self.tokenizer, self.target.config)

    def _filled_engine(
        self, requests: list[Request], mode: Mode | None, budget: Budget | None, trace: bool
    ) -> Engine:
        engine = self.engine(mode=mode, budget=budget, trace=trace)
        for request in requests:
            engine.add(request)
        return engine

    def _decode(self, engine: Engine) -> Iterator[StreamEvent]:
        try:
            while engine.has_work():
                yield from engine.step()
        finally:
            engine.abort()

    def _runner(self, drafting: Drafting | None) -> Runner:
        if self.config.graphs:
            return self._graph_runner(drafting)
        return self._everywhere(self._local_runner(drafting, self.config.noise_coupled, Runner))

    def _graph_runner(self, drafting: Drafting | None) -> GraphRunner:
        """The one for this drafting: what it has recorded is worth keeping."""
        drafts = drafting is not None
        if drafts not in self._graph_runners:
            local = self._local_runner(drafting, self.config.noise_coupled, GraphRunner)
            self._graph_runners[drafts] = self._everywhere(local)
        return self._graph_runners[drafts]

    def _everywhere(self, runner: AnyRunner) -> AnyRunner:
        """The runner, or with several ranks one that has them all do as it does."""
        return runner if self.config.tp == 1 else cast(AnyRunner, ParallelRunner(runner, self.world))

    def _local_runner(
        self, drafting: Drafting | None, noise_coupled: bool, kind: type[AnyRunner]
    ) -> AnyRunner:
        stages = Stages(self.target, self.latents, drafting, self.kernels, noise_coupled)
        return kind(stages, page_size=self.config.page_size, max_context=self.max_context, device=self.device)

    def _speculation(self, mode: Mode, budget: Budget) -> Speculation:
        if mode == "plain":
            return PLAIN
        if self.drafting is None:
            raise ValueError(f'mode: "{mode}" needs a drafter; give one, or decode in mode "plain"')
        depth = self.config.depth or self.drafting.max_depth
        if depth > self.drafting.max_depth:
            raise ValueError(f"depth: {depth} is beyond the drafter's {self.drafting.max_depth} tokens")
        if mode == "chain":
            return Speculation.chain(depth)
        vocab = self.target.config.vocab_size
        if budget != "auto":
            return Speculation.tree(budget, depth, vocab)
        if self._controller is None:
            self._controller = self._calibrate(Speculation.tree(self.config.max_budget, depth, vocab))
        return Speculation.tree(self.config.max_budget, depth, vocab, self._controller)

    @torch.inference_mode()
    def _calibrate(self, largest: Speculation) -> Controller:
        """Time target passes of several sizes and drafts of every depth; rounds correct these numbers as they go."""
        if self.config.graphs:
            rounds = self._graph_runner(self.drafting)

            def seconds(batch: int, slots: int) -> float:
                try:
                    return rounds.time_round(batch, largest.plan(slots))
                except (RuntimeError, MemoryError) as e:
                    if slots == 1 or not (rounds.recovers and is_out_of_memory(e)):
                        raise
                    return inf  # never picked

            return BucketController(seconds, largest.slots, lambda: rounds.columns)
        runner = self._runner(self.drafting)
        sizes = tuple(n for n in TIMED_ROWS if n <= max(2, self.config.max_budget))
        drafts = [
            runner.time_draft(RoundPlan(largest.slots, depth, largest.top_k))
            for depth in range(1, largest.depth + 1)
        ]
        return BudgetController(CostTable(runner.time_target, sizes), drafts)

    def _target_config(self, model: str | Path, inner_norm_eps: InnerNormEps) -> tuple[Path, TargetConfig]:
        """Where the target is, and its config."""
        folder = resolve(model)
        return folder, TargetConfig.from_folder(folder, inner_norm_eps=inner_norm_eps)

    def _load_target(self, folder: Path, inner_norm_eps: InnerNormEps) -> tuple[Tokenizer, Target]:
        return Tokenizer.from_folder(folder), Target.from_folder(
            folder,
            dtype=self.dtype,
            device=self.device,
            kernels=self.kernels,
            progress=self._progress,
            inner_norm_eps=inner_norm_eps,
            ranks=self.world.ranks,
            expert_parallel=self.config.expert_parallel,
        )

    def _load_drafter(self, path: str | Path, yarn_rule: YarnRule | None) -> tuple[Drafter, ScoreRule]:
        folder = resolve(path)
        drafter = Drafter.from_folder(
            folder,
            target=self.target,
            dtype=self.dtype,
            device=self.device,
            kernels=self.kernels,
            yarn_rule=yarn_rule,
        )
        self.choices |= drafter.config.choices(yarn_rule)
        pack(drafter)
        return drafter, ScoreRule.from_folder(folder)

    def _drafting_of(self, drafter: Drafter, rule: ScoreRule) -> Drafting:
        context = DraftContext.allocate(
            drafter.config.num_hidden_layers,
            self.allocator.n_pages,
            self.config.page_size,
            drafter.n_kv_heads,
            drafter.config.head_dim,
            dtype=self.dtype,
            device=self.device,
        )
        kind = RingDrafting if self.config.graphs else DFlashDrafting
        return kind(drafter, self.target, context, self.kernels, rule)

    def _max_context(self) -> int:
        limit = self.target.config.max_position_embeddings
        if self.config.max_context is not None and self.config.max_context > limit:
            raise ValueError(
                f"max_context: {self.config.max_context} is beyond the model's {limit} positions"
            )
        return self.config.max_context or limit
