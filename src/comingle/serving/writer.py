"""Tokens as the text that they add, as soon as it is certain."""

from __future__ import annotations

from collections.abc import Sequence

from comingle.models.generation import UNFINISHED, added_text, cut_at
from comingle.models.pretrained import PreTrainedTokenizerBase


class Writer:
    """The text of one answer: characters come whole, and nothing is told of which a stop may be made.

    It follows the text of the tokens ``after`` which it stands, of which the last few are enough.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        stops: Sequence[str],
        *,
        ends: Sequence[int],
        after: Sequence[int] = (),
    ) -> None:
        self.tokenizer, self.stops, self.ends = tokenizer, tuple(stops), frozenset(ends)
        self.tokens = list(after)
        self.read, self.before = len(after), 0  # tokens[before:read] are text already, and give the next one its place
        self.text = ""
        self.told = 0
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that is certain after one more token."""
        self.tokens.append(token)
        self._read(last=token in self.ends)
        self.stopped = token in self.ends or any(stop in self.text for stop in self.stops)
        return self.finish() if self.stopped else self._tell(len(self.text) - self._held())

    def finish(self) -> str:
        """The rest of the text, up to a stop."""
        self._read(last=True)
        self.text = cut_at(self.text, self.stops)
        return self._tell(len(self.text))

    def _read(self, *, last: bool) -> None:
        """Each token is decoded after the one before it: some tokenizers drop a space where their text begins."""
        added = added_text(self.tokenizer, self.tokens[self.before : self.read], self.tokens[self.read :])
        if added.endswith(UNFINISHED) and not last:  # what follows may make another character of it
            return
        self.text += added
        if self._decode(self.read, len(self.tokens)):  # a special token is no text, and gives no place
            self.before = self.read
        self.read = len(self.tokens)

    def _decode(self, start: int, stop: int) -> str:
        return str(self.tokenizer.decode(self.tokens[start:stop], skip_special_tokens=True))

    def _held(self) -> int:
        """How many of the last characters a stop may begin with."""
        most = len(self.text) + 1
        begun = (n for stop in self.stops for n in range(1, min(len(stop), most)) if self.text.endswith(stop[:n]))
        return max(begun, default=0)

    def _tell(self, upto: int) -> str:
        said, self.told = self.text[self.told : max(self.told, upto)], max(self.told, upto)
        return said
