"""One request on the host: its tokens, its text, and when it is finished."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from draftwood.engine.outputs import RequestOutput, RoundRecord, StreamEvent, TokenLogprob
from draftwood.engine.row import Row
from draftwood.engine.sampling_params import SamplingParams
from draftwood.engine.stops import StopStrings
from draftwood.kernels.tree_accept import Done
from draftwood.models.tokenizer import StreamDecoder


@dataclass(eq=False, kw_only=True)
class Request:
    """One sample of a prompt. Its newest token is the next root and in no page.

    The device state of a request is a function of this object, so a batch can be rebuilt at any time.
    """

    index: int
    params: SamplingParams
    stop_ids: tuple[int, ...]
    output: RequestOutput
    decoder: StreamDecoder
    stops: StopStrings

    # The scheduler's account of it.
    arrival: int = -1
    """Its place in the order of `Scheduler.add`, kept over preemptions."""
    most_pages: int = 0
    """Pages for all positions it can ever commit."""
    pages: list[int] = field(default_factory=list)
    """A new list at every placement; it grows with the text. Empty while the request waits."""
    computed: int = 0
    """Positions whose latents and drafter context the pages hold, once the step's work is done."""
    proven: int = 0
    """Those of them that a round has read and found sound: it chose a token after them."""
    placements: int = 0
    overtaken: int = 0
    published: bool = False
    """Whether its prompt's pages have been offered to the cache since it was placed."""
    source: Request | None = None
    """The first sample of its prompt, if it is a further one."""
    followers: list[Request] = field(default_factory=list)
    """Further samples of its prompt, which wait until it has been prefilled."""

    @property
    def finished(self) -> bool:
        return self.output.finish_reason is not None

    @property
    def n_tokens(self) -> int:
        return len(self.output.prompt_token_ids) + len(self.output.token_ids)

    @property
    def growing(self) -> bool:
        """Whether it may yet need more pages than it has."""
        return len(self.pages) < self.most_pages

    def tokens(self, start: int, stop: int) -> list[int]:
        """Those at positions start .. stop - 1 of prompt and output."""
        prompt, output = self.output.prompt_token_ids, self.output.token_ids
        n = len(prompt)
        return prompt[start:stop] + output[max(start - n, 0) : max(stop - n, 0)]

    def row(self) -> Row:
        """What the runner needs to decode it from here."""
        out = self.output
        return Row(
            out.prompt_token_ids,
            list(out.token_ids),
            list(self.pages),
            out.seed,
            self.params,
            self.stop_ids,
        )

    def push(
        self, tokens: list[int], done: Done, record: RoundRecord, logprobs: list[TokenLogprob] | None
    ) -> StreamEvent:
        """Take a round's emitted tokens; a stop string may end the request before the last of them."""
        out = self.output
        spoken = tokens[:-1] if done == Done.STOP else tokens  # a stop token has no text
        if self.stops.any:
            text, taken = self._until_stop(tokens, len(spoken))
        else:
            text, taken = self.decoder.push(spoken), len(tokens)
        if self.stops.hit is None and done != Done.RUNNING:
            text += self.stops.push(self.decoder.flush())
            text += self.stops.flush()
        if taken < len(tokens):
            record = replace(record, emitted=taken, accepted=min(record.accepted, taken))
        out.rounds.append(record)
        out.token_ids.extend(tokens[:taken])
        if logprobs is not None:
            out.logprobs = (out.logprobs or []) + logprobs[:taken]
        if self.stops.hit is not None or done != Done.RUNNING:
            self._finish(done)
        out.text += text
        return StreamEvent(self.index, text, tokens[:taken], out)

    def _until_stop(self, tokens: list[int], spoken: int) -> tuple[str, int]:
        """Text that is safe to show, of the first `spoken` tokens, and how many tokens are taken: all, or up to a stop string."""
        text = ""
        for taken, token in enumerate(tokens, 1):
            if taken <= spoken:
                text += self.stops.push(self.decoder.push([token]))
            if self.stops.hit is not None:
                return text, taken
        return text, len(tokens)

    def fail(self, error: str) -> StreamEvent:
        """End with an error that is no fault of its tokens."""
        self.output.finish_reason, self.output.error = "error", error
        return StreamEvent(self.index, "", [], self.output)

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
        else:
            out.finish_reason = "length"
