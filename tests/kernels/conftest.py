"""What ran on a GPU, kernel by kernel, at the end of the output; where there is a GPU, a skip in `test_gpu.py` is a failure."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

OUTCOMES = ("passed", "failed", "error", "skipped")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if item.path.name != "test_gpu.py":
        return report
    case = getattr(item, "callspec", None) and item.callspec.params.get("case")
    report.user_properties.append(("gpu_kernel", case.kernel if case else "all together"))
    if report.skipped and torch.cuda.is_available():
        report.outcome = "failed"
        report.longrepr = f"skipped, which must not happen on a GPU: {report.longrepr}"
    return report


def pytest_terminal_summary(terminalreporter):
    counts: dict[str, Counter] = {}
    for outcome in OUTCOMES:
        for report in terminalreporter.stats.get(outcome, []):
            for name, kernel in getattr(report, "user_properties", []):
                if name == "gpu_kernel":
                    counts.setdefault(kernel, Counter())[outcome] += 1
    if counts:
        terminalreporter.section("GPU tests by kernel")
    for kernel, n in sorted(counts.items()):
        terminalreporter.write_line(f"{kernel:<16}" + "".join(f"{n[o]:>6} {o}" for o in OUTCOMES))
