"""Imports point one way, references need numpy only, and the tree needs no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import draftwood

ROOT = Path(draftwood.__file__).parent
LAYERS = [
    {"tree", "tree_links"},
    {"kernels"},
    {"cache"},
    {"models", "bundled", "parallel"},
    {"scores", "config"},
    {"round", "drafting"},
    {"engine"},
    {"serving", "cli", "doctor", "chat", "trace", "training"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
FILES = sorted(p for p in ROOT.rglob("*.py") if p.relative_to(ROOT).parts[0] not in ("bench", "__init__.py"))


def imported(path: Path) -> set[str]:
    """Modules imported anywhere in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "draftwood" and len(parts) > 1 and parts[1] in RANK:
            assert RANK[parts[1]] <= RANK[own], f"{own} must not import {name}"


@pytest.mark.parametrize("path", sorted(ROOT.glob("kernels/*/ref.py")), ids=lambda p: p.parent.name)
def test_references_import_numpy_and_the_tree_only(path):
    allowed = sys.stdlib_module_names | {"numpy", "draftwood"}
    for name in imported(path):
        parts = name.split(".")
        assert parts[0] in allowed, name
        assert parts[0] != "draftwood" or parts[1] in ("tree", "kernels"), name


def test_the_tree_and_the_references_need_no_torch():
    modules = [f"draftwood.kernels.{p.parent.name}.ref" for p in ROOT.glob("kernels/*/ref.py")]
    code = f"import sys, draftwood.tree, {', '.join(modules)}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_files_stay_short():
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400 or "kernels" in path.parts, (
            f"{path} is over 400 lines"
        )
