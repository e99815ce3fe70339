"""Token arrays of a packed corpus, as step 2 writes them."""

from __future__ import annotations

import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def read_tokens(folders: Sequence[Path], name: str) -> np.ndarray:
    """[n] u16: the parts NAME*.xz of all folders in the order of their names, each name once."""
    files = sorted({f.name: f for folder in folders for f in folder.glob(f"{name}*.xz")}.items())
    if not files:
        raise SystemExit(f"no {name}*.xz in {', '.join(map(str, folders))}")
    return np.concatenate([np.frombuffer(lzma.decompress(f.read_bytes()), np.uint16) for _, f in files])
