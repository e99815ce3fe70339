"""The models shipped in the package: a small MLA + MoE target and its DFlash drafter, in the published formats."""

from __future__ import annotations

from pathlib import Path


def pair() -> tuple[Path, Path]:
    """(target folder, drafter folder)."""
    root = Path(__file__).parent / "pair"
    return root / "target", root / "drafter"
