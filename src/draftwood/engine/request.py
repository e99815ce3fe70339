"""One request on the host: its tokens, its text, its pages, and when it is finished."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from draftwood.engine.outputs import RequestOutput, RoundRecord, StreamEvent, TokenLogprob
from draftwood.engine.sampling_params import SamplingParams
from draftwood.engine.stops import StopStrings
from draftwood.kernels.tree_accept import Done
from draftwood.models.tokenizer import StreamDecoder


@dataclass
class Request:
    """The device state of a request is a function of this object, so a batch can be rebuilt at any time."""

    index: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    output: RequestOutput
    decoder: StreamDecoder
    stops: StopStrings
    pages: list[int] = field(default_factory=list)

    @property
    def root(self) -> int:
        """The newest token; its KV is not in the pages yet."""
        return (self.output.token_ids or self.output.prompt_token_ids)[-1]

    @property
    def n_tokens(self) -> int:
        return len(self.output.prompt_token_ids) + len(self.output.token_ids)

    @property
    def prefix_len(self) -> int:
        """Positions in the pages: every token but the root."""
        return self.n_tokens - 1

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def push(
        self, tokens: list[int], done: Done, record: RoundRecord, logprobs: list[TokenLogprob] | None
    ) -> StreamEvent:
        """Take a round's emitted tokens; a stop string may end the request before the last of them."""
        out = self.output
        text, taken = "", 0
        for token in tokens:
            taken += 1
            is_stop = done == Done.STOP and taken == len(tokens)
            if not is_stop:
                text += self.stops.push(self.decoder.push([token]))
            if self.stops.hit is not None:
                out.finish_reason, out.stop_reason = "stop", self.stops.hit
                break
        out.rounds.append(replace(record, emitted=taken))
        out.token_ids.extend(tokens[:taken])
        if logprobs is not None:
            out.logprobs = (out.logprobs or []) + logprobs[:taken]
        if not self.finished and done != Done.RUNNING:
            out.finish_reason = "stop" if done == Done.STOP else "length"
            out.stop_reason = tokens[-1] if done == Done.STOP else None
            text += self.stops.push(self.decoder.flush())
            if self.stops.hit is None:
                text += self.stops.flush()
        out.text += text
        return StreamEvent(self.index, text, tokens[:taken], out)

    def fail(self, message: str) -> StreamEvent:
        """End with an error; what was produced so far stays."""
        self.output.finish_reason, self.output.error = "error", message
        return StreamEvent(self.index, "", [], self.output)
