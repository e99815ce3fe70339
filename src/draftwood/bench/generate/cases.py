"""What a run of generation measures: settings (batch, lengths, temperature) in modes, and the models they run on.

A setting is a `Case`, a mode takes the place of a kernel's implementation. Used by both processes; never imports torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from draftwood.bench.catalog import Job, UsageError
from draftwood.bench.generate import KERNEL, PLAIN
from draftwood.config import MAX_SLOTS
from draftwood.kernels.case import Axis, Case

AXES: dict[str, tuple[type, float, float]] = {  # type, least, most
    "batch": (int, 1, 4096),
    "prompt": (int, 0, 1 << 24),
    "new": (int, 2, 1 << 24),
    "temperature": (float, 0.0, 1e3),
}
"""Axes of a setting. `prompt` 0 takes prompts of a file as long as they are; the axis `budget` makes modes instead."""

LEAST_ACCEPT = 0.1
"""Lowest imposed acceptance: below it no other rank could be less likely than the first and all of them make up the rest."""


@dataclass(frozen=True)
class Models:
    """What is measured. Paths are texts, so that it travels as JSON."""

    device: str
    dtype: str = "auto"
    model: str | None = None  # None: the bundled pair
    drafter: str | None = None
    synthetic: str | None = None  # a config.json instead of a model
    synthetic_drafter: str | None = None
    layers: int | None = None
    prompts: tuple[str, ...] = ()  # files
    random_text: bool = False
    graphs: bool | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Models:
        return Models(**{**data, "prompts": tuple(data["prompts"])})

    @property
    def text(self) -> str:
        """What the prompts are, as an axis of the cases."""
        if self.random_text or self.synthetic:
            return "random"
        return "+".join(Path(p).name for p in self.prompts) or "source"

    def check(self) -> None:
        """Raise `UsageError` for options that exclude or need each other, or name no file."""
        if self.synthetic and (self.model or self.drafter or self.prompts):
            raise UsageError(
                "`--synthetic`: excludes --model, --drafter and --prompts: its text means nothing"
            )
        if not self.synthetic and (self.synthetic_drafter or self.layers):
            raise UsageError("`--synthetic-drafter`, `--layers`: are of a --synthetic model")
        if bool(self.model) != bool(self.drafter):
            raise UsageError("`--model` and `--drafter`: expected both, or neither for the bundled pair")
        if self.random_text and self.prompts:
            raise UsageError("`--random-text`: excludes --prompts")
        for option, files in (
            ("--synthetic", (self.synthetic, self.synthetic_drafter)),
            ("--prompts", self.prompts),
        ):
            for file in filter(None, files):
                if not Path(file).is_file():
                    raise UsageError(f"`{option} {file}`: no such file")


def make_jobs(
    axes: Mapping[str, Sequence[str]],
    modes: Sequence[str],
    defaults: Mapping[str, Sequence[str]],
    *,
    text: str,
    accepts: Sequence[str] = (),
    seed: int = 0,
) -> list[Job]:
    """Every setting in every mode, plain first.

    Args:
        axes: values as text of any of `AXES`, and of `budget`; `defaults` has those not given.
        modes: of plain, chain, tree; plain is always there.
        accepts: imposed acceptance rates, each a sweep value; empty for a real drafter.

    Raises:
        UsageError: naming the axis, mode or rate, and what was expected.
    """
    for axis in axes:
        if axis not in defaults:
            raise UsageError(f"`-a {axis}`: no such axis; there are: {', '.join(defaults)}")
    given = {**defaults, **axes}
    impls = [PLAIN, *_speculating(modes, given["budget"])]
    values: list[list[tuple[str, Axis]]] = [[(a, _value(a, v)) for v in given[a]] for a in AXES]
    values.append([("text", text)])
    if accepts:
        values.append([("accept", ",".join(f"{rate:g}" for rate in parse_accept(a))) for a in accepts])
    cases = dict.fromkeys(Case(KERNEL, axes_, seed) for axes_ in itertools.product(*values))
    return [Job(case, impl, "warm") for case in cases for impl in impls]


def parse_accept(text: str) -> tuple[float, ...]:
    """`0.8`, or one rate per depth `0.9,0.8,0.7`, the last for all deeper."""
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = (-1.0,)
    if not all(LEAST_ACCEPT <= rate <= 1 for rate in rates):
        raise UsageError(
            f"`--accept {text}`: expected a rate, or one per depth, each from {LEAST_ACCEPT} to 1"
        )
    return rates


def mode_of(impl: str) -> dict[str, Any]:
    """Arguments of `LLM.stream` for a mode: plain, chain, tree:auto or tree:SLOTS."""
    mode, _, budget = impl.partition(":")
    if not budget:
        return {"mode": mode}
    return {"mode": mode, "budget": budget if budget == "auto" else int(budget)}


def acceptance_of(case: Case) -> str | None:
    """`imposed 0.8` where it was set, None where it was earned."""
    accept = dict(case.axes).get("accept")
    return None if accept is None else f"imposed {accept}"


def _speculating(modes: Sequence[str], budgets: Sequence[str]) -> list[str]:
    impls: list[str] = []
    for mode in modes:
        if mode == "chain":
            impls.append(mode)
        elif mode == "tree":
            impls += [f"tree:{_budget(budget)}" for budget in budgets]
        elif mode != PLAIN:
            raise UsageError(f"`--mode {mode}`: expected plain, chain or tree")
    return list(dict.fromkeys(impls))


def _budget(text: str) -> str:
    if text == "auto" or (text.isdecimal() and 2 <= int(text) <= MAX_SLOTS):
        return text
    raise UsageError(f"`-a budget={text}`: expected auto, or 2 to {MAX_SLOTS} slots")


def _value(axis: str, text: str) -> Axis:
    kind, least, most = AXES[axis]
    try:
        value: Axis = kind(text)
    except ValueError:
        value = -1
    if isinstance(value, str) or not least <= value <= most:
        raise UsageError(f"`-a {axis}={text}`: expected {kind.__name__} from {least:g} to {most:g}")
    return value
