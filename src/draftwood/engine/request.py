"""One request on the host: its tokens, its text, its pages, and when it is finished."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from draftwood.engine.batch import Row
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
    def n_tokens(self) -> int:
        return len(self.output.prompt_token_ids) + len(self.output.token_ids)

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    def row(self) -> Row:
        """What the runner needs to decode it from here."""
        out = self.output
        return Row(
            out.prompt_token_ids, list(out.token_ids), self.pages, out.seed, self.params, self.stop_ids
        )

    def push(
        self, tokens: list[int], done: Done, record: RoundRecord, logprobs: list[TokenLogprob] | None
    ) -> StreamEvent:
        """Take a round's emitted tokens; a stop string may end the request before the last of them."""
        out, text, taken = self.output, "", 0
        for token in tokens:
            taken += 1
            if done != Done.STOP or taken < len(tokens):  # a stop token has no text
                text += self.stops.push(self.decoder.push([token]))
            if self.stops.hit is not None:
                break
        if self.stops.hit is None and done != Done.RUNNING:
            text += self.stops.push(self.decoder.flush())
            text += self.stops.flush()
        out.rounds.append(replace(record, emitted=taken, accepted=min(record.accepted, taken)))
        out.token_ids.extend(tokens[:taken])
        if logprobs is not None:
            out.logprobs = (out.logprobs or []) + logprobs[:taken]
        self._finish(done)
        out.text += text
        return StreamEvent(self.index, text, tokens[:taken], out)

    def _finish(self, done: Done) -> None:
        out = self.output
        if self.stops.hit is not None:
            out.finish_reason, out.stop_reason = "stop", self.stops.hit
        elif done == Done.STOP:
            out.finish_reason, out.stop_reason = "stop", out.token_ids[-1]
        elif done == Done.FAILED:
            out.finish_reason = "error"
            out.error = (
                f"no token could be chosen for output position {len(out.token_ids)}: "
                "the target's logits were not finite there, or logit_bias forbids every token"
            )
        elif done != Done.RUNNING:
            out.finish_reason = "length"
