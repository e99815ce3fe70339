"""Prompts and parameters, as a user gives them -> requests, checked."""

from __future__ import annotations

import operator
import secrets
from collections.abc import Sequence
from typing import Any

from draftwood.engine.outputs import RequestOutput
from draftwood.engine.request import Request
from draftwood.engine.sampling_params import MAX_SEED, SamplingParams, sample_seed
from draftwood.engine.stops import StopStrings
from draftwood.models.config import TargetConfig
from draftwood.models.tokenizer import StreamDecoder, Tokenizer

Prompt = str | Sequence[int]


def make_requests(
    prompts: Prompt | Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None,
    tokenizer: Tokenizer,
    config: TargetConfig,
) -> list[Request]:
    """One request per prompt. Raises ValueError naming the prompt or the parameter at fault."""
    many = _as_list(prompts)
    if params is not None and not isinstance(params, SamplingParams | Sequence):
        raise ValueError(
            f"params: expected SamplingParams or a sequence of them, got {type(params).__name__}"
        )
    each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
    if len(each) != len(many):
        raise ValueError(f"params: {len(each)} given for {len(many)} prompts")
    return [
        make_request(prompt, one, i, tokenizer, config)
        for i, (prompt, one) in enumerate(zip(many, each, strict=True))
    ]


def make_request(
    prompt: Prompt, params: SamplingParams, index: int, tokenizer: Tokenizer, config: TargetConfig
) -> Request:
    """The request of a prompt's first sample, with the others as its followers."""
    ids = _token_ids(prompt, index, tokenizer, config.vocab_size)
    params.check_tokens(config.vocab_size)
    end = () if params.ignore_eos else config.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*params.stop_token_ids, *end)))
    seed = secrets.randbelow(MAX_SEED) if params.seed is None else params.seed

    def sample(i: int) -> Request:
        return Request(
            index=index,
            params=params,
            stop_ids=stop_ids,
            output=RequestOutput(ids, sample_seed(seed, i), sample=i),
            decoder=StreamDecoder(tokenizer),
            stops=StopStrings(params.stop),
        )

    first, *others = (sample(i) for i in range(params.n))
    for one in others:
        one.source = first
    first.followers = others
    first.output.others = [one.output for one in others]
    return first


def _token_ids(prompt: Prompt, index: int, tokenizer: Tokenizer, vocab: int) -> list[int]:
    try:
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else [operator.index(t) for t in prompt]
    except (TypeError, UnicodeEncodeError) as e:
        raise ValueError(f"prompt {index}: expected text or a sequence of token ids: {e}") from e
    if not ids:
        raise ValueError(f"prompt {index} is empty; at least one token is needed")
    for token in ids:
        if not 0 <= token < vocab:
            raise ValueError(f"prompt {index}: token id {token} is outside the vocabulary 0..{vocab - 1}")
    return ids


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = list(prompts)
    return [items] if items and not any(isinstance(i, str | Sequence) for i in items) else items
