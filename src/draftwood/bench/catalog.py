"""What can be measured: kernels, their cases and implementations, peers from files, and the filters over them.

Used by both processes; importing it, and enumerating jobs, never imports torch.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from draftwood.kernels import registry, run_case
from draftwood.kernels.case import Axis, Case, make_case

_PACKAGE = Path(__file__).parent.parent

Cache = Literal["cold", "warm"]
Suite = Literal["small", "bench"]


class UsageError(ValueError):
    """A wrong argument; the message names it and what was expected."""


@dataclass(frozen=True)
class Job:
    """One implementation of one case in one cache state: what becomes a row."""

    case: Case
    impl: str
    cache: Cache

    @property
    def kernel(self) -> str:
        return self.case.kernel

    @property
    def id(self) -> str:
        kernel, axes = self.case.id.split("/", 1)
        return f"{kernel}/{self.impl}/{axes}/{self.cache}"

    def to_json(self) -> dict[str, Any]:
        return {
            "kernel": self.kernel,
            "axes": list(self.case.axes),
            "seed": self.case.seed,
            "impl": self.impl,
            "cache": self.cache,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Job:
        case = Case(data["kernel"], tuple((k, v) for k, v in data["axes"]), data["seed"])
        return Job(case, data["impl"], data["cache"])


@dataclass(frozen=True)
class Peer:
    """An implementation in a file outside the package: KERNEL, NAME and `run(**inputs)`, or `build`.

    `build(case, inputs)` returns a callable without arguments; what it does beforehand is not timed. MASK, where
    given, names what the file computes instead of the kernel (say "causal"); its outputs are then not compared.
    """

    kernel: str
    name: str
    path: Path
    mask: str | None

    @property
    def impl(self) -> str:
        return f"peer:{self.name}"


@dataclass
class Catalog:
    """The package's kernels, plus kernels defined by `extra` files and implementations by `peer` files."""

    peers: dict[str, Peer] = field(default_factory=dict)  # by implementation name
    extra: dict[str, ModuleType] = field(default_factory=dict)  # by kernel

    @staticmethod
    def of_files(peers: Iterable[Path] = (), extra: Iterable[Path] = ()) -> Catalog:
        catalog = Catalog()
        for path in extra:
            module = load_file(path)
            catalog.extra[module.KERNEL] = module
        for path in peers:
            peer = read_peer(path)
            if peer.kernel not in catalog.kernels:
                raise UsageError(f"`{path}`: KERNEL is `{peer.kernel}`; known: {', '.join(catalog.kernels)}")
            catalog.peers[peer.impl] = peer
        return catalog

    @property
    def kernels(self) -> tuple[str, ...]:
        return (*registry.KERNELS, *self.extra)

    def cases(self, kernel: str) -> Any:
        """The kernel's cases module."""
        return self.extra[kernel] if kernel in self.extra else run_case.cases_of(kernel)

    def implementations(self, kernel: str) -> tuple[str, ...]:
        """Names of all implementations of a kernel, peers last."""
        if kernel in self.extra:
            own: Iterable[str] = self.extra[kernel].IMPLEMENTATIONS
        else:
            own = (impl for impl in registry.IMPLEMENTATIONS if registry.exists(kernel, impl))
        return (*own, *(p.impl for p in self.peers.values() if p.kernel == kernel))

    def load(self, kernel: str, impl: str) -> Callable[..., Any]:
        """The function of an implementation, peers excepted. Imports torch for all but `ref`."""
        if kernel in self.extra:
            function: Callable[..., Any] = self.extra[kernel].IMPLEMENTATIONS[impl]
            return function
        return registry.load(kernel, impl)

    def files(self, kernel: str, impl: str) -> list[Path]:
        """The source files whose change makes old timings void, imports within the package included."""
        if impl in self.peers:
            return [*_with_helpers(self.peers[impl].path), *self.files(kernel, "torch")]
        if kernel in self.extra:
            return [Path(str(self.extra[kernel].__file__))]
        folder = f"draftwood.kernels.{kernel}"
        implementation = f"{folder}.{registry.IMPLEMENTATIONS[impl]}"
        return _import_closure((implementation, f"{folder}.cases", f"{folder}.ref"))


def load_file(path: Path) -> ModuleType:
    """Import a Python file by path. Its folder becomes importable, so it may have helpers beside it."""
    if not path.is_file():
        raise UsageError(f"`{path}`: no such file")
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))
    spec = importlib.util.spec_from_file_location(f"bench_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"`{path}`: expected a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def read_peer(path: Path) -> Peer:
    """A peer's constants, read without running the file: it may import anything."""
    if not path.is_file():
        raise UsageError(f"`{path}`: no such file")
    tree = ast.parse(path.read_text(), filename=str(path))
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    for name in ("KERNEL", "NAME"):
        if not isinstance(constants.get(name), str):
            raise UsageError(f'`{path}`: expected a line `{name} = "..."`')
    if not functions & {"run", "build"}:
        raise UsageError(f"`{path}`: expected a function `run(**inputs)` or `build(case, inputs)`")
    mask = constants.get("MASK")
    return Peer(str(constants["KERNEL"]), str(constants["NAME"]), path, None if mask is None else str(mask))


def _with_helpers(path: Path) -> list[Path]:
    """A file, and those beside it that it imports."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            names += [a.name for a in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    return [path, *(file for name in names if (file := path.with_name(f"{name}.py")).is_file())]


@cache
def _import_closure(names: tuple[str, ...]) -> list[Path]:
    """Files of the modules and of everything under `draftwood.kernels` and `draftwood.tree` that they import or compile."""
    seen: dict[str, Path] = {}
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in seen or not name.startswith(("draftwood.kernels.", "draftwood.tree")):
            continue
        base = _PACKAGE.joinpath(*name.split(".")[1:])
        file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
        if file is None:
            continue  # a name inside a module, not a module
        seen[name] = file
        text = file.read_text()
        seen |= {str(path): path for path in file.parent.glob("*.cu") if path.name in text}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                todo += [a.name for a in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                todo += [node.module, *(f"{node.module}.{a.name}" for a in node.names if a.name.islower())]
    return sorted(seen.values())


@dataclass(frozen=True)
class Selection:
    """Which jobs to take. Empty tuples select everything."""

    suite: Suite = "bench"
    kernels: tuple[str, ...] = ()
    impls: tuple[str, ...] = ()
    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # values replace those of the cases
    tags: tuple[str, ...] = ()
    cache: Cache | Literal["declared"] = "declared"
    capability: int = 0  # of the GPU, as Triton writes it; 0 on a CPU
    limit: int | None = None  # cases per kernel, evenly spread


def select(
    catalog: Catalog, chosen: Selection, default_impls: Sequence[str], first_only: bool = False
) -> list[Job]:
    """Jobs in the order to prepare them: the kernels in turns, so that a short budget still sees each of them.

    Without implementations chosen, those of `default_impls` that a kernel has and that serve the case, or with `first_only`
    the first of them: what the engine would run. Peers and kernels from files always come in whole.

    Raises `UsageError` for a kernel, implementation, axis or tag that nothing has.
    """
    kernels = chosen.kernels or catalog.kernels
    _require_known("kernel", kernels, catalog.kernels)
    known = {impl for kernel in kernels for impl in catalog.implementations(kernel)}
    _require_known("implementation", chosen.impls, sorted(known))
    by_kernel = {kernel: _cases(catalog, kernel, chosen) for kernel in kernels}
    for axis in chosen.axes:
        if not any(axis in catalog.cases(k).DEFAULTS for k in kernels):
            raise UsageError(f"`-a {axis}`: none of {', '.join(kernels)} has this axis")
    jobs = []
    for turn in itertools.zip_longest(*by_kernel.values()):
        for case in filter(None, turn):
            declared = catalog.cases(case.kernel).CACHE
            cache = declared if chosen.cache == "declared" else chosen.cache
            has = catalog.implementations(case.kernel)
            own = [
                impl
                for impl in default_impls
                if impl in has and not run_case.refused(case, impl, chosen.capability)
            ]
            own = own[:1] if first_only else own
            usual = has if case.kernel in catalog.extra else (*own, *catalog.peers)
            jobs += [Job(case, impl, cache) for impl in dict.fromkeys(chosen.impls or usual) if impl in has]
    for tag in chosen.tags:
        matching = [job for job in jobs if tag in tags_of(job, chosen.suite)]
        if not matching:
            raise UsageError(f"`--tag {tag}`: no case has it; a tag is a value of a case or `axis=value`")
        jobs = matching
    return jobs


def tags_of(job: Job, suite: str) -> set[str]:
    """What `--tag` matches: `axis=value` of every axis, bare values that are words, suite, cache, implementation."""
    words = {value for _, value in job.case.axes if isinstance(value, str)}
    return {f"{k}={v}" for k, v in job.case.axes} | words | {suite, job.cache, job.impl, job.kernel}


def parse_axes(options: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """`-a T=8,16,32` and `-a B=1:32:pow2` (or `:step`, end included) -> axis -> values, as text."""
    axes: dict[str, tuple[str, ...]] = {}
    for option in options:
        name, equals, values = option.partition("=")
        if not name or not equals or not values:
            raise UsageError(f"`-a {option}`: expected AXIS=VALUE[,VALUE...] or AXIS=FIRST:LAST[:STEP|:pow2]")
        axes[name] = tuple(v for part in values.split(",") for v in _expand(option, part))
    return axes


def _expand(option: str, part: str) -> Iterable[str]:
    if ":" not in part:
        return [part]
    first, last, *step = part.split(":")
    try:
        a, b, by = int(first), int(last), step[0] if step else "1"
        if by == "pow2" and a >= 1:
            return [str(a << i) for i in range(b.bit_length()) if a << i <= b]
        return [str(v) for v in range(a, b + 1, int(by))]
    except ValueError as e:
        raise UsageError(f"`-a {option}`: expected FIRST:LAST[:STEP|:pow2] in integers, got `{part}`") from e


def _cases(catalog: Catalog, kernel: str, chosen: Selection) -> list[Case]:
    module = catalog.cases(kernel)
    cases: list[Case] = module.small() if chosen.suite == "small" else module.bench()
    given = {axis: values for axis, values in chosen.axes.items() if axis in module.DEFAULTS}
    if len(given) < len(chosen.axes):
        return []  # the kernel lacks an axis that was asked for
    changed = []
    for case in cases:
        for values in itertools.product(*given.values()):
            axes = {a: _typed(a, v, module.DEFAULTS[a]) for a, v in zip(given, values, strict=True)}
            changed.append(make_case(kernel, module.DEFAULTS, case.seed, **{**dict(case.axes), **axes}))
    cases = list(dict.fromkeys(changed))
    if chosen.limit is None or len(cases) <= chosen.limit:
        return cases
    return [cases[i * len(cases) // chosen.limit] for i in range(chosen.limit)]


def _typed(axis: str, value: str, default: Axis) -> Axis:
    try:
        return type(default)(value)
    except ValueError as e:
        raise UsageError(f"`-a {axis}={value}`: expected {type(default).__name__}") from e


def _require_known(what: str, names: Iterable[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise UsageError(f"unknown {what} `{name}`; known: {', '.join(known)}")
