"""`write_trace`: one HTML page that shows how a generation went, round by round, tree by tree.

The page stands alone: style, script and data are inside it, and it forbids itself to load anything. All drawing
is done by assets/trace.js from the JSON made here; this module knows nothing about how a round looks.
"""

from __future__ import annotations

import html
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any

from draftwood.engine.outputs import RequestOutput

Decode = Callable[[list[int]], str]


def write_trace(
    path: str | Path, output: RequestOutput, decode: Decode, *, title: str = "draftwood trace"
) -> None:
    """Write the page of one request, made with `trace=True`, to `path`; the file appears complete or not at all.

    Args:
        path: the .html file; one that exists is replaced.
        output: a finished request, or one still running.
        decode: token ids -> text; bytes that are no UTF-8 on their own decode to U+FFFD.
        title: heading of the page.

    Raises:
        ValueError: the output has no rounds, or a round has no trace.
        OSError: `path` cannot be written.
    """
    data = _trace_data(output, decode) | {"title": title}
    # Inside <script> only `<` can end or nest the element; JSON has it in strings only, where an escape is the same.
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    assets = files("draftwood") / "assets"
    parts = {name: (assets / f"trace.{name}").read_text(encoding="utf-8") for name in ("css", "js")}
    parts |= {"title": html.escape(title), "data": embedded}
    template = (assets / "trace.html").read_text(encoding="utf-8")
    _write_atomically(Path(path), re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], template))


def _trace_data(output: RequestOutput, decode: Decode) -> dict[str, Any]:
    """What the page shows, as JSON values: the fields of `RequestOutput` and `RoundRecord`, and their text."""
    if not output.rounds:
        raise ValueError("output.rounds: empty, so there is nothing to trace")
    seen: set[int] = set()
    emitted = []
    for i, record in enumerate(output.rounds):
        if record.trace is None:
            raise ValueError(f"output.rounds[{i}].trace: missing; generate with trace=True")
        seen.update(record.trace.tokens, record.trace.emitted)
        emitted.append(record.trace.emitted[: record.emitted])
    prompt, *texts = _pieces([output.prompt_token_ids, *emitted], decode)
    data = {
        "seed": str(output.seed),  # may exceed the integers that a JavaScript number holds
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "error": output.error,
        "prompt": prompt,
        "prompt_tokens": len(output.prompt_token_ids),
        "output_tokens": len(output.token_ids),
        "tokens_per_round": output.tokens_per_round,
        "tokens_per_second": output.tokens_per_second,
        "stage_seconds": output.stage_seconds,
        "vocab": {str(token): decode([token]) for token in sorted(seen)},
        "rounds": [asdict(r) | {"text": text} for r, text in zip(output.rounds, texts, strict=True)],
    }
    return _compact(data)  # type: ignore[no-any-return]


def _pieces(groups: Sequence[list[int]], decode: Decode) -> list[str]:
    """The text that each group of tokens adds; a character split between groups goes to the last of them."""
    pieces: list[str] = []
    window: list[int] = []
    shown = 0  # characters of decode(window) that the pieces hold
    text = ""
    for tokens in groups:
        window = window + tokens
        text, alone = decode(window), decode(tokens)
        stable = len(text.rstrip("\ufffd"))
        pieces.append(text[shown:stable])
        at_boundary = stable == len(text) and text.endswith(alone)
        window, shown = (tokens, len(alone)) if at_boundary else (window, max(shown, stable))
    if text.endswith("\ufffd"):
        pieces[-1] += text[shown:]
    return pieces


def _compact(value: Any) -> Any:
    """JSON values with floats cut to six digits, and to null where they are not finite."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _compact(item) for key, item in value.items()}
    return [_compact(item) for item in value] if isinstance(value, list) else value


def _write_atomically(path: Path, page: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            draft.write_text(page, encoding="utf-8", newline="\n")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"cannot write the trace ({error.strerror})", str(path)) from error
