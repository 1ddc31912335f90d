"""N-gram / prompt lookup: the latest earlier occurrence of the last tokens, continued.

Saxena 2023 (prompt lookup decoding); LLMA (Yang et al., arXiv:2304.04487).
"""

from collections.abc import Sequence

from .automaton import NONE, Match


class NgramIndex:
    """Incremental index of one text: where each n-gram of min..max tokens last ended with a token after it."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self.sizes = range(max_match, min_match - 1, -1)  # longest first
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens. An n-gram is indexed once a token follows it."""
        before = len(self.tokens)
        self.tokens += tokens
        for n in self.sizes:
            ends = range(max(before, n), len(self.tokens))
            starts = range(ends.start - n, ends.start)
            grams = zip(*(self.tokens[start : start + len(ends)] for start in starts), strict=True)
            self._ends.update(zip(grams, ends, strict=True))

    def match(self, longest: int, k: int) -> Match:
        """The longest suffix of at most `longest` tokens that occurred before, and the k tokens after its latest place.

        A copy that reaches the end of the text goes on with what it copied itself (periodic text).
        """
        for n in self.sizes:
            end = self._ends.get(tuple(self.tokens[-n:])) if n <= min(longest, len(self.tokens)) else None
            if end is not None:
                period = len(self.tokens) - end
                return Match(n, [self.tokens[end + i % period] for i in range(k)])
        return NONE
