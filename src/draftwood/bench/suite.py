"""One run: plan, prepare, measure in rounds, store. The parent's side; never imports torch.

Whatever a kernel does, the run goes on: the worker is replaced, the case in flight gets its label, and every finished
case is on disk. The whole command keeps to its budget.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from draftwood.bench import rows as rows_
from draftwood.bench import stats, store
from draftwood.bench.catalog import Catalog, Job
from draftwood.bench.countdown import Countdown
from draftwood.bench.planner import LOST, MIN_VISITS, WARM_UP_US, Progress, Scheduler, make_plan, visited
from draftwood.bench.state import Options, State, Watcher
from draftwood.bench.supervisor import Slot, StartWorker, WorkerLost
from draftwood.bench.work import Ceilings

VISIT_US = 5000.0
MOST_TIMINGS = 5
STRIKES = 2
SLOW_CLOCK = 0.75
VISIT_OVERHEAD_S = 0.001
MEASURING_SHARE = 0.4
"""Of the time left after the start, kept for measuring however long preparing takes."""


class Suite:
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
        self.jobs, self.catalog, self.options = list(jobs), catalog, options
        self.slot = Slot(start, jobs, countdown.left)
        self.countdown, self.out, self.watcher = countdown, out, watcher
        self.states = {job.id: State(job) for job in jobs}
        self.rows: list[store.Row] = []
        self.versus: list[dict[str, Any]] = []
        self.losses: dict[tuple[str, str], list[str]] = {}  # statuses, by kernel and implementation
        self.finished: set[str] = set()
        self.clocks: list[float] = []
        self.seconds: dict[str, float] = {}
        self.min_visits = 1 if options.once else MIN_VISITS
        self.ended_by = ""
        self.disk_failed = False

    def run(self) -> int:
        """Everything, in order. Returns the exit code; the rows are in `rows`, on disk as well."""
        with _interrupts():
            try:
                with self._clocked("start"):
                    self._begin()
                with self._clocked("prepare"):
                    self._prepare_all()
                lots = self._lots()
                plan = make_plan(lots, self.countdown.left(), self.min_visits)
                self.watcher.plan(plan, self.states, self.countdown.left())
                if self.options.plan_only:
                    return 0
                for lot in plan.left_out:
                    for p in lot:
                        self._finish(
                            p.key, "budget", f"the minimum takes {self.min_visits * p.visit_s:.2g} s"
                        )
                with self._clocked("measure"):
                    self._measure(plan.fits)
            except KeyboardInterrupt:
                self.ended_by = "interrupted"
                self.watcher.warn("interrupted: closing")
            finally:
                self._close()
        slower = any(v["verdict"] == "slower" for v in self.versus)
        return rows_.exit_code(self.rows, slower, self.options.once)

    # beginning

    def _begin(self) -> None:
        self.watcher.phase("starting the worker", 0)
        self.device = self.slot.hello()["device"]
        if self.device.get("shared_by_others"):
            self.watcher.warn("other processes hold memory of this device: they may disturb the timings")
        self.versions = {**store.versions(), "torch": self.device["torch"], "python": self.device["python"]}
        self.common: dict[str, Any] = {
            "device": self.device["name"],
            **self.versions,
            "commit": store.commit(),
        }
        self.fingerprints = {
            job.id: store.fingerprint(self.catalog, job, self.versions, self.device["name"])
            for job in self.jobs
        }
        dtypes = {str(dict(job.case.axes).get("dtype", "float32")) for job in self.jobs}
        reply = self.slot.ask({"do": "ceilings", "dtypes": sorted(dtypes)}, self.countdown.left(), self.jobs)
        if reply.pop("status") != "done":
            raise WorkerLost("crash", f"measuring the ceilings: {reply['detail']}")
        self.ceilings = Ceilings.from_json(reply)
        if not self.options.plan_only:
            self.out.append(
                {
                    "type": "run",
                    "time": store.now(),
                    "argv": list(self.options.argv),
                    "budget_s": self.options.budget_s,
                    "target": self.options.target,
                    "device_facts": self.device,
                    "ceilings": self.ceilings.to_json(),
                    **self.common,
                }
            )
        self._resume()

    def _resume(self) -> None:
        if self.options.resume is None:
            return
        fingerprints = {store.job_key(self._empty_row(job)): self.fingerprints[job.id] for job in self.jobs}
        earlier = store.reusable(store.read_run(self.options.resume), fingerprints, self.options.keep_failed)
        self.rows += earlier
        done = {store.job_key(row) for row in earlier}
        for job in self.jobs:
            if store.job_key(self._empty_row(job)) in done:
                del self.states[job.id]
        self.watcher.warn(f"resuming: {len(earlier)} of {len(self.jobs)} rows are still valid")

    def _empty_row(self, job: Job) -> store.Row:
        return rows_.make_row(
            job, "", "", common=self.common, ceilings=self.ceilings, target=self.options.target
        )

    # preparing

    def _prepare_all(self) -> None:
        self.watcher.phase("preparing", len(self.states))
        spent: list[float] = []
        reserve = 0.0 if self.options.once else MEASURING_SHARE * self.countdown.left()
        waiting = deque(self.states.values())
        while waiting:
            state = waiting.popleft()
            self.watcher.step(state.job.id, len(self.states) - len(waiting) - 1)
            typical = statistics.median(spent) if spent else 0.0
            if self.countdown.left() < typical + max(self._promised(), reserve if spent else 0.0):
                why = (
                    "it was still being compiled"
                    if state.pending
                    else "the time is needed for cases that are"
                )
                self._finish(state.job.id, "budget", f"not prepared: {why}")
                continue
            start = time.monotonic()
            self._prepare(state)
            if state.pending:
                waiting.append(state)
            else:
                spent.append(time.monotonic() - start)

    def _promised(self) -> float:
        """Seconds that the prepared cases need for their minimum. One above its equal share is not promised any."""
        share = self.countdown.left() / max(1, len(self.states) - len(self.finished))
        needs = (self.min_visits * s.progress.visit_s for s in self.states.values() if s.progress)
        return sum(need for need in needs if need <= share)

    def _prepare(self, state: State) -> None:
        job, state.pending = state.job, False
        losses = self.losses.get((job.kernel, job.impl), [])
        if len(losses) >= STRIKES:
            self._finish(job.id, losses[-1], f"not tried after {STRIKES} losses of the worker to {job.impl}")
            return
        reply = self._ask(job, {"do": "prepare", "job": job.to_json(), "gate": True}, self.options.limit_s)
        if reply is None:
            return
        if reply.get("pending"):
            state.pending = True
            return
        state.info = reply
        self.slot.held.add(job.id)
        timing_us = reply["calls"] * reply["estimate_us"]
        if not self.options.once:
            state.timings = max(1, min(MOST_TIMINGS, int(VISIT_US / timing_us))) // 2 * 2 + 1
        warm_up_us = timing_us if reply["estimate_us"] < WARM_UP_US else 0.0
        visit_s = (state.timings * timing_us + warm_up_us) / 1e6 + VISIT_OVERHEAD_S
        state.progress = Progress(job.id, visit_s)

    def _ask(self, job: Job, request: Mapping[str, Any], limit_s: float) -> dict[str, Any] | None:
        """The worker's reply, or None after labelling the job."""
        rest = [s.job for s in self.states.values() if s.info is None and s.job.id not in self.finished]
        try:
            reply = self.slot.ask(request, limit_s, rest)
        except WorkerLost as e:
            if e.status == "timeout" and self.countdown.left() <= 0:
                self._finish(job.id, "budget", f"the time ran out while it ran ({e})")
            else:
                self._lose(job, e.status, str(e))
            return None
        status = reply.pop("status")
        if status == "done":
            return reply
        if reply.get("fatal"):
            self._lose(job, status, reply["detail"])
        else:
            self._finish(job.id, status, reply["detail"])
        return None

    def _lose(self, job: Job, status: str, detail: str) -> None:
        self.losses.setdefault((job.kernel, job.impl), []).append(status)
        self._finish(job.id, status, detail)

    # measuring

    def _lots(self) -> list[list[Progress]]:
        """Single jobs; with `vs`, all implementations of a case together, the one compared with last."""
        ready = [s for s in self.states.values() if s.progress is not None]
        groups: dict[Any, list[State]] = {}
        for s in ready:
            key = (s.job.case, s.job.cache) if self.options.vs else s.job.id
            groups.setdefault(key, []).append(s)
        for group in groups.values():
            group.sort(key=lambda s: s.job.impl == self.options.vs)
        return [[s.progress for s in group if s.progress] for group in groups.values()]

    def _measure(self, lots: Sequence[Sequence[Progress]]) -> None:
        scheduler = Scheduler(lots, self.options.target, self.countdown.left(), self.min_visits)
        self.watcher.phase("measuring", len(self.jobs))
        while (lot := scheduler.next(self.countdown.left())) is not None:
            self.watcher.step(lot[0].key, len(self.rows))
            for p in lot if visited(lot) % 2 == 0 else list(reversed(lot)):
                self._visit(self.states[p.key])
            scheduler.judge(lot)
            if not scheduler.is_open(lot):
                self._finish_lot(lot)

    def _visit(self, state: State) -> None:
        if state.progress is None or state.job.id in self.finished:
            return
        start = time.monotonic()
        reply = self._sample(state)
        if reply is not None and self._is_slow(reply):
            state.slow_visits += 1
            reply = self._sample(state)
        if reply is None:
            state.progress.label = LOST
            return
        if "clock_mhz" in reply:
            self.clocks.append(reply["clock_mhz"])
            state.clocks.append(reply["clock_mhz"])
            state.throttle.update(reply["throttle"])
        state.progress.add(reply["timings"], time.monotonic() - start)

    def _sample(self, state: State) -> dict[str, Any] | None:
        assert state.progress is not None
        assert state.info is not None
        limit = 2.0 + 20 * state.progress.visit_s
        if state.job.id not in self.slot.held:
            limit += self.options.limit_s + state.info["setup_s"]
        request = {"do": "sample", "job": state.job.to_json(), "n": state.timings}
        reply = self._ask(state.job, request, limit)
        if reply is not None:
            self.slot.held.add(state.job.id)
        return reply

    def _is_slow(self, reply: Mapping[str, Any]) -> bool:
        """Whether the chip's clock was well below what this run has seen; such a visit is made once more."""
        recent = self.clocks[-200:]
        return len(recent) >= 8 and reply.get("clock_mhz", 1e9) < SLOW_CLOCK * statistics.median(recent)

    # ending

    def _finish_lot(self, lot: Sequence[Progress]) -> None:
        for p in lot:
            if p.key not in self.finished:
                self._finish(p.key, p.label or "budget", self.ended_by)
        if self.options.vs and len(lot) > 1:
            self._compare(lot)

    def _compare(self, lot: Sequence[Progress]) -> None:
        *others, base = (self.states[p.key] for p in lot)
        if base.job.impl != self.options.vs or base.progress is None or not base.progress.n:
            return
        for s in others:
            if s.progress is None or not s.progress.n or s.progress.label == LOST:
                continue
            known = s.clocks and base.clocks
            clocks = (statistics.median(s.clocks), statistics.median(base.clocks)) if known else None
            result = stats.compare(s.progress.values, base.progress.values, paired=True, clocks=clocks)
            line = {
                "type": "versus",
                "kernel": s.job.kernel,
                "case": {**dict(s.job.case.axes), "seed": s.job.case.seed},
                "cache": s.job.cache,
                "impl": s.job.impl,
                "vs": base.job.impl,
                **vars(result),
            }
            self.versus.append(line)
            self.out.append(line)

    def _finish(self, key: str, status: str, note: str) -> None:
        state = self.states[key]
        clocks: dict[str, Any] = {}
        if state.clocks:
            clocks = {
                "clock_mhz": statistics.median(state.clocks),
                "throttle": dict(state.throttle),
                "slow_clock_visits": state.slow_visits,
            }
        row = rows_.make_row(
            state.job,
            status,
            note,
            common={**self.common, "fingerprint": self.fingerprints[key]},
            ceilings=self.ceilings,
            target=self.options.target,
            info=state.info,
            progress=state.progress,
            clocks=clocks,
        )
        self.rows.append(row)
        self.finished.add(key)
        self.out.append(row)
        if self.out.error and not self.disk_failed:
            self.watcher.warn(f"`{self.out.path}` cannot be written ({self.out.error}); going on")
        self.disk_failed = self.out.error is not None

    def _close(self) -> None:
        """Label and store what is open, whatever ended the run."""
        if hasattr(self, "ceilings") and not self.options.plan_only:
            for lot in self._lots():
                for p in lot:
                    p.close(self.options.target)
                if any(p.key not in self.finished for p in lot):
                    self._finish_lot(lot)
            for state in self.states.values():
                if state.job.id not in self.finished:
                    self._finish(state.job.id, "budget", self.ended_by or "not prepared")
            self.out.append(
                {
                    "type": "end",
                    "promised_s": self.options.budget_s,
                    "used_s": self.countdown.used(),
                    "timed_s": sum(rows_.timed_s(row) for row in self.rows),
                    "seconds": self.seconds,
                }
            )
        self.slot.drop(grace_s=0.0)

    @contextmanager
    def _clocked(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - start, 3)


@contextmanager
def _interrupts() -> Iterator[None]:
    """SIGTERM closes the run as Ctrl-C does."""

    def interrupt(signum: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
