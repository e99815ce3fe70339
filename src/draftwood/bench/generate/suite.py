"""Generation's part of a run: every visit's tokens are held against plain decoding's, and its speed too, prompt by prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import draftwood
from draftwood.bench import stats, store
from draftwood.bench.base_suite import BaseSuite
from draftwood.bench.catalog import Job
from draftwood.bench.countdown import Countdown
from draftwood.bench.generate import PLAIN
from draftwood.bench.generate.cases import Models, acceptance_of
from draftwood.bench.generate.rows import Seen, make_row
from draftwood.bench.planner import LOST, Progress
from draftwood.bench.state import Options, State, Watcher
from draftwood.bench.supervisor import StartWorker, Worker

MIN_VISITS = 8
"""The fewest pairs that a sign test can tell from chance."""

WORKER = "draftwood.bench.generate.worker"

UNRELATED = ("serving", "training", "chat", "assets")
"""Parts of the package that no timing depends on."""


def worker_of(models: Models) -> StartWorker:
    """How to start a worker. It is told all jobs of the run, for its engine is made for the largest."""

    def start(jobs: Sequence[Job]) -> Worker:
        return Worker({"models": models.to_json(), "jobs": [job.to_json() for job in jobs]}, module=WORKER)

    return start


class GenerateSuite(BaseSuite):
    KEPT = ("ok", "imposed", "noisy")

    def __init__(
        self,
        jobs: Sequence[Job],
        options: Options,
        start: StartWorker,
        countdown: Countdown,
        out: store.Store,
        watcher: Watcher,
    ) -> None:
        super().__init__(jobs, options, lambda rest: start(jobs), countdown, out, watcher, MIN_VISITS)
        self.seen = {job.id: Seen() for job in jobs}
        self.tokens: dict[str, list[list[int]]] = {}  # of the visits of this turn

    def _learn_facts(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        self.model = hello["model"]
        self.common |= {key: self.model[key] for key in ("model", "dtype", "graphs")}
        self.sources = _digest_of_sources()
        acceptances = dict.fromkeys(acceptance_of(job.case) for job in self.jobs)
        return {"suite": "generate", "model_facts": self.model, "acceptance": list(acceptances)}

    def _fingerprint(self, job: Job) -> str:
        parts = [job.id, self.device["name"], self.model["digest"], self.model["dtype"], self.sources]
        parts += ["graphs"] * self.model["graphs"]
        parts += [f"{k}={v}" for k, v in sorted(self.versions.items())]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]

    def _expect(self, state: State, reply: Mapping[str, Any]) -> Progress:
        return Progress(state.job.id, reply["visit_s"], most=reply["visits"] or float("inf"))

    def _keep(self, state: State, reply: Mapping[str, Any]) -> None:
        self.seen[state.job.id].visits.append(reply["record"])
        self.tokens[state.job.id] = reply["tokens"]

    def _after_turn(self, lot: Sequence[Progress]) -> None:
        turn, self.tokens = self.tokens, {}
        plain = next(
            (turn[p.key] for p in lot if self.states[p.key].job.impl == PLAIN and p.key in turn), None
        )
        for p in lot:
            seen = self.seen[p.key]
            if plain is None or p.key not in turn or self.states[p.key].job.impl == PLAIN:
                continue
            seen.check(turn[p.key], plain)
            if seen.first_difference is not None and self.model["exact"]:
                p.label = LOST
                self._finish(p.key, "wrong", seen.difference())

    def _compared(self, state: State, base: State) -> stats.Comparison | None:
        assert state.progress is not None
        assert base.progress is not None
        a, b = state.progress.values, base.progress.values
        n = min(
            len(a), len(b)
        )  # visits are of the same prompts in the same order; one side may have been lost
        self.seen[state.job.id].ratio = stats.compare_pairs(a[:n], b[:n])
        return self.seen[state.job.id].ratio

    def _row(self, state: State, status: str, note: str, common: Mapping[str, Any]) -> store.Row:
        return make_row(
            state.job,
            status,
            note,
            common=common,
            target=self.options.target,
            seen=self.seen[state.job.id],
            progress=state.progress,
            clocks=state.clock_fields(),
        )

    def _is_slower(self) -> bool:
        """Fixed budgets may not pay; `auto` promises to."""
        return any(v["verdict"] == "slower" and v["impl"] == "tree:auto" for v in self.versus)


def _digest_of_sources() -> str:
    root = Path(draftwood.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        if path.relative_to(root).parts[0] not in UNRELATED:
            digest.update(path.read_bytes())
    return digest.hexdigest()
