"""The processes that run one engine: how they meet, what the first tells the others, and what happens when one is lost.

Rank 0 owns everything that is decided; it sends messages, and every rank acts on each of them in the same way. Where
torchrun has started the ranks they are joined, otherwise rank 0 starts the others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from draftwood.engine.processes import FAREWELL, LOCAL_RANK, RANK, SIZE, STORE, Processes
from draftwood.models.shard import Shard
from draftwood.parallel import ALONE, Ranks

MESSAGE = 4096
"""Bytes of a message that travel at once; the rest of a longer one follows."""
HEADER = 8
NEVER = timedelta(days=365)
"""Ranks wait this long for a message: a lost process is noticed by itself, an idle engine is none."""
SETTLE = 3.0
"""Seconds in which the reason for a lost connection must show."""
POLL = 0.05


class RankError(RuntimeError):
    """Another rank is lost, and with it the engine; names the rank and says what became of it."""


class ReportedError(RuntimeError):
    """This rank has failed, and left word of it for the first."""


class World:
    """All ranks of an engine, seen from one of them. `World()` is one rank alone, which does nothing here."""

    def __init__(self, ranks: Ranks = ALONE, store: Any = None, processes: Processes | None = None) -> None:
        self.ranks, self._store, self._processes = ranks, store, processes
        self._control: Any = None  # process group for messages, on the host
        self._threads = torch.get_num_threads()
        self._is_open = ranks.size > 1
        self._alarm = False
        self.before_end: list[Callable[[], object]] = []
        """What this rank does before it leaves the others, whether or not it leaves them in order."""
        self.numbers = itertools.count()  # of runners
        self.retired: list[int] = []  # runners that the others can forget

    @classmethod
    def open(cls, size: int, device: str, build: Callable[[], object]) -> World:
        """Meet the other ranks, starting them if nobody has; each started one calls `build`.

        Raises ValueError naming `tp` if there cannot be `size` ranks here.
        """
        if size == 1:
            return cls()
        if dist.is_initialized():
            raise ValueError("tp: torch.distributed is in use in this process, by another engine perhaps")
        joined = RANK in os.environ and SIZE in os.environ
        if joined and int(os.environ[SIZE]) != size:
            raise ValueError(f"tp: {size} was asked for, but torchrun started {os.environ[SIZE]} ranks")
        here = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if device == "cuda" and torch.cuda.device_count() < here:
            raise ValueError(f"tp: {here} ranks here need a GPU each; there are {torch.cuda.device_count()}")
        if joined:
            rank, local = int(os.environ[RANK]), int(os.environ.get(LOCAL_RANK, "0"))
            world = cls(Ranks(Shard(rank, size)), _store(rank, size))
        else:
            local, threads = 0, max(1, torch.get_num_threads() // size)
            processes = Processes(size, build, threads)
            world = cls(Ranks(Shard(0, size)), FileStore(processes.store_file, size), processes)
            torch.set_num_threads(threads)
        with world.together(interruptible=True):
            world._meet(torch.device("cuda", local) if device == "cuda" else None)
        return world

    @property
    def is_first(self) -> bool:
        return self.ranks.shard.rank == 0

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the ranks that this one has started."""
        return {} if self._processes is None else self._processes.pids

    def send(self, message: object) -> None:
        """From the first rank to all others; few bytes make one broadcast."""
        body = pickle.dumps(message)
        whole = len(body).to_bytes(HEADER, "little") + body
        first, rest = whole[:MESSAGE].ljust(MESSAGE, b"\0"), whole[MESSAGE:]
        for part in (first, rest):
            if part:
                dist.broadcast(torch.frombuffer(bytearray(part), dtype=torch.uint8), 0, group=self._control)

    def receive(self) -> Any:
        """The first rank's next message."""
        buffer = torch.empty(MESSAGE, dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self._control)
        whole = buffer.numpy().tobytes()
        size = int.from_bytes(whole[:HEADER], "little")
        if (more := size + HEADER - MESSAGE) > 0:
            rest = torch.empty(more, dtype=torch.uint8)
            dist.broadcast(rest, 0, group=self._control)
            whole += rest.numpy().tobytes()
        return pickle.loads(whole[HEADER : HEADER + size])

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        if self.ranks.size > 1:
            dist.barrier(group=self._control)

    @contextlib.contextmanager
    def together(self, *, interruptible: bool = False) -> Iterator[None]:
        """Around what every rank does: when it fails on one, the engine ends on all.

        Raises `RankError` on the first rank if another was the first to fail, and `ReportedError` on the others.
        Unless it is `interruptible`, Ctrl-C waits until all are done, so that it does not end the engine; a second one
        does not wait.
        """
        if self.ranks.size == 1:
            yield
            return
        if not self._is_open:
            raise RankError("the engine is closed, or was ended by an earlier error")
        with contextlib.nullcontext() if interruptible else _interrupts_later():
            try:
                yield
                if self._alarm:
                    raise dist.DistError("a rank was lost")
            except SystemExit:
                raise
            except BaseException as e:
                if not self.is_first:
                    self._report(e)
                    self._abandon()
                    raise ReportedError(f"rank {self.ranks.shard.rank} has failed") from e
                lost = self._lost_rank(e)
                self._abandon()
                if lost is not None:
                    raise lost from e
                raise

    def close(self) -> None:
        """Dismiss the other ranks; may be called twice."""
        if not self._is_open:
            return
        self._is_open = False
        if self.is_first:
            try:
                self.send(None)
            except RuntimeError:  # one was lost since the last message
                self._abandon()
                return
        self._let_go()
        dist.destroy_process_group()
        if self._processes is not None:
            self._processes.end(within=FAREWELL)
            torch.set_num_threads(self._threads)

    def _meet(self, gpu: torch.device | None) -> None:
        rank, size = self.ranks.shard.rank, self.ranks.size
        if gpu is not None:
            torch.cuda.set_device(gpu)
        self._store.set(f"started/{rank}", b"")
        if self._processes is not None:
            while not self._store.check([f"started/{other}" for other in range(size)]):
                for other, how in self._processes.ended().items():
                    raise RankError(f"rank {other} of {size} {how} before it had started")
                time.sleep(POLL)
            if gpu is not None:
                threading.Thread(target=self._watch, daemon=True).start()
        backend = "gloo" if gpu is None else "nccl"
        dist.init_process_group(backend, store=self._store, rank=rank, world_size=size, device_id=gpu)
        self._control = dist.new_group(backend="gloo", timeout=NEVER)

    def _watch(self) -> None:
        """On GPUs a lost rank leaves the others waiting in a kernel: tell them to go on, with whatever result."""
        assert self._processes is not None
        while not self._processes.ended():
            time.sleep(POLL)
        if self._is_open:
            self._alarm = True
            _abort()

    def _abandon(self) -> None:
        """End without a farewell."""
        self._is_open = False
        if self._processes is not None:
            self._processes.end(within=0.0)
            torch.set_num_threads(self._threads)
        self._let_go()
        if not self._alarm:
            _abort()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _let_go(self) -> None:
        while self.before_end:
            self.before_end.pop()()

    def _report(self, e: BaseException) -> None:
        """Leave word of a failure for the first rank."""
        failure = {
            "at": time.time(),
            "secondary": _is_lost_connection(e),
            "text": _text(e),
            "traceback": "".join(traceback.format_exception(e)),
        }
        self._store.set(f"failed/{self.ranks.shard.rank}", json.dumps(failure))

    def _lost_rank(self, e: BaseException) -> RankError | None:
        """Which rank failed first, if `e` is a consequence of that."""
        if not (self._alarm or _is_lost_connection(e)):
            return None
        size, until = self.ranks.size, time.monotonic() + SETTLE
        while True:
            time.sleep(POLL)
            reports = [r for r in range(1, size) if self._store.check([f"failed/{r}"])]
            failures = {r: json.loads(self._store.get(f"failed/{r}")) for r in reports}
            ended = {} if self._processes is None else self._processes.ended()
            for rank, how in ended.items():
                if rank not in failures:
                    return RankError(f"rank {rank} of {size} {how}")
            if time.monotonic() > until or any(not f["secondary"] for f in failures.values()):
                break
        if not failures:
            return None
        rank, first = min(failures.items(), key=lambda item: (item[1]["secondary"], item[1]["at"]))
        if first["text"] == _text(e):  # all have the same fault
            return None
        error = RankError(f"rank {rank} of {size}: {first['text']}")
        error.add_note(first["traceback"])
        return error


def _store(rank: int, size: int) -> Any:
    """Where ranks started by somebody else find each other."""
    if STORE in os.environ:
        return FileStore(os.environ[STORE], size)
    store, _, _ = next(rendezvous("env://", rank, size))
    return store


def _abort() -> None:
    """Let nobody in this process wait for other ranks any longer."""
    if dist.group.WORLD is not None:
        dist.group.WORLD.abort()


def _text(e: BaseException) -> str:
    return f"{type(e).__name__}: {e}"


def _is_lost_connection(e: BaseException) -> bool:
    """Gloo's errors have no type of their own."""
    return type(e) is RuntimeError or isinstance(e, dist.DistError)


@contextlib.contextmanager
def _interrupts_later() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block, or at once if it comes twice."""
    previous = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or previous in (signal.SIG_IGN, None):  # only the main thread may set handlers
        yield
        return
    pending: list[int] = []

    def remember(number: int, frame: Any) -> None:
        if pending:
            signal.default_int_handler(number, frame)
        pending.append(number)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if pending:
        signal.raise_signal(signal.SIGINT)
