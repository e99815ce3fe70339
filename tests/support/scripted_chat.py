"""A model that says what it is told to, and a layout whose tokens are characters."""

from __future__ import annotations

from draftwood.chat.layout import Piece
from draftwood.engine.outputs import RequestOutput, RoundRecord, StreamEvent

STOP = 0


class ScriptedModel:
    """Each reply is a list of rounds; a round is text or tokens. A reply that does not end on its own stops at a limit.

    `prompts` and `params` are what was asked; `running` is how many streams were neither finished nor closed.
    """

    def __init__(self, *replies, max_context=200, error=None):
        self.replies, self.max_context, self.error = list(replies), max_context, error
        self.prompts, self.params, self.running = [], [], 0

    def stream(self, prompts, params):
        self.prompts.append("".join(map(chr, prompts[0])))
        self.params.append(params)
        return self._rounds(list(prompts[0]), params)

    def _rounds(self, prompt, params):
        output = RequestOutput(prompt, params.seed if params.seed is not None else 4711)
        self.running += 1
        try:
            for text in self.replies.pop(0):
                room = params.max_new_tokens - len(output.token_ids)
                tokens = [c if isinstance(c, int) else ord(c) for c in text][:room]
                output.token_ids += tokens
                output.rounds.append(RoundRecord(8, 8, len(tokens) - 1, len(tokens), 1, 2.0, {"verify": 0.5}))
                if set(params.stop_token_ids) & set(tokens):
                    output.finish_reason = "stop"
                elif len(tokens) == room:
                    output.finish_reason = "length"
                yield StreamEvent(0, "", tokens, output)
                if output.finish_reason is not None:
                    return
            output.finish_reason, output.error = "error", self.error
            yield StreamEvent(0, "", [], output)
        finally:
            self.running -= 1


class CharacterLayout:
    """Prompts read `S:...|U:...|A:...|`; in a reply, what stands between < and > is reasoning."""

    continues = False
    stop_token_ids = (STOP,)

    def prompt(self, messages, *, thinking):
        turns = "".join(f"{m.role[0].upper()}:{m.content}|" for m in messages)
        return [ord(c) for c in turns + {None: "", True: "+", False: "-"}[thinking]]

    def reader(self, prompt):
        return CharacterReader()


class CharacterReader:
    tool_calls = ()

    def __init__(self):
        self._kind = "content"

    def push(self, token_ids):
        for c in map(chr, token_ids):
            if c in "<>":
                self._kind = "reasoning" if c == "<" else "content"
            elif c != chr(STOP):
                yield Piece(self._kind, c)

    def finish(self):
        return iter(())
