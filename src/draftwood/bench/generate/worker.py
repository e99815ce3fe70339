"""The process that generates: `python -m draftwood.bench.generate.worker`, in the protocol of `bench.worker`.

`prepare` warms a mode up on a setting and says what a visit will take; `sample` makes one visit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

from draftwood.bench.catalog import Job
from draftwood.bench.generate.cases import Models, mode_of, parse_accept
from draftwood.bench.worker import error_text, is_device_error, serve

WARM_UP_TOKENS = {"cpu": (4, 16), "cuda": (4, inf)}
"""Generated before a mode is timed on a setting: the first time compiles, the second tells what a token takes.

On a GPU the second is a whole visit: graphs are captured for the batch as it shrinks, and as budgets change.
"""


class Session:
    """One engine, and what it is asked for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        from draftwood.bench import device  # imports torch, as all of these do
        from draftwood.bench.generate import models, visits
        from draftwood.bench.generate.synthetic import SyntheticLLM

        self.visit, self.synthetic = visits.visit, SyntheticLLM
        chosen = Models.from_json(config["models"])
        jobs = [Job.from_json(j) for j in config["jobs"]]
        self.llm, self.prompts = models.load(chosen, jobs)
        self.clock = device.clock_reader(chosen.device)
        self.facts = {"device": device.describe(chosen.device), "model": models.describe(chosen, self.llm)}
        self.warm: set[str] = set()
        self.actions: dict[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
            "prepare": self._prepare,
            "sample": self._sample,
        }

    def hello(self) -> dict[str, Any]:
        return self.facts

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return {"status": "done", **self.actions[request["do"]](request)}
        except NotImplementedError as e:
            return {"status": "skipped", "detail": str(e)}
        except Exception as e:  # noqa: BLE001 - whatever the engine raises becomes the case's label
            return {"status": "crash", "detail": error_text(e), "fatal": is_device_error(e)}

    def _prepare(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = Job.from_json(request["job"])
        case = job.case
        need = self.prompts.longest(case["prompt"]) + case["new"]
        if need > self.llm.max_context:
            raise NotImplementedError(
                f"{need} tokens with the prompt; the model has {self.llm.max_context} positions"
            )
        started = time.perf_counter()
        record = self._warm_up(job)
        tokens, count = case["batch"] * case["new"], self.prompts.count(case["prompt"])
        return {
            "estimate_us": record["us_per_token"],
            "visit_s": (record["prefill_ms"] * 1e3 + record["us_per_token"] * tokens) / 1e6,
            "visits": None if count == inf else int(count) // case["batch"],
            "setup_s": time.perf_counter() - started,
        }

    def _warm_up(self, job: Job) -> dict[str, Any]:
        lengths = (min(job.case["new"], n) for n in WARM_UP_TOKENS[self.llm.device])
        records = [self._generate(job, 0, int(n))[0] for n in lengths]
        self.warm.add(job.id)
        return records[-1]

    def _sample(self, request: Mapping[str, Any]) -> dict[str, Any]:
        job = Job.from_json(request["job"])
        if job.id not in self.warm:  # the worker before this one was lost
            self._warm_up(job)
        record, tokens = self._generate(job, int(request["visit"]), job.case["new"])
        return {"timings": [record["us_per_token"]], "record": record, "tokens": tokens, **self.clock.read()}

    def _generate(self, job: Job, visit: int, new: int) -> tuple[dict[str, Any], list[list[int]]]:
        from draftwood.engine.sampling_params import SamplingParams

        case, batch = job.case, job.case["batch"]
        prompts = self.prompts.take(visit * batch, batch, case["prompt"])
        if isinstance(self.llm, self.synthetic):
            self.llm.imposed.impose(parse_accept(case["accept"]))
        params = [
            SamplingParams(
                max_new_tokens=new, temperature=case["temperature"], seed=visit * batch + i, ignore_eos=True
            )
            for i in range(batch)
        ]
        done = self.visit(self.llm, prompts, params, mode_of(job.impl))
        return done.record, done.tokens


if __name__ == "__main__":
    serve(Session)
