"""A suffix automaton of one text, kept up to date token by token (Blumer et al. 1985), with how often and where last
each of its substrings occurred. SAM decoding (Hu et al., arXiv:2411.10666) drafts from one; SuffixDecoding (Oliaro et
al., arXiv:2411.04975) follows frequencies, in a suffix tree.

A state stands for the substrings that end at the same places; its link for the longest suffix of them that ends at
more. So the last state's link is the longest suffix of the text that occurred before.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """How many of the last tokens were found, and what is likely to follow."""

    length: int
    tokens: list[int]


NONE = Match(0, [])
COUNTED = 96  # tokens of the longest substrings that are counted: more than any match and draft together


class SuffixAutomaton:
    """At most 2n states for n tokens; a token costs a few steps, and one for each state that counts it."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = []  # of each state: token -> state
        self._link: list[int] = []
        self._length: list[int] = []  # of the longest substring
        self._count: list[int] = []  # occurrences
        self._end: list[int] = []  # where the latest one ends
        self._last = self._state(0, {}, -1, 0, 0)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            self.tokens.append(token)
            self._append(token)

    def match(self, longest: int, k: int) -> Match:
        """The longest suffix of at most `longest` tokens that occurred before, and up to k tokens after it.

        Each is the one that followed most often what is matched and drafted so far, the latest one among equals. Where
        that was never gone on from, its longest suffix that was takes its place (periodic text).
        """
        length = min(self._length[self._link[self._last]], longest) if self.tokens else 0
        at, drafted = self._suffix(length), list[int]()
        while at > 0 and len(drafted) < k:
            while at > 0 and not self._next[at]:
                at = self._link[at]
            if at > 0:
                token, at = max(self._next[at].items(), key=self._weight)
                drafted.append(token)
        return Match(length, drafted)

    def _suffix(self, length: int) -> int:
        """The state of the last `length` tokens."""
        at = 0
        for token in self.tokens[len(self.tokens) - length :]:
            at = self._next[at][token]
        return at

    def _weight(self, follower: tuple[int, int]) -> tuple[int, int]:
        state = follower[1]
        return self._count[state], self._end[state]

    def _append(self, token: int) -> None:
        at, new = self._last, self._state(len(self.tokens), {}, 0, 0, 0)
        while at >= 0 and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        if at >= 0:
            self._link[new] = self._shortest(at, token)
        self._last = new
        deep = self._length[self._link[new]] > COUNTED  # in a text that goes round and round there are many links
        at = self._suffix(COUNTED) if deep else new
        while at > 0:
            self._count[at] += 1
            self._end[at] = len(self.tokens)
            at = self._link[at]

    def _shortest(self, at: int, token: int) -> int:
        """The state of `at` followed by token, without substrings that end at fewer places: split off if needed."""
        to = self._next[at][token]
        if self._length[to] == self._length[at] + 1:
            return to
        split = self._state(
            self._length[at] + 1, self._next[to].copy(), self._link[to], self._count[to], self._end[to]
        )
        self._link[to] = split
        while at >= 0 and self._next[at].get(token) == to:
            self._next[at][token] = split
            at = self._link[at]
        return split

    def _state(self, length: int, following: dict[int, int], link: int, count: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._count.append(count)
        self._end.append(end)
        return len(self._next) - 1
