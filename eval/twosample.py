"""Two samples of texts, speculative and plain, after the same prefixes: are token frequencies, lengths and the tokens
at each position alike? What the exact test of sampled.py can't: whole continuations, up to their ends.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .goodness import GTest, pool
from .marginals import TAIL, wald

Text = Sequence[int]
Samples = Sequence[tuple[Sequence[Text], Sequence[Text]]]
"""For every prefix as many speculative texts as plain ones."""

BUCKETS = 30  # ids counted for themselves in the token frequencies
LEVEL, POWER = 1e-4, 0.95


def two_sample(samples: Samples) -> dict[str, Any]:
    """p-values of the three comparisons, the least of all (Bonferroni), and the smallest bias that one position's
    comparison would have seen."""
    longest = max(len(text) for pair in samples for side in pair for text in side)
    frequencies = token_frequencies(samples)
    lengths = _test(samples, len)
    places = [_test(samples, _token_at(n)) for n in range(longest)]
    tested = [n for n, test in enumerate(places) if test.dof > 0]
    worst = min((places[n].p_value for n in tested), default=1.0)
    views = (frequencies["p_value"], lengths.p_value, worst * max(1, len(tested)))
    level = LEVEL / (3 * max(1, len(tested)))
    return {
        "texts": sum(len(side) for pair in samples for side in pair), "longest": longest,
        "token_frequencies": frequencies, "lengths": {"p_value": lengths.p_value, "dof": lengths.dof},
        "per_position": [{"position": n, "p_value": places[n].p_value, "dof": places[n].dof} for n in tested],
        "p_value": min(1.0, 3 * min(views)),
        "smallest_bias": min((places[n].smallest_bias(level, POWER) for n in tested), default=None),
        "level": LEVEL, "power": POWER,
    }  # fmt: skip


def _token_at(position: int) -> Callable[[Text], Hashable]:
    return lambda text: text[position] if position < len(text) else None


def _test(samples: Samples, outcome: Callable[[Text], Hashable]) -> GTest:
    """A G-test of homogeneity of an outcome of each text, summed over the prefixes. A prefix whose n texts a side fall
    into cells of pooled counts c has the statistic of both sides against c / 2n, and a degree of freedom less a cell.
    """
    total = GTest()
    for ours, plain in samples:
        a, b = Counter(map(outcome, ours)), Counter(map(outcome, plain))
        cells = sorted(a.keys() | b.keys(), key=str)
        both = np.array([[side[cell] for cell in cells] for side in (a, b)], dtype=np.float64)
        g, dof = homogeneity(both)
        total.statistic += g
        total.dof += dof
        total.contexts += dof > 0
        total.draws += len(ours) // 2 if dof else 0  # a difference of two samples of n varies like one of n / 2
    return total


def homogeneity(both: NDArray[np.float64]) -> tuple[float, int]:
    """G of two rows of counts [2, cells] of equal sums and its degrees of freedom (Sokal & Rohlf, Biometry, chapter 17,
    with Williams' correction); rare cells are pooled."""
    wanted = both.sum(0) / 2
    rows = np.array([pool(row, wanted)[0] for row in both])
    wanted = pool(wanted, wanted)[1]
    rows, wanted = rows[:, wanted > 0], wanted[wanted > 0]
    if len(wanted) < 2:
        return 0.0, 0
    hit = rows > 0
    g = 2.0 * float((rows[hit] * np.log((rows / wanted)[hit])).sum())
    n = float(rows.sum())
    correction = 1 + 3 * ((n / (2 * wanted)).sum() - 1) / (6 * n * (len(wanted) - 1))  # 3: two rows of n / 2
    return g / correction, len(wanted) - 1


def token_frequencies(samples: Samples) -> dict[str, Any]:
    """How often each token comes in a text: texts are the draws, since the tokens of one depend on each other."""
    seen = Counter(token for pair in samples for side in pair for text in side for token in text)
    bucket = {token: n for n, (token, _) in enumerate(seen.most_common(BUCKETS), TAIL + 1)}
    size = TAIL + 1 + len(bucket)
    off, spread = np.zeros(size), np.zeros((size, size))
    for pair in samples:
        for sign, side in zip((1, -1), pair, strict=True):
            counts = np.array([np.bincount([bucket.get(t, TAIL) for t in text], minlength=size) for text in side])
            off += sign * counts.sum(0)
            spread += len(side) * np.cov(counts.T)
    return wald(off, spread)
