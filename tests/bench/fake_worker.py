"""A worker without torch: answers in the protocol of the real one, its behaviour named by the implementation.

fast, dear (300 ms), half (half the time of fast), silent (never answers), stubborn (and ignores SIGTERM), dies,
dies_later (at its third visit), stalls_later (likewise, and never answers), evicted (by the next that is prepared; its first visit takes 2.2 s), slow_clock, late (its kernels are compiled when it is asked for the third time),
never (nor ever).
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections import Counter

from draftwood.bench.catalog import Job

LOG = os.environ.get("FAKE_WORKER_LOG")
VISITS = Counter()
ASKED = Counter()
TIMES = {"half": 500.0, "dear": 300_000.0}


def prepare(impl):
    if impl in ("silent", "stubborn"):
        if impl == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    ASKED[impl] += 1
    if impl == "never" or (impl == "late" and ASKED[impl] < 3):
        time.sleep(0.05)
        return {"pending": True}
    if impl == "dies":
        print("last words of the worker", file=sys.stderr)
        os._exit(7)
    us = TIMES.get(impl, 1000.0)
    return {
        "bytes": 1000,
        "flops": 1000,
        "checked": "unchecked" if impl.startswith("peer:") else "ref",
        "estimate_us": us,
        "calls": 1,
        "method": "fake",
        "launch_us": None,
        "compile_s": 0.0,
        "setup_s": 0.0,
    }


def sample(impl, n):
    VISITS[impl] += 1
    if impl == "dies_later" and VISITS[impl] == 3:
        os._exit(7)
    if impl == "evicted" and VISITS[impl] == 1:
        time.sleep(2.2)
    if impl == "stalls_later" and VISITS[impl] == 3:
        time.sleep(600)
    us = TIMES.get(impl, 1000.0)
    time.sleep(us / 1e6)
    if impl == "suspect":
        us = 1e-9
    timings = [us * random.uniform(0.999, 1.001) for _ in range(n)]
    slow = impl == "slow_clock" and random.random() < 0.2
    return {
        "timings": timings,
        "clock_mhz": 600.0 if slow else 1800.0,
        "throttle": ["power cap"] if slow else [],
    }


def main():
    json.loads(sys.stdin.readline())
    facts = {"name": "fake", "torch": "0", "python": "3", "memory_bytes": 1 << 30}
    print(json.dumps({"device": facts, "start_s": 0.0}), flush=True)
    held = []
    for line in sys.stdin:
        request = json.loads(line)
        impl = request.get("job", {}).get("impl")
        if LOG and request["do"] == "sample":
            with open(LOG, "a") as f:
                f.write(f"{impl}\n")
        if request["do"] == "ceilings":
            tflops = {"float32": 1.0}
            reply = {"memory_gbps": 100.0, "cache_gbps": 100.0, "cache_bytes": 1 << 20, "tflops": tflops}
        elif request["do"] == "prepare":
            reply = {**prepare(impl), "evicted": held}
            held = [Job.from_json(request["job"]).id] if impl == "evicted" else []
        else:
            reply = sample(impl, request["n"])
        print(json.dumps({"status": "done", **reply}), flush=True)


if __name__ == "__main__":
    main()
