"""One run of any suite: plan, prepare, measure in rounds, store. The parent's side; never imports torch.

Whatever is measured does, the run goes on: the worker is replaced, the case in flight gets its label, and every finished
case is on disk. The whole command keeps to its budget. What is measured, and what a row says of it, is a subclass's.
"""

from __future__ import annotations

import signal
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from draftwood.bench import rows as rows_
from draftwood.bench import store
from draftwood.bench.catalog import Job
from draftwood.bench.countdown import Countdown
from draftwood.bench.planner import LOST, MIN_VISITS, Progress, Scheduler, make_plan, visited
from draftwood.bench.state import Options, State, Watcher
from draftwood.bench.stats import Comparison
from draftwood.bench.supervisor import Slot, StartWorker, WorkerLost

STRIKES = 2
SLOW_CLOCK = 0.75
MEASURING_SHARE = 0.4
"""Of the time left after the start, kept for measuring however long preparing takes."""


class BaseSuite(ABC):
    KEPT: tuple[str, ...] = ("ok",)
    """Rows so labelled need no second measuring when a run is resumed."""

    def __init__(
        self,
        jobs: Sequence[Job],
        options: Options,
        start: StartWorker,
        countdown: Countdown,
        out: store.Store,
        watcher: Watcher,
        min_visits: int = MIN_VISITS,
    ) -> None:
        self.jobs, self.options = list(jobs), options
        self.slot = Slot(start, jobs, countdown.left)
        self.countdown, self.out, self.watcher = countdown, out, watcher
        self.states = {job.id: State(job) for job in jobs}
        self.rows: list[store.Row] = []
        self.versus: list[dict[str, Any]] = []
        self.losses: dict[tuple[str, str], list[str]] = {}  # statuses, by kernel and implementation
        self.finished: set[str] = set()
        self.clocks: list[float] = []
        self.seconds: dict[str, float] = {}
        self.min_visits = 1 if options.once else min_visits
        self.begun = False
        self.ended_by = ""
        self.disk_failed = False

    # what a suite is about

    @abstractmethod
    def _learn_facts(self, hello: Mapping[str, Any]) -> dict[str, Any]:
        """From the worker's first words to fields of the run's header; may ask it more. Raises `WorkerLost`."""

    @abstractmethod
    def _fingerprint(self, job: Job) -> str:
        """Hash of everything a timing of the job depends on."""

    @abstractmethod
    def _expect(self, state: State, reply: Mapping[str, Any]) -> Progress:
        """From the reply to `prepare`: the progress to be made, with what a visit takes; sets the timings of one."""

    @abstractmethod
    def _row(self, state: State, status: str, note: str, common: Mapping[str, Any]) -> store.Row:
        """What is stored of a job that is finished."""

    @abstractmethod
    def _compared(self, state: State, base: State) -> Comparison | None:
        """A job against the one it was measured beside; None where there is nothing to compare."""

    def _keep(self, state: State, reply: Mapping[str, Any]) -> None:
        """A visit's reply, for what it says beside timings."""
        return

    def _after_turn(self, lot: Sequence[Progress]) -> None:
        """All of a lot have been visited once more."""
        return

    def _is_slower(self) -> bool:
        """Whether something is slower than it should be: exit code 1."""
        return any(v["verdict"] == "slower" for v in self.versus)

    # the run

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
                    for p in lot if lot not in plan.tried else ():
                        self._finish(
                            p.key, "budget", f"the minimum takes {self.min_visits * p.visit_s:.2g} s"
                        )
                with self._clocked("measure"):
                    self._measure(plan.tried)
            except KeyboardInterrupt:
                self.ended_by = "interrupted"
                self.watcher.warn("interrupted: closing")
            finally:
                self._close()
        return rows_.exit_code(self.rows, self._is_slower(), self.options.once)

    # beginning

    def _begin(self) -> None:
        self.watcher.phase("starting the worker", 0)
        hello = self.slot.hello()
        self.device = hello["device"]
        if self.device.get("shared_by_others"):
            self.watcher.warn("other processes hold memory of this device: they may disturb the timings")
        self.versions = {**store.versions(), "torch": self.device["torch"], "python": self.device["python"]}
        self.common: dict[str, Any] = {
            "device": self.device["name"],
            **self.versions,
            "commit": store.commit(),
        }
        facts = self._learn_facts(hello)
        self.fingerprints = {job.id: self._fingerprint(job) for job in self.jobs}
        self.begun = True
        if not self.options.plan_only:
            self.out.append(
                {
                    "type": "run",
                    "time": store.now(),
                    "argv": list(self.options.argv),
                    "budget_s": self.options.budget_s,
                    "target": self.options.target,
                    "device_facts": self.device,
                    **facts,
                    **self.common,
                }
            )
        self._resume()

    def _resume(self) -> None:
        """Keep what an earlier run has; with `vs`, of a case all or nothing, for a pair is measured together."""
        if self.options.resume is None:
            return
        run = store.read_run(self.options.resume)
        keys = {job.id: store.job_key(rows_.blank_row(job, "", "")) for job in self.jobs}
        fingerprints = {keys[job.id]: self.fingerprints[job.id] for job in self.jobs}
        statuses = () if self.options.keep_failed else self.KEPT
        rows = {store.job_key(row): row for row in store.reusable(run, fingerprints, statuses)}
        if self.options.vs:
            missing = {(job.case, job.cache) for job in self.jobs if keys[job.id] not in rows}
            for job in self.jobs:
                if (job.case, job.cache) in missing:
                    rows.pop(keys[job.id], None)
        for job in self.jobs:
            if keys[job.id] in rows:
                del self.states[job.id]
        self.rows += rows.values()
        self.versus += [v for v in run.versus if store.job_key(v) in rows]
        self.watcher.warn(f"resuming: {len(rows)} of {len(self.jobs)} rows are still valid")

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
        state.progress = self._expect(state, reply)

    def _ask(self, job: Job, request: Mapping[str, Any], limit_s: float) -> dict[str, Any] | None:
        """The worker's reply, or None: then the job is labelled, or it was the run's time that ended."""
        rest = [s.job for s in self.states.values() if s.info is None and s.job.id not in self.finished]
        try:
            reply = self.slot.ask(request, limit_s, rest)
        except WorkerLost as e:
            if e.status == "timeout" and self.countdown.left() <= 0:
                self.ended_by = f"the time ran out while `{job.id}` ran"
            else:
                self._lose(job, e.status, str(e))
            return None
        self.slot.held.difference_update(reply.pop("evicted", ()))
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
            self._after_turn(lot)
            scheduler.judge(lot)
            if not scheduler.is_open(lot):
                self._finish_lot(lot)

    def _visit(self, state: State) -> None:
        if state.progress is None or state.job.id in self.finished or self.ended_by:
            return
        start = time.monotonic()
        reply = self._sample(state)
        if reply is not None and self._is_slow(reply):
            state.slow_visits += 1
            reply = self._sample(state)
        if reply is None:
            if state.job.id in self.finished:
                state.progress.label = LOST
            return
        if "clock_mhz" in reply:
            self.clocks.append(reply["clock_mhz"])
            state.clocks.append(reply["clock_mhz"])
            state.throttle.update(reply["throttle"])
        self._keep(state, reply)
        state.progress.add(reply["timings"], time.monotonic() - start)

    def _sample(self, state: State) -> dict[str, Any] | None:
        assert state.progress is not None
        assert state.info is not None
        limit = 2.0 + 20 * state.progress.visit_s
        if state.job.id not in self.slot.held:
            limit += self.options.limit_s + state.info["setup_s"]
        request = {"do": "sample", "job": state.job.to_json(), "n": state.timings, "visit": state.progress.n}
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
        if self.options.vs and len(lot) > 1:
            self._compare(lot)
        for p in lot:
            if p.key not in self.finished:
                self._finish(p.key, p.label or "budget", self.ended_by)

    def _compare(self, lot: Sequence[Progress]) -> None:
        *others, base = (self.states[p.key] for p in lot)
        if base.job.impl != self.options.vs or base.progress is None or not base.progress.n:
            return
        for s in others:
            if s.progress is None or not s.progress.n or s.progress.label == LOST:
                continue
            result = self._compared(s, base)
            if result is None:
                continue
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
        row = self._row(state, status, note, {**self.common, "fingerprint": self.fingerprints[key]})
        self.rows.append(row)
        self.finished.add(key)
        self.out.append(row)
        if self.out.error and not self.disk_failed:
            self.watcher.warn(f"`{self.out.path}` cannot be written ({self.out.error}); going on")
        self.disk_failed = self.out.error is not None

    def _close(self) -> None:
        """Label and store what is open, whatever ended the run."""
        if self.begun and not self.options.plan_only:
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
