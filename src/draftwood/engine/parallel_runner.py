"""A runner whose calls run on every rank: each is one message, which the others act on in `serve`."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

from draftwood.engine.runner import Runner
from draftwood.engine.world import World
from draftwood.round import RoundPlan, Stages
from draftwood.tree import DraftTree


@dataclass(frozen=True)
class Call:
    """A call of a runner's method, by the runner's number; a new number makes a new runner."""

    runner: int
    drafts: bool
    noise_coupled: bool
    method: str
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    retired: tuple[int, ...]
    """Runners that will not be called again."""


class ParallelRunner(Runner):
    """`Runner` on the first of several ranks. Public methods are those of `Runner`, and run on all ranks."""

    def __init__(self, stages: Stages, world: World, **settings: Any) -> None:
        super().__init__(stages, **settings)
        self._world, self._number, self._inside = world, next(world.numbers), False
        weakref.finalize(self, world.retired.append, self._number)

    def _everywhere(self, method: str, *arguments: Any, **options: Any) -> Any:
        local = getattr(super(), method)
        if self._inside:  # part of a call that all ranks are in already
            return local(*arguments, **options)
        stages, world = self.stages, self._world
        call = Call(
            self._number,
            stages.drafting is not None,
            stages.noise_coupled,
            method,
            tuple(_without_host(argument) for argument in arguments),
            options,
            tuple(world.retired),
        )
        with world.together():
            world.retired.clear()
            world.send(call)
            self._inside = True
            try:
                return local(*arguments, **options)
            finally:
                self._inside = False


def _forward(name: str) -> Callable[..., Any]:
    @wraps(getattr(Runner, name))
    def method(self: ParallelRunner, *arguments: Any, **options: Any) -> Any:
        return self._everywhere(name, *arguments, **options)

    return method


for _name, _ in inspect.getmembers(Runner, inspect.isfunction):
    if not _name.startswith("_"):
        setattr(ParallelRunner, _name, _forward(_name))


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
        getattr(runners[call.runner], call.method)(*call.arguments, **call.options)


def _without_host(argument: Any) -> Any:
    """A plan as others get it: only the first rank has the controller that prunes trees."""
    if isinstance(argument, RoundPlan) and argument.prune is not None:
        return replace(argument, prune=_left_to_the_first)
    return argument


def _left_to_the_first(tree: DraftTree) -> DraftTree:
    return tree
