"""A runner whose calls run on every rank: each is one message, which the others act on in `serve`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from draftwood.engine.graphs import GraphRunner
from draftwood.engine.runner import Runner
from draftwood.engine.world import World
from draftwood.round import RoundPlan
from draftwood.tree import DraftTree

HERE = frozenset({"collect"})
"""Methods that are the first rank's alone: what a round left is the same everywhere."""


@dataclass(frozen=True)
class Call:
    """A call of a runner's method."""

    runner: int
    """Number of the runner; a new number makes a new one."""
    drafts: bool
    noise_coupled: bool
    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    retired: tuple[int, ...]
    """Runners that will not be called again."""


class ParallelRunner:
    """Any runner, on the first of several ranks: its methods run on all of them but for `HERE`, its other attributes are its own."""

    recovers = False  # what one rank could not do, others may have done

    def __init__(self, local: Runner, world: World) -> None:
        self._local, self._world, self._number = local, world, next(world.numbers)
        weakref.finalize(self, world.retired.append, self._number)
        _forgets(local, world)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._local, name)
        if not callable(value):
            return value
        return partial(self._here if name in HERE else self._everywhere, name)

    def _here(self, method: str, *arguments: Any, **options: Any) -> Any:
        with self._world.together():  # waiting for the device is waiting for all ranks
            return getattr(self._local, method)(*arguments, **options)

    def _everywhere(self, method: str, *arguments: Any, **options: Any) -> Any:
        stages, world = self._local.stages, self._world
        call = Call(
            self._number,
            stages.drafting is not None,
            stages.noise_coupled,
            method,
            tuple(map(_without_host, arguments)),
            {name: _without_host(option) for name, option in options.items()},
            tuple(world.retired.pop() for _ in range(len(world.retired))),
        )
        with world.together():
            world.send(call)
            return getattr(self._local, method)(*arguments, **options)


def serve(world: World, runner_of: Callable[[bool, bool], Runner]) -> None:
    """On another rank than the first: act on its messages until it sends the last.

    `runner_of(drafts, noise_coupled)` makes the counterpart of a runner there.
    """
    runners: dict[int, Runner] = {}
    while (call := world.receive()) is not None:
        for number in call.retired:
            runners.pop(number, None)
        if call.runner not in runners:
            runners[call.runner] = runner_of(call.drafts, call.noise_coupled)
            _forgets(runners[call.runner], world)
        getattr(runners[call.runner], call.method)(*call.arguments, **call.options)


def _forgets(runner: Runner, world: World) -> None:
    """Recordings hold NCCL's communicator, which would wait for ever at the end."""
    if isinstance(runner, GraphRunner):
        world.before_end.append(runner.forget)


def _without_host(argument: Any) -> Any:
    """A plan as others get it: only the first rank has the controller that prunes trees."""
    if isinstance(argument, RoundPlan) and argument.prune is not None:
        return replace(argument, prune=_left_to_the_first)
    return argument


def _left_to_the_first(tree: DraftTree) -> DraftTree:
    return tree
