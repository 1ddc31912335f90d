"""Which tokens come, and where texts end, added up over all contexts: a bias too small for any one of them adds up.

After whatever was written, the next token has the target's own law, so the counts of a token less its exact chances
form a martingale, and their covariance is the sum of those of the draws. That the chances are exact, not those of
a second sample, leaves no noise but the first sample's.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .goodness import MIN_EXPECTED, chance_above

Floats = NDArray[np.float64]

END, TAIL = 0, 1  # buckets: the ids that end a text; all that have no bucket of their own


class Marginals:
    """Observed less expected counts by bucket of ids, and their covariance, for each position of a continuation."""

    def __init__(self, vocab_size: int, frequent: Sequence[int], ends: Collection[int]) -> None:
        own = [token for token in dict.fromkeys(frequent) if token not in ends]
        self.size = 2 + len(own)
        self.bucket = np.full(vocab_size, TAIL)
        self.bucket[own] = np.arange(2, self.size)
        self.bucket[list(ends)] = END
        self.off: dict[int, Floats] = {}
        self.spread: dict[int, Floats] = {}
        self.ended = 0

    def add(self, position: int, counts: Mapping[int, int], probs: Floats) -> None:
        """The tokens that followed one path, and their exact probabilities [V]."""
        total = sum(counts.values())
        p = np.bincount(self.bucket, probs, self.size) / probs.sum()
        seen = np.bincount(self.bucket[list(counts)], list(counts.values()), self.size)
        self.ended += int(seen[END])
        self.off[position] = self.off.get(position, 0.0) + seen - total * p
        self.spread[position] = self.spread.get(position, 0.0) + total * (np.diag(p) - np.outer(p, p))

    def token_frequencies(self) -> dict[str, Any]:
        """How often each token came, over all positions."""
        if not self.off:
            return {"p_value": 1.0, "dof": 0}
        return wald(np.sum(list(self.off.values()), 0), np.sum(list(self.spread.values()), 0))

    def lengths(self) -> dict[str, Any]:
        """Where texts ended, position by position: the law of their lengths."""
        at = [n for n, spread in self.spread.items() if spread[END, END] >= MIN_EXPECTED]
        statistic = sum(self.off[n][END] ** 2 / self.spread[n][END, END] for n in at)
        return {"p_value": chance_above(statistic, len(at)), "dof": len(at), "ended": self.ended}


def wald(off: Floats, spread: Floats) -> dict[str, Any]:
    """off' spread^-1 off, chi-squared with the rank of spread; what varies too little to be normal is left out:
    buckets join the tail, directions are not counted."""
    rare = np.diag(spread) < MIN_EXPECTED
    rare[TAIL] = True
    join = np.vstack([np.eye(len(off))[~rare], rare[None].astype(float)])
    values, vectors = np.linalg.eigh(join @ spread @ join.T)
    kept = values >= MIN_EXPECTED
    statistic = float(((vectors.T @ join @ off)[kept] ** 2 / values[kept]).sum())
    dof = int(kept.sum())
    return {"p_value": chance_above(statistic, dof), "dof": dof}
