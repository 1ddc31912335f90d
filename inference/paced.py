"""Drafts that end when they no longer pay, on a recorded text: the decisions of the loop without its draws."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .acceptance import Round
from .adaptive import Adaptive, Pace
from .drafters.automaton import Match
from .sampling import Sampling


@dataclass(frozen=True)
class Paced:
    """At batch 1. confidence [A,k]: how sure the drafter is of each token of a draft at anchor a, given the recorded
    ones before it; None for lookup alone.

    So drafts are as long as in the loop as far as they are accepted; behind the first token that is not, the loop's
    goes on from another one, and its length is that here only on average.
    """

    known: Adaptive
    sampling: Sampling
    confidence: Tensor | None = None

    def lengths(self, rounds: Sequence[Round], at: int, match: Match, k: int) -> tuple[list[int], int]:
        """(what is drafted of a match, tokens that the drafter drafts where that is nothing), of at most k; rounds: so
        far; at: the anchor."""
        pace = Pace(self.known, [rounds], [self.sampling], reads=True)
        (found,) = pace.cut([match], k)
        k = 0 if found else pace.length(k)
        for n in range(k):
            assert self.confidence is not None
            pace.hear(pace.chances(self.confidence[at, n : n + 1]))
            if pace.ended:
                return found, n + 1
        return found, k
