"""Runs on disk: one JSON object a line, appended, flushed and synced as each case finishes.

Lines are of type `run` (a header per process), `row`, `versus` and `end`. A full disk loses nothing that was on it: the
torn line is cut off, the rest is kept in memory and tried again. Later rows of the same job replace earlier ones.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from draftwood.bench.catalog import Catalog, Job, UsageError

Row = dict[str, Any]


@dataclass
class Store:
    """An open run file."""

    path: Path
    pending: list[str] = field(default_factory=list)
    error: OSError | None = None

    def append(self, line: Mapping[str, Any]) -> None:
        """Write a line through to the disk. On failure it stays pending, with `error` set; nothing is raised."""
        self.pending.append(json.dumps(line) + "\n")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while self.pending:
                self._write(self.pending[0].encode())
                self.pending.pop(0)
            self.error = None
        except OSError as e:
            self.error = e

    def _write(self, data: bytes) -> None:
        with open(self.path, "ab", buffering=0) as f:
            whole = f.tell()
            try:
                written = f.write(data)
                if written != len(data):
                    raise OSError(28, f"wrote {written} of {len(data)} bytes", str(self.path))
                os.fsync(f.fileno())
            except OSError:
                if os.path.isfile(self.path):
                    os.truncate(self.path, whole)
                raise


@dataclass
class Run:
    """A stored run, read back."""

    path: Path
    headers: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)  # the last one of each job, in the order first written
    versus: list[dict[str, Any]] = field(default_factory=list)  # likewise
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def header(self) -> dict[str, Any]:
        return self.headers[-1] if self.headers else {}


def job_key(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """What makes two rows the same measurement: kernel, implementation, case, cache."""
    return row["kernel"], row["impl"], json.dumps(row["case"], sort_keys=True), row["cache"]


def read_run(path: Path) -> Run:
    """Read a run. A torn last line (a kill in mid-write) is left out; any other fault names its line."""
    if not path.is_file():
        raise UsageError(f"`{path}`: no such run")
    run = Run(path)
    rows: dict[tuple[str, ...], Row] = {}
    versus: dict[tuple[str, ...], dict[str, Any]] = {}
    lines = path.read_text().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            kind = entry["type"]
        except (ValueError, KeyError, TypeError) as e:
            if number == len(lines) and not line.endswith("\n"):
                break
            raise UsageError(f"`{path}` line {number}: expected a JSON object with `type`: {e}") from e
        if kind == "run":
            run.headers.append(entry)
        elif kind == "row":
            rows[job_key(entry)] = entry
        elif kind == "versus":
            versus[(*job_key(entry), entry["vs"])] = entry
        elif kind == "end":
            run.end = entry
    run.rows, run.versus = list(rows.values()), list(versus.values())
    return run


def cut_torn_line(path: Path) -> None:
    """Before appending to a run that was killed in mid-write."""
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        os.truncate(path, data.rfind(b"\n") + 1)


def reusable(
    run: Run, fingerprints: Mapping[tuple[str, str, str, str], str], statuses: Collection[str]
) -> list[Row]:
    """Rows of a run that need no second measuring: those with the same fingerprint and one of these labels (none: any)."""
    return [
        row
        for row in run.rows
        if fingerprints.get(job_key(row)) == row["fingerprint"]
        and (not statuses or row["status"] in statuses)
    ]


def fingerprint(catalog: Catalog, job: Job, versions: Mapping[str, str | None], device: str) -> str:
    """Hash of everything a timing depends on: sources, case, versions, device."""
    parts = [job.id, device, *(f"{k}={v}" for k, v in sorted(versions.items()))]
    parts += [f"{p.name}:{_digest(p)}" for p in catalog.files(job.kernel, job.impl)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@cache
def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def versions() -> dict[str, str | None]:
    """Versions of what runs the kernels, read without importing them."""
    import platform

    return {"python": platform.python_version(), "torch": _version("torch"), "triton": _version("triton")}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The package's git commit, `+dirty` if the tree has changes; None outside a repository."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", ".")
        return git("rev-parse", "--short=12", "HEAD") + ("+dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def newest(folder: Path) -> Path:
    """The newest run in a folder."""
    runs: Sequence[Path] = sorted(folder.glob("*.jsonl"), key=lambda p: p.stat().st_mtime)
    if not runs:
        raise UsageError(f"`{folder}`: no runs there yet; give the path of one")
    return runs[-1]


_NESTED = {"type", "case", "timings_us", "throttle", "figures", "visits"}


def flat(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Rows for CSV: case axes as text, each figure with its interval, single timings and visits left out."""
    return [
        {
            **{k: v for k, v in row.items() if k not in _NESTED},
            "case": axes_text(row["case"]),
            **{name: median for name, (median, _, _) in row.get("figures", {}).items()},
            **{f"{name}_low": low for name, (_, low, _) in row.get("figures", {}).items()},
            **{f"{name}_high": high for name, (_, _, high) in row.get("figures", {}).items()},
        }
        for row in rows
    ]


def axes_text(case: Mapping[str, Any]) -> str:
    return ",".join(f"{k}={v}" for k, v in case.items())
