"""The command line: `draftwood generate`, `chat`, `doctor`, `bench` and `train`.

Text goes to stdout; progress, summaries and errors go to stderr. A wrong argument or an unsound model folder
exits with 2, a difference found by `--compare` with 1.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from draftwood.bench.cli import app as bench_app
from draftwood.byte_bar import byte_bar
from draftwood.chat.cli import chat
from draftwood.config import Mode, parse_budget
from draftwood.control_characters import fit_for
from draftwood.doctor import doctor
from draftwood.training.cli import app as train_app

if TYPE_CHECKING:
    from draftwood.engine.llm import LLM
    from draftwood.engine.outputs import RequestOutput
    from draftwood.engine.sampling_params import SamplingParams

app = typer.Typer(
    name="draftwood",
    help="Lossless draft-tree speculative decoding for MLA models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench")
app.add_typer(train_app, name="train")
stderr = Console(stderr=True, highlight=False)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; `-` reads it from stdin.")],
    model: Annotated[Path | None, typer.Option(help="Target folder; default: the bundled pair.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="DFlash drafter folder.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all tokens.")] = 0,
    top_p: Annotated[float, typer.Option(help="1 keeps all tokens.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="0 keeps all tokens.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text, in every mode.")] = None,
    mode: Annotated[Mode, typer.Option(help="How to draft; the text is the same in all three.")] = "tree",
    budget: Annotated[str, typer.Option(help="Slots per tree, root included, or `auto`.")] = "auto",
    tp: Annotated[int, typer.Option(help="Ranks that share the weights, a GPU each.")] = 1,
    expert_parallel: Annotated[
        bool,
        typer.Option("--expert-parallel", help="With --tp: whole experts per rank, not a share of each."),
    ] = False,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="The same numbers in every batch and tree, bit for bit; slower."
        ),
    ] = False,
    graphs: Annotated[
        bool | None,
        typer.Option(
            "--graphs/--no-graphs",
            help="Replay rounds as CUDA graphs, a round ahead of the host; default: on a GPU.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float64.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    yarn_rule: Annotated[
        Literal["ratio", "factor"] | None,
        typer.Option(help="The drafter's YaRN amplitude; default: as its config suggests."),
    ] = None,
    inner_norm_eps: Annotated[
        Literal["reference", "config"], typer.Option(help="Of the norms in the target's attention.")
    ] = "reference",
    compare: Annotated[bool, typer.Option("--compare", help="Decode plainly too, and compare.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write an HTML page that shows every tree.")] = None,
) -> None:
    """Continue a prompt, and say what speculation gained."""
    with _errors_named():
        from draftwood.engine.llm import LLM
        from draftwood.engine.sampling_params import SamplingParams

        if compare and mode == "plain":
            raise ValueError("--compare: compares with plain decoding, so it needs --mode tree or chain")
        if trace is not None:
            _check_writable(trace)
        text = sys.stdin.read() if prompt == "-" else prompt
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            seed=_seed(seed, temperature, compare),
        )
        settings: dict[str, Any] = {
            "mode": mode,
            "budget": parse_budget(budget),
            "max_batch": 1,
            "tp": tp,
            "expert_parallel": expert_parallel,
            "deterministic": deterministic,
            "graphs": graphs,
        }
        with byte_bar("loading the model", stderr) as progress:
            llm = LLM(
                model,
                drafter,
                dtype=dtype,
                device=device,
                yarn_rule=yarn_rule,
                inner_norm_eps=inner_norm_eps,
                progress=progress,
                **settings,
            )
        if compare:
            with stderr.status("warming up"):
                _warm_up(llm, text)
        output = _run(llm, text, params, show=not as_json, trace=trace is not None)
        plain = llm.generate(text, params, mode="plain")[0] if compare else None
        if trace is not None:
            from draftwood.trace import write_trace

            write_trace(trace, output, llm.tokenizer.decode, title=f"draftwood · {mode}")
        if as_json:
            print(json.dumps(_summary(output, plain) | {"choices": llm.choices}))
        else:
            _print_summary(output, plain, mode, trace)
            for setting, choice in llm.choices.items():
                stderr.print(f"{setting}: {choice}", markup=False)
    if plain is not None and plain.token_ids != output.token_ids:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the `draftwood` command."""
    try:
        app()
    except BrokenPipeError:  # the reader of stdout has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None


@contextmanager
def _errors_named() -> Iterator[None]:
    """Turn errors a user can mend into one line on stderr and exit code 2; everything else keeps its traceback."""
    from draftwood.cache.pages import OutOfPagesError
    from draftwood.kernels import KernelUnavailableError

    try:
        yield
    except BrokenPipeError:
        raise
    except ValidationError as e:
        for error in e.errors():
            _print_error(f"{'.'.join(str(p) for p in error['loc'])}: {error['msg']}")
        raise typer.Exit(2) from e
    except (ValueError, OSError, KernelUnavailableError, OutOfPagesError) as e:
        _print_error(str(e))
        raise typer.Exit(2) from e


def _print_error(message: str) -> None:
    stderr.print(f"error: {fit_for(sys.stderr, message)}", style="red", markup=False, soft_wrap=True)


app.command()(_errors_named()(chat))
app.command()(_errors_named()(doctor))


def _check_writable(path: Path) -> None:
    """Before minutes are spent on what could then not be written."""
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--trace: {path} cannot be written")


def _seed(seed: int | None, temperature: float, compare: bool) -> int | None:
    """Two runs can only be compared under one seed."""
    if seed is None and compare and temperature > 0:
        import secrets

        return secrets.randbelow(2**31)
    return seed


def _warm_up(llm: LLM, prompt: str) -> None:
    """Let thread pools and caches settle, so that the first mode timed is not the slower one for it."""
    from draftwood.engine.sampling_params import SamplingParams

    params = SamplingParams(max_new_tokens=16, ignore_eos=True, seed=0)
    for mode in (None, "plain"):
        llm.generate(prompt, params, mode=mode)


def _run(llm: LLM, prompt: str, params: SamplingParams, *, show: bool, trace: bool) -> RequestOutput:
    """Generate, streaming the text to stdout if `show`."""
    output = None
    for event in llm.stream(prompt, params, trace=trace):
        output = event.output
        if show:
            sys.stdout.write(fit_for(sys.stdout, event.text))
            sys.stdout.flush()
    assert output is not None
    if output.error is not None:
        raise ValueError(output.error)
    if show:
        sys.stdout.write("\n")
    return output


def _summary(output: RequestOutput, plain: RequestOutput | None) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": len(output.token_ids),
        "rounds": len(output.rounds),
        "tokens_per_round": output.tokens_per_round,
        "tokens_per_second": output.tokens_per_second,
        "stage_seconds": output.stage_seconds,
    }
    if plain is not None:
        summary["plain"] = _summary(plain, None)
        summary["identical"] = plain.token_ids == output.token_ids
    return summary


def _print_summary(output: RequestOutput, plain: RequestOutput | None, mode: str, trace: Path | None) -> None:
    table = Table("mode", "tokens", "rounds", "tokens/round", "tokens/s", box=None)
    for name, out in ((mode, output), ("plain", plain)):
        if out is not None:
            table.add_row(
                name,
                str(len(out.token_ids)),
                str(len(out.rounds)),
                f"{out.tokens_per_round:.2f}",
                f"{out.tokens_per_second:.1f}",
            )
    stderr.print()
    stderr.print(table)
    if plain is not None:
        stderr.print(_verdict(output, plain))
    if trace is not None:
        stderr.print(f"trace: {trace}", markup=False)


def _verdict(output: RequestOutput, plain: RequestOutput) -> str:
    if output.token_ids == plain.token_ids:
        speedup = output.tokens_per_second / plain.tokens_per_second
        return f"identical text, {speedup:.2f}x the speed of plain decoding (one run each)"
    pairs = zip(output.token_ids, plain.token_ids, strict=False)
    at = next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(output.token_ids), len(plain.token_ids))
    )
    return f"[red]the texts differ from output token {at} on[/red]"
