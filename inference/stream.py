"""Text of ids that arrive bit by bit: streaming detokenisation, stop strings. Knows nothing about tensors."""

from collections.abc import Sequence

from conf.errors import UserError

from .text import Text


class Detokenizer:
    """Text of ids that arrive bit by bit: all that `push` and `flush` return is `text.decode` of all ids."""

    def __init__(self, text: Text) -> None:
        self._text = text
        self._ids: list[int] = []  # a window: the piece told last, for its spaces, and what is not told yet
        self._told = 0  # how many ids of the window are told
        self.pending = ""  # decoded but not final: it ends inside a character

    def push(self, ids: Sequence[int]) -> str:
        """The text that became final with `ids`; nothing while the last character lacks bytes."""
        self._ids.extend(ids)
        self.pending = self._fresh()
        if not self.pending or self.pending.endswith("\ufffd"):
            return ""
        return self._tell()

    def flush(self) -> str:
        """Whatever is left at the end, an unfinished character as U+FFFD."""
        return self._tell()

    def _fresh(self) -> str:
        told = self._text.decode(self._ids[: self._told])
        return self._text.decode(self._ids)[len(told) :]

    def _tell(self) -> str:
        fresh, self.pending = self.pending, ""
        self._ids = self._ids[self._told :]
        self._told = len(self._ids)
        return fresh


class StopChecker:
    """Watches one response for stop strings, also ones that span tokens."""

    def __init__(self, text: Text, strings: Sequence[str]) -> None:
        """Raises UserError for an empty string, which would stop everything."""
        if not all(strings):
            raise UserError("a stop string is empty; leave it out, or give it at least one character")
        special = set(text.tokenizer.all_special_tokens)
        self._strings = tuple(strings)
        # Special tokens have no text once decoded, so they are known by id.
        self._ids = {text.tokenizer.convert_tokens_to_ids(s) for s in strings if s in special}
        self._detokenizer = Detokenizer(text)
        self.whole = ""  # the text so far in whole characters
        self._searched = 0  # no stop string starts before this character
        self._cut: int | None = None

    @property
    def text(self) -> str:
        """The text so far, cut before the first stop string."""
        return (self.whole + self._detokenizer.pending)[: self._cut]

    @property
    def settled(self) -> str:
        """What can be shown: no later token changes it or makes it part of a stop string."""
        if self._cut is not None:
            return self.text
        begun = (n for s in self._strings for n in range(1, len(s)) if self.whole.endswith(s[:n]))
        return self.whole[: len(self.whole) - max(begun, default=0)]

    def push(self, token_id: int) -> bool:
        """Add the next token; True when a stop string is complete with it (and ever after)."""
        if self._cut is not None:
            return True
        self.whole += self._detokenizer.push([token_id])
        # Bytes of an unfinished character can't be part of a match, what stands before them can.
        sure = self.whole + self._detokenizer.pending.rstrip("\ufffd")
        found = [at for s in self._strings if (at := sure.find(s, self._searched)) >= 0]
        if found or token_id in self._ids:
            self._cut = min(found, default=len(sure))
        self._searched = max(0, len(sure) - max(map(len, self._strings), default=1) + 1)
        return self._cut is not None
