"""The kernel suite's part of a run: ceilings, what a visit is made of, rows and comparisons."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from draftwood.bench import rows as rows_
from draftwood.bench import stats, store
from draftwood.bench.base_suite import BaseSuite
from draftwood.bench.catalog import Catalog, Job
from draftwood.bench.countdown import Countdown
from draftwood.bench.planner import WARM_UP_US, Progress
from draftwood.bench.state import Options, State, Watcher
from draftwood.bench.supervisor import StartWorker, WorkerLost
from draftwood.bench.work import Ceilings

VISIT_US = 5000.0
MOST_TIMINGS = 5
VISIT_OVERHEAD_S = 0.001


class Suite(BaseSuite):
    def __init__(
        self,
        jobs: Sequence[Job],
        catalog: Catalog,
        options: Options,
        start: StartWorker,
        countdown: Countdown,
        out: store.Store,
        watcher: Watcher,
    ) -> None:
        super().__init__(jobs, options, start, countdown, out, watcher)
        self.catalog = catalog

    def _learn_facts(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        dtypes = {rows_.dtype_of(job) for job in self.jobs}
        reply = self.slot.ask({"do": "ceilings", "dtypes": sorted(dtypes)}, self.countdown.left(), self.jobs)
        if reply.pop("status") != "done":
            raise WorkerLost("crash", f"measuring the ceilings: {reply['detail']}")
        self.ceilings = Ceilings.from_json(reply)
        return {"suite": "kernels", "ceilings": self.ceilings.to_json()}

    def _fingerprint(self, job: Job) -> str:
        return store.fingerprint(self.catalog, job, self.versions, self.device["name"])

    def _expect(self, state: State, reply: Mapping[str, Any]) -> Progress:
        timing_us = reply["calls"] * reply["estimate_us"]
        if not self.options.once:
            state.timings = max(1, min(MOST_TIMINGS, int(VISIT_US / timing_us))) // 2 * 2 + 1
        warm_up_us = timing_us if reply["estimate_us"] < WARM_UP_US else 0.0
        return Progress(state.job.id, (state.timings * timing_us + warm_up_us) / 1e6 + VISIT_OVERHEAD_S)

    def _row(self, state: State, status: str, note: str, common: Mapping[str, Any]) -> store.Row:
        return rows_.make_row(
            state.job,
            status,
            note,
            common=common,
            ceilings=self.ceilings,
            target=self.options.target,
            info=state.info,
            progress=state.progress,
            clocks=state.clock_fields(),
        )

    def _compared(self, state: State, base: State) -> stats.Comparison:
        assert state.progress is not None
        assert base.progress is not None
        known = state.clocks and base.clocks
        clocks = (statistics.median(state.clocks), statistics.median(base.clocks)) if known else None
        return stats.compare(state.progress.values, base.progress.values, paired=True, clocks=clocks)
