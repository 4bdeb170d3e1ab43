"""Token ids in, the text a client may see out, one token at a time.

Knows: how characters and stop strings straddle tokens. Does not know: requests, finish reasons of the engine.

    token ─► TextStream ─ whole characters ─► StopFilter ─ no stop, nor the beginning of one ─► client

Both hold back as little as is safe: bytes that may yet become a character, and the longest tail that is the
beginning of a stop string. What has been given out is never taken back or repeated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tokenizer import REPLACEMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .tokenizer import Tokenizer

CONTEXT_TOKENS = 8  # of the prompt: decoders strip the leading space of the first token they see
LONGEST_CHARACTER = 4  # bytes, so also tokens
MAX_WINDOW = 32


class TextStream:
    """Decodes a sliding window of tokens: from the last border (a token after which all text was whole) to
    now.

    The library's DecodeStream does the same but keeps everything while bytes stay invalid, without bound,
    raises when a byte-fallback decoder rewrites such a run, and has no flush. Text that ends in U+FFFD may
    still change: all of that tail for the first `LONGEST_CHARACTER` tokens, after which the bytes are known
    to be wrong and only the last few can belong to a new character.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _context(tokenizer, prompt)
        self._border = len(self._window)
        self._text = tokenizer.decode(self._window)
        self._given = len(self._text)  # characters of `_text` already given out
        self._unsettled = 0  # tokens since text was last given out

    def push(self, token: int) -> str:
        if self._tokenizer.is_special(token):
            return ""
        self._window.append(token)
        self._unsettled += 1
        self._text = self._tokenizer.decode(self._window)
        settled = len(self._text.rstrip(REPLACEMENT))
        if self._unsettled > LONGEST_CHARACTER:
            settled = max(settled, len(self._text) - LONGEST_CHARACTER + 1)
        new = self._text[self._given : settled]
        self._given = max(self._given, settled)
        if new:
            self._unsettled = 0 if settled == len(self._text) else LONGEST_CHARACTER
        self._slide(at_border=new != "" and settled == len(self._text))
        return new

    def flush(self) -> str:
        """What is left: bytes that never became a character read U+FFFD."""
        new, self._given = self._text[self._given :], len(self._text)
        return new

    def _slide(self, *, at_border: bool) -> None:
        if at_border:
            keep = self._window[self._border :]
            self._border = len(keep)
        elif len(self._window) > MAX_WINDOW:
            keep = self._window[-MAX_WINDOW // 2 :]
            self._border = 0
        else:
            return
        waiting = len(self._text) - self._given
        text = self._tokenizer.decode(keep)
        self._window, self._text, self._given = keep, text, max(0, len(text) - waiting)


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """The shortest tail of the prompt that has text and cuts no character in two."""
    tail = [token for token in prompt[-CONTEXT_TOKENS:] if not tokenizer.is_special(token)]
    for begin in range(len(tail) - 1, -1, -1):
        text = tokenizer.decode(tail[begin:])
        if text and REPLACEMENT not in text:
            return tail[begin:]
    return []


class StopFilter:
    """Cuts text at the first stop string, whichever tokens it is made of: the match that ends first, the
    longest of those."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """Returns the text that is safe to show and whether a stop string ended in `text`."""
        if not self._stops:
            return text, False
        before = len(self._held)
        self._held += text
        if may_stop:
            begin = self._match(before)
            if begin is not None:
                shown, self._held = self._held[:begin], ""
                return shown, True
        hold = next((n for n in range(len(self._held), 0, -1) if self._begins_stop(self._held[-n:])), 0)
        cut = len(self._held) - hold
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, False

    def flush(self) -> str:
        """The end has come, so what was held is no stop string."""
        shown, self._held = self._held, ""
        return shown

    def _match(self, before: int) -> int | None:
        """Where the match begins; only one that ends past `before` is new (an older one came before
        `may_stop`)."""
        ends_at = [
            (at + len(stop), at)
            for stop in self._stops
            if (at := self._held.find(stop, max(0, before - len(stop) + 1))) >= 0
        ]
        return min(ends_at)[1] if ends_at else None

    def _begins_stop(self, tail: str) -> bool:
        return any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops)


class Detokenizer:
    """One choice's text. `num_chars` counts characters decoded so far, shown or held: the offset at which the
    next token's text begins."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str], min_tokens: int
    ) -> None:
        self._stream = TextStream(tokenizer, prompt)
        self._filter = StopFilter(stops)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self.num_chars = 0
        self.stopped = False

    def push(self, token: int) -> str:
        """The text this token adds to what may be shown. After a stop string `stopped` is True and no more
        tokens may come."""
        assert not self.stopped
        self._num_tokens += 1
        return self._show(self._stream.push(token))

    def flush(self) -> str:
        """The end of the tokens. May still complete a stop string (of U+FFFD, say)."""
        shown = self._show(self._stream.flush())
        return shown if self.stopped else shown + self._filter.flush()

    def _show(self, text: str) -> str:
        self.num_chars += len(text)
        shown, self.stopped = self._filter.push(text, may_stop=self._num_tokens >= self._min_tokens)
        return shown
