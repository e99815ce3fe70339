"""A model of what the warps of the Gluon verify_attn wait for and arrive at, at random speeds: no deadlock, no wait passed early.

It follows `gluon_kernels._even` and `_odd` and `gluon_loads.produce`, barrier by barrier; data are left out.
"""

from __future__ import annotations

import random

import pytest

STEPS = 60_000
"""Far more than any run takes."""


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and all bytes (here: loads) that were expected have come."""

    def __init__(self, count):
        self.count = self.missing = count
        self.loads = self.phase = 0

    def arrive(self, loads=0):
        assert self.missing > 0
        self.missing -= 1
        self.loads += loads
        self._end()

    def complete(self):
        self.loads -= 1
        self._end()

    def _end(self):
        if self.missing == 0 and self.loads == 0:
            self.phase, self.missing = self.phase + 1, self.count

    def wait(self, phase):
        """Wait for the end of a phase by its parity alone, as the hardware does."""
        while self.phase % 2 == phase % 2:
            yield
        assert self.phase == phase + 1, "passed early, or two phases on"


class Program:
    """One program over tiles of so many blocks. `odd_waits`: the fault there was, a second warpgroup that waits for the even block."""

    def __init__(self, tiles, odd_waits, seed):
        self.tiles, self.odd_waits, self.random = tiles, odd_waits, random.Random(seed)
        self.q_free, self.done, self.turn = Barrier(2), Barrier(2), Barrier(1)
        self.full = [[Barrier(1) for _ in range(3)] for _ in range(2)]  # left, right, rope of either buffer
        self.left_free, self.right_free, self.ready = ([Barrier(1), Barrier(1)] for _ in range(3))
        self.under_way = []

    def even(self):
        evens = odds = 0
        for tile, blocks in enumerate(self.tiles):
            for i in range(0, blocks, 2):
                for part, barrier in enumerate(self.full[0]):
                    yield from barrier.wait(evens)
                    if i and part == 0:
                        yield
                        self.left_free[1].arrive()
                self.turn.arrive()
                yield
                self.ready[0].arrive()
                yield
                self.left_free[0].arrive()
                evens += 1
                if i + 1 < blocks:
                    yield from self.ready[1].wait(odds)
                    odds += 1
            yield
            if blocks % 2 == 0:
                self.left_free[1].arrive()
            yield from self._leave(tile)

    def odd(self):
        evens = odds = 0
        for tile, blocks in enumerate(self.tiles):
            for barrier in self.full[0] if self.odd_waits else ():
                yield from barrier.wait(evens)
            for _ in range(0, blocks - 1, 2):
                yield from self.turn.wait(evens)
                for part in (1, 0, 2):
                    yield from self.full[1][part].wait(odds)
                yield from self.ready[0].wait(evens)
                yield
                self.ready[1].arrive()
                yield
                self.right_free[0].arrive()
                yield
                self.right_free[1].arrive()
                evens += 1
                odds += 1
            if blocks % 2:
                yield from self.ready[0].wait(evens)
                yield
                self.right_free[0].arrive()
                evens += 1
            yield from self._leave(tile)

    def _leave(self, tile):
        self.q_free.arrive()
        yield
        self.done.arrive()
        yield from self.done.wait(tile)

    def produce(self):
        counts = [0, 0]
        for tile, blocks in enumerate(self.tiles):
            for i in range(blocks):
                buffer = i % 2
                if i == 0 and tile:
                    yield from self.q_free.wait(tile - 1)
                for part in (0, 1) if buffer == 0 else (1, 0):
                    free = (self.left_free, self.right_free)[part][buffer]
                    if counts[buffer]:
                        yield from free.wait(counts[buffer] - 1)
                    self._load(self.full[buffer][part], 2 if i == 0 else 1)
                    yield
                self._load(self.full[buffer][2], 2 if i == 0 else 1)
                counts[buffer] += 1

    def _load(self, barrier, loads):
        barrier.arrive(loads)
        self.under_way += [[self.random.randrange(1, 60), barrier] for _ in range(loads)]

    def ends(self):
        warps = {name: getattr(self, name)() for name in ("even", "odd", "produce")}
        speeds = {}
        for step in range(STEPS):
            if step % 300 == 0:
                speeds = {name: self.random.choice([1, 1, 3, 10, 100]) for name in warps}
            name = self.random.choice(list(warps))
            if self.random.randrange(speeds[name]) == 0 and next(warps[name], True) is True:
                del warps[name]
            for load in self.under_way:
                load[0] -= 1
            for load in [load for load in self.under_way if load[0] <= 0]:
                self.under_way.remove(load)
                load[1].complete()
            if not warps:
                return True
        return False


@pytest.mark.parametrize("seed", range(0, 600, 150))
def test_warps_at_any_speed_come_to_an_end(seed):
    assert all(Program(tiles(i), odd_waits=False, seed=i).ends() for i in range(seed, seed + 150))


def test_the_model_finds_the_fault_there_was():
    assert not all(Program(tiles(i), odd_waits=True, seed=i).ends() for i in range(200))


def tiles(seed):
    return random.Random(seed).choices([1, 1, 2, 3, 4, 5, 7, 8], k=seed % 5 + 1)
